"""The search as a tool: what is known is kept clear of only while its own check fails, and what is cured is said."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import typer

from conformance.harness.contract.load import Contract
from conformance.harness.exam.examination import contract
from conformance.harness.exam.standing import standing
from conformance.harness.machine.search import Search
from conformance.harness.report.results import Verdict
from tools import fuzz

KEEPING, IDS = "SM-04/keeping-one-removes-the-others", "SM-03/sequence-ids-out-of-range"


def test_a_known_failure_whose_check_passes_is_said_to_be_fixed_and_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The build is the bundled one, but for a cure of one fault."""
    searches: list[Search] = []

    def verdicts(build: str, model: str, ids: Collection[str], _: Contract) -> Iterator[tuple[str, Verdict]]:
        for id in ids:
            yield id, "PASS" if id == KEEPING else "CRASH" if id == IDS else "FAIL"

    def run(self: Search, seconds: float, seed: int) -> None:
        searches.append(self)

    monkeypatch.setattr(fuzz, "standing", verdicts)
    monkeypatch.setattr(Search, "run", run)
    with pytest.raises(typer.Exit) as ended:
        fuzz.main(minutes=1, model=["qwen3-mini"], findings=tmp_path)
    assert ended.value.exit_code == 0
    (search,) = searches
    assert KEEPING in search.known
    assert KEEPING not in search.avoid
    assert IDS in search.avoid
    shown = capsys.readouterr().out
    assert f"FIXED {KEEPING}: its check passes on qwen3-mini" in shown
    assert f"FIXED {IDS}" not in shown


def test_where_everything_is_to_be_met_nothing_is_kept_clear_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[Search] = []
    monkeypatch.setattr(Search, "run", lambda self, seconds, seed: searches.append(self))
    with pytest.raises(typer.Exit):
        fuzz.main(minutes=1, model=["qwen3-mini"], findings=tmp_path, from_scratch=True)
    assert searches[0].avoid == set()
    assert KEEPING in searches[0].known


def test_a_check_is_run_by_itself_to_see_whether_its_failure_stands() -> None:
    ids = ("SM-03/removal-wildcard", "SM-03/whole-removal", "SM-07/rollback-into-a-gap")
    verdicts = dict(standing("bundled", "mamba2-mini", ids, contract()))
    assert verdicts == {"SM-03/removal-wildcard": "FAIL", "SM-03/whole-removal": "PASS"}  # it has nothing to roll back
