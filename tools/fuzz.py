"""Searches for faults that nobody listed, by random walks over the memory and state calls.

    python -m tools.fuzz --minutes 30 [--model NAME_OR_GGUF ...] [--arch NAME ...] [--build BUILD]

Known failures are kept clear of, so that the search finds the next fault; with --from-scratch they are met first. What
is found is kept in the folder of --findings as a script and as data, and counted on in the next run. Exit code 0 when
nothing was found that is not known, 1 when something was, 2 when a build, model or folder cannot be used.
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
from conformance.harness.bench import Setup
from conformance.harness.builds import BUILD_HELP
from conformance.harness.contract.census import GGUFError
from conformance.harness.engine import BUNDLED, EngineError
from conformance.harness.engine.child import ChildDeath
from conformance.harness.machine.search import Found, Search
from conformance.harness.machine.walk import AVOIDABLE
from fixtures import models
from fixtures.auto import auto_path, swept

_USUAL = ("qwen35-mini", "qwen3-mini", "lfm2-mini", "mamba2-mini", "gemma3-mini", "rwkv7-mini")
_LIMIT = 1e-5  # NMSE; noise stays below 3e-7 on every fixture model, faults were above 3e-5


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
    seed: Annotated[int, typer.Option(help="Of the first round.")] = 0,
    findings: Annotated[Path, typer.Option(help="Where findings are kept.")] = Path("findings"),
    from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Do not keep clear of known failures.")] = False,
) -> None:
    """Search, then show what was found, each fault once."""
    console = Console(markup=False, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    found: list[Found] = []
    try:
        builds.resolve(build)
        made = _made(arch or (), build)
    except (EngineError, ChildDeath, OSError) as error:
        typer.echo(f"--arch: {error}", err=True)
        raise typer.Exit(2) from None
    chosen = [*(model or ()), *made] or list(_USUAL)
    for name in chosen:
        avoid = set() if from_scratch else set(AVOIDABLE)
        search = Search(Setup(build, name), _LIMIT, findings, avoid, console.print)
        try:
            search.run(60 * minutes / len(chosen), seed)
        except (EngineError, GGUFError, ChildDeath, models.UnknownModel, OSError) as error:
            typer.echo(f"{name}: {error}", err=True)
            raise typer.Exit(2) from None
        found += search.found.values()
    console.print(_table(found))
    raise typer.Exit(any(each.known is None for each in found))


def _made(names: Sequence[str], build: str) -> list[str]:
    """Paths of models made of architectures."""
    if "all" in names:
        return [str(model.path) for model in swept(build)[0]]
    return [str(auto_path(name, build)) for name in names]


def _table(found: list[Found]) -> Table:
    table = Table(
        "fault", "model", "met", "calls", "deviation", "expected", "seen", "replays", title="distinct findings"
    )
    for each in sorted(found, key=lambda each: (each.known is not None, each.cluster)):
        deviation = "" if each.deviation is None else f"{each.deviation:.1e}"
        name = f"KNOWN {each.cluster}" if each.known else each.cluster
        table.add_row(
            name,
            Path(each.model).stem,
            str(each.count),
            str(len(each.calls)),
            deviation,
            each.expected[:30],
            each.seen[:40],
            "yes" if each.replays else "no",
        )
    return table


def run() -> None:
    """The command line."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()


if __name__ == "__main__":
    run()
