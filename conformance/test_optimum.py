"""The computed optimum of the agent experiment: specs/optimum.yaml."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal, get_args

import numpy as np
from markupsafe import Markup, escape

from conformance.harness.arms.counts import ARMS, ArmName, StepCounts
from conformance.harness.arms.document import load_document
from conformance.harness.arms.optimum import DISCLAIMER, Optimum, TaskOptimum, most_steps
from conformance.harness.arms.profile import Label, Profiles, RunSettings, StepProfile
from conformance.harness.bench import Bench, Case
from conformance.harness.exam import verifies
from conformance.harness.exam.examination import contract
from conformance.harness.measure.deviation import Deviation, of_amount, of_count, worst
from conformance.harness.prompts.transcript import Transcript
from conformance.harness.report.optimum import as_dict, lines, page, terminal_table

_OVERHEAD = (0.0, 3.0)  # seconds a step
_POWER = 45.0


class Tasks(Case):
    """Made-up profiles of so many tasks of up to `most_steps` steps, one of which is never left out.

    New content takes about `new_over_evict_percent` of evict's prefill seconds.
    """

    seed: int
    tasks: int
    most_steps: int
    new_over_evict_percent: int

    def profiles(self, *, broken: int = 0, power: bool = False) -> tuple[Profiles, Profiles]:
        """Both arms; in the first `broken` tasks a step's wall is shorter than its model time."""
        rng = np.random.default_rng(self.seed)
        evict, new = [], []
        for number in range(self.tasks):
            most = min(self.most_steps, most_steps()) if number == 0 else self.most_steps
            ours, theirs = (int(n) for n in rng.integers(1, most + 1, 2))
            for step in range(1, ours + 1):
                prefill, decode = rng.uniform(5, 20) * (1 + step / 4), rng.uniform(1, 5)
                wall = prefill + decode + rng.uniform(*_OVERHEAD) - (40 * step if number < broken else 0)
                watts = float(rng.uniform(20, 70)) if power else None
                evict.append(_step("evict", number, step, 3000 + 200 * step, prefill, decode, max(wall, 0.0), watts))
            for step in range(1, theirs + 1):
                prefill = rng.uniform(5, 20) * self.new_over_evict_percent / 100
                new.append(_step("append_only", number, step, 2000, prefill, rng.uniform(1, 5), None, None))
        return Profiles(run=_run("evict"), steps=tuple(evict)), Profiles(run=_run("append_only"), steps=tuple(new))


class BrokenTasks(Tasks):
    """The same, some of them with wall times that cannot be."""

    broken_tasks: int


class PoweredTasks(Tasks):
    """The same with power recorded, assumed, or unknown."""

    power: Literal["recorded", "assumed", "none"]

    def result(self, bench: Bench) -> tuple[Optimum, Profiles]:
        """The optimum, and evict's profiles."""
        evict, new = self.profiles(power=self.power == "recorded")
        return bench.agent.optimum(evict, new, _POWER if self.power == "assumed" else None), evict


class Counted(Case):
    """A task whose newest `window` screenshots are shown."""

    transcript: Transcript
    window: int


class DocumentPart(Case):
    """The claims of the document, or the rows of its trace."""

    part: str


@cache
def _figure(id: str, name: str) -> bool | int | float | str:
    """A figure that an invariant is checked against."""
    return contract()[id].figures[name].value


def _run(arm: ArmName) -> RunSettings:
    return RunSettings(arm=arm, build={}, model={}, settings={})


def _step(
    arm: ArmName,
    task: int,
    step: int,
    tokens: int,
    prefill: float,
    decode: float,
    wall: float | None,
    power: float | None,
) -> StepProfile:
    return StepProfile(
        arm=arm,
        task=f"task {task}",
        step=step,
        prompt_tokens=tokens,
        reused_tokens=0,
        prefilled_tokens=tokens,
        decoded_tokens=100,
        hit_ratio=0.0,
        hit_ratio_label="measured",
        prefill_seconds=float(prefill),
        decode_seconds=float(decode),
        tokens_per_second=100 / decode,
        live_cells=tokens + 100,
        score=task / 10,
        wall_seconds=wall,
        power_watts=power,
    )


def _steps(profiles: Profiles, task: str) -> list[StepProfile]:
    return [step for step in profiles.steps if step.task == task]


