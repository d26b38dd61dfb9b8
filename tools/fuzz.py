"""Searches for faults that nobody listed, by random walks over the memory and state calls.

    python -m tools.fuzz --minutes 30 [--model NAME_OR_GGUF ...] [--arch NAME ...] [--build BUILD]

Known failures are kept clear of where their entry covers the build and the model, so that the search finds the next
fault; with --from-scratch they are met first. Before that each one's own check is run: one that passes is shown as
FIXED, and searched. What is found is kept in the folder of --findings as a script and as data, with how far the search
came and hypothesis' examples: the next run goes on from there. Exit code 0 when nothing was found that is not known, 1
when something was, 2 when a build, model or folder cannot be used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from conformance.harness import builds
from conformance.harness.bench import Setup, introduce
from conformance.harness.builds import BUILD_HELP
from conformance.harness.contract.census import GGUFError
from conformance.harness.engine import BUNDLED, EngineError
from conformance.harness.engine.child import Child, ChildDeath
from conformance.harness.exam.examination import contract, known_failures
from conformance.harness.exam.session import UsageError
from conformance.harness.exam.standing import standing
from conformance.harness.machine.avoid import avoidable
from conformance.harness.machine.found import Found, faults
from conformance.harness.machine.search import Search
from fixtures import models
from fixtures.auto import auto_path, swept

_USUAL = ("qwen35-mini", "qwen3-mini", "lfm2-mini", "mamba2-mini", "gemma3-mini", "rwkv7-mini")
_LIMIT, _NOISE_FACTOR = 1e-5, 100  # NMSE; noise stays below 1e-7 on every fixture model, faults were above 3e-5
_SECONDS = 60.0


def main(
    minutes: Annotated[float, typer.Option(help="How long to search, over all models.", min=0.05)] = 30,
    model: Annotated[list[str] | None, typer.Option(help="A fixture model or the path of a GGUF; repeatable.")] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            help="A model made of this architecture; repeatable. 'all': every recurrent, hybrid and sliding-window one."
        ),
    ] = None,
    build: Annotated[str, typer.Option(help=BUILD_HELP)] = BUNDLED,
    seed: Annotated[int, typer.Option(help="Of the first round, where no earlier run is gone on with.")] = 0,
    findings: Annotated[Path, typer.Option(help="Where findings are kept.")] = Path("findings"),
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Do not keep clear of known failures.")] = False,
) -> None:
    """Search, then show what was found, each fault once."""
    console = Console(markup=False, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    found: list[Found] = []
    cured: dict[str, list[str]] = {}
    try:
        builds.resolve(build)
        made = _made(arch or (), build)
    except (EngineError, ChildDeath, OSError) as error:
        typer.echo(f"--arch: {error}", err=True)
        raise typer.Exit(2) from None
    chosen = [*(model or ()), *made] or list(_USUAL)
    for name in chosen:
        setup = Setup(build, name)
        try:
            with Child(memory_limit=8 << 30) as child:
                subject, build_name = child.call(introduce, setup, timeout=_SECONDS)
            known = avoidable(known_failures(), subject, build_name)
            fixed = set() if from_scratch else _fixed(setup, known)
            for id in (
                sorted(fixed) if name not in made else ()
            ):  # entries are about kinds, a made model may be an exception
                console.print(
                    f"FIXED {id}: its check passes on {subject.name}; remove its entry or end its range of builds"
                )
                cured.setdefault(id, []).append(subject.name)
            avoid = set() if from_scratch else set(known - fixed)
            search = Search(setup, _LIMIT, _NOISE_FACTOR, findings, known, avoid, console.print)
            search.run(60 * minutes / len(chosen), seed)
        except (EngineError, GGUFError, ChildDeath, UsageError, models.UnknownModel, OSError) as error:
            typer.echo(f"{name}: {error}", err=True)
            if name in made:  # one architecture does not end the sweep
                continue
            raise typer.Exit(2) from None
        found += search.found.values()
    console.print(_table(found, cured))
    raise typer.Exit(any(each.known is None and not each.is_fixed for each in found))


def _made(names: Sequence[str], build: str) -> list[str]:
    """Paths of models made of architectures."""
    if "all" in names:
        return [str(model.path) for model in swept(build)[0]]
    return [str(auto_path(name, build)) for name in names]


def _fixed(setup: Setup, known: frozenset[str]) -> set[str]:
    """Known failures whose own check passes here."""
    verdicts = standing(setup.build, setup.model, known, contract())
    return {id for id, verdict in verdicts if verdict == "PASS"}


def _table(found: list[Found], cured: dict[str, list[str]]) -> Table:
    table = Table(
        "fault", "models", "met", "calls", "deviation", "expected", "seen", "replays", title="distinct findings"
    )
    for fault in faults(found):
        first = fault.first
        deviation = "" if first.deviation is None else f"{first.deviation:.1e}"
        state = "FIXED " if fault.is_fixed else "KNOWN " if fault.known else ""
        table.add_row(
            state + fault.cluster,
            ", ".join(fault.models),
            str(fault.count),
            str(len(first.calls)),
            deviation,
            first.expected[:30],
            first.seen[:40],
            "yes" if fault.replays else "no",
        )
    for id, where in cured.items():
        table.add_row(f"FIXED {id}", ", ".join(where), *[""] * 6)
    return table


def run() -> None:
    """The command line."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()


if __name__ == "__main__":
    run()
