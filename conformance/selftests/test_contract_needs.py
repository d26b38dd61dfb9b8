"""Which invariants apply to which models, and what is said where they do not."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness.contract.needs import Subject, applies, undecided
from conformance.harness.contract.schema import Invariant, Kind


def invariant(
    kinds: tuple[Kind, ...] = (),
    capabilities: tuple[str, ...] = (),
    models: object = "all",
    lacks: tuple[Kind, ...] = (),
    only_listed: bool = False,
) -> Invariant:
    content = {
        "id": "RP-04",
        "title": "t",
        "statement": "s",
        "source": {"section": "1."},
        "needs": {"kinds": kinds, "capabilities": capabilities, "lacks": lacks},
        "models": models,
        "examples": {"smoke": 1},
        "accept": {"quantity": "logits", "rule": "bitwise", "because": "b"},
        "required": True,
        "only_listed": only_listed,
    }
    return Invariant.model_validate(content)


def subject(
    kinds: set[Kind] | None, can: Collection[str] = (), unknown: Collection[str] = (), fixture: bool = True
) -> Subject:
    known = None if kinds is None else frozenset(kinds)
    return Subject("qwen3-mini", Path("m.gguf"), known, frozenset(can), frozenset(unknown), fixture)


@pytest.mark.parametrize(
    ("needs", "has", "reason"),
    [
        ((), set(), None),
        (("attention",), {"hybrid"}, None),
        (("recurrent",), {"hybrid"}, None),
        (("hybrid",), {"attention", "recurrent"}, None),
        (("attention",), {"sliding_window"}, None),
        (("recurrent", "sliding_window"), {"recurrent"}, None),
        (("recurrent",), {"attention"}, "needs a recurrent state; qwen3-mini has attention only"),
        (("hybrid",), {"recurrent"}, "needs attention beside a recurrent state; qwen3-mini has a recurrent state only"),
        (("sliding_window",), {"hybrid"}, "needs a sliding window; qwen3-mini has attention beside a recurrent state"),
        (
            ("recurrent", "hybrid", "sliding_window"),
            {"attention"},
            (
                "needs a recurrent state, attention beside a recurrent state or a sliding window; "
                "qwen3-mini has attention only"
            ),
        ),
        (("attention",), set(), "needs attention; qwen3-mini has no sequence memory"),
    ],
)
def test_one_of_the_kinds_is_enough(needs: tuple[Kind, ...], has: set[Kind], reason: str | None) -> None:
    assert applies(invariant(needs), subject(has)) == reason


def test_every_capability_is_needed() -> None:
    needing = invariant(capabilities=("partial_state", "on_device"))
    assert applies(needing, subject({"attention"}, {"partial_state", "on_device"})) is None
    assert applies(needing, subject({"attention"}, {"on_device"})) == (
        "needs partial saving (PARTIAL_ONLY), which this build does not offer for qwen3-mini"
    )


def test_what_cannot_be_found_out_is_undecided_and_not_left_out() -> None:
    needing = invariant(("recurrent",), ("partial_state",))
    for unsure in (subject({"recurrent"}, unknown={"partial_state"}), subject(None, {"partial_state"})):
        assert applies(needing, unsure) is None
        assert undecided(needing, unsure)
    assert undecided(needing, subject({"recurrent"}, {"partial_state"})) is None
    assert undecided(invariant(), subject(None)) is None


def test_the_list_of_models_binds_fixtures_only() -> None:
    listed = invariant(models=["holo3-mini"])
    assert applies(listed, subject({"attention"})) == "RP-04 does not list qwen3-mini"
    assert applies(listed, subject({"attention"}, fixture=False)) is None


KINDS: st.SearchStrategy[set[Kind]] = st.sets(st.sampled_from(["attention", "recurrent", "hybrid", "sliding_window"]))


@given(KINDS)
def test_a_model_is_hybrid_exactly_when_it_has_both_memories(kinds: set[Kind]) -> None:
    found = subject(kinds).kinds
    assert found is not None
    assert kinds <= found
    assert ("hybrid" in found) == ({"attention", "recurrent"} <= found)


def test_a_model_that_is_only_examined_by_name_is_not_meant_by_all() -> None:
    trained = Subject("smollm2-135m", Path("m.gguf"), frozenset({"attention"}), only_named=True)
    assert applies(invariant(), trained) == "RP-04 does not list smollm2-135m"
    assert applies(invariant(models=["smollm2-135m"]), trained) is None


@pytest.mark.parametrize(
    ("lacks", "has", "reason"),
    [
        (("attention",), {"recurrent"}, None),
        (("attention",), {"hybrid"}, "needs a model without attention; qwen3-mini has it"),
        (("attention",), {"sliding_window"}, "needs a model without attention; qwen3-mini has it"),
        (("sliding_window", "recurrent"), {"attention"}, None),
        (("sliding_window",), {"sliding_window"}, "needs a model without a sliding window; qwen3-mini has it"),
    ],
)
def test_a_kind_that_must_not_be_there_rules_a_model_out(
    lacks: tuple[Kind, ...], has: set[Kind], reason: str | None
) -> None:
    assert applies(invariant(lacks=lacks), subject(has)) == reason
    assert undecided(invariant(lacks=lacks), subject(None)) is not None


def test_times_are_not_asked_of_a_model_that_was_made_for_its_architecture() -> None:
    timed = invariant().model_copy(update={"alone": True})
    made = Subject("some", Path("m.gguf"), frozenset({"attention"}), is_fixture=False, is_made=True)
    assert "measures times" in (applies(timed, made) or "")
    assert applies(invariant(), made) is None
    assert applies(timed, subject({"attention"}, fixture=False)) is None


@pytest.mark.parametrize("fixture", [True, False])
def test_what_is_about_listed_models_only_concerns_no_other(fixture: bool) -> None:
    listed = invariant(models=["gemma3-mini", "lfm2-mini"], only_listed=True)
    assert applies(listed, subject({"attention"}, fixture=fixture)) is not None
    assert applies(invariant(models=["qwen3-mini"], only_listed=True), subject({"attention"}, fixture=fixture)) is None
    assert "gemma3-mini or lfm2-mini" in (applies(listed, subject({"attention"}, fixture=False)) or "")
