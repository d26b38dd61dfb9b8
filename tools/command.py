"""What the command line tools share: one line and exit code 2 for what cannot be used, one look of progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def refuse(problem: str) -> NoReturn:
    """End with one line that says what is wrong, and exit code 2."""
    typer.echo(problem, err=True)
    raise typer.Exit(2)


@contextmanager
def refusing(*errors: type[Exception], files: str) -> Iterator[None]:
    """Refuses what raises one of `errors`, and what cannot be read or written; `files` says what to do about the latter."""
    try:
        yield
    except errors as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}; {files}")


def progress_bars() -> Progress:
    """Bars of steps done with the times taken and left, on standard error."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
