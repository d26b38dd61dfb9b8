"""What the command line tools share: one line and exit code 2 for what cannot be used, one look of progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

MOST_TOKENS = 2**31 - 1
"""More than this does not fit into the int that llama.cpp counts the tokens of a batch in."""
MOST_THREADS = 512
"""GGML_MAX_N_THREADS of ggml.h; a build that is asked for many more ends its process."""

_UsageError = cast(
    "type[typer.BadParameter]", typer.BadParameter.__mro__[1]
)  # of click, which typer has under another name from version to version


def run(tool: Callable[..., None]) -> NoReturn:
    """Run a tool on the command line's words; options that it does not take are refused in one line like anything else."""
    app = typer.Typer(add_completion=False)
    app.command()(tool)
    try:
        code = app(standalone_mode=False)
    except _UsageError as error:
        typer.echo(" ".join(error.format_message().split()), err=True)
        code = 2
    sys.exit(code or 0)


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
