"""Where calls are made: two contexts of one build, in this process or in a child that may die."""

from __future__ import annotations

import tempfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from conformance.harness.bench import Bench, Setup
from conformance.harness.engine import Blob, Context, ContextSettings, Logits, StateFlags, TokenBatch
from conformance.harness.engine.child import Child
from conformance.harness.measure.deviation import nmse, of_layers
from conformance.harness.state import BlobError, SequenceState, at_positions_of, compare

from .history import Op, Script, embedding_positions, embeddings, text

_KEPT_REFERENCES = 6
_REFERENCE_CELLS = 1536
_NOISE_TOKENS, _NOISE_UBATCHES = 90, (8, 32)


@dataclass(frozen=True)
class Memory:
    """What the memory of a context is and can do.

    Attributes:
        n_rs_seq: snapshots for rollback that the build really keeps.
        recurrent, attention: which halves it has.
        window: of the sliding layers in tokens, 0 without.
        position_components: of an embedding; 4 where positions are multi-dimensional.
        cells: for the tokens of attention, of each stream, or of all sequences in a unified cache.

    """

    can_shift: bool
    n_rs_seq: int
    recurrent: bool
    attention: bool
    window: int
    n_vocab: int
    position_components: int
    cells: int

    @property
    def kind(self) -> str:
        """In words."""
        if self.recurrent:
            return "hybrid" if self.attention else "recurrent"
        return "sliding window" if self.window else "attention"


@dataclass(frozen=True)
class Seen:
    """What a context says of one sequence, and what its bytes hold.

    Attributes:
        low, high: pos_min and pos_max.
        announced, written: sizes of its state.
        digest: of the state's bytes.
        cells: positions that each attention cache holds, rising; None where the bytes cannot be read here.
        recurrent: positions that the recurrent cells hold.

    """

    low: int
    high: int
    announced: int
    written: int
    digest: int
    cells: tuple[tuple[int, ...], ...] | None
    recurrent: tuple[int, ...]


class Stage(Protocol):
    """What a walk needs: make a call, see what became of every sequence, know what a replay gives."""

    def open(self, settings: ContextSettings) -> Memory:
        """Start afresh."""

    def call(self, name: str, context: int, *arguments: Any) -> Any:
        """Make a call in one of the contexts."""

    def observe(self, context: int) -> tuple[Seen, ...]:
        """Look at every sequence of a context."""

    def replay(self, settings: ContextSettings, script: Script, op: Op) -> Logits:
        """A cold replay of a history in a context of its own, and the logits of one more decode, [n, n_vocab]."""

    def state_deviation(self, context: int, sequence: int, settings: ContextSettings, script: Script) -> float:
        """How far a sequence's state is from that of a cold replay, as NMSE of the worst layer; 0 where bits agree."""

    def noise(self, settings: ContextSettings) -> float:
        """How far replays in other micro-batches lie apart, as NMSE of logits."""


