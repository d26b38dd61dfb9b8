"""How many layers, cells and bytes a sequence state holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .sequence import Rows, SequenceState

_COUNT_BYTES = 4
_PAIR_BYTES = 8
_TENSOR_HEAD_BYTES = 12


@dataclass(frozen=True)
class Census:
    """Counts and bytes of one blob, by part; the byte counts add up to the blob.

    `attention_layers` and `attention_cells` have one entry per attention cache (an empty cache shows no layers).
    `header_bytes` is all that describes and holds nothing: head, counts, types and row sizes. It is computed from the
    structure, not as the remainder. `kv_bytes_per_token` is what one token takes in K and V of all attention layers.
    """

    attention_layers: tuple[int, ...]
    attention_cells: tuple[int, ...]
    recurrent_layers: int
    recurrent_cells: int
    k_bytes: int
    v_bytes: int
    r_bytes: int
    s_bytes: int
    cell_bytes: int
    header_bytes: int
    kv_bytes_per_token: int

    @property
    def n_bytes(self) -> int:
        """Sum over the parts."""
        return self.k_bytes + self.v_bytes + self.r_bytes + self.s_bytes + self.cell_bytes + self.header_bytes


def census(state: SequenceState) -> Census:
    """Count a parsed state."""
    attention = [layer for cache in state.attention for layer in cache.layers]
    k = [layer.k for layer in attention]
    v = [layer.v for layer in attention if layer.v is not None]
    recurrent = state.recurrent.layers if state.recurrent else ()
    r, s = [layer.r for layer in recurrent], [layer.s for layer in recurrent]
    caches = (*state.attention, *((state.recurrent,) if state.recurrent else ()))
    header = state.head.size + _TENSOR_HEAD_BYTES * len([*k, *v, *r, *s])
    for cache in state.attention:
        header += _COUNT_BYTES * (1 + cache.n_stream)
        header += _PAIR_BYTES * ((cache.stream is not None) + (cache.rotation is not None))
    if state.recurrent:
        header += _COUNT_BYTES + _PAIR_BYTES
    return Census(
        attention_layers=tuple(len(cache.layers) for cache in state.attention),
        attention_cells=tuple(len(cache.cells) for cache in state.attention),
        recurrent_layers=len(recurrent),
        recurrent_cells=len(state.recurrent.cells) if state.recurrent else 0,
        k_bytes=_bytes(k),
        v_bytes=_bytes(v),
        r_bytes=_bytes(r),
        s_bytes=_bytes(s),
        cell_bytes=sum(cache.cells.n_bytes for cache in caches),
        header_bytes=header,
        kv_bytes_per_token=sum(rows.row_size for rows in (*k, *v)),
    )


def _bytes(tensors: Iterable[Rows]) -> int:
    return sum(rows.bytes.size for rows in tensors)
