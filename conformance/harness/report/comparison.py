"""Two builds side by side: what an upgrade from the baseline to the candidate changes. Data, and the verdict on it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from conformance.harness.report import results as single
from conformance.harness.report.results import (
    Check,
    MeasuredCase,
    Number,
    Record,
    Results,
    Text,
    jsonable,
)
from conformance.harness.report.store import ReportError
from conformance.harness.report.verdict import in_short
from conformance.harness.report.wording import figure

SCHEMA: Literal["llama-conformance/gate/1"] = "llama-conformance/gate/1"
SCHEMA_FILE = Path(__file__).with_name("gate.schema.json")
"""The published JSON schema of a comparison."""
FILE_NAME = "gate.json"
Outcome = Literal["pass", "known", "regression", "fixed", "new", "removed", "crash", "timeout", "unknown"]
OUTCOMES: tuple[Outcome, ...] = (
    "pass", "fixed", "new", "known", "removed", "unknown", "timeout", "regression", "crash",
)  # fmt: skip
"""Every outcome, from the best to the worst."""
MEANINGS: Mapping[Outcome, str] = {
    "pass": "holds on both builds, or the difference is within the noise of one of them",
    "fixed": "fails on the baseline and holds on the candidate",
    "new": "only the candidate offers what it needs",
    "known": "fails on both builds: it stays broken; or on the candidate alone, as an entry of the known failures says",
    "removed": "only the baseline offers what it needs",
    "unknown": "could not be decided on the candidate, or it fails there and the baseline could not be decided; "
    "harmless where both builds leave it undecided for the same reason",
    "timeout": "the candidate gives no answer in time where the baseline gave one",
    "regression": "holds on the baseline, and deviates on the candidate by more than the noise of both allows",
    "crash": "the candidate ends its process where the baseline did not",
}
_NEW_AND_KNOWN = "new with the candidate"
_BLOCKING = ("regression", "crash", "timeout", "unknown", "removed")
_DEATHS = ("CRASH", "TIMEOUT")


class Pair(Record):
    """One check on one model, under both builds.

    ``blocks`` says whether it alone is a reason not to upgrade. ``reason`` is for people. ``baseline`` and ``candidate``
    are the checks as the builds' own runs have them. ``newly_known`` marks a failure that the baseline does not have and that an
    entry of the known failures describes for the candidate. One of both checks is None where the check does not apply there, and ``baseline``
    is None for checks that need both builds at once. ``confirmed`` is None for what was seen once and needed no second
    look, else whether the second look showed the same.
    """

    id: Text
    model: Text
    title: Text
    required: bool
    outcome: Outcome
    blocks: bool
    reason: Text
    baseline: Check | None = None
    candidate: Check | None = None
    confirmed: bool | None = None
    newly_known: bool = False

    @property
    def is_change(self) -> bool:
        """Whether who decides on the upgrade should read of it first: it blocks, is repaired, or is newly known."""
        return self.blocks or self.outcome == "fixed" or self.newly_known

    @property
    def replay(self) -> str | None:
        """A line that runs the case that decided on the candidate again."""
        shown = self.candidate if self.outcome != "fixed" else self.baseline
        return shown.replay if shown else None


class Speed(Record):
    """One quantity of a build's performance on one model, candidate against baseline.

    ``kind`` is count (tokens or bytes that cannot vary: they are compared exactly) or measure (a time or a memory that
    varies: paired rounds give the interval ``low`` to ``high`` of the ratio). A ``ratio`` above 1 is always worse.
    ``limit`` is the ratio up to which nothing is said. ``blocks`` as in Pair.
    """

    model: Text
    quantity: Text
    unit: Text
    kind: Literal["count", "measure"]
    outcome: Outcome
    blocks: bool
    reason: Text
    baseline: Number | None
    candidate: Number | None
    ratio: Number | None = None
    low: Number | None = None
    high: Number | None = None
    limit: Number
    rounds: int = 1


class Answer(Record):
    """May we upgrade? ``exit_code`` 0: yes. 1: no. 2: nothing can be said."""

    exit_code: Literal[0, 1, 2]
    line: str
    counts: dict[Outcome, int]


class Comparison(Record):
    """The file ``gate.json``.

    ``baseline`` and ``candidate`` say what the builds are; ``death`` is how the candidate ended its process when it was
    merely loaded, and then there are no pairs. ``states`` says for each direction what became of states of the other build.
    """

    format: Literal["llama-conformance/gate/1"] = Field(default=SCHEMA, alias="schema")
    baseline: single.Mapping
    candidate: single.Mapping
    suite: single.Mapping
    settings: single.Mapping
    pairs: tuple[Pair, ...]
    speeds: tuple[Speed, ...] = ()
    states: dict[str, str] = Field(default_factory=dict)
    death: Text | None = None
    notes: tuple[Text, ...] = ()
    answer: Answer

    def as_json(self) -> dict[str, Any]:
        """The file's content: only what JSON knows."""
        return self.model_dump(mode="json", by_alias=True)


