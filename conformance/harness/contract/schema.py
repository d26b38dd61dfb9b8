"""The shape of the files in ``specs/``: documents, profiles, invariants and known failures.

Validation is strict: no unknown key and no conversion between types. A field's description is what to write there;
error lines end with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import date
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, TypeVar, get_args

from hypothesis import strategies as st
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from conformance.harness.prompts.scaling import decoded_at_most, ended_within
from conformance.harness.prompts.strategies import extremes, transcripts
from conformance.harness.prompts.transcript import Transcript

from .entry import Entry, wrong

Kind = Literal["attention", "recurrent", "hybrid", "sliding_window"]
Capability = Literal[
    "partial_state",
    "on_device",
    "state_files",
    "can_shift",
    "rollback",
    "multi_dimensional_positions",
    "trained_weights",
    "high_level",
    "other_build",
    "native_tail",
    "native_kvarn",
    "images",
]

KINDS: dict[Kind, str] = {
    "attention": "attention",
    "recurrent": "a recurrent state",
    "hybrid": "attention beside a recurrent state",
    "sliding_window": "a sliding window",
}
"""Kinds of sequence memory, in words that follow "needs" and "has"."""

CAPABILITIES: dict[Capability, str] = {
    "partial_state": "partial saving (PARTIAL_ONLY)",
    "on_device": "saving inside the context (ON_DEVICE)",
    "state_files": "saving to and loading from files",
    "can_shift": "position shifts (can_shift)",
    "rollback": "rollback of a recurrent state (n_rs_seq > 0)",
    "multi_dimensional_positions": "multi-dimensional positions (M-RoPE)",
    "trained_weights": "weights that expect real text more than chance does",
    "high_level": "the high-level llama_cpp.Llama",
    "other_build": "a second build to exchange states with, as tools.gate has",
    "native_tail": "a precision tail of the build's own",
    "native_kvarn": "KVarN cache types of the build's own",
    "images": "images through libmtmd and a vision tower (mmproj)",
}
"""What a build may be able to do with a model, in words that follow "needs"."""

INVARIANT_ID = r"[A-Z]{2}-\d{2}"
_SLUG = r"[a-z0-9]+(-[a-z0-9]+)*"
CHECK_ID = f"{INVARIANT_ID}(/{_SLUG})?"

Item = TypeVar("Item")


def _distinct(items: tuple[Item, ...]) -> tuple[Item, ...]:
    repeated = [item for number, item in enumerate(items) if item in items[:number]]
    if repeated:
        raise wrong(f"{repeated[0]!r} stands there twice")
    return items


def _distinct_ids(families: tuple[Family, ...]) -> tuple[Family, ...]:
    _distinct(tuple(family.id for family in families))
    return families


def _some(items: tuple[Item, ...]) -> tuple[Item, ...]:
    if not items:
        raise wrong("found an empty list")
    return items


def _rising(bounds: tuple[int, int]) -> tuple[int, int]:
    low, high = bounds
    if low > high:
        raise wrong(f"the range runs backwards, {low} is more than {high}")
    return bounds


def _model_names(names: Any) -> Any:
    if names == "all":
        return ("all",)
    if not isinstance(names, list):
        raise wrong(f"found {names!r}")
    if not names or "all" in names:
        raise wrong("found a list that is empty or names all")
    return tuple(names)


def _specifiers(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise wrong(f"{text!r} is not a version range") from None
    return text


def _day(text: Any) -> date:
    try:
        return date.fromisoformat(text)
    except (TypeError, ValueError):
        raise wrong(f"{text} is not a date") from None


def _upstream(text: str) -> str:
    searched = re.fullmatch(r"none found \(searched (\d{4}-\d{2}-\d{2})\)", text)
    if searched:
        _day(searched[1])
    elif not re.fullmatch(r"https?://\S+", text):
        raise wrong(f"{text!r} is neither a link nor a search that found none")
    return text


def _beside(text: str) -> str:
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts:
        raise wrong(f"{text!r} leaves the folder")
    return text


Line = Annotated[str, Field(min_length=1, pattern=r"^\S.*$", description="one line of text")]
Text = Annotated[str, Field(min_length=1, description="some text")]
Count = Annotated[int, Field(ge=1, description="a whole number from 1 up")]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False, description="seconds, more than 0")]
Range = Annotated[str, Field(description='a range such as ">=0.3.36,<0.4", quoted'), AfterValidator(_specifiers)]
ModelNames = Annotated[
    tuple[str, ...],
    BeforeValidator(_model_names),
    AfterValidator(_distinct),
    Field(description="a list of fixture model names, or the word all"),
]


class Document(Entry):
    """A published text that invariants are taken from."""

    title: Line


class Documents(Entry):
    """``specs/documents.yaml``."""

    documents: dict[str, Document]


class DecodedTokens(Entry):
    """The most tokens that a check decodes for one drawn transcript, over all its contexts."""

    most: Count
    because: Text


class Profile(Entry):
    """How long a run may look: one of the named effort levels.

    ``shrink_seconds`` bounds the search for a smaller failing case, ``example_timeout_seconds`` a single drawn case and
    ``check_timeout_seconds`` one invariant on one model with all its cases. ``architectures`` names the profile whose
    number of cases a model gets that was made for its architecture; where it is named, the run sweeps all architectures.
    ``timed`` says whether invariants that are measured ``alone`` and only inform are looked at.
    """

    purpose: Line
    shrink_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False, description="seconds, 0 or more")]
    example_timeout_seconds: Seconds
    check_timeout_seconds: Seconds
    decoded_tokens: DecodedTokens
    architectures: Line | None = None
    timed: bool = True


class Profiles(Entry):
    """``specs/profiles.yaml``."""

    default: Line
    profiles: dict[str, Profile]

    @model_validator(mode="after")
    def _default_exists(self) -> Profiles:
        if self.default not in self.profiles:
            raise wrong(f"no profile {self.default!r}", f"choose the default from {', '.join(self.profiles)}")
        for profile in self.profiles.values():
            if profile.architectures is not None and profile.architectures not in self.profiles:
                raise wrong(f"no profile {profile.architectures!r}", f"choose from {', '.join(self.profiles)}")
        return self


class Counted(Entry):
    """A count that the gate compares exactly."""

    unit: Line
    because: Text


class Timed(Counted):
    """A measure that varies: up to which ratio of the candidate to the baseline it is no regression."""

    limit: Annotated[float, Field(gt=1, allow_inf_nan=False, description="a ratio above 1")]


class Performance(Entry):
    """What the gate measures of speed and size.

    A round prefills to each of ``depths`` tokens in turn, in micro-batches of ``ubatch``, and decodes ``decoded_tokens`` single
    ones there. ``repeats`` is how often a round saves and restores; ``detour_tokens`` lie between a checkpoint and the way
    back to it, and the last ``taken_back_tokens`` of them are taken back alone. A round that has no end after ``timeout_seconds`` hangs.
    ``rounds`` are paired rounds for every profile.
    """

    models: ModelNames
    depths: Annotated[tuple[Count, ...], AfterValidator(_distinct), Field(description="a list of depths in tokens")]
    ubatch: Count
    decoded_tokens: Count
    repeats: Count
    detour_tokens: Count
    taken_back_tokens: Count
    timeout_seconds: Seconds
    rounds: dict[str, Count]
    counts: dict[str, Counted]
    measures: dict[str, Timed]


class SecondLooks(Entry):
    """How the gate looks again at what differs: at ``most`` differences, with ``patience`` times the profile's timeout for a case."""

    most: Count
    patience: Annotated[float, Field(ge=1, allow_inf_nan=False, description="a factor from 1 up")]
    because: Text