class LocalStage:
    """A stage in this process."""

    def __init__(self, setup: Setup) -> None:
        self._bench = _bench(setup)
        self._contexts: dict[int, Context] = {}
        self._references: dict[tuple[ContextSettings, Script], Context] = {}
        self._blobs: list[Blob] = []
        self._parsed: dict[tuple[int, int, int], tuple[tuple[tuple[int, ...], ...] | None, tuple[int, ...]]] = {}
        self._settings = ContextSettings()

    def open(self, settings: ContextSettings) -> Memory:
        """Start afresh."""
        self._free(self._contexts)
        self._settings, self._blobs, self._parsed = settings, [], {}
        context, model = self._context(0), self._bench.model
        return Memory(
            can_shift=context.can_shift,
            n_rs_seq=context.n_rs_seq,
            recurrent=model.is_recurrent or model.is_hybrid,
            attention=not model.is_recurrent,
            window=model.n_swa,
            n_vocab=model.n_vocab,
            position_components=model.positions_per_embedding,
            cells=context.n_ctx if settings.kv_unified else context.n_ctx // settings.n_seq_max,
        )

    def call(self, name: str, context: int, *arguments: Any) -> Any:
        """Make a call in one of the contexts."""
        return getattr(self, f"_{name}")(self._context(context), *arguments)

    def observe(self, context: int) -> tuple[Seen, ...]:
        """Look at every sequence of a context."""
        return tuple(self._observed(context, sequence) for sequence in range(self._settings.n_seq_max))

    def _observed(self, index: int, sequence: int) -> Seen:
        context = self._context(index)
        announced, blob = context.announced_bytes(sequence), context.save(sequence)
        digest = zlib.crc32(blob.data)
        key = index, sequence, digest
        if key not in self._parsed:
            self._parsed[key] = self._positions_in(blob)
        cells, recurrent = self._parsed[key]
        low, high = context.pos_min(sequence), context.pos_max(sequence)
        return Seen(low, high, announced, len(blob), digest, cells, recurrent)

    def _positions_in(self, blob: Blob) -> tuple[tuple[tuple[int, ...], ...] | None, tuple[int, ...]]:
        try:
            state = self._bench.state(blob)
        except BlobError:
            return None, ()
        attention = tuple(tuple(sorted(cache.cells.positions.tolist())) for cache in state.attention)
        return attention, tuple(state.recurrent.cells.positions.tolist()) if state.recurrent else ()

    def replay(self, settings: ContextSettings, script: Script, op: Op) -> Logits:
        """The logits of one more decode after a cold replay of a history, [n, n_vocab].

        A context that has replayed the beginning of a history goes on from there: it did nothing else.
        """
        alone = reference_settings(settings)
        logits = self._decode_op(self._replayed(alone, script), op)
        self._references[alone, (*script, op)] = self._references.pop((alone, script))
        return logits

    def replayed_state(self, settings: ContextSettings, script: Script) -> Blob:
        """The state of a sequence after a cold replay."""
        return self._replayed(reference_settings(settings), script).save()

    def state_deviation(self, context: int, sequence: int, settings: ContextSettings, script: Script) -> float:
        """How far a sequence's state is from that of a cold replay."""
        return self.deviation_from(context, sequence, self.replayed_state(settings, script))

    def deviation_from(self, context: int, sequence: int, reference: Blob) -> float:
        """How far a sequence's state is from another one, as NMSE of the worst layer, over the cells that it holds."""
        try:
            ours, theirs = self._bench.state(self._context(context).save(sequence)), self._bench.state(reference)
        except BlobError:
            return 0.0
        return _state_deviation(at_positions_of(theirs, ours), ours)

    def noise(self, settings: ContextSettings) -> float:
        """How far replays in other micro-batches lie apart, as NMSE of logits."""
        tokens = tuple(text(self._bench.model.n_vocab)[:_NOISE_TOKENS].tolist())
        whole: Op = "dec", 0, tokens
        singles: Script = tuple(("dec", n, tokens[n : n + 1]) for n in range(len(tokens)))
        expected = self.replay(settings, (), whole)
        others = [self.replay(settings.changed(n_ubatch=size), (), whole) for size in _NOISE_UBATCHES]
        others.append(np.concatenate([self.replay(settings, singles[:n], op) for n, op in enumerate(singles)]))
        return max(nmse(other, expected) for other in others)

    def close(self) -> None:
        """Free the contexts."""
        self._free(self._contexts)
        self._free(self._references)

    @staticmethod
    def _free(contexts: dict[Any, Context]) -> None:
        for context in contexts.values():
            context.close()
        contexts.clear()

    def _replayed(self, alone: ContextSettings, script: Script) -> Context:
        """A context that has replayed just this, kept for the next one."""
        begun = next((n for n in range(len(script), -1, -1) if (alone, script[:n]) in self._references), None)
        if begun is None:
            while len(self._references) >= _KEPT_REFERENCES:
                self._references.pop(next(iter(self._references))).close()
            context, begun = Context(self._bench.model, alone.changed(n_threads=self._bench.setup.n_threads)), 0
        else:
            context = self._references.pop((alone, script[:begun]))
        self._references[alone, script] = context
        for op in script[begun:]:
            match op[0]:
                case "dec" | "emb":
                    self._decode_op(context, op, rows=False)
                case "rm":
                    context.seq_rm(0, *op[1:])
                case "add":
                    context.seq_add(0, *op[1:])
                case "div":
                    context.seq_div(0, *op[1:])
        return context

    def _decode_op(self, context: Context, op: Op, *, rows: bool = True) -> Logits:
        if op[0] == "dec":
            return context.decode(op[2], start=op[1], outputs="all" if rows else "none")
        _, start, first, n, width = op
        positions = embedding_positions(start, n, width, self._bench.model.positions_per_embedding)
        return context.decode_embeddings(self._embeddings(first, n), positions, outputs="all" if rows else "none")

    def _embeddings(self, first: int, n: int) -> Any:
        return embeddings(self._bench.model.n_embd)[first : first + n]

    def _context(self, index: int) -> Context:
        """One of the contexts, made and used before its first call: zeros would hide reads of what nobody wrote."""
        if index not in self._contexts:
            context = self._contexts[index] = self._bench.context(self._settings)
            noise = text(self._bench.model.n_vocab)[-24:]
            for sequence in range(self._settings.n_seq_max):
                context.decode(noise, sequence=sequence, outputs="none")
            for sequence in range(self._settings.n_seq_max):
                context.seq_rm(sequence)
        return self._contexts[index]

    # -- calls by name

    def _decode(
        self, context: Context, tokens: Any, positions: Any, sequences: Any, abort_after: int = 0
    ) -> tuple[int, Logits | None]:
        asked = 0

        def asks() -> bool:
            nonlocal asked
            asked += 1
            return asked > abort_after

        n = len(tokens)
        where = None if positions is None else np.asarray(positions, np.int32)
        batch = TokenBatch(np.asarray(tokens, np.int32), where, np.ones(n, np.int8), sequences)
        if abort_after:
            context.on_abort(asks)
        code = context.process(batch)
        if abort_after:
            context.on_abort(None)
        return code, context.logits(n) if code == 0 and n else None

    def _embed(
        self, context: Context, first: int, n: int, width: int, start: int | None, sequence: int
    ) -> tuple[int, Logits | None]:
        where = None
        if start is not None:
            where = embedding_positions(start, n, width, self._bench.model.positions_per_embedding)
        batch = TokenBatch(None, where, np.ones(n, np.int8), sequence, self._embeddings(first, n))
        code = context.process(batch)
        return code, context.logits(n) if code == 0 else None

    def _rm(self, context: Context, sequence: int, begin: int, end: int) -> bool:
        return context.seq_rm(sequence, begin, end)

    def _cp(self, context: Context, source: int, destination: int, begin: int, end: int) -> None:
        context.seq_cp(source, destination, begin, end)

    def _keep(self, context: Context, sequence: int) -> None:
        context.seq_keep(sequence)

    def _add(self, context: Context, sequence: int, begin: int, end: int, delta: int) -> None:
        context.seq_add(sequence, begin, end, delta)

    def _div(self, context: Context, sequence: int, begin: int, end: int, divisor: int) -> None:
        context.seq_div(sequence, begin, end, divisor)

    def _clear(self, context: Context, contents: bool) -> None:
        context.clear(contents=contents)

    def _ends(self, context: Context, sequence: int) -> tuple[int, int]:
        return context.pos_min(sequence), context.pos_max(sequence)

    def _save(self, context: Context, sequence: int, flags: int) -> tuple[int, int, int]:
        announced = context.announced_bytes(sequence, StateFlags(flags))
        self._blobs.append(context.save(sequence, StateFlags(flags)))
        return len(self._blobs) - 1, announced, len(self._blobs[-1])

    def _save_short(self, context: Context, sequence: int, missing: int) -> int:
        return context.save_into(np.empty(max(context.announced_bytes(sequence) - missing, 0), np.uint8), sequence)

    def _load(self, context: Context, slot: int, sequence: int, flags: int, thousandths: int = 1000) -> tuple[int, int]:
        blob = self._blobs[slot]
        given = blob[: len(blob) * thousandths // 1000].copy()
        return context.load(given, sequence, StateFlags(flags)), len(given)

    def _load_noise(self, context: Context, slot: int, sequence: int) -> tuple[int, int]:
        blob = np.random.default_rng(slot).integers(0, 256, len(self._blobs[slot]), np.uint8)
        return context.load(blob, sequence), len(blob)

    def _through_file(self, context: Context, source: int, destination: int) -> int:
        with tempfile.TemporaryDirectory() as folder:
            context.save_file(Path(folder) / "state", (), source)
            return context.load_file(Path(folder) / "state", destination)[0]

    def _save_context(self, context: Context) -> tuple[int, int, int]:
        announced = context.announced_context_bytes()
        self._blobs.append(context.save_context())
        return len(self._blobs) - 1, announced, len(self._blobs[-1])

    def _load_context(self, context: Context, slot: int, thousandths: int = 1000) -> tuple[int, int]:
        blob = self._blobs[slot]
        given = blob[: len(blob) * thousandths // 1000].copy()
        return context.load_context(given), len(given)

    def _context_through_file(self, context: Context, destination: int) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            context.save_context_file(Path(folder) / "state")
            return self._context(destination).load_context_file(Path(folder) / "state")[0]


class ChildStage:
    """A stage in a child process; a death is raised as the child room does. Replays run in a second child."""

    def __init__(self, setup: Setup, child: Child, references: Child, *, timeout: float = 30.0) -> None:
        self._setup, self._child, self._references, self._timeout = setup, child, references, timeout

    def open(self, settings: ContextSettings) -> Memory:
        """Start afresh."""
        memory: Memory = self._ask(self._child, "open", settings)
        return memory

    def call(self, name: str, context: int, *arguments: Any) -> Any:
        """Make a call in one of the contexts."""
        return self._ask(self._child, "call", name, context, *arguments)

    def observe(self, context: int) -> tuple[Seen, ...]:
        """Look at every sequence of a context."""
        seen: tuple[Seen, ...] = self._ask(self._child, "observe", context)
        return seen

    def replay(self, settings: ContextSettings, script: Script, op: Op) -> Logits:
        """The logits of one more decode after a cold replay of a history, [n, n_vocab]."""
        logits: Logits = self._ask(self._references, "replay", settings, script, op)
        return logits

    def state_deviation(self, context: int, sequence: int, settings: ContextSettings, script: Script) -> float:
        """How far a sequence's state is from that of a cold replay."""
        reference = self._ask(self._references, "replayed_state", settings, script)
        deviation: float = self._ask(self._child, "deviation_from", context, sequence, reference)
        return deviation

    def noise(self, settings: ContextSettings) -> float:
        """How far replays in other micro-batches lie apart, as NMSE of logits."""
        noise: float = self._ask(self._references, "noise", settings)
        return noise

    def _ask(self, child: Child, name: str, *arguments: Any) -> Any:
        return child.call(_on_stage, self._setup, name, arguments, timeout=self._timeout)


def reference_settings(settings: ContextSettings) -> ContextSettings:
    """Settings of a cold replay: one sequence, no rollback, the full sliding window, room for any history."""
    cells = _REFERENCE_CELLS
    return settings.changed(n_seq_max=1, n_rs_seq=0, swa_full=True, kv_unified=False, n_ctx=cells, n_batch=cells)


def _state_deviation(reference: SequenceState, seen: SequenceState) -> float:
    """Of the layers that hold numbers; bytes of quantized rows have no measure that compares with noise."""
    rows = compare(reference, seen, by_position=True)
    measured = [row for row in rows if all(part.measure == "NMSE" for part in row.deviations.values())]
    cells = [row for row in rows if row.layer is None]
    return of_layers([*cells, *measured]).value


@lru_cache(maxsize=4)
def _bench(setup: Setup) -> Bench:
    return Bench(setup)


@lru_cache(maxsize=1)
def _stage(setup: Setup) -> LocalStage:
    return LocalStage(setup)


def _on_stage(setup: Setup, name: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(_stage(setup), name)(*arguments)
