"""Shards join into the run they were cut from, and the command line tool says what it did or why not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness.report.forms import FORMS
from conformance.harness.report.merge import merge
from conformance.harness.report.results import VERDICTS, Check, NotApplicable, Results, Verdict
from conformance.harness.report.store import ReportError, ResultsWriter, read_results
from conformance.harness.report.verdict import summarise
from tools.report import main

PLANNED = [Check.planned(f"RP-0{number}", model, "A title", True) for number in (1, 2) for model in ("a", "b", "c")]
BUILD = {"version": "1.2", "digest": "abc"}


def run_of(
    *checks: Check,
    pairs: tuple[NotApplicable, ...] = (),
    build: dict[str, Any] = BUILD,
    suite: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    notes: tuple[str, ...] = (),
    problems: tuple[str, ...] = (),
) -> Results:
    return Results(
        build=build,
        suite=suite or {"name": "s", "version": "1"},
        settings=settings or {},
        checks=checks,
        not_applicable=pairs,
        notes=(*notes, *problems),
        summary=summarise(checks, pairs, problems),
    )


def outcome(planned: Check, verdict: Verdict) -> Check:
    return planned.settled(verdict, reason=f"ended in {verdict}", seconds=1.0, examples=2)


@given(
    verdicts=st.lists(st.none() | st.sampled_from(VERDICTS), min_size=6, max_size=6),
    owners=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    n_planned=st.lists(st.integers(0, 6), min_size=3, max_size=3),
)
def test_shards_that_divided_the_checks_join_into_the_whole_run(
    verdicts: list[Verdict | None], owners: list[int], n_planned: list[int]
) -> None:
    """Each check is run by its owner; every other shard may have planned it too."""
    whole = [
        check if verdict is None else outcome(check, verdict) for check, verdict in zip(PLANNED, verdicts, strict=True)
    ]
    shards = {
        f"shard {number}": run_of(
            *(
                whole[place] if owners[place] == number else check
                for place, check in enumerate(PLANNED)
                if owners[place] == number or place < n_planned[number]
            )
        )
        for number in range(3)
    }
    merged = merge(shards)
    assert {(check.id, check.model): check for check in merged.checks} == {
        (check.id, check.model): check for check in whole
    }
    assert merged.summary.exit_code == summarise(whole).exit_code
    assert merged.summary.counts == summarise(whole).counts


@pytest.mark.parametrize("first", VERDICTS)
@pytest.mark.parametrize("second", VERDICTS)
def test_of_two_outcomes_the_worse_stays(first: Verdict, second: Verdict) -> None:
    merged = merge({name: run_of(outcome(PLANNED[0], verdict)) for name, verdict in (("1", first), ("2", second))})
    (check,) = merged.checks
    worse = max(first, second, key=VERDICTS.index)
    assert (check.verdict, check.reason, check.seconds, check.examples) == (worse, f"ended in {worse}", 2.0, 4)


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (run_of(build={**BUILD, "digest": "abd"}), "build digest is abd, that of one is abc"),
        (run_of(build={"version": "1.2"}), "build digest is none, that of one is abc"),
        (run_of(suite={"name": "s", "version": "2"}), "suite is s 2, that of one is s 1"),
        (run_of(settings={"fault": "layer-missing"}), "planted fault is layer-missing, that of one is none"),
    ],
)
def test_runs_that_are_no_shards_of_one_are_refused(other: Results, problem: str) -> None:
    with pytest.raises(ReportError, match=f"^two: its {problem}; merge only shards of one run on one build$"):
        merge({"one": run_of(), "two": other})


def test_nothing_is_no_run() -> None:
    with pytest.raises(ReportError, match="no results to merge"):
        merge({})


def test_the_same_build_may_lie_elsewhere() -> None:
    assert merge({"1": run_of(), "2": run_of(build={**BUILD, "library": "/elsewhere"})}).build == BUILD


def test_settings_that_differ_stand_side_by_side_and_null_gives_way() -> None:
    common = {"profile": "smoke", "fault": None}
    shards: list[dict[str, Any]] = [
        {**common, "seed": 0, "models": {"a": {"kinds": ["attention"], "speed": 9}}},
        {**common, "seed": 1, "models": {"a": {"kinds": ["attention"], "speed": None}, "b": {"measured": None}}},
        {**common, "seed": 0, "models": {"a": {"kinds": ["attention"], "speed": 8}, "b": {"measured": {"floor": 0.0}}}},
    ]
    assert merge({str(number): run_of(settings=settings) for number, settings in enumerate(shards)}).settings == {
        **common,
        "seed": [0, 1],
        "models": {"a": {"kinds": ["attention"], "speed": [9, 8]}, "b": {"measured": {"floor": 0.0}}},
        "shards": 3,
    }


def test_notes_say_whose_they_are_unless_all_have_them() -> None:
    merged = merge({"one": run_of(notes=("all", "mine")), "two": run_of(notes=("yours", "all"))})
    assert merged.notes == ("all", "one: mine", "two: yours")


def test_a_shard_that_lost_results_leaves_no_verdict() -> None:
    done = outcome(PLANNED[0], "PASS")
    lost = "the report in x may be incomplete (No space left on device); make room and run again"
    merged = merge({"one": run_of(done), "two": run_of(done, notes=("a note",), problems=(lost,))})
    assert merged.summary.exit_code == 2
    assert merged.notes == ("two: a note", f"two: {lost}")


def test_a_pair_that_some_shard_checked_does_apply() -> None:
    pairs = tuple(NotApplicable(id=check.id, model=check.model, reason="r") for check in PLANNED[:2])
    merged = merge({"one": run_of(pairs=pairs), "two": run_of(outcome(PLANNED[0], "PASS"), pairs=pairs[1:])})
    assert [(pair.id, pair.model) for pair in merged.not_applicable] == [("RP-01", "b")]


def report_folder(folder: Path, *done: Check, build: dict[str, Any] = BUILD) -> Path:
    running = ResultsWriter(folder, PLANNED, build, {"name": "s", "version": "1"}, {})
    for check in done:
        running.record(check)
    running.finish()
    return folder


def tool(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.out, said.err


@pytest.mark.parametrize("command", [[], ["render"]])
@pytest.mark.parametrize("name", ["", "results.json", "results.jsonl"])
def test_a_report_is_rendered_beside_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], name: str
) -> None:
    folders = [report_folder(tmp_path / str(number), outcome(PLANNED[0], "FAIL")) for number in range(2)]
    code, out, err = tool(capsys, *command, *(folder / name for folder in folders))
    assert (code, err) == (0, "")
    for folder in folders:
        assert FORMS.keys() <= {path.name for path in folder.iterdir()}
        assert f"  {folder / 'report.html'}\n" in out
    assert out.count("DOES NOT CONFORM: RP-01 fails on a") == 2


def test_a_report_can_go_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = report_folder(tmp_path / "run")
    before = set(folder.iterdir())
    assert tool(capsys, "--out", tmp_path / "new" / "folder", folder)[0] == 0
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == set(FORMS)
    assert set(folder.iterdir()) == before


def test_shards_on_disk_are_merged_into_a_folder_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = report_folder(tmp_path / "one", *(outcome(check, "PASS") for check in PLANNED[:3]))
    two = report_folder(tmp_path / "two", *(outcome(check, "PASS") for check in PLANNED[3:]))
    for _ in range(2):
        code, out, err = tool(capsys, "merge", one, two / "results.json", "--out", tmp_path / "whole")
        assert (code, err, out.splitlines()[0]) == (0, "", "CONFORMS: 6 passed")
    assert read_results(tmp_path / "whole").summary.exit_code == 0
    assert read_results(one).summary.exit_code == 1
    assert FORMS.keys() <= {path.name for path in (tmp_path / "whole").iterdir()}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["gone"], "gone: cannot be read (No such file or directory); name the report folder of a run"),
        (["merge", "one", "gone", "--out", "new"], "gone: cannot be read (No such file"),
        (["merge", "one", "other", "--out", "new"], "other: its build digest is abd, that of one is abc; merge only"),
        (["merge", "one", "one", "--out", "other"], "other holds the results.jsonl of another run; choose another"),
        (["merge", "one", "--out", "one/results.json"], "cannot write the report folder one/results.json ("),
        (["one", "other", "--out", "new"], "--out new: takes the report of one RESULTS, not of 2; merge them, or"),
        (
            ["one", "--out", "one/results.json"],
            "--out one/results.json: File exists; name a folder that can be written",
        ),
        (["one", "--out", "blocked"], "blocked: cannot write report.html (Is a directory); make room there"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    report_folder(Path("one"))
    report_folder(Path("other"), build={**BUILD, "digest": "abd"})
    (tmp_path / "blocked" / "report.html").mkdir(parents=True)
    code, _, err = tool(capsys, *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(problem)
    assert not (tmp_path / "new").exists()


def test_a_damaged_file_beside_a_good_log_is_no_obstacle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = report_folder(tmp_path / "run", outcome(PLANNED[0], "PASS"))
    shutil.copy(folder / "results.jsonl", folder / "results.json")
    assert tool(capsys, folder)[0] == 0
