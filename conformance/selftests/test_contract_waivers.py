"""A waiver excuses what it names for as long as it says, and whatever else it does is said aloud."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness.contract.load import SpecError
from conformance.harness.contract.waivers import Kinds, Waiver, load_waivers, notes, waive
from conformance.harness.report.results import VERDICTS, Check, Verdict

ENTRY = """\
waivers:
  - id: SM-01/some-family
    models: [my-model]
    kinds: [sliding_window]
    reason: we never roll back
    expires: 2026-12-31
"""
LAST_DAY = date(2026, 12, 31)
KINDS: Kinds = {"my-model": ["attention"], "other": ["attention", "sliding_window"], "third": ["recurrent"]}


def load(folder: Path, text: str = ENTRY) -> tuple[Waiver, ...]:
    path = folder / "waivers.yaml"
    path.write_text(text)
    return load_waivers(path, ("SM-01/some-family", "RP-04"))


def check(verdict: Verdict = "FAIL", id: str = "SM-01/some-family", model: str = "my-model") -> Check:
    return Check(id=id, model=model, title="t", required=True, verdict=verdict, reason="it broke", deviation=None)


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("SM-01/", "SM-02/", "2: waivers[0].id: no invariant 'SM-02/some-family'; did you mean 'SM-01/some-family'?"),
        ("some-family", "same-family", "2: waivers[0].id: no invariant 'SM-01/same-family'; did you mean"),
        ("SM-01/some-family", "everything", "2: waivers[0].id: found 'everything'; write an id such as"),
        (
            "2026-12-31",
            "2026-02-30",
            "6: waivers[0].expires: 2026-02-30 is not a date; write a date such as 2026-12-31",
        ),
        ("2026-12-31", "never", "6: waivers[0].expires: never is not a date"),
        ("2026-12-31", "20261231", "6: waivers[0].expires: 20261231 is not a date"),
        ("    expires: 2026-12-31\n", "", "2: waivers[0].expires: is missing; write a date such as 2026-12-31"),
        ("    reason: we never roll back\n", "", "2: waivers[0].reason: is missing"),
        ("sliding_window", "sliding", "4: waivers[0].kinds[0]: found 'sliding'; did you mean 'sliding_window'?"),
        ("    models: [my-model]\n    kinds: [sliding_window]\n", "", "2: waivers[0]: concerns no model; write models"),
        (
            "    reason",
            "    verdict: PASS\n    reason",
            "5: waivers[0].verdict: found 'PASS'; known: FAIL, CRASH, TIMEOUT",
        ),
        ("    reason", "    because", "5: waivers[0].because: unknown key; known: id, verdict, models, kinds"),
    ],
)
def test_an_entry_that_could_be_misread_is_refused(tmp_path: Path, right: str, wrong: str, problem: str) -> None:
    assert right in ENTRY
    with pytest.raises(SpecError) as caught:
        load(tmp_path, ENTRY.replace(right, wrong, 1))
    assert any(line.startswith(f"{tmp_path}/waivers.yaml:{problem}") for line in caught.value.problems), caught.value


def test_a_file_that_is_not_there_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"^.*/gone.yaml: cannot be read \(No such file or directory\); check the path"):
        load_waivers(tmp_path / "gone.yaml")


def test_a_waived_failure_is_known_and_still_says_what_it_was(tmp_path: Path) -> None:
    waived = waive(load(tmp_path), check(), KINDS, LAST_DAY)
    assert (waived.verdict, waived.reason) == ("KNOWN", "waived until 2026-12-31: we never roll back")
    assert waived.detail.excused is not None
    assert (waived.detail.excused.verdict, waived.detail.excused.reason) == ("FAIL", "it broke")
    assert Check.model_validate_json(waived.model_dump_json()) == waived


@given(days=st.integers(-400, 400))
def test_a_waiver_holds_up_to_its_last_day(tmp_path_factory: pytest.TempPathFactory, days: int) -> None:
    waivers = load(tmp_path_factory.mktemp("waivers"))
    today = LAST_DAY + timedelta(days)
    waived = waive(waivers, check(), KINDS, today)
    assert (waived.verdict == "KNOWN") == (days <= 0)
    lines = notes(waivers, [waived], KINDS, today)
    assert [f"{waivers[0].where}: the waiver of SM-01/some-family expired on 2026-12-31" in line for line in lines] == (
        [True] if days > 0 else []
    )


@pytest.mark.parametrize("named", ["FAIL", "CRASH", "TIMEOUT"])
@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_waiver_excuses_only_the_verdict_it_names(tmp_path: Path, named: Verdict, verdict: Verdict) -> None:
    text = ENTRY if named == "FAIL" else ENTRY.replace("    reason", f"    verdict: {named}\n    reason")
    ended = check(verdict)
    waived = waive(load(tmp_path, text), ended, KINDS, LAST_DAY)
    assert waived is ended if verdict != named else waived.verdict == "KNOWN"


@pytest.mark.parametrize(
    ("named", "id", "model", "concerned"),
    [
        ("SM-01/some-family", "SM-01/some-family", "my-model", True),
        ("SM-01/some-family", "SM-01/some-family", "other", True),
        ("SM-01/some-family", "SM-01/some-family", "third", False),
        ("SM-01/some-family", "SM-01/some-family", "stranger", False),
        ("SM-01/some-family", "SM-01/some-family-too", "my-model", False),
        ("SM-01/some-family", "SM-01", "my-model", False),
        ("SM-01", "SM-01", "my-model", True),
        ("SM-01", "SM-01/some-family", "my-model", True),
        ("SM-01", "RP-04", "my-model", False),
    ],
)
def test_a_waiver_concerns_its_id_with_all_its_families_on_its_models(
    tmp_path: Path, named: str, id: str, model: str, concerned: bool
) -> None:
    waivers = load(tmp_path, ENTRY.replace("SM-01/some-family", named))
    assert (waive(waivers, check("FAIL", id, model), KINDS, LAST_DAY).verdict == "KNOWN") == concerned


def test_a_waiver_that_is_over_does_not_stand_in_the_way_of_one_that_holds(tmp_path: Path) -> None:
    renewed = ENTRY + ENTRY.removeprefix("waivers:\n").replace("2026-12-31", "2027-06-30")
    waived = waive(load(tmp_path, renewed), check(), KINDS, LAST_DAY + timedelta(1))
    assert waived.reason == "waived until 2027-06-30: we never roll back"


@pytest.mark.parametrize("named", ["CRASH", "TIMEOUT"])
def test_a_waived_crash_or_timeout_is_still_named(tmp_path: Path, named: Verdict) -> None:
    waivers = load(tmp_path, ENTRY.replace("    reason", f"    verdict: {named}\n    reason"))
    checks = [waive(waivers, check(named, model=model), KINDS, LAST_DAY) for model in ("my-model", "other")]
    why = waivers[0].entry.reason
    assert notes(waivers, checks, KINDS, LAST_DAY) == [
        f"{tmp_path}/waivers.yaml:2: the waiver of SM-01/some-family covers a {named} on my-model, other until {LAST_DAY}: {why}"
    ]


@pytest.mark.parametrize(
    ("checks", "why"),
    [
        ([], "no check that it concerns was run; correct its id, models or kinds"),
        ([check("FAIL", "RP-04")], "no check that it concerns was run; correct its id, models or kinds"),
        (
            [Check.planned("SM-01/some-family", "my-model", "t", True)],
            "no check that it concerns was run; correct its id, models or kinds",
        ),
        ([check("PASS"), check("CRASH", model="other")], "no FAIL on my-model, other; remove it"),
    ],
)
def test_a_waiver_that_was_not_used_is_named_with_the_reason(tmp_path: Path, checks: list[Check], why: str) -> None:
    waivers = load(tmp_path)
    waived = [waive(waivers, each, KINDS, LAST_DAY) for each in checks]
    assert notes(waivers, waived, KINDS, LAST_DAY) == [
        f"{tmp_path}/waivers.yaml:2: the waiver of SM-01/some-family was not used: {why}"
    ]


def test_a_waiver_of_a_plain_failure_that_was_used_needs_no_note(tmp_path: Path) -> None:
    waivers = load(tmp_path)
    checks = [waive(waivers, check(verdict), KINDS, LAST_DAY) for verdict in ("FAIL", "PASS")]
    assert notes(waivers, checks, KINDS, LAST_DAY) == []
