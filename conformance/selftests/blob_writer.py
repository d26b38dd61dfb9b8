"""Writes sequence blobs for the self-tests from a plain description, independently of the parser.

Types, block sizes and block bytes are ggml's; the order of fields is that of llama.cpp's `state_write` functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

# name: (number, values in a block, bytes of a block)
TYPES = {
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "q4_0": (2, 32, 18),
    "q4_1": (3, 32, 20),
    "q5_0": (6, 32, 22),
    "q5_1": (7, 32, 24),
    "q8_0": (8, 32, 34),
    "iq4_nl": (20, 32, 18),
    "bf16": (30, 1, 2),
}


@dataclass(frozen=True)
class Format:
    """What distinguishes the builds: `mrope_ext` fields are stored per cell of a model with several positions."""

    name: str
    head: bool
    mrope_ext: int
    rotation: bool


FORMATS = (
    Format("F1", False, 0, False),
    Format("F2", False, 2, False),
    Format("F3", True, 2, False),
    Format("F4", True, 3, False),
    Format("F5", True, 3, True),
)


@dataclass(frozen=True, eq=False)
class Tensor:
    """Rows of one layer, uint8 [n_cells, row_size]."""

    type: str
    rows: NDArray[np.uint8] = field(repr=False)

    @classmethod
    def random(cls, rng: np.random.Generator, type_: str, n_cells: int, n_values: int) -> Tensor:
        _, block, size = TYPES[type_]
        return cls(type_, rng.integers(0, 256, (n_cells, n_values // block * size), np.uint8))


@dataclass(frozen=True, eq=False)
class Attention:
    """An attention cache; `positions` int32 [n], `ext` int32 [n, 3] (x, y, token), `v` None where there is no V."""

    positions: NDArray[np.int32]
    ext: NDArray[np.int32] = field(repr=False)
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...] | None
    v_transposed: bool = False
    n_stream: int = 1
    stream: int = 0
    rotation: tuple[int, int] = (0, 0)

    def cells(self, n_ext: int) -> bytes:
        out = b""
        for cell, position in enumerate(self.positions):
            out += _i32(int(position)) + _u32(1)
            out += b"".join(_i32(int(value)) for value in self.ext[cell, :n_ext]) + _i32(0)
        return out


@dataclass(frozen=True, eq=False)
class Recurrent:
    """The recurrent memory of a model of `n_model_layer` layers."""

    positions: NDArray[np.int32]
    n_model_layer: int
    r: tuple[Tensor, ...]
    s: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Described:
    """One blob as it should be read; `mrope` says whether cells carry the format's further fields."""

    format: Format
    mrope: bool
    source: int
    attention: tuple[Attention, ...]
    recurrent: Recurrent | None
    readable_prefixes: list[int] = field(default_factory=list)

    @property
    def n_ext(self) -> int:
        return self.format.mrope_ext if self.mrope else 0

    def write(self) -> bytes:
        """The blob; notes in `readable_prefixes` where a shorter blob ends that is complete in itself."""
        out = _u32(0xAF143CD8) + _i32(self.source) if self.format.head else b""
        self.readable_prefixes.clear()
        for cache in self.attention:
            out = self._attention(out, cache)
            self.readable_prefixes.append(len(out))
        if self.recurrent:
            memory = self.recurrent
            out += _u32(len(memory.positions))
            for position in memory.positions:
                out += _i32(int(position)) + _u32(0)
            out += _u32(0) + _u32(memory.n_model_layer)
            for n_written, tensor in enumerate((*memory.r, *memory.s), 1):
                out += _tensor(tensor)
                if (
                    n_written <= len(memory.r) and n_written % 2 == 0
                ):  # half of them may be s rows as long as the r rows
                    self.readable_prefixes.append(len(out))
            self.readable_prefixes.append(len(out))
        return out

    def _attention(self, out: bytes, cache: Attention) -> bytes:
        out += _u32(cache.n_stream)
        if len(cache.positions) == 0:
            return out + _u32(0) * cache.n_stream
        out += _u32(0) * cache.stream + _u32(len(cache.positions)) + cache.cells(self.n_ext)
        out += _u32(cache.v_transposed) + _u32(len(cache.k))
        if self.format.rotation:
            out += _u32(cache.rotation[0]) + _u32(cache.rotation[1])
        for tensor in cache.k:
            out += _tensor(tensor)
        keys_end, empty_streams = len(out), _u32(0) * (cache.n_stream - cache.stream - 1)
        for tensor in cache.v or ():
            out += _transposed(tensor) if cache.v_transposed else _tensor(tensor)
        out += empty_streams
        if out[keys_end:].startswith(empty_streams):  # f32 is type 0, which can pass for an empty stream
            self.readable_prefixes.append(keys_end + len(empty_streams))
        return out


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _i32(value: int) -> bytes:
    return value.to_bytes(4, "little", signed=True)


