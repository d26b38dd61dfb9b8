"""Reach one tensor of a state to edit it in place, splice two states, or make one longer.

Edits go through the views: with a state parsed from a writable buffer, `part(state, 3, "s").bytes[:] = 0` clears a
layer, `part(state, 0, "k").units[5] = 0` one cell, and `rows.units[:] = np.roll(rows.units, 1, axis=0)` moves every
row to the next cell.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .sequence import LayerMap, PartName, Rows, SequenceState


def part(state: SequenceState, layer: int, name: PartName, *, layers: LayerMap | None = None, cache: int = 0) -> Rows:
    """The rows of part `name` of one layer: a model layer under a map, else counted within attention cache `cache`.

    Raises `LookupError` when the state has no such part, `ValueError` when the map does not fit the state.
    """
    names = (layers or LayerMap.of(state)).fit(state)
    found: Rows | None = None
    if name in ("r", "s"):
        if state.recurrent and layer in names.recurrent:
            recurrent = state.recurrent.layers[names.recurrent.index(layer)]
            found = recurrent.r if name == "r" else recurrent.s
    else:
        for number, stored in enumerate(state.attention):
            if (layers or number == cache) and stored.layers and layer in names.attention[number]:
                attention = stored.layers[names.attention[number].index(layer)]
                found = attention.k if name == "k" else attention.v
    if found is None:
        raise LookupError(f"no {name} of layer {layer} in a state of {state.outline}")
    return found


def splice(attention: SequenceState, recurrent: SequenceState) -> NDArray[np.uint8]:
    """A new blob, uint8: head and attention caches of one state, recurrent memory of the other.

    Raises `ValueError` when either half is missing.
    """
    if not attention.attention or recurrent.recurrent is None:
        raise ValueError(f"nothing to splice from {attention.outline} and {recurrent.outline}")
    return np.concatenate([attention.head, *(cache.raw for cache in attention.attention), recurrent.recurrent.raw])


def lengthened(state: SequenceState, n_tokens: int) -> NDArray[np.uint8]:
    """A new blob, uint8, of `n_tokens` tokens at positions from 0 up, whose rows are those of a shorter one over again.

    What a model makes of it means nothing. But a decode behind it takes the time of a real one, and a long cache is
    filled in the time of a copy. Recurrent state stays as it is, at the last position. Raises `ValueError` unless there
    is exactly one attention cache, with cells in it: a sliding one would not hold every token.
    """
    stream = state.attention[0].stream if len(state.attention) == 1 else None
    if stream is None:
        raise ValueError(f"a state of {state.outline} cannot be made longer; give one with one attention cache")
    (cache,) = state.attention
    raw, again = cache.raw, np.arange(n_tokens) % len(cache.cells)
    begin = 4 * (2 + stream)
    end = begin + cache.cells.n_bytes
    cells = raw[begin:end].view("<i4").reshape(len(cache.cells), -1)[again]
    cells[:, 0] = np.arange(n_tokens)
    count = np.array([n_tokens], "<u4")
    pieces = [state.head, raw[: begin - count.nbytes], count.view(np.uint8), cells.view(np.uint8).reshape(-1)]
    for rows in (*(layer.k for layer in cache.layers), *(layer.v for layer in cache.layers if layer.v is not None)):
        begin = rows.bytes.__array_interface__["data"][0] - raw.__array_interface__["data"][0]
        pieces += [raw[end:begin], rows.bytes.take(again, axis=1 if rows.transposed else 0).reshape(-1)]
        end = begin + rows.bytes.size
    pieces.append(raw[end:])
    if state.recurrent:
        memory, n_cells = state.recurrent.raw.copy(), len(state.recurrent.cells)
        if n_cells:
            memory[4 : 4 + state.recurrent.cells.n_bytes].view("<i4").reshape(n_cells, -1)[:, 0] = n_tokens - 1
        pieces.append(memory)
    return np.concatenate(pieces)
