"""Failures that the user of the suite waives: the file given to ``--waivers``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from conformance.harness.contract.load import SpecError, load_file
from conformance.harness.contract.schema import Kind, WaivedFailure, WaivedFailures
from conformance.harness.report.results import Check

Kinds = Mapping[str, Collection[Kind]]
"""The kinds of memory of every model in a run, by the model's name; none where they are not known."""


@dataclass(frozen=True)
class Waiver:
    """A waiver and where it stands (``file:line``)."""

    entry: WaivedFailure
    where: str

    def concerns(self, check: Check, kinds: Kinds) -> bool:
        """Whether the check is one that the waiver names, however it ended."""
        named = self.entry.id in (check.id, check.id.partition("/")[0])
        return named and self.entry.concerns(check.model, kinds.get(check.model, ()))

    def holds(self, today: date) -> bool:
        """Whether its last day is not over."""
        return today <= self.entry.expires


def load_waivers(path: Path, invariants: Collection[str] = ()) -> tuple[Waiver, ...]:
    """The waivers in a YAML file.

    ``invariants`` are the ids of invariants and case families that waivers may name, and with a family its invariant;
    when empty they are not checked. Raises SpecError with every problem found.
    """
    file = load_file(path, WaivedFailures)
    known = dict.fromkeys(name for id in invariants for name in (id.partition("/")[0], id))
    problems = [
        file.unknown(("waivers", number, "id"), "invariant", entry.id, known)
        for number, entry in enumerate(file.content.waivers)
        if known and entry.id not in known
    ]
    if problems:
        raise SpecError(problems)
    return tuple(Waiver(entry, file.where("waivers", number)) for number, entry in enumerate(file.content.waivers))


def waive(waivers: Iterable[Waiver], check: Check, kinds: Kinds, today: date) -> Check:
    """The check as KNOWN where a waiver that still holds names it and the way it failed; else the check itself.

    A CRASH or a TIMEOUT takes a waiver that names that verdict.
    """
    for waiver in waivers:
        entry = waiver.entry
        if check.verdict == entry.verdict and waiver.holds(today) and waiver.concerns(check, kinds):
            return check.excuse(f"waived until {entry.expires}: {entry.reason}", waiver.where)
    return check


def notes(waivers: Iterable[Waiver], checks: Sequence[Check], kinds: Kinds, today: date) -> list[str]:
    """What a run has to say on its waivers, a line each, given its checks at the end.

    Named are waivers that are over, waivers that waived nothing, and every CRASH or TIMEOUT that was waived.
    """
    lines = []
    for waiver in waivers:
        entry, head = waiver.entry, f"{waiver.where}: the waiver of {waiver.entry.id}"
        used = [check for check in checks if check.detail.excused and check.detail.excused.where == waiver.where]
        run = dict.fromkeys(check.model for check in checks if check.has_run and waiver.concerns(check, kinds))
        if not waiver.holds(today):
            lines.append(f"{head} expired on {entry.expires} and waives nothing; remove it or set another date")
        elif not run:
            lines.append(f"{head} was not used: no check that it concerns was run; correct its id, models or kinds")
        elif not used:
            lines.append(f"{head} was not used: no {entry.verdict} on {', '.join(run)}; remove it")
        elif entry.verdict != "FAIL":
            models = ", ".join(check.model for check in used)
            lines.append(f"{head} covers a {entry.verdict} on {models} until {entry.expires}: {entry.reason}")
    return lines
