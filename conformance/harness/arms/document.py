"""The optimum document's figures, its arithmetic done again, and its trace as a transcript."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

import fixtures
from conformance.harness.contract.entry import Entry
from conformance.harness.contract.load import load_file
from conformance.harness.measure.rederivation import Formula, Rederivation, rederived
from conformance.harness.prompts.transcript import Screenshot, Step, Text, Transcript

PATH = Path(fixtures.__file__).parent / "documents" / "holo3.yaml"
_MARKERS = 2


class Figures(Entry):
    """Figures of one label and source, by group and name: as printed, a whole number where it is a count, None where unknown."""

    label: Literal["stated", "derived", "assumed", "unknown"]
    source: str
    values: dict[str, dict[str, str | int | None]]


class TraceRow(Entry):
    """A stated step of the trace, in tokens; `reuse` as printed."""

    step: int
    prompt: int
    reused: int
    prefilled: int
    reuse: str


class Assumed(Entry):
    """A number that the document does not give."""

    value: int
    because: str


class AssumedScreenshot(Entry):
    """The grid of a screenshot that the document does not give, in merged patches."""

    width: int
    height: int
    because: str


class TraceAssumptions(Entry):
    """What the trace needs beside its stated rows."""

    closing_tokens: Assumed
    turn_tokens: Assumed
    evicted_tokens: Assumed
    screenshot: AssumedScreenshot
    between: str


class Trace(Entry):
    """One long task of the evict arm."""

    max_images: int
    preamble_tokens: int
    rows: Annotated[tuple[TraceRow, ...], Field(min_length=2)]
    assumed: TraceAssumptions


class Length(Entry):
    """Tasks of so many steps, lowest and highest, over which a mean gain is told."""

    steps: tuple[int, int]
    because: str

    @property
    def name(self) -> str:
        """As it stands beside the gain."""
        low, high = self.steps
        return f"<={high} steps" if low == 1 else f"{low}-{high} steps"


class NegativeResidual(Entry):
    """From which share of a task's wall on model time beyond it is no rounding."""

    share_of_wall: Annotated[float, Field(gt=0, lt=1)]
    because: str


class Means(Entry):
    """How the computed optimum takes its means."""

    lengths: Annotated[tuple[Length, ...], Field(min_length=1)]
    negative_residual: NegativeResidual


class Claim(Entry):
    """Something that the document concludes: `formula` gives `stated`, or, where nothing is, its comparison holds."""

    id: str
    says: str
    section: int
    formula: str
    stated: str | None = None
    note: str = ""


class Document(Entry):
    """The fixture file ``documents/holo3.yaml``."""

    document: str
    figures: tuple[Figures, ...]
    trace: Trace
    means: Means
    claims: tuple[Claim, ...]

    @property
    def printed(self) -> dict[str, str | int | None]:
        """Every figure, None where unknown, by its name group.name; those of the trace by trace.step.name."""
        named = {
            f"{group}.{name}": figure
            for figures in self.figures
            for group, values in figures.values.items()
            for name, figure in values.items()
        }
        rows = {
            f"trace.{row.step}.{name}": getattr(row, name) for row in self.trace.rows for name in ("prompt", "reused")
        }
        return {**named, **rows, "trace.preamble_tokens": self.trace.preamble_tokens}

    @property
    def most_steps(self) -> int:
        """Steps of the longest task that the document's means are over."""
        figure = self.printed["subset.most_steps"]
        assert isinstance(figure, int)
        return figure


@cache
def load_document(path: Path = PATH) -> Document:
    """The document's figures; SpecError with a line for each mistake in the file."""
    return load_file(path, Document).content


def rederive(document: Document) -> list[Rederivation]:
    """Every claim from the printed figures, then every row of the trace. ValueError when a claim names a figure that the file lacks."""
    figures = document.printed
    claims = [
        rederived(claim.id, claim.says, Formula(claim.formula, figures), claim.stated, claim.note)
        for claim in document.claims
    ]
    return [*claims, *_rows(document.trace)]


def _rows(trace: Trace) -> Iterator[Rederivation]:
    """The trace's counts are whole numbers and not rounded; its reuse is."""
    for row in trace.rows:
        split, reuse = Formula(f"{row.reused} + {row.prefilled}", {}), Formula(f"{row.reused} / {row.prompt}", {})
        at = f"at step {row.step}"
        yield rederived(
            f"trace-{row.step}-prompt", f"{at} reused and prefilled make up the prompt", split, str(row.prompt)
        )
        yield rederived(f"trace-{row.step}-reuse", f"{at} {row.reuse} of the prompt is reused", reuse, row.reuse)


def trace_transcript(document: Document) -> Transcript:
    """The transcript that the trace is of: its stated rows come out exactly, what is between them is assumed.

    Every step brings a screenshot. Texts grow evenly from one stated row to the next.
    """
    trace, assumed = document.trace, document.trace.assumed
    image = assumed.screenshot.width * assumed.screenshot.height + _MARKERS
    turn, closing, evicted = (
        each.value for each in (assumed.turn_tokens, assumed.closing_tokens, assumed.evicted_tokens)
    )
    prompts = {1: trace.preamble_tokens + image + turn + closing, **{row.step: row.prompt for row in trace.rows}}
    stated = sorted(prompts)
    said: list[int] = []
    for before, after in pairwise(stated):
        steps = after - before
        swapped = sum(evicted if step > trace.max_images else image for step in range(before + 1, after + 1))
        text = prompts[after] - prompts[before] - swapped - steps * turn
        said += [text * (n + 1) // steps - text * n // steps for n in range(steps)]
    last = said[-1]
    steps_of_trace = tuple(
        Step(
            screenshot=Screenshot(width=assumed.screenshot.width, height=assumed.screenshot.height, seed=number),
            action=Text.drawn(number, tokens),
        )
        for number, tokens in enumerate([*said, last], 1)
    )
    fixed = len(steps_of_trace)
    return Transcript(
        preamble=Text.drawn(0, trace.preamble_tokens),
        steps=steps_of_trace,
        turn=Text.drawn(fixed + 1, turn),
        closing=Text.drawn(fixed + 2, closing),
        evicted=Text.drawn(fixed + 3, evicted),
    )
