"""Reach one tensor of a state to edit it in place, and splice two states.

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
