"""One invariant on one model: draw, measure in a child, judge, shrink, report."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from conformance.harness.bench import FLOAT_TYPES, Acquaintance, Case, Floor, Setup, meet
from conformance.harness.contract.known import Known, load_known_failures
from conformance.harness.contract.load import Contract, load_specs
from conformance.harness.contract.schema import Accept, Ceiling, Invariant, Profile
from conformance.harness.engine import BuildError, DecodeError, ModelError, StateError
from conformance.harness.engine.child import Child, ChildDeath
from conformance.harness.measure.deviation import Deviation
from conformance.harness.report.results import VERDICTS, Check, MeasuredCase, Verdict
from conformance.harness.state import BlobError
from fixtures import models
from fixtures.trained import TRAINED

from .budget import tasks, texts
from .check import BoundCheck, NotDecidable, Undecided, check_of, run_case
from .drawing import search

SPECS = Path(__file__).parents[3] / "specs"
_NOISE_FACTOR = 10
_NOISE_RULES = ("bitwise", "within_floor", "beyond_floor")
_PATIENCE = (
    40  # how many times the prefill time of its tokens a case may take beyond its timeout: a busy machine is no hang
)


def contract(*, strict_timing: bool = False, timing: bool = True) -> Contract:
    """What must hold: the specs of this checkout.

    With `strict_timing` what is measured alone is required too; without `timing` no profile looks at it where it only informs.
    """
    loaded = load_specs(SPECS, (*models.names(), *TRAINED))
    if not timing:
        untimed = {name: each.model_copy(update={"timed": False}) for name, each in loaded.profiles.items()}
        loaded = replace(loaded, profiles=untimed)
    if not strict_timing:
        return loaded
    strict = {
        id: invariant.model_copy(update={"required": True}) if invariant.alone else invariant
        for id, invariant in loaded.invariants.items()
    }
    return replace(loaded, invariants=strict)


@lru_cache(maxsize=1)
def known_failures() -> tuple[Known, ...]:
    """The faults that upstream is known to have, by this checkout."""
    return load_known_failures(SPECS / "known_failures")


@dataclass(frozen=True)
class Outcome:
    """How one case ended; `deviation` is None where nothing could be measured, `limit` the last one that passes."""

    verdict: Verdict
    reason: str | None = None
    deviation: Deviation | None = None
    floor: float = 0.0
    limit: float = 0.0
    stderr: str = ""


class Refuted(Exception):
    """A case that did not pass."""

    def __init__(self, case: Case, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.case, self.outcome = case, outcome


class _ShrinkingEnds(BaseException):
    """The time for shrinking is over; hypothesis lets it through, so that it draws no more cases for nothing."""


def floors_of(invariant: Invariant) -> tuple[Floor, ...]:
    """The kinds of noise that an invariant's rules are held against: none for counts, that of repeats for bits."""
    rules = [rule for rule in (invariant.accept, invariant.accept_reordered) if rule and rule.rule in _NOISE_RULES]
    return tuple(dict.fromkeys(rule.floor or "repeat" for rule in rules))


def measured_floor(accept: Accept, acquaintance: Acquaintance, case: Case | None) -> float:
    """The noise on this model that a rule is held against, in the unit of its quantity.

    Noise depends on flash attention: a case that names it is held against that noise, any other against the larger.
    """
    if accept.rule not in _NOISE_RULES:
        return 0.0
    flash = getattr(case, "flash_attn", None)
    noises = [
        noise
        for (floor, under), noise in acquaintance.floors.items()
        if floor == (accept.floor or "repeat") and flash in (None, under)
    ]
    return max(noise.state if accept.quantity == "state" else noise.logits for noise in noises)