def comparison_schema() -> dict[str, Any]:
    """The JSON schema of ``gate.json``."""
    schema = Comparison.model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def read_comparison(folder: Path) -> Comparison:
    """The comparison in a report folder. Raises ReportError."""
    path = folder / FILE_NAME
    try:
        return Comparison.model_validate(json.loads(path.read_bytes()))
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror}); name the report folder of a gate") from None
    except (ValueError, ValidationError) as error:
        raise ReportError(f"{path}: not a comparison ({str(error).splitlines()[0]}); run the gate again") from None


# -- one check


def compare(baseline: Results, candidate: Results, *, only_run: bool = False) -> list[Pair]:
    """Every check that applies to a model under one of the builds. With `only_run`, none that ran under neither."""
    before, after = _by_pair(baseline.checks), _by_pair(candidate.checks)
    absent = {
        side: {(pair.id, pair.model): pair.reason for pair in results.not_applicable}
        for side, results in (("baseline", baseline), ("candidate", candidate))
    }
    pairs = []
    for key in dict.fromkeys((*after, *before)):
        old, new = before.get(key), after.get(key)
        if only_run and not any(check and check.has_run for check in (old, new)):
            continue
        missing = next(
            (absent[side].get(key) for side, check in (("baseline", old), ("candidate", new)) if check is None), None
        )
        pairs.append(pair_of(old, new, missing or "it is not there"))
    return pairs


def _by_pair(checks: Iterable[Check]) -> dict[tuple[str, str], Check]:
    return {(check.id, check.model): check for check in checks}


def pair_of(baseline: Check | None, candidate: Check | None, absence: str = "") -> Pair:
    """The two checks, classified; `absence` is why one of them is None."""
    outcome, reason = classify(baseline, candidate, absence)
    either = candidate or baseline
    assert either is not None
    harmless = outcome == "removed" and (baseline is None or shown(baseline) != "PASS")
    harmless = harmless or (outcome == "unknown" and _undecided_as_before(baseline, candidate))
    return Pair(
        id=either.id,
        model=either.model,
        title=either.title,
        required=either.required,
        outcome=outcome,
        blocks=either.required and outcome in _BLOCKING and not harmless,
        reason=reason,
        baseline=baseline,
        candidate=candidate,
        newly_known=outcome == "known" and reason.startswith(_NEW_AND_KNOWN),
    )


def strictly(pair: Pair) -> Pair:
    """The pair, blocking where it is newly known and required."""
    return pair.model_copy(update={"blocks": pair.blocks or (pair.required and pair.newly_known)})


def _undecided_as_before(baseline: Check | None, candidate: Check | None) -> bool:
    """Whether both checks ran and came to no conclusion, for the same reason: the upgrade takes nothing away."""
    if baseline is None or candidate is None or not (baseline.has_run and candidate.has_run):
        return False
    return {shown(baseline), shown(candidate)} <= {"UNKNOWN", "SKIPPED"} and _said(baseline) == _said(candidate)


def shown(check: Check) -> single.Verdict:
    """What a check showed, whether or not an entry excuses it."""
    return check.detail.excused.verdict if check.detail.excused else check.verdict


def _said(check: Check) -> str:
    excused = check.detail.excused
    reason = (excused.reason if excused else check.reason) or ""
    return reason.strip().partition("\n")[0]


