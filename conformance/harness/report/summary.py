"""``summary.md``: the run on one screen, for the summary page of a CI job."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from conformance.harness.report.results import VERDICTS, Check, Results
from conformance.harness.report.store import replace_file
from conformance.harness.report.verdict import badness, has_failed
from conformance.harness.report.wording import clipped, describe, is_link, models_not_run, printable, worst

_ROWS, _FAILURES, _KNOWN, _NOTES = 150, 20, 30, 20
_SENTENCE, _BLOCK = 400, 3000
_MARKS = re.compile(r"([\\`*_\[\]#|~$])")


def write_summary(results: Results, path: Path) -> None:
    """Writes the summary; raises OSError when the file cannot be written."""
    replace_file(path, render_summary(results).encode())


def render_summary(results: Results) -> str:
    """Verdict, counts, a row for each statement, what failed and how to replay it, known failures, notes; in Markdown.

    Text from the results is shown as text. Long texts and long lists are cut, so that a summary stays below the 1 MiB
    that GitHub accepts however large the results are.
    """
    groups: dict[str, list[Check]] = {}
    for check in results.checks:
        groups.setdefault(check.id, []).append(check)
    parts = [
        *_head(results),
        *_table(groups),
        *_failures(groups),
        *_not_run(results),
        *_known(results),
        *_notes(results),
    ]
    return "\n\n".join(parts) + "\n"


def _head(results: Results) -> Iterator[str]:
    opening, colon, rest = results.summary.line.partition(": ")
    build = cell(str(results.build.get("version") or ""))
    yield f"## {cell(opening)}{': ' if build else ''}{build}"
    if colon:
        yield cell(rest, _BLOCK)
    counts = [f"{count} {verdict}" for verdict in VERDICTS[::-1] if (count := results.summary.counts.get(verdict))]
    facts = {"build digest": results.build.get("digest")}
    facts |= {key: results.settings.get(key) for key in ("profile", "seed", "fault")}
    said = [f"{name} {cell(str(value))}" for name, value in facts.items() if value is not None]
    yield "; ".join([", ".join([*counts, f"{results.summary.not_applicable} not applicable"]), *said])


def _table(groups: dict[str, list[Check]]) -> Iterator[str]:
    rows = ["| | Statement | Models | Worst deviation / floor |", "| --- | --- | --- | --- |"]
    for id, checks in list(groups.items())[:_ROWS]:
        counts = Counter(check.verdict for check in checks)
        verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS[::-1] if counts[verdict])
        informative = "" if checks[0].required else " (informative)"
        rows.append(f"| {cell(id)} | {cell(checks[0].title)}{informative} | {verdicts} | {cell(worst(checks))} |")
    yield "\n".join(rows)
    yield from _more(len(groups) - _ROWS, "statements")


def _failures(groups: dict[str, list[Check]]) -> Iterator[str]:
    """One failure in full for each statement, the worst, with the names of the other models."""
    failed = [bad for checks in groups.values() if (bad := sorted(filter(has_failed, checks), key=badness)[::-1])]
    if failed:
        yield "### What did not pass"
    for first, *others in sorted(failed, key=lambda bad: -badness(bad[0]))[:_FAILURES]:
        informative = "" if first.required else " (informative)"
        yield f"**{first.verdict} {cell(first.id)}** on {cell(first.model)}{informative}: {cell(first.title)}"
        yield block("\n".join(describe(first)))
        if others:
            names = ", ".join(f"{check.model} ({check.verdict})" for check in others)
            yield f"Also on {cell(names)}"
    yield from _more(len(failed) - _FAILURES, "statements did not pass")


def _not_run(results: Results) -> Iterator[str]:
    named = [f"{id} on {', '.join(models)}" for id, models in models_not_run(results.checks).items()]
    if named:
        yield f"Not run: {cell('; '.join(named), _BLOCK)}"


def _known(results: Results) -> Iterator[str]:
    known = [check for check in results.checks if check.verdict == "KNOWN"]
    if known:
        yield "### Known failures"
        yield "\n".join(_known_line(check) for check in known[:_KNOWN])
    yield from _more(len(known) - _KNOWN, "known failures")


def _known_line(check: Check) -> str:
    excused = check.detail.excused
    upstream = excused.upstream if excused else None
    link = f" ([upstream]({_address(upstream)}))" if upstream and is_link(upstream) else ""
    showed = f", a {excused.verdict}" if excused else ""
    return f"- {cell(check.id)} on {cell(check.model)}{showed}: {cell(check.reason or '')}{link}"


def _notes(results: Results) -> Iterator[str]:
    if results.notes:
        yield "### Notes"
        yield "\n".join(f"- {cell(note)}" for note in results.notes[:_NOTES])
    yield from _more(len(results.notes) - _NOTES, "notes")


def _more(count: int, noun: str) -> Iterable[str]:
    return [f"And {count} more {noun}: see report.html."] if count > 0 else []


def cell(words: str, length: int = _SENTENCE) -> str:
    """Words on one line that Markdown and HTML show as they are."""
    line = " ".join(clipped(printable(words), length).split())
    escaped = _MARKS.sub(r"\\\1", line.replace("&", "&amp;"))
    return escaped.replace("<", "&lt;").replace(">", "&gt;")


def block(text: str) -> str:
    """A fenced block, its fence longer than any run of backticks inside."""
    content = clipped(printable(text), _BLOCK)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", content)), default=0))
    return f"{fence}text\n{content}\n{fence}"


def _address(link: str) -> str:
    """A link that cannot end its Markdown brackets."""
    return re.sub(r"[()<>\[\]\\|`\"']", lambda match: f"%{ord(match[0]):02X}", printable(link))