def judge(
    invariant: Invariant, acquaintance: Acquaintance, ceiling: Ceiling, case: Case, deviation: Deviation
) -> Outcome:
    """What a measured deviation means.

    Where bits must agree and the build does not even repeat itself, a deviation within that noise is UNKNOWN: it shows
    neither a fault nor its absence. So is one that passes only because the noise is above its ceiling.
    """
    accept = (deviation.reordered and invariant.accept_reordered) or invariant.accept
    floor = measured_floor(accept, acquaintance, case)
    limit = accept.limit(floor)
    estimate = deviation.estimate
    if invariant.alone and estimate is None:
        return Outcome("UNKNOWN", "a time without an interval tells nothing", deviation, floor, limit)
    holds = estimate.lies_within(*accept.bounds(floor)) if estimate else accept.holds(deviation.value, floor)
    most = ceiling.of(accept.quantity)
    if holds and accept.rule == "within_floor" and deviation.value > accept.limit(most):
        reason = f"too noisy to tell: runs that should agree lie {floor:.3g} apart, the most to build a limit on is {most:.3g}"
        return Outcome("UNKNOWN", reason, deviation, floor, limit)
    if holds:
        return Outcome("PASS", None, deviation, floor, limit)
    if estimate and holds is None:
        reason = (
            f"too noisy to tell: {deviation.value:.3g}, but {estimate.low:.3g} to {estimate.high:.3g} is possible, "
            f"and the limit is {limit:.3g}"
        )
        return Outcome("UNKNOWN", reason, deviation, floor, limit)
    if not math.isfinite(floor):
        return Outcome("UNKNOWN", "the noise of this model under this build is not finite", deviation, floor, limit)
    place = f"{deviation.where}: " if deviation.where else ""
    what = f"{place}expected {deviation.expected}, got {deviation.seen}" if deviation.expected else deviation.where
    if accept.rule == "bitwise" and 0 < deviation.value <= _NOISE_FACTOR * floor:
        reason = f"the build does not repeat itself bit for bit, so this cannot be told ({what})"
        return Outcome("UNKNOWN", reason, deviation, floor, limit)
    why = what or ("not a finite number" if deviation.value else "nothing deviates, where something must")
    return Outcome("FAIL", why, deviation, floor, limit)


def _judged(
    measured: Callable[[], Deviation], invariant: Invariant, acquaintance: Acquaintance, ceiling: Ceiling, case: Case
) -> Outcome:
    """The outcome of measuring a case, whatever the measurement raises."""
    try:
        return judge(invariant, acquaintance, ceiling, case, measured())
    except ChildDeath as death:
        return Outcome(death.verdict, f"the build {death}", stderr=death.stderr)
    except (DecodeError, StateError) as error:
        return Outcome("FAIL", str(error), Deviation(math.inf, "a call that must work was refused"))
    except ModelError as error:
        if getattr(case, "cache_type", "f16") in FLOAT_TYPES:  # every build offers these; others may be missing
            return Outcome("FAIL", str(error), Deviation(math.inf, "a context that must work was refused"))
        return Outcome("SKIPPED", str(error))
    except NotDecidable as error:
        return Outcome("SKIPPED", str(error))
    except (Undecided, BlobError, BuildError) as error:
        return Outcome("UNKNOWN", str(error))
    except Exception:
        return Outcome("UNKNOWN", f"the suite itself failed:\n{traceback.format_exc()}")


def _badness(outcome: Outcome) -> tuple[int, float]:
    """Orders outcomes that did not pass: by verdict, then by how far they deviate."""
    value = outcome.deviation.value if outcome.deviation else 0.0
    return VERDICTS.index(outcome.verdict), math.inf if math.isnan(value) else value


