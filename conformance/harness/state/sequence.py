"""What one saved sequence holds: cells, key and value rows, recurrent state, all as views into the blob."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

PartName = Literal["k", "v", "r", "s"]

_DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2")}


class BlobError(ValueError):
    """These bytes are not a sequence state: `what` is wrong at byte `where`."""

    def __init__(self, where: int, what: str) -> None:
        super().__init__(f"byte {where}: {what}")
        self.where = where
        self.what = what

    def __reduce__(self) -> tuple[type[BlobError], tuple[int, str]]:
        return type(self), (self.where, self.what)


@dataclass(frozen=True)
class _Format:
    name: str
    head: bool
    cell_ext: tuple[int, ...]
    rotation: bool


# Upstream's blob over time; found by reading blobs of 2026 builds, b7347 to b11739.
_FORMATS = (
    _Format("F1", head=False, cell_ext=(0,), rotation=False),
    _Format("F2", head=False, cell_ext=(0, 2), rotation=False),
    _Format("F3", head=True, cell_ext=(0, 2), rotation=False),
    _Format("F4", head=True, cell_ext=(0, 3), rotation=False),
    _Format("F5", head=True, cell_ext=(0, 3), rotation=True),
)


@dataclass(frozen=True)
class Layout:
    """The features by which builds differ in writing a blob.

    `head`: magic and sequence id come first. Blobs inside sequence files never have them.
    `cell_ext`: int32 fields per attention cell besides position and sequences: 0, 2 (x, y) or 3 (x, y, token).
    `rotation`: the attention cache names the widths of the K and V rotation.
    The latter two are None where no attention cell is stored, because nothing then shows them.
    """

    head: bool
    cell_ext: int | None = None
    rotation: bool | None = None

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats, of F1 to F5, that write this layout; without a head, as a blob or in a file."""
        return tuple(
            known.name
            for known in _FORMATS
            if (known.head or not self.head)
            and (self.cell_ext is None or self.cell_ext in known.cell_ext)
            and (self.rotation is None or self.rotation == known.rotation)
        )

    @property
    def name(self) -> str:
        """For example `F3/F4` or `F4, no head`."""
        return ("/".join(self.formats) or "of no known build") + ("" if self.head else ", no head")


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one tensor, one per cell, as stored.

    `bytes` is uint8 `[n_cells, row_size]`, or `[n_channels, n_cells, element_size]` when `transposed` (V without flash
    attention). `type` is ggml's name in lower case, `unit_size` the bytes of one element or of one quantized block.
    """

    type: str
    unit_size: int
    bytes: NDArray[np.uint8]
    transposed: bool = False

    @property
    def n_cells(self) -> int:
        """Number of rows."""
        return int(self.bytes.shape[1 if self.transposed else 0])

    @property
    def row_size(self) -> int:
        """Bytes that one cell takes, transposed or not."""
        return int(self.bytes.shape[0] * self.bytes.shape[2] if self.transposed else self.bytes.shape[1])

    @property
    def units(self) -> NDArray[np.uint8]:
        """View uint8 `[n_cells, n_units, unit_size]` whatever the storage order; a unit is an element or a block."""
        if self.transposed:
            return self.bytes.transpose(1, 0, 2)
        return self.bytes.reshape(self.n_cells, self.row_size // self.unit_size, self.unit_size)

    def values(self) -> NDArray[Any]:
        """View float32 or float16 `[n_cells, n_channels]`.

        Raises `TypeError` for every other type: see `floats` for bf16, `units` for quantized rows.
        """
        if self.type not in _DTYPES:
            raise TypeError(f"{self.type} rows have no numpy view: read them as bytes through .units")
        values: NDArray[Any] = self.units.view(_DTYPES[self.type])
        return values[..., 0]

    @property
    def has_floats(self) -> bool:
        """Whether the type is f32, f16 or bf16."""
        return self.type in _DTYPES or self.type == "bf16"

    def floats(self, cell: int | slice = slice(None)) -> NDArray[np.float64]:
        """A copy as float64 `[n_cells, n_channels]`, or one cell's values. Raises `TypeError` for quantized types."""
        with np.errstate(invalid="ignore"):  # a signalling NaN is a value like any other here
            if self.type == "bf16":
                halves: NDArray[np.uint16] = self.units.view("<u2")[cell, ..., 0]
                return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            return self.values()[cell].astype(np.float64)


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of one cache, in the order of its rows.

    `positions` and, where stored, `x`, `y`, `token` are int32 `[n_cells]` views into the blob. `n_bytes` counts
    everything stored per cell, sequence ids included.
    """

    positions: NDArray[np.int32]
    x: NDArray[np.int32] | None
    y: NDArray[np.int32] | None
    token: NDArray[np.int32] | None
    n_bytes: int

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """K rows and V rows of one layer; `v` is None where the cache holds no V (multi-head latent attention)."""

    k: Rows
    v: Rows | None


@dataclass(frozen=True, eq=False)
class AttentionCache:
    """One attention cache: `layers` are numbered within it.

    A sequence occupies one of `n_stream` streams; an empty one (`stream` None) has no cells, and the blob then says
    nothing about layers. `rotation` is the width of the K and V rotation, 0 for none, where the blob names them.
    `raw` is the whole section, uint8.
    """

    n_stream: int
    stream: int | None
    cells: Cells
    layers: tuple[AttentionLayer, ...]
    rotation: tuple[int, int] | None
    raw: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class RecurrentLayer:
    """Recurrent state of one layer: `r` (convolution window or token shift) and `s` (the state proper)."""

    r: Rows
    s: Rows


@dataclass(frozen=True, eq=False)
class RecurrentCache:
    """The recurrent memory: `layers` are numbered within it, `n_model_layer` is the whole model's count."""

    cells: Cells
    n_model_layer: int
    layers: tuple[RecurrentLayer, ...]
    raw: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class SequenceState:
    """A parsed blob. `attention` holds the caches in stored order: for a sliding-window model the base cache first.

    `source` is the sequence the blob was saved from, None without a head; `head` is the raw head, uint8 [0] or [8].
    Every array is a view into the parsed buffer, writable when that is.
    """

    layout: Layout
    source: int | None
    attention: tuple[AttentionCache, ...]
    recurrent: RecurrentCache | None
    head: NDArray[np.uint8]
    n_bytes: int

    @property
    def outline(self) -> str:
        """For example `attention (311 cells, 10 layers) + recurrent (1 cells, 30 layers)`."""
        parts = []
        for cache in self.attention:
            without = " without V" if any(layer.v is None for layer in cache.layers) else ""
            parts.append(f"attention ({len(cache.cells)} cells, {len(cache.layers)} layers{without})")
        if self.recurrent:
            parts.append(f"recurrent ({len(self.recurrent.cells)} cells, {len(self.recurrent.layers)} layers)")
        return " + ".join(parts)


