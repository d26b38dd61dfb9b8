"""From two build references to one comparison."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from conformance.harness import builds
from conformance.harness.bench import Setup
from conformance.harness.contract.schema import Performance
from conformance.harness.engine import BuildError
from conformance.harness.engine.child import ChildDeath
from conformance.harness.exam.digest import suite_digest
from conformance.harness.exam.examination import SPECS, contract
from conformance.harness.exam.plugin import CASES_NAME
from conformance.harness.exam.session import UsageError, child_for, subject_of
from conformance.harness.faults import FAULTS
from conformance.harness.report.comparison import Answer, Comparison, Pair, Speed, answered, compare, strictly
from conformance.harness.report.results import Results

from .looks import Looks, Side
from .performance import load_performance, speeds
from .suite import Ask, Tell, run, write_cases

_IDENTIFY_SECONDS = 120.0
_EMPTY = Answer(exit_code=2, line="", counts={})


class Died(Exception):
    """A build that ended its process when it was merely loaded; the text says how."""


def identified(reference: str) -> dict[str, Any]:
    """What a build is; fetched first where that is needed.

    Raises:
        BuildError: it cannot be had, or is no build for this machine.
        Died: loading it ended the process.

    """
    builds.resolve(reference)
    with child_for([]) as child:
        try:
            identity: dict[str, Any] = child.call(builds.identify, reference, timeout=_IDENTIFY_SECONDS)
        except ChildDeath as death:
            raise Died(str(death)) from None
    return identity


def gate(
    baseline: str,
    candidate: str,
    ask: Ask,
    folder: Path,
    *,
    fault: str | None = None,
    fresh: bool = False,
    strict: bool = False,
    tell: Tell = print,
) -> Comparison:
    """Compare two builds.

    Args:
        baseline: reference of the build in use.
        candidate: reference of the build to upgrade to.
        ask: what both are asked.
        folder: where the list of cases and the builds' own reports go; it exists.
        fault: planted in the candidate's processes.
        fresh: whether to run what an earlier run has already found.
        strict: whether what is newly known blocks.
        tell: is told how far it is.

    Raises:
        BuildError, UsageError: the comparison could not be made.

    """
    specs, spec = contract(timing=False), load_performance(SPECS)
    if ask.profile not in specs.profiles:
        raise UsageError(f"--profile {ask.profile!r}: no such profile; choose from {', '.join(specs.profiles)}")
    if fault is not None and fault not in FAULTS:
        raise UsageError(f"--inject-fault {fault!r}: no such fault; choose from {', '.join(FAULTS)}")
    try:
        old = identified(baseline)
    except Died as death:
        raise BuildError(
            f"baseline {baseline!r}: loading it ends the process ({death}); name a build that runs on this machine"
        ) from None
    frame: dict[str, Any] = {
        "baseline": old,
        "suite": {
            "name": "llama-conformance",
            "version": metadata.version("llama-conformance"),
            "digest": suite_digest(),
        },
        "settings": {
            **ask.key(),
            "fault": fault,
            "strict": strict,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        "answer": _EMPTY,
    }
    try:
        new = identified(candidate)
    except Died as death:
        return answered(Comparison(**frame, candidate={"reference": candidate}, pairs=(), death=str(death)))
    cases = write_cases(folder / CASES_NAME, specs, ask)
    sides, reused = [], []
    for name, identity, lie in (("baseline", old, None), ("candidate", new, fault)):
        results, is_old = run(name, identity, ask, folder, fault=lie, fresh=fresh, tell=tell)
        sides.append(Side(str(identity["reference"]), results, lie))
        reused += [name] if is_old else []
    before, after = sides
    pairs = compare(before.results, after.results, only_run=ask.selected is not None)
    with Looks(specs, spec.second_looks, ask, before, after, _jobs(ask)) as looks:
        tell("second looks at what differs")
        pairs = looks.confirmed(pairs)
        tell("states from one build to the other")
        pairs += looks.exchanged(cases)
    if not pairs:
        raise UsageError(f"{ask.choice}: chooses no check that applies to these models; the ids are in specs/")
    pairs = [strictly(pair) for pair in pairs] if strict else pairs
    measured: list[Speed] = []
    if ask.selected is None and (ask.shard is None or ask.shard.number == 1):
        tell("speed and size, in turn")
        measured = _speeds(spec.performance, before, after, ask)
    return answered(
        Comparison(
            **frame,
            candidate=new,
            pairs=tuple(map(_without_passed_cases, pairs)),
            speeds=tuple(measured),
            notes=tuple(_notes(before.results, after.results, reused, ask, pairs)),
        )
    )


def _without_passed_cases(pair: Pair) -> Pair:
    """The pair, its lists of cases left to the builds' own results where nothing is to be told of them."""
    if pair.outcome != "pass":
        return pair
    bare = {
        side: check.model_copy(update={"detail": check.detail.model_copy(update={"cases": None})})
        for side, check in (("baseline", pair.baseline), ("candidate", pair.candidate))
        if check
    }
    return pair.model_copy(update=bare)


def _jobs(ask: Ask) -> int:
    return (os.cpu_count() or 1) if ask.jobs == "auto" else int(ask.jobs)


def _speeds(spec: Performance, before: Side, after: Side, ask: Ask) -> list[Speed]:
    named = {subject_of(name).name: name for name in ask.models}
    models = [model for model in spec.models if model in named] or list(named)[:1]
    return [
        speed
        for model in models
        if before.acquaintance(model) and after.acquaintance(model)
        for speed in speeds(
            [Setup(side.reference, named[model], side.fault, ask.threads) for side in (before, after)],
            spec,
            spec.rounds[ask.profile],
        )
    ]


def _notes(before: Results, after: Results, reused: list[str], ask: Ask, pairs: list[Pair]) -> list[str]:
    notes = [
        f"{name}: {note}" for name, results in (("baseline", before), ("candidate", after)) for note in results.notes
    ]
    if reused:
        notes.append(
            f"results of the {' and the '.join(reused)} are from an earlier run of the same; --fresh runs it again"
        )
    if ask.selected is not None:
        notes.append(
            f"-k {ask.selected}: {len(pairs)} checks were chosen, the answer says nothing about others or speed"
        )
    if ask.shard is not None:
        notes.append(f"shard {ask.shard}: join all of them with `python -m tools.report merge`")
    doubted = [f"{pair.id} on {pair.model}" for pair in pairs if pair.confirmed is False]
    if doubted:
        notes.append(f"seen once and not again: {', '.join(doubted)}")
    return notes