def _tensor(tensor: Tensor) -> bytes:
    row_size: int = tensor.rows.shape[1]
    head = _i32(TYPES[tensor.type][0]) + row_size.to_bytes(8, "little")
    return head + b"".join(bytes(row) for row in tensor.rows)


def _transposed(tensor: Tensor) -> bytes:
    number, _, size = TYPES[tensor.type]
    n_channels = tensor.rows.shape[1] // size
    out = _i32(number) + _u32(size) + _u32(n_channels)
    for channel in range(n_channels):
        out += b"".join(bytes(row[channel * size : (channel + 1) * size]) for row in tensor.rows)
    return out


@st.composite
def attention_caches(draw: st.DrawFn, rng: np.random.Generator, n_stream: int) -> Attention:
    n_cells = draw(st.sampled_from([0, 1, 2, 5]))
    n_layer = draw(st.integers(1, 3))
    k_type, v_type = draw(st.sampled_from(sorted(TYPES))), draw(st.sampled_from(sorted(TYPES)))
    width = draw(st.sampled_from([32, 64]))
    v = draw(st.sampled_from(["rows", "transposed", "none"]))
    transposed = v == "transposed" and TYPES[v_type][1] == 1
    return Attention(
        positions=np.sort(rng.integers(0, 500, n_cells, np.int32)),
        ext=rng.integers(-1, 500, (n_cells, 3), np.int32),
        k=tuple(Tensor.random(rng, k_type, n_cells, width) for _ in range(n_layer)),
        v=None if v == "none" else tuple(Tensor.random(rng, v_type, n_cells, 32) for _ in range(n_layer)),
        v_transposed=transposed,
        n_stream=n_stream,
        stream=draw(st.integers(0, n_stream - 1)),
        rotation=draw(st.sampled_from([(0, 0), (64, 64), (128, 64)])),
    )


@st.composite
def recurrent_memories(draw: st.DrawFn, rng: np.random.Generator, n_attention: int) -> Recurrent:
    n_cells, n_layer = draw(st.integers(0, 2)), draw(st.integers(1, 4))
    # Longer than the heads of all layers together, as in any model: the heads of empty layers cannot pass for a row.
    n_r, n_s = draw(st.sampled_from([(29, 40), (31, 27), (29, 0), (0, 32)]))
    return Recurrent(
        positions=rng.integers(1, 500, n_cells, np.int32),  # one cell at 0 begins like an empty attention cache
        n_model_layer=n_layer + n_attention,
        r=tuple(Tensor.random(rng, "f32", n_cells, n_r) for _ in range(n_layer)),
        s=tuple(Tensor.random(rng, "f32", n_cells, n_s) for _ in range(n_layer)),
    )


@st.composite
def described(draw: st.DrawFn) -> Described:
    """Blobs of every format and of every kind of memory, with random bytes for rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_caches, has_recurrent = draw(st.sampled_from([(1, False), (0, True), (1, True), (2, False), (2, True)]))
    n_stream = draw(st.integers(1, 3))  # of the context
    caches = tuple(draw(attention_caches(rng, n_stream)) for _ in range(n_caches))
    if caches and caches[0].v is None:  # a model keeps V in all its caches or in none
        caches = tuple(replace(cache, v=None, v_transposed=False) for cache in caches)
    n_attention = sum(len(cache.k) for cache in caches)
    return Described(
        format=draw(st.sampled_from(FORMATS)),
        mrope=draw(st.booleans()),
        source=draw(st.integers(0, 255)),
        attention=caches,
        recurrent=draw(recurrent_memories(rng, n_attention)) if has_recurrent else None,
    )


def hybrid_40(rng: np.random.Generator, n_cells: int = 3) -> Described:
    """The shape of a 40-layer hybrid: attention in layers 3, 7, 11, ..., recurrent state in the other 30."""
    return Described(
        format=FORMATS[3],
        mrope=True,
        source=0,
        attention=(
            Attention(
                positions=np.arange(n_cells, dtype=np.int32),
                ext=np.zeros((n_cells, 3), np.int32),
                k=tuple(Tensor.random(rng, "q8_0", n_cells, 64) for _ in range(10)),
                v=tuple(Tensor("f16", _f16(rng, n_cells, 64)) for _ in range(10)),
            ),
        ),
        recurrent=Recurrent(
            positions=np.array([n_cells - 1], np.int32),
            n_model_layer=40,
            r=tuple(Tensor("f32", _f32(rng, 1, 12)) for _ in range(30)),
            s=tuple(Tensor("f32", _f32(rng, 1, 32)) for _ in range(30)),
        ),
    )


def _f16(rng: np.random.Generator, n_cells: int, n_values: int) -> NDArray[np.uint8]:
    return np.asarray(rng.standard_normal((n_cells, n_values)), "<f2").view(np.uint8)


def _f32(rng: np.random.Generator, n_cells: int, n_values: int) -> NDArray[np.uint8]:
    return np.asarray(rng.standard_normal((n_cells, n_values)), "<f4").view(np.uint8)
