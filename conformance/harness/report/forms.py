"""The forms of a report beside ``results.json``: ``junit.xml``, ``summary.md`` and ``report.html``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from conformance.harness.report.html import write_html
from conformance.harness.report.junit import write_junit
from conformance.harness.report.results import Results
from conformance.harness.report.store import ReportError
from conformance.harness.report.summary import write_summary

FORMS: dict[str, Callable[[Results, Path], None]] = {
    "report.html": write_html,
    "summary.md": write_summary,
    "junit.xml": write_junit,
}
"""File name to what writes it."""


def write_report(results: Results, folder: Path) -> None:
    """Writes every form into ``folder``, which exists.

    Raises ReportError that names the forms that could not be written; the others are there.
    """
    failed: dict[str, str] = {}
    for name, write in FORMS.items():
        try:
            write(results, folder / name)
        except OSError as error:
            failed[name] = error.strerror or str(error)
    if failed:
        named = ", ".join(f"{name} ({why})" for name, why in failed.items())
        raise ReportError(f"{folder}: cannot write {named}; make room there and render the report from results.json")
