"""The tie between a spec's id, the case it draws and the body that measures one case."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.harness.bench import Bench, Case, Measurement, Setup, measure
from conformance.harness.contract.ties import Registry
from conformance.harness.measure.deviation import Deviation

Body = Callable[[Bench, Any], Deviation]

REGISTRY = Registry()
_TOPICS = Path(__file__).parents[2]


class Undecided(Exception):
    """Raised by a body when the whole check can be neither right nor wrong; the text says why."""


class NotDecidable(Exception):
    """Raised by a body for one case that no run can decide, so that others are drawn; the text says why."""


@dataclass(frozen=True)
class BoundCheck:
    """One invariant's check.

    Attributes:
        id: the invariant.
        case: type of what is drawn.
        body: measures one case on a bench.
        reference: "module:name" of the test, by which a child finds the body.

    """

    id: str
    case: type[Case]
    body: Body
    reference: str


def verifies(id: str, *, case: type[Case]) -> Callable[[Body], Callable[..., None]]:
    """Make a pytest test out of a body that measures one case of one invariant.

    The test draws cases over the invariant's search, has a child process measure each, and judges the deviations by
    what the spec accepts. The body itself never judges.
    """

    def tie(body: Body) -> Callable[..., None]:
        check = BoundCheck(id, case, body, f"{body.__module__}:{body.__qualname__}")

        @functools.wraps(body)
        def test(exam: Any) -> None:
            exam.take(check)

        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter("exam", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        )
        test.check = check  # type: ignore[attr-defined]
        return REGISTRY.verifies(id)(test)

    return tie


def every_test() -> list[Any]:
    """All functions that pytest would take for tests, of all topics."""
    modules = [importlib.import_module(f"conformance.{path.stem}") for path in sorted(_TOPICS.glob("test_*.py"))]
    return [test for module in modules for name, test in vars(module).items() if name.startswith("test_")]


def every_check() -> dict[str, BoundCheck]:
    """All checks of this checkout by id."""
    return {test.check.id: test.check for test in every_test() if hasattr(test, "check")}


def check_of(reference: str) -> BoundCheck:
    """The check that a test carries, by "module:name"."""
    module, _, name = reference.partition(":")
    check: BoundCheck = getattr(importlib.import_module(module), name).check
    return check


def run_case(setup: Setup, reference: str, fields: dict[str, Any]) -> Measurement:
    """Measure one case; what a child process is asked to do."""
    check = check_of(reference)
    return measure(setup, check.body, check.case(**fields))
