"""Cache types as codecs: float32 rows in, the bytes a cache would hold out, and back.

The types that `gguf` can quantize (q4_0, q4_1, q5_0, q5_1, q8_0, f32, f16, bf16) go through it. iq4_nl's quantizer is
missing there and follows ggml's reference row quantizer. q2_0, q2_1, q3_0, q3_1, q6_0 and q6_1 exist in no upstream
cache: they are the construction of q4 and q5 at another width, as `BlockCodec` defines it. (ggml has a weight type
named Q2_0, with 64 values to a block and the levels -1, 0, 1, 2; the q2_0 here is not that one.)

"Reference" means the `_ref` row quantizers of ggml-quants.c. A build's own row store may round otherwise: on x86 with
AVX the q8_0 store multiplies by 127 / max and rounds halves to even, so that single codes differ by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_VALUES_AT_ONCE = 1 << 16  # the temporaries of one step stay in a core's second-level cache


class CodecError(ValueError):
    """A cache type that does not exist, or rows that a type cannot hold."""


class Codec(ABC):
    """One cache type. `block` values share the metadata of one block, which takes `block_bytes` bytes."""

    def __init__(self, name: str, block: int, block_bytes: int) -> None:
        self.name = name
        self.block = block
        self.block_bytes = block_bytes

    def __repr__(self) -> str:
        return f"<codec {self.name}>"

    @property
    def bits_per_value(self) -> float:
        """Bits that one cached value takes, metadata included."""
        return 8 * self.block_bytes / self.block

    def bytes_per_row(self, n: int) -> int:
        """Bytes of a row of `n` values; CodecError when `n` is not a whole number of blocks."""
        if n % self.block:
            raise CodecError(f"{self.name}: a row of {n} values is not a multiple of its block of {self.block}")
        return n // self.block * self.block_bytes

    def encode(self, values: Floats) -> Bytes:
        """Quantize float32 [..., n] to uint8 [..., bytes_per_row(n)].

        CodecError for infinities, NaN, and values beyond what the type's 16-bit floats can express.
        """
        values = np.asarray(values, dtype=np.float32)
        shape = (*values.shape[:-1], self.bytes_per_row(values.shape[-1]))
        blocks = values.reshape(-1, self.block)
        encoded = np.empty((len(blocks), self.block_bytes), dtype=np.uint8)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # judged once, below
            for part in self._parts(len(blocks)):
                encoded[part] = self._encode(blocks[part])
        if not np.isfinite(self._range(encoded)).all():
            reason = "too large" if np.isfinite(values).all() else "infinite or not a number"
            raise CodecError(f"{self.name}: a value is {reason} for this type; such a row cannot be cached")
        return encoded.reshape(shape)

    def decode(self, rows: Bytes) -> Floats:
        """Values float32 [..., n] of encoded rows uint8 [..., bytes_per_row(n)]; CodecError when a block is cut."""
        width = rows.shape[-1]
        if width % self.block_bytes:
            raise CodecError(
                f"{self.name}: a row of {width} bytes is not a multiple of its block of {self.block_bytes}"
            )
        blocks = np.ascontiguousarray(rows).reshape(-1, self.block_bytes)
        values = np.empty((len(blocks), self.block), dtype=np.float32)
        for part in self._parts(len(blocks)):
            values[part] = self._decode(blocks[part])
        return values.reshape(*rows.shape[:-1], width // self.block_bytes * self.block)

    def round_trip(self, values: Floats) -> Floats:
        """What attention reads back, float32 [..., n], when `values` [..., n] are cached in this type."""
        return self.decode(self.encode(values))

    def _parts(self, blocks: int) -> list[slice]:
        step = _VALUES_AT_ONCE // self.block
        return [slice(start, start + step) for start in range(0, blocks, step)]

    @abstractmethod
    def _encode(self, blocks: Floats) -> Bytes:
        """Values [b, block] to bytes [b, block_bytes]."""

    @abstractmethod
    def _decode(self, blocks: Bytes) -> Floats:
        """Bytes [b, block_bytes] to values [b, block]."""

    @abstractmethod
    def _range(self, blocks: Bytes) -> Floats:
        """The stored floats of encoded blocks: finite exactly when every value that went in could be held."""


class GgufCodec(Codec):
    """A type that the `gguf` package quantizes as ggml's reference does."""

    def __init__(self, name: str) -> None:
        self._type = GGMLQuantizationType[name.upper()]
        super().__init__(name, *GGML_QUANT_SIZES[self._type])

    def _encode(self, blocks: Floats) -> Bytes:
        rows = quants.quantize(blocks.reshape(1, -1), self._type)
        return rows.view(np.uint8).reshape(-1, self.block_bytes)

    def _decode(self, blocks: Bytes) -> Floats:
        values: Floats = quants.dequantize(blocks.reshape(1, -1), self._type)
        return values.reshape(-1, self.block)

    def _range(self, blocks: Bytes) -> Floats:
        if self.block == 1:
            return self._decode(blocks)
        return _halves(blocks, 2 if self.name.endswith("_1") else 1)


