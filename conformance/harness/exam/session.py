"""What a whole run needs to know before its first check: the build, the models, what applies to what."""

from __future__ import annotations

import hashlib
import math
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from conformance.harness import builds
from conformance.harness.bench import Acquaintance, Floor, Setup, meet, try_on_device
from conformance.harness.contract.census import GGUFError, census_of_gguf
from conformance.harness.contract.known import BuildName, Known, match
from conformance.harness.contract.load import Contract
from conformance.harness.contract.needs import Subject, applies, kinds_of, undecided
from conformance.harness.contract.schema import Invariant
from conformance.harness.engine import BuildError, DecodeError, EngineError, ModelError, StateError
from conformance.harness.engine.child import Child, ChildDeath
from conformance.harness.faults import FAULTS
from conformance.harness.report.results import Check, NotApplicable, Verdict
from fixtures import auto, models
from fixtures.trained import TRAINED, fixture_path

from .budget import Sizing, fit
from .examination import floors_of

GIB = 1 << 30
_FIRST_LOOK_SECONDS = 120.0
_LOOKERS = 2
_EVERY = "all"


class UsageError(Exception):
    """Something the user can put right; one line: what, where, what to do."""


@dataclass(frozen=True)
class Shard:
    """One of `of` parts of a run, counted from 1. Which check is in which depends on its id and its model alone."""

    number: int
    of: int

    @classmethod
    def named(cls, text: str) -> Shard:
        """The shard that reads "1/3". ValueError where the text is none."""
        number, _, of = text.partition("/")
        if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
            raise ValueError("give it as I/N, with I from 1 to N")
        return cls(int(number), int(of))

    def holds(self, id: str, model: str) -> bool:
        """Whether a check on a model belongs to this part."""
        return zlib.crc32(f"{id} {model}".encode()) % self.of == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        models: paths of GGUFs, or names of fixture models, to examine instead of all fixture models.
        architectures: to examine a model of, made on the spot, instead of all fixture models; "all" for those whose memory
            is more than plain attention.
        seed: of all draws.
        cases: recorded cases by (id, model), to run instead of drawing.
        shard: the part of the checks to run, None for all of them.

    """

    build: str
    models: tuple[str, ...]
    profile: str
    report: Path
    seed: int = 0
    fault: str | None = None
    n_threads: int = 1
    cases: Mapping[tuple[str, str], Sequence[dict[str, Any]]] | None = None
    budget_minutes: float | None = None
    n_workers: int = 1
    shard: Shard | None = None
    architectures: tuple[str, ...] = ()
    started: float = field(default_factory=time.time)

    def takes(self, id: str, model: str) -> bool:
        """Whether this run is to make a check on a model."""
        return self.shard is None or self.shard.holds(id, model)

    @property
    def deadline(self) -> float:
        """When the budget ends, in seconds since the epoch."""
        return math.inf if self.budget_minutes is None else self.started + 60 * self.budget_minutes


@dataclass(frozen=True)
class FirstLook:
    """What became of meeting one model: an acquaintance, or why there is none."""

    subject: Subject
    acquaintance: Acquaintance | None
    verdict: Verdict = "UNKNOWN"
    reason: str = ""


@dataclass(frozen=True)
class Session:
    """A prepared run; picklable, so that every worker process gets the same.

    Attributes:
        identity: the build's identity as JSON-able values.
        looks: one per model, in the order of the report.
        absent: trained models that have not been fetched, each with a sentence that says so.
        unmade: architectures that are not swept, since no model of them could be made, each with the reason.
        expected_failures: pairs of check and model that have an entry among the known failures; their cases need no
            shrinking, since the entry has a small one.

    """

    options: Options
    identity: dict[str, Any]
    looks: tuple[FirstLook, ...]
    sizings: Mapping[tuple[str, str], Sizing | None]
    expected_failures: frozenset[tuple[str, str]] = frozenset()
    absent: Mapping[str, str] = field(default_factory=dict)
    unmade: Mapping[str, str] = field(default_factory=dict)
    _by_name: dict[str, FirstLook] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {look.subject.name: look for look in self.looks})

    def look(self, model: str) -> FirstLook:
        """The first look at a model, by its name in the report."""
        return self._by_name[model]

    def known(self, entries: Iterable[Known], id: str, model: str) -> Known | None:
        """The known failure that concerns a check on a model under this build, or None."""
        return match(entries, id, self.look(model).subject, self._build_name)

    @property
    def _build_name(self) -> BuildName:
        identity = self.identity
        return BuildName(identity["build_number"], identity["package"], identity["package_version"], identity["digest"])

    def expecting(self, entries: Sequence[Known]) -> Session:
        """The same session, told which failures are known."""
        return replace(self, expected_failures=frozenset(pair for pair in self.pairs() if self.known(entries, *pair)))

    def setup(self, model: str) -> Setup:
        """What a child needs to examine a model."""
        return setup_for(self.options, self.look(model).subject)

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs (id, model) to examine, the slowest models first so that parallel workers end together.

        What is measured alone comes last.
        """

        def place(pair: tuple[str, str]) -> tuple[bool, float]:
            acquaintance = self.look(pair[1]).acquaintance
            speed = acquaintance.prefill_tokens_per_second if acquaintance else 0.0
            sizing = self.sizings[pair]
            return sizing is not None and sizing.invariant.alone, speed

        return sorted((pair for pair, sizing in self.sizings.items() if sizing), key=place)

    @property
    def expected_seconds(self) -> float:
        """Wall time that all searches are expected to take; computed from the measured speeds, on `n_workers`.

        What is measured alone takes one process, whatever the number of workers.
        """
        shares = [
            sizing.seconds / (1 if sizing.invariant.alone else self.options.n_workers)
            for sizing in self.sizings.values()
            if sizing
        ]
        return sum(shares)

    def plan(self, contract: Contract) -> tuple[list[Check], list[NotApplicable]]:
        """Every pair of invariant and model: as a check still to run or already without hope, or as not applicable."""
        checks, others = [], []
        for invariant in contract:
            for look in self.looks:
                name = look.subject.name
                if why := _untouched(self.options.profile, contract, invariant, look.subject):
                    others.append(NotApplicable(id=invariant.id, model=name, reason=why))
                    continue
                if not self.options.takes(invariant.id, name):
                    continue
                planned = Check.planned(invariant.id, name, invariant.title, invariant.required)
                if look.acquaintance is None:
                    planned = planned.settled(look.verdict, reason=look.reason)
                elif why := undecided(invariant, look.subject):
                    planned = planned.settled("UNKNOWN", reason=why)
                elif self.sizings[invariant.id, name] is None:
                    reason = f"left out: it does not fit into --budget {self.options.budget_minutes:g}"
                    planned = planned.settled("SKIPPED", reason=reason)
                checks.append(planned)
            named = [name for name in self.absent if name in invariant.models]
            others += [NotApplicable(id=invariant.id, model=name, reason=self.absent[name]) for name in named]
        return checks, others


