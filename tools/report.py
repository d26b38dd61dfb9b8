"""Reports from results: report.html for people, summary.md for the summary page of a CI job, junit.xml for its tests.

    python -m tools.report RESULTS... [--out DIR]

    python -m tools.report merge RESULTS... --out DIR

RESULTS is the report folder of a run, or the results.json or results.jsonl in it. The first form is short for
`python -m tools.report render`. Exit code 0, whatever the verdict; 2 when results cannot be read, merged or written. The
shards of a gate are merged into one gate, and then the exit code is its answer: 0 may upgrade, 1 may not, 2 none.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from conformance.harness.report.comparison import FILE_NAME as GATE_NAME
from conformance.harness.report.comparison import read_comparison
from conformance.harness.report.forms import FORMS, write_report
from conformance.harness.report.gate_forms import write_comparison
from conformance.harness.report.merge import merge as joined
from conformance.harness.report.merge import merge_comparisons
from conformance.harness.report.store import ReportError, read_results, write_results
from tools.command import refuse

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
ResultsPaths = Annotated[list[Path], typer.Argument(metavar="RESULTS", help="Report folders or results files.")]


@app.command()
def render(
    results: ResultsPaths,
    out: Annotated[Path | None, typer.Option(help="Folder for the report of one RESULTS; default: beside it.")] = None,
) -> None:
    """Write report.html, summary.md and junit.xml beside each RESULTS."""
    if out and len(results) > 1:
        refuse(f"--out {out}: takes the report of one RESULTS, not of {len(results)}; merge them, or name one")
    try:
        for path in results:
            folder = out or (path if path.is_dir() else path.parent)
            found = read_results(path)
            _make(folder)
            write_report(found, folder)
            _say(found.summary.line, folder)
    except ReportError as error:
        refuse(str(error))


@app.command()
def merge(
    results: ResultsPaths,
    out: Annotated[Path, typer.Option(help="Folder for results.json and the report of the whole run.")],
) -> None:
    """Join the RESULTS of shards, runs of one suite on one build, into one run and report on it.

    A check takes the outcome of the shard that ran it; of two outcomes the worse stays. Report folders of the shards of
    one gate are joined into one gate.
    """
    if all((path / GATE_NAME).is_file() for path in results):
        _merge_gates(results, out)
        return
    try:
        whole = joined({str(path): read_results(path) for path in results})
        write_results(whole, out)
        write_report(whole, out)
    except ReportError as error:
        refuse(str(error))
    _say(whole.summary.line, out)


def _merge_gates(folders: list[Path], out: Path) -> None:
    try:
        whole = merge_comparisons({str(path): read_comparison(path) for path in folders})
        _make(out)
        write_comparison(whole, out)
    except ReportError as error:
        refuse(str(error))
    typer.echo(whole.answer.line)
    typer.echo(f"  {out}")
    raise typer.Exit(whole.answer.exit_code)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--out {folder}: {error.strerror}; name a folder that can be written")


def _say(verdict: str, folder: Path) -> None:
    typer.echo(verdict)
    for name in FORMS:
        typer.echo(f"  {folder / name}")


def main(arguments: list[str]) -> None:
    """Run a command; `render` when none is named."""
    named = arguments[:1] in (["render"], ["merge"], ["--help"])
    app(arguments if named else ["render", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
