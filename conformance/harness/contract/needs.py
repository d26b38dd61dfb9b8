"""Which invariants apply to which models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from conformance.harness.contract.census import ModelCensus
from conformance.harness.contract.schema import CAPABILITIES, KINDS, Invariant, Kind


@dataclass(frozen=True)
class Subject:
    """A model together with what is known about it under one build.

    ``kinds`` names the sequence memories that the model's layers keep. What follows from them is added: ``hybrid``
    means ``attention`` and ``recurrent`` together, and a ``sliding_window`` is a kind of ``attention``.
    ``capabilities`` are known to be there, ``unknown_capabilities`` could not be found out, all others are known to be
    missing. ``kinds`` is None when the model's architecture is not known here. ``is_fixture`` is False for a model that
    the user brought, or that ``is_made`` for its architecture. One that is ``only_named`` is examined where an invariant names it, and not where one says "all".
    """

    name: str
    path: Path
    kinds: frozenset[Kind] | None
    capabilities: frozenset[str] = field(default_factory=frozenset)
    unknown_capabilities: frozenset[str] = field(default_factory=frozenset)
    is_fixture: bool = True
    only_named: bool = False
    is_made: bool = False

    def __post_init__(self) -> None:
        if self.kinds is None:
            return
        kinds = set(self.kinds)
        if "hybrid" in kinds:
            kinds |= {"attention", "recurrent"}
        if "sliding_window" in kinds:
            kinds.add("attention")
        if {"attention", "recurrent"} <= kinds:
            kinds.add("hybrid")
        object.__setattr__(self, "kinds", frozenset(kinds))


def applies(invariant: Invariant, subject: Subject) -> str | None:
    """None when ``invariant`` applies to ``subject``, else a sentence that says why it does not.

    What could not be found out does not rule the pair out; see ``undecided``.
    """
    meant = invariant.models == ("all",) and not subject.only_named
    if subject.is_fixture and not meant and subject.name not in invariant.models:
        return f"{invariant.id} does not list {subject.name}"
    if subject.is_made and invariant.alone:
        return f"{invariant.id} measures times, which mean nothing on a model made for its architecture"
    if invariant.only_listed and subject.name not in invariant.models:
        return f"{invariant.id} is about {_either(invariant.models)} and no other model"
    needs = invariant.needs
    if needs.kinds and subject.kinds is not None and subject.kinds.isdisjoint(needs.kinds):
        return f"needs {_either(KINDS[kind] for kind in needs.kinds)}; {subject.name} has {_memory(subject.kinds)}"
    if subject.kinds and (there := [KINDS[kind] for kind in needs.lacks if kind in subject.kinds]):
        return f"needs a model without {_either(there)}; {subject.name} has it"
    known = subject.capabilities | subject.unknown_capabilities
    missing = [CAPABILITIES[name] for name in needs.capabilities if name not in known]
    if missing:
        return f"needs {' and '.join(missing)}, which this build does not offer for {subject.name}"
    return None


def undecided(invariant: Invariant, subject: Subject) -> str | None:
    """Why it cannot be told whether ``invariant`` applies to ``subject``, or None when it can.

    A pair for which ``applies`` has no objection and ``undecided`` has a reason is UNKNOWN.
    """
    if (invariant.needs.kinds or invariant.needs.lacks) and subject.kinds is None:
        return f"the architecture of {subject.name} is not known here, so neither is the kind of its memory"
    unsure = [CAPABILITIES[name] for name in invariant.needs.capabilities if name in subject.unknown_capabilities]
    return f"cannot find out whether this build offers {' and '.join(unsure)} for {subject.name}" if unsure else None


def kinds_of(census: ModelCensus) -> frozenset[Kind] | None:
    """The kinds of memory that a model's metadata declares, None when its architecture is not known here."""
    if census.attention is None or census.recurrent is None:
        return None
    kinds: dict[Kind, object] = {
        "attention": census.attention_layers,
        "recurrent": census.recurrent_layers,
        "sliding_window": census.sliding_layers,
    }
    return frozenset(kind for kind, layers in kinds.items() if layers)


def _memory(kinds: frozenset[Kind]) -> str:
    if "hybrid" in kinds:
        return KINDS["hybrid"]
    if not kinds:
        return "no sequence memory"
    return f"{' and '.join(words for kind, words in KINDS.items() if kind in kinds)} only"


def _either(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last
