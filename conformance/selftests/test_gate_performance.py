"""When a build counts as slower or larger than another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness.contract.schema import Counted, Timed
from conformance.harness.engine import StateError
from conformance.harness.engine.child import Crashed, TimedOut
from conformance.harness.exam.examination import SPECS, contract
from conformance.harness.gate.performance import Unmeasured, judge_count, judge_measure, load_performance, unmeasured
from fixtures import models

LIMIT = 1.15
SPEC = Timed(unit="s", limit=LIMIT, because="a test says so")


def judged(ratios: list[float]) -> str:
    return judge_measure("m", "prefill", SPEC, [1.0] * len(ratios), ratios).outcome


@given(st.lists(st.floats(1 / LIMIT + 0.01, LIMIT - 0.01), min_size=6, max_size=20))
def test_what_always_stays_below_the_limit_passes(ratios: list[float]) -> None:
    assert judged(ratios) == "pass"


@given(st.lists(st.floats(LIMIT + 0.01, 5), min_size=6, max_size=20))
def test_what_always_lies_above_the_limit_is_a_regression(ratios: list[float]) -> None:
    assert judged(ratios) == "regression"


@given(st.lists(st.floats(0.1, 1 / LIMIT - 0.01), min_size=6, max_size=20))
def test_what_is_always_faster_is_an_improvement(ratios: list[float]) -> None:
    assert judged(ratios) == "fixed"


@given(
    st.lists(st.floats(0.5, LIMIT), min_size=3, max_size=9),
    st.lists(st.floats(LIMIT + 0.01, 5), min_size=3, max_size=9),
)
def test_noise_around_the_limit_decides_nothing(low: list[float], high: list[float]) -> None:
    n = min(len(low), len(high))
    assert judged(low[:n] + high[:n]) == "unknown"


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=4))
def test_too_few_rounds_decide_nothing(ratios: list[float]) -> None:
    assert judged(ratios) == "unknown"


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_counts_are_compared_exactly(before: int, after: int) -> None:
    speed = judge_count("m", "KV bytes per token", Counted(unit="bytes", because="a test says so"), before, after)
    assert speed.outcome == ("pass" if after == before else "regression" if after > before else "fixed")
    assert speed.blocks == (after > before)


def test_bytes_per_token_are_told_to_the_fraction() -> None:
    speed = judge_count("m", "KV bytes per token", Counted(unit="bytes", because="a test says so"), 1024.0, 1024.25)
    assert (speed.outcome, speed.reason) == ("regression", "1024.25 bytes, before 1024")


def test_what_is_measured_can_be_judged_in_every_profile() -> None:
    spec = load_performance(SPECS).performance
    assert set(spec.rounds) == set(contract().profiles)
    assert set(spec.models) <= set(models.names())
    assert {f"decode at {depth} tokens" for depth in spec.depths} <= set(spec.measures)
    for rounds in spec.rounds.values():
        times = np.full(rounds, 0.5)
        assert judge_measure("m", "prefill", SPEC, times.tolist(), times.tolist()).outcome == "pass"


@pytest.mark.parametrize("ratios", [[2.0] * 9, [1.0] * 9, [0.5] * 9, [1.0, 2.0] * 5])
def test_only_a_regression_of_speed_blocks(ratios: list[float]) -> None:
    speed = judge_measure("m", "prefill", SPEC, [1.0] * len(ratios), ratios)
    assert speed.blocks == (speed.outcome == "regression")


@pytest.mark.parametrize(
    ("side", "error", "outcome", "blocks"),
    [
        ("candidate", Crashed("aborted (SIGABRT)", ""), "crash", True),
        ("candidate", StateError("refused"), "unknown", True),
        ("candidate", TimedOut("gave no answer", ""), "timeout", True),
        ("baseline", Crashed("aborted (SIGABRT)", ""), "unknown", False),
    ],
)
def test_a_round_that_is_not_finished_blocks_where_the_candidate_is_to_blame(
    side: str, error: Exception, outcome: str, blocks: bool
) -> None:
    speed = unmeasured("m", "prefill", SPEC, Unmeasured(side, error))
    assert (speed.outcome, speed.blocks) == (outcome, blocks)
    assert side in speed.reason
