"""Figures from times: right where the machine is quiet, and undecided, never wrong, where it is not."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from conformance.harness.measure.timing import (
    Estimate,
    affine_fit,
    interleaved,
    largest,
    median,
    ratio,
    ratio_of_sums,
    size,
    smallest,
    symmetric,
)

Floats = NDArray[np.float64]
Noise = Callable[[np.random.Generator, tuple[int, ...]], Floats]

# Factors with median 1 by which a machine makes a time longer or shorter, from none to preemption all the time.
NOISES: dict[str, Noise] = {
    "normal": lambda rng, shape: 1 + 0.05 * rng.standard_normal(shape),
    "lognormal": lambda rng, shape: np.exp(0.3 * rng.standard_normal(shape)),
    "heavy tails": lambda rng, shape: np.exp(0.05 * rng.standard_cauchy(shape).clip(-60, 60)),
    "one in five preempted": lambda rng, shape: (
        (1 + 0.02 * rng.standard_normal(shape)) * np.where(rng.random(shape) < 0.2, rng.uniform(2, 20, shape), 1)
    ),
}
ends = st.floats(-1e3, 1e3)


@given(ends, ends, ends, ends)
def test_an_interval_wider_than_the_limits_decides_nothing_in_favour(a: float, b: float, c: float, d: float) -> None:
    (low, high), (least, most) = sorted((a, b)), sorted((c, d))
    verdict = Estimate((low + high) / 2, low, high, 0.95).lies_within(least, most)
    if high - low > most - least:
        assert verdict is not True
    overlaps = low <= most and least <= high
    assert (verdict is False) == (not overlaps)
    assert verdict is not True or least <= low <= high <= most


def test_a_figure_that_is_not_a_number_decides_nothing() -> None:
    nothing = median([1.0, math.nan, 2.0])
    assert nothing.lies_within(0, 10) is None
    assert nothing.lies_within(20, 30) is None
    assert median([]).lies_within() is None


@pytest.mark.parametrize(("n", "confidence", "outside"), [(5, 0.95, 0), (6, 0.95, 1), (15, 0.95, 4), (20, 0.99, 4)])
def test_the_interval_of_a_median_is_that_of_the_sign_test(n: int, confidence: float, outside: int) -> None:
    """Ranks as in the tables of the sign test; `outside` samples lie beyond either end or on it."""
    samples = np.random.default_rng(n).permutation(np.arange(1.0, n + 1))
    estimate = median(samples, confidence)
    expected = (outside, n + 1 - outside) if outside else (-math.inf, math.inf)
    assert (estimate.low, estimate.high) == expected
    assert estimate.value == (n + 1) / 2


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_the_interval_of_a_ratio_holds_the_true_one_as_often_as_it_says(noise: Noise) -> None:
    held = 0
    for seed in range(600):
        rng = np.random.default_rng(seed)
        drift = np.linspace(1, 3, 15)  # the machine slows down threefold meanwhile
        times = ratio(1.3 * drift * noise(rng, (15,)), drift * noise(rng, (15,)))
        held += times.low <= 1.3 <= times.high
    assert held >= 0.94 * 600


@pytest.mark.parametrize("noise", ["normal", "lognormal", "one in five preempted"])
def test_the_interval_of_a_ratio_of_sums_holds_the_true_one_about_as_often_as_it_says(noise: str) -> None:
    """Steps that grow, twelve times 1.3 as long as the reference; the bootstrap is a little too sure of so few."""
    held = 0
    grows = np.linspace(1, 3, 12)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        times = ratio_of_sums(1.3 * grows * NOISES[noise](rng, (12,)), grows * NOISES[noise](rng, (12,)))
        assert times.low <= times.value <= times.high
        held += times.low <= 1.3 <= times.high
    assert held >= 0.85 * 200


def test_a_ratio_of_sums_counts_long_pairs_for_more_and_is_the_same_every_time() -> None:
    taken, against = [1.0] * 9 + [91.0], [1.0] * 9 + [11.0]
    assert ratio_of_sums(taken, against) == ratio_of_sums(taken, against)
    assert ratio_of_sums(taken, against).value == 5
    assert ratio_of_sums([3.0] * 10, [2.0] * 10) == Estimate(1.5, 1.5, 1.5, 0.95)


def test_a_ratio_of_sums_of_too_few_pairs_or_of_nothing_decides_nothing() -> None:
    assert ratio_of_sums([3.0] * 5, [2.0] * 5) == Estimate(1.5, -math.inf, math.inf, 0.95)
    assert ratio_of_sums([3.0] * 5, [2.0] * 5).lies_within(most=1) is None
    for nothing in (ratio_of_sums([], []), ratio_of_sums([1.0] * 8, [0.0] * 8)):
        assert nothing.lies_within() is None
    with pytest.raises(ValueError, match="not pairs"):
        ratio_of_sums([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="below 0"):
        ratio_of_sums([1.0], [-1.0])


@pytest.mark.parametrize("noise", ["lognormal", "heavy tails"])
def test_noise_beyond_the_limit_is_never_taken_for_equality(noise: str) -> None:
    decided = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        # Both limits lie inside of what such noise leaves open with 8 pairs.
        times = ratio(NOISES[noise](rng, (8,)) ** 3, NOISES[noise](rng, (8,)) ** 3)
        decided.append(times.lies_within(0.97, 1.03))
    assert True not in decided
    assert decided.count(None) >= 0.93 * 300


@given(st.integers(0, 2**32 - 1), st.floats(2, 50), st.sampled_from(sorted(NOISES)))
def test_a_ratio_far_from_the_limits_is_seen_or_left_open_and_never_passes(seed: int, times: float, noise: str) -> None:
    rng = np.random.default_rng(seed)
    seen = ratio(times * NOISES[noise](rng, (21,)), NOISES[noise](rng, (21,)))
    assert seen.lies_within(1 / 1.1, 1.1) is not True
    assert symmetric(seen).lies_within(1, 1.1) is not True


@given(st.lists(st.tuples(st.floats(1e-6, 10), st.floats(1e-6, 10)), min_size=6, max_size=20), st.floats(1e-3, 1e3))
def test_a_ratio_knows_no_unit_and_turns_over(pairs: list[tuple[float, float]], unit: float) -> None:
    a, b = np.array(pairs).T
    there, back = ratio(a, b), ratio(b * unit, a * unit)
    assert [there.value, there.low, there.high] == pytest.approx([1 / back.value, 1 / back.high, 1 / back.low])
    one, other = symmetric(there), symmetric(back)
    assert [one.value, one.low, one.high] == pytest.approx([other.value, other.low, other.high])
    assert 1 <= one.low <= one.value * (1 + 1e-9)
    assert one.low == 1 or not there.low < 1 < there.high


@given(st.lists(st.tuples(ends, ends, ends), min_size=1, max_size=5), ends, ends)
def test_the_largest_of_several_passes_only_when_all_of_them_do(
    several: list[tuple[float, float, float]], one: float, other: float
) -> None:
    figures = {}
    for number, each in enumerate(several):
        low, value, high = sorted(each)
        figures[str(number)] = Estimate(value, low, high, 0.95)
    least, most = sorted((one, other))
    at_most = [figure.lies_within(most=most) for figure in figures.values()]
    at_least = [figure.lies_within(least=least) for figure in figures.values()]
    for verdicts, (name, figure), limit in (
        (at_most, largest(figures), {"most": most}),
        (at_least, smallest(figures), {"least": least}),
    ):
        expected = False if False in verdicts else None if None in verdicts else True
        assert figure.lies_within(**limit) is expected
        assert figures[name].value == figure.value


@given(ends, ends, ends)
def test_a_size_has_no_sign(a: float, b: float, c: float) -> None:
    low, value, high = sorted((a, b, c))
    found = size(Estimate(value, low, high, 0.95))
    assert 0 <= found.low <= found.value == abs(value) <= found.high == max(abs(low), abs(high))
    assert (found.low == 0) == (low <= 0 <= high)


@pytest.mark.parametrize("times", [([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [-1.0])])
def test_what_is_no_pair_of_times_is_refused(times: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match=r"not pairs|not above 0"):
        ratio(*times)


def test_a_machine_that_slows_down_steadily_counts_against_no_arm() -> None:
    calls: list[str] = []

    def arm(name: str, seconds: float) -> Callable[[], float]:
        def work() -> float:
            calls.append(name)
            assert not gc.isenabled()
            return seconds * (1 + 0.1 * len(calls))

        return work

    seconds = interleaved({"a": arm("a", 1.0), "b": arm("b", 1.0), "c": arm("c", 2.0)}, blocks=6)
    assert calls == ["a", "b", "c", "c", "b", "a"] * 3 + ["a", "b", "c"]
    assert [len(taken) for taken in seconds.values()] == [6, 6, 6]
    assert seconds["a"][0] == pytest.approx(1.6)  # the first block is not returned
    assert ratio(seconds["b"], seconds["a"], 0.9).value == pytest.approx(1, abs=0.005)
    assert ratio(seconds["c"], seconds["a"], 0.9).value == pytest.approx(2, rel=0.01)
    assert gc.isenabled()


def test_garbage_is_collected_again_after_an_arm_that_failed() -> None:
    def fails() -> float:
        raise RuntimeError("the build refused")

    with pytest.raises(RuntimeError, match="refused"):
        interleaved({"a": fails}, 3)
    assert gc.isenabled()


DEPTHS = np.array([0, 256, 512, 1024, 2048, 4096], float)
ZERO, SLOPE = 0.0313, 4.6e-6  # what the document states


def times_of(noise: Noise, seed: int, rounds: int = 12, slope: float = SLOPE) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    context = np.tile(DEPTHS, rounds)
    return context, (ZERO + slope * context) * noise(rng, context.shape)


@pytest.mark.parametrize("noise", [name for name in NOISES if name != "one in five preempted"])
@pytest.mark.parametrize("slope", [SLOPE, 0.0])
def test_the_intervals_of_a_fit_hold_the_true_line_as_often_as_they_say(noise: str, slope: float) -> None:
    held = {"per_token": 0, "at_zero": 0, "rise": 0}
    for seed in range(200):
        fit = affine_fit(*times_of(NOISES[noise], seed, slope=slope))
        held["per_token"] += fit.per_token.low <= slope <= fit.per_token.high
        held["at_zero"] += fit.at_zero.low <= ZERO <= fit.at_zero.high
        rise = fit.rise(4096)
        held["rise"] += rise.low <= slope * 4096 / ZERO <= rise.high
    assert min(held.values()) >= 0.92 * 200, held


def test_times_that_are_ten_times_too_long_now_and_then_move_no_fit() -> None:
    for seed in range(50):
        fit = affine_fit(*times_of(NOISES["one in five preempted"], seed))
        assert fit.per_token.value == pytest.approx(SLOPE, rel=0.25)
        assert fit.at_zero.value == pytest.approx(ZERO, rel=0.05)
        assert fit.rise(4096).lies_within(0.1) is True


@given(st.integers(0, 2**32 - 1))
def test_a_rise_is_not_seen_where_noise_is_far_larger(seed: int) -> None:
    context, seconds = times_of(NOISES["lognormal"], seed, rounds=3, slope=0.0)
    fit = affine_fit(context, seconds**5)
    assert fit.rise(4096).lies_within(-0.02, 0.02) is not True


@given(
    st.lists(st.integers(0, 100_000), min_size=2, max_size=12),
    st.floats(1e-6, 10),
    st.floats(-1e-5, 1e-2),
    st.integers(0, 100_000),
    st.integers(1, 5000),
)
def test_points_on_a_line_give_the_line(context: list[int], zero: float, slope: float, depth: int, tokens: int) -> None:
    assume(len(set(context)) > 1)
    fit = affine_fit(context, zero + slope * np.array(context, float))
    assert fit.per_token.value == pytest.approx(slope, abs=1e-9 * (1 + zero))
    assert fit.at_zero.value == pytest.approx(zero, rel=1e-6, abs=1e-4 * (1 + zero))
    one_by_one = fit.at_zero.value * tokens + fit.per_token.value * np.arange(depth, depth + tokens, dtype=float).sum()
    assert fit.seconds(depth, tokens) == pytest.approx(one_by_one)


def test_the_line_of_the_document_gives_its_times() -> None:
    """31.3 ms + 4.6e-6 s per token: 18.3 tokens/s on 5,000 tokens and 4.3 on 44,000; 17.5 and 4.0 were observed."""
    fit = affine_fit(DEPTHS, ZERO + SLOPE * DEPTHS)
    assert 1 / fit.seconds(5000) == pytest.approx(18.4, abs=0.05)
    assert 1 / fit.seconds(44000) == pytest.approx(4.3, abs=0.05)
    assert fit.rise(44000).value == pytest.approx(6.466, abs=0.001)


def test_few_points_leave_everything_open() -> None:
    fit = affine_fit([0, 100], [1.0, 2.0])
    for figure in (fit.per_token, fit.at_zero, fit.rise(100)):
        assert (figure.low, figure.high) == (-math.inf, math.inf)
        assert figure.lies_within(-1e9, 1e9) is None
    assert fit.per_token.value == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("context", "seconds", "says"),
    [
        ([0.0, 1.0], [1.0], "not pairs"),
        ([5.0, 5.0], [1.0, 2.0], "needs two"),
        ([0.0, 1.0], [1.0, math.nan], "not finite"),
        ([0.0, math.inf], [1.0, 2.0], "not finite"),
    ],
)
def test_what_no_line_can_be_fitted_to_is_refused(context: list[float], seconds: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        affine_fit(context, seconds)