class BlockCodec(Codec):
    """The family of q4_0 and q4_1 at any of 2 to 6 bits: 32 values, an fp16 scale, and for `_1` types an fp16 minimum.

    `_0`: scale = (the value largest in magnitude) / -2^(bits-1), code = round(x / scale) + 2^(bits-1).
    `_1`: scale = (max - min) / (2^bits - 1), code = round((x - min) / scale). Halves round up; codes are clipped to
    their width. The scale that divides is the float32 one; the fp16 one is what decoding sees.

    A block is scale, [minimum], then the codes cut into fields of one, two and four bits, most significant field
    first. Value j of 32 stands in a field of w bits at bits w * (j div n) of byte j mod n, n = 4 * w bytes for two and
    four bits; in a one-bit field it is bit j of a little-endian word. At 4 and 5 bits that is q4 and q5 of ggml.
    """

    def __init__(self, bits: int, minimum: bool) -> None:
        self.bits = bits
        self.minimum = minimum
        self._fields = [width for width in (1, 2, 4) if bits & width]
        self._header = 4 if minimum else 2
        super().__init__(f"q{bits}_{int(minimum)}", 32, self._header + 4 * bits)

    def _encode(self, blocks: Floats) -> Bytes:
        levels = 1 << self.bits
        if self.minimum:
            low = blocks.min(axis=1, keepdims=True)
            scale = (blocks.max(axis=1, keepdims=True) - low) / np.float32(levels - 1)
            codes = (blocks - low) * _inverse(scale) + np.float32(0.5)
            header = [_as_half(scale), _as_half(low)]
        else:
            scale = _peak(blocks) / np.float32(-levels / 2)
            codes = blocks * _inverse(scale) + np.float32(levels / 2 + 0.5)
            header = [_as_half(scale)]
        packed = np.minimum(codes, np.float32(levels - 1)).astype(np.uint8)
        fields = []
        for width in reversed(self._fields):
            fields.append(_pack(packed, width))
            packed >>= width
        return np.concatenate([*header, *reversed(fields)], axis=1)

    def _decode(self, blocks: Bytes) -> Floats:
        codes = np.zeros((len(blocks), 32), dtype=np.uint8)
        start = self._header
        for width in self._fields:
            codes <<= width
            codes |= _unpack(blocks[:, start : start + 4 * width], width)
            start += 4 * width
        values = codes.astype(np.float32)
        stored = self._range(blocks)
        if self.minimum:
            return values * stored[:, :1] + stored[:, 1:]
        return (values - np.float32(1 << self.bits - 1)) * stored

    def _range(self, blocks: Bytes) -> Floats:
        return _halves(blocks, self._header // 2)


class Iq4NlCodec(Codec):
    """iq4_nl: 32 values, an fp16 scale, and 4-bit indices into sixteen unevenly spaced levels.

    As ggml's row quantizer for caches does it: one try at scale = peak / -127, indices to the nearest level, then the
    scale refitted by least squares with weights x^2, in float32 and in the order of the values. (The search over
    several scales belongs to the quantizer for weights.) A block whose largest magnitude is below 1e-15 has scale 0.
    """

    LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)

    # Midpoints between levels are multiples of 1/2, so floor(2 x) decides the nearest level exactly; halves go up.
    _NEAREST = np.searchsorted(LEVELS[:-1] + LEVELS[1:], np.arange(-254, 227), side="right").astype(np.uint8)
    _SMALLEST = np.float32(1e-15)

    def __init__(self) -> None:
        super().__init__("iq4_nl", 32, 18)

    def _encode(self, blocks: Floats) -> Bytes:
        peak = _peak(blocks)[:, 0]
        columns = np.ascontiguousarray(blocks.T)  # [32, b]
        steps = np.floor(columns * _inverse(peak / self.LEVELS[0]) * np.float32(2))
        codes = self._NEAREST[np.fmin(np.fmax(steps, -254), 226).astype(np.intp) + 254]
        levels = self.LEVELS.take(codes)
        weighted = columns * columns * levels
        fitted = _sum_in_order(weighted * columns) / _sum_in_order(weighted * levels)
        scale = np.where(np.abs(peak) < self._SMALLEST, np.float32(0), fitted)
        packed: Bytes = codes[:16] | codes[16:] << 4
        return np.concatenate([_as_half(scale[:, None]), packed.T], axis=1)

    def _decode(self, blocks: Bytes) -> Floats:
        return self.LEVELS[_unpack(blocks[:, 2:], 4)] * self._range(blocks)

    def _range(self, blocks: Bytes) -> Floats:
        return _halves(blocks, 1)


