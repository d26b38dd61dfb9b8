"""KVarN: cache records of 128 tokens, rotated, scaled to equal variance along both axes, and rounded.

After "KVarN: Variance-Normalized KV-Cache Quantization" (arXiv 2606.03458) and the public behaviour of the fork that
carries it. One record holds one side (K or V) of one kv head's slice of up to 128 channels for 128 tokens:

1. The head is Hadamard-rotated over its whole width, after RoPE. (Over 256 or 512 values that is a rotation of each
   128-wide slice followed by a 2- or 4-point one across the slices.)
2. A K tile has channels as rows and tokens as columns, a V tile tokens as rows and channels as columns.
3. `dual_scales` finds one factor per row and one per column that even out the standard deviations.
4. Each scaled row is rounded to 2^bits levels between its minimum and maximum.
5. Three fp16 vectors are kept, row scale, row zero point and column scale: value = (code * scale + zero) * column.

A record is the codes, packed least significant bit first in row-major order, then the three vectors: 2048 * bits + 768
bytes for 128 channels. For a head of 64 no size is published. Here such a record is the same layout without padding:
1024 * bits bytes of codes, then 64 + 64 + 128 halves (512 bytes) for K and 128 + 128 + 64 halves (640 bytes) for V.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conformance.harness.precision.codecs import Bytes, CodecError, Floats
from conformance.harness.precision.rotation import Side, rotate

GROUP = 128
"""Tokens in one record."""

SINK_ROWS = 128
"""First rows of a sequence that a layer without a sliding window never quantizes."""

STAGE_ROWS = 256
"""Rows a layer holds in f16 beside its records: the group that is filling and the one before it."""

BITS = (2, 3, 4, 5, 6, 8)
HEAD_DIMS = (64, 128, 256, 512)

_ROUNDS = 16
_TIE = 1 + 1e-9  # imbalances closer than this differ by rounding only: a tile below every clamp is scaled evenly
_TILES_AT_ONCE = 64


@dataclass(frozen=True)
class KVarN:
    """KVarN at `bits` for one side of heads of `head_dim` values; CodecError for bits or sizes it does not define."""

    bits: int
    head_dim: int
    side: Side

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise CodecError(f"kvarn{self.bits} does not exist; there are {', '.join(f'kvarn{b}' for b in BITS)}")
        if self.head_dim not in HEAD_DIMS:
            sizes = ", ".join(map(str, HEAD_DIMS))
            raise CodecError(f"{self.name} cannot take a head dimension of {self.head_dim}; it is defined for {sizes}")

    @property
    def name(self) -> str:
        """Its name as a cache type, such as ``kvarn4``."""
        return f"kvarn{self.bits}"

    @property
    def channels(self) -> int:
        """Channels in one record."""
        return min(self.head_dim, 128)

    @property
    def slices(self) -> int:
        """Records side by side across one head."""
        return self.head_dim // self.channels

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        rows, columns = self._tile
        return rows * columns * self.bits // 8 + 2 * (2 * rows + columns)

    @property
    def bits_per_value(self) -> float:
        """Bits that one cached value takes, scales included."""
        return 8 * self.record_bytes / (GROUP * self.channels)

    @property
    def _tile(self) -> tuple[int, int]:
        return (self.channels, GROUP) if self.side == "k" else (GROUP, self.channels)

    def encode(self, groups: Floats) -> Bytes:
        """Float32 [..., 128, head_dim], one head over 128 tokens, to records uint8 [..., slices, record_bytes].

        CodecError for infinities, NaN, and values whose scales overflow fp16.
        """
        rotated = rotate(np.ascontiguousarray(groups, dtype=np.float32), self.head_dim)
        sliced = rotated.reshape(*groups.shape[:-1], self.slices, self.channels).swapaxes(-3, -2)
        tiles = sliced.swapaxes(-1, -2) if self.side == "k" else sliced
        records = self.encode_tiles(tiles.reshape(-1, *self._tile))
        return records.reshape(*groups.shape[:-2], self.slices, self.record_bytes)

    def decode(self, records: Bytes) -> Floats:
        """Values float32 [..., 128, head_dim], rotated back, of records uint8 [..., slices, record_bytes]."""
        lead = records.shape[:-2]
        tiles = self.decode_tiles(records.reshape(-1, self.record_bytes)).reshape(*lead, self.slices, *self._tile)
        sliced = tiles.swapaxes(-1, -2) if self.side == "k" else tiles
        rotated = sliced.swapaxes(-3, -2).reshape(*lead, GROUP, self.head_dim)
        return rotate(rotated, self.head_dim)

    def encode_tiles(self, tiles: Floats) -> Bytes:
        """Rotated tiles, float32 [t, rows, columns], to records uint8 [t, record_bytes]."""
        if not np.isfinite(tiles).all():
            raise CodecError(f"{self.name}: a value is infinite or not a number; such a row cannot be cached")
        records = np.empty((len(tiles), self.record_bytes), dtype=np.uint8)
        for start in range(0, len(tiles), _TILES_AT_ONCE):
            part = slice(start, start + _TILES_AT_ONCE)
            records[part] = self._encode(tiles[part])
        return records

    def decode_tiles(self, records: Bytes) -> Floats:
        """Rotated tiles, float32 [t, rows, columns], of records uint8 [t, record_bytes]."""
        if records.shape[-1] != self.record_bytes:
            raise CodecError(
                f"{self.name}: a record of {records.shape[-1]} bytes; for {self.side} of head dimension "
                f"{self.head_dim} it has {self.record_bytes}"
            )
        rows, columns = self._tile
        packed = rows * columns * self.bits // 8
        codes = _unpack(records[:, :packed], self.bits).reshape(-1, rows, columns)
        metadata = np.ascontiguousarray(records[:, packed:]).view(np.float16).astype(np.float32)
        step, zero, column = np.split(metadata, [rows, 2 * rows], axis=1)
        return (codes * step[:, :, None] + zero[:, :, None]) * column[:, None, :]

    def _encode(self, tiles: Floats) -> Bytes:
        row, column = dual_scales(tiles)
        scaled = tiles / (row[:, :, None] * column[:, None, :]).astype(np.float32)
        low = scaled.min(axis=2, keepdims=True)
        levels = (1 << self.bits) - 1
        step = np.maximum((scaled.max(axis=2, keepdims=True) - low) / np.float32(levels), np.float32(1e-10))
        codes = np.floor((scaled - low) / step + np.float32(0.5))  # never negative: half up is half away from zero
        codes = np.minimum(codes, np.float32(levels)).astype(np.uint8)
        metadata = np.concatenate([row * step[..., 0], row * low[..., 0], column], axis=1)
        with np.errstate(over="ignore"):
            halves = metadata.astype(np.float16)
        if not np.isfinite(halves).all():
            raise CodecError(f"{self.name}: a value is too large for this type; such a row cannot be cached")
        return np.concatenate([_pack(codes.reshape(len(tiles), -1), self.bits), halves.view(np.uint8)], axis=1)


def dual_scales(tiles: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Factors (rows [t, r], columns [t, c]) whose division evens out the deviations of tiles [t, r, c] on both axes.

    Sixteen rounds in the log domain. Each adds the log of the columns' sample standard deviation, clamped to 1e-3 ..
    1e3, to the columns' log scale, which is clamped to -0.3 .. 10; then does the same for the rows of what results.
    The scales of the least imbalance are kept, later ones on a tie; no scaling at all is where it starts. Imbalance
    is the largest over the smallest standard deviation of the columns, plus that of the rows.
    """
    tiles = tiles.astype(np.float64)
    squares = tiles * tiles
    row, column = np.ones(tiles.shape[:2]), np.ones(tiles.shape[::2])
    best_row, best_column, least = row, column, np.full(len(tiles), np.inf)

    def column_deviations() -> NDArray[np.float64]:
        return _deviation(row[:, None] @ tiles, row[:, None] ** 2 @ squares, tiles.shape[1])[:, 0] * column

    def row_deviations() -> NDArray[np.float64]:
        return _deviation(tiles @ column[..., None], squares @ column[..., None] ** 2, tiles.shape[2])[..., 0] * row

    # row and column hold the inverse scales, and a deviation of the scaled tile is one matrix-vector product away
    of_columns, of_rows = column_deviations(), row_deviations()
    for _ in range(_ROUNDS + 1):
        imbalance = _spread(of_columns) + _spread(of_rows)
        better = (imbalance <= least * _TIE)[:, None]
        least = np.minimum(least, imbalance)
        best_row, best_column = np.where(better, row, best_row), np.where(better, column, best_column)
        column = _rescaled(column, of_columns)
        of_rows = row_deviations()
        scaled = _rescaled(row, of_rows)
        of_rows *= scaled / row
        row = scaled
        of_columns = column_deviations()
    return 1 / best_row, 1 / best_column


