"""Results survive a killed run and a full disk, and say what they do not know."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance.harness.report.results import SCHEMA_FILE, VERDICTS, Check, Results, Verdict, results_schema
from conformance.harness.report.store import ReportError, ResultsWriter, read_results

PLANNED = [Check.planned(f"RP-0{number}", "holo3-mini", "A title", True) for number in (1, 2, 3)]


def writer(folder: Path) -> ResultsWriter:
    return ResultsWriter(folder, PLANNED, {"name": "bundled"}, {"version": "1"}, {"profile": "smoke"})


def verdicts(results: Results) -> list[str]:
    return [check.verdict for check in results.checks]


def assert_valid(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "results.json").read_text(), parse_constant=pytest.fail)
    jsonschema.validate(content, results_schema())
    return content


def test_the_published_schema_is_current() -> None:
    published = json.loads(SCHEMA_FILE.read_text())
    assert published == results_schema(), "write it anew: python -m conformance.harness.report"


def test_the_schema_refuses_what_a_reader_could_not_trust(tmp_path: Path) -> None:
    writer(tmp_path).finish()
    content = assert_valid(tmp_path)
    for change in ({"schema": "other/1"}, {"checks": [{"id": "RP-01"}]}, {"summary": None}, {"more": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**content, **change}, results_schema())
    assert {"id", "model", "verdict", "required", "deviation", "floor", "seconds", "replay", "detail"} <= set(
        content["checks"][0]
    )


def test_a_run_that_is_killed_leaves_complete_results(tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from conformance.selftests.test_report_store import PLANNED, writer
running = writer(Path({str(tmp_path)!r}))
running.record(PLANNED[0].settled("PASS"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    assert_valid(tmp_path)
    for name in ("", "results.json", "results.jsonl"):
        results = read_results(tmp_path / name)
        assert [(check.verdict, check.reason) for check in results.checks] == [
            ("PASS", None),
            ("UNKNOWN", "not run yet"),
            ("UNKNOWN", "not run yet"),
        ]
    assert results.summary.exit_code == 1
    assert "RP-02 was not run on holo3-mini" in results.summary.line


@given(cut=st.integers(0, 400))
def test_a_log_that_ends_anywhere_is_read_up_to_its_last_whole_line(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("report")
    running = writer(folder)
    plan_length = (folder / "results.jsonl").stat().st_size
    running.record(PLANNED[0].settled("PASS"))
    running.record(PLANNED[1].settled("FAIL"))
    running.finish()
    log = (folder / "results.jsonl").read_bytes()[: plan_length + cut]
    (folder / "results.jsonl").write_bytes(log)
    (folder / "results.json").unlink()
    whole = log.count(b"\n") - 1
    assert verdicts(read_results(folder)) == ["PASS", "FAIL", "UNKNOWN"][:whole] + ["UNKNOWN"] * (3 - whole)


@given(room=st.lists(st.integers(0, 300), max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_disk_that_fills_up_loses_nothing_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, room: list[int]
) -> None:
    """``room`` is what each further write may take; afterwards there is space again."""
    folder = tmp_path_factory.mktemp("report")
    running = writer(folder)
    write, left = os.write, list(room)

    def write_while_there_is_room(file: int, content: bytes) -> int:
        size = left.pop(0) if left else len(content)
        if size == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, content[:size])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_while_there_is_room)
        running.record(PLANNED[0].settled("PASS"))
        seen = read_results(folder)
        running.record(PLANNED[1].settled("PASS"))
        left.clear()
        results = running.finish()
    assert verdicts(seen)[1:] == ["UNKNOWN", "UNKNOWN"]
    assert verdicts(results) == verdicts(read_results(folder / "results.json")) == ["PASS", "PASS", "UNKNOWN"]
    assert verdicts(read_results(folder / "results.jsonl")) == ["PASS", "PASS", "UNKNOWN"]


def test_a_full_disk_is_reported_at_the_end_and_stops_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the log can no longer grow, nor be drafted anew."""
    script = f"""
import resource
from pathlib import Path
from conformance.selftests.test_report_store import PLANNED, writer
folder = Path({str(tmp_path)!r})
running = writer(folder)
running.record(PLANNED[0].settled("PASS"))
size = (folder / "results.jsonl").stat().st_size + 20
resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
for check in PLANNED[1:]:
    running.record(check.settled("PASS", detail={{"much": "x" * size}}))
results = running.finish()
print(results.summary.exit_code, results.summary.line)
"""
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert re.fullmatch(
        rf"2 NO VERDICT: the report in {tmp_path} may be incomplete \(.+\); make room and run again; 3 passed\n", output
    )
    assert_valid(tmp_path)
    assert verdicts(read_results(tmp_path)) == ["PASS", "UNKNOWN", "UNKNOWN"]
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "results.jsonl"}


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"^cannot write the report folder .*/file \(.+\); make room there or choose"):
        writer(tmp_path / "file")
    with pytest.raises(ReportError, match="cannot write the report folder"):
        writer(Path("/proc/report"))


