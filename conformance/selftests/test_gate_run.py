"""Whole gates, as a user makes them, on the bundled build against itself and against builds that do not load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness.exam.session import Shard
from conformance.harness.report.comparison import Comparison, read_comparison

from .conftest import ROOT, replayed

MODEL = "mamba2-mini"


def run(report: Path, *options: str, baseline: str = "bundled", candidate: str = "bundled") -> Any:
    command = [sys.executable, "-m", "tools.gate", "--baseline", baseline, "--candidate", candidate]
    return subprocess.run(
        [*command, "--profile", "smoke", "--model", MODEL, "--jobs", "1", "--report", str(report), *options],
        cwd=report.parent,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def cases(results: Path) -> list[Any]:
    checks = json.loads(results.read_text())["checks"]
    return [(check["id"], case["case"]) for check in checks for case in check["detail"]["cases"] or ()]


@pytest.fixture(scope="module")
def itself(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The report of the bundled build against itself, and what was printed."""
    report = tmp_path_factory.mktemp("gate") / "report"
    done = run(report, "--fresh", "-k", "RP-01 or RB-01 or XB-0")
    assert done.returncode == 0, done.stdout + done.stderr
    return report, done.stdout


def test_a_build_against_itself_may_upgrade(itself: tuple[Path, str]) -> None:
    report, printed = itself
    comparison = read_comparison(report)
    assert {pair.outcome for pair in comparison.pairs} <= {"pass", "known"}
    assert {"RP-01", "XB-01", "XB-02", "XB-03", "XB-04"} <= {pair.id for pair in comparison.pairs}
    assert "MAY UPGRADE" in printed
    assert comparison.states["states of the baseline in the candidate"] == "taken over on all 1 models"
    for name in ("report.html", "summary.md", "junit.xml", "baseline/results.json", "candidate/results.json"):
        assert (report / name).is_file()


def test_both_builds_replay_one_list_of_cases(itself: tuple[Path, str]) -> None:
    report, _ = itself
    baseline, candidate = (cases(report / side / "results.json") for side in ("baseline", "candidate"))
    assert baseline
    assert baseline == candidate
    listed = [json.loads(line) for line in (report / "cases.jsonl").read_text().splitlines()]
    assert all({"id": id, "model": MODEL, "case": case} in listed for id, case in baseline)


def test_what_has_not_changed_is_not_run_again(itself: tuple[Path, str]) -> None:
    report, _ = itself
    done = run(report.with_name("again"), "-k", "RP-01 or RB-01 or XB-0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "baseline: bundled: as in an earlier run" in done.stdout
    assert read_comparison(report).answer == read_comparison(report.with_name("again")).answer


def test_shards_are_the_whole_gate(itself: tuple[Path, str]) -> None:
    report, _ = itself
    folders = [report.with_name(f"shard{number}") for number in (1, 2)]
    for number, folder in enumerate(folders, 1):
        done = run(folder, "-k", "RP-01 or RB-01 or XB-0", "--shard", f"{number}/2")
        assert done.returncode == 0, done.stdout + done.stderr

    def merged(*shards: Path) -> tuple[int, Path]:
        out = report.with_name(f"merged{len(shards)}")
        command = [sys.executable, "-m", "tools.report", "merge", *map(str, shards), "--out", str(out)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode, out

    code, out = merged(*folders)
    assert code == 0
    whole, joined = ({(pair.id, pair.model) for pair in read_comparison(each).pairs} for each in (report, out))
    assert joined == whole
    assert merged(folders[0])[0] == 2


@given(st.text(), st.text(), st.integers(1, 12))
def test_every_check_is_in_one_shard(id: str, model: str, of: int) -> None:
    assert sum(Shard(number, of).holds(id, model) for number in range(1, of + 1)) == 1


def test_a_planted_fault_is_the_one_regression(tmp_path: Path) -> None:
    done = run(tmp_path / "report", "-k", "RP-06 or RP-09", "--inject-fault", "consumed-short")
    assert done.returncode == 1, done.stdout + done.stderr
    comparison: Comparison = read_comparison(tmp_path / "report")
    (found,) = (pair for pair in comparison.pairs if pair.outcome != "pass")
    assert (found.id, found.model, found.outcome, found.confirmed) == ("RP-09", MODEL, "regression", True)
    assert f"MAY NOT UPGRADE: regression: RP-09 on {MODEL}; " in done.stdout
    assert found.replay is not None
    assert replayed(found.replay).returncode == 1


def library(folder: Path, body: str) -> str:
    """A folder with a libllama.so whose loading does what the C code says."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source = folder / "trap.c"
    source.write_text(f"#include <stdlib.h>\n__attribute__((constructor)) static void now(void) {{ {body} }}\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(folder / "libllama.so"), str(source)], check=True)
    return str(folder)


@pytest.mark.parametrize(("body", "signal"), [("__builtin_trap();", "SIGILL"), ("abort();", "SIGABRT")])
def test_a_candidate_that_dies_when_it_is_loaded_gets_a_verdict(tmp_path: Path, body: str, signal: str) -> None:
    done = run(tmp_path / "report", candidate=library(tmp_path, body))
    assert done.returncode == 1
    assert "MAY NOT UPGRADE: crash: loading the candidate ends the process" in done.stdout
    assert signal in read_comparison(tmp_path / "report").answer.line
    assert "Traceback" not in done.stdout + done.stderr
    assert '<error type="crash"' in (tmp_path / "report" / "junit.xml").read_text()


def test_a_baseline_that_dies_when_it_is_loaded_leaves_nothing_to_compare(tmp_path: Path) -> None:
    done = run(tmp_path / "report", baseline=library(tmp_path, "abort();"))
    assert done.returncode == 2
    assert "name a build that runs on this machine" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--profile", "fast"], "no such profile; choose from smoke, standard, deep"),
        (["--inject-fault", "none"], "no such fault; choose from"),
        (["--shard", "4/3"], "give it as I/N"),
        (["--jobs", "none"], "give a number of processes"),
        (["--model", "/nonexistent.gguf"], "give the path of a GGUF"),
        (["--report", "/proc/nothing"], "name a folder that can be written"),
        (["-k", "no-such-check"], "-k no-such-check: chooses no check"),
        (["-k", "RP-01", "--shard", "1/9999"], "-k RP-01 --shard 1/9999: chooses no check"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(options: list[str], says: str, tmp_path: Path) -> None:
    done = run(tmp_path / "report", *options)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_a_folder_that_holds_no_build_is_refused(side: str, tmp_path: Path) -> None:
    done = run(tmp_path / "report", **{side: str(tmp_path)})
    assert done.returncode == 2
    assert "no libllama in" in done.stderr
