"""Kullback-Leibler divergence of a candidate's next-token distributions from a base's, position by position.

The statistics are those of llama-perplexity's ``--kl-divergence`` (tools/perplexity/perplexity.cpp), computed from
float32 logits in float64 instead of from a base that was first rounded to 16 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Tokens = NDArray[np.integer]

WITHIN_RUN = "standard error over the positions of one run; neither run-to-run variation nor a paired interval"
"""What every `*_within_run` figure is, for whoever prints it."""

_LOGITS_AT_ONCE = 1 << 16  # the temporaries of one step stay in a core's second-level cache
_LEAST_LOG_PROBABILITY = np.float32(-16)  # of a 16-bit base; llama-perplexity leaves out what lies at or below it


class KldError(ValueError):
    """Logits, tokens or a base file that cannot be compared."""


@dataclass(frozen=True)
class Scores:
    """What n positions gave. A position with a logit that is not finite has no finite `kld`.

    `kld` float64 [n] in nats; `dp` float64 [n], the candidate's probability of the token that follows less the
    base's; `same_top` bool [n], whether both find the same token likeliest (the first of equals).
    """

    kld: Doubles
    dp: Doubles
    same_top: NDArray[np.bool_]


def score(base: Floats, candidate: Floats, tokens: Tokens) -> Scores:
    """Score logits float32 [n, vocabulary] of the candidate against the base's; `tokens` [n] are those that follow.

    KldError when the shapes do not fit. Equal logits give exactly 0.
    """
    _check(base.shape, candidate, tokens)
    scores = _empty(len(tokens))
    for part in _parts(candidate):
        b, c = _Softmax(base[part]), _Softmax(candidate[part])
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite stays so and is counted
            expected = np.einsum("nv,nv->n", b.weights, b.shifted - c.shifted) / b.total
            scores.kld[part] = expected - (np.log(b.total) - np.log(c.total))
            scores.dp[part] = c.probability(tokens[part]) - b.probability(tokens[part])
        scores.same_top[part] = b.top == c.top
    return scores


def score_records(base: NDArray[np.uint16], candidate: Floats, tokens: Tokens) -> Scores:
    """As `score`, against 16-bit records of a KLD base file, uint16 [n, record width], as llama-perplexity does.

    A record's probabilities do not sum to 1 exactly and its unlikely tokens are left out, so self against self is not
    exactly 0 here, and a value can be slightly negative.
    """
    _check((len(base), candidate.shape[-1]), candidate, tokens)
    scores = _empty(len(tokens))
    for part in _parts(candidate):
        c = _Softmax(candidate[part])
        logs = log_probabilities(base[part], candidate.shape[1])
        likely = logs.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            counted = np.where(logs > _LEAST_LOG_PROBABILITY, np.exp(likely), 0)
            scores.kld[part] = np.einsum("nv,nv->n", counted, likely - c.shifted + np.log(c.total)[:, None])
            following = np.take_along_axis(likely, tokens[part, None], axis=1)[:, 0]
            scores.dp[part] = c.probability(tokens[part]) - np.exp(following)
        scores.same_top[part] = logs.argmax(axis=1) == c.top
    return scores


def surprise(logits: Floats, tokens: Tokens) -> Doubles:
    """Nats of surprise, float64 [n], that logits float32 [n, vocabulary] leave at the tokens [n] that follow."""
    distribution = _Softmax(logits)
    return -np.log(distribution.probability(tokens))


def log_probabilities(records: NDArray[np.uint16], vocabulary: int) -> Floats:
    """Log-probabilities float32 [n, vocabulary] of base file records uint16 [n, record width]."""
    scale, least = np.ascontiguousarray(records[:, :4]).view(np.float32).T[:, :, None]
    logs: Floats = records[:, 4 : 4 + vocabulary] * scale + least
    return logs


class _Softmax:
    """Softmax of logits [n, v] in float64, not yet divided: `weights` = exp(`shifted`), `total` = their sum."""

    def __init__(self, logits: Floats) -> None:
        self.top = logits.argmax(axis=1)
        peak = np.take_along_axis(logits, self.top[:, None], axis=1)
        with np.errstate(invalid="ignore"):
            self.shifted: Doubles = np.subtract(logits, peak, dtype=np.float64)
            self.weights: Doubles = np.exp(self.shifted)
        self.total: Doubles = self.weights.sum(axis=1)

    def probability(self, tokens: Tokens) -> Doubles:
        weight: Doubles = np.take_along_axis(self.weights, tokens[:, None], axis=1)[:, 0]
        return weight / self.total


def _check(shape: tuple[int, ...], candidate: Floats, tokens: Tokens) -> None:
    if candidate.ndim != 2 or shape != candidate.shape or tokens.shape != candidate.shape[:1]:
        raise KldError(
            f"cannot compare base logits {shape} with candidate logits {candidate.shape} and tokens {tokens.shape}; "
            "give [n, vocabulary] twice and [n]"
        )
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < candidate.shape[1]:
        raise KldError(f"a token lies outside the vocabulary of {candidate.shape[1]}; is this the model's tokenizer?")


def _empty(n: int) -> Scores:
    return Scores(np.empty(n), np.empty(n), np.empty(n, dtype=np.bool_))


def _parts(logits: Floats) -> list[slice]:
    step = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    return [slice(start, start + step) for start in range(0, len(logits), step)]


@dataclass(frozen=True)
class KldStatistics:
    """One run. KLD in nats, shares and probabilities as fractions of 1.

    When any position is not finite every statistic is NaN, so that no bound on it can be met; `nonfinite` says how
    many positions there were.
    """

    positions: int
    nonfinite: int
    median: float
    mean: float
    mean_within_run: float
    p90: float
    p99: float
    p99_9: float
    maximum: float
    minimum: float
    same_top: float
    same_top_within_run: float
    rms_dp: float
    rms_dp_within_run: float


@dataclass
class KldRun:
    """Collects scores block by block; keeps one float per position and running sums of the rest."""

    _kld: list[Doubles] = field(default_factory=list)
    _same_top: int = 0
    _dp2: float = 0.0
    _dp4: float = 0.0

    def add(self, scores: Scores) -> None:
        """Take in the next positions."""
        self._kld.append(scores.kld)
        self._same_top += int(scores.same_top.sum())
        squares = np.square(scores.dp)
        self._dp2 += float(squares.sum())
        self._dp4 += float(np.square(squares).sum())

    @property
    def kld(self) -> Doubles:
        """KLD of every position so far, float64 [n], in the order they came."""
        return np.concatenate([np.empty(0), *self._kld])

    def statistics(self) -> KldStatistics:
        """The statistics of all positions so far; KldError when there are none."""
        kld = self.kld
        n = len(kld)
        if n == 0:
            raise KldError("there is no scored position to make statistics of")
        nonfinite = n - int(np.isfinite(kld).sum())
        if nonfinite:
            return KldStatistics(n, nonfinite, *[math.nan] * 12)
        median, p90, p99, p99_9 = np.quantile(kld, [0.5, 0.9, 0.99, 0.999]).tolist()
        same_top = self._same_top / n
        rms = math.sqrt(self._dp2 / n)
        return KldStatistics(
            positions=n,
            nonfinite=0,
            median=median,
            mean=float(kld.mean()),
            mean_within_run=_standard_error(float(kld.sum()), float(np.square(kld).sum()), n),
            p90=p90,
            p99=p99,
            p99_9=p99_9,
            maximum=float(kld.max()),
            minimum=float(kld.min()),
            same_top=same_top,
            same_top_within_run=_standard_error(self._same_top, self._same_top, n),
            rms_dp=rms,
            rms_dp_within_run=_standard_error(self._dp2, self._dp4, n) / (2 * rms) if rms else 0.0,
        )


def _standard_error(total: float, squares: float, n: int) -> float:
    """Standard error of a mean from a sum and a sum of squares; NaN for a single value."""
    if n < 2:
        return math.nan
    return math.sqrt(max(squares / n - (total / n) ** 2, 0) / (n - 1))


def similarity(delta_kld: float) -> float:
    """exp(-dKLD), the published tables' likeness of two caches; no probability and no task accuracy."""
    return math.exp(-delta_kld)


