"""May we upgrade? Compare a candidate build of llama.cpp with the baseline that is in use.

    python -m tools.gate --baseline BUILD --candidate BUILD [--profile NAME] [--report DIR]

BUILD is `bundled`, a published build such as pypi:xllamacpp==2026.10.11549, a folder, or a libllama file. Both builds run
the suite, each in processes of its own, on one list of cases; what differs is looked at again; states go from each to the
other; speed is measured in turn. The report folder gets report.html, summary.md, junit.xml, gate.json, and the reports of
both builds. Exit code 0: may upgrade. 1: may not. 2: usage, or the comparison could not be made.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from conformance.harness.contract.load import SpecError
from conformance.harness.engine import EngineError
from conformance.harness.exam.examination import contract
from conformance.harness.exam.session import Shard, UsageError, fixtures_here, subject_of
from conformance.harness.gate.gate import gate
from conformance.harness.gate.suite import Ask
from conformance.harness.report.gate_forms import print_comparison, write_comparison
from conformance.harness.report.store import ReportError
from tools.command import refuse


def main(
    baseline: Annotated[str, typer.Option(metavar="BUILD", help="The build in use.")],
    candidate: Annotated[str, typer.Option(metavar="BUILD", help="The build to upgrade to.")],
    profile: Annotated[str | None, typer.Option(help="How long to look: smoke, standard (default) or deep.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="GGUF", help="Instead of all fixture models; may be repeated.")
    ] = None,
    selected: Annotated[str | None, typer.Option("-k", metavar="EXPR", help="Only these checks, as in pytest.")] = None,
    jobs: Annotated[str, typer.Option(metavar="N", help="Processes, or auto.")] = "auto",
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="The I-th of N parts of the checks.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    threads: Annotated[int, typer.Option(help="Threads for each context.", min=1)] = 1,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run what an earlier run has already found.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="A failure that is new with the candidate blocks even where it is known.")
    ] = False,
    inject_fault: Annotated[str | None, typer.Option(metavar="NAME", help="Have the candidate lie in one way.")] = None,
    report: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the report.")] = Path("gate"),
) -> None:
    """May we upgrade?"""
    begin = time.monotonic()
    console = Console(highlight=False, markup=False)

    def tell(words: str) -> None:
        console.print(f"[{time.monotonic() - begin:6.1f} s] {words}", soft_wrap=True)

    try:
        report.mkdir(parents=True, exist_ok=True)
        named = profile or contract().default_profile
        ask = Ask(
            profile=named,
            models=tuple(model or fixtures_here(named)),
            seed=seed,
            selected=_selection(selected),
            shard=_shard(shard),
            threads=threads,
            jobs=_jobs(jobs),
        )
        for name in ask.models:
            subject_of(name)
        comparison = gate(baseline, candidate, ask, report, fault=inject_fault, fresh=fresh, strict=strict, tell=tell)
        write_comparison(comparison, report)
    except (EngineError, UsageError, SpecError, ReportError) as error:
        refuse(str(error))
    except KeyboardInterrupt:
        refuse("interrupted: there is no answer; what is complete is reused by the next run")
    except OSError as error:
        refuse(f"--report {report}: {error.filename or report}: {error.strerror}; name a folder that can be written")
    print_comparison(comparison, console)
    console.print(f"report: {report}  ({time.monotonic() - begin:.1f} s)")
    raise typer.Exit(comparison.answer.exit_code)


def _selection(text: str | None) -> str | None:
    """An expression as pytest's -k, None where it is empty; UsageError where it is none."""
    if text is None or not text.strip():
        return None
    try:
        Ask("", (), selected=text).selects("", "")
    except (SyntaxError, NameError, TypeError):
        raise UsageError(f"-k {text}: not an expression; write words joined by and, or, not and brackets") from None
    return text


def _shard(text: str | None) -> Shard | None:
    try:
        return Shard.named(text) if text else None
    except ValueError as error:
        raise UsageError(f"--shard {text}: {error}") from None


def _jobs(text: str) -> str:
    if text != "auto" and not (text.isdigit() and int(text) > 0):
        raise UsageError(f"--jobs {text}: give a number of processes, 1 or more, or auto")
    return text


if __name__ == "__main__":
    typer.run(main)