def file_digest(path: Path) -> str:
    """SHA-256 over the size, the first and the last MiB of a file, first 16 hex digits; quick on a model of any size."""
    size = path.stat().st_size
    total = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        total.update(stream.read(1 << 20))
        stream.seek(max(size - (1 << 20), 0))
        total.update(stream.read())
    return total.hexdigest()[:16]


def setup_for(options: Options, subject: Subject) -> Setup:
    """What a child needs to examine a subject; fixture models go by name, so that a replay works elsewhere."""
    model = subject.name if subject.is_fixture else str(subject.path)
    return Setup(options.build, model, options.fault, options.n_threads)


def child_for(paths: Sequence[Path]) -> Child:
    """A child with room for the largest of the models and a bound on what a corrupt count can allocate."""
    largest = max((path.stat().st_size for path in paths), default=0)
    return Child(memory_limit=8 * GIB + 3 * largest)


def prepare(options: Options, contract: Contract) -> Session:
    """Load the build, write the fixture models, meet every model.

    Raises:
        UsageError: the build cannot be used, a named model is none, or the fault is unknown.

    """
    if options.fault is not None and options.fault not in FAULTS:
        raise UsageError(f"--inject-fault {options.fault!r}: no such fault; choose from {', '.join(FAULTS)}")
    with child_for([]) as child:
        try:
            builds.resolve(options.build)
            identity: dict[str, Any] = child.call(builds.identify, options.build, timeout=_FIRST_LOOK_SECONDS)
        except BuildError as error:
            raise UsageError(str(error)) from None
        except ChildDeath as death:
            raise UsageError(
                f"build {options.build!r}: loading it ended the process ({death}); rebuild it for this machine"
            ) from None
    chosen = options.models or (() if options.architectures else fixtures_here(options.profile))
    made, unmade = architectures(options, contract)
    subjects = [*(subject_of(name) for name in chosen), *made]
    absent = {} if options.models or options.architectures else _absent(options.profile)
    if len({subject.name for subject in subjects}) < len(subjects):
        raise UsageError(f"--model: two models share a name ({', '.join(each.name for each in subjects)}); rename one")
    floors = tuple(sorted({floor for invariant in contract for floor in floors_of(invariant)}))
    paths = [subject.path for subject in subjects]
    with ExitStack() as stack, ThreadPoolExecutor(_LOOKERS) as pool:
        children: SimpleQueue[Child] = SimpleQueue()
        for _ in range(_LOOKERS):
            children.put(stack.enter_context(child_for(paths)))

        def look(subject: Subject) -> FirstLook:
            child = children.get()
            try:
                return _meet(options, subject, floors, child)
            finally:
                children.put(child)

        looks = tuple(pool.map(look, subjects))
    return Session(options, identity, looks, _sized(options, contract, looks), absent=absent, unmade=unmade)