def classify(baseline: Check | None, candidate: Check | None, absence: str = "") -> tuple[Outcome, str]:
    """What became of one check on one model, and why.

    A failure that the baseline does not have is known where an entry describes it for the candidate, and is marked so.
    Cases that both builds measured are held against the larger of their limits, so noise of either build is no
    difference.
    """
    if candidate is None:
        return "removed", f"the candidate does not offer it: {absence}"
    after = shown(candidate)
    if after in ("UNKNOWN", "SKIPPED"):
        return "unknown", _said(candidate)
    outcome, reason = _unexcused(baseline, candidate, absence)
    if candidate.detail.excused and outcome in ("regression", "crash", "timeout"):
        return "known", f"{_NEW_AND_KNOWN}, {candidate.reason} ({reason})"
    return outcome, reason


def _unexcused(baseline: Check | None, candidate: Check, absence: str) -> tuple[Outcome, str]:
    """The same for a candidate that was decided, whatever the known failures say."""
    after = shown(candidate)
    if baseline is None:
        if after in _DEATHS:
            return ("crash" if after == "CRASH" else "timeout"), f"new with the candidate: {_said(candidate)}"
        failing = "" if after == "PASS" else f", and it fails: {_said(candidate)}"
        return "new", f"the baseline does not offer it: {absence}{failing}"
    before = shown(baseline)
    if after in _DEATHS:
        if before in _DEATHS:
            return "known", f"{before} before, {after} now: {_said(candidate)}"
        return ("crash" if after == "CRASH" else "timeout"), _said(candidate)
    if before in ("UNKNOWN", "SKIPPED"):
        if after == "PASS":
            return "pass", f"the baseline could not be decided: {_said(baseline)}"
        return "unknown", f"it fails: {_said(candidate)}; the baseline could not be decided: {_said(baseline)}"
    if before in _DEATHS:
        if after == "PASS":
            return "fixed", f"{before} before: {_said(baseline)}"
        return "known", f"{before} before, it fails now: {_said(candidate)}"
    return _by_deviation(baseline, candidate)


@dataclass(frozen=True)
class _Common:
    """A case that both builds measured, and how they differ there; see `_change`."""

    before: MeasuredCase
    after: MeasuredCase
    change: set[str]


def _in_common(befores: Mapping[str, MeasuredCase], afters: Mapping[str, MeasuredCase], sign: int) -> list[_Common]:
    both = [(befores[name], after) for name, after in afters.items() if name in befores]
    return [_Common(old, new, _change(old, new, sign)) for old, new in both]


def _sign(check: Check) -> int:
    return -1 if check.wants_more else 1


def _by_deviation(baseline: Check, candidate: Check) -> tuple[Outcome, str]:
    """Of two checks that were measured to their end: by the cases that both measured."""
    befores, afters, sign = _measured(baseline), _measured(candidate), _sign(candidate)
    common = _in_common(befores, afters, sign)
    refused = _refusals(baseline, candidate)
    failing_before, failing = (sum(side in each.change for each in common) for side in ("before", "after"))
    told = f"{failing} of {len(common)} cases fail, {failing_before} before{refused}"
    worse = _worst_new_failure(common, sign)
    if worse is None and failing:
        return "known", told
    if worse is not None:
        old, new = worse.before, worse.after
        limit, floor = _joint(old, new, sign)
        return "regression", (
            f"deviation {figure(new.deviation)}, before {figure(old.deviation)}; floor of both {figure(floor)}, "
            f"accepted {'from' if candidate.wants_more else 'up to'} {figure(abs(limit))} ({told}): {_said(candidate)}"
        )
    alone = any(case.verdict == "FAIL" for name, case in afters.items() if name not in befores)
    if alone or any("edge" in each.change for each in common):
        why = "in cases that the baseline refuses" if alone else "by less than the noise beyond the baseline"
        return "unknown", f"it fails {why}{refused}: {_said(candidate)}"
    if failing_before:
        return "fixed", f"{told}; before: {_said(baseline)}"
    if "FAIL" in (shown(baseline), shown(candidate)):
        return "pass", f"within the noise of the other build{refused}"
    return "pass", refused.removeprefix("; ")


def _worst_new_failure(common: Sequence[_Common], sign: int) -> _Common | None:
    """Of the cases that the candidate alone fails the one that deviates most."""
    new = [each for each in common if each.change == {"after"}]
    return max(new, key=lambda each: _value(each.after, sign), default=None)


