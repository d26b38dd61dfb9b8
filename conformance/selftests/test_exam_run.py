"""Whole runs, as a user makes them: what they leave behind when all is well, and when it is not."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.harness.contract.schema import Kind
from conformance.harness.exam import plugin
from conformance.harness.exam.check import every_check
from conformance.harness.exam.examination import contract
from conformance.harness.exam.session import Options, Session, UsageError, architectures
from conformance.harness.report.store import read_results
from fixtures import auto, models
from fixtures.trained import TRAINED

from .conftest import ROOT, replayed


def command(report: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "conformance", "--profile", "smoke", "--report", str(report), *options]


def run(report: Path, *options: str, model: str = "mamba2-mini") -> subprocess.CompletedProcess[str]:
    """A small run: one model."""
    return subprocess.run(
        command(report, "--model", model, *options),
        cwd=report.parent,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def content(report: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((report / "results.json").read_text())
    return loaded


def test_a_run_leaves_a_verdict_for_people_and_for_machines(tmp_path: Path) -> None:
    done = run(tmp_path / "report")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nCONFORMS: " in done.stdout
    results = read_results(tmp_path / "report")
    assert {check.verdict for check in results.checks} == {"PASS", "KNOWN"}
    assert {check.id for check in results.checks} | {pair.id for pair in results.not_applicable} >= {"AR-01", "RP-04"}
    assert (tmp_path / "report" / "junit.xml").is_file()


def test_an_abort_in_one_check_is_a_crash_on_its_line_and_the_rest_is_complete(tmp_path: Path) -> None:
    done = run(tmp_path / "report", "--inject-fault", "aborts-on-partial-save")
    assert done.returncode == 1
    checks = {check["id"]: check for check in content(tmp_path / "report")["checks"]}
    assert checks["RP-04"]["verdict"] == "CRASH"
    assert "GGML_ASSERT" in checks["RP-04"]["detail"]["stderr"]
    assert checks["RP-01"]["verdict"] == checks["AR-01"]["verdict"] == "PASS"
    done = replayed(checks["RP-04"]["replay"])
    assert done.returncode == -signal.SIGABRT


def test_a_failure_replays_in_a_fresh_process(tmp_path: Path) -> None:
    done = run(tmp_path / "report", "--inject-fault", "delta-state-dropped", "-k", "RP-01")
    assert done.returncode == 1
    check = next(check for check in content(tmp_path / "report")["checks"] if check["id"] == "RP-01")
    assert check["verdict"] == "FAIL"
    assert check["replay"] in done.stdout
    again = replayed(check["replay"])
    assert again.returncode == 1
    assert f"deviation {check['deviation']:.3g} " in again.stdout


def test_an_engine_that_keeps_nothing_passes_nothing(tmp_path: Path) -> None:
    done = run(tmp_path / "report", "--inject-fault", "forgets-everything")
    assert done.returncode == 1
    checks = content(tmp_path / "report")["checks"]
    assert {check["verdict"] for check in checks} == {"FAIL"}
    assert "did not depend on what was decoded before" in checks[0]["reason"]


def test_times_are_taken_after_all_else_and_decide_only_when_asked(tmp_path: Path) -> None:
    slow = ("--inject-fault", "slower-with-depth")
    timing = ("--profile", "standard", "-k", "AR-01 or AR-02 or DC-02 or DC-03")
    done = run(tmp_path / "report", *slow, *timing, "-n", "2")
    assert "1 informative not passing (DC-03/recurrent fails on mamba2-mini)" in done.stdout
    checks = {check["id"]: check for check in content(tmp_path / "report")["checks"]}
    assert {id for id, check in checks.items() if check["verdict"] == "PASS" and check["required"]} == {
        "AR-01",
        "AR-02",
    }
    assert checks["DC-03/recurrent"]["verdict"] == "FAIL"
    assert not checks["DC-03/recurrent"]["required"]
    drawn = [json.loads(line)["id"] for line in (tmp_path / "report" / "cases.jsonl").read_text().splitlines()]
    timed = {each.id for each in contract() if each.alone}
    assert {id for id in drawn if id in timed} == set(drawn[-2:]) == {"DC-02", "DC-03/recurrent"}
    done = run(tmp_path / "strict", *slow, "--strict-timing", "-k", "DC-03")  # smoke, which times nothing unasked
    assert done.returncode == 1
    assert "DC-03/recurrent fails on mamba2-mini" in done.stdout
    quick = run(tmp_path / "quick", *slow, "-k", "AR-02 or DC-03")
    assert "informative not passing" not in quick.stdout
    said = {pair["id"]: pair["reason"] for pair in content(tmp_path / "quick")["not_applicable"]}
    assert said["DC-03/recurrent"].startswith(
        "DC-03/recurrent measures times, for which this run of smoke has none; run the profile st"
    )
    untimed = run(tmp_path / "untimed", *slow, *timing, "--no-timing")
    assert "informative not passing" not in untimed.stdout
    said = {pair["id"]: pair["reason"] for pair in content(tmp_path / "untimed")["not_applicable"]}
    assert said["DC-03/recurrent"].endswith("this run of standard has none; leave --no-timing out")


@pytest.mark.parametrize("id", ["DC-02", "DC-03/recurrent"])
def test_a_worker_leaves_what_must_run_alone_to_the_controller(id: str) -> None:
    config: Any = SimpleNamespace(workerinput={}, stash={plugin._SESSION: None, plugin._CONTRACT: contract()})
    request: Any = SimpleNamespace(config=config, param="mamba2-mini", node=SimpleNamespace(user_properties=[]))
    nothing: Any = None  # neither a session nor a child: whatever ran would fail
    plugin._Exam(request, nothing).take(every_check()[id])
    assert request.node.user_properties == [(plugin._POSTPONED, json.dumps([id, "mamba2-mini"]))]
    with pytest.raises(AttributeError):
        plugin._Exam(request, nothing).take(every_check()["AR-01"])


def test_two_runs_do_not_share_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report"
    report.mkdir()
    with (report / "results.jsonl").open("w") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        done = run(report)
    assert done.returncode == 2
    assert "another run is writing its report" in done.stdout + done.stderr


def test_a_name_that_pytest_would_escape_is_a_name_like_any_other(tmp_path: Path) -> None:
    model = tmp_path / "ü [x] \\ 'y'.gguf"
    model.write_bytes(models.path("mamba2-mini").read_bytes())
    done = run(tmp_path / "report", "-k", "RP-01", model=str(model))
    ended = {check["id"]: check["verdict"] for check in content(tmp_path / "report")["checks"]}
    assert ended["RP-01"] == "PASS", done.stdout + done.stderr


def test_required_checks_that_did_not_run_are_not_green(tmp_path: Path) -> None:
    done = run(tmp_path / "report", "-k", "RP-09")
    assert done.returncode == 1
    assert "DOES NOT CONFORM: " in done.stdout
    assert "was not run on" in done.stdout


def test_a_run_that_is_killed_leaves_readable_results(tmp_path: Path) -> None:
    report = tmp_path / "report"
    process = subprocess.Popen(
        command(report, "--profile", "standard", "--model", "holo3-mini"),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log = report / "results.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count('"check"') >= 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    verdicts = {check.id: check.verdict for check in read_results(report).checks}
    assert "PASS" in verdicts.values()
    assert "UNKNOWN" in verdicts.values()
    assert content(report)["summary"]["exit_code"] == 1


def test_the_cases_of_a_run_can_be_run_again(tmp_path: Path) -> None:
    assert run(tmp_path / "first", "--seed", "7").returncode == 0
    drawn = (tmp_path / "first" / "cases.jsonl").read_text()
    done = run(tmp_path / "second", "--cases", str(tmp_path / "first" / "cases.jsonl"))
    assert done.returncode == 0, done.stdout
    assert sorted((tmp_path / "second" / "cases.jsonl").read_text().splitlines()) == sorted(drawn.splitlines())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--build", "/nonexistent"], "no such folder"),
        (["--profile", "fast"], "no such profile; choose from smoke, standard, deep"),
        (["--report", "/proc/nothing/report"], "name a folder that can be written"),
        (["--inject-fault", "none"], "no such fault; choose from"),
        (["--threads", "0"], "1 or more"),
        (["--cases", "/nonexistent.jsonl"], "cases.jsonl of an earlier report"),
        (["--cases", sys.executable], "not a case of a check of this suite"),
        (["--cases", "/dev/null"], "holds no case"),
        (["--threads", "100000"], "they would wait for each other"),
        (["-n", "-3"], "give a number of processes"),
        (["--report", ""], "--report: no folder named"),
        (["--model", "/nonexistent.gguf"], "give the path of a GGUF"),
        (["--arch", "no-such-thing"], "unknown model architecture"),
        (["--no-such-option"], "unrecognized arguments"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(options: list[str], says: str, tmp_path: Path) -> None:
    done = run(tmp_path / "report", *options)
    assert done.returncode == 2
    lines = [line for line in (done.stdout + done.stderr).splitlines() if says in line]
    assert len(lines) == 1
    assert "Traceback" not in done.stdout + done.stderr


def test_a_truncated_model_is_refused_by_name(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(models.path("mamba2-mini").read_bytes()[:100_000])
    done = run(tmp_path / "report", "--model", str(broken))
    assert done.returncode == 2
    assert f"{broken}: truncated" in done.stdout + done.stderr


def test_a_trained_model_that_was_not_fetched_is_named_with_what_to_do(tmp_path: Path) -> None:
    trained = TRAINED["smollm2-135m"]
    session = Session(Options("bundled", (), "smoke", tmp_path), {}, (), {}, absent={trained.name: trained.absence})
    checks, others = session.plan(contract())
    assert not checks
    assert {pair.id for pair in others} == {each.id for each in contract() if trained.name in each.models}
    assert {pair.reason for pair in others} == {trained.absence}
    assert "tools.models fetch smollm2-135m" in trained.absence


def made(arch: str, path: Path | None, *kinds: Kind, reason: str = "") -> auto.AutoModel:
    return auto.AutoModel(arch=arch, path=path, kinds=kinds, reason=reason)


def test_a_sweep_examines_what_was_made_and_says_what_was_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gguf = tmp_path / "some.gguf"
    there = {
        "some": made("some", gguf, "attention", "sliding_window"),
        "plain": made("plain", gguf, "attention"),
        "other": made("other", None, reason="it aborted"),
    }
    monkeypatch.setattr(auto, "known_architectures", lambda build: tuple(there))
    monkeypatch.setattr(auto, "auto_model", lambda arch, build, conditioned=True: there[arch])

    def chosen(profile: str, models: tuple[str, ...] = (), *names: str) -> tuple[list[str], dict[str, str]]:
        subjects, unmade = architectures(Options("b", models, profile, tmp_path, architectures=names), contract())
        assert all(subject.is_made and not subject.is_fixture for subject in subjects)
        return [subject.name for subject in subjects], unmade

    assert chosen("smoke") == ([], {})
    assert chosen("smoke", (), "all") == (["some"], {"other": "it aborted"})
    assert chosen("smoke", (), "plain") == (["plain"], {})
    assert chosen("deep") == (["some"], {"other": "it aborted"})
    assert chosen("deep", ("mine.gguf",)) == ([], {})
    with pytest.raises(UsageError, match="--arch other: it aborted"):
        chosen("smoke", (), "other")
