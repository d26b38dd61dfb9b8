"""The tie between the ids in ``specs/`` and the tests that check them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from conformance.harness.contract.load import Contract

Test = TypeVar("Test", bound=Callable[..., Any])


@dataclass(frozen=True)
class Tie:
    """A test, where it stands (``file:line``) and the ids it checks."""

    test: str
    where: str
    ids: tuple[str, ...]


class Registry:
    """The tests that have said which invariants they check."""

    def __init__(self) -> None:
        self._ties: dict[str, Tie] = {}

    def verifies(self, *ids: str) -> Callable[[Test], Test]:
        """A decorator that ties a test function or a test class to invariants; the test itself is left as it is."""

        def tie(test: Test) -> Test:
            name = _name(test)
            self._ties[name] = Tie(name, _where(test), tuple(dict.fromkeys((*self.ids_of(test), *ids))))
            return test

        return tie

    def ids_of(self, test: Callable[..., Any]) -> tuple[str, ...]:
        """The ids that ``test`` checks, none when it has not said so."""
        tie = self._ties.get(_name(test))
        return tie.ids if tie else ()

    def __iter__(self) -> Iterator[Tie]:
        return iter(self._ties.values())


def untied(contract: Contract, registry: Registry, tests: Iterable[Callable[..., Any]] = ()) -> list[str]:
    """What is not tied, one line each: ids without a test, tests with an id that no spec has, tests without an id.

    ``tests`` are all tests that were collected; only they can be found to be without an id.
    """
    checked = {id for tie in registry for id in tie.ids}
    lines = [
        f"{contract.origins[id].where}: {id} has no test; write one and mark it with @verifies({id!r})"
        for id in contract.invariants
        if id not in checked
    ]
    for tie in registry:
        lines += [
            f"{tie.where}: {tie.test} verifies {id}, which no spec has; correct the id or write its spec"
            for id in tie.ids
            if id not in contract.invariants
        ]
    lines += [
        f"{_where(test)}: {_name(test)} verifies nothing; mark it with @verifies(ID) and write its spec"
        for test in tests
        if not registry.ids_of(test)
    ]
    return lines


def _name(test: Callable[..., Any]) -> str:
    return f"{test.__module__}.{test.__qualname__}"


def _where(test: Callable[..., Any]) -> str:
    inner = inspect.unwrap(test)
    code = getattr(inner, "__code__", None)
    line = code.co_firstlineno if code else inspect.getsourcelines(inner)[1]
    return f"{inspect.getsourcefile(inner)}:{line}"
