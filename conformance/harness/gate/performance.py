"""Speed and size of two builds, measured in turn: specs/performance.yaml."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from conformance.harness.bench import Bench, Setup, Tokens, bench_of
from conformance.harness.contract.load import load_file
from conformance.harness.contract.schema import Counted, Performance, PerformanceFile, Timed
from conformance.harness.engine import Blob, Context, ContextSettings, DecodeError, ModelError, StateError, StateFlags
from conformance.harness.engine.child import ChildDeath, Crashed, TimedOut
from conformance.harness.engine.process import peak_bytes, reset_peak
from conformance.harness.exam.session import child_for
from conformance.harness.measure.timing import Estimate, interleaved, ratio
from conformance.harness.report.comparison import Outcome, Speed


@dataclass(frozen=True)
class Round:
    """What one round of one build gave: measures (seconds, or bytes for the peak) and counts, by name."""

    measures: Mapping[str, float]
    counts: Mapping[str, float]


class Unmeasured(Exception):
    """A round that one of the builds did not come to the end of."""

    def __init__(self, side: str, error: Exception) -> None:
        super().__init__(f"the {side}: {error}")
        self.side, self.error = side, error


def load_performance(specs: Path) -> PerformanceFile:
    """What to measure, and how often to look again. Raises SpecError."""
    return load_file(specs / "performance.yaml", PerformanceFile).content


def measure_round(setup: Setup, spec: Performance) -> Round:
    """One round, in the process of a build."""
    bench = bench_of(setup)
    reset_peak()
    measures: dict[str, float] = {"prefill": 0.0}
    settings = ContextSettings(n_ctx=2 * max(spec.depths), n_batch=2048, n_ubatch=spec.ubatch)
    pieces = bench.texts(0, *_steps(spec))
    with bench.context(settings) as context:
        blobs: list[Blob] = []
        for depth, text, single in zip(spec.depths, pieces[::2], pieces[1::2], strict=True):
            measures["prefill"] += _seconds(partial(context.decode, text))
            blobs.append(context.save())
            measures[f"decode at {depth} tokens"] = _seconds(partial(_decode_one_by_one, context, single))
        blob = context.save()
        measures["save"] = median(_seconds(context.save) for _ in range(spec.repeats))
        measures["restore"] = median(_seconds(lambda: context.restore(blob)) for _ in range(spec.repeats))
        counts: dict[str, float] = {
            "KV bytes per token": (len(blobs[-1]) - len(blobs[0])) / (spec.depths[-1] - spec.depths[0]),
            "checkpoint bytes": len(_checkpoint(bench, context)),
        }
    measures["peak RSS"] = float(peak_bytes())
    return Round(measures, {**counts, **_reprefilled(bench, spec)})


def _steps(spec: Performance) -> Iterator[int]:
    """Tokens to prefill and to decode one by one, in turn; every depth is reached exactly."""
    at = 0
    for depth in spec.depths:
        yield depth - at
        yield spec.decoded_tokens
        at = depth + spec.decoded_tokens


def _decode_one_by_one(context: Context, tokens: Tokens) -> None:
    for place in range(len(tokens)):
        context.decode(tokens[place : place + 1])


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _partial(bench: Bench) -> StateFlags:
    return StateFlags.PARTIAL_ONLY if bench.library.has("llama_state_seq_get_data_ext") else StateFlags.FULL


def _checkpoint(bench: Bench, context: Context) -> Blob:
    return context.save(flags=_partial(bench))


def _reprefilled(bench: Bench, spec: Performance) -> dict[str, float]:
    """Tokens that are to be decoded again: none where the build takes the short way, all where it refuses it."""
    n = spec.depths[0]
    prefix, detour = bench.texts(1, n, spec.detour_tokens)

    def lost(short_way: Callable[[Context], bool], **settings: int) -> int:
        try:
            with bench.context(ContextSettings(n_ctx=512).changed(**settings)) as context:
                context.decode(prefix)
                return 0 if short_way(context) else n
        except (StateError, DecodeError, ModelError):
            return n

    def to_checkpoint(context: Context) -> bool:
        blob, flags = _checkpoint(bench, context), _partial(bench)
        context.decode(detour)
        return bool(context.load(blob, flags=flags)) and context.seq_rm(0, n)

    def in_new_context(context: Context) -> bool:
        with bench.context(context.settings) as other:
            return bool(other.load(context.save()))

    def take_back(context: Context) -> bool:
        context.decode(detour)
        return context.seq_rm(0, n + spec.detour_tokens - spec.taken_back_tokens)

    return {
        "re-prefill to a checkpoint": lost(to_checkpoint),
        "re-prefill in a new context": lost(in_new_context),
        "re-prefill to take back": lost(take_back, n_rs_seq=spec.taken_back_tokens),
    }


def speeds(setups: Sequence[Setup], spec: Performance, rounds: int) -> list[Speed]:
    """Both builds (baseline, candidate) on one model, in turn, and what that says.

    A build that ends its process or refuses the round leaves no figures; see `unmeasured`.
    """
    baseline, candidate = setups
    taken: dict[str, list[Round]] = {"baseline": [], "candidate": []}
    with ExitStack() as stack:

        def arm(name: str, setup: Setup) -> Callable[[], float]:
            child = stack.enter_context(child_for([setup.model_path]))

            def one() -> float:
                try:
                    done: Round = child.call(measure_round, setup, spec, timeout=spec.timeout_seconds)
                except (ChildDeath, StateError, DecodeError, ModelError) as error:
                    raise Unmeasured(name, error) from None
                taken[name].append(done)
                return sum(done.measures.values())

            return one

        try:
            interleaved({"baseline": arm("baseline", baseline), "candidate": arm("candidate", candidate)}, rounds)
        except Unmeasured as end:
            quantities: list[tuple[str, Counted]] = [*spec.counts.items(), *spec.measures.items()]
            return [unmeasured(baseline.model, name, each, end) for name, each in quantities]
    before, after = (taken[name][1:] for name in ("baseline", "candidate"))  # the first round warms up
    counted = [
        judge_count(baseline.model, name, each, before[0].counts[name], after[0].counts[name])
        for name, each in spec.counts.items()
    ]
    return counted + [
        judge_measure(
            baseline.model, name, each, [one.measures[name] for one in before], [one.measures[name] for one in after]
        )
        for name, each in spec.measures.items()
    ]


def unmeasured(model: str, name: str, spec: Counted, end: Unmeasured) -> Speed:
    """A quantity without figures. That blocks where it is the candidate that crashed, gave no answer, or refused what must work."""
    by_candidate = end.side == "candidate"
    outcome: Outcome = (
        "crash" if isinstance(end.error, Crashed) else "timeout" if isinstance(end.error, TimedOut) else "unknown"
    )
    return Speed(
        model=model,
        quantity=name,
        unit=spec.unit,
        kind="measure" if isinstance(spec, Timed) else "count",
        outcome=outcome if by_candidate else "unknown",
        blocks=by_candidate,
        reason=f"could not be measured: {end}",
        baseline=None,
        candidate=None,
        limit=spec.limit if isinstance(spec, Timed) else 1.0,
    )


def judge_count(model: str, name: str, spec: Counted, baseline: float, candidate: float) -> Speed:
    """A count that grew is a regression, one that shrank is fixed."""
    outcome: Outcome = "pass" if candidate == baseline else "regression" if candidate > baseline else "fixed"
    return Speed(
        model=model,
        quantity=name,
        unit=spec.unit,
        kind="count",
        outcome=outcome,
        blocks=outcome == "regression",
        reason="" if outcome == "pass" else f"{candidate:.16g} {spec.unit}, before {baseline:.16g}",
        baseline=baseline,
        candidate=candidate,
        ratio=candidate / baseline if baseline else (1.0 if candidate == baseline else math.inf),
        limit=1.0,
    )


def judge_measure(model: str, name: str, spec: Timed, baseline: Sequence[float], candidate: Sequence[float]) -> Speed:
    """The median ratio of paired rounds against the limit; nothing is said where the limit lies inside its interval."""
    seen = ratio(candidate, baseline)
    within = seen.lies_within(most=spec.limit)
    outcome: Outcome = "unknown" if within is None else "pass" if within else "regression"
    if seen.high < 1 / spec.limit:
        outcome = "fixed"
    return Speed(
        model=model,
        quantity=name,
        unit=spec.unit,
        kind="measure",
        outcome=outcome,
        blocks=outcome == "regression",
        reason=_told(seen, spec.limit, outcome),
        baseline=float(np.median(baseline)),
        candidate=float(np.median(candidate)),
        ratio=seen.value,
        low=seen.low,
        high=seen.high,
        limit=spec.limit,
        rounds=len(baseline),
    )


def _told(seen: Estimate, limit: float, outcome: Outcome) -> str:
    interval = f"{seen.value:.2f} times the baseline's, {seen.low:.2f} to {seen.high:.2f}"
    if outcome == "unknown":
        return f"{interval}: the limit of {limit:g} lies inside, the machine was too noisy to tell"
    return f"{interval}; limit {limit:g}"
