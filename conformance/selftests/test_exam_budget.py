"""A budget shrinks the search by the measured speed, and what does not fit is left out."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness.bench import Acquaintance, Setup
from conformance.harness.contract.schema import Invariant, Space
from conformance.harness.exam.budget import fit
from conformance.harness.exam.check import every_check
from conformance.harness.exam.drawing import drawn_ahead
from conformance.harness.exam.examination import Examination, contract
from conformance.harness.exam.progress import Progress
from conformance.harness.measure.deviation import Deviation
from conformance.harness.prompts.scaling import decoded_at_most
from conformance.harness.prompts.transcript import Transcript

INVARIANTS = [invariant for invariant in contract() if not invariant.alone]  # times are taken in what is left


def acquainted(speed: float) -> Acquaintance:
    return Acquaintance(frozenset({"attention"}), frozenset(), {}, speed, 0)


def size(space: Space) -> int:
    """The most tokens that a space makes a check decode."""
    if space.range:
        return space.range[1]
    return space.transcript.decoded_tokens[1] if space.transcript else 0


def pairs(speed: float) -> list[tuple[Invariant, Acquaintance, int]]:
    return [(invariant, acquainted(speed), invariant.examples["standard"]) for invariant in INVARIANTS]


def test_without_a_budget_the_profile_stands() -> None:
    for (invariant, _, examples), sizing in zip(pairs(15), fit(pairs(15)), strict=True):
        assert sizing is not None
        assert (sizing.invariant, sizing.examples, sizing.note) == (invariant, examples, "")


@given(st.floats(1, 20000), st.floats(10, 10000))
def test_what_is_chosen_fits_and_never_exceeds_the_profile(speed: float, seconds: float) -> None:
    sizings = fit(pairs(speed), seconds)
    assert sum(sizing.seconds for sizing in sizings if sizing) <= seconds
    for (invariant, _, examples), sizing in zip(pairs(speed), sizings, strict=True):
        if sizing:
            assert 1 <= sizing.examples <= examples
            for name, space in sizing.invariant.search.items():
                full = invariant.search[name]
                assert space == full or size(space) < size(full)
            assert bool(sizing.note) == ((sizing.examples, sizing.invariant) != (examples, invariant))


def test_more_time_never_means_fewer_examples() -> None:
    def drawn(seconds: float) -> int:
        return sum(sizing.examples for sizing in fit(pairs(15), seconds) if sizing)

    counts = [drawn(seconds) for seconds in (60, 120, 600, 3600, 36000)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_a_35b_model_at_15_tokens_a_second_is_searched_in_half_an_hour() -> None:
    assert all(fit(pairs(15), 1800))


def test_what_cannot_fit_is_left_out_from_the_end() -> None:
    sizings = fit(pairs(1), 120)
    kept = [sizing is not None for sizing in sizings]
    assert kept == sorted(kept, reverse=True)
    assert any(kept)
    assert not all(kept)


def test_the_tokens_of_transcripts_count_and_are_cut() -> None:
    """A task that decodes 2 to 4,824 tokens, at 10 a second: 241 s a case beside what it costs otherwise."""
    invariant = contract()["AA-01/engine"]
    [whole] = fit([(invariant, acquainted(10), 3)])
    assert whole is not None
    assert whole.seconds == pytest.approx(3 * (0.2 + (2 + 4824) / 2 / 10))
    [capped] = fit([(invariant.decoding_at_most(4000), acquainted(10), 3)])
    assert capped is not None
    assert capped.seconds == pytest.approx(3 * (0.2 + (2 + 4000) / 2 / 10))
    [cut] = fit([(invariant, acquainted(10), 3)], 100)
    assert cut is not None
    assert cut.seconds <= 100
    assert "of 4824 decoded tokens" in cut.note
    drawn = drawn_ahead(every_check()["AA-01/engine"], cut.invariant, 20, 0)
    most = cut.invariant.search["transcript"].transcript
    assert most is not None
    tasks: list[Transcript] = [case.transcript for case in drawn]  # type: ignore[attr-defined]
    assert all(len(task.steps) == 1 or decoded_at_most(task) <= most.decoded_tokens[1] for task in tasks)
    [counted] = fit([(contract()["AA-01"], acquainted(10), 3)])
    assert counted is not None
    assert counted.seconds == pytest.approx(3 * 0.2)


def test_progress_counts_cases_and_ignores_a_line_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizings = {(invariant.id, "m"): sizing for invariant, sizing in zip(INVARIANTS, fit(pairs(1000)), strict=True)}
    progress = Progress(tmp_path / "cases.jsonl", sizings, print)
    assert progress.line().startswith("... 0 of about ")
    first = json.dumps({"id": INVARIANTS[0].id, "model": "m", "case": {}})
    (tmp_path / "cases.jsonl").write_text(f"{first}\n{first}\n{first[:10]}")
    assert progress.line().startswith("... 2 of about ")
    assert " s left" in progress.line()


@pytest.mark.parametrize(("recorded", "verdict"), [(True, "UNKNOWN"), (False, "PASS")])
def test_a_list_of_cases_that_was_not_run_to_its_end_is_no_pass(recorded: bool, verdict: str) -> None:
    specs, check = contract(), every_check()["RP-09"]
    cases = [case.model_dump() for case in drawn_ahead(check, specs["RP-09"], 4, 0)]

    def slowly(*_: object, **__: object) -> SimpleNamespace:
        time.sleep(0.3)
        return SimpleNamespace(deviation=Deviation(0.0, "nothing"), seconds_in_library=0.3)

    child: Any = SimpleNamespace(call=slowly)
    known = acquainted(1e6)
    looked = Examination(
        setup=Setup("bundled", "qwen3-mini"),
        model="qwen3-mini",
        invariant=specs["RP-09"],
        profile=specs.profiles["smoke"],
        examples=len(cases),
        seed=0,
        acquaintance=known,
        ceiling=specs.ceilings[known.weights],
        child=child,
        recorded=cases if recorded else None,
        deadline=time.time() + 0.1,
    ).take(check)
    assert looked.verdict == verdict, looked.reason
    assert 1 <= looked.examples < len(cases)
    if recorded:
        assert f"{len(cases) - looked.examples} of {len(cases)} cases were left out when the budget ended" in str(
            looked.reason
        )
