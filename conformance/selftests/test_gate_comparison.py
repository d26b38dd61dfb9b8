"""The classification of two builds' checks, on results that are made up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness.gate.looks import settled
from conformance.harness.report.comparison import (
    OUTCOMES,
    SCHEMA_FILE,
    Answer,
    Comparison,
    Pair,
    Speed,
    answered,
    classify,
    compare,
    comparison_schema,
    pair_of,
    read_comparison,
    strictly,
)
from conformance.harness.report.gate_forms import account, render_junit, render_summary, write_comparison
from conformance.harness.report.merge import merge_comparisons
from conformance.harness.report.results import Check, MeasuredCase, NotApplicable, Results, Verdict
from conformance.harness.report.store import ReportError
from conformance.harness.report.verdict import summarise

FLOORS = st.sampled_from([0.0, 1e-9, 3e-9])
# 2e-7 lies between the limits of the two floors, 3.005e-7 beyond the larger by less than a floor
NEAR = st.sampled_from([9e-8, 2e-7, 2.999e-7, 3.005e-7, 4e-7])
DEVIATIONS = st.one_of(st.just(0.0), NEAR, st.floats(1e-12, 1e-3), st.sampled_from([math.inf, math.nan]))
FACTOR = 100


def planned(required: bool = True, id: str = "RP-01", model: str = "qwen3-mini") -> Check:
    return Check.planned(id, model, "a title", required)


def measured(deviations: list[float], floor: float, required: bool = True, **named: str) -> Check:
    """A check as a replay of recorded cases leaves it, one case for each deviation, accepted up to 100 floors."""
    limit = FACTOR * floor
    cases = [
        MeasuredCase(
            case={"text_seed": number},
            verdict="PASS" if value <= limit else "FAIL",
            deviation=value,
            floor=floor,
            limit=limit,
        )
        for number, value in enumerate(deviations)
    ]
    failed = [case for case in cases if case.verdict == "FAIL"]
    verdict: Verdict = "FAIL" if failed else "PASS"
    return planned(required, **named).settled(
        verdict,
        reason="far off" if failed else None,
        case=failed[0].case if failed else None,
        deviation=max(deviations, key=lambda value: math.inf if math.isnan(value) else value),
        floor=floor,
        limit=limit,
        detail={"cases": [case.model_dump() for case in cases]},
    )


def ended(verdict: Verdict, required: bool = True) -> Check:
    return planned(required).settled(verdict, reason=f"it was {verdict}")


@st.composite
def measured_twice(draw: st.DrawFn) -> tuple[Check, Check]:
    """The same cases on two builds."""
    n = draw(st.integers(1, 4))
    sides = [draw(st.lists(DEVIATIONS, min_size=n, max_size=n)) for _ in range(2)]
    before, after = (measured(values, draw(FLOORS)) for values in sides)
    return before, after


ANY = st.one_of(
    st.builds(measured, st.lists(DEVIATIONS, min_size=1, max_size=3), FLOORS, st.booleans()),
    st.builds(ended, st.sampled_from(["CRASH", "TIMEOUT", "UNKNOWN", "SKIPPED"]), st.booleans()),
)


def beyond(check: Check, limit: float) -> set[str]:
    assert check.detail.cases is not None
    return {json.dumps(case.case) for case in check.detail.cases if not (case.deviation or 0.0) <= limit}


@given(ANY)
def test_a_build_against_itself_shows_no_difference(check: Check) -> None:
    pair = pair_of(check, check)
    assert pair.outcome in ("pass", "known", "unknown")
    assert not pair.blocks


@given(measured_twice())
def test_a_regression_is_beyond_the_noise_of_both_builds(checks: tuple[Check, Check]) -> None:
    before, after = checks
    outcome, _ = classify(before, after)
    limit, floor = (max(getattr(check, name) for check in checks) for name in ("limit", "floor"))
    old, new = beyond(before, limit), beyond(after, limit)
    assert before.detail.cases is not None
    assert after.detail.cases is not None
    clearly = any(
        json.dumps(a.case) in new - old
        and (math.isnan(a.deviation or 0.0) or (a.deviation or 0) - (b.deviation or 0) > floor)
        for a, b in zip(after.detail.cases, before.detail.cases, strict=True)
    )
    if clearly:
        assert outcome == "regression"
    elif old & new:
        assert outcome == "known"
    elif old and new:
        assert outcome in ("known", "unknown", "fixed", "pass")
    elif new:
        assert outcome == "unknown"
    elif old:
        assert outcome in ("fixed", "pass")
    else:
        assert outcome == "pass"


@pytest.mark.parametrize(
    ("floors", "before", "after", "outcome"),
    [
        ((3e-9, 3e-9), 2.999e-7, 3.005e-7, "unknown"),  # beyond the limit, by less than the noise
        ((3e-9, 3e-9), 2.0e-7, 3.005e-7, "regression"),
        ((3e-9, 1e-9), 0.0, 2e-7, "pass"),  # beyond its own limit, within that of the noisier baseline
        ((1e-9, 1e-9), 0.0, 2e-7, "regression"),
    ],
)
def test_noise_is_no_regression(floors: tuple[float, float], before: float, after: float, outcome: str) -> None:
    assert classify(measured([before], floors[0]), measured([after], floors[1]))[0] == outcome


@given(measured_twice())
def test_a_repair_one_way_is_a_regression_the_other_way(checks: tuple[Check, Check]) -> None:
    before, after = checks
    if classify(after, before)[0] == "fixed":
        assert classify(before, after)[0] == "regression"


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 0.9))
def test_where_more_is_better_less_is_a_regression(before: float, after: float, limit: float) -> None:
    def check(value: float) -> Check:
        verdict: Verdict = "PASS" if value >= limit else "FAIL"
        return planned().settled(verdict, reason="too little", deviation=value, floor=0.0, limit=limit, wants_more=True)

    expected = {(True, True): "pass", (True, False): "regression", (False, True): "fixed", (False, False): "known"}
    assert classify(check(before), check(after))[0] == expected[before >= limit, after >= limit]


def excused(check: Check) -> Check:
    return check.excuse("upstream #1", "known.yaml:1", "https://example.org/1") if check.verdict != "PASS" else check


@given(ANY, ANY)
def test_an_excuse_makes_what_got_worse_known_and_changes_nothing_else(before: Check, after: Check) -> None:
    outcome = classify(before, after)[0]
    pair = pair_of(excused(before), excused(after))
    assert pair.newly_known == (outcome in ("regression", "crash", "timeout"))
    assert pair.outcome == ("known" if pair.newly_known else outcome)
    assert strictly(pair).blocks == (pair.blocks or (pair.newly_known and pair.required))


@pytest.mark.parametrize("after", [ended("CRASH"), ended("TIMEOUT"), measured([1.0], 1e-9)])
def test_what_is_newly_known_blocks_only_strictly_and_is_always_told(after: Check) -> None:
    pair = pair_of(measured([0.0], 1e-9), excused(after))
    assert pair.newly_known
    answer = answered(comparison([pair])).answer
    assert answer.exit_code == 0
    assert "new with the candidate, and known: RP-01" in answer.line
    assert "upstream: https://example.org/1" in list(account(pair))
    assert "upstream #1" in pair.reason
    assert answered(comparison([strictly(pair)])).answer.exit_code == 1


@given(measured_twice())
def test_what_the_baseline_is_excused_for_excuses_no_candidate(checks: tuple[Check, Check]) -> None:
    before, after = checks
    assert classify(excused(before), after)[0] == classify(before, after)[0]


@given(ANY, ANY)
def test_what_only_informs_never_blocks_and_an_undecided_candidate_is_never_passed(before: Check, after: Check) -> None:
    pair = pair_of(before, after)
    assert pair.required or not pair.blocks
    if after.verdict in ("UNKNOWN", "SKIPPED"):
        assert pair.outcome == "unknown"
        assert pair.blocks == (pair.required and before.reason != after.reason)
    if after.verdict in ("CRASH", "TIMEOUT") and before.verdict not in ("CRASH", "TIMEOUT"):
        assert pair.outcome == after.verdict.lower()
        assert pair.blocks == pair.required
    if pair.blocks:
        assert answered(comparison([pair])).answer.exit_code == 1


@pytest.mark.parametrize(
    ("before", "after", "outcome", "blocks"),
    [
        ("PASS", None, "removed", True),
        ("FAIL", None, "removed", False),
        (None, "PASS", "new", False),
        (None, "FAIL", "new", False),
        (None, "CRASH", "crash", True),
        ("CRASH", "FAIL", "known", False),
        ("FAIL", "CRASH", "crash", True),
        ("CRASH", "TIMEOUT", "known", False),
        ("CRASH", "PASS", "fixed", False),
        ("UNKNOWN", "PASS", "pass", False),
        ("UNKNOWN", "FAIL", "unknown", True),
        ("PASS", "UNKNOWN", "unknown", True),
        ("FAIL", "FAIL", "known", False),
        ("PASS", "TIMEOUT", "timeout", True),
    ],
)
def test_the_outcome_follows_from_what_both_builds_showed(
    before: Verdict | None, after: Verdict | None, outcome: str, blocks: bool
) -> None:
    def check(verdict: Verdict | None) -> Check | None:
        made = {"PASS": measured([0.0], 1e-9), "FAIL": measured([1.0], 1e-9)}
        return None if verdict is None else made.get(verdict) or ended(verdict)

    pair = pair_of(check(before), check(after), "there is no such function")
    assert (pair.outcome, pair.blocks) == (outcome, blocks)
    assert (before is None or after is None) == ("there is no such function" in pair.reason) or outcome == "crash"


def test_what_was_not_run_on_either_build_blocks() -> None:
    assert pair_of(planned(), planned()).blocks
    assert not pair_of(planned(required=False), planned(required=False)).blocks


def test_cases_that_a_build_cannot_take_are_told() -> None:
    cases = [
        MeasuredCase(case={"n": 1}, verdict="PASS", deviation=0.0, floor=0.0, limit=0.0),
        MeasuredCase(case={"n": 2}, verdict="SKIPPED", reason="no such cache type"),
    ]
    after = planned().settled("PASS", detail={"cases": [case.model_dump() for case in cases]})
    outcome, reason = classify(measured([0.0], 0.0), after)
    assert outcome == "pass" or outcome == "unknown"
    assert "no such cache type" in reason


@pytest.mark.parametrize(
    ("first", "second", "outcome", "confirmed"),
    [
        ("regression", "regression", "regression", True),
        ("regression", "pass", "unknown", False),
        ("regression", "known", "known", False),
        ("crash", "pass", "unknown", False),
        ("timeout", "pass", "pass", False),
        ("timeout", "timeout", "timeout", True),
        ("fixed", "known", "known", False),
        ("fixed", "fixed", "fixed", True),
        ("fixed", "pass", "pass", False),
        ("fixed", "crash", "unknown", False),
        ("fixed", "regression", "unknown", False),
    ],
)
def test_a_difference_needs_a_second_look(first: Any, second: Any, outcome: str, confirmed: bool) -> None:
    def pair(outcome: Any) -> Pair:
        blocks = outcome in ("regression", "crash", "timeout")
        return Pair(id="RP-01", model="m", title="t", required=True, outcome=outcome, blocks=blocks, reason="r")

    after = settled(pair(first), pair(second))
    assert (after.outcome, after.confirmed) == (outcome, confirmed)
    assert after.blocks == (outcome in ("regression", "crash", "timeout", "unknown"))


# -- whole comparisons


def results(*checks: Check, others: tuple[NotApplicable, ...] = ()) -> Results:
    return Results(
        build={"digest": "d"}, suite={}, settings={}, checks=checks, not_applicable=others, summary=summarise(checks)
    )


def comparison(pairs: list[Pair], **more: Any) -> Comparison:
    frame: dict[str, Any] = {
        "baseline": {"reference": "A", "digest": "a"},
        "candidate": {"reference": "B", "digest": "b"},
        "suite": {"digest": "s"},
        "settings": {"profile": "smoke"},
        "answer": Answer(exit_code=2, line="", counts={}),
    }
    return Comparison(**{**frame, **more}, pairs=tuple(pairs))


def test_every_check_of_either_build_is_compared_once() -> None:
    gone = NotApplicable(id="RP-01", model="gone", reason="this build has no such call")
    before = results(measured([0.0], 0.0), measured([0.0], 0.0, model="gone"))
    after = results(measured([1.0], 0.0), measured([0.0], 0.0, model="come"), others=(gone,))
    found = {pair.model: pair for pair in compare(before, after)}
    assert {model: pair.outcome for model, pair in found.items()} == {
        "qwen3-mini": "regression",
        "gone": "removed",
        "come": "new",
    }
    assert "this build has no such call" in found["gone"].reason


def test_what_was_not_run_is_left_out_only_where_that_was_asked_for() -> None:
    both = results(planned())
    assert [pair.outcome for pair in compare(both, both)] == ["unknown"]
    assert compare(both, both, only_run=True) == []


def regression() -> Pair:
    return pair_of(measured([0.0], 1e-9), measured([1.0], 1e-9))


def test_the_answer_names_the_one_regression() -> None:
    passed = pair_of(measured([0.0], 1e-9, id="RP-02"), measured([0.0], 1e-9, id="RP-02"))
    broken = pair_of(measured([1.0], 1e-9, id="RP-03"), measured([1.0], 1e-9, id="RP-03"))
    answer = answered(comparison([passed, broken, regression()])).answer
    assert answer.exit_code == 1
    assert answer.line.startswith("MAY NOT UPGRADE: regression: RP-01 on qwen3-mini; ")
    assert answered(comparison([passed, broken])).answer.exit_code == 0
    assert answered(comparison([passed], death="was killed (SIGILL)")).answer.exit_code == 1
    assert answered(comparison([])).answer.exit_code == 2
    assert answered(comparison([passed]), ["no disk"]).answer.exit_code == 2


def test_every_form_tells_of_the_regression_and_how_to_replay_it(tmp_path: Path) -> None:
    pair = regression()
    assert pair.candidate is not None
    replay = "python -c 'replay <this> & that'"
    pair = pair.model_copy(update={"candidate": pair.candidate.model_copy(update={"replay": replay})})
    speed = Speed(
        model="m", quantity="prefill", unit="s", kind="measure", outcome="unknown", blocks=False,
        reason="too noisy", baseline=1.0, candidate=2.0, ratio=2.0, low=0.5, high=4.0, limit=1.1,
    )  # fmt: skip
    whole = answered(comparison([pair], speeds=(speed,)))
    write_comparison(whole, tmp_path)
    assert read_comparison(tmp_path) == whole
    jsonschema.validate(json.loads((tmp_path / "gate.json").read_text()), json.loads(SCHEMA_FILE.read_text()))
    page = (tmp_path / "report.html").read_text()
    assert "replay &lt;this&gt; &amp; that" in page
    assert "o-regression" in page
    assert "MAY NOT UPGRADE" in page
    assert replay in (tmp_path / "summary.md").read_text()
    assert '<failure type="regression"' in (tmp_path / "junit.xml").read_text()


def test_the_published_schema_is_that_of_the_code() -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == comparison_schema()


@given(st.sampled_from(OUTCOMES), st.booleans())
def test_junit_counts_as_failed_exactly_what_blocks(outcome: Any, blocks: bool) -> None:
    pair = Pair(id="RP-01", model="m", title="t", required=True, outcome=outcome, blocks=blocks, reason="r")
    content = render_junit(answered(comparison([pair]))).decode()
    assert ('failures="0"' in content and 'errors="0"' in content) != blocks
    assert "## " in render_summary(answered(comparison([pair])))


# -- shards


def shard(number: int, of: int, *pairs: Pair, **more: Any) -> Comparison:
    return answered(comparison(list(pairs), settings={"profile": "smoke", "shard": f"{number}/{of}"}, **more))


def test_shards_of_a_gate_are_one_gate() -> None:
    passed = pair_of(measured([0.0], 1e-9, id="RP-02"), measured([0.0], 1e-9, id="RP-02"))
    whole = merge_comparisons({"one": shard(1, 2, passed), "two": shard(2, 2, regression())})
    assert whole.answer.exit_code == 1
    assert {pair.id for pair in whole.pairs} == {"RP-01", "RP-02"}


def test_what_blocks_in_one_shard_blocks_in_all() -> None:
    harmless = regression().model_copy(update={"outcome": "crash", "blocks": False})
    for order in ((harmless, regression()), (regression(), harmless)):
        whole = merge_comparisons({"one": shard(1, 2, order[0]), "two": shard(2, 2, order[1])})
        assert whole.answer.exit_code == 1
        assert [pair.outcome for pair in whole.pairs] == ["regression"]


def test_a_shard_that_is_missing_leaves_no_answer() -> None:
    passed = pair_of(measured([0.0], 1e-9), measured([0.0], 1e-9))
    whole = merge_comparisons({"one": shard(1, 3, passed), "three": shard(3, 3)})
    assert whole.answer.exit_code == 2
    assert "shard 2/3 is not among them" in whole.answer.line


def test_shards_of_different_builds_are_not_joined() -> None:
    other = shard(2, 2, candidate={"reference": "C", "digest": "c"})
    with pytest.raises(ReportError, match="two: its candidate digest is c, that of one is b"):
        merge_comparisons({"one": shard(1, 2, regression()), "two": other})