@pytest.mark.parametrize("first", VERDICTS)
@pytest.mark.parametrize("second", VERDICTS)
def test_a_second_outcome_never_improves_the_first(tmp_path: Path, first: Verdict, second: Verdict) -> None:
    running = writer(tmp_path)
    running.record(PLANNED[0].settled(first, reason="r", seconds=1, examples=2))
    running.record(PLANNED[0].settled(second, reason="r", seconds=2, examples=3))
    results = running.finish()
    check = results.checks[0]
    assert check.verdict == max(first, second, key=VERDICTS.index)
    assert (check.seconds, check.examples, len(results.checks)) == (3, 5, 3)


def test_case_families_stand_beside_the_plan(tmp_path: Path) -> None:
    running = writer(tmp_path)
    running.record(Check(id="RP-01/some-family", model="holo3-mini", title="t", required=True, verdict="FAIL"))
    assert verdicts(running.finish()) == ["UNKNOWN", "UNKNOWN", "UNKNOWN", "FAIL"]


EXTREME = st.sampled_from([math.nan, math.inf, -math.inf, np.float32("nan"), np.float64(1), 5e-324])
TEXTS = st.text() | st.text(st.sampled_from("a\x00\x1b\ud800\udfff\uffff"))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXTS
    | EXTREME
    | st.just(Path("p"))
    | st.just(np.arange(3)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(deviation=EXTREME, floor=st.floats(), case=JSON, more=JSON, reason=TEXTS)
def test_anything_recorded_reads_back_as_valid_json(
    tmp_path_factory: pytest.TempPathFactory, deviation: float, floor: float, case: Any, more: Any, reason: str
) -> None:
    folder = tmp_path_factory.mktemp("report")
    running = writer(folder)
    check = PLANNED[0].settled(
        "FAIL", deviation=deviation, floor=floor, case=case, reason=reason, detail={"more": more}
    )
    running.record(check)
    running.finish()
    content = assert_valid(folder)
    for name in ("results.json", "results.jsonl"):
        assert read_results(folder / name).as_json() == content
    value = content["checks"][0]["deviation"]
    assert value == (float(deviation) if math.isfinite(deviation) else str(value))


@pytest.mark.parametrize("deviation", [math.nan, 1e-3, math.inf])
def test_a_deviation_over_the_limit_cannot_be_recorded_as_passed(deviation: float) -> None:
    with pytest.raises(ValueError, match="cannot pass"):
        PLANNED[0].settled("PASS", deviation=deviation, limit=1e-4)


@pytest.mark.parametrize("deviation", [math.nan, 1e-5, -math.inf])
def test_a_deviation_that_should_be_larger_cannot_be_recorded_as_passed(deviation: float) -> None:
    assert PLANNED[0].settled("PASS", deviation=math.inf, limit=1e-4, wants_more=True).limit == 1e-4
    with pytest.raises(ValueError, match="cannot pass"):
        PLANNED[0].settled("PASS", deviation=deviation, limit=1e-4, wants_more=True)


@pytest.mark.parametrize("verdict", ["KNOWN", "SKIPPED", "UNKNOWN"])
def test_a_verdict_that_explains_nothing_needs_a_reason(verdict: Verdict) -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        PLANNED[0].settled(verdict)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("results.json", b"{", r"results\.json: not JSON"),
        ("results.json", b"[]", r"results\.json: schema is None, not 'llama-conformance/results/1'"),
        ("results.json", b'{"schema": "llama-conformance/results/2"}', r"schema is 'llama-conformance/results/2'"),
        ("results.json", b'{"schema": "llama-conformance/results/1"}', r"results\.json: build: Field required"),
        ("results.jsonl", b"", r"results\.jsonl:1: not the plan of a run"),
        ("results.txt", None, r"results\.txt: cannot be read \(No such file or directory\)"),
    ],
)
def test_what_is_not_results_is_refused_in_a_line(
    tmp_path: Path, name: str, content: bytes | None, problem: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ReportError, match=problem) as caught:
        read_results(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_damaged_line_inside_a_log_is_named(tmp_path: Path) -> None:
    running = writer(tmp_path)
    running.record(PLANNED[0].settled("PASS"))
    running.finish()
    log = tmp_path / "results.jsonl"
    plan, *lines = log.read_bytes().split(b"\n")
    log.write_bytes(b"\n".join([plan, lines[0].replace(b"PASS", b"PAST"), *lines[1:]]))
    with pytest.raises(ReportError, match=r"results\.jsonl:2: neither a check nor notes"):
        read_results(log)
