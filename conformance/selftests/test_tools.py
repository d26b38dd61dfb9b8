"""The small tools: doctor, replay, the installer's word on compilers."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.harness.arms.counts import LABELS
from conformance.harness.report.arms import harness_share
from conformance.harness.report.results import Check
from conformance.harness.report.store import ResultsWriter
from tools import install
from tools.benchmark import Around

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


TASK = """
preamble: {seed: 0, tokens: 8}
steps:
- {screenshot: {width: 3, height: 3, seed: 1}, action: "press", tool: "pressed"}
- {screenshot: {width: 3, height: 3, seed: 2}, action: "done"}
"""


@pytest.mark.parametrize(
    ("task", "options", "says"),
    [
        (TASK.replace("preamble: {seed: 0, tokens: 8}", ""), (), "preamble: is missing"),
        (TASK.replace("seed: 2}", "path: x.png}"), (), "step 2: the image file x.png needs a vision tower"),
        (
            TASK.replace("seed: 2}", "path: x.png}"),
            ("--model", "holo3-mini", "--mmproj", "holo3-mini-mmproj"),
            "x.png: No such file or directory",
        ),
        (
            TASK.replace("width: 3", "width: 40"),
            ("--context", "100"),
            "step 1: the image takes 120 tokens, more than the context of 100; use a smaller screenshot",
        ),
        (
            TASK.replace("width: 3, height: 3, seed: 2", "width: 91, height: 91"),
            (),
            "step 2: the image takes 8281 tokens, more than the context of 8192; use a smaller screenshot",
        ),
        (
            TASK.replace("width: 3", "width: 1000000000").replace("height: 3", "height: 1000000000"),
            (),
            "step 1: the image takes 1000000000000000000 tokens, more than the context of 8192",
        ),
        (
            TASK.replace('"done"', "{seed: 1, tokens: 2000000000}"),
            (),
            "step 2: the action takes 2000000000 tokens, more than the context of 8192",
        ),
        (TASK, ("--context", "2147483647"), "--context 2147483647: 8192 cells are the most that this task"),
        (TASK, ("--context", "4294967396"), "'--context'"),
        (TASK, ("--context", "0"), "'--context'"),
        (TASK, ("--context", "-1"), "'--context'"),
        (TASK, ("--ubatch", "0"), "'--ubatch'"),
        (TASK, ("--ubatch", "4294967297"), "'--ubatch'"),
        (TASK, ("--ubatch", "many"), "'--ubatch'"),
        (TASK, ("--threads", "0"), "'--threads'"),
        (TASK, ("--threads", "513"), "'--threads'"),
        (TASK, ("--threads", "99999999999999999999"), "'--threads'"),
        (TASK, ("--steps", "-1"), "'--steps'"),
        (TASK, ("--window", "-1"), "W = -1: "),
        (TASK, ("--window", "4294967297"), "'--window'"),
        (TASK, ("--scale", "nan"), "a scale of nan: "),
        (TASK, ("--forget", "1"), "No such option: --forget"),
        (TASK, ("--window", "0"), "W = 0: "),
        (
            TASK,
            ("--model", "rwkv7-mini", "--mmproj", "holo3-mini-mmproj"),
            "mismatch between text model (n_embd = 128)",
        ),
        (TASK, ("--trace",), "name one task"),
        (TASK, ("--arms", "evict,forget"), "there is no arm 'forget'"),
        (TASK, ("--scale", "0"), "a scale of 0: "),
        (TASK, ("--checkpoints", "sometimes"), "choose auto or one of partial, full, on_device, removal"),
    ],
)
def test_the_arms_name_what_cannot_be_used(tmp_path: Path, task: str, options: tuple[str, ...], says: str) -> None:
    (tmp_path / "task.yaml").write_text(task)
    model = () if "--model" in options else ("--model", "qwen3-mini")
    done = tool("arms", "--transcript", str(tmp_path / "task.yaml"), *model, *options, "--out", str(tmp_path / "out"))
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()


def test_the_arms_run_and_go_on_where_they_stopped(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(TASK)
    out = tmp_path / "out"
    arguments = [
        "--transcript",
        str(tmp_path / "task.yaml"),
        "--model",
        "qwen35-mini",
        "--threads",
        "1",
        "--out",
        str(out),
    ]
    first = tool("arms", *arguments, "--arms", "evict,terminal_slot", "--window", "1")
    assert first.returncode == 0, first.stderr
    assert "From counts: over 2 steps" in first.stdout
    assert "Measured: " in first.stdout
    assert {"arms.html", "arms.png", "evict.jsonl", "terminal_slot.jsonl"} <= {path.name for path in out.iterdir()}
    kept = (out / "evict.jsonl").read_text().splitlines()
    (out / "evict.jsonl").write_text("\n".join(kept[:2]) + "\n" + kept[2][:20])
    assert tool("arms", *arguments, "--arms", "evict", "--window", "1").returncode == 0
    again = [json.loads(line) for line in (out / "evict.jsonl").read_text().splitlines()]
    assert [line.get("step") for line in again] == [None, 1, 2]
    counted = ("prompt_tokens", "prefilled_tokens", "live_cells")
    assert [again[2][name] for name in counted] == [json.loads(kept[2])[name] for name in counted]
    assert again[1] == json.loads(kept[1])
    (out / "evict.jsonl").write_text("\n".join([kept[0], "{}", kept[2]]) + "\n")
    broken = tool("arms", *arguments, "--arms", "evict", "--window", "1")
    assert broken.returncode == 2
    assert "evict.jsonl:2: " in broken.stderr
    assert len(broken.stderr.splitlines()) == 1


def test_the_benchmark_prints_each_figure_beside_what_it_must_reach() -> None:
    done = tool("benchmark", "kld", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    assert "positions/s  >= 1000" in done.stdout
    assert "load" in done.stdout.splitlines()[-1]


def test_the_benchmark_prints_the_harness_around_every_arm_beside_its_limit() -> None:
    done = tool("benchmark", "arms", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    for label in LABELS.values():
        [line] = re.findall(rf"^ harness around {re.escape(label)}, 8 steps at 0\.05 .*$", done.stdout, re.MULTILINE)
        assert re.search(r"\d+\.\d% of \d+\.\d\d s wall +<= 5 %", line), line


def test_what_is_not_spent_inside_is_the_harness() -> None:
    wall, inside = [0.0], [0.0]
    around = Around(lambda: inside[0], lambda: wall[0])

    def step(seconds: float, in_library: float) -> None:
        wall[0] += seconds
        inside[0] += in_library

    around.call(lambda: step(3.0, 2.875))
    step(100.0, 100.0)  # another arm's turn
    around.call(lambda: step(1.0, 0.925))
    assert (around.wall, around.inside) == pytest.approx((4.0, 3.8))
    assert around.share == pytest.approx(0.05)
    assert harness_share(4.0, 4.0) == 0
    assert math.isnan(harness_share(0.0, 0.0))


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
