"""The computed optimum as a terminal table, JSON and one HTML page with its plot; reads profiles, never an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich.table import Table

from conformance.harness.arms.optimum import DISCLAIMER, Optimum, TaskOptimum, most_steps
from conformance.harness.arms.profile import Profiles, StepProfile
from conformance.harness.report.arms import Bound, by_step, write_plot

HEADINGS = (
    "task",
    "steps",
    "evict prefill s/step",
    "new prefill s/step",
    "gain",
    "evict wall s",
    "optimum wall s",
    "residual s",
    "evict tokens/step",
    "new tokens/step",
)


def row(task: TaskOptimum) -> list[str]:
    """A task's line under `HEADINGS`."""
    return [
        task.task,
        str(task.steps),
        f"{task.prefill_evict:.4g}",
        f"{task.prefill_new:.4g}",
        f"{task.gain:.2f}",
        f"{task.wall_evict:.5g}",
        f"{task.wall_optimum:.5g}",
        f"{task.residual_optimum:.3g}",
        f"{task.tokens_evict:,.0f}",
        f"{task.tokens_new:,.0f}",
    ]


def terminal_table(found: Optimum) -> Table:
    """A line for each task; its title says what the optimum is."""
    table = Table(*HEADINGS, box=None, title=f"per task; new and optimum: {DISCLAIMER}", title_justify="left")
    for task in found.tasks:
        table.add_row(*row(task))
    return table


def lines(found: Optimum) -> list[str]:
    """Every figure over all tasks with its label, then what was left out and what is wrong."""
    figures = [f"{figure.name}: {figure.text}" for figure in found.figures()]
    return [*figures, *_notes(found)]


def _notes(found: Optimum) -> list[str]:
    notes = [
        f"means over {len(found.tasks)} tasks of at most {most_steps()} steps; per task only prefill is swapped, nothing is clamped"
    ]
    if found.excluded:
        notes.append(f"left out, more than {most_steps()} steps: {', '.join(found.excluded)}")
    worse = [task.task for task in found.tasks if task.wall_optimum > task.wall_evict]
    if worse:
        notes.append(f"worse than evict, because new content took longer there: {', '.join(worse)}")
    if found.negative_residuals:
        notes.append(f"NEGATIVE RESIDUAL, model time beyond wall: {', '.join(found.negative_residuals)}")
    else:
        notes.append(f"residual: 0 of {len(found.tasks)} tasks negative, the same in evict and optimum")
    if not all(task.wall_is_measured for task in found.tasks):
        notes.append("wall: not recorded for every step, so it is assumed to be prefill and decoding alone")
    return notes


def as_dict(found: Optimum) -> dict[str, Any]:
    """The whole result; the disclaimer stands in every figure that is a bound."""
    figures = [{**asdict(figure), "disclaimer": DISCLAIMER if figure.is_bound else None} for figure in found.figures()]
    return {
        "disclaimer": DISCLAIMER,
        "figures": figures,
        "tasks": [asdict(task) for task in found.tasks],
        "excluded": found.excluded,
        "notes": _notes(found),
    }


def bound_of(evict: Sequence[StepProfile], new: Sequence[StepProfile]) -> Bound:
    """The bound step by step, means over tasks: evict's steps with the prefill of new content; cells are evict's."""
    tokens, prefill = by_step(new, lambda step: step.prefilled_tokens), by_step(new, lambda step: step.prefill_seconds)
    decode = by_step(evict, lambda step: step.decode_seconds)
    seconds = tuple(a + b for a, b in zip(prefill, decode, strict=False))
    return Bound(tokens, seconds, by_step(evict, lambda step: step.live_cells))


def write_forms(folder: Path, found: Optimum, evict: Profiles, new: Profiles) -> None:
    """Write optimum.json, optimum.html, optimum.png and optimum.svg into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "optimum.json").write_text(json.dumps(as_dict(found), indent=1) + "\n", encoding="utf-8")
    arms = {evict.run.arm: evict.steps, new.run.arm: new.steps}
    svg = write_plot(folder / "optimum", arms, bound_of(evict.steps, new.steps))
    run = {"model": evict.run.model, "build": evict.run.build, "settings": evict.run.settings}
    (folder / "optimum.html").write_text(page(found, run, svg), encoding="utf-8")


def page(found: Optimum, run: Mapping[str, Any], plot: Markup) -> str:
    """The HTML page; it loads nothing from anywhere."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("optimum.html.j2").render(
        disclaimer=DISCLAIMER,
        figures=found.figures(),
        headings=HEADINGS,
        rows=[row(task) for task in found.tasks],
        notes=_notes(found),
        run=run,
        plot=plot,
    )
