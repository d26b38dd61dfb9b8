"""Draws cases with hypothesis, for a search or ahead of any build."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import hypothesis
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from conformance.harness.bench import Case
from conformance.harness.contract.schema import Invariant

from .check import BoundCheck

C = TypeVar("C", bound=Case)


def search(
    strategy: st.SearchStrategy[C],
    visit: Callable[[C], None],
    *,
    examples: int,
    seed: int,
    database: Path | None = None,
) -> None:
    """Draw cases and visit each; what a visit raises ends the search, after smaller cases that raise were looked for.

    `database` is a folder where examples that failed are kept for the next search.
    """

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=DirectoryBasedExampleDatabase(database) if database else None,
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        phases=[phase for phase in Phase if phase is not Phase.explain],
    )
    @hypothesis.given(strategy)
    def every_case_holds(case: C) -> None:
        visit(case)

    # hypothesis.seed() would drop the database
    setattr(every_case_holds, "_hypothesis_internal_use_seed", seed)  # noqa: B010
    every_case_holds()


def drawn_ahead(check: BoundCheck, invariant: Invariant, examples: int, seed: int) -> list[Case]:
    """The cases that a search visits where none fails: they depend on the spec and the seed, not on any build."""
    cases: dict[Case, None] = {}
    search(check.case.strategy(invariant), lambda case: cases.setdefault(case), examples=examples, seed=seed)
    return list(cases)
