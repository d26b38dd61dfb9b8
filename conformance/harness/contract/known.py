"""Faults that upstream is known to have: ``specs/known_failures/*.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from conformance.harness.contract.load import SpecError, load_file
from conformance.harness.contract.needs import Subject
from conformance.harness.contract.schema import Builds, KnownFailure, KnownFailures


@dataclass(frozen=True)
class BuildName:
    """What a build is called: llama.cpp's build number, the package it came in, and the digest of its files."""

    number: int | None = None
    package: str | None = None
    version: str | None = None
    digest: str | None = None


@dataclass(frozen=True)
class Known:
    """A known failure, where its entry stands (``file:line``) and its replay script."""

    entry: KnownFailure
    where: str
    replay: Path

    @property
    def reason(self) -> str:
        """How the verdict line names it: "upstream #26695", or that no report was found."""
        number = re.search(r"/(?:issues|pull|discussions)/(\d+)", self.entry.upstream)
        if number:
            return f"upstream #{number[1]}"
        return f"upstream {self.entry.upstream}"

    def explains(self, verdict: str) -> bool:
        """Whether a check that ends with ``verdict`` shows this failure and no other."""
        return verdict == self.entry.verdict

    def cured(self, model: str) -> str:
        """What to say when the check passes on a build that should fail it."""
        return (
            f"{self.where}: {self.entry.id} passes on {model}; fixed? or not met by so few cases? "
            "Run its script before you remove the entry or end its range of builds"
        )


def load_known_failures(folder: Path) -> tuple[Known, ...]:
    """All entries in ``folder``. Raises SpecError with every problem found; an empty folder is none."""
    problems: list[str] = []
    known: list[Known] = []
    for path in sorted(folder.glob("*.yaml")):
        try:
            file = load_file(path, KnownFailures)
        except SpecError as error:
            problems += error.problems
            continue
        for index, entry in enumerate(file.content.failures):
            replay = folder / entry.replay
            if not replay.is_file():
                loc = ("failures", index, "replay")
                problems.append(file.problem(loc, f"{replay} is not there", "add the script that shows the failure"))
            known.append(Known(entry, file.where("failures", index), replay))
    if problems:
        raise SpecError(problems)
    return tuple(known)


def match(entries: Iterable[Known], id: str, subject: Subject, build: BuildName) -> Known | None:
    """The first entry that concerns the check ``id`` on this model under this build.

    An id matches only itself: an entry for a case family does not excuse its siblings, nor one for an invariant its
    families. Whether the entry excuses the verdict is for ``explains`` to say.
    """
    for known in entries:
        entry = known.entry
        if entry.id == id and entry.concerns(subject.name, subject.kinds or ()) and _covers(entry.builds, build):
            return known
    return None


def _covers(builds: Builds, build: BuildName) -> bool:
    number = build.number is not None and _within(builds.build_number, str(build.number))
    package = build.package is not None and _within(builds.packages.get(build.package), build.version)
    return number or package or build.digest in builds.digests


def _within(specifiers: str | None, version: str | None) -> bool:
    if specifiers is None or version is None:
        return False
    try:
        return SpecifierSet(specifiers).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
