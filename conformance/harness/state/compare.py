"""Compare two sequence states layer by layer. Bytes decide equality; NMSE says how far apart unequal rows are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from conformance.harness.measure.deviation import nmse

from .sequence import AttentionCache, AttentionLayer, Cells, LayerMap, PartName, Rows, SequenceState

Kind = Literal["attention", "recurrent", "attention cells", "recurrent cells"]
Measure = Literal["NMSE", "fraction of differing bytes", "shape"]


@dataclass(frozen=True)
class Difference:
    """The first place where two states differ, in the order of cells and then of values.

    `part` is k, v, r or s, or what differs in the cells: count, position, x, y or token. `cell` counts within the
    cache, `position` is that cell's in the reference. `index` counts values, or bytes of the row for quantized types
    (`unit` says which). Cell, position and index are None where shapes or types differ; `a` and `b` then tell those.
    """

    part: str
    cell: int | None
    position: int | None
    index: int | None
    unit: Literal["value", "byte"] | None
    a: str
    b: str

    def __str__(self) -> str:
        where = [self.part]
        if self.cell is not None:
            where.append(f"cell {self.cell} (position {self.position})")
        if self.index is not None:
            where.append(f"{self.unit} {self.index}")
        return f"{', '.join(where)}: {self.a} against {self.b}"


@dataclass(frozen=True)
class PartDeviation:
    """How far one part of a layer is off: NMSE = sum((b - a)^2) / sum(a^2), or the fraction of differing bytes.

    0 for equal parts, NaN where values are not finite. Parts of different shape or type have infinity and the measure
    "shape". Bytes may differ at NMSE 0 (the sign of a zero): only `LayerComparison.equal` decides.
    """

    measure: Measure
    value: float


@dataclass(frozen=True)
class LayerComparison:
    """One layer of one cache of two states; or the cells of a cache, where they differ.

    `layer` is the model layer when a map was given, else the layer within its cache; None for cells. `cache` tells the
    attention caches of a state apart (the recurrent memory is 0). `deviations` has an entry for each part that either
    state holds.
    """

    layer: int | None
    kind: Kind
    cache: int
    deviations: Mapping[PartName, PartDeviation]
    first: Difference | None

    @property
    def equal(self) -> bool:
        """Whether every byte of the layer is the same in both."""
        return self.first is None

    @property
    def label(self) -> str:
        """For example `layer 17 (recurrent)`."""
        cache = f", cache {self.cache}" if self.cache else ""
        return f"{self.kind}{cache}" if self.layer is None else f"layer {self.layer} ({self.kind}{cache})"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: `deviation` is the worst of the parts, not finite ones are NaN or Infinity in words."""
        values = {part: deviation.value for part, deviation in self.deviations.items()}
        worst = max(values.values(), key=lambda value: math.inf if math.isnan(value) else value, default=None)
        return {
            "layer": self.layer,
            "kind": self.kind,
            "cache": self.cache,
            "equal": self.equal,
            "deviation": _plain(worst),
            **{part: _plain(value) for part, value in values.items()},
            "measure": {part: deviation.measure for part, deviation in self.deviations.items()},
            "first": None if self.first is None else str(self.first),
        }


