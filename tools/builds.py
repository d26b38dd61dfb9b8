"""Builds of llama.cpp: which are published, fetching them, and what each one is.

    python -m tools.builds list [SOURCE ...] [--kept] [--json]
    python -m tools.builds fetch BUILD ...
    python -m tools.builds describe [BUILD ...] [--model NAME] [--json]

A SOURCE is pypi:xllamacpp, pypi:llama-cpp-python, pypi:llama-cpp-py-sync or npm:@node-llama-cpp/linux-x64; a BUILD is one
of its versions (pypi:xllamacpp==2026.10.11549), `bundled`, a folder or a library. Exit code 0; 1 when a described build
does not decode; 2 when a build does not exist or cannot be fetched or loaded.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from conformance.harness import builds
from conformance.harness.builds import BUILD_HELP, Description
from conformance.harness.contract.census import GGUFError
from conformance.harness.engine import BUNDLED, EngineError
from fixtures import models
from fixtures.trained import fixture_path
from tools.command import refusing

_WIDTH = 200  # of a table that goes to a file

_REFUSED = (EngineError, GGUFError, models.UnknownModel)
_FILES = "set LLAMA_CONFORMANCE_CACHE to a folder that can be written"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def _console() -> Console:
    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else _WIDTH)


@app.command("list")
def list_builds(
    sources: Annotated[list[str] | None, typer.Argument(metavar="SOURCE", help="All when none is named.")] = None,
    kept: Annotated[bool, typer.Option("--kept", help="Only what is in the cache; asks no registry.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Versions of each source, newest first, and which of them are in the cache."""
    with refusing(*_REFUSED, files=_FILES):
        chosen = [builds.parse_source(text) for text in sources or ()] or list(builds.SOURCES)
        here = {receipt.reference for receipt in builds.kept()}
        listed = {
            source: [
                build
                for version in (() if kept else reversed(builds.published_versions(source)))
                for build in [builds.Published(source, version)]
            ]
            or [build for text in here if (build := builds.parse(text)) and build.source == source]
            for source in chosen
        }
    if as_json:
        rows = [{"build": str(each), "kept": str(each) in here} for found in listed.values() for each in found]
        typer.echo(json.dumps(rows, indent=1))
        return
    console = _console()
    for source, found in listed.items():
        versions = ", ".join(each.version + ("*" if str(each) in here else "") for each in found)
        console.print(f"{source}{source.separator}\n    {versions or 'none'}", soft_wrap=True)
    console.print(f"* kept in {builds.builds_folder()}", soft_wrap=True)


@app.command()
def fetch(references: Annotated[list[str], typer.Argument(metavar="BUILD", help=BUILD_HELP)]) -> None:
    """Put builds into the cache and print the paths of their libraries."""
    with refusing(*_REFUSED, files=_FILES):
        for reference in references:
            typer.echo(builds.resolve(reference))


@app.command()
def describe(
    references: Annotated[list[str] | None, typer.Argument(metavar="BUILD", help=BUILD_HELP)] = None,
    model: Annotated[str, typer.Option(help="Fixture model that is decoded.")] = "holo3-mini",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What each build is: numbers, digest, struct layouts, format of its states, and whether it decodes a tiny model."""
    with refusing(*_REFUSED, files=_FILES):
        path = fixture_path(model)
    found, refused = [], []
    for reference in references or [BUNDLED]:
        try:
            found.append(builds.describe(reference, path))
        except EngineError as error:
            refused.append(str(error))
    if as_json:
        typer.echo(json.dumps([each.as_dict() for each in found], indent=1))
    elif found:
        _console().print(_table(found, model))
    for problem in refused:
        typer.echo(problem, err=True)
    raise typer.Exit(2 if refused else any(each.runs != "DECODES" for each in found))


def _table(found: list[Description], model: str) -> Table:
    table = Table("build", "llama.cpp", "digest", "context", "model", "mtmd", "state", f"{model}")
    for each in found:
        identity = each.identity or {}
        table.add_row(
            each.reference,
            identity.get("release") or identity.get("commit", "-"),
            identity.get("digest", "-"),
            identity.get("context_layout", "-"),
            identity.get("model_layout", "-"),
            identity.get("vision_layout") or "-",
            each.state_format or "-",
            f"{each.runs} {each.reason}".rstrip(),
        )
    return table


if __name__ == "__main__":
    app()