class PerformanceFile(Entry):
    """``specs/performance.yaml``."""

    performance: Performance
    second_looks: SecondLooks


class Source(Entry):
    """Where an invariant is claimed. ``document`` defaults to the document of the file."""

    document: str | None = None
    section: Line


class Needs(Entry):
    """What a model and a build must have for an invariant to mean something.

    Any one of ``kinds`` is enough (none named: every kind), and none of those it ``lacks`` may be there; all
    ``capabilities`` are needed.
    """

    kinds: Annotated[tuple[Kind, ...], AfterValidator(_distinct), Field(description="a list of kinds")] = ()
    lacks: Annotated[tuple[Kind, ...], AfterValidator(_distinct), Field(description="a list of kinds")] = ()
    capabilities: Annotated[
        tuple[Capability, ...], AfterValidator(_distinct), Field(description="a list of capabilities")
    ] = ()


_BOUNDS = "two whole numbers, [lowest, highest]"
Bounds = Annotated[tuple[int, int], Field(description=_BOUNDS), AfterValidator(_rising)]


class TranscriptBounds(Entry):
    """What transcripts are drawn from, each a closed range: lengths in tokens, sides of images in merged patches.

    What is left out is drawn from the widest range that is searched anywhere. A transcript that is ``only_counted`` is
    never decoded. Of any other only the first steps are kept, as many as decode ``most_decoded_tokens`` at most (one at
    least); where that is not given, the profile says it.
    """

    preamble_tokens: Bounds = (1, 2000)
    steps: Bounds = (1, 100)
    text_tokens: Bounds = (0, 400)
    image_width: Bounds = (1, 60)
    image_height: Bounds = (1, 34)
    only_counted: bool = False
    most_decoded_tokens: Count | None = None

    @property
    def decoded_tokens(self) -> tuple[int, int]:
        """How many tokens a check decodes for the smallest and for the largest transcript; 0 where it only counts."""
        if self.only_counted:
            return 0, 0
        bounds = (self.preamble_tokens, self.steps, self.text_tokens, self.image_width, self.image_height)
        least, most = (decoded_at_most(task) for task in extremes(*bounds))
        return least, most if self.most_decoded_tokens is None else max(least, min(most, self.most_decoded_tokens))

    def decoding_at_most(self, tokens: int) -> TranscriptBounds:
        """The same with fewer tokens to decode, or as they are where they already were fewer."""
        if self.only_counted:
            return self
        return self.model_copy(update={"most_decoded_tokens": min(self.most_decoded_tokens or tokens, tokens)})

    def strategy(self) -> st.SearchStrategy[Transcript]:
        """Draws from these bounds."""
        drawn = self._drawn()
        most = self.most_decoded_tokens
        return drawn if self.only_counted or most is None else drawn.map(lambda task: ended_within(task, most))

    def _drawn(self) -> st.SearchStrategy[Transcript]:
        return transcripts(
            preamble=self.preamble_tokens,
            steps=self.steps,
            text=self.text_tokens,
            width=self.image_width,
            height=self.image_height,
        )


