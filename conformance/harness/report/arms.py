"""What the arms did, from their step profiles: plots, a table, and whether a terminal slot is worth it; reads no engine."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from rich.table import Table

from conformance.harness.arms.counts import LABELS, ArmName, StepCounts, crossover
from conformance.harness.arms.optimum import DISCLAIMER
from conformance.harness.arms.profile import StepProfile
from conformance.harness.measure.timing import ratio_of_sums, smallest

Profiles = Mapping[ArmName, Sequence[StepProfile]]
Counts = Mapping[ArmName, Sequence[StepCounts]]

_COLOURS: Mapping[ArmName, str] = {
    "evict": "C3",
    "evict_ideal": "C1",
    "append_only": "C0",
    "terminal_slot": "C2",
}
_MIB = 1 << 20
_BOUNDED: tuple[ArmName, ...] = ("evict", "evict_ideal")
HEADINGS = (
    "arm",
    "steps",
    "prefilled tokens",
    "per step, last",
    "mean depth",
    "hit ratio",
    "prefill s",
    "ms a token",
    "decode tokens/s",
    "live cells, last",
    "checkpoints MiB",
    "harness",
)
_BRIEF = (1, 2, 3, 6, 8, 9, 11)
_MEASURED = (
    "Tokens, cells, seconds and hit ratios are measured: the engine's own counters, and a clock around its calls."
)
_BOUND = f"The dashed line, nothing prefilled but what is new, is {DISCLAIMER}."
_READINGS = """evict is what the document runs: from the first eviction on everything behind the preamble is prefilled again. With
a checkpoint at every change point it would prefill what follows the screenshot that is evicted."""
_DEPTH = """Mean depth: tokens in front of a prefilled token, on average. The terminal slot's all sit at the deep end, where
attention costs most, so a plain token ratio overstates its gain."""
_HARNESS = "harness: the share of an arm's wall time that was not spent inside the engine."
NOTES = (_MEASURED, _BOUND, _READINGS, _DEPTH, _HARNESS)


@dataclass(frozen=True)
class Bound:
    """The computed bound at every step.

    Attributes:
        new_tokens: what is new: fewer tokens cannot be prefilled.
        seconds: of prefill and decoding, where they were computed.
        cells: live cells, where they were computed.

    """

    new_tokens: tuple[float, ...]
    seconds: tuple[float, ...] = ()
    cells: tuple[float, ...] = ()


def mean_depth(steps: Sequence[StepProfile]) -> float:
    """Tokens in front of a prefilled token, on average over all that were prefilled."""
    prefilled = _prefilled(steps)
    depths = sum(step.prefilled_tokens * (step.reused_tokens + step.prefilled_tokens / 2) for step in steps)
    return depths / prefilled if prefilled else 0.0


def harness_share(wall: float, inside: float) -> float:
    """The share of a wall time, in seconds, that was not spent inside the engine; NaN where no time passed."""
    return (wall - inside) / wall if wall else math.nan


def row(arm: ArmName, steps: Sequence[StepProfile]) -> list[str]:
    """An arm's line under `HEADINGS`."""
    prefilled = _prefilled(steps)
    prompts = sum(step.prompt_tokens for step in steps)
    decoded, decode = sum(step.decoded_tokens for step in steps), sum(step.decode_seconds for step in steps)
    prefill, wall = sum(step.prefill_seconds for step in steps), sum(step.wall_seconds or 0 for step in steps)
    return [
        LABELS[arm],
        f"{len(steps)}",
        f"{prefilled:,}",
        f"{steps[-1].prefilled_tokens:,}",
        f"{mean_depth(steps):,.0f}",
        f"{1 - prefilled / prompts:.1%}",
        f"{prefill:.2f}",
        f"{1e3 * prefill / prefilled:.3f}" if prefilled else "",
        f"{decoded / decode:.1f}" if decode else "",
        f"{steps[-1].live_cells:,}",
        f"{steps[-1].state_bytes / _MIB:.2f}",
        f"{harness_share(wall, prefill + decode):.1%}" if wall else "",
    ]


def terminal_table(profiles: Profiles) -> Table:
    """The columns that fit a terminal, arms by their short names."""
    table = Table("arm", *(HEADINGS[place] for place in _BRIEF), box=None)
    for arm, steps in profiles.items():
        cells = row(arm, steps)
        table.add_row(arm, *(cells[place] for place in _BRIEF))
    return table


def answer(profiles: Profiles, counts: Counts) -> tuple[str, str]:
    """Is a terminal slot worth it for this agent? One line from counts, one from measured seconds."""
    others = [arm for arm in profiles if arm != "terminal_slot"]
    if "terminal_slot" not in profiles or not others:
        todo = "run the terminal slot and another arm, and they are compared here."
        return f"From counts: {todo}", f"Measured: {todo}"
    slot = profiles["terminal_slot"]
    tokens, seconds = _prefilled(slot), sum(step.prefill_seconds for step in slot)
    counted, measured = [], []
    for arm in others:
        steps = profiles[arm]
        since = crossover(counts["terminal_slot"], counts[arm])
        when = f"fewer at every step from {since} on" if since else "at no step fewer for good"
        counted.append(f"{tokens / _prefilled(steps):.2f} of {LABELS[arm]} ({_prefilled(steps):,}; {when})")
        taken = sum(step.prefill_seconds for step in steps)
        measured.append(f"{seconds / taken:.2f} of {LABELS[arm]} ({taken:.1f} s)")
    if "append_only" in profiles:
        counted[-1] += (
            f". It ends with {slot[-1].live_cells:,} cells, no-evict with {profiles['append_only'][-1].live_cells:,}"
        )
    return (
        f"From counts: over {len(slot)} steps the terminal slot prefills {tokens:,} tokens, {', '.join(counted)}.",
        f"Measured: it takes {seconds:.1f} s of prefill, {', '.join(measured)}; tokens at the deep end cost more. {_verdict(profiles)}.",
    )


