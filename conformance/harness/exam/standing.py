"""Which known failures a build still shows on a model: their own checks, run by themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from conformance.harness.bench import Setup, meet, try_on_device
from conformance.harness.contract.needs import Subject, applies
from conformance.harness.engine.child import Child, ChildDeath
from conformance.harness.report.results import Verdict

from .check import every_check
from .examination import Examination, contract, floors_of

_SECONDS = 120.0


def standing(setup: Setup, subject: Subject, ids: Collection[str], child: Child) -> Iterator[tuple[str, Verdict]]:
    """The verdict of each check that means something on the model; one that passes is a known failure that was cured."""
    listed, checks = contract(), every_check()
    profile = listed.profiles["standard"].model_copy(update={"shrink_seconds": 0.0})
    floors = tuple(sorted({floor for id in ids for floor in floors_of(listed[id])}))
    acquaintance = child.call(meet, setup, floors, timeout=_SECONDS)
    capabilities = set(acquaintance.capabilities)
    try:
        if child.call(try_on_device, setup, timeout=_SECONDS):
            capabilities.add("on_device")
    except ChildDeath:
        pass
    met = Subject(subject.name, subject.path, acquaintance.kinds, frozenset(capabilities), is_fixture=False)
    for id in sorted(ids):
        if applies(listed[id], met) is None:
            examination = Examination(
                setup=setup,
                model=subject.name,
                invariant=listed[id],
                profile=profile,
                examples=listed[id].examples["standard"] + 3,
                seed=0,
                acquaintance=acquaintance,
                ceiling=listed.ceilings[acquaintance.weights],
                child=child,
            )
            yield id, examination.take(checks[id]).verdict