class Space(Entry):
    """What one parameter is drawn from: every integer of a closed range, a list of choices, or transcripts.

    Of a range that is ``longest`` the highest alone is drawn; a budget may lower it down to the lowest.
    """

    range: Annotated[
        tuple[int, int] | None,
        Field(description=_BOUNDS),
        AfterValidator(lambda bounds: bounds and _rising(bounds)),
    ] = None
    longest: bool = False
    transcript: Annotated[TranscriptBounds | None, Field(description="a mapping of bounds, or {}")] = None
    choices: Annotated[
        tuple[bool | int | str, ...] | None,
        Field(description="a list of numbers, words, or true and false"),
        AfterValidator(lambda choices: choices if choices is None else _distinct(_some(choices))),
    ] = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Space:
        if [self.range, self.choices, self.transcript].count(None) != 2:
            raise wrong("holds none or several of range, choices and transcript", "write one of them")
        if self.longest and self.range is None:
            raise wrong("longest stands without a range", "drop it")
        return self

    def strategy(self) -> st.SearchStrategy[Any]:
        """Draws from this space; shrinks towards the low end of the range, the first choice, a transcript of one step."""
        if self.transcript is not None:
            return self.transcript.strategy()
        if self.range is not None:
            low, high = self.range
            return st.just(high) if self.longest else st.integers(low, high)
        return st.sampled_from(self.choices or ())