def case_to_look_at(baseline: Check, candidate: Check, outcome: Outcome) -> dict[str, Any] | None:
    """The case that shows a difference best, None where the check names none."""
    sign = _sign(candidate)
    worse = _worst_new_failure(_in_common(_measured(baseline), _measured(candidate), sign), sign)
    case: dict[str, Any] | None = candidate.case
    if outcome == "fixed":
        case = baseline.case
    elif worse and worse.after.case:
        case = worse.after.case
    return case


def _measured(check: Check) -> dict[str, MeasuredCase]:
    """The cases that were measured to their end, by the case; the check itself where it keeps no list."""
    if check.detail.cases is None:
        whole = MeasuredCase(
            case=None, verdict=shown(check), deviation=check.deviation, floor=check.floor, limit=check.limit
        )
        return {"": whole}
    return {
        json.dumps(case.case, sort_keys=True): case for case in check.detail.cases if case.verdict in ("PASS", "FAIL")
    }


def _change(before: MeasuredCase, after: MeasuredCase, sign: int) -> set[str]:
    """Which of both builds deviates beyond the wider limit; "edge" where only the candidate does, by less than the noise.

    `sign` is -1 where more is better.
    """
    limit, floor = _joint(before, after, sign)
    beyond = {name for name, case in (("before", before), ("after", after)) if _value(case, sign) > limit}
    if len(beyond) == 1 and not abs(_value(after, sign) - _value(before, sign)) > floor:
        return {"edge"} if beyond == {"after"} else set()
    return beyond


def _joint(before: MeasuredCase, after: MeasuredCase, sign: int) -> tuple[float, float]:
    """The wider limit and the larger floor of both builds."""
    limits = [sign * case.limit if case.limit is not None else 0.0 for case in (before, after)]
    return max(limit if math.isfinite(limit) else 0.0 for limit in limits), max(before.floor or 0.0, after.floor or 0.0)


def _value(case: MeasuredCase, sign: int) -> float:
    """What a case deviates by, more always being worse."""
    if case.deviation is None:
        return -math.inf if case.verdict == "PASS" else math.inf
    return math.inf if math.isnan(case.deviation) else sign * case.deviation


def _refusals(baseline: Check, candidate: Check) -> str:
    """What one build refuses that the other takes, in words; cases must not go missing silently."""
    counts = [sum(case.verdict == "SKIPPED" for case in check.detail.cases or ()) for check in (baseline, candidate)]
    if not any(counts):
        return ""
    reasons = {
        case.reason for check in (baseline, candidate) for case in check.detail.cases or () if case.verdict == "SKIPPED"
    }
    return f"; cases that cannot be taken: {counts[1]}, before {counts[0]} ({'; '.join(sorted(map(str, reasons)))})"


# -- the whole


_DIRECTIONS = {
    "XB-01": "states of the baseline in the candidate",
    "XB-02": "states of the candidate in the baseline",
    "XB-03": "files, either way",
    "XB-04": "partial states, either way",
}


def _models_by_fate(pairs: Iterable[Pair]) -> dict[str, dict[str, list[str]]]:
    """For each direction the models by what became of the states that one build saved and the other loaded."""
    told: dict[str, dict[str, list[str]]] = {}
    for id, group in by_id(pairs):
        for pair in group if id in _DIRECTIONS else ():
            fate = pair.reason if pair.outcome == "pass" else pair.outcome.upper()
            told.setdefault(_DIRECTIONS[id], {}).setdefault(fate, []).append(pair.model)
    return told


def fates(pairs: Iterable[Pair]) -> dict[str, str]:
    """For each direction what became of the states that one build saved and the other loaded, in words."""
    return {
        direction: ", ".join(
            f"{fate} on all {len(names)} models" if len(models) == 1 else f"{fate} on {', '.join(names)}"
            for fate, names in models.items()
        )
        for direction, models in _models_by_fate(pairs).items()
    }


