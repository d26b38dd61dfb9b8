"""How long things take on a machine that others use too: paired, interleaved measurement and figures with intervals.

Nothing here assumes a shape of the noise. Intervals come from ranks, so a few measurements that took ten times as long
neither move a figure nor widen its interval; where much of the machine is noise the interval is wide, and a figure whose
interval does not fit between the limits decides nothing.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure and the interval that holds the true one with `confidence` (0 to 1); infinite ends say nothing."""

    value: float
    low: float
    high: float
    confidence: float

    def lies_within(self, least: float = -math.inf, most: float = math.inf) -> bool | None:
        """True where the whole interval lies from `least` to `most`, False where none of it does, else None.

        So an interval wider than the limits is never True. None too where an end is not a number.
        """
        if least <= self.low and self.high <= most:
            return True
        if self.high < least or most < self.low:
            return False
        return None


def interleaved(arms: Mapping[str, Callable[[], float]], blocks: int) -> dict[str, Doubles]:
    """Measure every arm once in each block; returns seconds, float64 [blocks], by name.

    The order turns around from block to block (A B, B A, ...), so that a machine that slows down over the whole does not
    count against one arm. A block before the first, which warms caches, is not returned. Garbage is not collected
    meanwhile.

    Args:
        arms: functions that do the work once and return the seconds it took.
        blocks: how many times, 1 or more.

    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    order = list(arms)
    collects = gc.isenabled()
    gc.disable()
    try:
        for _ in range(blocks + 1):
            for name in order:
                seconds[name].append(arms[name]())
            order.reverse()
    finally:
        if collects:
            gc.enable()
    return {name: np.array(taken[1:]) for name, taken in seconds.items()}


def median(samples: npt.ArrayLike, confidence: float = 0.95) -> Estimate:
    """The median of independent samples, float [n], with the interval between two of them that the sign test gives.

    The interval holds the true median at least as often as `confidence` says whatever the distribution (Conover, Practical
    Nonparametric Statistics, 3.2). Samples too few for that, 5 at 0.95, give an infinite interval. NaN anywhere makes
    every figure NaN.
    """
    ordered = np.sort(np.asarray(samples, np.float64))
    n = len(ordered)
    if n == 0 or np.isnan(ordered).any():
        return Estimate(math.nan, math.nan, math.nan, confidence)
    outside, below = 0, 0.0  # samples left out at either end, and the chance that the median lies among them
    while outside <= n // 2 and 2 * (below + math.comb(n, outside) / 2**n) <= 1 - confidence:
        below += math.comb(n, outside) / 2**n
        outside += 1
    value = float(np.median(ordered))
    if outside == 0:
        return Estimate(value, -math.inf, math.inf, confidence)
    return Estimate(value, float(ordered[outside - 1]), float(ordered[n - outside]), confidence)


def ratio(seconds: npt.ArrayLike, reference: npt.ArrayLike, confidence: float = 0.95) -> Estimate:
    """How many times as long as the reference, from paired measurements float [n] each, such as `interleaved` gives.

    The median over pairs of the quotient: what slows both halves of a pair cancels. ValueError where they are not pairs
    of positive times.
    """
    taken, against = np.asarray(seconds, np.float64), np.asarray(reference, np.float64)
    _require_pairs(taken, against)
    if (taken <= 0).any() or (against <= 0).any():
        raise ValueError("a time is not above 0")
    logs = median(np.log(taken / against), confidence)
    value, low, high = np.exp([logs.value, logs.low, logs.high]).tolist()
    return Estimate(value, low, high, confidence)


def _require_pairs(taken: Doubles, against: Doubles) -> None:
    if taken.shape != against.shape or taken.ndim != 1:
        raise ValueError(f"{taken.shape} and {against.shape} measurements are not pairs")


_RESAMPLES = 2000  # of pairs; the ends of a 95 % interval then vary by a few percent of its width
_SEED = 0


def ratio_of_sums(seconds: npt.ArrayLike, reference: npt.ArrayLike, confidence: float = 0.95) -> Estimate:
    """How many times as long as the reference all together, from paired measurements float [n] each.

    For pairs that are not repetitions of one thing, such as the steps of a task, of which the long ones count for more. The
    interval is that of the ratio over pairs drawn again and again with repetition (the bootstrap; Efron 1979), with draws
    that follow from a fixed seed. Unlike `ratio` it is moved by a pair that took ten times as long, and widened by it. Pairs
    too few for the sign test of `median`, 5 at 0.95, give an infinite interval here too; a reference that took no time makes
    every figure NaN. ValueError where they are not pairs, or a time is below 0.
    """
    taken, against = np.asarray(seconds, np.float64), np.asarray(reference, np.float64)
    _require_pairs(taken, against)
    if (taken < 0).any() or (against < 0).any():
        raise ValueError("a time is below 0")
    n, whole = len(taken), float(against.sum())
    if whole == 0:
        return Estimate(math.nan, math.nan, math.nan, confidence)
    value = float(taken.sum()) / whole
    if 2 / 2**n > 1 - confidence:
        return Estimate(value, -math.inf, math.inf, confidence)
    drawn = np.random.default_rng(_SEED).integers(0, n, (_RESAMPLES, n))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = taken[drawn].sum(axis=1) / against[drawn].sum(axis=1)
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2]).tolist()
    return Estimate(value, min(low, value), max(high, value), confidence)


def symmetric(times: Estimate) -> Estimate:
    """How many times as long the slower of two takes, 1 or more, from a ratio of either to the other."""
    value, low, high = (math.log(end) if end > 0 else -math.inf for end in (times.value, times.low, times.high))
    logs = size(Estimate(value, low, high, times.confidence))
    return Estimate(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high), times.confidence)


def size(figure: Estimate) -> Estimate:
    """How large a figure is whatever its sign."""
    ends = (abs(figure.low), abs(figure.high))
    least = 0.0 if figure.low <= 0 <= figure.high else min(ends)
    return Estimate(abs(figure.value), least, max(ends), figure.confidence)


def largest(figures: Mapping[str, Estimate]) -> tuple[str, Estimate]:
    """The largest of several figures, with an interval for it, and the name of the one that seems to be it."""
    name = max(figures, key=lambda name: figures[name].value)
    several = figures.values()
    return name, replace(figures[name], low=max(f.low for f in several), high=max(f.high for f in several))


def smallest(figures: Mapping[str, Estimate]) -> tuple[str, Estimate]:
    """The smallest of several figures, as `largest`."""
    name = min(figures, key=lambda name: figures[name].value)
    several = figures.values()
    return name, replace(figures[name], low=min(f.low for f in several), high=min(f.high for f in several))


@dataclass(frozen=True)
class AffineFit:
    """Seconds per token as `at_zero` + `per_token` x tokens of context, both with intervals.

    `at_zero` in seconds, `per_token` in seconds per token of context. A decode of the document's model is 31.3 ms +
    4.6e-6 s per token.
    """

    at_zero: Estimate
    per_token: Estimate
    _context: Doubles
    _seconds: Doubles

    def seconds(self, context: float, tokens: int = 1) -> float:
        """Seconds for `tokens` tokens one after the other, the first of them on `context` tokens."""
        return tokens * (self.at_zero.value + self.per_token.value * (context + (tokens - 1) / 2))

    def rise(self, context: float) -> Estimate:
        """What `context` tokens add to the time of a token, as a share of its time without any; may be negative."""
        confidence = self.per_token.confidence
        value = _share(self.per_token.value, self.at_zero.value, context)
        slopes = (self.per_token.low, self.per_token.high)
        if not np.isfinite(slopes).all():
            return Estimate(value, -math.inf, math.inf, confidence)
        ends = []
        for slope in slopes:
            zero = median(self._seconds - slope * self._context, confidence)
            ends += [_share(slope, zero.low, context), _share(slope, zero.high, context)]
        return Estimate(value, min(ends), max(ends), confidence)


def _share(slope: float, zero: float, context: float) -> float:
    return slope * context / zero if zero > 0 else math.inf


def affine_fit(context: npt.ArrayLike, seconds: npt.ArrayLike, confidence: float = 0.95) -> AffineFit:
    """Fit seconds per token, float [n], to tokens of context, float [n], of any number of depths (two at least).

    The slope is the median of all slopes between two points of different depth, its interval that of Kendall's rank
    correlation (Theil 1950, Sen 1968): right for noise of any shape that is alike at all depths, and unmoved while less
    than about 29 % of the points are wild. For a prefill in pieces give the mean context and the seconds per token of
    each piece. ValueError where there are not two depths, or a value is not finite.
    """
    x, y = np.asarray(context, np.float64), np.asarray(seconds, np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"{x.shape} depths and {y.shape} times are not pairs")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("a depth or a time is not finite")
    first, second = np.triu_indices(len(x), 1)
    steps = x[second] - x[first]
    apart = steps != 0
    if not apart.any():
        raise ValueError("all times are of one depth; a fit needs two")
    slopes = np.sort((y[second] - y[first])[apart] / steps[apart])
    slope = float(np.median(slopes))
    left_out = (len(slopes) - NormalDist().inv_cdf((1 + confidence) / 2) * _deviation_of_kendall(x)) / 2
    outside = math.floor(left_out)
    zero = float(np.median(y - slope * x))
    if outside < 1:
        anything = (-math.inf, math.inf, confidence)
        return AffineFit(Estimate(zero, *anything), Estimate(slope, *anything), x, y)
    low, high = float(slopes[outside - 1]), float(slopes[-outside])
    zeros = [median(y - end * x, confidence) for end in (high, low)]
    at_zero = Estimate(zero, min(end.low for end in zeros), max(end.high for end in zeros), confidence)
    return AffineFit(at_zero, Estimate(slope, low, high, confidence), x, y)


def _deviation_of_kendall(x: Doubles) -> float:
    """Standard deviation of Kendall's sum of signs where y has no trend, with ties in x."""
    n = len(x)
    _, counts = np.unique(x, return_counts=True)
    ties = float((counts * (counts - 1) * (2 * counts + 5)).sum())
    return math.sqrt((n * (n - 1) * (2 * n + 5) - ties) / 18)
