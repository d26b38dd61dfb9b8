"""Where a check turns good or bad among builds in the order of their versions, with as few runs as that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from packaging.version import Version

from conformance.harness.bench import Setup
from conformance.harness.builds import Published, Source, published_versions
from conformance.harness.contract.load import Contract
from conformance.harness.engine import BuildError, ContextSettings, EngineError
from conformance.harness.engine.child import Child
from conformance.harness.machine.avoid import AVOIDABLE
from conformance.harness.machine.found import Found
from conformance.harness.machine.stage import ChildStage
from conformance.harness.machine.steps import run
from conformance.harness.machine.walk import References, Walk
from conformance.harness.report.results import Verdict

from .session import Options, UsageError, child_for, prepare
from .standing import examined

Value = Literal["good", "bad", "absent", "untestable"]
"""How a build fared; absent: it lacks what the check needs. Untestable: it does not run, or nothing could be told."""
_VALUES: dict[Verdict, Value] = {"PASS": "good", "FAIL": "bad", "CRASH": "bad", "TIMEOUT": "bad"}


@dataclass(frozen=True)
class Reading:
    """What running a check on a build showed, and why in a line; `deviation` where one was measured."""

    value: Value
    why: str
    deviation: float | None = None


def span(source: Source, oldest: str | None, newest: str | None) -> list[Published]:
    """The published versions of a source from one version to another, oldest first; by default all that are known here.

    Raises:
        BuildError: the registry cannot be reached, a bound is no version, or nothing lies between them.

    """
    versions = published_versions(source)
    low, high = oldest or source.oldest or versions[0], newest or versions[-1]
    for bound in (low, high):
        if bound not in versions and bound != source.oldest:
            raise BuildError(f"{source} has no version {bound}; it has {', '.join(versions)}")
    found = [version for version in versions if Version(low) <= Version(version) <= Version(high)]
    if not found:
        raise BuildError(f"{source}: no version from {low} to {high}; give the older one first")
    return [Published(source, version) for version in found]


def boundaries(n: int, read: Callable[[int], Value]) -> list[tuple[int, int]]:
    """Pairs of neighbours, of `n` builds from the oldest, that fare differently; nothing testable lies between a pair.

    Builds are read as bisection needs them. Between two builds that fare alike all others are taken to fare alike too.
    Untestable ones are stepped over: the nearest to the middle that can be tested is read in their place.
    """

    def testable(places: Sequence[int]) -> int | None:
        return next((place for place in places if read(place) != "untestable"), None)

    def between(low: int, high: int) -> Iterator[tuple[int, int]]:
        if read(low) == read(high):
            return
        middle = (low + high) / 2
        inner = testable(sorted(range(low + 1, high), key=lambda place: abs(place - middle)))
        if inner is None:
            yield low, high
        else:
            yield from between(low, inner)
            yield from between(inner, high)

    first, last = testable(range(n)), testable(range(n - 1, -1, -1))
    return [] if first is None or last is None else list(between(first, last))


def read_check(build: str, model: str, id: str, contract: Contract, profile: str, seed: int) -> Reading:
    """Run one check on one build in a process of its own; known failures excuse nothing here."""
    options = Options(build, (model,), profile, Path(), seed)
    alone = replace(contract, invariants={id: contract[id]})
    try:
        session = prepare(options, alone)
    except UsageError as error:
        return Reading("untestable", str(error))
    (look,) = session.looks
    planned, others = session.plan(alone)
    if others:
        return Reading("absent", others[0].reason)
    sizing = session.sizings.get((id, look.subject.name))
    if look.acquaintance is None or sizing is None:
        return Reading("untestable", planned[0].reason or planned[0].verdict)
    with child_for([look.subject.path]) as child:
        check = examined(session, contract, id, look.subject.name, child)
    value = _VALUES.get(check.verdict, "untestable")
    return Reading(value, f"{check.verdict}: {check.reason}" if check.reason else check.verdict, check.deviation)


def read_finding(build: str, found: Found) -> Reading:
    """Walk a finding's steps on one build; it is bad where the walk finds anything that is not another known failure."""
    settings = ContextSettings(**found.settings)
    with Child(memory_limit=8 << 30) as child, Child(memory_limit=8 << 30) as references:
        stage = ChildStage(Setup(build, found.model), child, references)
        walk = Walk(stage, settings, References(stage, found.limit, 0.0), set(AVOIDABLE) - {found.known})
        try:
            met = run(walk, found.steps)
        except EngineError as error:
            return Reading("untestable", str(error))
    if not hasattr(walk, "memory"):
        return Reading("untestable", str(met))
    if settings.n_rs_seq and not walk.memory.n_rs_seq:
        return Reading("absent", "this build does not offer rollback")
    return Reading("good", "no finding") if met is None else Reading("bad", str(met), met.deviation)
