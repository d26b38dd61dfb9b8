"""Second looks at single checks, and checks that need both builds: examinations outside of pytest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from conformance.harness.bench import Acquaintance, Setup
from conformance.harness.contract.load import Contract
from conformance.harness.contract.needs import Subject, applies
from conformance.harness.contract.schema import SecondLooks
from conformance.harness.engine.child import Child
from conformance.harness.exam.check import every_check
from conformance.harness.exam.examination import Examination
from conformance.harness.exam.session import child_for, subject_of
from conformance.harness.report.comparison import Pair, case_to_look_at, pair_of, shown
from conformance.harness.report.results import Check, Results

from .suite import Ask

Cases = Sequence[dict[str, Any]]
BOTH_BUILDS = "other_build"
_SECOND_LOOKS = ("regression", "crash", "timeout", "fixed")


@dataclass(frozen=True)
class Side:
    """One build and what its run found.

    Attributes:
        reference: the build.
        results: of its run.
        fault: planted in its processes, None for none.

    """

    reference: str
    results: Results
    fault: str | None = None

    def acquaintance(self, model: str) -> Acquaintance | None:
        """The first look at a model, as the results tell it; None where there was none."""
        facts = self.results.settings["models"].get(model)
        if facts is None or facts["measured"] is None:
            return None
        return Acquaintance.of_record(facts["measured"], facts["kinds"], facts["capabilities"])


class Looks:
    """Examines single checks on both builds, in processes that are kept warm. Use as a context manager."""

    def __init__(
        self, contract: Contract, looks: SecondLooks, ask: Ask, baseline: Side, candidate: Side, jobs: int
    ) -> None:
        self._contract, self._looks, self._ask, self._jobs = contract, looks, ask, jobs
        self.baseline, self.candidate = baseline, candidate
        self._checks = every_check()
        self._models = {subject.name: name for name in ask.models for subject in [subject_of(name)]}
        self._paths = [subject_of(name).path for name in ask.models]
        self._stack = ExitStack()

    def __enter__(self) -> Looks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _child(self) -> Child:
        return self._stack.enter_context(child_for(self._paths))

    def confirmed(self, pairs: Sequence[Pair]) -> list[Pair]:
        """The pairs; each that shows a difference is looked at again, on both builds and alone, and says what came of it."""
        doubtful = [
            pair
            for pair in pairs
            if pair.outcome in _SECOND_LOOKS and pair.baseline and pair.candidate and self._common(pair.model)
        ]
        sides = [(side, self._child()) for side in (self.baseline, self.candidate)]
        again = {(pair.id, pair.model): self._again(pair, sides) for pair in doubtful[: self._looks.most]}
        return [again.get((pair.id, pair.model), pair) for pair in pairs]

    def _again(self, pair: Pair, sides: Sequence[tuple[Side, Child]]) -> Pair:
        assert pair.baseline is not None
        assert pair.candidate is not None
        case = case_to_look_at(pair.baseline, pair.candidate, pair.outcome)
        if case is None:
            return pair
        before, after = (self._examined(child, side, pair.id, pair.model, [case]) for side, child in sides)
        return settled(pair, pair_of(before, after))

    def _examined(
        self, child: Child, side: Side, id: str, model: str, cases: Cases, other: Side | None = None
    ) -> Check:
        """A check on a model with exactly these cases, in a process of the side's build."""
        known = side.acquaintance(model)
        if other is not None:
            beside = other.acquaintance(model)
            assert beside is not None
            known = known and known.beside(beside)
        assert known is not None
        profile = self._contract.profile(self._ask.profile)
        return Examination(
            setup=Setup(
                side.reference,
                self._models[model],
                side.fault,
                self._ask.threads,
                other.reference if other else None,
            ),
            model=model,
            invariant=self._contract[id],
            profile=profile.model_copy(
                update={"example_timeout_seconds": self._looks.patience * profile.example_timeout_seconds}
            ),
            examples=len(cases),
            seed=self._ask.seed,
            acquaintance=known,
            ceiling=self._contract.ceilings[known.weights],
            child=child,
            recorded=cases,
        ).take(self._checks[id])

    def exchanged(self, cases: Mapping[tuple[str, str], Cases]) -> list[Pair]:
        """States from each build to the other: every check that needs both, on every model that both took."""
        wanted = [
            (invariant.id, model)
            for model in self._models
            for invariant in self._contract
            if BOTH_BUILDS in invariant.needs.capabilities
            and (subject := self._common(model))
            and applies(invariant, subject) is None
            and self._ask.takes(invariant.id, model)
        ]

        children: SimpleQueue[Child] = SimpleQueue()
        for _ in range(self._jobs):
            children.put(self._child())

        def look(pair: tuple[str, str]) -> Pair:
            id, model = pair
            child = children.get()
            try:
                check = self._examined(child, self.candidate, id, model, cases[pair], self.baseline)
                if shown(check) not in ("FAIL", "CRASH", "TIMEOUT"):
                    return exchange(check)
                again = self._examined(child, self.candidate, id, model, [check.case], self.baseline)
                return settled(exchange(check), exchange(again))
            finally:
                children.put(child)

        with ThreadPoolExecutor(self._jobs) as pool:
            return list(pool.map(look, wanted))

    def _common(self, model: str) -> Subject | None:
        """A model as both builds know it, None where one of them does not."""
        looks = [side.acquaintance(model) for side in (self.baseline, self.candidate)]
        if looks[0] is None or looks[1] is None:
            return None
        declared = subject_of(self._models[model])
        both = looks[0].capabilities & looks[1].capabilities | {BOTH_BUILDS}
        return Subject(
            model, declared.path, looks[1].kinds, both, is_fixture=declared.is_fixture, only_named=declared.only_named
        )


def settled(first: Pair, second: Pair) -> Pair:
    """A difference, given a second look at the case that showed it.

    The same again is confirmed. A fault that the second look finds in both builds is known. What did not come again is
    UNKNOWN, but for what passes on both at the second look and was a repair, or a build that took too long on a machine
    with other work: that passes.
    """
    if second.outcome == first.outcome:
        return first.model_copy(update={"confirmed": True})
    outcome = "known" if second.outcome == "known" else "unknown"
    if first.outcome in ("timeout", "fixed") and second.outcome == "pass":
        outcome = "pass"
    reason = f"{first.outcome} at the first look ({first.reason}), {second.outcome} at the second ({second.reason})"
    return first.model_copy(
        update={
            "outcome": outcome,
            "blocks": first.required and outcome == "unknown",
            "reason": reason,
            "confirmed": False,
        }
    )


def exchange(check: Check) -> Pair:
    """A check that needed both builds, as a pair that has the candidate's side alone."""
    outcomes: Mapping[str, Any] = {"PASS": "pass", "FAIL": "regression", "CRASH": "crash", "TIMEOUT": "timeout"}
    outcome = outcomes.get(shown(check), "unknown")
    fates = Counter(case.remark for case in check.detail.cases or () if case.remark)
    told = ", ".join(f"{fate} in {count} cases" if len(fates) > 1 else str(fate) for fate, count in fates.items())
    return Pair(
        id=check.id,
        model=check.model,
        title=check.title,
        required=check.required,
        outcome=outcome,
        blocks=check.required and outcome != "pass",
        reason=told if outcome == "pass" else f"{check.reason} ({told or 'no case was measured to its end'})",
        candidate=check,
    )