def _of(seen: float | None, expected: float | None, what: str) -> Deviation:
    """How far a figure is off, as a share of what it should be."""
    if seen is None or expected is None:
        return of_count(int(seen is None), int(expected is None), f"{what}, 1 for unknown", "")
    off = abs(seen - expected)
    share = off / abs(expected) if expected else math.inf if off else 0.0
    return Deviation(share, f"share of {what}", what if share else "", f"{expected:.12g}", f"{seen:.12g}")


@verifies("OP-01", case=Tasks)
def test_only_prefill_is_swapped_task_by_task_and_nothing_is_clamped(bench: Bench, case: Tasks) -> Deviation:
    evict, new = case.profiles()
    found = []
    for task in bench.agent.optimum(evict, new).tasks:
        ours, theirs = _steps(evict, task.task), _steps(new, task.task)
        others = math.fsum((step.wall_seconds or 0) - step.prefill_seconds for step in ours)
        swapped = len(ours) * math.fsum(step.prefill_seconds for step in theirs) / len(theirs)
        decode = math.fsum(step.decode_seconds for step in ours)
        found += [
            _of(task.wall_optimum, others + swapped, f"the optimum's wall of {task.task}"),
            _of(task.decode, decode, f"decode seconds of {task.task}"),
            _of(task.steps, len(ours), f"steps of {task.task}"),
            _of(task.score, ours[0].score, f"score of {task.task}"),
        ]
    return worst(found)


@verifies("OP-02", case=BrokenTasks)
def test_what_is_not_model_time_is_the_same_in_both_and_a_negative_rest_is_told(
    bench: Bench, case: BrokenTasks
) -> Deviation:
    evict, new = case.profiles(broken=case.broken_tasks)
    result: Optimum = bench.agent.optimum(evict, new)
    beyond = float(_figure("OP-02", "negative_beyond"))
    found, negative = [], []
    for task in result.tasks:
        rest = math.fsum(
            (step.wall_seconds or 0) - step.prefill_seconds - step.decode_seconds for step in _steps(evict, task.task)
        )
        room = task.wall_evict + task.steps * task.prefill_evict
        for name, seen in (("evict", task.residual_evict), ("the optimum", task.residual_optimum)):
            found.append(of_amount(abs(seen - rest) / room, f"rest of {name} on {task.task}", "share of its seconds"))
        if rest < -beyond * task.wall_evict:
            negative.append(task.task)
    wrong = set(negative) ^ set(result.negative_residuals)
    return worst(
        [*found, of_count(len(wrong), 0, f"tasks whose negative rest is not told or not so {sorted(wrong)}", "")]
    )


@verifies("OP-03", case=PoweredTasks)
def test_energy_scales_with_wall_task_by_task(bench: Bench, case: PoweredTasks) -> Deviation:
    result, evict = case.result(bench)
    found = []
    for task in result.tasks:
        steps = _steps(evict, task.task)
        joules = math.fsum((step.power_watts or _POWER) * (step.wall_seconds or 0) for step in steps)
        energy = None if case.power == "none" else joules / 3600
        found += [
            _of(task.energy_evict, energy, f"evict's energy on {task.task}"),
            _of(
                task.energy_optimum,
                None if energy is None else energy * task.wall_optimum / task.wall_evict,
                f"the optimum's energy on {task.task}",
            ),
        ]
    ratios = [figure.value for figure in result.figures() if figure.name == "energy, ratio of means"]
    if case.power != "none":
        sums = [math.fsum(_known(energy) for energy in each) for each in _energies(result.tasks)]
        found.append(_of(ratios[0], sums[0] / sums[1], "the ratio of mean energies"))
    return worst(found)


def _energies(tasks: Sequence[TaskOptimum]) -> tuple[list[float | None], list[float | None]]:
    return [task.energy_evict for task in tasks], [task.energy_optimum for task in tasks]


def _known(value: float | None) -> float:
    assert value is not None
    return value


@verifies("OP-04", case=Counted)
def test_the_optimum_never_prefills_fewer_tokens_than_are_new(bench: Bench, case: Counted) -> Deviation:
    vocabulary = bench.reader().vocabulary
    counted: dict[ArmName, tuple[StepCounts, ...]] = {
        arm: bench.agent.counts(arm, case.transcript, case.window, vocabulary, bench.agent.counted) for arm in ARMS
    }
    evict, new = (
        [_step(arm, 0, step.step, step.prefilled_tokens, 1.0, 1.0, None, None) for step in counted[arm]]
        for arm in ("evict", "append_only")
    )
    task: TaskOptimum = bench.agent.optimum_of(evict, new)
    total = task.tokens_new * len(new)
    found = [_of(total, sum(step.prefilled_tokens for step in counted["append_only"]), "the optimum's tokens")]
    for arm in ARMS:
        own = sum(step.prefilled_tokens for step in counted[arm])
        found.append(of_amount((total - own) / max(own, 1), f"{arm} below the bound", "share of its tokens"))
    return worst(found)