@dataclass
class Examination:
    """One invariant on one model under one build.

    Attributes:
        acquaintance: the model's measured floors.
        ceiling: the most noise that a limit may be built on.
        recorded: cases to run instead of drawing, all of them whatever they show; None draws.
        database: folder where hypothesis keeps examples that failed; None keeps none.
        deadline: when the whole run's budget ends, in seconds since the epoch.
        note_case: is told every case before it runs, so that a record survives whatever happens.

    """

    setup: Setup
    model: str
    invariant: Invariant
    profile: Profile
    examples: int
    seed: int
    acquaintance: Acquaintance
    ceiling: Ceiling
    child: Child
    recorded: Sequence[dict[str, Any]] | None = None
    database: Path | None = None
    deadline: float = math.inf
    note_case: Callable[[Case], None] = lambda case: None
    _outcomes: dict[Case, Outcome] = field(default_factory=dict)
    _passed: list[Outcome] = field(default_factory=list)
    _refused: list[str] = field(default_factory=list)
    _left_out: int = 0
    _in_library: float = 0.0
    _shrink_until: float = math.inf
    _verdict: Verdict | None = None
    _smallest: Refuted | None = None
    _draw_until: float = math.inf

    def take(self, check: BoundCheck) -> Check:
        """Run the check and say how it ended."""
        begin = time.perf_counter()
        self._draw_until = begin + min(self._allowed_seconds, self.deadline - time.time())
        case, outcome = self._search(check)
        if outcome.verdict == "PASS" and not self._passed:
            if self._left_out and not self._refused and time.time() > self.deadline:
                outcome = Outcome("SKIPPED", "left out: the budget ended before its first case")
            else:
                reason = self._refused[0] if self._refused else "no case was run"
                outcome = Outcome("UNKNOWN", f"no case could be measured: {reason}")
        elif (
            outcome.verdict == "PASS" and self._left_out and (self.recorded is not None or time.time() <= self.deadline)
        ):
            allowed = f"after {self._allowed_seconds:.0f} s, the check's time in this profile"
            outcome = Outcome(
                "UNKNOWN",
                f"{self._left_out} of {self.examples} cases were left out "
                f"{'when the budget ended' if time.time() > self.deadline else allowed}; those that ran passed",
                outcome.deviation,
            )
        return self._report(check, case, outcome, time.perf_counter() - begin)

    @property
    def _allowed_seconds(self) -> float:
        """Time for drawing: the profile's, and on a slow model in proportion to the tokens that the search can ask for."""
        tokens = self.examples * sum(longest for _, longest in (*texts(self.invariant), *tasks(self.invariant)))
        return self.profile.check_timeout_seconds + _PATIENCE * tokens / self.acquaintance.prefill_tokens_per_second

    def _search(self, check: BoundCheck) -> tuple[Case | None, Outcome]:
        if self.recorded is not None:
            return self._replayed(check, self.recorded)
        try:
            search(
                check.case.strategy(self.invariant.decoding_at_most(self.profile.decoded_tokens.most)),
                lambda case: self._attempt(check, case),
                examples=self.examples,
                seed=self.seed,
                database=self.database,
            )
        except Refuted as refuted:
            return refuted.case, refuted.outcome
        except _ShrinkingEnds:
            assert self._smallest is not None
            return self._smallest.case, self._smallest.outcome
        return None, self._closest

    @property
    def _closest(self) -> Outcome:
        return max(self._passed, key=self._closeness, default=Outcome("PASS"))

    def _closeness(self, outcome: Outcome) -> tuple[float, float]:
        """Orders outcomes that passed by how close they came to failing."""
        assert outcome.deviation is not None
        share = outcome.deviation.value / outcome.limit if outcome.limit else 0.0
        return -share if self.invariant.accept.wants_more else share, outcome.limit

    def _replayed(self, check: BoundCheck, recorded: Sequence[dict[str, Any]]) -> tuple[Case | None, Outcome]:
        """Run every recorded case; the worst outcome counts. A death of the build leaves out the rest."""
        for case in dict.fromkeys(check.case(**fields) for fields in recorded):
            if time.perf_counter() > self._draw_until:
                self._left_out += 1
            elif self._noted(check, case).verdict in ("CRASH", "TIMEOUT"):
                break
        failed = {case: each for case, each in self._outcomes.items() if each.verdict not in ("PASS", "SKIPPED")}
        if not failed:
            return None, self._closest
        case = max(failed, key=lambda each: _badness(failed[each]))
        return case, failed[case]

    def _attempt(self, check: BoundCheck, case: Case) -> None:
        """Measure a case, once; after the time for drawing is over let new cases pass unseen, after that for shrinking end."""
        if case not in self._outcomes:
            now = time.perf_counter()
            if now > self._shrink_until:
                raise _ShrinkingEnds
            if now > self._draw_until:
                self._left_out += self._shrink_until == math.inf
                return
            outcome = self._noted(check, case)
            if outcome.verdict not in ("PASS", "SKIPPED") and self._shrink_until == math.inf:
                self._shrink_until = now + self.profile.shrink_seconds
                self._verdict = outcome.verdict
        outcome = self._outcomes[case]
        if outcome.verdict == self._verdict:  # shrinking never turns a crash into a failure, nor that into a doubt
            self._smallest = Refuted(case, outcome)
            raise self._smallest

    def _noted(self, check: BoundCheck, case: Case) -> Outcome:
        self.note_case(case)
        outcome = self._outcomes[case] = self._run(check, case)
        if outcome.verdict == "PASS":
            self._passed.append(outcome)
        elif outcome.verdict == "SKIPPED":
            self._refused.append(outcome.reason or "")
        return outcome

    def _run(self, check: BoundCheck, case: Case) -> Outcome:
        patience = _PATIENCE * case.n_tokens / self.acquaintance.prefill_tokens_per_second
        timeout = (self.invariant.timeout_seconds or self.profile.example_timeout_seconds) + patience

        def measured() -> Deviation:
            measurement = self.child.call(run_case, self.setup, check.reference, case.model_dump(), timeout=timeout)
            self._in_library += measurement.seconds_in_library
            deviation: Deviation = measurement.deviation
            return deviation

        return _judged(measured, self.invariant, self.acquaintance, self.ceiling, case)

    def _report(self, check: BoundCheck, case: Case | None, outcome: Outcome, seconds: float) -> Check:
        deviation = outcome.deviation
        detail: dict[str, Any] = {"seed": self.seed}
        if self._refused:
            detail |= {"refused": len(self._refused), "refused_because": sorted(set(self._refused))}
        if self._left_out and outcome.verdict == "PASS":
            detail["left_out"] = f"{self._left_out} of {self.examples} cases, when the budget ended"
        if deviation and deviation.layers:
            detail["layers"] = list(deviation.layers)
        if self.recorded is not None:
            detail["cases"] = [
                MeasuredCase(
                    case=each.model_dump(),
                    verdict=shown.verdict,
                    reason=shown.reason,
                    deviation=shown.deviation.value if shown.deviation else None,
                    floor=shown.floor,
                    limit=shown.limit,
                    remark=shown.deviation.remark if shown.deviation else None,
                    replay=None if shown.verdict == "PASS" else replay_command(self.setup, check.reference, each),
                ).model_dump()
                for each, shown in self._outcomes.items()
            ]
        if outcome.stderr:
            detail["stderr"] = outcome.stderr
        if deviation:
            detail |= {"where": deviation.where, "expected": deviation.expected, "seen": deviation.seen}
        if deviation and deviation.estimate:
            detail["interval"] = [deviation.estimate.low, deviation.estimate.high]
        planned = Check.planned(self.invariant.id, self.model, self.invariant.title, self.invariant.required)
        return planned.settled(
            outcome.verdict,
            reason=outcome.reason,
            quantity=deviation.quantity if deviation else self.invariant.accept.quantity,
            deviation=deviation.value if deviation else None,
            floor=outcome.floor,
            limit=outcome.limit,
            wants_more=self.invariant.accept.wants_more,
            seconds=seconds,
            seconds_in_library=self._in_library,
            examples=sum(each.verdict != "SKIPPED" for each in self._outcomes.values()),
            replay=replay_command(self.setup, check.reference, case) if case else None,
            case=case.model_dump() if case else None,
            detail=detail,
        )