def _plain(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity"


def compare(
    a: SequenceState, b: SequenceState, *, layers: LayerMap | None = None, by_position: bool = False
) -> tuple[LayerComparison, ...]:
    """One row per layer of either state, in model order under a map; `a` is the reference.

    Cells are compared in stored order, or with `by_position` in the order of their positions.

    Cells whose positions, x, y or token differ come first, as one more row for each cache; fields that only one of the
    two layouts stores are not compared. Rows stored in different order (V with and without flash attention) are
    compared by cell and channel. Shapes and types that differ are differences. Raises `ValueError` when the map does
    not fit a state.
    """
    if by_position:
        a, b = (replace(state, attention=tuple(map(_by_position, state.attention))) for state in (a, b))
    ours, theirs = _layers(a, layers), _layers(b, layers)
    keys = sorted(ours.keys() | theirs.keys(), key=lambda key: key if layers else (key[2], key[1], key[0]))
    return (*_compare_cells(a, b), *(_compare_layer(key, ours.get(key), theirs.get(key)) for key in keys))


def at_positions_of(state: SequenceState, other: SequenceState) -> SequenceState:
    """What `state` holds at the positions that `other` has cells for, cache by cache; a copy, recurrent cells as they are."""
    caches = zip(state.attention, other.attention, strict=True)
    kept = (
        _selected(ours, np.flatnonzero(np.isin(ours.cells.positions, theirs.cells.positions)))
        for ours, theirs in caches
    )
    return replace(state, attention=tuple(kept))


def _by_position(cache: AttentionCache) -> AttentionCache:
    """The cache with its cells in the order of their positions; a copy unless they lie so."""
    order = np.argsort(cache.cells.positions, kind="stable")
    if (order[1:] > order[:-1]).all():
        return cache
    return _selected(cache, order)


def _selected(cache: AttentionCache, order: NDArray[np.intp]) -> AttentionCache:
    """Some of a cache's cells, in the order given."""

    def rows(stored: Rows) -> Rows:
        return replace(stored, bytes=stored.bytes[:, order] if stored.transposed else stored.bytes[order])

    cells = cache.cells
    x, y, token = (None if column is None else column[order] for column in (cells.x, cells.y, cells.token))
    return replace(
        cache,
        cells=replace(cells, positions=cells.positions[order], x=x, y=y, token=token),
        layers=tuple(AttentionLayer(rows(each.k), each.v and rows(each.v)) for each in cache.layers),
    )


def first_difference(rows: Sequence[LayerComparison]) -> str | None:
    """The first unequal row as a sentence, None when all are equal.

    For example `layer 17 (recurrent), s, cell 0 (position 311), value 4021: 0.125 against 0.0`.
    """
    return next((f"{row.label}, {row.first}" for row in rows if row.first), None)


_Key = tuple[int, int, Kind]  # layer, cache, kind


@dataclass(frozen=True, eq=False)
class _Layer:
    cells: Cells
    parts: dict[PartName, Rows]


def _layers(state: SequenceState, layers: LayerMap | None) -> dict[_Key, _Layer]:
    names = (layers or LayerMap.of(state)).fit(state)
    found: dict[_Key, _Layer] = {}
    for number, cache in enumerate(state.attention):
        for name, attention in zip(names.attention[number], cache.layers, strict=False):
            parts: dict[PartName, Rows] = {"k": attention.k}
            if attention.v is not None:
                parts["v"] = attention.v
            found[name, number, "attention"] = _Layer(cache.cells, parts)
    if state.recurrent:
        for name, recurrent in zip(names.recurrent, state.recurrent.layers, strict=True):
            found[name, 0, "recurrent"] = _Layer(state.recurrent.cells, {"r": recurrent.r, "s": recurrent.s})
    return found


def _compare_layer(key: _Key, a: _Layer | None, b: _Layer | None) -> LayerComparison:
    layer, cache, kind = key
    ours, theirs = a.parts if a else {}, b.parts if b else {}
    differences = {
        part: _first_difference(part, ours.get(part), theirs.get(part), a.cells if a else None)
        for part in {**ours, **theirs}
    }
    deviations = {part: _deviation(ours.get(part), theirs.get(part), differences[part]) for part in differences}
    return LayerComparison(layer, kind, cache, deviations, next((d for d in differences.values() if d), None))


def _first_difference(part: PartName, a: Rows | None, b: Rows | None, cells: Cells | None) -> Difference | None:
    if a is None or b is None or cells is None or _shape(a) != _shape(b):
        return Difference(part, None, None, None, None, _shape(a), _shape(b))
    if np.array_equal(a.bytes, b.bytes):
        return None
    unequal = a.units != b.units
    if not unequal.any():
        return None
    cell, unit, byte = (int(i) for i in np.unravel_index(np.argmax(unequal), unequal.shape))
    position = int(cells.positions[cell])
    x, y = a.units[cell, unit], b.units[cell, unit]
    if not a.has_floats:
        return Difference(part, cell, position, unit * a.unit_size + byte, "byte", f"{x[byte]:#04x}", f"{y[byte]:#04x}")
    ours, theirs = (repr(float(rows.floats(cell)[unit])) for rows in (a, b))
    if ours == theirs:  # NaNs of different bits
        ours, theirs = (f"{ours} (0x{raw.tobytes()[::-1].hex()})" for raw in (x, y))
    return Difference(part, cell, position, unit, "value", ours, theirs)


def _deviation(a: Rows | None, b: Rows | None, difference: Difference | None) -> PartDeviation:
    if a is None or b is None or (difference and difference.cell is None):
        return PartDeviation("shape", math.inf)
    if not a.has_floats:
        return PartDeviation("fraction of differing bytes", float(np.mean(a.units != b.units)) if difference else 0.0)
    with np.errstate(invalid="ignore"):  # infinities give NaN
        return PartDeviation("NMSE", nmse(b.floats(), a.floats()) if difference else 0.0)


def _shape(rows: Rows | None) -> str:
    if rows is None:
        return "nothing"
    return f"{rows.n_cells} cells of {rows.row_size} bytes in {rows.type}"


def _compare_cells(a: SequenceState, b: SequenceState) -> Iterator[LayerComparison]:
    pairs: list[tuple[Kind, int, Cells, Cells]] = [
        ("attention cells", number, ours.cells, theirs.cells)
        for number, (ours, theirs) in enumerate(zip(a.attention, b.attention, strict=False))
    ]
    if a.recurrent and b.recurrent:
        pairs.append(("recurrent cells", 0, a.recurrent.cells, b.recurrent.cells))
    for kind, number, ours, theirs in pairs:
        first = _first_cell_difference(ours, theirs)
        if first:
            yield LayerComparison(None, kind, number, {}, first)


def _first_cell_difference(a: Cells, b: Cells) -> Difference | None:
    if len(a) != len(b):
        return Difference("count", None, None, None, None, str(len(a)), str(len(b)))
    fields = (("position", a.positions, b.positions), ("x", a.x, b.x), ("y", a.y, b.y), ("token", a.token, b.token))
    for name, ours, theirs in fields:
        if ours is not None and theirs is not None and (ours != theirs).any():
            cell = int(np.argmax(ours != theirs))
            return Difference(name, cell, int(a.positions[cell]), None, None, str(ours[cell]), str(theirs[cell]))
    return None
