"""The precision tail document's own arithmetic, done again from its printed digits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

import fixtures
from conformance.harness.measure.interval import Interval, exactly, printed
from conformance.harness.measure.rederivation import Rederivation, Verdict
from conformance.harness.precision.memory import MIB, AttentionLayers, FootprintModel, Run, footprint

PATH = Path(fixtures.__file__).parent / "documents" / "precision_tail.yaml"

_HUNDRED = exactly(100)
_OPERATIONS: Mapping[str, Callable[[Interval, Interval], Interval]] = {
    "difference": lambda a, b: a - b,
    "quotient": lambda a, b: a / b,
    "drop_percent": lambda a, b: _HUNDRED - _HUNDRED * b / a,
    "percent_of": lambda a, b: a * b / _HUNDRED,
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(_Strict):
    """A benchmarked model and the context it was benchmarked at, in tokens."""

    name: str
    context: int


class Setup(_Strict):
    """How the document's runs were made."""

    models: dict[str, Model]
    corpus: str
    batch: int
    ubatch: int
    seed: int


class Geometry(_Strict):
    """A benchmarked model's cache: rows of its layers without a window, and its groups of layers."""

    rows: int
    layers: tuple[AttentionLayers, ...]


class Table(_Strict):
    """Figures of one label and source, as printed, by cache type and then by tail; None where unknown."""

    table: str
    label: Literal["stated", "derived", "unknown"]
    source: str
    values: dict[str, dict[Annotated[str, BeforeValidator(str)], str | None]]


class Claim(_Strict):
    """Something the document concludes: `operation` on two figures gives `stated`, or, for less, a < b."""

    id: str
    says: str
    section: int
    operation: Literal["difference", "quotient", "drop_percent", "percent_of", "less"]
    of: tuple[str, str]
    stated: str | None = None


class Document(_Strict):
    """The fixture file ``documents/precision_tail.yaml``."""

    document: str
    setup: Setup
    geometry: dict[str, Geometry]
    bits_per_value: dict[str, float]
    figures: tuple[Table, ...]
    claims: tuple[Claim, ...]

    def printed_caches(self, model: str) -> list[tuple[str, int, str]]:
        """Every cache size of a benchmarked model that is printed or follows: type, tail, MiB."""
        return [
            (kind, int(tail), value)
            for table in self.figures
            if table.table == f"{model}/kv_mib"
            for kind, row in table.values.items()
            for tail, value in row.items()
            if value is not None
        ]

    @property
    def printed(self) -> dict[str, str | None]:
        """Every figure as printed, None where unknown, by its name table/type/tail."""
        return {
            f"{table.table}/{kind}/{tail}": value
            for table in self.figures
            for kind, row in table.values.items()
            for tail, value in row.items()
        }


def load_document(path: Path = PATH) -> Document:
    """The document's figures; ValueError in one line when the file is not what `Document` says."""
    try:
        return Document.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path.name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def rederive(document: Document) -> list[Rederivation]:
    """Every claim from the printed figures, then every stated cache size from the memory model.

    A claim agrees when numbers that print as its figures give one that prints as it states. It is unknown when a
    figure is, or when a comparison falls within the rounding. ValueError when it names a figure the file lacks.
    """
    figures = document.printed
    claims = [_claim(claim, figures) for claim in document.claims]
    sizes = [
        _size(document, table.table.split("/")[0], kind, int(tail), stated)
        for table in document.figures
        if table.label == "stated" and table.table.endswith("/kv_mib")
        for kind, row in table.values.items()
        for tail, stated in row.items()
        if stated is not None
    ]
    return claims + sizes


def _claim(claim: Claim, figures: Mapping[str, str | None]) -> Rederivation:
    for name in claim.of:
        if name not in figures:
            raise ValueError(f"claim {claim.id}: there is no figure {name}")
    a, b = (figures[name] for name in claim.of)
    stated = "less" if claim.stated is None else claim.stated
    if a is None or b is None:
        missing = claim.of[0] if a is None else claim.of[1]
        return Rederivation(claim.id, claim.says, stated, f"{missing} is unknown", "unknown")
    first, second = printed(a), printed(b)
    if claim.stated is None:
        less: Verdict = "agrees" if first.high < second.low else "disagrees" if second.high < first.low else "unknown"
        return Rederivation(claim.id, claim.says, stated, f"{a} and {b}", less)
    derived = _OPERATIONS[claim.operation](first, second)
    agrees: Verdict = "agrees" if derived.overlaps(printed(claim.stated)) else "disagrees"
    return Rederivation(claim.id, claim.says, stated, str(derived), agrees)


def _size(document: Document, model: str, kind: str, tail: int, stated: str) -> Rederivation:
    mib = cache_mib(document, model, kind, tail)
    says = f"{document.setup.models[model].name}: {kind} with a tail of {tail} rows takes {stated} MiB"
    verdict: Verdict = "agrees" if exactly(mib).overlaps(printed(stated)) else "disagrees"
    return Rederivation(f"{model}/kv_mib/{kind}/{tail}", says, stated, f"{float(mib):.6f}".rstrip("0"), verdict)


def cache_mib(document: Document, model: str, kind: str, tail: int, footprint: FootprintModel = footprint) -> Fraction:
    """What the memory model gives for a benchmarked model's cache of that type and tail, in MiB, exactly."""
    geometry = document.geometry[model]
    run = Run(geometry.rows, ubatch=document.setup.ubatch, tail=tail)
    return Fraction(footprint(geometry.layers, run, kind).total, MIB)
