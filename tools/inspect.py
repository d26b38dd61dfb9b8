"""What a saved sequence state holds, and where two of them differ.

    python -m tools.inspect BLOB [--against OTHER] [--json]

BLOB is what `llama_state_seq_get_data(_ext)` returned, or a file of `llama_state_seq_save_file`. Exit code 0, or 1 when
the two states differ, or 2 when a file cannot be read or is no sequence state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from conformance.harness.state import (
    BlobError,
    Cells,
    LayerComparison,
    Rows,
    SequenceState,
    census,
    compare,
    first_difference,
    is_sequence_file,
    parse,
    split_file,
)

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Stored:
    """A state on disk; `tokens` is int32 [n] when it came in a sequence file."""

    path: Path
    tokens: NDArray[np.int32] | None
    state: SequenceState


@app.command(help=__doc__)
def main(
    blob: Annotated[Path, typer.Argument(help="A sequence blob or sequence file.")],
    against: Annotated[Path | None, typer.Option(help="Compare with this one, layer by layer.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Print the census of one state, or compare two."""
    stored = _load(blob)
    rows = None if against is None else compare(stored.state, _load(against).state)
    if as_json:
        typer.echo(json.dumps({**_describe(stored), **({} if rows is None else _verdict(rows))}, indent=2))
    else:
        console = Console(markup=False, highlight=False)
        _print_census(console, stored)
        if rows is not None:
            _print_comparison(console, rows)
    raise typer.Exit(0 if rows is None or all(row.equal for row in rows) else 1)


def _load(path: Path) -> Stored:
    try:
        content = np.fromfile(path, np.uint8)
        if not is_sequence_file(content):
            return Stored(path, None, parse(content))
        file = split_file(content)
        try:
            return Stored(path, file.tokens, parse(file.blob, head=False))
        except BlobError as error:
            raise BlobError(error.where + content.size - file.blob.size, error.what) from None
    except OSError as error:
        typer.echo(f"{path}: {error.strerror}: give a file that can be read", err=True)
    except BlobError as error:
        typer.echo(f"{path}: no sequence state of {content.size} bytes: {error}", err=True)
    raise typer.Exit(2)


def _sections(state: SequenceState) -> Iterator[tuple[str, Cells, dict[str, list[Rows]]]]:
    for number, cache in enumerate(state.attention):
        values = [layer.v for layer in cache.layers if layer.v is not None]
        name = f"attention {number}" if len(state.attention) > 1 else "attention"
        yield name, cache.cells, {"k": [layer.k for layer in cache.layers], "v": values}
    if state.recurrent:
        layers = state.recurrent.layers
        yield "recurrent", state.recurrent.cells, {"r": [it.r for it in layers], "s": [it.s for it in layers]}


def _parts(state: SequenceState) -> Iterator[dict[str, Any]]:
    """One entry per cache, part, type and row size."""
    for cache, cells, parts in _sections(state):
        for part, tensors in parts.items():
            for kind, row_size, transposed in dict.fromkeys((it.type, it.row_size, it.transposed) for it in tensors):
                alike = [it for it in tensors if (it.type, it.row_size, it.transposed) == (kind, row_size, transposed)]
                yield {
                    "cache": cache,
                    "part": part,
                    "layers": len(alike),
                    "type": kind,
                    "transposed": transposed,
                    "row_size": row_size,
                    "cells": len(cells),
                    "bytes": sum(it.bytes.size for it in alike),
                }


def _positions(cells: Cells) -> list[int] | None:
    return [int(cells.positions.min()), int(cells.positions.max())] if len(cells) else None


def _describe(stored: Stored) -> dict[str, Any]:
    state, counted = stored.state, census(stored.state)
    return {
        "file": str(stored.path),
        "tokens": None if stored.tokens is None else len(stored.tokens),
        "layout": state.layout.name,
        "sequence": state.source,
        "rotation": [list(cache.rotation) if cache.rotation else None for cache in state.attention],
        "positions": {name: _positions(cells) for name, cells, _ in _sections(state)},
        "parts": list(_parts(state)),
        "census": {**asdict(counted), "n_bytes": counted.n_bytes},
    }


def _verdict(rows: Sequence[LayerComparison]) -> dict[str, Any]:
    return {
        "equal": all(row.equal for row in rows),
        "first_difference": first_difference(rows),
        "comparison": [row.to_dict() for row in rows],
    }


def _print_census(console: Console, stored: Stored) -> None:
    state, counted = stored.state, census(stored.state)
    source = "no sequence id" if state.source is None else f"saved from sequence {state.source}"
    tokens = "" if stored.tokens is None else f", a sequence file of {len(stored.tokens)} tokens"
    console.print(f"{stored.path}{tokens}", soft_wrap=True)
    console.print(f"layout {state.layout.name}; {source}", soft_wrap=True)
    for name, cells, _ in _sections(state):
        span = _positions(cells)
        where = "empty" if span is None else f"{len(cells)} cells at positions {span[0]} to {span[1]}"
        console.print(f"{name}: {where}")
    table = Table("cache", "part", "layers", "type", "row", "bytes")
    for it in _parts(state):
        kind = it["type"] + (" transposed" if it["transposed"] else "")
        table.add_row(it["cache"], it["part"], str(it["layers"]), kind, f"{it['row_size']:,}", f"{it['bytes']:,}")
    table.add_row("", "cells", "", "", "", f"{counted.cell_bytes:,}")
    table.add_row("", "headers", "", "", "", f"{counted.header_bytes:,}", end_section=True)
    table.add_row("", "all", "", "", "", f"{counted.n_bytes:,}")
    console.print(table)
    console.print(f"{counted.kv_bytes_per_token:,} bytes of K and V per token")


def _print_comparison(console: Console, rows: Sequence[LayerComparison]) -> None:
    table = Table("layer", "equal", "part", "deviation", "measure")
    for row in rows:
        for index, (part, deviation) in enumerate(row.deviations.items()):
            head = (row.label, "yes" if row.equal else "NO") if index == 0 else ("", "")
            table.add_row(*head, part, f"{deviation.value:.3g}", deviation.measure)
        if not row.deviations:
            table.add_row(row.label, "NO", "", "", "")
    console.print(table)
    n_equal = sum(row.equal for row in rows)
    console.print(f"{n_equal} of {len(rows)} rows equal; layers are numbered within their cache")
    console.print(first_difference(rows) or "no difference", soft_wrap=True)


if __name__ == "__main__":
    app()