class Accept(Entry):
    """When a measured deviation passes.

    ``bitwise``: the same bits, for tensors. ``exact``: the same numbers, for counts and sizes. ``within_floor``: at
    most ``factor`` times the noise of kind ``floor`` that was measured on the same model and build. ``beyond_floor``: at
    least that, for what must be seen to deviate. ``at_most``, ``at_least``: no more or no less than ``bound``, in the unit
    of the quantity. A figure that comes with an interval passes when all of the interval does, fails when none of it
    does, and is UNKNOWN otherwise.
    """

    quantity: Literal["logits", "state", "bytes", "layers", "rows", "kld", "share", "time"]
    rule: Literal["bitwise", "exact", "within_floor", "beyond_floor", "at_most", "at_least"]
    factor: Annotated[
        float | None, Field(ge=1, allow_inf_nan=False, description="how many times the floor, 1 or more")
    ] = None
    floor: Literal["repeat", "threads", "ubatch"] | None = None
    bound: Annotated[float | None, Field(ge=0, allow_inf_nan=False, description="a number from 0 up")] = None
    because: Text

    @model_validator(mode="after")
    def _factor_and_floor(self) -> Accept:
        for key, given, rules in (
            ("factor", self.factor, ("within_floor", "beyond_floor")),
            ("floor", self.floor, ("within_floor", "beyond_floor")),
            ("bound", self.bound, ("at_most", "at_least")),
        ):
            wanted = self.rule in rules
            if (given is not None) != wanted:
                does, todo = ("needs", "add it") if wanted else ("takes no", "drop it")
                raise wrong(f"the rule {self.rule} {does} {key}", todo)
        return self

    @property
    def wants_more(self) -> bool:
        """Whether the limit is the smallest deviation that passes, and not the largest."""
        return self.rule in ("at_least", "beyond_floor")

    def limit(self, floor: float) -> float:
        """The last deviation that passes, given the measured noise floor (same unit as the deviation)."""
        if self.bound is not None:
            return self.bound
        return 0.0 if self.factor is None else self.factor * floor

    def bounds(self, floor: float) -> tuple[float, float]:
        """The smallest and the largest deviation that pass."""
        return (self.limit(floor), math.inf) if self.wants_more else (-math.inf, self.limit(floor))

    def holds(self, deviation: float, floor: float) -> bool:
        """Whether ``deviation`` passes. A deviation that is not a number, or a floor that is not finite, never does."""
        limit = self.limit(floor)
        return math.isfinite(floor) and (limit <= deviation < math.inf if self.wants_more else deviation <= limit)


class Ceiling(Entry):
    """The most noise that a limit may be built on, as NMSE of logits and of the worst layer of a state."""

    logits: Annotated[float, Field(gt=0, allow_inf_nan=False, description="a number above 0")]
    state: Annotated[float, Field(gt=0, allow_inf_nan=False, description="a number above 0")]
    because: Text

    def of(self, quantity: str) -> float:
        """The ceiling for a quantity."""
        return self.state if quantity == "state" else self.logits


Weights = Literal["float32", "narrower"]


class NoiseCeilings(Entry):
    """``specs/noise.yaml``: ceilings by the type of a model's weights."""

    ceilings: dict[Weights, Ceiling]

    @model_validator(mode="after")
    def _complete(self) -> NoiseCeilings:
        missing = [weights for weights in get_args(Weights) if weights not in self.ceilings]
        if missing:
            raise wrong(f"no ceiling for {' and '.join(missing)} weights", "add it")
        return self


class Figure(Entry):
    """A figure an invariant is checked against, and how far to trust it."""

    value: Annotated[bool | int | float | str, Field(description="a number, a word, true or false")]
    unit: Line | None = None
    label: Literal["stated", "derived", "assumed"]
    source: Line


Search = dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", description="lower-case words joined by _")], Space]


class Family(Entry):
    """One family of cases of an invariant, with a verdict of its own: ``SM-01/rollback-whole-last-batch``.

    What is left out is the invariant's; only ``search`` is the family's alone.
    """

    id: Annotated[str, Field(pattern=f"^{_SLUG}$", description="lower-case words joined by -")]
    title: Line
    needs: Needs | None = None
    only_listed: bool | None = None
    models: ModelNames | None = None
    search: Search = Field(default_factory=dict)
    examples: dict[str, Count] | None = None
    accept: Accept | None = None
    timeout_seconds: Seconds | None = None