@dataclass(frozen=True)
class LayerMap:
    """Which model layers the layers of each cache are: `attention` one tuple per cache, in stored order.

    A state with fewer caches than the map (PARTIAL_ONLY) is read as holding the last ones.
    """

    attention: tuple[tuple[int, ...], ...] = ()
    recurrent: tuple[int, ...] = ()

    @classmethod
    def of(cls, state: SequenceState) -> LayerMap:
        """The map that numbers layers within their cache."""
        recurrent = state.recurrent.layers if state.recurrent else ()
        return cls(tuple(tuple(range(len(cache.layers))) for cache in state.attention), tuple(range(len(recurrent))))

    def fit(self, state: SequenceState) -> LayerMap:
        """The part of the map that `state` has caches for. Raises `ValueError` when the counts of layers disagree."""
        fitted = LayerMap(
            self.attention[max(len(self.attention) - len(state.attention), 0) :],
            self.recurrent if state.recurrent else (),
        )
        stored = LayerMap.of(state)
        agrees = len(fitted.attention) == len(stored.attention) and len(fitted.recurrent) == len(stored.recurrent)
        for cache, names in zip(state.attention, fitted.attention, strict=False):
            agrees = agrees and (cache.stream is None or len(names) == len(cache.layers))
        if not agrees:
            raise ValueError(f"{self} does not fit a state of {state.outline}")
        return fitted
