"""The forms of a comparison: gate.json, report.html, summary.md, junit.xml, and the terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.harness.report.comparison import (
    FILE_NAME,
    OUTCOMES,
    Comparison,
    Outcome,
    Pair,
    Speed,
    by_id,
    changes,
    speed_cells,
)
from conformance.harness.report.gate_html import render_comparison
from conformance.harness.report.junit import counted, test_case
from conformance.harness.report.store import ReportError, replace_file
from conformance.harness.report.summary import block, cell
from conformance.harness.report.terminal import fitting_table, id_and_title
from conformance.harness.report.wording import describe, printable

STYLES: dict[Outcome, str] = {
    "pass": "green",
    "fixed": "bold green",
    "new": "green",
    "known": "yellow",
    "removed": "yellow",
    "unknown": "yellow",
    "timeout": "red",
    "regression": "bold red",
    "crash": "bold red",
}
_ROWS, _FAILURES, _NOTES = 150, 20, 20


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write every form into a folder that exists. Raises ReportError."""
    forms: dict[str, Callable[[Comparison], bytes]] = {
        FILE_NAME: _as_json,
        "report.html": lambda whole: render_comparison(whole).encode(),
        "summary.md": lambda whole: render_summary(whole).encode(),
        "junit.xml": render_junit,
    }
    for name, render in forms.items():
        try:
            replace_file(folder / name, render(comparison))
        except OSError as error:
            raise ReportError(
                f"{folder}: cannot write {name} ({error.strerror}); make room there and run again"
            ) from None


def _as_json(comparison: Comparison) -> bytes:
    return json.dumps(comparison.as_json(), allow_nan=False, indent=1).encode() + b"\n"


def builds_line(comparison: Comparison) -> str:
    """Both builds in a line."""
    names = [str(build.get("version") or build["reference"]) for build in (comparison.baseline, comparison.candidate)]
    return " -> ".join(names)


def account(pair: Pair) -> Iterator[str]:
    """What became of a check, in lines: why, the candidate's own account, the replay of what decided."""
    yield pair.reason
    excused = pair.candidate.detail.excused if pair.candidate else None
    if pair.newly_known and excused:
        yield f"upstream: {excused.upstream}"
    if pair.confirmed is not None:
        yield "a second look showed the same" if pair.confirmed else "a second look did not show the same"
    if pair.candidate is not None and pair.outcome != "fixed":
        yield from (f"candidate: {line}" for line in describe(pair.candidate) if not line.startswith("replay: "))
    if pair.baseline is not None and pair.outcome in ("fixed", "removed", "known"):
        yield from (f"baseline: {line}" for line in describe(pair.baseline) if not line.startswith("replay: "))
    if pair.replay:
        yield f"replay: {printable(pair.replay)}"


