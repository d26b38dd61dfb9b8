"""The checks of a run as they come in, and the results they amount to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from conformance.harness.report.results import VERDICTS, Check, NotApplicable, Results
from conformance.harness.report.verdict import summarise


class Outcomes:
    """What a run has so far: its checks by id and model, in the order they were planned or came."""

    def __init__(
        self,
        planned: Iterable[Check],
        build: Mapping[str, Any],
        suite: Mapping[str, Any],
        settings: Mapping[str, Any],
        not_applicable: Iterable[NotApplicable],
    ) -> None:
        self._checks = {(check.id, check.model): check for check in planned}
        self._frame: dict[str, Any] = {"build": build, "suite": suite, "settings": settings}
        self._not_applicable = tuple(not_applicable)

    def put(self, check: Check) -> None:
        """Takes a check in place of its plan; of two outcomes the worse stays, with the time and cases of both."""
        earlier = self._checks.get((check.id, check.model))
        if earlier and earlier.has_run:
            if not check.has_run:
                return
            worse = max(earlier, check, key=lambda each: VERDICTS.index(each.verdict))
            both = {
                name: getattr(earlier, name) + getattr(check, name)
                for name in ("seconds", "seconds_in_library", "examples")
            }
            check = worse.model_copy(update=both)
        self._checks[check.id, check.model] = check

    def results(self, notes: Sequence[str] = (), problems: Sequence[str] = ()) -> Results:
        """The results as they stand; ``problems`` in the surroundings leave no verdict."""
        checks = tuple(self._checks.values())
        return Results(
            **self._frame,
            checks=checks,
            not_applicable=self._not_applicable,
            notes=(*notes, *problems),
            summary=summarise(checks, self._not_applicable, problems),
        )
