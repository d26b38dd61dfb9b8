"""Read a sequence state blob of any build by its structure, without knowing which build wrote it.

Structure as written by llama.cpp's `state_write` functions (llama-kv-cache.cpp, llama-memory-recurrent.cpp,
llama-memory-hybrid.cpp, llama-kv-cache-iswa.cpp). Everything is little-endian and unpadded:

    [u32 magic, i32 sequence]                                    where the layout has a head
    attention: u32 n_stream, per stream: u32 n_cells; if > 0:
        cells   i32 pos, u32 1, [i32 x, y, [token]], i32 sequence
        u32 v_trans, u32 n_layer, [u32 k rotation, u32 v rotation]
        K       n_layer x (i32 type, u64 row_size, n_cells rows)
        V       the same; or i32 type, u32 element_size, u32 n_channels, channels x cells; or nothing
    recurrent: u32 n_cells, cells (i32 pos, u32 0), u32 s_trans, u32 n_layer of the model,
        r of the recurrent layers (i32 type, u64 row_size, rows), then s

What the bytes do not announce (the optional fields, the sections present, whether V exists, how many layers are
recurrent) is found by trying: a reading counts when it is plausible throughout and ends exactly at the last byte.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from .sequence import (
    AttentionCache,
    AttentionLayer,
    BlobError,
    Cells,
    Layout,
    RecurrentCache,
    RecurrentLayer,
    Rows,
    SequenceState,
)

Blob = bytes | bytearray | memoryview | NDArray[np.uint8]

SEQUENCE_MAGIC = 0xAF143CD8
FILE_MAGIC = 0x67677371  # 'ggsq'

# Bounds of what llama.cpp can write (LLAMA_MAX_SEQ, LLAMA_MAX_LAYERS), and generous ones where it has none.
_MAX_SEQUENCES = 256
_MAX_LAYERS = 512
_MAX_ROW_SIZE = 1 << 32
_MAX_ROTATION = 1 << 16
_MAX_ATTENTION_CACHES = 3

# Builds keep recurrent state in f32; no ggml operator updates it in place in a quantized type.
_RECURRENT_TYPES = ("f32", "f16", "bf16")

# Sequences that each cell names in the blob of one sequence; builds refuse to load any other number.
_OWNERS_ATTENTION = 1
_OWNERS_RECURRENT = 0

_TYPES = {int(kind): (kind.name.lower(), block, size) for kind, (block, size) in GGML_QUANT_SIZES.items()}

_HEAD = struct.Struct("<Ii")
_COUNT = struct.Struct("<I")
_PAIR = struct.Struct("<II")
_ROWS = struct.Struct("<iQ")
_CHANNELS = struct.Struct("<iII")
_FILE = struct.Struct("<III")


def parse(
    blob: Blob,
    *,
    head: bool | None = None,
    attention_layers: int | None = None,
    recurrent_layers: int | None = None,
) -> SequenceState:
    """Read the blob that `llama_state_seq_get_data(_ext)` wrote, or the part of a sequence file behind its tokens.

    What the bytes leave open stays so: a blob cut exactly behind its K rows reads as a cache without V, behind the
    attention cache as no hybrid, between r tensors as fewer recurrent layers. `attention_layers` (over all caches) and
    `recurrent_layers` keep only readings with that many layers; an empty attention cache shows none and passes.
    `head` says whether magic and sequence id come first; None looks. Nothing is copied.

    Raises `BlobError` when no reading fits exactly, or when several do (it then names two of them).
    """
    data = np.frombuffer(blob, np.uint8)
    reader = _Reader(data)
    readings = list(reader.readings(head))
    if not readings:
        raise reader.furthest
    fitting = [state for state in readings if _agrees(state, attention_layers, recurrent_layers)]
    if not fitting:
        raise BlobError(
            readings[0].head.size,
            f"reads as {readings[0].outline}, which is not the expected number of layers "
            f"(attention {attention_layers}, recurrent {recurrent_layers})",
        )
    if len(fitting) > 1:
        raise BlobError(
            fitting[0].head.size,
            f"reads as {fitting[0].outline} in layout {fitting[0].layout.name} and as {fitting[1].outline} in layout "
            f"{fitting[1].layout.name}: give the expected number of attention and recurrent layers",
        )
    return fitting[0]


@dataclass(frozen=True, eq=False)
class SequenceFile:
    """What `llama_state_seq_save_file` wrote: int32 `tokens`, and `blob`, a state without a head."""

    version: int
    tokens: NDArray[np.int32]
    blob: NDArray[np.uint8]


def is_sequence_file(content: Blob) -> bool:
    """Whether the bytes begin with the magic of a sequence file."""
    return np.frombuffer(content, np.uint8)[:4].tobytes() == FILE_MAGIC.to_bytes(4, "little")


def split_file(content: Blob) -> SequenceFile:
    """Take a sequence file apart, without copying. Raises `BlobError` when it is none or ends within the tokens."""
    data = np.frombuffer(content, np.uint8)
    if not is_sequence_file(content):
        raise BlobError(0, "no sequence file: the magic 'ggsq' is missing")
    if data.size < _FILE.size:
        raise BlobError(data.size, "the sequence file ends within its head")
    _, version, n_tokens = _FILE.unpack_from(data.data)
    end = _FILE.size + 4 * n_tokens
    if end > data.size:
        raise BlobError(8, f"{n_tokens} tokens do not fit into a file of {data.size} bytes")
    return SequenceFile(version, data[_FILE.size : end].view("<i4"), data[end:])


class _Reader:
    """Enumerates the readings of one buffer and remembers the failure that got furthest."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data = data
        self.furthest = BlobError(-1, "nothing was tried")

    def readings(self, head: bool | None) -> Iterator[SequenceState]:
        has_head = self.data.size >= _COUNT.size and _COUNT.unpack_from(self.data.data)[0] == SEQUENCE_MAGIC
        if head is not None and head != has_head:
            raise BlobError(0, "a head stands where none is expected" if has_head else "the magic of a head is missing")
        source = self._unpack(_HEAD, 0, "sequence id")[1] if has_head else None
        start = _HEAD.size if has_head else 0
        for attention, recurrent, layout in self._sections(start, Layout(has_head), (), None):
            yield SequenceState(layout, source, attention, recurrent, self.data[:start], self.data.size)

    def _sections(
        self, offset: int, layout: Layout, attention: tuple[AttentionCache, ...], recurrent: RecurrentCache | None
    ) -> Iterator[tuple[tuple[AttentionCache, ...], RecurrentCache | None, Layout]]:
        if offset == self.data.size and (attention or recurrent):
            with self._attempt():
                if not recurrent and any(len(cache.cells) for cache in attention) and not any(_layers(attention)):
                    raise BlobError(offset, "cells, but not one layer")
                yield attention, recurrent, layout
            return
        if len(attention) < _MAX_ATTENTION_CACHES:
            for cache, found in self._attention(offset, layout, attention):
                yield from self._sections(offset + cache.raw.size, found, (*attention, cache), recurrent)
        if recurrent is None:
            for memory in self._recurrent(offset):
                yield from self._sections(offset + memory.raw.size, layout, attention, memory)

    def _attention(
        self, start: int, layout: Layout, before: tuple[AttentionCache, ...]
    ) -> Iterator[tuple[AttentionCache, Layout]]:
        """Every way to read an attention cache at `start`, with the layout that it then shows.

        The caches of one context have equally many streams.
        """
        with self._attempt():
            (n_stream,) = self._unpack(_COUNT, start, "stream count")
            if not 1 <= n_stream <= _MAX_SEQUENCES:
                raise BlobError(start, f"an attention cache of {n_stream} streams")
            if before and n_stream != before[0].n_stream:
                raise BlobError(start, f"an attention cache of {n_stream} streams behind one of {before[0].n_stream}")
            offset = start + _COUNT.size
            for stream in range(n_stream):
                (n_cells,) = self._unpack(_COUNT, offset, "cell count")
                offset += _COUNT.size
                if n_cells:
                    yield from self._occupied(start, offset, n_stream, stream, n_cells, layout)
                    return
            yield AttentionCache(n_stream, None, _NO_CELLS, (), None, self.data[start:offset]), layout

    def _occupied(
        self, start: int, cells_at: int, n_stream: int, stream: int, n_cells: int, layout: Layout
    ) -> Iterator[tuple[AttentionCache, Layout]]:
        for n_ext in (0, 2, 3) if layout.cell_ext is None else (layout.cell_ext,):
            for rotated in (False, True) if layout.rotation is None else (layout.rotation,):
                with self._attempt():
                    cells, offset = self._cells(cells_at, n_cells, n_ext, _OWNERS_ATTENTION)
                    v_trans, n_layer = self._unpack(_PAIR, offset, "V order and layer count")
                    if v_trans > 1 or n_layer > _MAX_LAYERS:
                        raise BlobError(offset, f"no V order and layer count: {v_trans}, {n_layer}")
                    offset += _PAIR.size
                    rotation = None
                    if rotated:
                        rotation, offset = self._rotation(offset), offset + _PAIR.size
                    keys, offset = self._tensors(self._rows, offset, n_cells, n_layer, "K")
                    found = replace(layout, cell_ext=n_ext, rotation=rotated)
                    read_values = self._channels if v_trans else self._rows
                    for values, end in self._values(read_values, offset, n_cells, keys):
                        with self._attempt():
                            end = self._empty_streams(end, n_stream - stream - 1)
                            layers = tuple(map(AttentionLayer, keys, values))
                            yield AttentionCache(n_stream, stream, cells, layers, rotation, self.data[start:end]), found

    def _values(
        self, read: _ReadRows, offset: int, n_cells: int, keys: Sequence[Rows]
    ) -> Iterator[tuple[Sequence[Rows | None], int]]:
        """V of every layer, or of none. Only a layer without KV heads has empty rows, and then both of them are."""
        with self._attempt():
            values, end = self._tensors(read, offset, n_cells, len(keys), "V")
            if any((k.row_size == 0) != (v.row_size == 0) for k, v in zip(keys, values, strict=True)):
                raise BlobError(offset, "V rows are empty where K rows are not")
            yield values, end
        if keys:
            yield [None] * len(keys), offset

    def _recurrent(self, start: int) -> Iterator[RecurrentCache]:
        """Every way to read the recurrent memory at `start`. All its layers have the same r row and the same s row."""
        tensors: list[Rows] = []
        ends: list[int] = []
        with self._attempt():
            (n_cells,) = self._unpack(_COUNT, start, "recurrent cell count")
            cells, offset = self._cells(start + _COUNT.size, n_cells, 0, _OWNERS_RECURRENT)
            s_trans, n_model_layer = self._unpack(_PAIR, offset, "s order and layer count")
            if s_trans or n_model_layer > _MAX_LAYERS:
                raise BlobError(offset, f"no s order and layer count: {s_trans}, {n_model_layer}")
            offset += _PAIR.size
            while len(tensors) < 2 * n_model_layer:
                rows, end = self._rows(offset, n_cells, f"recurrent tensor {len(tensors)}")
                if rows.type not in _RECURRENT_TYPES:
                    raise BlobError(offset, f"recurrent state of type {rows.type}")
                tensors.append(rows)
                ends.append(end)
                offset = end
        for n_layer in range(len(tensors) // 2, 0, -1):
            r, s = tensors[:n_layer], tensors[n_layer : 2 * n_layer]
            if _uniform(r) and _uniform(s):
                layers = tuple(map(RecurrentLayer, r, s))
                yield RecurrentCache(cells, n_model_layer, layers, self.data[start : ends[2 * n_layer - 1]])

    def _cells(self, start: int, n_cells: int, n_ext: int, n_sequences: int) -> tuple[Cells, int]:
        """`n_cells` cells with `n_ext` further fields, each of which names `n_sequences` sequences."""
        if n_cells == 0:
            return _NO_CELLS, start
        width = 2 + n_ext + n_sequences
        taken, end = self._take(start, 4 * width * n_cells, f"{n_cells} cells")
        table = taken.view("<i4").reshape(n_cells, width)
        if (table[:, 1] != n_sequences).any():
            cell = int(np.argmax(table[:, 1] != n_sequences))
            raise BlobError(start + 4 * (cell * width + 1), f"a cell of {table[cell, 1]} sequences, not {n_sequences}")
        x, y, token = (table[:, 2 + field] if field < n_ext else None for field in range(3))
        return Cells(table[:, 0], x, y, token, taken.size), end

    def _rotation(self, offset: int) -> tuple[int, int]:
        k, v = self._unpack(_PAIR, offset, "rotation widths")
        if max(k, v) > _MAX_ROTATION or k & (k - 1) or v & (v - 1):
            raise BlobError(offset, f"no rotation widths (powers of two, or 0 for none): {k}, {v}")
        return k, v

    def _empty_streams(self, offset: int, n_stream: int) -> int:
        for _ in range(n_stream):
            if self._unpack(_COUNT, offset, "cell count")[0]:
                raise BlobError(offset, "cells in a second stream, but a sequence occupies one")
            offset += _COUNT.size
        return offset

    def _tensors(self, read: _ReadRows, offset: int, n_cells: int, n_layer: int, part: str) -> tuple[list[Rows], int]:
        tensors = []
        for layer in range(n_layer):
            rows, offset = read(offset, n_cells, f"{part} of layer {layer}")
            tensors.append(rows)
        return tensors, offset

    def _rows(self, offset: int, n_cells: int, what: str) -> tuple[Rows, int]:
        kind, row_size = self._unpack(_ROWS, offset, f"row head of {what}")
        name, _, unit_size = self._type(kind, offset, what)
        if row_size % unit_size or row_size > _MAX_ROW_SIZE:
            raise BlobError(offset + 4, f"{what}: {row_size} bytes are no row of {name}")
        taken, end = self._take(offset + _ROWS.size, n_cells * row_size, what)
        return Rows(name, unit_size, taken.reshape(n_cells, row_size)), end

    def _channels(self, offset: int, n_cells: int, what: str) -> tuple[Rows, int]:
        kind, unit_size, n_channels = self._unpack(_CHANNELS, offset, f"channel head of {what}")
        name, block, expected = self._type(kind, offset, what)
        if block != 1 or unit_size != expected:
            raise BlobError(offset + 4, f"{what}: no transposed {name} of {unit_size} bytes per element")
        taken, end = self._take(offset + _CHANNELS.size, n_channels * n_cells * unit_size, what)
        return Rows(name, unit_size, taken.reshape(n_channels, n_cells, unit_size), transposed=True), end

    def _type(self, kind: int, offset: int, what: str) -> tuple[str, int, int]:
        if kind not in _TYPES:
            raise BlobError(offset, f"{what}: {kind} is no ggml type")
        return _TYPES[kind]

    def _take(self, start: int, n_bytes: int, what: str) -> tuple[NDArray[np.uint8], int]:
        if n_bytes > self.data.size - start:
            raise BlobError(start, f"{what}: {n_bytes} bytes announced, {self.data.size - start} left")
        return self.data[start : start + n_bytes], start + n_bytes

    def _unpack(self, form: struct.Struct, offset: int, what: str) -> tuple[int, ...]:
        if offset + form.size > self.data.size:
            raise BlobError(offset, f"the blob ends before the {what}")
        return form.unpack_from(self.data.data, offset)

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """What fails within is one reading less, not an error."""
        try:
            yield
        except BlobError as failure:
            if failure.where > self.furthest.where:
                self.furthest = failure


_ReadRows = Callable[[int, int, str], tuple[Rows, int]]

_NO_CELLS = Cells(np.empty(0, np.int32), None, None, None, 0)


def _layers(attention: Sequence[AttentionCache]) -> list[int]:
    return [len(cache.layers) for cache in attention]


def _uniform(tensors: Sequence[Rows]) -> bool:
    return len({(rows.type, rows.row_size) for rows in tensors}) == 1


def _agrees(state: SequenceState, attention_layers: int | None, recurrent_layers: int | None) -> bool:
    known = all(cache.stream is not None for cache in state.attention)
    n_attention = sum(_layers(state.attention))
    n_recurrent = len(state.recurrent.layers) if state.recurrent else 0
    return (not known or attention_layers in (None, n_attention)) and recurrent_layers in (None, n_recurrent)