def answered(comparison: Comparison, problems: Sequence[str] = ()) -> Comparison:
    """The comparison with its answer, and `problems` in the surroundings, which leave none."""
    comparison = comparison.model_copy(update={"states": fates(comparison.pairs)})
    counts, speeds = (Counter(each.outcome for each in items) for items in (comparison.pairs, comparison.speeds))
    judged: list[Pair | Speed] = [*comparison.pairs, *comparison.speeds]
    blocking = [each for each in judged if each.blocks]
    code: Literal[0, 1, 2]
    if problems:
        code, opening = 2, f"NO ANSWER: {'; '.join(problems)}"
    elif comparison.death is not None:
        code, opening = 1, f"MAY NOT UPGRADE: crash: loading the candidate ends the process ({comparison.death})"
    elif not any(pair.required for pair in comparison.pairs):
        code, opening = 2, "NO ANSWER: no required check was compared; choose other checks or models"
    elif blocking:
        code, opening = 1, f"MAY NOT UPGRADE: {in_short(_named(blocking))}"
    else:
        code, opening = 0, "MAY UPGRADE"
    fixed, known = (_with(comparison, outcome) for outcome in ("fixed", "known"))
    new = [pair for pair in known if pair.newly_known]
    broken = [pair for pair in known if pair not in new]
    parts = [f"fixed: {in_short(_named(fixed))}"] if fixed else []
    parts += [f"new with the candidate, and known: {in_short(_ids(new))}"] if new else []
    parts += [f"still broken: {len(broken)} ({in_short(_ids(broken))})"] if broken else []
    parts += _tally({name: count for name, count in counts.items() if name not in ("fixed", "known")})
    parts += [f"speed and size: {', '.join(_tally(speeds))}"] if speeds else []
    parts += [
        f"{direction}: {', '.join(f'{fate} on {len(names)}' for fate, names in models.items())}"
        for direction, models in _models_by_fate(comparison.pairs).items()
    ]
    line = f"{opening}{': ' if code == 0 else '; '}{'; '.join(parts)}" if parts else opening
    answer = Answer(exit_code=code, line=line, counts={name: counts[name] for name in OUTCOMES})
    notes = (*comparison.notes, *problems)
    return comparison.model_copy(update={"answer": answer, "notes": tuple(jsonable(notes))})


def _tally(counts: Mapping[Outcome, int]) -> list[str]:
    return [f"{counts[name]} {name}" for name in OUTCOMES if counts.get(name)]


def _with(comparison: Comparison, outcome: str) -> list[Pair]:
    return [pair for pair in comparison.pairs if pair.outcome == outcome]


def _ids(pairs: Iterable[Pair]) -> list[str]:
    return list(dict.fromkeys(pair.id for pair in pairs))


def _named(items: Iterable[Pair | Speed]) -> list[str]:
    """By outcome, the worst first, then by what it concerns: "regression: RP-04 on holo3-mini, qwen35-mini"."""
    models: dict[tuple[Outcome, str], list[str]] = {}
    for each in sorted(items, key=lambda each: -OUTCOMES.index(each.outcome)):
        what = each.id if isinstance(each, Pair) else each.quantity
        models.setdefault((each.outcome, what), []).append(each.model)
    return [
        f"{outcome}: {what} on {', '.join(names)}" if outcome != "fixed" else f"{what} on {', '.join(names)}"
        for (outcome, what), names in models.items()
    ]


def changes(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """The changes to read of first, the worst first; those of one check with one outcome together."""
    groups: dict[tuple[Outcome, str], list[Pair]] = {}
    for pair in pairs:
        if pair.is_change:
            groups.setdefault((pair.outcome, pair.id), []).append(pair)
    return sorted(groups.values(), key=lambda group: -OUTCOMES.index(group[0].outcome))


def by_id(pairs: Iterable[Pair]) -> Iterator[tuple[str, list[Pair]]]:
    """The pairs of each check, in their order."""
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.id, []).append(pair)
    yield from groups.items()


def speed_cells(speed: Speed) -> tuple[str, ...]:
    """Quantity, model, both values, ratio, interval, limit, in words."""
    interval = (
        "exact"
        if speed.kind == "count"
        else "-"
        if speed.low is None or speed.high is None
        else f"{speed.low:.2f} .. {speed.high:.2f}"
    )
    return (
        speed.quantity,
        speed.model,
        amount(speed.baseline, speed.unit),
        amount(speed.candidate, speed.unit),
        "-" if speed.ratio is None else f"{speed.ratio:.2f}",
        interval,
        f"{speed.limit:g}",
    )


def amount(value: float | None, unit: str) -> str:
    """A value with its unit, short."""
    if value is None:
        return "-"
    if unit == "s":
        return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit == "bytes" and value >= 1e4:
        return f"{value / 2**20:.2f} MiB" if value >= 1e6 else f"{value / 2**10:.1f} KiB"
    return f"{value:,.10g} {unit}"
