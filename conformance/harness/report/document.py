"""A document's conclusions beside what comes out when they are drawn again, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from conformance.harness.measure.rederivation import Rederivation


def print_rederivations(found: Sequence[Rederivation]) -> None:
    """A row for each, then how many agree; where a line says how it was computed, that stands in it."""
    headings = ["figure", "says", "stated", "derived", "verdict"]
    shows_how = any(line.how for line in found)
    table = Table(*headings, *(["arithmetic on the printed digits"] if shows_how else []), box=None)
    for line in found:
        table.add_row(line.id, line.says, line.stated, line.derived, line.verdict, *([line.how] if shows_how else []))
    console = Console(highlight=False, markup=False, width=200 if not sys.stdout.isatty() else None)
    console.print(table)
    counts = {verdict: sum(line.verdict == verdict for line in found) for verdict in ("agrees", "disagrees", "unknown")}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