# -- terminal


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The table, what blocks and how to replay it, speed, the answer; readable at 80 columns."""
    rows = [(*id_and_title(id, pairs[0].title), _counts(pairs)) for id, pairs in by_id(comparison.pairs)]
    console.print(fitting_table(("id", "title", "models"), rows, console.width))
    for first, *others in changes(comparison.pairs):
        console.print(Text(first.outcome.upper(), STYLES[first.outcome]) + Text(f" {first.id} on {first.model}"))
        also = [f"also on {', '.join(pair.model for pair in others)}"] if others else []
        for line in (first.title, *account(first), *also):
            console.print(Text(f"  {printable(line)}"), soft_wrap=True)
    if comparison.speeds:
        console.print(_speed_table(comparison.speeds))
    for what, fate in comparison.states.items():
        console.print(Text(f"{what}: {fate}"), soft_wrap=True)
    for note in comparison.notes:
        console.print(Text(f"note: {printable(note)}"), soft_wrap=True)
    console.print(Text(printable(builds_line(comparison))))
    style = "bold green" if comparison.answer.exit_code == 0 else "bold red"
    console.print(Text(printable(comparison.answer.line), style), soft_wrap=True)


def _counts(pairs: Sequence[Pair]) -> Text:
    counts = Counter(pair.outcome for pair in pairs)
    return Text(" ").join(
        Text(f"{counts[outcome]} {outcome}", STYLES[outcome]) for outcome in reversed(OUTCOMES) if counts[outcome]
    )


def _speed_table(speeds: Sequence[Speed]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in ("speed and size", "baseline", "candidate", "ratio", ""):
        table.add_column(heading, justify="left" if heading in ("speed and size", "") else "right", no_wrap=True)
    for number, speed in enumerate(speeds):
        if number == 0 or speeds[number - 1].model != speed.model:
            table.add_row(Text(f"on {speed.model}", "bold"))
        quantity, _, baseline, candidate, ratio, interval, _ = speed_cells(speed)
        spread = "" if speed.kind == "count" else f" ({interval.replace(' .. ', '-')})"
        table.add_row(quantity, baseline, candidate, ratio + spread, Text(speed.outcome, STYLES[speed.outcome]))
    return table


# -- Markdown


def render_summary(comparison: Comparison) -> str:
    """The comparison on one screen, for the summary page of a CI job; far below the 1 MiB that GitHub accepts."""
    opening, colon, rest = comparison.answer.line.partition(": ")
    parts = [f"## {cell(opening)}: {cell(builds_line(comparison))}"]
    parts += [cell(rest, 3000)] if colon else []
    parts += ["\n".join(_rows(comparison))] if comparison.pairs else []
    changed = changes(comparison.pairs)
    parts += ["### What changed"] if changed else []
    for first, *others in changed[:_FAILURES]:
        parts.append(f"**{first.outcome} {cell(first.id)}** on {cell(first.model)}: {cell(first.title)}")
        parts.append(block("\n".join(account(first))))
        parts += [f"Also on {cell(', '.join(pair.model for pair in others))}"] if others else []
    if len(changed) > _FAILURES:
        parts.append(f"And {len(changed) - _FAILURES} more: see report.html.")
    if comparison.speeds:
        parts.append("### Speed and size\n\n" + "\n".join(_speed_rows(comparison.speeds)))
    if comparison.states:
        parts.append(
            "### States\n\n" + "\n".join(f"- {cell(what)}: {cell(fate)}" for what, fate in comparison.states.items())
        )
    if comparison.notes:
        parts.append("### Notes\n\n" + "\n".join(f"- {cell(note)}" for note in comparison.notes[:_NOTES]))
    return "\n\n".join(parts) + "\n"


def _rows(comparison: Comparison) -> Iterator[str]:
    yield from ("| | Statement | Outcome by models |", "| --- | --- | --- |")
    groups = list(by_id(comparison.pairs))
    for id, pairs in groups[:_ROWS]:
        yield f"| {cell(id)} | {cell(pairs[0].title)} | {_counts(pairs).plain} |"


def _speed_rows(speeds: Sequence[Speed]) -> Iterator[str]:
    yield "| | Model | Baseline | Candidate | Ratio | Interval | Limit | Outcome |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for speed in speeds:
        yield f"| {' | '.join(map(cell, speed_cells(speed)))} | {speed.outcome} |"


# -- JUnit


def render_junit(comparison: Comparison) -> bytes:
    """A test case for each pair and each quantity. What blocks is a failure or an error; known ones are skipped."""
    suite = ET.Element("testsuite", name="llama-conformance gate")
    properties = ET.SubElement(suite, "properties")
    for name, value in (("answer", comparison.answer.line), ("builds", builds_line(comparison))):
        ET.SubElement(properties, "property", name=name, value=printable(value))
    for pair in comparison.pairs:
        seconds = sum(check.seconds for check in (pair.baseline, pair.candidate) if check)
        tag = _tag(pair) or ("skipped" if pair.outcome in ("known", "removed", "unknown") else None)
        test_case(suite, pair.model, f"{pair.id} {pair.title}", seconds, tag, pair.outcome, "\n".join(account(pair)))
    for speed in comparison.speeds:
        tag = _tag(speed) or ("skipped" if speed.outcome == "unknown" else None)
        test_case(suite, speed.model, f"performance: {speed.quantity}", 0.0, tag, speed.outcome, speed.reason)
    if comparison.death is not None:
        test_case(suite, "build", "the candidate can be loaded", 0.0, "error", "crash", comparison.death)
    return counted(suite)


def _tag(item: Pair | Speed) -> str | None:
    if not item.blocks:
        return None
    return "failure" if item.outcome == "regression" else "error"
