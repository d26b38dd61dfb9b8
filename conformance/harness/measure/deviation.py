"""How far a measured thing is from what it should be, as one figure with its place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .interval import exactly, printed
from .timing import Estimate

#: Stands for "the bits differ, but the figure comes out as zero".
LEAST = 5e-324


@dataclass(frozen=True)
class Deviation:
    """One measured deviation.

    Attributes:
        value: 0 when nothing deviates; NMSE for logits and states, a share or a count where `quantity` says so. NaN when
            a value involved is not finite, and then it never passes.
        quantity: what was compared and in which unit.
        where: the place of the first or worst difference in words, empty when there is none.
        expected, seen: the two values at that place, for people.
        layers: one row per layer where layers were compared.
        reordered: whether both sides hold the same cells in another order.
        estimate: the value with its interval where it was estimated; it is then the interval that decides.
        remark: what else the case showed, whatever its verdict.

    """

    value: float
    quantity: str
    where: str = ""
    expected: str = ""
    seen: str = ""
    layers: tuple[dict[str, Any], ...] = field(default=())
    reordered: bool = False
    estimate: Estimate | None = None
    remark: str = ""

    def with_cells_in_another_order(self, reordered: bool) -> Deviation:
        """The same deviation, marked."""
        return replace(self, reordered=reordered)


def nmse(seen: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """Sum of squared differences over sum of squared expected values, in float64; NaN if anything is not finite."""
    a, b = np.asarray(seen, np.float64), np.asarray(expected, np.float64)
    difference = float(np.square(a - b).sum())
    energy = float(np.square(b).sum())
    if not (math.isfinite(difference) and math.isfinite(energy)):
        return math.nan
    if difference == 0:
        return 0.0
    return difference / energy if energy else math.inf


def of_logits(seen: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> Deviation:
    """NMSE over logits, float32 [n, n_vocab] each; the place is the first row that differs and its worst entry.

    Bits decide: where they differ the value is above 0, however small the NMSE.
    """
    quantity = "NMSE of logits"
    if seen.shape != expected.shape:
        return Deviation(math.inf, quantity, "number of rows", str(expected.shape), str(seen.shape))
    if not len(seen):
        raise ValueError("no logits to compare")
    value = nmse(seen, expected)
    unequal = np.flatnonzero((seen.view(np.uint32) != expected.view(np.uint32)).any(axis=1))
    if not len(unequal) and not math.isnan(value):
        return Deviation(0.0, quantity)
    row = int(unequal[0]) if len(unequal) else int(np.flatnonzero(~np.isfinite(seen).all(axis=1))[0])
    gap = np.abs(seen[row].astype(np.float64) - expected[row])
    entry = int(np.nanargmax(gap)) if np.isfinite(gap).any() else int(np.flatnonzero(~np.isfinite(seen[row]))[0])
    return Deviation(
        max(value, LEAST) if value == value else value,
        quantity,
        f"logits row {row} of {len(seen)}, vocabulary entry {entry}",
        repr(float(expected[row, entry])),
        repr(float(seen[row, entry])),
    )


class LayerRow(Protocol):
    """One row of a layer-by-layer comparison, as `state.compare` makes them."""

    @property
    def equal(self) -> bool: ...  # noqa: D102

    @property
    def label(self) -> str: ...  # noqa: D102

    @property
    def first(self) -> Any: ...  # noqa: D102

    def to_dict(self) -> dict[str, Any]: ...  # noqa: D102


def of_layers(rows: Sequence[LayerRow]) -> Deviation:
    """The worst layer's deviation, and every row; NMSE for float rows, share of differing bytes for quantized ones."""
    table = tuple(row.to_dict() for row in rows)
    quantity = "worst layer, NMSE or share of differing bytes"
    first = next((row for row in rows if not row.equal), None)
    if first is None:
        return Deviation(0.0, quantity, layers=table)
    values = [float(row["deviation"]) for row in table if row["deviation"] is not None and not row["equal"]]
    value = max((math.inf if math.isnan(v) else v for v in values), default=math.inf)
    difference = first.first
    place = f"{first.label}, {str(difference).rpartition(': ')[0]}"
    return Deviation(max(value, LEAST), quantity, place, difference.a, difference.b, table)


def of_count(seen: int, expected: int, what: str, unit: str = "bytes") -> Deviation:
    """How far a count is from its expected value, as a share of the expected value (of 1 when that is 0)."""
    share = abs(seen - expected) / max(abs(expected), 1)
    return Deviation(share, f"share of {what}", "" if share == 0 else what, f"{expected} {unit}", f"{seen} {unit}")


def of_printed(seen: Fraction, figure: str, what: str, unit: str) -> Deviation:
    """How far a value is from a printed figure, as a share of it; 0 where the value prints as the figure."""
    stated = Fraction(figure)
    share = 0.0 if exactly(seen).overlaps(printed(figure)) else float(abs(seen - stated) / abs(stated))
    where = "" if share == 0 else what
    return Deviation(share, f"share of {what}", where, f"{figure} {unit}", f"{float(seen):.8g} {unit}")


def of_amount(value: float, what: str, unit: str, expected: str = "", seen: str = "") -> Deviation:
    """An amount that should be small, in a unit of its own: 0 where it is not above 0, NaN stays so."""
    amount = value if math.isnan(value) else max(value, 0.0)
    return Deviation(amount, f"{what}, {unit}", "" if amount == 0 else what, expected, seen)


def of_estimate(estimate: Estimate, quantity: str, where: str, expected: str, seen: str) -> Deviation:
    """An estimated figure with its interval."""
    return Deviation(estimate.value, quantity, where, expected, seen, estimate=estimate)


def worst(deviations: Iterable[Deviation]) -> Deviation:
    """The deviation with the largest value; one that is not a number counts as the largest."""
    found: Sequence[Deviation] = list(deviations)
    if not found:
        raise ValueError("no deviation to choose from")
    return max(found, key=lambda deviation: math.inf if math.isnan(deviation.value) else deviation.value)
