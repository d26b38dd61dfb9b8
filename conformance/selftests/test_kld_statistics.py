import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from conformance.harness.measure.kld import (
    WITHIN_RUN,
    Doubles,
    Floats,
    KldError,
    KldRun,
    KldStatistics,
    Scores,
    median_change,
    score,
    score_records,
    similarity,
)
from conformance.harness.measure.kld_base import encode_records

LOGITS = hnp.arrays(np.float32, (2, 5, 7), elements=st.floats(-60, 60, width=32))
TOKENS = np.array([0, 6, 3, 2, 5])


def run_of(kld: Doubles) -> KldRun:
    run = KldRun()
    run.add(Scores(kld, np.zeros_like(kld), np.ones(len(kld), dtype=np.bool_)))
    return run


def published_example() -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Logits on which llama-perplexity's own functions (tools/perplexity/perplexity.cpp) were run once."""
    i = np.arange(40 * 33).reshape(40, 33)
    base = (((i * 7919) % 2003 - 1001) / 96).astype(np.float32)
    shift = ((i * 104729) % 1009 - 504).astype(np.float32) / np.float32(1024) * (1 + np.arange(40)[:, None] % 4)
    return base, (base + shift).astype(np.float32), np.arange(40) * 5 % 33


@given(logits=LOGITS)
def test_a_score_is_the_divergence_by_its_definition(logits: NDArray[np.float32]) -> None:
    scores = score(logits[0], logits[1], TOKENS)
    logs = logits.astype(np.longdouble)
    peak = logs.max(axis=-1, keepdims=True)
    logs = logs - peak - np.log(np.exp(logs - peak).sum(axis=-1, keepdims=True))
    base, candidate = logs
    np.testing.assert_allclose(scores.kld, (np.exp(base) * (base - candidate)).sum(axis=1), rtol=1e-12, atol=1e-13)
    difference = np.exp(candidate) - np.exp(base)
    np.testing.assert_allclose(scores.dp, difference[np.arange(5), TOKENS], rtol=1e-12, atol=1e-13)
    assert (scores.same_top == (logits[0].argmax(axis=1) == logits[1].argmax(axis=1))).all()


@given(logits=LOGITS)
def test_self_against_self_is_exactly_zero(logits: NDArray[np.float32]) -> None:
    run = KldRun()
    run.add(score(logits[0], logits[0].copy(), TOKENS))
    seen = run.statistics()
    assert (seen.median, seen.mean, seen.maximum, seen.minimum, seen.rms_dp, seen.same_top) == (0, 0, 0, 0, 0, 1)


def test_a_divergence_far_below_float32_is_still_resolved() -> None:
    base = np.random.default_rng(1).standard_normal((3, 5000)).astype(np.float32)
    candidate = base.copy()
    candidate[:, 17] = np.nextafter(candidate[:, 17], np.float32(9))
    kld = score(base, candidate, np.zeros(3, np.int64)).kld
    step = (candidate[:, 17] - base[:, 17]).astype(np.float64)
    p = np.exp(base[:, 17].astype(np.float64)) / np.exp(base.astype(np.float64)).sum(axis=1)
    np.testing.assert_allclose(kld, p * (1 - p) * step**2 / 2, atol=3e-15)


def test_blocks_of_any_size_give_the_same_statistics() -> None:
    rng = np.random.default_rng(3)
    base = rng.standard_normal((500, 400)).astype(np.float32)
    candidate = (base + rng.standard_normal((500, 1)) * rng.standard_normal((500, 400))).astype(np.float32)
    tokens = rng.integers(400, size=500)
    whole, pieces = KldRun(), KldRun()
    whole.add(score(base, candidate, tokens))
    for part in np.split(np.arange(500), [1, 30, 30, 333]):
        pieces.add(score(base[part], candidate[part], tokens[part]))
    np.testing.assert_array_equal(pieces.kld, whole.kld)
    one, other = dataclasses.asdict(pieces.statistics()), dataclasses.asdict(whole.statistics())
    assert one == pytest.approx(other, rel=1e-12)
    # the median is over positions: one over the pieces' medians would be another figure
    of_pieces = np.median(
        [np.median(score(base[p], candidate[p], tokens[p]).kld) for p in np.split(np.arange(500), [30])]
    )
    assert abs(of_pieces / other["median"] - 1) > 1e-3


def test_scores_against_a_16_bit_base_are_llama_perplexitys() -> None:
    base, candidate, tokens = published_example()
    scores = score_records(encode_records(base), candidate, tokens)
    expected = [0.021148310974240303, 0.0487992987036705, 0.4240233898162842, 0.45043572783470154]
    np.testing.assert_allclose(scores.kld[:4], expected, atol=1e-6)  # it adds up in float32
    run = KldRun()
    run.add(scores)
    seen = run.statistics()
    assert dataclasses.astuple(seen) == pytest.approx(
        dataclasses.astuple(
            KldStatistics(
                positions=40,
                nonfinite=0,
                median=0.17645058,
                mean=0.210219339,
                mean_within_run=0.0278568972,
                p90=0.47426942,
                p99=0.587533236,
                p99_9=0.614086747,
                maximum=0.617036939,
                minimum=0.0125747491,
                same_top=0.575,
                same_top_within_run=0.0791582317,
                rms_dp=0.0729581571,
                rms_dp_within_run=0.0226963268,
            )
        ),
        abs=1e-6,
    )


