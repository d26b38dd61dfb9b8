"""Noise above its ceiling builds no limit, over the whole range of deviations and floors."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness.bench import Acquaintance, Case, Noise
from conformance.harness.contract.schema import Invariant, Weights
from conformance.harness.exam.examination import contract, judge
from conformance.harness.measure.deviation import Deviation

CONTRACT = contract()
WITHIN = [
    invariant for invariant in CONTRACT if invariant.accept.rule == "within_floor" and not invariant.accept_reordered
]
FIGURES = st.floats(0, 10, allow_nan=False)
WEIGHTS: tuple[Weights, ...] = ("float32", "narrower")


def acquaintance(logits: float, state: float, weights: Weights) -> Acquaintance:
    floors: tuple[Literal["repeat", "threads", "ubatch"], ...] = ("repeat", "threads", "ubatch")
    flashes: tuple[Literal["off", "on"], ...] = ("off", "on")
    noise = {(floor, flash): Noise(logits, state) for floor in floors for flash in flashes}
    return Acquaintance(frozenset({"attention"}), frozenset(), noise, 100.0, 0, weights=weights)


@pytest.mark.parametrize("invariant", WITHIN, ids=[invariant.id for invariant in WITHIN])
@given(value=FIGURES, logits=FIGURES, state=FIGURES, weights=st.sampled_from(WEIGHTS))
def test_what_passes_lies_within_the_factor_times_the_floor_and_within_the_factor_times_the_ceiling(
    invariant: Invariant, value: float, logits: float, state: float, weights: Weights
) -> None:
    factor, ceiling = invariant.accept.factor, CONTRACT.ceilings[weights]
    assert factor is not None
    floor, most = (state, ceiling.state) if invariant.accept.quantity == "state" else (logits, ceiling.logits)
    outcome = judge(invariant, acquaintance(logits, state, weights), ceiling, Case(), Deviation(value, "NMSE"))
    expected = "FAIL" if value > factor * floor else "UNKNOWN" if value > factor * most else "PASS"
    assert outcome.verdict == expected
    assert outcome.verdict != "UNKNOWN" or f"{floor:.3g} apart" in (outcome.reason or "")


def test_a_floor_that_is_not_finite_passes_nothing() -> None:
    known = acquaintance(float("inf"), float("inf"), "float32")
    outcome = judge(WITHIN[0], known, CONTRACT.ceilings["float32"], Case(), Deviation(0.0, "NMSE"))
    assert outcome.verdict == "UNKNOWN"
