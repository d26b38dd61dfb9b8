"""Computed optima that lie: each overrides what one lie needs and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from conformance.harness.arms.document import Document, rederive
from conformance.harness.arms.optimum import Figure, Optimum, TaskOptimum, optimum, optimum_of
from conformance.harness.arms.profile import Profiles, StepProfile
from conformance.harness.measure.rederivation import Rederivation


def _of_each(lie: Callable[[TaskOptimum], TaskOptimum]) -> Callable[..., Optimum]:
    """The true optimum with every task turned into another."""

    def lying(evict: Profiles, new: Profiles, power: float | None = None) -> Optimum:
        found = optimum(evict, new, power)
        return replace(found, tasks=tuple(map(lie, found.tasks)))

    return lying


def _clamp(task: TaskOptimum) -> TaskOptimum:
    return replace(task, wall_optimum=min(task.wall_optimum, task.wall_evict))


clamped = _of_each(_clamp)
"""The optimum is never worse than evict."""


def _hide(task: TaskOptimum) -> TaskOptimum:
    return replace(task, residual_evict=max(task.residual_evict, 0.0), residual_optimum=max(task.residual_optimum, 0.0))


residual_hidden = _of_each(_hide)
"""A negative rest is told as none."""


def _keep_energy_above(task: TaskOptimum) -> TaskOptimum:
    saved = task.energy_evict and task.energy_evict * (1 - task.steps * task.prefill_new / task.wall_evict)
    return replace(task, energy_optimum=saved)


energy_by_prefill = _of_each(_keep_energy_above)
"""Energy is scaled by something else than wall."""


def with_decode_of_no_evict(evict: Profiles, new: Profiles, power: float | None = None) -> Optimum:
    """Decode seconds are swapped too."""
    found = optimum(evict, new, power)

    def swap(task: TaskOptimum) -> TaskOptimum:
        decode = fmean(step.decode_seconds for step in new.steps if step.task == task.task) * task.steps
        return replace(task, decode=decode, wall_optimum=task.wall_optimum - task.decode + decode)

    return replace(found, tasks=tuple(map(swap, found.tasks)))


def means_before_the_difference(evict: Profiles, new: Profiles, power: float | None = None) -> Optimum:
    """Takes the means over tasks first and their difference then."""
    found = optimum(evict, new, power)
    saved = fmean(task.prefill_evict for task in found.tasks) - fmean(task.prefill_new for task in found.tasks)
    steps = fmean(task.steps for task in found.tasks)
    tasks = (replace(task, wall_optimum=task.wall_evict - saved * steps) for task in found.tasks)
    return replace(found, tasks=tuple(tasks))


def without_markers(
    evict: Sequence[StepProfile], new: Sequence[StepProfile], power: float | None = None
) -> TaskOptimum:
    """Forgets two tokens of every step's new content."""
    task = optimum_of(evict, new, power)
    return replace(task, tokens_new=task.tokens_new - 2)


def long_tasks_kept(evict: Profiles, new: Profiles, power: float | None = None) -> Optimum:
    """Leaves no task out."""
    found = optimum(evict, new, power)

    def steps(arm: Profiles, task: str) -> list[StepProfile]:
        return [step for step in arm.steps if step.task == task]

    more = (optimum_of(steps(evict, task), steps(new, task), power) for task in found.excluded)
    return replace(found, tasks=(*found.tasks, *more), excluded=())


def rederive_from_exact_digits(document: Document) -> list[Rederivation]:
    """Takes printed digits for exact numbers."""
    figures = tuple(
        table.model_copy(
            update={
                "values": {
                    group: {
                        name: f"{figure}{'' if '.' in figure else '.'}{'0' * 12}"
                        if isinstance(figure, str) and "e" not in figure
                        else figure
                        for name, figure in values.items()
                    }
                    for group, values in table.values.items()
                }
            }
        )
        for table in document.figures
    )
    return rederive(document.model_copy(update={"figures": figures}))


class _Bare(Optimum):
    def figures(self) -> list[Figure]:
        return [replace(figure, is_bound=False) for figure in super().figures()]


class _Measured(Optimum):
    def figures(self) -> list[Figure]:
        return [replace(figure, label="measured") for figure in super().figures()]


def without_disclaimer(evict: Profiles, new: Profiles, power: float | None = None) -> Optimum:
    """Tells the bound like any figure."""
    found = optimum(evict, new, power)
    return _Bare(found.tasks, found.excluded)


def told_as_measured(evict: Profiles, new: Profiles, power: float | None = None) -> Optimum:
    """Labels every figure as measured."""
    found = optimum(evict, new, power)
    return _Measured(found.tasks, found.excluded)
