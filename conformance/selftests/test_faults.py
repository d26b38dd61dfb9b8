"""Every planted fault is caught by every check that claims it, and every invariant has a fault that it catches."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from conformance.harness.bench import Acquaintance, Setup, meet
from conformance.harness.engine.child import Child
from conformance.harness.exam.check import every_check
from conformance.harness.exam.examination import Examination, contract, floors_of
from conformance.harness.exam.session import child_for
from conformance.harness.faults import FAULTS
from conformance.harness.report.results import Check
from conformance.harness.report.wording import figure
from fixtures import models
from fixtures.trained import TRAINED, fixture_path

from .conftest import FAULT_ROW, replayed

CONTRACT = contract()
CHECKS = every_check()
CLAIMS = [(name, id) for name, fault in FAULTS.items() for id in fault.caught_by]


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    names = {fault.model for fault in FAULTS.values()}
    here = [name for name in names if name not in TRAINED or TRAINED[name].is_here]
    with child_for([fixture_path(name) for name in here]) as child:
        yield child


@pytest.fixture(scope="module")
def first_looks() -> dict[object, Acquaintance]:
    return {}


def examined(looks: dict[object, Acquaintance], child: Child, id: str, setup: Setup, examples: int) -> Check:
    invariant = CONTRACT[id]
    floors = floors_of(invariant)
    if (setup, floors) not in looks:
        looks[setup, floors] = child.call(meet, setup, floors, timeout=60)
    planned = FAULTS[setup.fault or ""]
    timeout = 3.0 if planned.verdict == "TIMEOUT" else 60.0
    profile = CONTRACT.profiles["smoke"].model_copy(update={"shrink_seconds": 0.0, "example_timeout_seconds": timeout})
    return Examination(
        setup=setup,
        model=setup.model,
        invariant=invariant,
        profile=profile,
        examples=examples,
        seed=0,
        acquaintance=looks[setup, floors],
        ceiling=CONTRACT.ceilings[looks[setup, floors].weights],
        child=child,
    ).take(CHECKS[id])


def _claim(fault: str, id: str) -> object:
    model = TRAINED.get(FAULTS[fault].model)
    marks = [pytest.mark.on_request] if model and model.on_request else []
    return pytest.param(fault, id, id=f"{fault}-{id}", marks=marks)


@pytest.mark.parametrize(("fault", "id"), [_claim(*claim) for claim in CLAIMS])
def test_a_planted_fault_is_caught_and_a_control_passes(
    fault: str,
    id: str,
    child: Child,
    first_looks: dict[object, Acquaintance],
    record_property: Callable[[str, object], None],
) -> None:
    planted = FAULTS[fault]
    if planted.model in TRAINED and not TRAINED[planted.model].is_here:
        pytest.skip(TRAINED[planted.model].absence)
    other = "bundled" if "other_build" in CONTRACT[id].needs.capabilities else None
    check = examined(first_looks, child, id, Setup("bundled", planted.model, fault, other=other), examples=12)
    where = (check.reason or "").splitlines()[0][:60] if check.reason else ""
    record_property(
        FAULT_ROW,
        f"{fault:26} {id:6} {planted.model:12} {check.verdict:8} {figure(check.deviation):>10} {figure(check.floor):>9}  {where}",
    )
    assert check.verdict == planted.verdict, check.reason
    if planted.verdict == "PASS":
        assert check.examples
        return
    assert check.case is not None
    assert check.replay is not None
    assert fault in check.replay
    if id == planted.caught_by[0] and planted.verdict != "TIMEOUT":  # a hang would hang again
        done = replayed(check.replay)
        expected = -signal.SIGABRT if planted.verdict == "CRASH" else 1
        assert done.returncode == expected, done.stdout + done.stderr
        assert planted.verdict == "CRASH" or done.stdout.startswith(f"{planted.verdict} {id} ")


def test_every_invariant_has_a_fault_that_it_catches() -> None:
    assert {id for fault, id in CLAIMS if FAULTS[fault].verdict != "PASS"} == set(CONTRACT.invariants)


def test_the_figures_of_the_document_are_those_of_the_model_that_stands_for_it() -> None:
    figures = {name: figure.value for name, figure in CONTRACT["AR-01"].figures.items()}
    census = models.recipe("holo3-mini").census
    assert figures == {
        "layers": census.n_layer,
        "attention_layers": len(census.attention or ()),
        "recurrent_layers": len(census.recurrent or ()),
    }