def replay_command(setup: Setup, reference: str, case: Case) -> str:
    """A shell line that runs one case again in a fresh process, without pytest."""
    named = {name: value for name, value in asdict(setup).items() if value is not None}
    arguments = [json.dumps(reference), f"dict({_keywords(case.model_dump())})", _keywords(named)]
    code = f"from conformance.harness.exam import replay; replay({', '.join(arguments)})"
    return f"python -c {shlex.quote(code)}"


def _keywords(values: dict[str, Any]) -> str:
    """Python keyword arguments; strings in double quotes, so that the whole fits into a shell's single ones."""
    return ", ".join(f"{name}={_literal(value)}" for name, value in values.items())


def _literal(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.encode("unicode_escape").decode().replace('"', r"\"")
        return f'"{escaped}"'
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_literal, value))}]"
    return repr(value)


def replay(
    reference: str,
    case: dict[str, Any],
    *,
    build: str,
    model: str,
    fault: str | None = None,
    n_threads: int = 1,
    other: str | None = None,
) -> None:
    """Run one case in this very process, print what was expected and what was seen, and exit 1 unless it passes.

    Nothing is caught on the way: where the build crashes, this process does, with the build's own message.
    """
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    setup = Setup(build, model, fault, n_threads, other)
    check = check_of(reference)
    specs = contract()
    invariant, drawn = specs[check.id], check.case(**case)
    acquaintance = meet(setup, floors_of(invariant))
    if other is not None:
        with Child() as child:
            acquaintance = acquaintance.beside(child.call(meet, Setup(other, model), floors_of(invariant)))
    ceiling = specs.ceilings[acquaintance.weights]
    outcome = _judged(lambda: run_case(setup, reference, case).deviation, invariant, acquaintance, ceiling, drawn)
    print(f"{outcome.verdict} {check.id} on {model}: {invariant.title}")
    print(f"case: {json.dumps(case)}")
    if outcome.reason:
        print(outcome.reason)
    if outcome.deviation:
        print(
            f"deviation {outcome.deviation.value:.3g} ({outcome.deviation.quantity}), floor {outcome.floor:.3g}, limit {outcome.limit:.3g}"
        )
    sys.exit(outcome.verdict != "PASS")
