"""Bisection finds every place where builds begin to fare differently, and known failures do not hide it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from conformance.harness import builds
from conformance.harness.engine import BuildError
from conformance.harness.exam.bisection import Reading, Value, boundaries, read_check, read_finding, span
from conformance.harness.exam.examination import contract
from conformance.harness.machine.found import Found
from tools import bisect

from .test_builds import cache, compiled, index

__all__ = ["cache", "index"]  # fixtures

ID = "SM-01/rollback-across-ubatches"
VALUES: tuple[Value, ...] = ("absent", "bad", "good")


@st.composite
def histories(draw: st.DrawFn) -> list[Value]:
    """Builds in order: each value holds for one stretch at most, and some builds cannot be tested."""
    order = draw(st.permutations(VALUES))
    lengths = draw(st.tuples(*[st.integers(0, 12)] * 3))
    history = [value for value, length in zip(order, lengths, strict=True) for _ in range(length)]
    holes = draw(st.sets(st.integers(0, max(len(history) - 1, 0)), max_size=len(history)))
    return ["untestable" if place in holes else value for place, value in enumerate(history)]


@given(histories())
def test_every_boundary_is_found(history: list[Value]) -> None:
    testable = [place for place, value in enumerate(history) if value != "untestable"]
    expected = [(low, high) for low, high in pairwise(testable) if history[low] != history[high]]
    assert boundaries(len(history), history.__getitem__) == expected


@given(st.integers(2, 500), st.data())
def test_one_boundary_costs_a_bisection(n: int, data: st.DataObject) -> None:
    turn = data.draw(st.integers(1, n - 1))
    read: set[int] = set()

    def look(place: int) -> Value:
        read.add(place)
        return "bad" if place < turn else "good"

    assert boundaries(n, look) == [(turn - 1, turn)]
    assert len(read) <= 2 + math.ceil(math.log2(n))


def test_a_span_ends_where_it_is_told_to(index: Path) -> None:
    source = builds.parse_source("pypi:xllamacpp")
    assert [each.version for each in span(source, None, None)] == [
        "2026.4.8929",
        "2026.7.9873",
        "2026.7.10068",
        "2026.8.10229",
    ]
    assert [each.version for each in span(source, "2026.7.9873", "2026.7.10068")] == ["2026.7.9873", "2026.7.10068"]
    with pytest.raises(BuildError, match=r"no version 2026\.7\.9; it has 2026\.4\.8929"):
        span(source, "2026.7.9", None)
    with pytest.raises(BuildError, match="give the older one first"):
        span(source, "2026.7.10068", "2026.7.9873")


def test_a_known_failure_is_bad_all_the_same() -> None:
    specs = contract()
    reading = read_check("bundled", "qwen35-mini", "SM-01/rollback-whole-last-batch", specs, "smoke", 0)
    assert reading.value == "bad"
    assert reading.deviation is not None
    assert reading.deviation > 1e-3
    assert read_check("bundled", "qwen35-mini", ID, specs, "smoke", 0).value == "good"
    absent = read_check("bundled", "qwen3-mini", ID, specs, "smoke", 0)
    assert (absent.value, absent.deviation) == ("absent", None)


def test_a_build_that_cannot_run_is_stepped_over(tmp_path: Path) -> None:
    compiled(tmp_path, "__attribute__((constructor)) static void on_load(void) { __builtin_trap(); }")
    reading = read_check(str(tmp_path), "qwen35-mini", ID, contract(), "smoke", 0)
    assert reading.value == "untestable"
    assert "SIGILL" in reading.why


@pytest.mark.parametrize(
    ("model", "removes", "value"),
    [("lfm2-mini", True, "bad"), ("lfm2-mini", False, "good"), ("qwen3-mini", True, "absent")],
)
def test_a_finding_is_walked_again(model: str, removes: bool, value: Value) -> None:
    settings = {"n_ctx": 4096, "n_batch": 1024, "n_ubatch": 16, "n_seq_max": 4, "n_rs_seq": 4}
    steps = [["decode", 0, 40, 0], ["decode", 0, 2, 0], *([["remove_suffix", 0, 2, 0]] if removes else [])]
    known = "SM-01/rollback-whole-last-batch"
    found = {
        "cluster": known, "model": model, "build": "bundled", "settings": settings, "steps": steps, "calls": [],
        "what": "", "expected": "", "seen": "", "deviation": 0.8, "limit": 1e-5, "known": known,
    }  # fmt: skip
    assert read_finding("bundled", Found(**found)).value == value  # type: ignore[arg-type]


def test_what_could_not_be_tested_is_tried_again(cache: Path) -> None:
    readings = iter([Reading("untestable", "no memory"), Reading("good", "holds"), Reading("bad", "fails")])
    read = partial(bisect._kept, {"check": "x"}, lambda: next(readings), False)
    assert [read().value, read().value, read().value] == ["untestable", "good", "good"]


def asked(*arguments: str) -> tuple[int, str, str]:
    import typer

    app = typer.Typer()
    app.command()(bisect.main)
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_a_run_names_the_boundary_and_goes_on_where_it_was_stopped(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def read(build: str, *_: object) -> Reading:
        if len(ran) == 2 and build not in ran:
            ran.append("stopped")
            raise BuildError("stopped")
        ran.append(build)
        return Reading("good" if int(build.rpartition(".")[2]) >= 10068 else "bad", "FAIL", 0.5)

    monkeypatch.setattr(bisect, "read_check", read)
    question = ("--check", ID, "--builds", "pypi:xllamacpp", "--model", "qwen35-mini")
    assert asked(*question)[0] == 2
    code, out, err = asked(*question)
    assert code == 0
    assert ran == ["pypi:xllamacpp==2026.4.8929", "pypi:xllamacpp==2026.8.10229", "stopped", *ran[3:]]
    assert len(set(ran)) == len(ran)
    assert "first good: pypi:xllamacpp==2026.7.10068 (b10068); last bad: pypi:xllamacpp==2026.7.9873 (b9873)" in out
    assert "pypi:xllamacpp==2026.7.9873 (b9873): bad (deviation 0.5): FAIL" in err
    code, out, _ = asked(*question, "--json")
    assert json.loads(out)["boundaries"] == [
        {"from": "pypi:xllamacpp==2026.7.9873", "to": "pypi:xllamacpp==2026.7.10068", "becomes": "good"}
    ]
    before = len(ran)
    asked(*question, "--fresh", "--each")
    assert len(ran) == before + 4


def test_builds_that_fare_alike_have_no_boundary(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bisect, "read_check", lambda *_: Reading("bad", "FAIL"))
    code, out, _ = asked("--check", ID, "--builds", "pypi:xllamacpp", "--model", "qwen35-mini")
    assert code == 1
    assert f"no boundary: {ID} fails on every build that was run" in out
    assert "2 of 4 builds were not run" in out


def test_a_finding_with_steps_of_another_time_is_refused(tmp_path: Path, index: Path) -> None:
    path = tmp_path / "finding.json"
    found = Found("x", "qwen3-mini", "bundled", {}, [("leap", 0, 0, 0)], [], "", "", "", None, 1e-5)
    path.write_text(json.dumps(asdict(found)))
    code, _, err = asked("--finding", str(path), "--builds", "pypi:xllamacpp")
    assert code == 2
    assert "has steps that walks no longer take: leap; search again" in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--check", "SM-01/rollback"), "no invariant 'SM-01/rollback'"),
        (("--check", "SM-01"), "--check SM-01: name one of its case families: SM-01/"),
        ((), "name one of --check ID and --finding JSON"),
        (("--check", ID, "--model", "nowhere.gguf"), "nowhere.gguf: No such file or directory"),
        (("--check", ID, "--profile", "quick"), "no profile 'quick'"),
        (("--check", ID, "--from", "1.0"), "has no version 1.0; it has "),
        (("--check", ID, "--builds", "pypi:torch"), "builds are not taken from there; choose from "),
        (("--finding", "README.md"), "holds no finding"),
    ],
)
def test_a_question_that_means_nothing_is_refused(index: Path, arguments: tuple[str, ...], problem: str) -> None:
    source = () if "--builds" in arguments else ("--builds", "pypi:xllamacpp")
    code, out, err = asked(*arguments, *source)
    assert (code, out) == (2, "")
    assert problem in err.splitlines()[-1]


def test_the_usual_model_is_one_that_the_check_applies_to() -> None:
    for id in (ID, "SM-09/partial-copy-between-streams"):
        name = bisect._usual_model(contract()[id])
        assert name in contract()[id].models