def _peak(blocks: Floats) -> Floats:
    """The value largest in magnitude of each block, with its sign; the first of equals. [b, 1]."""
    peak: Floats = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    return peak


def _sum_in_order(rows: Floats) -> Floats:
    """Sum over axis 0, added strictly row after row: the order decides the last bit, and ndarray.sum promises none."""
    total: Floats = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


def _inverse(scale: Floats) -> Floats:
    """1 / scale, and 0 where that is not finite: blocks of zeros, and scales that fp16 will round to zero anyway."""
    inverse = np.float32(1) / scale
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _halves(blocks: Bytes, count: int) -> Floats:
    """The first `count` fp16 fields of each block, as float32 [b, count]."""
    return np.ascontiguousarray(blocks[:, : 2 * count]).view(np.float16).astype(np.float32)


def _as_half(values: Floats) -> Bytes:
    """float32 [b, 1] to the bytes [b, 2] of its fp16."""
    return values.astype(np.float16).view(np.uint8)


def _pack(codes: Bytes, width: int) -> Bytes:
    """The low `width` bits of codes [b, 32] as a field of bytes [b, 4 * width]."""
    if width == 1:
        return np.packbits(codes & 1, axis=1, bitorder="little")
    lanes = (codes & np.uint8((1 << width) - 1)).reshape(len(codes), 8 // width, 4 * width)
    packed = lanes[:, 0].copy()
    for lane in range(1, 8 // width):
        packed |= lanes[:, lane] << np.uint8(lane * width)
    return packed


def _unpack(field: Bytes, width: int) -> Bytes:
    """The inverse of `_pack`: a field [b, 4 * width] to its 32 values [b, 32] of `width` bits."""
    if width == 1:
        return np.unpackbits(field, axis=1, bitorder="little")
    lanes = np.empty((len(field), 8 // width, 4 * width), dtype=np.uint8)
    for lane in range(8 // width):
        np.right_shift(field, lane * width, out=lanes[:, lane])
    lanes &= (1 << width) - 1
    return lanes.reshape(len(field), 32)


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        codec.name: codec
        for codec in (
            *(BlockCodec(bits, minimum) for bits in (2, 3) for minimum in (False, True)),
            *map(GgufCodec, ("q4_0", "q4_1")),
            Iq4NlCodec(),
            *map(GgufCodec, ("q5_0", "q5_1")),
            *(BlockCodec(6, minimum) for minimum in (False, True)),
            *map(GgufCodec, ("q8_0", "f16", "bf16", "f32")),
        )
    }
)
"""Every standard cache type by name, in the order of its bits."""


def codec(name: str) -> Codec:
    """The standard cache type of that name; CodecError, with the names there are, when there is none."""
    try:
        return CODECS[name]
    except KeyError:
        raise CodecError(f"there is no cache type {name!r}; there are {', '.join(CODECS)}") from None
