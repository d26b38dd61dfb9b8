"""Ids and tests belong together: whatever stands alone is named with its place."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from conformance.harness.contract.load import Contract, load_specs
from conformance.harness.contract.ties import Registry, untied
from conformance.selftests.test_contract_load import write_specs


@given(st.integers())
def check_by_search(number: int) -> None: ...


class CheckByMachine(RuleBasedStateMachine):
    @rule()
    def nothing(self) -> None: ...


@pytest.fixture
def contract(tmp_path: Path) -> Contract:
    return load_specs(write_specs(tmp_path))


def place(test: object) -> str:
    inner = inspect.unwrap(test)  # type: ignore[arg-type]
    return f"{__file__}:{inspect.getsourcelines(inner)[1]}"


def test_a_tied_test_is_found_again_under_its_own_name(contract: Contract) -> None:
    registry = Registry()
    assert registry.verifies("RP-01")(check_by_search) is check_by_search
    assert registry.ids_of(check_by_search) == ("RP-01",)
    assert untied(contract, registry, [check_by_search]) == []


def test_an_id_without_a_test_is_named(contract: Contract) -> None:
    (line,) = untied(contract, Registry())
    assert line.startswith(f"{contract.origins['RP-01'].where}: RP-01 has no test; ")


@pytest.mark.parametrize("test", [check_by_search, CheckByMachine])
def test_an_id_that_no_spec_has_is_named_with_the_test(contract: Contract, test: object) -> None:
    registry = Registry()
    registry.verifies("RP-01", "RP-99")(test)  # type: ignore[type-var]
    (line,) = untied(contract, registry)
    assert line.startswith(f"{place(test)}: ")
    assert "RP-99, which no spec has" in line


@pytest.mark.parametrize("test", [check_by_search, CheckByMachine])
def test_a_test_without_an_id_is_named(contract: Contract, test: object) -> None:
    registry = Registry()
    registry.verifies("RP-01")(lambda: None)
    (line,) = untied(contract, registry, [test])  # type: ignore[list-item]
    assert line.startswith(f"{place(test)}: ")
    assert "verifies nothing" in line


def test_two_marks_on_a_test_add_up() -> None:
    registry = Registry()
    registry.verifies("RP-01")(registry.verifies("RP-02")(check_by_search))
    assert set(registry.ids_of(check_by_search)) == {"RP-01", "RP-02"}
