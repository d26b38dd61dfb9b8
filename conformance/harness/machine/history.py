"""What a sequence must hold, known by the calls that a cold replay repeats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Op = tuple[Any, ...]
"""One step of a history.

("dec", start, tokens), ("emb", start, first, n, width), ("rm", begin, end), ("add", begin, end, delta) or
("div", begin, end, divisor). "emb" are n of the embeddings that all histories share, from `first` on; with a `width`
they are an image, which holds the position `start` alone, else a row of positions from `start` on.
"""
Script = tuple[Op, ...]

_TEXT_SEED, _TEXT_LENGTH = 0, 4096
_EMBEDDING_SEED, _EMBEDDINGS = 1, 512


@lru_cache(maxsize=8)
def text(n_vocab: int) -> npt.NDArray[np.int32]:
    """The tokens that all histories are cut from, int32 [4096]; the scripts of findings draw the same ones."""
    return np.random.default_rng(_TEXT_SEED).integers(0, n_vocab, _TEXT_LENGTH).astype(np.int32)


@lru_cache(maxsize=8)
def embeddings(n_embd: int) -> npt.NDArray[np.float32]:
    """The embeddings that all histories are cut from, float32 [512, n_embd]; scripts draw the same ones."""
    return np.random.default_rng(_EMBEDDING_SEED).standard_normal((_EMBEDDINGS, n_embd), np.float32)


def embedding_positions(start: int, n: int, width: int, components: int) -> npt.NDArray[np.int32]:
    """Where n embeddings go: int32 [n], or [4, n] (t, y, x, z) where positions have as many components."""
    line = np.arange(start, start + n, dtype=np.int32)
    if components == 1:
        return line
    if not width:
        return np.stack([line, line, line, np.zeros(n, np.int32)])
    y, x = np.divmod(np.arange(n, dtype=np.int32), np.int32(width))
    return np.stack([np.full(n, start, np.int32), start + y, start + x, np.zeros(n, np.int32)])


@dataclass(frozen=True)
class Held:
    """What a sequence must hold.

    Attributes:
        script: how it came to be.
        positions: of its tokens, never falling; those of an image are all the same.
        judged: False after something that a replay cannot judge.
        as_replayed: whether it was decoded alone, in the very batches that a replay decodes.

    """

    script: Script = ()
    positions: tuple[int, ...] = ()
    judged: bool = True
    as_replayed: bool = True

    @property
    def next(self) -> int:
        """The position after the last."""
        return self.positions[-1] + 1 if self.positions else 0

    @property
    def is_decoded_only(self) -> bool:
        """Whether nothing but decoding made it."""
        return all(op[0] in ("dec", "emb") for op in self.script)

    @property
    def is_settled(self) -> bool:
        """Whether it holds something, and a replay has moved its keys: that waits for the next decode there too."""
        return bool(self.script) and self.script[-1][0] in ("dec", "emb", "rm")

    @property
    def has_gap(self) -> bool:
        """Whether a position between the first and the last is missing, or held twice."""
        return bool(self.positions) and len(self.positions) != self.next - self.positions[0]

    def decoded(self, tokens: tuple[int, ...], *, alone: bool = True) -> Held:
        """With tokens after the last."""
        start = self.next
        positions = (*self.positions, *range(start, start + len(tokens)))
        return self._with(("dec", start, tokens), positions, as_replayed=self.as_replayed and alone)

    def embedded(self, first: int, n: int, width: int) -> Held:
        """With embeddings after the last."""
        start = self.next
        added = (start,) * n if width else tuple(range(start, start + n))
        return self._with(("emb", start, first, n, width), (*self.positions, *added))

    def without_suffix(self, begin: int) -> Held:
        """Without what is at `begin` and after: as if never decoded."""
        kept = tuple(position for position in self.positions if position < begin)
        if not kept:
            return Held()
        if not self.is_decoded_only:
            return replace(self, script=(*self.script, ("rm", begin, -1)), positions=kept, as_replayed=False)
        ops = tuple(_cut(op, begin) for op in self.script if op[1] < begin)
        return replace(self, script=ops, positions=kept, as_replayed=self.as_replayed and set(ops) <= set(self.script))

    def without(self, begin: int, end: int, *, judged: bool) -> Held:
        """Without an inner range, which later tokens have seen."""
        kept = tuple(position for position in self.positions if not begin <= position < end)
        return self._with(("rm", begin, end), kept, judged=self.judged and judged, as_replayed=False)

    def shifted(self, begin: int, end: int, delta: int) -> Held:
        """With the positions in [begin, end) moved; a negative end is open."""
        moved = tuple(p + delta if begin <= p and (end < 0 or p < end) else p for p in self.positions)
        return self._with(("add", begin, end, delta), moved, as_replayed=False)

    def divided(self, begin: int, end: int, divisor: int) -> Held:
        """With the positions in [begin, end) divided; a negative end is open."""
        divided = tuple(p // divisor if begin <= p and (end < 0 or p < end) else p for p in self.positions)
        return self._with(("div", begin, end, divisor), divided, as_replayed=False)

    def extends(self, start: Held) -> bool:
        """Whether it begins with all of another one, and was only decoded."""
        ours, theirs = _flat(self.script), _flat(start.script)
        return self.is_decoded_only and start.is_decoded_only and ours[: len(theirs)] == theirs

    def _with(self, op: Op, positions: tuple[int, ...], **changes: bool) -> Held:
        return replace(self, script=(*self.script, op), positions=positions, **changes)


def _cut(op: Op, begin: int) -> Op:
    """What is left of a decode before a position."""
    if op[0] == "dec":
        return "dec", op[1], op[2][: begin - op[1]]
    _, start, first, n, width = op
    return "emb", start, first, n if width else min(n, begin - start), width


def _flat(script: Script) -> tuple[object, ...]:
    """What was decoded, item by item."""
    return tuple(
        item
        for op in script
        for item in (op[2] if op[0] == "dec" else [(op[2] + i, op[4]) for i in range(op[3])] if op[0] == "emb" else ())
    )