def _deviation(total: NDArray[np.float64], squares: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Sample standard deviation of n values from their sum and the sum of their squares."""
    deviation: NDArray[np.float64] = np.sqrt(np.maximum(squares - total * total / n, 0) / (n - 1))
    return deviation


def _rescaled(inverse: NDArray[np.float64], deviations: NDArray[np.float64]) -> NDArray[np.float64]:
    """Inverse scales after one more step: the log scale grows by the log of the deviation; both are clamped."""
    log_scale = np.log(np.clip(deviations, 1e-3, 1e3)) - np.log(inverse)
    rescaled: NDArray[np.float64] = np.exp(-np.clip(log_scale, -0.3, 10))
    return rescaled


def _spread(deviations: NDArray[np.float64]) -> NDArray[np.float64]:
    """Largest over smallest deviation of each tile, [t]."""
    spread: NDArray[np.float64] = deviations.max(axis=1) / np.maximum(deviations.min(axis=1), 1e-8)
    return spread


def _pack(codes: Bytes, bits: int) -> Bytes:
    """Codes [t, n] of `bits` bits as bytes [t, n * bits / 8], least significant bit first."""
    planes = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(planes.reshape(len(codes), -1), axis=1, bitorder="little")


def _unpack(packed: Bytes, bits: int) -> Bytes:
    """The inverse of `_pack`."""
    planes = np.unpackbits(packed, axis=1, bitorder="little").reshape(len(packed), packed.shape[1] * 8 // bits, bits)
    codes: Bytes = np.packbits(planes, axis=-1, bitorder="little")[..., 0]
    return codes
