"""The computed optimum: evict's tasks with the prefill of no-evict, task by task. Nobody ran it.

Only prefill is swapped; steps, score, decoding and everything that is not model time are evict's. Nothing is clamped: where new
content took longer than evict did, the optimum is worse than evict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from .document import load_document
from .profile import Label, Profiles, StepProfile

DISCLAIMER = "a bound that nobody ran and no cache that stays bounded reaches"
_JOULES_PER_WH = 3600.0


def most_steps() -> int:
    """Longer tasks are left out of means and gains, as the document does."""
    return load_document().most_steps


class OptimumError(Exception):
    """Two sets of profiles from which no optimum can be computed; one line: what, where, what to do."""


@dataclass(frozen=True)
class TaskOptimum:
    """One task: what both arms measured, and what the optimum makes of it. Seconds are wall time, energy is in Wh.

    Attributes:
        steps: of evict, and so of the optimum.
        prefill_evict, prefill_new: seconds a step, means over the steps of evict and of no-evict.
        tokens_evict, tokens_new: prefilled a step, means likewise.
        decode: seconds of the whole task, evict's.
        wall_evict, wall_optimum: of the whole task.
        wall_is_measured: whether every step of evict has its wall time; else wall is model time alone.
        residual_evict, residual_optimum: wall that is neither prefill nor decoding (machines, tools, overhead).
        score: evict's, None where unknown.
        energy_evict, energy_optimum: None where no power is known.
        energy_is_measured: whether every step of evict has its power.

    """

    task: str
    steps: int
    prefill_evict: float
    prefill_new: float
    tokens_evict: float
    tokens_new: float
    decode: float
    wall_evict: float
    wall_optimum: float
    wall_is_measured: bool
    residual_evict: float
    residual_optimum: float
    score: float | None
    energy_evict: float | None
    energy_optimum: float | None
    energy_is_measured: bool

    @property
    def gain(self) -> float:
        """Evict's prefill over that of new content; below 1 the optimum is worse."""
        return _ratio(self.prefill_evict, self.prefill_new)


def optimum_of(evict: Sequence[StepProfile], new: Sequence[StepProfile], power: float | None = None) -> TaskOptimum:
    """The optimum of one task.

    Args:
        evict: the steps of the evict arm.
        new: the steps of the no-evict arm on the same task; their number may differ.
        power: watts to assume where the steps of evict do not have theirs.

    """
    steps = len(evict)
    prefill_evict, prefill_new = (fmean(step.prefill_seconds for step in arm) for arm in (evict, new))
    decode = sum(step.decode_seconds for step in evict)
    model = steps * prefill_evict + decode
    is_measured = all(step.wall_seconds is not None for step in evict)
    wall = sum(step.wall_seconds or 0.0 for step in evict) if is_measured else model
    optimum = wall - (prefill_evict - prefill_new) * steps
    joules = [
        step.power_watts * step.wall_seconds for step in evict if step.power_watts and step.wall_seconds is not None
    ]
    has_power = len(joules) == steps
    energy = sum(joules) / _JOULES_PER_WH if has_power else None if power is None else power * wall / _JOULES_PER_WH
    return TaskOptimum(
        task=evict[0].task,
        steps=steps,
        prefill_evict=prefill_evict,
        prefill_new=prefill_new,
        tokens_evict=fmean(step.prefilled_tokens for step in evict),
        tokens_new=fmean(step.prefilled_tokens for step in new),
        decode=decode,
        wall_evict=wall,
        wall_optimum=optimum,
        wall_is_measured=is_measured,
        residual_evict=wall - model,
        residual_optimum=optimum - (steps * prefill_new + decode),
        score=evict[0].score,
        energy_evict=energy,
        energy_optimum=None if energy is None else energy * optimum / wall if wall else 0.0,
        energy_is_measured=has_power,
    )


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.inf


@dataclass(frozen=True)
class Figure:
    """A figure of the result with what kind of figure it is; `is_bound` where it belongs to the computed optimum."""

    name: str
    value: float
    unit: str
    label: Label
    is_bound: bool = False

    @property
    def text(self) -> str:
        """The figure with its label, and with the disclaimer where it is a bound."""
        kind = f"{self.label}; {DISCLAIMER}" if self.is_bound else self.label
        return f"{self.value:,.6g} {self.unit} ({kind})"