def _verdict(profiles: Profiles) -> str:
    """Whether a terminal slot takes less time than the cheapest other bounded arm; UNKNOWN where steps do not tell."""
    slot = profiles["terminal_slot"]
    pairs = {LABELS[arm]: _paired(steps, slot) for arm, steps in profiles.items() if arm in _BOUNDED}
    if not pairs:
        return "No other bounded arm was run to compare it with"
    times = {arm: ratio_of_sums([a for a, _ in each], [b for _, b in each]) for arm, each in pairs.items()}
    name, gain = smallest(times)
    n = len(pairs[name])
    said = f"With decoding, {name} takes {gain.value:.2f} times its time"
    if not math.isfinite(gain.high):
        return f"{said}: UNKNOWN whether a terminal slot is worth it, since {n} steps are too few for an interval"
    interval = (
        f"{gain.low:.2f} to {gain.high:.2f} with {gain.confidence:.0%} confidence, computed from {n} measured steps"
    )
    worth = gain.lies_within(most=1)
    if worth is None:
        return f"{said} ({interval}): UNKNOWN whether a terminal slot is worth it"
    return f"{said} ({interval}): a terminal slot is {'not ' if worth else ''}worth it"


def _paired(steps: Sequence[StepProfile], slot: Sequence[StepProfile]) -> list[tuple[float, float]]:
    """Model seconds of the steps that both ran."""
    theirs = {(step.task, step.step): step.prefill_seconds + step.decode_seconds for step in slot}
    return [
        (step.prefill_seconds + step.decode_seconds, theirs[step.task, step.step])
        for step in steps
        if (step.task, step.step) in theirs
    ]


def _prefilled(steps: Sequence[StepProfile]) -> int:
    return sum(step.prefilled_tokens for step in steps)


def by_step(steps: Iterable[StepProfile], value: Callable[[StepProfile], float]) -> tuple[float, ...]:
    """The mean of a value over all tasks that have a first step, a second, and so on."""
    values: dict[int, list[float]] = {}
    for step in steps:
        values.setdefault(step.step, []).append(value(step))
    return tuple(fmean(values[number]) for number in sorted(values))


def plot(profiles: Profiles, bound: Bound) -> Figure:
    """Prefilled tokens, seconds and live cells of every step, an arm a line, means over its tasks; the bound is dashed."""
    panels: list[tuple[str, Callable[[StepProfile], float], tuple[float, ...]]] = [
        ("prefilled tokens", lambda step: step.prefilled_tokens, bound.new_tokens),
        ("prefill + decode, s", lambda step: step.prefill_seconds + step.decode_seconds, bound.seconds),
        ("live cells", lambda step: step.live_cells, bound.cells),
    ]
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    for place, (label, value, limit) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for arm, steps in profiles.items():
            means = by_step(steps, value)
            axes.plot(
                np.arange(1, len(means) + 1),
                means,
                "-o" if len(means) < 30 else "-",
                ms=3,
                lw=1.4,
                color=_COLOURS[arm],
                label=LABELS[arm],
            )
        axes.plot(
            np.arange(1, len(limit) + 1), limit, "--", color="k", lw=1.2, label="bound: only what is new (computed)"
        )
        if place == 0:
            axes.legend(fontsize=7)
        axes.set_xlabel("step", fontsize=8)
        axes.set_title(label, fontsize=9)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.grid(True, lw=0.3, alpha=0.5)
    return figure


def write_plot(path: Path, profiles: Profiles, bound: Bound) -> Markup:
    """Write the plot as .png and .svg beside `path`; returns the drawing for a page."""
    with mpl.rc_context({"svg.hashsalt": "arms", "svg.fonttype": "none", "font.size": 9}):
        figure = plot(profiles, bound)
        figure.savefig(path.with_suffix(".png"), dpi=110, metadata={"Software": None})
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    path.with_suffix(".svg").write_text(svg, encoding="utf-8")
    return Markup(svg[svg.index("<svg") :])


def write_forms(
    folder: Path, profiles: Profiles, counts: Counts, bound: Bound, run: Mapping[str, Any], notes: Sequence[str] = ()
) -> None:
    """Write arms.html, arms.png and arms.svg into a folder."""
    svg = write_plot(folder / "arms", profiles, bound)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = environment.get_template("arms.html.j2").render(
        headings=HEADINGS,
        rows=[row(arm, steps) for arm, steps in profiles.items()],
        answer=answer(profiles, counts),
        run=run,
        notes=[*NOTES, *notes],
        plot=svg,
    )
    (folder / "arms.html").write_text(page, encoding="utf-8")