class Invariant(Entry):
    """One statement that must hold, and how it is searched and judged.

    ``accept_reordered`` replaces ``accept`` for cases in which both sides hold the same cells in another order. ``examples``
    gives the number of drawn cases for every profile. ``timeout_seconds`` replaces the profile's timeout
    for one drawn case. ``only_listed`` keeps it to the models that it lists where any other would do too: one that the user
    brought. ``alone`` says that it measures time, so nothing else may run meanwhile. With ``families`` each of these is a check of its own; beside them the invariant itself is one only
    where it has a ``search``.
    """

    id: Annotated[str, Field(pattern=f"^{INVARIANT_ID}$", description="an id such as RP-01")]
    title: Line
    statement: Text
    source: Source
    needs: Needs = Needs()
    models: ModelNames
    search: Search = Field(default_factory=dict)
    examples: dict[str, Count]
    accept: Accept
    accept_reordered: Accept | None = None
    required: bool
    timeout_seconds: Seconds | None = None
    only_listed: bool = False
    alone: bool = False
    figures: dict[str, Figure] = Field(default_factory=dict)
    families: Annotated[tuple[Family, ...], AfterValidator(_distinct_ids)] = ()

    def decoding_at_most(self, tokens: int) -> Invariant:
        """The same with no more than so many tokens to decode for a drawn transcript."""
        search = {
            name: space.model_copy(update={"transcript": space.transcript.decoding_at_most(tokens)})
            if space.transcript
            else space
            for name, space in self.search.items()
        }
        return self if search == self.search else self.model_copy(update={"search": search})

    def checks(self) -> tuple[Invariant, ...]:
        """What a run judges one by one: the invariant, or its families as invariants with ids such as SM-01/a-family."""
        own = (self.model_copy(update={"families": ()}),) if self.search or not self.families else ()
        return (*own, *(self._family(family) for family in self.families))

    def _family(self, family: Family) -> Invariant:
        given = {name: value for name in Family.model_fields if (value := getattr(family, name)) is not None}
        return self.model_copy(update={**given, "id": f"{self.id}/{family.id}", "families": ()})


class Topic(Entry):
    """A spec file ``specs/<topic>.yaml``."""

    topic: Line
    document: Line
    invariants: Annotated[tuple[Invariant, ...], AfterValidator(_some), Field(description="a list of invariants")]


class Builds(Entry):
    """Which builds show a known failure: those that any of the three ways of naming a build fits.

    Attributes:
        build_number: of llama.cpp itself, whatever package the build came in.
        packages: versions by package, for builds whose number is not known.
        digests: of the libraries.

    """

    build_number: Range | None = None
    packages: dict[str, Range] = Field(default_factory=dict)
    digests: Annotated[tuple[str, ...], AfterValidator(_distinct), Field(description="a list of digests")] = ()

    @model_validator(mode="after")
    def _names_something(self) -> Builds:
        if self.build_number is None and not self.packages and not self.digests:
            raise wrong("names no build", "write build_number, packages, or digests")
        return self


class Measured(Entry):
    """What was seen when a known failure was entered; a crash has no deviation."""

    deviation: Annotated[float | None, Field(ge=0, description="a number from 0 up")] = None
    floor: Annotated[float | None, Field(ge=0, description="a number from 0 up")] = None
    build: Line


class Excuse(Entry):
    """How a check fails and on which models, so that the failure counts as known.

    The entry concerns a model that is among ``models`` or has one of ``kinds``.
    """

    id: Annotated[str, Field(pattern=f"^{CHECK_ID}$", description="an id such as RP-04 or SM-01/some-case-family")]
    verdict: Literal["FAIL", "CRASH", "TIMEOUT"] = "FAIL"
    models: Annotated[tuple[str, ...], AfterValidator(_distinct), Field(description="a list of model names")] = ()
    kinds: Annotated[tuple[Kind, ...], AfterValidator(_distinct), Field(description="a list of kinds")] = ()

    def concerns(self, model: str, kinds: Iterable[Kind]) -> bool:
        """Whether a model of that name and those kinds of memory is meant."""
        return model in self.models or not set(self.kinds).isdisjoint(kinds)

    @model_validator(mode="after")
    def _concerns_something(self) -> Excuse:
        if not self.models and not self.kinds:
            raise wrong("concerns no model", "write models or kinds")
        return self


class KnownFailure(Excuse):
    """A fault that upstream has, with the proof: how a check fails, on which models and builds, and a replay script.

    ``replay`` is a path relative to the folder of the file.
    """

    builds: Builds
    upstream: Annotated[
        str, AfterValidator(_upstream), Field(description='a link, or "none found (searched YYYY-MM-DD)"')
    ]
    replay: Annotated[Line, AfterValidator(_beside), Field(description="the path of a script beside this file")]
    measured: Measured
    note: Text


class KnownFailures(Entry):
    """A file in ``specs/known_failures/``."""

    failures: tuple[KnownFailure, ...]


class WaivedFailure(Excuse):
    """A failure that a user lives with for a while, on any build.

    ``id`` names an invariant with all its case families, or one of these. ``expires`` is the last day on which it holds.
    """

    reason: Line
    expires: Annotated[date, BeforeValidator(_day), Field(description="a date such as 2026-12-31")]


class WaivedFailures(Entry):
    """A file for ``--waivers``."""

    waivers: tuple[WaivedFailure, ...]