@dataclass(frozen=True)
class Optimum:
    """The optimum of all tasks that both arms ran.

    Attributes:
        tasks: those of at most `most_steps` steps in both arms.
        excluded: names of the longer ones.

    """

    tasks: tuple[TaskOptimum, ...]
    excluded: tuple[str, ...]

    @property
    def negative_residuals(self) -> list[str]:
        """Tasks whose model time is longer than their wall: their profiles are wrong somewhere."""
        share = load_document().means.negative_residual.share_of_wall
        return [
            task.task
            for task in self.tasks
            if min(task.residual_evict, task.residual_optimum) < -share * task.wall_evict
        ]

    def gains(self) -> dict[str, float]:
        """The mean over the tasks of each length of evict's prefill over that of new content."""
        groups = {
            length.name: [task.gain for task in self.tasks if length.steps[0] <= task.steps <= length.steps[1]]
            for length in load_document().means.lengths
        }
        return {name: fmean(gains) for name, gains in groups.items() if gains}

    def figures(self) -> list[Figure]:
        """Means over the tasks, ratios of these means, gains by length; every one with its label."""
        return [*self._means(), *self._ratios()]

    def _mean(self, name: str) -> float:
        return fmean(getattr(task, name) for task in self.tasks)

    def _means(self) -> Iterator[Figure]:
        wall: Label = "measured" if all(task.wall_is_measured for task in self.tasks) else "assumed"
        yield Figure("steps", self._mean("steps"), "steps", "measured")
        yield Figure("evict: prefill", self._mean("prefill_evict"), "s a step", "measured")
        yield Figure("optimum: prefill", self._mean("prefill_new"), "s a step", "computed", True)
        yield Figure("evict: prefilled", self._mean("tokens_evict"), "tokens a step", "measured")
        yield Figure("optimum: prefilled", self._mean("tokens_new"), "tokens a step", "computed", True)
        yield Figure("evict: wall", self._mean("wall_evict"), "s", wall)
        yield Figure("optimum: wall", self._mean("wall_optimum"), "s", "computed", True)
        yield Figure("evict: decode", self._mean("decode"), "s", "measured")
        yield Figure("optimum: decode", self._mean("decode"), "s", "assumed", True)
        scores = [task.score for task in self.tasks if task.score is not None]
        if len(scores) == len(self.tasks):
            yield Figure("evict: score", fmean(scores), "", "measured")
            yield Figure("optimum: score", fmean(scores), "", "assumed", True)
        yield Figure("evict: residual", self._mean("residual_evict"), "s", wall)
        yield Figure("optimum: residual", self._mean("residual_optimum"), "s", "assumed", True)
        yield Figure("optimum: cache hits", 100.0, "%", "assumed", True)
        if self._has_energy:
            energy: Label = "measured" if all(task.energy_is_measured for task in self.tasks) else "assumed"
            yield Figure("evict: energy", self._mean("energy_evict"), "Wh", energy)
            yield Figure("optimum: energy", self._mean("energy_optimum"), "Wh", "computed", True)

    def _ratios(self) -> Iterator[Figure]:
        walls = _ratio(self._mean("wall_evict"), self._mean("wall_optimum"))
        yield Figure("wall, ratio of means", walls, "times", "computed", True)
        each = fmean(_ratio(task.wall_evict, task.wall_optimum) for task in self.tasks)
        yield Figure("wall, mean of ratios", each, "times", "computed", True)
        if self._has_energy:
            energies = _ratio(self._mean("energy_evict"), self._mean("energy_optimum"))
            yield Figure("energy, ratio of means", energies, "times", "computed", True)
        yield from (
            Figure(f"prefill gain, {name}", gain, "times", "computed", True) for name, gain in self.gains().items()
        )

    @property
    def _has_energy(self) -> bool:
        return all(task.energy_evict is not None for task in self.tasks)


def optimum(evict: Profiles, new: Profiles, power: float | None = None) -> Optimum:
    """The optimum from the profiles of two arms over the same tasks.

    Raises:
        OptimumError: the profiles are not of evict and no-evict, not of the same tasks, not of one build and model, or no
            task is short enough.

    """
    for profiles, arms in ((evict, ("evict", "evict_ideal")), (new, ("append_only",))):
        if profiles.run.arm not in arms:
            raise OptimumError(
                f"the profiles of {profiles.run.arm} stand where those of {' or '.join(arms)} belong; "
                "give evict's first and no-evict's second"
            )
    for part in ("build", "model", "settings"):
        if getattr(evict.run, part) != getattr(new.run, part):
            raise OptimumError(f"the two profiles differ in {part}; run both arms with the same")
    ours, theirs = (_by_task(profiles.steps) for profiles in (evict, new))
    if lone := sorted(set(ours) ^ set(theirs)):
        raise OptimumError(
            f"task {lone[0]!r} is in one of the two profiles only{_and_more(len(lone) - 1)}; run both arms on the same tasks"
        )
    longest = {task: max(len(ours[task]), len(theirs[task])) for task in ours}
    most = most_steps()
    kept = [task for task in ours if longest[task] <= most]
    if not kept:
        raise OptimumError(f"every task has more than {most} steps, which the document leaves out; give shorter ones")
    tasks = tuple(optimum_of(ours[task], theirs[task], power) for task in kept)
    return Optimum(tasks, tuple(task for task in ours if longest[task] > most))


def _by_task(steps: Iterable[StepProfile]) -> dict[str, list[StepProfile]]:
    tasks: dict[str, list[StepProfile]] = {}
    for step in steps:
        tasks.setdefault(step.task, []).append(step)
    return tasks


def _and_more(n: int) -> str:
    return f", and {n} more are" if n else ""
