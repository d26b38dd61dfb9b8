"""Joins the results of shards: runs of one suite on one build that divided the checks among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from conformance.harness.report.comparison import OUTCOMES, Comparison, Pair, answered
from conformance.harness.report.outcomes import Outcomes
from conformance.harness.report.results import Results, jsonable
from conformance.harness.report.store import ReportError


def merge(shards: Mapping[str, Results]) -> Results:
    """The results of all shards as one run; keys are the names of the shards in messages and notes.

    A check that is planned in several shards takes the outcome of the one that ran it; of two outcomes the worse stays,
    with the time and cases of both. A setting on which shards differ becomes the list of their values. Notes that not
    every shard has carry the shard's name. A shard that could not write all its results leaves no verdict.

    Raises ReportError when there is no shard, or when shards differ in the build (its digest), the suite, or the
    planted fault.
    """
    if not shards:
        raise ReportError("no results to merge; name the report folders of the shards")
    first, *others = shards.values()
    for noun, facts in (
        ("build digest", {name: shard.build.get("digest") for name, shard in shards.items()}),
        ("suite", {name: shard.suite for name, shard in shards.items()}),
        ("planted fault", {name: shard.settings.get("fault") for name, shard in shards.items()}),
    ):
        _require_equal(noun, facts)
    concerned = {(check.id, check.model) for shard in shards.values() for check in shard.checks}
    pairs = {(pair.id, pair.model): pair for shard in shards.values() for pair in shard.not_applicable}
    joined = Outcomes(
        planned=first.checks,
        build=first.build,
        suite=first.suite,
        settings={**_joined([shard.settings for shard in shards.values()]), "shards": len(shards)},
        not_applicable=[pair for key, pair in pairs.items() if key not in concerned],
    )
    for shard in others:
        for check in shard.checks:
            joined.put(check)
    problems = [f"{name}: {problem}" for name, shard in shards.items() for problem in _problems(shard)]
    problems += _missing([shard.settings.get("shard") for shard in shards.values()])
    return joined.results(_notes(shards), problems)


def merge_comparisons(shards: Mapping[str, Comparison]) -> Comparison:
    """Joins the shards of one gate; keys are their names in messages and notes.

    Of two outcomes of one check the one that blocks stays, else the worse. A shard that is missing leaves no answer.

    Raises ReportError when shards differ in the builds, the suite, the profile, the seed or the planted fault.
    """
    first, *_ = shards.values()
    facts: dict[str, Callable[[Comparison], Any]] = {
        "baseline digest": lambda shard: shard.baseline.get("digest"),
        "candidate digest": lambda shard: shard.candidate.get("digest"),
        "suite": lambda shard: shard.suite,
        **{name: partial(_setting, name) for name in ("profile", "seed", "fault", "selected", "models")},
    }
    for noun, fact in facts.items():
        _require_equal(noun, {name: fact(shard) for name, shard in shards.items()})
    pairs: dict[tuple[str, str], Pair] = {}
    for pair in (pair for shard in shards.values() for pair in shard.pairs):
        earlier = pairs.setdefault((pair.id, pair.model), pair)
        pairs[pair.id, pair.model] = max(earlier, pair, key=lambda each: (each.blocks, OUTCOMES.index(each.outcome)))
    settings = [shard.settings for shard in shards.values()]
    joined = first.model_copy(
        update={
            "settings": {**_joined(settings), "shards": len(shards)},
            "pairs": tuple(pairs.values()),
            "speeds": tuple(speed for shard in shards.values() for speed in shard.speeds),
            "death": next((shard.death for shard in shards.values() if shard.death is not None), None),
            "notes": tuple(dict.fromkeys(f"{name}: {note}" for name, shard in shards.items() for note in shard.notes)),
        }
    )
    return answered(joined, _missing([setting.get("shard") for setting in settings]))


def _setting(name: str, shard: Comparison) -> Any:
    return shard.settings.get(name)


def _missing(named: Sequence[Any]) -> list[str]:
    """What is wrong with the shards that say which they are: "2/3" is the second of three."""
    there = {str(name) for name in named if name is not None}
    wanted = {
        f"{number}/{name.partition('/')[2]}" for name in there for number in range(1, int(name.partition("/")[2]) + 1)
    }
    gone = sorted(wanted - there)
    return [f"shard {', '.join(gone)} is not among them; name the reports of all shards"] if gone else []


def _require_equal(noun: str, facts: Mapping[str, Any]) -> None:
    (first, expected), *others = facts.items()
    for name, found in others:
        if found != expected:
            raise ReportError(
                f"{name}: its {noun} is {_shown(found)}, that of {first} is {_shown(expected)}; "
                "merge only shards of one run on one build"
            )


def _shown(fact: Any) -> str:
    if isinstance(fact, dict):
        return " ".join(str(value) for value in fact.values())
    return "none" if fact is None else str(fact)


def _joined(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mappings joined key by key. Values that differ stand in a list, in the order of the shards; null gives way."""
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for mapping in settings for key in mapping):
        values: list[Any] = []
        for mapping in settings:
            value = mapping.get(key)
            if value is not None and value not in values:
                values.append(value)
        if values and all(isinstance(value, dict) for value in values):
            joined[key] = _joined(values)
        else:
            joined[key] = values if len(values) > 1 else next(iter(values), None)
    return joined


def _problems(shard: Results) -> list[str]:
    """What kept a shard from a verdict: the notes that its verdict line repeats."""
    return [note for note in shard.notes if shard.summary.exit_code == 2 and note in shard.summary.line]


def _notes(shards: Mapping[str, Results]) -> list[str]:
    common = set.intersection(*(set(shard.notes) for shard in shards.values()))
    notes = [
        note if note in common else f"{name}: {note}"
        for name, shard in shards.items()
        for note in shard.notes
        if note not in _problems(shard)
    ]
    return list(dict.fromkeys(jsonable(notes)))
