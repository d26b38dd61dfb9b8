"""What a measured deviation means under each rule, with and without an interval."""

from __future__ import annotations

import math

import pytest

from conformance.harness.bench import Acquaintance, Case, Noise
from conformance.harness.contract.schema import Invariant
from conformance.harness.exam.examination import contract, judge
from conformance.harness.measure.deviation import Deviation, of_estimate
from conformance.harness.measure.timing import Estimate

CEILING = contract().ceilings["float32"]
NOISY = Acquaintance(frozenset(), frozenset(), {("ubatch", "off"): Noise(1e-9, 1e-9)}, 1000.0, 1)


def invariant(alone: bool = False, **accept: object) -> Invariant:
    content = {
        "id": "DC-09",
        "title": "t",
        "statement": "s",
        "source": {"section": "1."},
        "models": "all",
        "examples": {"smoke": 1},
        "accept": {"because": "b", "quantity": "time", **accept},
        "required": False,
        "alone": alone,
    }
    return Invariant.model_validate(content)


@pytest.mark.parametrize(
    ("rule", "low", "high", "verdict"),
    [
        ("at_most", 1.0, 1.2, "PASS"),
        ("at_most", 1.1, 1.21, "UNKNOWN"),
        ("at_most", 1.21, 1.3, "FAIL"),
        ("at_most", -math.inf, math.inf, "UNKNOWN"),
        ("at_most", 1.0, math.nan, "UNKNOWN"),
        ("at_least", 1.2, 1.3, "PASS"),
        ("at_least", 1.3, math.inf, "PASS"),
        ("at_least", 1.1, 1.3, "UNKNOWN"),
        ("at_least", 1.0, 1.1, "FAIL"),
        ("at_least", -math.inf, math.inf, "UNKNOWN"),
        ("at_least", math.nan, 1.3, "UNKNOWN"),
    ],
)
def test_an_interval_decides_and_one_across_the_limit_does_not(
    rule: str, low: float, high: float, verdict: str
) -> None:
    figure = of_estimate(Estimate(1.15 if rule == "at_most" else 1.25, low, high, 0.99), "time", "", "", "")
    outcome = judge(invariant(alone=True, rule=rule, bound=1.2), NOISY, CEILING, Case(), figure)
    assert outcome.verdict == verdict
    if verdict == "UNKNOWN":
        assert outcome.reason is not None
        assert outcome.reason.startswith("too noisy to tell")


def test_a_time_without_an_interval_is_unknown() -> None:
    outcome = judge(invariant(alone=True, rule="at_most", bound=1.2), NOISY, CEILING, Case(), Deviation(1.0, "time"))
    assert outcome.verdict == "UNKNOWN"


@pytest.mark.parametrize(
    ("deviation", "verdict"),
    [(2e-6, "PASS"), (1.01e-6, "PASS"), (9e-7, "FAIL"), (0.0, "FAIL"), (math.nan, "FAIL"), (math.inf, "FAIL")],
)
def test_what_must_deviate_has_to_deviate_beyond_the_noise(deviation: float, verdict: str) -> None:
    far = invariant(quantity="logits", rule="beyond_floor", floor="ubatch", factor=1000.0)
    outcome = judge(far, NOISY, CEILING, Case(), Deviation(deviation, "NMSE"))
    assert outcome.verdict == verdict
    assert outcome.limit == pytest.approx(1e-6)


def test_times_decide_only_where_the_user_says_so() -> None:
    usual, strict = contract(), contract(strict_timing=True)
    timed = {each.id for each in usual if each.alone}
    assert timed >= {"DC-02", "DC-03/recurrent", "DC-04/bounded", "DC-05/fragmentation", "DC-06/cache-types"}
    assert not any(usual[id].required for id in timed)
    assert all(strict[id].required for id in timed)
    assert [each.required for each in usual if not each.alone] == [each.required for each in strict if not each.alone]