def test_scores_against_a_16_bit_base_are_close_to_those_against_its_logits() -> None:
    base, candidate, tokens = published_example()
    rough, fine = score_records(encode_records(base), candidate, tokens), score(base, candidate, tokens)
    np.testing.assert_allclose(rough.kld, fine.kld, atol=3e-4)
    np.testing.assert_allclose(rough.dp, fine.dp, atol=3e-4)


@given(kld=st.lists(st.floats(0, 20), min_size=1, max_size=60).map(np.array))
def test_quantiles_are_interpolated_between_sorted_positions(kld: Doubles) -> None:
    seen = run_of(kld).statistics()
    ordered = sorted(kld)
    for share, figure in ((0.5, seen.median), (0.9, seen.p90), (0.99, seen.p99), (0.999, seen.p99_9)):
        at = share * (len(ordered) - 1)
        below = math.floor(at)
        above = min(below + 1, len(ordered) - 1)
        assert figure == pytest.approx((1 - at + below) * ordered[below] + (at - below) * ordered[above], abs=1e-9)
    assert (seen.minimum, seen.maximum) == (ordered[0], ordered[-1])


def test_one_outlier_moves_the_mean_by_its_share_and_the_median_not_at_all() -> None:
    kld = np.random.default_rng(5).exponential(0.001, 131_000)
    calm = run_of(kld).statistics()
    kld[np.argmax(kld)] = 20.0
    struck = run_of(kld).statistics()
    assert round(struck.mean - calm.mean, 5) == 0.00015
    assert struck.median == calm.median
    assert struck.p99 == calm.p99


def test_within_run_figures_are_standard_errors_and_are_called_so() -> None:
    kld = np.random.default_rng(6).exponential(1, 4000)
    seen = run_of(kld).statistics()
    assert seen.mean_within_run == pytest.approx(kld.std() / math.sqrt(3999))
    assert [field.name for field in dataclasses.fields(seen) if "within_run" in field.name] == [
        "mean_within_run",
        "same_top_within_run",
        "rms_dp_within_run",
    ]
    assert "neither run-to-run variation nor a paired interval" in WITHIN_RUN


@given(
    logits=LOGITS,
    at=st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 6)),
    bad=st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_what_is_not_finite_is_counted_and_leaves_no_statistic_to_pass(
    logits: NDArray[np.float32], at: tuple[int, int, int], bad: float
) -> None:
    logits[at] = bad
    run = KldRun()
    run.add(score(logits[0], logits[1], TOKENS))
    seen = run.statistics()
    assert (seen.positions, seen.nonfinite) == (5, 1)
    figures = dataclasses.astuple(seen)[2:]
    assert len(figures) == 12
    assert all(math.isnan(figure) for figure in figures)
    assert not np.isfinite(run.kld[at[1]])
    change = median_change(run.kld, run.kld, seed=1)
    assert math.isnan(change.change)
    assert math.isnan(change.high)


def test_what_cannot_be_compared_is_refused() -> None:
    logits = np.zeros((5, 7), np.float32)
    with pytest.raises(KldError, match=r"base logits \(5, 7\) with candidate logits \(5, 8\)"):
        score(logits, np.zeros((5, 8), np.float32), TOKENS)
    with pytest.raises(KldError, match=r"tokens \(4,\)"):
        score(logits, logits, TOKENS[:4])
    with pytest.raises(KldError, match="a token lies outside the vocabulary of 7"):
        score(logits, logits, TOKENS + 1)
    with pytest.raises(KldError, match="no scored position"):
        KldRun().statistics()
    with pytest.raises(KldError, match="cannot be paired"):
        median_change(np.zeros(3), np.zeros(4), seed=0)


@settings(max_examples=20)
@given(n=st.integers(1, 50), seed=st.integers(0, 1000))
def test_the_bootstrap_is_that_of_resampling_both_runs_together(n: int, seed: int) -> None:
    before, after = np.random.default_rng(n).exponential(size=(2, n))
    rng = np.random.default_rng(seed)
    changes = []
    for _ in range(50):
        drawn = rng.integers(n, size=n)
        changes.append(np.median(after[drawn]) - np.median(before[drawn]))
    seen = median_change(before, after, seed=seed, confidence=0.9, resamples=50)
    assert (seen.low, seen.high) == pytest.approx(tuple(np.quantile(changes, [0.05, 0.95])))
    assert seen.change == np.median(after) - np.median(before)


def test_pairing_finds_a_change_that_the_spread_of_a_run_would_hide() -> None:
    rng = np.random.default_rng(8)
    before = rng.lognormal(-7, 1.5, 2000)
    after = before * rng.lognormal(-0.05, 0.02, 2000)
    seen = median_change(before, after, seed=1)
    assert seen.low < seen.change < seen.high < 0
    assert median_change(before, before, seed=1).high == 0
    one_run = np.median(rng.choice(before, (500, 2000)), axis=1).std()
    assert 1.96 * one_run > abs(seen.change)


def test_the_similarity_proxy_is_one_at_no_divergence() -> None:
    assert similarity(0) == 1
    assert similarity(0.001846) == pytest.approx(0.998156, abs=1e-6)
