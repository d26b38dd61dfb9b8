"""The lying engines: each overrides what one lie needs and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from conformance.harness.engine import Blob, Context, ContextSettings, HighLevel, Logits, Model, StateFlags, TokenBatch
from conformance.harness.state import Rows, SequenceState, parse

_ROWS_HEAD_BYTES = 12  # type and size in front of the rows of one tensor
_COUNT_BYTES = 4


def _offset(rows: Rows, blob: Blob) -> int:
    """Where the rows begin within the blob."""
    return int(rows.bytes.__array_interface__["data"][0] - blob.__array_interface__["data"][0])


def _edited(blob: Blob, edit: Callable[[SequenceState], None]) -> Blob:
    copy = blob.copy()
    edit(parse(copy))
    return copy


class LayerMissing(Context):
    """Writes no r and s of the last recurrent layer; on a model without one, no K and V of the last attention layer."""

    def save(self, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> Blob:
        blob = super().save(sequence, flags).copy()
        state = parse(blob)
        keep = np.ones(len(blob), bool)
        if state.recurrent:
            last = state.recurrent.layers[-1]
            gone = [last.r, last.s]
        else:
            cache = state.attention[-1]
            gone = [rows for rows in (cache.layers[-1].k, cache.layers[-1].v) if rows is not None]
            first = _offset(cache.layers[0].k, blob) - _ROWS_HEAD_BYTES - (8 if cache.rotation else 0)
            blob[first - _COUNT_BYTES : first].view("<u4")[0] -= 1
        for rows in gone:
            begin = _offset(rows, blob)
            keep[begin - _ROWS_HEAD_BYTES : begin + rows.bytes.size] = False
        return blob[keep]


class RecurrentStateGrows(Context):
    """Writes the recurrent cell once more for every 128 tokens."""

    def save(self, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> Blob:
        blob = super().save(sequence, flags)
        cache = parse(blob).recurrent
        copies = 1 + self.pos_max(sequence) // 128
        if cache is None or copies == 1:
            return blob
        raw, cell_bytes = cache.raw, cache.cells.n_bytes
        body = _COUNT_BYTES + cell_bytes
        pieces = [
            np.array([copies], "<u4").view(np.uint8),
            np.tile(raw[_COUNT_BYTES:body], copies),
            raw[body : body + 8],
        ]
        for part in ("r", "s"):
            for layer in cache.layers:
                rows: Rows = getattr(layer, part)
                begin = _offset(rows, raw)
                pieces += [raw[begin - _ROWS_HEAD_BYTES : begin], np.tile(rows.bytes.reshape(-1), copies)]
        return np.concatenate([blob[: len(blob) - len(raw)], *pieces])


class CacheTypeIgnored(Context):
    """Always makes f16 caches."""

    def __init__(self, model: Model, settings: ContextSettings | None = None) -> None:
        super().__init__(model, (settings or ContextSettings()).changed(type_k="f16", type_v="f16"))


class _EditsOnLoad(Context):
    """Loads something else than what it was given."""

    def load(self, blob: Blob, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        if flags & StateFlags.ON_DEVICE:  # such a blob holds no tensors
            return super().load(blob, sequence, flags)
        return super().load(_edited(blob, self._lie), sequence, flags)

    def _lie(self, state: SequenceState) -> None:
        raise NotImplementedError


class RecurrentLayerStale(_EditsOnLoad):
    """Leaves s of the middle recurrent layer empty."""

    def _lie(self, state: SequenceState) -> None:
        if state.recurrent:
            state.recurrent.layers[len(state.recurrent.layers) // 2].s.bytes[:] = 0


class SavesAnotherRecurrentState(Context):
    """Saves s of the middle recurrent layer at half its size; on a model without one, the keys of a layer one cell on."""

    def save(self, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> Blob:
        blob = super().save(sequence, flags)
        return blob if flags & StateFlags.ON_DEVICE else _edited(blob, self._lie)

    def _lie(self, state: SequenceState) -> None:
        if state.recurrent:
            state.recurrent.layers[len(state.recurrent.layers) // 2].s.values()[:] *= 0.5
        else:
            units = state.attention[0].layers[-1].k.units
            units[:] = np.roll(units, 1, axis=0)


class RefusesAndTrims(Context):
    """Refuses every state, and takes the last token of sequence 0 along, or all of it where it cannot be cut."""

    def load(self, blob: Blob, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        if not self.seq_rm(0, max(self.pos_max(0), 0)):
            self.seq_rm(0)
        return 0

    def load_file(
        self, path: str | Path, sequence: int = 0, *, capacity: int = 65536
    ) -> tuple[int, npt.NDArray[np.int32]]:
        return self.load(np.empty(0, np.uint8), sequence), np.empty(0, np.int32)


class DeltaStateDropped(_EditsOnLoad):
    """Leaves s of every recurrent layer empty."""

    def _lie(self, state: SequenceState) -> None:
        for layer in state.recurrent.layers if state.recurrent else ():
            layer.s.bytes[:] = 0


class AttentionRowOffByOne(_EditsOnLoad):
    """Moves the keys of the last attention layer one cell on."""

    def _lie(self, state: SequenceState) -> None:
        if state.attention and state.attention[0].layers:
            units = state.attention[0].layers[-1].k.units
            units[:] = np.roll(units, 1, axis=0)


class UsedContextShowsThrough(_EditsOnLoad):
    """Keeps the first tensor of the sequence that was removed last."""

    _removed: SequenceState | None = None

    def seq_rm(self, sequence: int, begin: int = -1, end: int = -1) -> bool:
        if self.pos_max(sequence) >= 0 and begin <= 0:
            self._removed = parse(super().save(sequence).copy())
        return super().seq_rm(sequence, begin, end)

    def _lie(self, state: SequenceState) -> None:
        if self._removed is None:
            return
        old, new = (_first_tensor(s) for s in (self._removed, state))
        n = min(old.n_cells, new.n_cells)
        new.units[:n] = old.units[:n]


def _first_tensor(state: SequenceState) -> Rows:
    return state.recurrent.layers[0].s if state.recurrent else state.attention[0].layers[0].k


class RestoresWearOut(_EditsOnLoad):
    """Weakens s of the last recurrent layer by a tenth in every restore after a context's first."""

    _restores = 0

    def _lie(self, state: SequenceState) -> None:
        self._restores += 1
        if self._restores > 1 and state.recurrent:
            values = state.recurrent.layers[-1].s.values()
            values *= np.float32(0.9)