def architectures(options: Options, contract: Contract) -> tuple[list[Subject], dict[str, str]]:
    """The models made for their architecture, and why others cannot be.

    Raises:
        UsageError: no model of an architecture that was asked for by name can be made.

    """
    names = options.architectures
    if not names and not options.models and contract.profiles[options.profile].architectures:
        names = (_EVERY,)
    try:
        if _EVERY in names:
            there, unmade = auto.swept(options.build)
        else:
            there, unmade = [auto.auto_model(name, options.build) for name in names], []
    except (EngineError, OSError) as error:
        raise UsageError(f"--arch: {error}") from None
    for model in there:
        if model.path is None:
            raise UsageError(f"--arch {model.arch}: {model.reason}; `python -m tools.models architectures` lists them")
    subjects = [
        Subject(model.arch, model.path.resolve(), frozenset(model.kinds), is_fixture=False, is_made=True)
        for model in there
        if model.path is not None
    ]
    return subjects, {model.arch: model.reason for model in unmade}


def _absent(profile: str) -> dict[str, str]:
    """Why trained models are not examined, by name."""
    return {
        name: model.absence
        if not model.is_here
        else f"{name} is examined in the profile {' or '.join(model.profiles)}, or with --model {name}"
        for name, model in TRAINED.items()
        if not model.is_here or profile not in model.profiles
    }


def _untouched(profile: str, contract: Contract, invariant: Invariant, subject: Subject) -> str | None:
    """Why a profile does not look at a pair, None where it does."""
    if invariant.alone and not invariant.required and not contract.profiles[profile].timed:
        looking = " or ".join(name for name, each in contract.profiles.items() if each.timed)
        advice = f"run the profile {looking}, or --strict-timing" if looking else "leave --no-timing out"
        return f"{invariant.id} measures times, for which this run of {profile} has none; {advice}"
    return applies(invariant, subject)


