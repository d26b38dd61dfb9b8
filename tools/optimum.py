"""The computed optimum of the agent experiment: evict's tasks with the prefill of no-evict. Nobody ran it.

    python -m tools.optimum EVICT.jsonl NOEVICT.jsonl [--power WATTS] [--out DIR]
    python -m tools.optimum --document

EVICT.jsonl and NOEVICT.jsonl are step profiles as tools.arms leaves them, over the same tasks. Prints the optimum per task,
means, gains by task length, the check of residuals and, where power is known, energy, every figure as measured, computed or
assumed; writes optimum.json, optimum.html, optimum.png and optimum.svg into --out. --document derives the figures of the
document again from the digits that it prints and says which agree.

Exit code 0, or 2 when the profiles cannot be used.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from conformance.harness.arms.document import load_document, rederive
from conformance.harness.arms.optimum import OptimumError, optimum
from conformance.harness.arms.profile import ProfileError, read_profiles
from conformance.harness.report.document import print_rederivations
from conformance.harness.report.optimum import lines, terminal_table, write_forms
from tools.command import refuse


def main(
    evict: Annotated[Path | None, typer.Argument(metavar="EVICT.jsonl", help="Step profiles of evict.")] = None,
    no_evict: Annotated[Path | None, typer.Argument(metavar="NOEVICT.jsonl", help="Of no-evict, same tasks.")] = None,
    power: Annotated[float | None, typer.Option(help="Watts to assume where the profiles hold no power.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("optimum"),
    document: Annotated[bool, typer.Option("--document", help="Derive the document's figures again instead.")] = False,
) -> None:
    """Compute the optimum, or derive the document's figures again."""
    if document:
        print_rederivations(rederive(load_document()))
        return
    if evict is None or no_evict is None:
        refuse("name two files of step profiles, EVICT.jsonl and NOEVICT.jsonl, or --document")
    if power is not None and not 0 < power < math.inf:
        refuse(f"--power {power:g}: give watts, more than 0")
    try:
        ours, theirs = read_profiles(evict), read_profiles(no_evict)
        found = optimum(ours, theirs, power)
        write_forms(out, found, ours, theirs)
    except (ProfileError, OptimumError) as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"--out {error.filename}: {error.strerror}; name a folder that can be written")
    console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    console.print(terminal_table(found))
    for line in lines(found):
        console.print(line)
    console.print(f"results in {out}")


if __name__ == "__main__":
    typer.run(main)