@dataclass(frozen=True)
class MedianChange:
    """How far the median moved, `median(after) - median(before)`, with the interval of a paired bootstrap."""

    change: float
    low: float
    high: float
    confidence: float


def median_change(
    before: Doubles, after: Doubles, *, seed: int, confidence: float = 0.95, resamples: int = 2000
) -> MedianChange:
    """Paired bootstrap (percentile method) on the medians of two runs over the same positions, float64 [n] each.

    Positions are drawn together, so what both runs share cancels. They are drawn one by one: where neighbouring
    positions err together the true interval is wider. All figures are NaN when a value is not finite. KldError when
    the runs are empty or not of equal length.
    """
    if before.shape != after.shape or not before.size:
        raise KldError(f"runs over {before.shape} and {after.shape} positions cannot be paired")
    if not (np.isfinite(before).all() and np.isfinite(after).all()):
        return MedianChange(math.nan, math.nan, math.nan, confidence)
    rng = np.random.default_rng(seed)
    n = len(before)
    order_before, order_after = before.argsort(), after.argsort()
    changes = np.empty(resamples)
    for i in range(resamples):
        times = np.bincount(rng.integers(n, size=n), minlength=n)
        changes[i] = _resampled_median(after, order_after, times) - _resampled_median(before, order_before, times)
    low, high = np.quantile(changes, [(1 - confidence) / 2, (1 + confidence) / 2]).tolist()
    return MedianChange(float(np.median(after) - np.median(before)), low, high, confidence)


def _resampled_median(values: Doubles, order: NDArray[np.intp], times: NDArray[np.intp]) -> float:
    """Median of `values`, each taken `times` times, given their sorting `order`: without sorting every resample."""
    reached = times[order].cumsum()
    middle = order[np.searchsorted(reached, [(len(values) - 1) // 2, len(values) // 2], side="right")]
    return float(values[middle].mean())