@verifies("OP-05", case=Tasks)
def test_tasks_of_more_than_20_steps_are_left_out_and_gains_are_told_by_length(bench: Bench, case: Tasks) -> Deviation:
    evict, new = case.profiles()
    result: Optimum = bench.agent.optimum(evict, new)
    limit = _figure("OP-05", "most_steps")
    names = list(dict.fromkeys(step.task for step in evict.steps))
    length = {name: len(_steps(evict, name)) for name in names}
    short = [name for name in names if max(length[name], len(_steps(new, name))) <= int(limit)]
    gain = {
        name: math.fsum(step.prefill_seconds for step in _steps(evict, name))
        / length[name]
        / (math.fsum(step.prefill_seconds for step in _steps(new, name)) / len(_steps(new, name)))
        for name in short
    }
    wrong = set(short) ^ {task.task for task in result.tasks} | (set(names) - set(short)) ^ set(result.excluded)
    found = [of_count(len(wrong), 0, f"tasks in the wrong place {sorted(wrong)}", "")]
    told = result.gains()
    for steps in str(_figure("OP-05", "lengths")).split(", "):
        low, high = map(int, steps.split("-"))
        own = [gain[name] for name in short if low <= length[name] <= high]
        group = f"<={high} steps" if low == 1 else f"{low}-{high} steps"
        found.append(_of(told.pop(group, None), math.fsum(own) / len(own) if own else None, f"the gain of {group}"))
    found.append(of_count(len(told), 0, f"gains of other lengths {sorted(told)}", ""))
    walls = [math.fsum(step.wall_seconds or 0 for step in _steps(evict, name)) for name in short]
    mean = next((figure.value for figure in result.figures() if figure.name == "evict: wall"), None)
    return worst([*found, _of(mean, math.fsum(walls) / len(walls), "evict's mean wall")])


@verifies("OP-06", case=DocumentPart)
def test_the_documents_figures_are_derived_again_from_its_printed_digits(bench: Bench, case: DocumentPart) -> Deviation:
    document = load_document()
    found = bench.agent.rederive(document)
    rows = [line for line in found if line.id.startswith("trace-")]
    if case.part == "trace":
        agrees = sum(line.verdict == "agrees" for line in rows)
        return of_count(agrees, 2 * len(document.trace.rows), "rows of the trace that agree", "figures")
    wrong = []
    for verdict in ("disagrees", "unknown"):
        listed = str(_figure("OP-06", verdict)).split(", ")
        wrong += sorted({line.id for line in found if line.verdict == verdict} ^ set(listed))
    missing = len(document.claims) - (len(found) - len(rows))
    return of_count(len(wrong) + missing, 0, f"claims whose verdict is not the listed one {wrong}", "claims")


@verifies("OP-07", case=PoweredTasks)
def test_every_figure_says_what_kind_it_is_and_a_bound_says_that_it_is_one(
    bench: Bench, case: PoweredTasks
) -> Deviation:
    result, _ = case.result(bench)
    figures = result.figures()
    bounds = [figure for figure in figures if not figure.name.startswith("evict") and figure.name != "steps"]
    text = lines(result)
    written = {entry["name"]: entry["disclaimer"] for entry in as_dict(result)["figures"]}
    html = page(result, {}, Markup(""))
    bare = [
        *(figure.name for figure in figures if figure.label not in get_args(Label)),
        *(figure.name for figure in bounds if figure.label == "measured"),
        *(figure.name for figure in bounds if not any(_says(line, figure.name) for line in text)),
        *(figure.name for figure in bounds if written[figure.name] != DISCLAIMER),
        *(figure.name for figure in bounds if f"{escape(figure.name)}</dt><dd>{figure.text}" not in html),
        *(["the table of tasks"] if DISCLAIMER not in str(terminal_table(result).title) else []),
        *(["the page"] if html.count(DISCLAIMER) < len(bounds) + 2 else []),
    ]
    return of_count(len(bare), 0, f"places without label or disclaimer {bare[:3]}", "places")


def _says(line: str, name: str) -> bool:
    return line.startswith(f"{name}:") and DISCLAIMER in line
