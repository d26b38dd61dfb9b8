"""Which known failures a build still shows on a model: their own checks, run by themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from conformance.harness.contract.load import Contract
from conformance.harness.engine.child import Child
from conformance.harness.report.results import Check, Verdict

from .check import every_check
from .examination import Examination
from .session import Options, Session, child_for, prepare


def standing(build: str, model: str, ids: Collection[str], contract: Contract) -> Iterator[tuple[str, Verdict]]:
    """The verdict of each check that means something on the model; one that passes is a known failure that was cured.

    Raises:
        UsageError: the build or the model cannot be used.

    """
    listed = replace(contract, invariants={id: contract[id] for id in sorted(ids)})
    session = prepare(Options(build, (model,), "standard", Path()), listed)
    (look,) = session.looks
    with child_for([look.subject.path]) as child:
        for id, name in session.sizings:
            yield id, examined(session, contract, id, name, child).verdict


def examined(session: Session, contract: Contract, id: str, model: str, child: Child) -> Check:
    """One check of a prepared session, in a child; what fails is not shrunk."""
    look, sizing = session.look(model), session.sizings[id, model]
    assert look.acquaintance is not None
    assert sizing is not None
    return Examination(
        setup=session.setup(model),
        model=model,
        invariant=sizing.invariant,
        profile=contract.profiles[session.options.profile].model_copy(update={"shrink_seconds": 0.0}),
        examples=sizing.examples,
        seed=session.options.seed,
        acquaintance=look.acquaintance,
        ceiling=contract.ceilings[look.acquaintance.weights],
        child=child,
    ).take(every_check()[id])
