"""The results of a run as data: the checks, the pairs that do not apply, the summary, and their JSON form."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema, model_validator

SCHEMA: Literal["llama-conformance/results/1"] = "llama-conformance/results/1"
Verdict = Literal["PASS", "FAIL", "KNOWN", "CRASH", "TIMEOUT", "SKIPPED", "UNKNOWN"]
VERDICTS: tuple[Verdict, ...] = ("PASS", "KNOWN", "SKIPPED", "UNKNOWN", "TIMEOUT", "FAIL", "CRASH")
"""Every verdict, from the best to the worst."""
NOT_RUN = "not run yet"
SCHEMA_FILE = Path(__file__).with_name("results.schema.json")
"""The published JSON schema of a results file."""


def jsonable(value: Any) -> Any:
    """``value`` in terms of JSON that every reader accepts.

    Numbers that JSON lacks become the words NaN, Infinity and -Infinity; numpy scalars and arrays become numbers and
    lists; lone surrogates in text are written out; anything else becomes its text.
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _word(value)
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {jsonable(str(key)): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    return jsonable(str(value))


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


_FIGURE_SCHEMA = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
Number = Annotated[
    float,
    BeforeValidator(lambda value: float(value) if hasattr(value, "dtype") else value),
    PlainSerializer(jsonable, when_used="always"),
    WithJsonSchema(_FIGURE_SCHEMA),
]
"""A float that may be NaN or infinite; in JSON those are the words NaN, Infinity and -Infinity."""
Text = Annotated[str, BeforeValidator(jsonable)]
Mapping = Annotated[dict[str, Any], BeforeValidator(jsonable)]


class Record(BaseModel):
    """Base of the results: frozen, closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, json_schema_serialization_defaults_required=True
    )


class LayerRow(BaseModel):
    """One layer of a layer-by-layer comparison; further keys are allowed.

    ``layer`` is None in a row that concerns a whole cache. ``first`` is the first difference in words.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    layer: int | None
    kind: Text
    equal: bool
    deviation: Number | None = None
    first: Text | None = None


class Excused(Record):
    """The outcome behind a KNOWN verdict, and where the entry stands that excuses it (``file:line``).

    ``upstream`` is a link to the report of the fault, or says that none was found; None for a waiver.
    """

    verdict: Verdict
    reason: Text | None
    where: Text
    upstream: Text | None = None


class MeasuredCase(Record):
    """One case of a check that ran a recorded list, and how it ended; ``remark`` holds whatever the verdict is."""

    case: Annotated[Any, BeforeValidator(jsonable)]
    verdict: Verdict
    reason: Text | None = None
    deviation: Number | None = None
    floor: Number | None = None
    limit: Number | None = None
    remark: Text | None = None
    replay: Text | None = None


class Detail(BaseModel):
    """What a check has to say besides its figures; further keys are allowed and are kept as JSON.

    ``expected`` and ``seen`` are the two values at the place of the deviation. ``interval`` has the ends between which
    noise leaves the true deviation, where it was estimated. ``stderr`` is what a build wrote before it crashed. ``seed``
    is that of the draws. ``cases`` are all cases of a run that replayed a recorded list.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    layers: tuple[LayerRow, ...] | None = None
    interval: tuple[Number, Number] | None = None
    where: Text | None = None
    expected: Text | None = None
    seen: Text | None = None
    stderr: Text | None = None
    seed: int | None = None
    excused: Excused | None = None
    cases: tuple[MeasuredCase, ...] | None = None


class Check(Record):
    """One invariant, or one case family of it, on one model.

    ``deviation``, ``floor`` and ``limit`` share the unit that ``quantity`` names. ``limit`` is the largest deviation that
    passes, or the smallest where ``wants_more``.
    ``seconds`` is wall time, ``seconds_in_library`` the part of it spent inside the build under test. ``case`` is the
    drawn case that decided the verdict, ``replay`` a command that runs it again.
    """

    id: Text
    model: Text
    title: Text
    required: bool
    verdict: Verdict
    reason: Text | None = None
    quantity: Text | None = None
    deviation: Number | None = None
    floor: Number | None = None
    limit: Number | None = None
    wants_more: bool = False
    seconds: float = 0.0
    seconds_in_library: float = 0.0
    examples: int = 0
    replay: Text | None = None
    case: Annotated[Any, BeforeValidator(jsonable)] = None
    detail: Annotated[Detail, BeforeValidator(jsonable)] = Detail()

    @classmethod
    def planned(cls, id: str, model: str, title: str, required: bool) -> Check:
        """The check before it runs: UNKNOWN, so that a run that ends early cannot count it as passed."""
        return cls(id=id, model=model, title=title, required=required, verdict="UNKNOWN", reason=NOT_RUN)

    def settled(self, verdict: Verdict, **fields: Any) -> Check:
        """The same check with its outcome; ``fields`` are any others of this class."""
        return Check(
            **{
                "id": self.id,
                "model": self.model,
                "title": self.title,
                "required": self.required,
                **fields,
                "verdict": verdict,
            }
        )

    def excuse(self, reason: str, where: str, upstream: str | None = None) -> Check:
        """The same check as KNOWN for ``reason``; what it really showed stays in ``detail.excused``."""
        excused = Excused(verdict=self.verdict, reason=self.reason, where=where, upstream=upstream)
        detail = self.detail.model_copy(update={"excused": excused})
        return self.model_copy(update={"verdict": "KNOWN", "reason": jsonable(reason), "detail": detail})

    def accepts(self, deviation: float | None) -> bool:
        """Whether a deviation is on the right side of the limit, if there is one; None and NaN never are."""
        if deviation is None or math.isnan(deviation):
            return False
        limit = deviation if self.limit is None else self.limit
        return deviation >= limit if self.wants_more else deviation <= limit

    @property
    def has_run(self) -> bool:
        """False for a check that is planned only."""
        return self.reason != NOT_RUN

    @model_validator(mode="after")
    def _verdict_fits(self) -> Check:
        if self.verdict in ("KNOWN", "SKIPPED", "UNKNOWN") and not self.reason:
            raise ValueError(f"{self.id} on {self.model}: {self.verdict} needs a reason")
        if self.verdict == "PASS" and self.deviation is not None and not self.accepts(self.deviation):
            raise ValueError(f"{self.id} on {self.model}: a deviation of {self.deviation} cannot pass")
        return self


class NotApplicable(Record):
    """A pair of invariant and model that means nothing, and why."""

    id: Text
    model: Text
    reason: Text


class Summary(Record):
    """The verdict on the build. ``line`` is the sentence for people, ``exit_code`` the process's."""

    exit_code: Literal[0, 1, 2]
    line: str
    counts: dict[Verdict, int]
    not_applicable: int
    seconds: float
    seconds_in_library: float


class Results(Record):
    """A results file. ``notes`` are remarks on the run that belong to no single check."""

    format: Literal["llama-conformance/results/1"] = Field(default=SCHEMA, alias="schema")
    build: Mapping
    suite: Mapping
    settings: Mapping
    checks: tuple[Check, ...]
    not_applicable: tuple[NotApplicable, ...] = ()
    notes: tuple[Text, ...] = ()
    summary: Summary

    def as_json(self) -> dict[str, Any]:
        """The file's content: only what JSON knows."""
        return self.model_dump(mode="json", by_alias=True)


def results_schema() -> dict[str, Any]:
    """The JSON schema of a results file."""
    schema = Results.model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
