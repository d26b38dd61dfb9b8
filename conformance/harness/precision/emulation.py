"""A precision tail over any body on an unmodified build, whose own cache is 16-bit.

Rows that leave the tail are replaced by what a body of the chosen type would give back. The build's attention then reads
exact newest rows and quantized older rows, each once and under its one softmax, because they lie in one cache.

Rows are rewritten before every step, so the granularity is the micro-batch: with n rows decoded in a step and a tail of
N, the last query of the step reads exactly N exact rows, the first one N - n + 1, and no query fewer than the rows of
its own step up to itself. At n = 1 every query reads exactly N, for N of 1 or more. A tail of 0 is a tail of 1 there:
the row of the query itself is always exact, where a native quantized cache reads that from the body too.

Rows are edited in the build's own memory where it tells where that is and where its bytes are those of a saved state
before and after the first edit. Otherwise the state is saved, edited and restored, which costs two transfers of the
whole sequence for every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from conformance.harness.contract.census import AttentionLayer, ModelCensus
from conformance.harness.engine import Blob, CacheSide, Context, ContextSettings, Logits, StateError
from conformance.harness.engine.context import Outputs
from conformance.harness.precision.body import Body, StandardBody, body
from conformance.harness.precision.kvarn import GROUP, SINK_ROWS
from conformance.harness.precision.tail import TailError, TailLedger, resolve_tail
from conformance.harness.state import LayerMap, part
from conformance.harness.state import parse as parse_state

Halves = NDArray[np.float16]
EXACT = "f16"
"""The body that leaves every row as it is."""


@dataclass(frozen=True)
class CacheChoice:
    """What a cache keeps: type of the K body and of the V body, and the tail over both.

    `rotated` says whether standard quantized bodies are kept rotated as llama.cpp keeps its own. `as_kvarn` gives a
    standard body the exact rows that KVarN has, sink, filling group and shortest tail, so that both can be compared.
    """

    key: str
    value: str
    tail: int = 0
    rotated: bool = True
    as_kvarn: bool = False

    @classmethod
    def of(cls, name: str, tail: int = 0, *, rotated: bool = True, as_kvarn: bool = False) -> CacheChoice:
        """The same body on both sides."""
        return cls(name, name, tail, rotated, as_kvarn)


def settings_for(n_ctx: int, ubatch: int, **more: object) -> ContextSettings:
    """The settings of a context that can be emulated over in place: a 16-bit cache that lies row by row, whole."""
    return ContextSettings(
        n_ctx=n_ctx, n_batch=ubatch, n_ubatch=ubatch, flash_attn="on", swa_full=True, reach_cache=True
    ).changed(**more)


@dataclass
class _Part:
    """One side of layers of one shape and window, with the body they share and what has been done to their rows."""

    side: CacheSide
    layers: tuple[int, ...]
    width: int
    body: Body
    sink: int
    ledger: TailLedger
    rewritten: int = 0

    def due(self, rows: int) -> range:
        """Rows to rewrite now, of `rows` that are in the cache: out of the tail, in whole groups, not yet done."""
        stop = min(self.ledger.demoted, rows)
        stop -= stop % self.body.group
        return range(max(self.rewritten, self.sink), stop)

    def roll_back(self, rows: int) -> None:
        self.rewritten = min(self.rewritten, rows)
        self.ledger.roll_back(rows)
        self.ledger.demoted = self.rewritten  # what was only due has not lost anything


@dataclass(frozen=True)
class Checkpoint:
    """A saved sequence with what is known about its rows."""

    blob: Blob
    parts: list[_Part] = field(repr=False)
    rows: int = 0


class TailedSequence:
    """Sequence 0 of a context, decoded under a body and a tail.

    Attributes:
        in_place: whether rows are edited in the build's memory; None until the first edit decides.
        rewritten_rows: rows rewritten so far, counted once for every layer and side.

    Raises:
        CodecError: a body that does not exist or cannot take the head dimension.
        TailError: a tail that cannot be, or a cache that is not 16-bit.

    """

    def __init__(self, context: Context, census: ModelCensus, choice: CacheChoice, *, in_place: bool = True) -> None:
        settings = context.settings
        if {settings.type_k, settings.type_v} != {EXACT}:
            raise TailError(f"rows are rewritten in an f16 cache only, not in {settings.type_k} and {settings.type_v}")
        self.context = context
        self.choice = choice
        self.rows = 0
        self.rewritten_rows = 0
        self._attention = census.attention or ()
        self._map = layer_map(census)
        self._parts = [*self._made("k", choice.key, census), *self._made("v", choice.value, census)]
        reachable = settings.flash_attn == "on" and (settings.swa_full or not census.sliding_window)
        self.in_place: bool | None = None if in_place and reachable and settings.reach_cache else False

    def _made(self, side: CacheSide, name: str, census: ModelCensus) -> Iterator[_Part]:
        if name == EXACT:
            return
        shapes: dict[tuple[int, int, bool], list[int]] = {}
        for layer in self._attention:
            head_dim = layer.key_dim if side == "k" else layer.value_dim
            shapes.setdefault((layer.n_head_kv, head_dim, layer.sliding), []).append(layer.index)
        for (heads, head_dim, sliding), layers in shapes.items():
            kept, window = self._body(name, head_dim, side), census.sliding_window if sliding else None
            tail = self._resolved(kept, window)
            if tail != window:  # a tail as long as the window leaves nothing that a query sees to a body
                sink = 0 if sliding else kept.sink
                yield _Part(side, tuple(layers), heads * head_dim, kept, sink, TailLedger(tail))

    def _body(self, name: str, head_dim: int, side: CacheSide) -> Body:
        kept = body(name, head_dim, side, rotated=self.choice.rotated)
        if self.choice.as_kvarn and isinstance(kept, StandardBody):
            return replace(kept, group=GROUP, sink=SINK_ROWS)
        return kept

    def _resolved(self, kept: Body, window: int | None) -> int:
        return resolve_tail(self.choice.tail, kvarn=kept.group == GROUP, window=window)

    @property
    def missing(self) -> int:
        """How many rows the worst layer's tail lacks: 0 is full coverage, more is PARTIAL; see `TailLedger`."""
        return max((0, *(kept.ledger.missing for kept in self._parts)))  # rows that are due lack nothing yet

    def exact_rows(self, layer: int, side: CacheSide = "k") -> NDArray[np.bool_]:
        """Which rows of a layer have never been rewritten, bool [rows], by the books."""
        exact = np.ones(self.rows, dtype=np.bool_)
        for kept in self._parts:
            if kept.side == side and layer in kept.layers:
                exact[kept.sink : kept.rewritten] = False
        return exact

    def resolved_tail(self, layer: int, side: CacheSide) -> int | None:
        """Rows of the tail that a layer was given; None where nothing of it is ever rewritten."""
        for kept in self._parts:
            if kept.side == side and layer in kept.layers:
                return kept.ledger.tail
        return None

    def decode(self, tokens: NDArray[np.int32], outputs: Outputs = "all") -> Logits:
        """Decode tokens int32 [n] in steps of the context's micro-batch; logits as `Context.decode` gives them."""
        return np.concatenate(list(self.steps(tokens, outputs)))

    def steps(self, tokens: NDArray[np.int32], outputs: Outputs = "all") -> Iterator[Logits]:
        """As `decode`, one step at a time."""
        size = self.context.settings.n_ubatch
        for start in range(0, len(tokens), size):
            step = tokens[start : start + size]
            self._demote(len(step))
            yield self.context.decode(step, start=self.rows, outputs=outputs)
            self.rows += len(step)

    def roll_back(self, rows: int) -> None:
        """Keep the first `rows` rows only. Rows that were rewritten stay so; `missing` then says how many."""
        if not self.context.seq_rm(0, rows):
            raise StateError(f"the build refused to remove positions from {rows} on")
        self.rows = rows
        for kept in self._parts:
            kept.roll_back(rows)

    def save(self) -> Checkpoint:
        """The sequence as it is, rewritten rows included."""
        return Checkpoint(self.context.save(), deepcopy(self._parts), self.rows)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Bring a saved sequence back into this context, which is emptied first."""
        self.context.clear()
        self.context.restore(checkpoint.blob)
        self._parts, self.rows = deepcopy(checkpoint.parts), checkpoint.rows

    def _demote(self, coming: int) -> None:
        """Commit `coming` rows and rewrite those that are in the cache and leave the tail by it."""
        for kept in self._parts:
            kept.ledger.commit(coming)
        due = [(kept, rows) for kept in self._parts if (rows := kept.due(self.rows))]
        if not due:
            return
        if self.in_place is None:
            self.in_place = self._lies_as_saved()
            self._rewrite(due)
            if self.in_place and not self._lies_as_saved():
                raise StateError("the build's cache tensors are not what it saves: rows edited in place do not show")
        else:
            self._rewrite(due)
        for kept, rows in due:
            kept.rewritten = rows.stop
            self.rewritten_rows += len(rows) * len(kept.layers)

    def _rewrite(self, due: Sequence[tuple[_Part, range]]) -> None:
        if self.in_place:
            for kept, rows in due:
                self._replace(kept, slice(rows.start, rows.stop), [self._view(kept, n) for n in kept.layers])
            return
        blob = self.context.save()
        state = parse_state(blob, attention_layers=len(self._attention))
        for kept, rows in due:
            positions = next(
                cache for cache, n in zip(state.attention, self._map.attention, strict=True) if kept.layers[0] in n
            ).cells.positions
            cells = np.flatnonzero((positions >= rows.start) & (positions < rows.stop))  # a window leaves cells behind
            if len(cells) % kept.body.group:
                raise StateError(f"a group of {kept.body.group} rows is saved in part; decode with swa_full")
            views = [part(state, layer, kept.side, layers=self._map).values() for layer in kept.layers]
            self._replace(kept, cells, views)
        self.context.restore(blob)

    def _replace(self, kept: _Part, rows: slice | NDArray[np.intp], views: Sequence[Halves]) -> None:
        """Write what the body gives back over rows of all layers' views, float16 [cells, width] each."""
        exact = np.stack([view[rows] for view in views]).astype(np.float32)
        for view, values in zip(views, kept.body.round_trip(exact).astype(np.float16), strict=True):
            view[rows] = values

    def _view(self, kept: _Part, layer: int) -> Halves:
        found = self.context.cache_rows(kept.side, layer, self.rows, 2 * kept.width)
        assert found is not None
        return found.view(np.float16)

    def _lies_as_saved(self) -> bool:
        """Whether the cache tensors hold, row by row, what the build saves of the sequence."""
        state = parse_state(self.context.save(), attention_layers=len(self._attention))
        for kept in self._parts:
            for layer in kept.layers:
                saved = part(state, layer, kept.side, layers=self._map)
                found = self.context.cache_rows(kept.side, layer, saved.n_cells, 2 * kept.width)
                if found is None or saved.transposed or not np.array_equal(found, saved.bytes):
                    return False
        return True


def layer_map(census: ModelCensus) -> LayerMap:
    """Which model layer each layer of a saved state is; the census must know the architecture."""
    attention: tuple[AttentionLayer, ...] = census.attention or ()
    base = tuple(layer.index for layer in attention if not layer.sliding)
    sliding = tuple(layer.index for layer in attention if layer.sliding)
    caches = (base, sliding) if sliding else (base,) if base else ()
    return LayerMap(caches, tuple(layer.index for layer in census.recurrent or ()))
