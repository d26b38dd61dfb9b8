"""Run a failed case of a report again, in a fresh process, and print what was expected, what was seen and the floor.

    python -m tools.replay RESULTS ID [--model NAME]

RESULTS is a report folder or the results.json in it. Exit code 0 when every replayed case passes now, 1 when one fails
again (a crash of the build included), 2 when there is nothing to replay.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from conformance.harness.report.results import Check
from conformance.harness.report.store import ReportError, read_results
from tools.command import refuse

ROOT = Path(__file__).parents[1]


def replay(check: Check) -> int:
    """Run the check's replay line with this interpreter; returns the exit code, that of a signal as in a shell."""
    _, *arguments = shlex.split(check.replay or "")
    code = subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False).returncode
    if code < 0:
        typer.echo(f"CRASH {check.id} on {check.model}: the process ended with {signal.Signals(-code).name}")
        return 128 - code
    return code


def main(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A report folder, or the results.json in it.")],
    id: Annotated[str, typer.Argument(metavar="ID", help="The check, for example RP-04.")],
    model: Annotated[str | None, typer.Option(help="Only on this model; default: on every model it failed on.")] = None,
) -> None:
    """Run a failed case of a report again, in a fresh process."""
    try:
        checks = read_results(results).checks
    except ReportError as error:
        refuse(str(error))
    named = [check for check in checks if check.id == id and model in (None, check.model)]
    failed = [check for check in named if check.replay]
    if not named:
        refuse(
            f"{results}: has no check {id}{f' on {model}' if model else ''}; it has {', '.join(sorted({c.id for c in checks}))}"
        )
    if not failed:
        refuse(f"{results}: {id} left nothing to replay ({', '.join(f'{c.verdict} on {c.model}' for c in named)})")
    codes = [replay(check) for check in failed]
    raise typer.Exit(1 if any(codes) else 0)


if __name__ == "__main__":
    typer.run(main)