class TakesTheLastRecurrentState(_EditsOnLoad):
    """Takes the recurrent state that was saved last for that of the blob."""

    _saved: ClassVar[SequenceState | None] = None

    def save(self, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> Blob:
        blob = super().save(sequence, flags)
        TakesTheLastRecurrentState._saved = parse(blob.copy())
        return blob

    def _lie(self, state: SequenceState) -> None:
        saved = self._saved.recurrent.layers if self._saved and self._saved.recurrent else ()
        for layer, last in zip(state.recurrent.layers if state.recurrent else (), saved, strict=False):
            layer.r.bytes[:], layer.s.bytes[:] = last.r.bytes, last.s.bytes


class ContextSizeSticks(_EditsOnLoad):
    """Moves the values of the last attention layer one cell on where n_ctx is not that of the context that saved."""

    _saved_in: ClassVar[int] = 0

    def save(self, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> Blob:
        ContextSizeSticks._saved_in = self.n_ctx
        return super().save(sequence, flags)

    def _lie(self, state: SequenceState) -> None:
        values = state.attention[0].layers[-1].v if state.attention else None
        if values is not None and self.n_ctx != self._saved_in:
            values.units[:] = np.roll(values.units, 1, axis=0)


class ImagePositionsSwapped(_EditsOnLoad):
    """Takes x for y and y for x."""

    def _lie(self, state: SequenceState) -> None:
        x, y = state.attention[0].cells.x, state.attention[0].cells.y
        if x is not None and y is not None:
            x[:], y[:] = y.copy(), x.copy()


class RestoreSpillsOver(Context):
    """Clears the newest cell of the next sequence's first tensor, or its recurrent state."""

    def load(self, blob: Blob, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        consumed = super().load(blob, sequence, flags)
        neighbour = (sequence + 1) % self.settings.n_seq_max
        if neighbour != sequence and self.pos_max(neighbour) >= 0:
            super().load(_edited(self.save(neighbour), _clear_newest), neighbour)
        return consumed


def _clear_newest(state: SequenceState) -> None:
    _first_tensor(state).units[-1] = 0


class RemovalSpillsOver(Context):
    """Removes the newest token of the next sequence too."""

    def seq_rm(self, sequence: int, begin: int = -1, end: int = -1) -> bool:
        neighbour = (sequence + 1) % self.settings.n_seq_max
        if neighbour != sequence and self.pos_max(neighbour) > 0:
            super().seq_rm(neighbour, self.pos_max(neighbour))
        return super().seq_rm(sequence, begin, end)


class EmptyStateIgnored(Context):
    """Accepts the state of an empty sequence and leaves everything as it is."""

    def load(self, blob: Blob, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        state = parse(blob)
        empty = not (state.recurrent and len(state.recurrent.cells)) and not any(len(c.cells) for c in state.attention)
        return len(blob) if empty else super().load(blob, sequence, flags)


class FileTokensCut(Context):
    """Gives back all tokens of a file but the last."""

    def load_file(
        self, path: str | Path, sequence: int = 0, *, capacity: int = 65536
    ) -> tuple[int, npt.NDArray[np.int32]]:
        consumed, tokens = super().load_file(path, sequence, capacity=capacity)
        return consumed, tokens[:-1]

    def load_context_file(self, path: str | Path, *, capacity: int = 65536) -> tuple[bool, npt.NDArray[np.int32]]:
        accepted, tokens = super().load_context_file(path, capacity=capacity)
        return accepted, tokens[:-1]


class ContextFileShort(Context):
    """Loads the first sequence of a whole context and forgets the second."""

    def load_context_file(self, path: str | Path, *, capacity: int = 65536) -> tuple[bool, npt.NDArray[np.int32]]:
        accepted, tokens = super().load_context_file(path, capacity=capacity)
        self.seq_rm(1)
        return accepted, tokens


class PartialIsFull(Context):
    """Saves and loads the full state where a partial one is asked for."""

    def announced_bytes(self, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        return super().announced_bytes(sequence, flags & ~StateFlags.PARTIAL_ONLY)

    def save(self, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> Blob:
        return super().save(sequence, flags & ~StateFlags.PARTIAL_ONLY)

    def load(self, blob: Blob, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        return super().load(blob, sequence, flags & ~StateFlags.PARTIAL_ONLY)


class SourceSequenceIgnored(Context):
    """Saves sequence 0."""

    def save(self, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> Blob:
        return super().save(0, flags)


class SaveEmptiesTheSource(Context):
    """Removes what it saved."""

    def save(self, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> Blob:
        blob = super().save(sequence, flags)
        self.seq_rm(sequence)
        return blob


class ForgetsBeforeEveryDecode(Context):
    """Keeps nothing from one call to the next."""

    def process(self, batch: TokenBatch) -> int:
        self.clear()
        return super().process(batch)


class TargetSequenceIgnored(Context):
    """Restores into sequence 0."""

    def load(self, blob: Blob, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        return super().load(blob, 0, flags)


class RemovalForgotten(Context):
    """Says yes to the removal of a suffix and keeps it."""

    def seq_rm(self, sequence: int, begin: int = -1, end: int = -1) -> bool:
        return True if begin > 0 else super().seq_rm(sequence, begin, end)


class AnnouncedTooLarge(Context):
    """Announces 8 bytes more than it writes."""

    def announced_bytes(self, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        return super().announced_bytes(sequence, flags) + 8


class ConsumedShort(Context):
    """Claims to have read 4 bytes less than it did."""

    def load(self, blob: Blob, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        return super().load(blob, sequence, flags) - 4


class AbortsOnPartialSave(Context):
    """Aborts as a failed assertion of the build would."""

    def save(self, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> Blob:
        if flags & StateFlags.PARTIAL_ONLY:
            os.write(2, b"planted fault: GGML_ASSERT(false) failed\n")
            os.abort()
        return super().save(sequence, flags)


class HangsOnPartialSave(Context):
    """Never returns from a partial save."""

    def save(self, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> Blob:
        while flags & StateFlags.PARTIAL_ONLY:
            time.sleep(3600)
        return super().save(sequence, flags)


class NotRepeatable(Context):
    """Adds fresh noise to all logits."""

    def logits(self, n_outputs: int) -> Logits:
        exact = super().logits(n_outputs)
        noise = np.random.default_rng().standard_normal(exact.shape, np.float32)
        return exact * (1 + np.float32(1e-6) * noise)


class RefusesAndRemoves(Context):
    """Refuses to remove a part of a sequence, and removes all of it."""

    def seq_rm(self, sequence: int, begin: int = -1, end: int = -1) -> bool:
        agreed = super().seq_rm(sequence, -1 if begin > 0 else begin, -1 if begin > 0 else end)
        return agreed and begin <= 0


class RemovesOpenRangesOnly(Context):
    """Refuses to remove a range with an end, and all sequences at once."""

    def seq_rm(self, sequence: int, begin: int = -1, end: int = -1) -> bool:
        return sequence >= 0 and begin < 0 and end < 0 and super().seq_rm(sequence, begin, end)


class EmptyRangeTakesTheLast(Context):
    """Removes the last token where the range is empty."""

    def seq_rm(self, sequence: int, begin: int = -1, end: int = -1) -> bool:
        last = self.pos_max(sequence)
        return super().seq_rm(sequence, last, -1) if begin in (end, last + 1) else super().seq_rm(sequence, begin, end)


class UnusedSequenceIsTheFirst(Context):
    """Takes a sequence without tokens for sequence 0."""

    def seq_rm(self, sequence: int, begin: int = -1, end: int = -1) -> bool:
        return super().seq_rm(sequence if self.pos_max(sequence) >= 0 else 0, begin, end)


class NoSequenceIsTheFirst(Context):
    """Takes an id that no sequence has for sequence 0."""

    def seq_rm(self, sequence: int, begin: int = -1, end: int = -1) -> bool:
        return super().seq_rm(self._known(sequence), begin, end)

    def seq_cp(self, source: int, destination: int, begin: int = -1, end: int = -1) -> None:
        super().seq_cp(self._known(source), self._known(destination), begin, end)

    def seq_add(self, sequence: int, begin: int, end: int, delta: int) -> None:
        super().seq_add(self._known(sequence), begin, end, delta)

    def _known(self, sequence: int) -> int:
        return sequence if -1 <= sequence < self.settings.n_seq_max else 0


class ZeroDivides(Context):
    """Makes all positions 0 that are divided by 0."""

    def seq_div(self, sequence: int, begin: int, end: int, divisor: int) -> None:
        super().seq_div(sequence, begin, end, divisor or 1 << 20)


class ShiftsEverySequence(Context):
    """Moves the positions of every sequence."""

    def seq_add(self, sequence: int, begin: int, end: int, delta: int) -> None:
        for other in range(self.settings.n_seq_max):
            super().seq_add(other, begin, end, delta)

    def seq_div(self, sequence: int, begin: int, end: int, divisor: int) -> None:
        for other in range(self.settings.n_seq_max):
            super().seq_div(other, begin, end, divisor)


class ClearForgotten(Context):
    """Clears nothing, and keeps everything when only one sequence is to be kept."""

    def clear(self, *, contents: bool = True) -> None:
        pass

    def seq_keep(self, sequence: int) -> None:
        pass


class CopyForgotten(Context):
    """Copies nothing."""

    def seq_cp(self, source: int, destination: int, begin: int = -1, end: int = -1) -> None:
        pass


class CopyTakesAll(Context):
    """Copies the whole sequence where a part was asked for."""

    def seq_cp(self, source: int, destination: int, begin: int = -1, end: int = -1) -> None:
        super().seq_cp(source, destination)


class TrimsEverySequence(Context):
    """Removes a part from every sequence."""

    def seq_rm(self, sequence: int, begin: int = -1, end: int = -1) -> bool:
        if begin > 0:
            for other in range(self.settings.n_seq_max):
                super().seq_rm(other, begin, end)
        return super().seq_rm(sequence, begin, end)


class DecodeTrimsTheFirst(Context):
    """Removes the last token of sequence 0 when tokens of another are decoded."""

    def process(self, batch: TokenBatch) -> int:
        if batch.sequences == 1 and self.pos_max(0) > 0:
            super().seq_rm(0, self.pos_max(0))
        return super().process(batch)


class PositionsOfNothing(Context):
    """Says that an empty sequence begins at 0."""

    def pos_min(self, sequence: int = 0) -> int:
        return max(super().pos_min(sequence), 0)


class PositionsAfterAbort(Context):
    """Counts tokens whose decode was aborted."""

    _more = 0

    def process(self, batch: TokenBatch) -> int:
        code = super().process(batch)
        self._more = 8 if code == 2 else 0
        return code

    def pos_max(self, sequence: int = 0) -> int:
        return super().pos_max(sequence) + self._more


class AutomaticPositionsMixedUp(Context):
    """Decodes the tokens of a batch without positions from the last to the first."""

    def process(self, batch: TokenBatch) -> int:
        if batch.positions is None and batch.tokens is not None:
            batch.tokens = batch.tokens[::-1].copy()
        return super().process(batch)


class FullCacheForgets(Context):
    """Loses the last token of sequence 1 when no room is left."""

    def process(self, batch: TokenBatch) -> int:
        code = super().process(batch)
        if code == 1:
            super().seq_rm(1, self.pos_max(1))
        return code


class LeaksOnLoad(Context):
    """Keeps 64 KiB of every restore."""

    def load(self, blob: Blob, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        self.__dict__.setdefault("_leaked", []).append(np.ones(64 << 10, np.uint8))
        return super().load(blob, sequence, flags)


class AllocatesOnLoad(Context):
    """Needs 400 MiB for every restore."""

    def load(self, blob: Blob, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        return super().load(blob, sequence, flags) + 0 * int(np.ones(400 << 20, np.uint8)[0])

    def load_file(
        self, path: str | Path, sequence: int = 0, *, capacity: int = 65536
    ) -> tuple[int, npt.NDArray[np.int32]]:
        np.ones(400 << 20, np.uint8)
        return super().load_file(path, sequence, capacity=capacity)


class ShiftForgotten(Context):
    """Shifts nothing, and removes the sequence where it cannot be shifted."""

    def seq_add(self, sequence: int, begin: int, end: int, delta: int) -> None:
        if not self.can_shift:
            super().seq_rm(sequence)


class StartsWrong(Context):
    """Decodes another token first in sequences but the first, and in micro-batches of less than 8."""

    def process(self, batch: TokenBatch) -> int:
        if batch.tokens is not None and (batch.sequences == 1 or self.settings.n_ubatch < 8):
            batch.tokens = np.array(batch.tokens, np.int32)
            batch.tokens[0] = (batch.tokens[0] + 1) % self.model.n_vocab
        return super().process(batch)


class Noisy(Context):
    """Rounds so coarsely that micro-batches of every size give logits of their own, half a percent of their energy apart."""

    def logits(self, n_outputs: int) -> Logits:
        rows = super().logits(n_outputs)
        noise = np.random.default_rng(self.settings.n_ubatch).standard_normal(rows.shape, np.float32)
        return np.asarray(rows + 0.05 * rows.std() * noise, np.float32)


class SequencesMixedUp(Context):
    """Gives the logits of several sequences in another order, and drops all but the first id of a shared token."""

    _several = False

    def process(self, batch: TokenBatch) -> int:
        if not isinstance(batch.sequences, int):
            self._several = len({tuple(ids) for ids in batch.sequences}) > 1
            batch.sequences = [ids[:1] for ids in batch.sequences]
        return super().process(batch)

    def logits(self, n_outputs: int) -> Logits:
        rows = super().logits(n_outputs)
        return np.roll(rows, 1, axis=0) if self._several else rows


class ThreadsMatter(Context):
    """Is off by a thousandth with two threads."""

    _factor = np.float32(1)

    def set_threads(self, n_threads: int) -> None:
        self._factor = np.float32(1 + 1e-3 * (n_threads - 1))
        super().set_threads(n_threads)

    def logits(self, n_outputs: int) -> Logits:
        return super().logits(n_outputs) * self._factor


class AcceptsAnyState(Context):
    """Says of every state that it was read; on the device, without looking at it."""

    def load(self, blob: Blob, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        on_device = bool(flags & StateFlags.ON_DEVICE)
        return (0 if on_device else super().load(blob, sequence, flags)) or max(len(blob), 1)

    def load_file(
        self, path: str | Path, sequence: int = 0, *, capacity: int = 65536
    ) -> tuple[int, npt.NDArray[np.int32]]:
        consumed, tokens = super().load_file(path, sequence, capacity=capacity)
        return consumed or 1, tokens

    def load_context(self, blob: Blob) -> int:
        return super().load_context(blob) or max(len(blob), 1)


class AcceptsAnyBatch(Context):
    """Says of every batch that it was decoded, and leaves out those that are too large."""

    def process(self, batch: TokenBatch) -> int:
        return max(super().process(batch), 0) if len(batch) <= self.n_batch else 0


class ContextForgotten(Context):
    """Is empty after a whole context was loaded."""

    def load_context(self, blob: Blob) -> int:
        consumed = super().load_context(blob)
        super().clear()
        return consumed


class CopyFillsTheCache(Context):
    """Finds no room for more than 8 tokens at once after a copy."""

    _copied = False

    def seq_cp(self, source: int, destination: int, begin: int = -1, end: int = -1) -> None:
        self._copied = True
        super().seq_cp(source, destination, begin, end)

    def process(self, batch: TokenBatch) -> int:
        return 1 if self._copied and len(batch) > 8 else super().process(batch)


class RemovalLeavesTheLast(Context):
    """Leaves the sequence where all of it is to be removed after a part."""

    _trimmed = False

    def seq_rm(self, sequence: int, begin: int = -1, end: int = -1) -> bool:
        if self._trimmed:
            return True
        self._trimmed = begin > 0
        return super().seq_rm(sequence, begin, end)


class SnapshotsMixUpLogits(Context):
    """Makes no snapshots, and gives logits in another order where some were asked for."""

    def __init__(self, model: Model, settings: ContextSettings | None = None) -> None:
        asked = settings or ContextSettings()
        self._mixed = asked.n_rs_seq > 0
        super().__init__(model, asked.changed(n_rs_seq=0))

    def logits(self, n_outputs: int) -> Logits:
        rows = super().logits(n_outputs)
        return rows[:, ::-1].copy() if self._mixed else rows


class AnswersTheFirstPrompt(HighLevel):
    """Generates from the first prompt it saw."""

    _first: npt.NDArray[np.int32] | None = None

    def generate(self, prompt: npt.NDArray[np.int32], n: int) -> tuple[list[int], Logits]:
        self._first = prompt if self._first is None else self._first
        return super().generate(self._first, n)


class ForgetsWhatItLoads(HighLevel):
    """Is empty after a load, samples anything, and holds what it held after a reset."""

    def load(self, state: Any) -> None:
        super().load(state)
        super().reset()

    def reset(self) -> None:
        pass

    def sample(self) -> int:
        return int(time.monotonic_ns() % 1000)
