"""The verdict, the table and junit.xml say what the checks say."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from conformance.harness.report.junit import write_junit
from conformance.harness.report.results import VERDICTS, Check, NotApplicable, Results, Verdict
from conformance.harness.report.terminal import print_results
from conformance.harness.report.verdict import summarise

SHORT = {"P": "PASS", "K": "KNOWN", "S": "SKIPPED", "U": "UNKNOWN", "T": "TIMEOUT", "F": "FAIL", "C": "CRASH"}


def check(
    verdict: Verdict, id: str = "RP-01", model: str = "holo3-mini", required: bool = True, **more: object
) -> Check:
    fields = {"reason": "because", **more} if verdict != "PASS" else more
    return Check.planned(id, model, "A title", required).settled(verdict, **fields)


def results_of(checks: list[Check], pairs: tuple[NotApplicable, ...] = ()) -> Results:
    return Results(
        build={"name": "bundled"},
        suite={},
        settings={},
        checks=tuple(checks),
        not_applicable=pairs,
        summary=summarise(checks, pairs),
    )


def shown(results: Results, width: int = 80) -> str:
    stream = io.StringIO()
    print_results(results, Console(file=stream, width=width))
    return stream.getvalue()


def test_what_an_informative_check_measured_is_told_although_it_passed() -> None:
    told: dict[str, Any] = {"deviation": 0.0, "limit": 1.0, "detail": {"expected": "0 rows", "seen": "K over V .0054"}}
    measured = check("PASS", "KL-03", required=False, **told)
    decides = check("PASS", "KL-01", required=True, **told)
    page = shown(results_of([measured, decides]))
    assert "measured: KL-03 on holo3-mini: K over V .0054, against 0 rows" in page
    assert "measured: KL-01" not in page


@pytest.mark.parametrize(
    ("required", "informative", "code"),
    [
        ("P", "", 0),
        ("PK", "", 0),
        ("K", "", 0),
        ("P", "SUTFC", 0),
        ("PS", "", 1),
        ("PU", "", 1),
        ("PT", "", 1),
        ("PF", "P", 1),
        ("PC", "", 1),
        ("", "", 2),
        ("", "P", 2),
        ("", "F", 2),
    ],
)
def test_the_exit_code_follows_the_required_checks(required: str, informative: str, code: int) -> None:
    checks = [check(SHORT[letter], "RP-01", f"m{n}") for n, letter in enumerate(required)]  # type: ignore[arg-type]
    checks += [check(SHORT[letter], "KL-03", f"m{n}", False) for n, letter in enumerate(informative)]  # type: ignore[arg-type]
    summary = summarise(checks)
    assert summary.exit_code == code
    assert summary.line.startswith(("CONFORMS: ", "DOES NOT CONFORM: ", "NO VERDICT: ")[code])
    assert sum(summary.counts.values()) == len(checks)
    assert summarise(checks, problems=["the disk is full"]).exit_code == 2


@given(st.lists(st.tuples(st.sampled_from(VERDICTS), st.booleans()), max_size=8))
def test_a_run_conforms_only_if_all_that_is_required_passed_or_is_known(outcomes: list[tuple[Verdict, bool]]) -> None:
    checks = [check(verdict, model=f"m{n}", required=required) for n, (verdict, required) in enumerate(outcomes)]
    deciding = {verdict for verdict, required in outcomes if required}
    conforms = bool(deciding) and deciding <= {"PASS", "KNOWN"}
    assert (summarise(checks).exit_code == 0) == conforms


def test_the_verdict_line_names_known_failures_and_what_does_not_apply() -> None:
    known = check("KNOWN", "SM-01/rollback-whole-last-batch", reason="upstream #26695")
    line = summarise([check("PASS"), known], [NotApplicable(id="RP-04", model="m", reason="r")]).line
    assert line == (
        "CONFORMS: 1 passed, 1 known failure (SM-01/rollback-whole-last-batch, upstream #26695), 1 does not apply"
    )


def test_the_verdict_line_names_what_is_wrong_the_worst_first() -> None:
    checks = [
        check("PASS"),
        check("FAIL", "RP-04", "a"),
        check("FAIL", "RP-04", "b"),
        Check.planned("RP-09", "a", "t", True),
        check("CRASH", "RP-02", "a"),
        check("FAIL", "KL-03", "a", False),
    ]
    assert summarise(checks).line == (
        "DOES NOT CONFORM: RP-02 crashes on a; RP-04 fails on a, b; RP-09 was not run on a; "
        "1 passed, 1 informative not passing (KL-03 fails on a)"
    )


def test_the_table_has_a_line_for_each_invariant_in_80_columns_without_colour() -> None:
    checks = [
        check("FAIL", "RP-04", "a", deviation=3.1e-2, floor=2e-13, limit=0.0, replay="pytest -k '[a]' " + "x" * 90),
        check("PASS", "RP-04", "b", deviation=0.0, floor=2e-13),
        *(check(verdict, "RP-09", f"m{n}") for n, verdict in enumerate(VERDICTS)),
        check("KNOWN", "SM-01/rollback-whole-last-batch", reason="upstream #26695"),
    ]
    text = shown(results_of(checks))
    assert "\x1b" not in text
    head, *rows = text.splitlines()
    assert head.split() == ["id", "title", "models", "worst", "/", "floor", "s"]
    assert rows[0].split() == ["RP-04", "A", "title", "1", "FAIL", "1", "PASS", "3.1e-2", "/", "2.0e-13", "0.0"]
    table = rows[: rows.index("FAIL RP-04 on a")]
    for id in ("RP-04", "RP-09", "SM-01"):
        assert sum(row.startswith(id) for row in table) == 1
    assert f"  replay: pytest -k '[a]' {'x' * 90}\n" in text, "a replay must be whole to be copied"
    assert all(len(row) <= 80 for row in table)
    assert rows[-1] == results_of(checks).summary.line


def test_a_failure_names_the_first_layer_that_differs() -> None:
    rows = [
        {"layer": n, "kind": "recurrent", "equal": n < 7, "first": "s, cell 0" if n > 6 else None} for n in range(40)
    ]
    text = shown(results_of([check("FAIL", detail={"layers": rows})]))
    assert "33 of 40 rows differ, first layer 7 (recurrent): s, cell 0" in text


def test_a_deviation_that_is_not_a_number_is_the_worst() -> None:
    text = shown(
        results_of([check("FAIL", model="a", deviation=9.0), check("FAIL", model="b", deviation=float("nan"))])
    )
    assert "nan / -" in text.splitlines()[1]


def test_what_did_not_run_and_what_does_not_apply_is_listed_with_its_models() -> None:
    pairs = tuple(NotApplicable(id="RP-04", model=m, reason=f"needs x; {m} has y") for m in ("a-mini", "b-mini"))
    text = shown(results_of([Check.planned("RP-09", m, "t", True) for m in ("a", "b")], pairs))
    assert "UNKNOWN RP-09 was not run on a, b\n" in text
    assert "RP-04 does not apply to a-mini, b-mini: needs x; it has y\n" in text


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("verdict", VERDICTS)
def test_junit_lets_only_required_checks_fail(tmp_path: Path, verdict: Verdict, required: bool) -> None:
    write_junit(results_of([check(verdict, required=required), check("PASS", "RP-02")]), tmp_path / "junit.xml")
    suite = ET.parse(tmp_path / "junit.xml").getroot()
    tags = [child.tag for case in suite.iter("testcase") for child in case]
    if verdict == "PASS":
        expected = []
    elif verdict == "KNOWN" or not required:
        expected = ["skipped"]
    else:
        expected = ["failure" if verdict == "FAIL" else "error"]
    assert tags == expected
    counts = {name: int(suite.get(name, "")) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {
        "tests": 2,
        "failures": expected.count("failure"),
        "errors": expected.count("error"),
        "skipped": expected.count("skipped"),
    }


@given(text=st.text(st.characters(), min_size=1) | st.text(st.sampled_from("a\x00\r\x1b\x9b\ud800\uffff"), min_size=1))
def test_any_text_gives_a_file_that_parses_and_a_terminal_without_controls(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    results = results_of([check("CRASH", model=text, reason=text, replay=text, case=text)])
    path = tmp_path_factory.mktemp("report") / "junit.xml"
    write_junit(results, path)
    assert len(ET.parse(path).getroot().findall("testcase")) == 1
    assert not {"\x1b", "\x9b", "\x00"} & set(shown(results))