def _sized(options: Options, contract: Contract, looks: Sequence[FirstLook]) -> dict[tuple[str, str], Sizing | None]:
    own = options.profile
    swept = contract.profiles[own].architectures or own
    sizings: dict[tuple[str, str], Sizing | None] = {}
    seconds = max(options.deadline - time.time(), 0)
    for alone, n_workers in ((False, options.n_workers), (True, 1)):  # what only informs gets what is left
        pairs = [
            (
                invariant.decoding_at_most(contract.profiles[own].decoded_tokens.most),
                look.acquaintance,
                look.subject.name,
                invariant.examples[swept if look.subject.is_made else own],
            )
            for invariant in contract
            if invariant.alone == alone
            for look in looks
            if look.acquaintance
            and options.takes(invariant.id, look.subject.name)
            and not _untouched(own, contract, invariant, look.subject)
            and not undecided(invariant, look.subject)
        ]
        fitting = fit([(each, known, examples) for each, known, _, examples in pairs], seconds * n_workers)
        sizings |= {(each.id, model): sizing for (each, _, model, _), sizing in zip(pairs, fitting, strict=True)}
        seconds = max(seconds - sum(sizing.seconds for sizing in fitting if sizing) / n_workers, 0)
    return sizings


def fixtures_here(profile: str) -> tuple[str, ...]:
    """The models that a profile examines where none is named: those the suite writes, and trained ones that were fetched."""
    absent = _absent(profile)
    return (*models.names(), *(name for name in TRAINED if name not in absent))


def subject_of(name: str) -> Subject:
    """The model of a path or of a fixture's name, with the kinds of memory that its metadata declares.

    Raises UsageError where there is none.
    """
    is_fixture = name in (*models.names(), *TRAINED) and not Path(name).exists()
    try:
        path = fixture_path(name) if is_fixture else Path(name).expanduser()
    except OSError as error:
        place = f"model cache {models.cache_folder()}: {error.strerror or error}"
        raise UsageError(
            f"{place}; make room there, or set LLAMA_CONFORMANCE_CACHE to a folder that can be written"
        ) from None
    try:
        kinds = kinds_of(census_of_gguf(path))
    except GGUFError as error:
        raise UsageError(f"--model: {error}") from None
    except OSError as error:
        fixtures = ", ".join(models.names())
        raise UsageError(f"--model {name}: {error.strerror}; give the path of a GGUF, or one of {fixtures}") from None
    return Subject(
        name=name if is_fixture else path.stem,
        path=path.resolve(),
        kinds=kinds,
        is_fixture=is_fixture,
        only_named=is_fixture and (name in TRAINED or models.recipe(name).only_named),
    )


def _meet(options: Options, subject: Subject, floors: tuple[Floor, ...], child: Child) -> FirstLook:
    setup = setup_for(options, subject)
    try:
        acquaintance: Acquaintance = child.call(meet, setup, floors, timeout=_FIRST_LOOK_SECONDS)
    except BuildError as error:
        raise UsageError(str(error)) from None
    except ModelError as error:
        if not subject.is_fixture and not subject.is_made:
            raise UsageError(str(error)) from None
        return FirstLook(subject, None, "UNKNOWN", str(error))
    except (DecodeError, StateError) as error:
        return FirstLook(subject, None, "FAIL", f"at the first look at the model a call that must work failed: {error}")
    except ChildDeath as death:
        return FirstLook(subject, None, death.verdict, f"at the first look at the model the build {death}")
    if not acquaintance.remembers:
        reason = "at the first look logits did not depend on what was decoded before, so nothing could be told by them"
        return FirstLook(subject, None, "FAIL", reason)
    capabilities: set[str] = set(acquaintance.capabilities)
    unknown: set[str] = set()
    try:
        if child.call(try_on_device, setup, timeout=_FIRST_LOOK_SECONDS):
            capabilities.add("on_device")
    except ChildDeath:
        unknown.add("on_device")
    known = replace(
        subject,
        kinds=acquaintance.kinds,
        capabilities=frozenset(capabilities),
        unknown_capabilities=frozenset(unknown),
    )
    return FirstLook(known, acquaintance)
