"""The fixture models: which there are, writing them, and what was measured on them.

    python -m tools.models list
    python -m tools.models make [NAME ...]
    python -m tools.models fetch [NAME ...]
    python -m tools.models card NAME_OR_GGUF [--build BUILD] [--json]
    python -m tools.models auto --arch NAME [--build BUILD]
    python -m tools.models architectures [--build BUILD]

Exit code 0, or 2 when a name, file or build cannot be used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from conformance.harness.builds import BUILD_HELP
from conformance.harness.contract.census import GGUFError, census_of_gguf
from conformance.harness.engine import BUNDLED, EngineError
from conformance.harness.engine.child import ChildDeath
from fixtures import models
from fixtures.auto import auto_model, auto_path, known_architectures
from fixtures.cards import Card, Floors, card_of
from fixtures.trained import TRAINED, FetchError
from tools.command import refusing

_REFUSED = (models.UnknownModel, FetchError, EngineError, ChildDeath, GGUFError)
_FILES = "give a file that can be read and a cache that can be written"

app = typer.Typer(add_completion=False, help=__doc__)


@app.command("list")
def list_models() -> None:
    """Name, purpose and memory of every fixture model, and where it is kept."""
    console = Console(markup=False, highlight=False)
    for name in models.names():
        recipe, kept = models.recipe(name), models.kept_path(name)
        counts = {"kv": len(recipe.census.attention or ()), "recurrent": len(recipe.census.recurrent or ())}
        layers = ", ".join(f"{n} {memory}" for memory, n in counts.items() if n)
        size = f"{kept.stat().st_size:,} bytes" if kept.exists() else "not written"
        console.print(f"{name:<15} {recipe.arch:<10} layers: {layers:<20} {size}", soft_wrap=True)
        console.print(f"{'':<15} {recipe.purpose}", soft_wrap=True)
    for trained in TRAINED.values():
        size = f"{trained.path.stat().st_size:,} bytes" if trained.is_here else "not fetched"
        console.print(f"{trained.name:<15} {trained.pieces[0].requirement:<31} {size}", soft_wrap=True)
        console.print(f"{'':<15} {trained.purpose}; {trained.license}", soft_wrap=True)
    console.print(f"kept in {models.cache_folder()}", soft_wrap=True)


@app.command()
def make(
    names: Annotated[list[str] | None, typer.Argument(help="Fixture models; all when none is named.")] = None,
) -> None:
    """Write models into the cache and print their paths."""
    with refusing(*_REFUSED, files=_FILES):
        for recipe in [models.recipe(name) for name in names or models.names()]:
            typer.echo(models.path(recipe.name))


@app.command()
def fetch(
    names: Annotated[
        list[str] | None, typer.Argument(help="Trained models; when none is named, those that are not on request only.")
    ] = None,
) -> None:
    """Download models with trained weights into the cache, check them, and print their paths."""
    with refusing(*_REFUSED, files=_FILES):
        for name in names or [name for name, model in TRAINED.items() if not model.on_request]:
            if name not in TRAINED:
                raise FetchError(f"there is no trained model {name!r}; choose from {', '.join(TRAINED)}")
            typer.echo(f"{name}: {TRAINED[name].license}", err=True)
            typer.echo(TRAINED[name].fetch())


@app.command()
def auto(
    arch: Annotated[str, typer.Option(help="An architecture by its name in a GGUF, such as jamba.")],
    build: Annotated[str, typer.Option(help=BUILD_HELP)] = BUNDLED,
) -> None:
    """Make a tiny model of any architecture from what the build's loader says is missing, and measure its card."""
    with refusing(*_REFUSED, files=_FILES):
        path = auto_path(arch, build)
        typer.echo(path)
        _print(card_of(path, build))


@app.command()
def architectures(
    build: Annotated[str, typer.Option(help=BUILD_HELP)] = BUNDLED,
) -> None:
    """Make a model of every architecture that the build knows, and print what became of each as a table in Markdown.

    Those whose memory is more than plain attention are conditioned and measured too, since they are swept.
    """
    with refusing(*_REFUSED, files=_FILES):
        known = known_architectures(build)
        typer.echo("| architecture | memory | layers known here | model | what is short of a good fixture |")
        typer.echo("|---|---|---|---|---|")
        for arch in known:
            made = auto_model(arch, build, conditioned=False)
            if made.path is None:
                typer.echo(f"| {arch} | | | **no**: {made.reason.replace('|', '/')} | |")
                continue
            made = auto_model(arch, build) if made.is_swept else made
            memory = ", ".join(kind.replace("_", " ") for kind in made.kinds)
            rule = "yes" if made.path and census_of_gguf(made.path).attention is not None else "no"
            short = "not measured" if made.shortcomings is None else "; ".join(made.shortcomings) or "nothing"
            typer.echo(f"| {arch} | {memory} | {rule} | yes | {short} |")


@app.command()
def card(
    model: Annotated[str, typer.Argument(help="A fixture model, or the path of a GGUF.")],
    build: Annotated[str, typer.Option(help=BUILD_HELP)] = BUNDLED,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Noise floors and sensitivities of a model under a build; measured when the cache holds no card yet."""
    with refusing(*_REFUSED, files=_FILES):
        measured = card_of(_path(model), build)
    if as_json:
        typer.echo(measured.model_dump_json(indent=2))
    else:
        _print(measured)


def _path(model: str) -> Path:
    """A path when it looks like one or a file has this name, a fixture model otherwise."""
    given = Path(model)
    return given if given.name != model or given.suffix == ".gguf" or given.exists() else models.path(model)


def _print(card: Card) -> None:
    console = Console(markup=False, highlight=False)
    settings, build = card.settings, card.build
    console.print(
        f"{card.model} ({card.arch}) under {build['version']}, library digest {build['digest']}", soft_wrap=True
    )
    console.print(
        f"measured {card.measured} on this machine; NMSE of logits, the worst of {len(settings.text_seeds)} texts",
        soft_wrap=True,
    )
    noise = Table("noise against ubatch 512", "flash attention off", "on", title=f"over {settings.floor_tokens} tokens")
    for name in Floors.model_fields:
        off, on = getattr(card.flash_attn_off, name), getattr(card.flash_attn_on, name)
        noise.add_row(name.replace("_", " "), f"{off:.1e}", f"{on:.1e}")
    noise.add_row("saved and restored", f"{card.restored:.1e}", "")
    console.print(noise)
    edits = Table(
        "zeroed",
        "least NMSE",
        "in layer",
        title=f"next {settings.probe_tokens} tokens after {card.prefix_tokens} tokens",
    )
    for part in ("k", "v", "r", "s"):
        if least := card.least(part):
            edits.add_row(f"{part} of one layer", f"{least.nmse:.1e}", str(least.layer))
    if cell := card.least_cell:
        edits.add_row("k of one cell of one layer", f"{cell.nmse:.1e}", str(cell.layer))
    console.print(edits)
    if card.layer_ratio is not None:
        console.print(f"least layer over noise of batched runs: {card.layer_ratio:.1e}")
    console.print(f"another first half of the text: {card.past:.1e}")
    if card.cell_ratio is not None:
        advice = "compare bits at equal micro-batches" if card.needs_bit_equality_for_cells else "fine enough for NMSE"
        console.print(f"least cell over noise at ubatch 1: {card.cell_ratio:.1e}; single cells: {advice}")
    if card.shortcomings:
        console.print(f"short of a good fixture: {'; '.join(card.shortcomings)}", soft_wrap=True)


if __name__ == "__main__":
    app()
