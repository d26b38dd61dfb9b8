"""The small tools: doctor, replay, the installer's word on compilers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.harness.report.results import Check
from conformance.harness.report.store import ResultsWriter
from tools import install

from .conftest import ROOT


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"tools.{name}", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_doctor_finds_a_sound_set_up_sound() -> None:
    done = tool("doctor", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, found["problems"]
    assert found["problems"] == []
    assert found["build"]["context_layout"]
    assert "partial_state" in found["build"]["capabilities"]["found"]
    assert set(found["versions"]) >= {"python", "hypothesis", "gguf"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--build", "/nonexistent"), "build '/nonexistent': no such folder"),
        (("--model", "/nonexistent.gguf"), "--model /nonexistent.gguf: No such file or directory"),
    ],
)
def test_the_doctor_names_each_problem_in_a_line(options: tuple[str, str], says: str) -> None:
    done = tool("doctor", *options)
    assert done.returncode == 2
    assert [line for line in done.stdout.splitlines() if line.startswith("WRONG") and says in line]
    assert "Traceback" not in done.stdout + done.stderr


def report(folder: Path, verdict: str, replay: str | None) -> Path:
    planned = Check.planned("RP-01", "some-model", "a title", required=True)
    writer = ResultsWriter(folder, [planned], build={}, suite={}, settings={})
    writer.record(planned.settled(verdict, reason="why", replay=replay))  # type: ignore[arg-type]
    writer.finish()
    return folder


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("python -c 'print(\"seen again\"); raise SystemExit(1)'", 1, "seen again"),
        ("python -c 'print(\"passes now\")'", 0, "passes now"),
        ("python -c 'import os; os.abort()'", 1, "CRASH RP-01 on some-model: the process ended with SIGABRT"),
    ],
)
def test_replay_runs_what_the_report_printed(tmp_path: Path, line: str, code: int, says: str) -> None:
    done = tool("replay", str(report(tmp_path, "FAIL", line)), "RP-01")
    assert (done.returncode, says in done.stdout) == (code, True), done.stdout + done.stderr


def test_replay_says_what_it_cannot_replay(tmp_path: Path) -> None:
    folder = report(tmp_path, "PASS", None)
    for id, says in (("RP-02", "has no check RP-02; it has RP-01"), ("RP-01", "left nothing to replay")):
        done = tool("replay", str(folder), id)
        assert done.returncode == 2
        assert says in done.stderr
    done = tool("replay", str(tmp_path / "nowhere"), "RP-01")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_the_installer_says_what_to_install_where_no_compiler_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert install.lacks_compiler()
    assert install.main(["llama-cpp-python==999"]) == 1
    assert "apt install build-essential" in capsys.readouterr().err
    (tmp_path / "cc").touch(mode=0o755)
    (tmp_path / "c++").touch(mode=0o755)
    assert not install.lacks_compiler()


def test_the_benchmark_prints_each_figure_beside_what_it_must_reach() -> None:
    done = tool("benchmark", "kld", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    assert "positions/s  >= 1000" in done.stdout
    assert "load" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("tail", "--model", "mamba2-mini"), "attention"),
        (("native", "--model", "nowhere.gguf"), "nowhere.gguf"),
        (("native", "--model", "qwen3-mini", "--perplexity", "/nonexistent"), "/nonexistent"),
        (("native", "--model", "qwen3-mini", "--perplexity", "/bin/false"), "is it llama-perplexity?"),
    ],
)
def test_a_benchmark_that_cannot_run_ends_in_one_line_and_exit_code_2(arguments: tuple[str, ...], says: str) -> None:
    done = tool("benchmark", *arguments, "--repeats", "1")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert says in done.stderr
