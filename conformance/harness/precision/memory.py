"""What a cache costs in memory, from a model's geometry and the choices of a run. Sizes are exact, in bytes.

The same functions give a real build's buffers (standard types, no tail) and the published figures of the fork that has
KVarN and tails; its rules for stage, tail rows and promoted rings were inferred from those figures and give every one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conformance.harness.precision.body import KVarNBody, StandardBody, body
from conformance.harness.precision.codecs import codec
from conformance.harness.precision.kvarn import GROUP, STAGE_ROWS
from conformance.harness.precision.rotation import Side
from conformance.harness.precision.tail import resolve_tail

MIB = 1 << 20

_PAD = 256  # llama.cpp allocates cache rows in multiples of this


@dataclass(frozen=True)
class AttentionLayers:
    """`count` attention layers of one shape; `window` is None where every earlier row is visible."""

    count: int
    kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class RecurrentLayers:
    """`count` layers of recurrent state: a convolution window and a state matrix, as Mamba and Gated DeltaNet keep."""

    count: int
    conv_kernel: int
    inner_size: int
    groups: int
    state_size: int

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of all layers' float32 state for one sequence, the same at every context length."""
        window = (self.conv_kernel - 1) * (self.inner_size + 2 * self.groups * self.state_size)
        return 4 * self.count * (window + self.state_size * self.inner_size)


@dataclass(frozen=True)
class Run:
    """How one stream of a cache is allocated; layers without a window have `rows` rows.

    A unified cache is one stream for all its sequences. Otherwise every sequence has a stream of its own, and the
    cache costs as many times a run with `sequences` = 1.
    """

    rows: int
    ubatch: int = 512
    sequences: int = 1
    tail: int = 0


@dataclass(frozen=True)
class Footprint:
    """Bytes of attention cache by purpose: quantized (or plain) body, KVarN's stage, exact tail."""

    body: int = 0
    stage: int = 0
    tail: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.body + self.stage + self.tail

    @property
    def mib(self) -> float:
        """All bytes, in MiB of 2^20."""
        return self.total / MIB

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(self.body + other.body, self.stage + other.stage, self.tail + other.tail)


FootprintModel = Callable[[Sequence[AttentionLayers], Run, str], Footprint]
"""What gives a cache of one type on both sides its size, as `footprint` does."""


def bytes_per_token(layers: AttentionLayers, key_type: str, value_type: str) -> int:
    """Bytes that one cached token takes in these layers, in standard types.

    CodecError for a type that does not exist or cannot hold rows of that size.
    """
    key = codec(key_type).bytes_per_row(layers.kv_heads * layers.k_head_dim)
    value = codec(value_type).bytes_per_row(layers.kv_heads * layers.v_head_dim)
    return layers.count * (key + value)


def ring_rows(window: int, run: Run) -> int:
    """Rows a sliding-window layer allocates: the window and a ubatch in flight, padded, and no more than all rows."""
    return _round_up(min(run.rows, window * run.sequences + run.ubatch), _PAD)


def tail_rows(tail: int, run: Run) -> int:
    """Rows that an exact tail of `tail` rows beside a body allocates; none for a tail of 0."""
    if tail == 0:
        return 0
    return _round_up(tail + run.ubatch, _PAD) * run.sequences + (run.ubatch if run.sequences > 1 else 0)


def footprint(groups: Sequence[AttentionLayers], run: Run, key_type: str, value_type: str | None = None) -> Footprint:
    """The attention cache of a model with these groups of layers; V in the type of K unless another is named.

    CodecError for a type that does not exist or cannot take the geometry, TailError for a tail that cannot be.
    """
    sides: list[tuple[Side, str]] = [("k", key_type), ("v", value_type or key_type)]
    return sum((_side(layers, run, side, name) for layers in groups for side, name in sides), Footprint())


def _side(layers: AttentionLayers, run: Run, side: Side, name: str) -> Footprint:
    head_dim = layers.k_head_dim if side == "k" else layers.v_head_dim
    values = layers.count * layers.kv_heads * head_dim  # of one row
    rows = run.rows if layers.window is None else ring_rows(layers.window, run)
    stored = body(name, head_dim, side)
    if isinstance(stored, StandardBody) and stored.codec.block == 1:
        return Footprint(body=rows * stored.codec.bytes_per_row(values))
    tail = resolve_tail(run.tail, kvarn=isinstance(stored, KVarNBody), window=layers.window)
    if tail == layers.window:  # the whole ring is exact: nothing is left to quantize
        return Footprint(tail=2 * values * rows)
    exact = 2 * values * tail_rows(tail, run)
    if isinstance(stored, KVarNBody):
        records = layers.count * layers.kv_heads * stored.kvarn.slices * -(-rows // GROUP)
        return Footprint(records * stored.kvarn.record_bytes, 2 * values * STAGE_ROWS, exact)
    row = layers.count * stored.codec.bytes_per_row(layers.kv_heads * head_dim)
    return Footprint(body=rows * row, tail=exact)


def _round_up(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple
