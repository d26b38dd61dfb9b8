"""The body of a cache: how rows that have left the exact tail are kept, as one interface over all types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from conformance.harness.precision.codecs import CODECS, Codec, CodecError, Floats
from conformance.harness.precision.kvarn import BITS, GROUP, SINK_ROWS, KVarN
from conformance.harness.precision.rotation import Side, native_width, rotate


class Body(Protocol):
    """One side, K or V, of a layer's quantized rows."""

    @property
    def name(self) -> str:
        """The cache type."""

    @property
    def group(self) -> int:
        """Rows that are quantized together: a row can be read from the body once its group is complete."""

    @property
    def sink(self) -> int:
        """Rows at the start of a sequence that stay exact on layers without a sliding window."""

    def round_trip(self, rows: Floats) -> Floats:
        """What attention reads back, float32 [..., r, heads * head_dim], of rows of that shape.

        r is a multiple of `group` and begins at one. CodecError for rows that the type cannot hold.
        """
        ...


@dataclass(frozen=True)
class StandardBody:
    """Every row on its own in a standard type, Hadamard-rotated over `width` values when that is not None."""

    codec: Codec
    width: int | None
    group: int = 1
    sink: int = 0

    @property
    def name(self) -> str:
        """The cache type."""
        return self.codec.name

    def round_trip(self, rows: Floats) -> Floats:
        """As `Body.round_trip`."""
        if self.width is None:
            return self.codec.round_trip(rows)
        return rotate(self.codec.round_trip(rotate(rows, self.width)), self.width)


@dataclass(frozen=True)
class KVarNBody:
    """Groups of 128 rows in KVarN records."""

    kvarn: KVarN
    group: int = GROUP
    sink: int = SINK_ROWS

    @property
    def name(self) -> str:
        """The cache type."""
        return self.kvarn.name

    def round_trip(self, rows: Floats) -> Floats:
        """As `Body.round_trip`."""
        groups = rows.reshape(*rows.shape[:-2], -1, GROUP, rows.shape[-1] // self.kvarn.head_dim, self.kvarn.head_dim)
        heads = self.kvarn.decode(self.kvarn.encode(groups.swapaxes(-3, -2)))
        return heads.swapaxes(-3, -2).reshape(rows.shape)


def body(name: str, head_dim: int, side: Side, *, rotated: bool = True) -> StandardBody | KVarNBody:
    """The body of that type for heads of `head_dim`.

    Standard quantized types are rotated as llama.cpp's own caches are, unless `rotated` is False; 16- and 32-bit types
    never are, and KVarN always is. CodecError for a type that does not exist or cannot take that head dimension.
    """
    for bits in BITS:
        if name == f"kvarn{bits}":
            return KVarNBody(KVarN(bits, head_dim, side))
    if name not in CODECS:
        names = (*CODECS, *(f"kvarn{bits}" for bits in BITS))
        raise CodecError(f"there is no cache type {name!r}; choose from {', '.join(names)}")
    standard = CODECS[name]
    return StandardBody(standard, native_width(head_dim, side) if rotated and standard.block > 1 else None)
