"""Where calls are made: two contexts of one build, in this process or in a child that may die."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from conformance.harness.bench import Bench, Setup
from conformance.harness.bench.bench import Tokens
from conformance.harness.engine import Blob, Context, ContextSettings, Logits, StateFlags, TokenBatch
from conformance.harness.engine.child import Child

Positions = tuple[tuple[int, int], ...]
"""pos_min and pos_max of every sequence of a context."""
Op = tuple[Any, ...]
"""One step of a history: ("dec", start, tokens), ("rm", begin, end) or ("add", begin, end, delta)."""
Script = tuple[Op, ...]

_TEXT_SEED, _TEXT_LENGTH = 0, 4096


@lru_cache(maxsize=8)
def text(n_vocab: int) -> Tokens:
    """The tokens that all histories are cut from, int32 [4096]; the scripts of findings draw the same ones."""
    return np.random.default_rng(_TEXT_SEED).integers(0, n_vocab, _TEXT_LENGTH).astype(np.int32)


class Stage(Protocol):
    """What a walk needs: make a call, see what it gave and where every sequence of that context stands."""

    def open(self, settings: ContextSettings) -> Mapping[str, Any]:
        """Start afresh; what the memory is and can do."""

    def call(self, name: str, context: int, *arguments: Any) -> tuple[Any, Positions]:
        """Make a call in one of the contexts."""

    def replay(self, settings: ContextSettings, script: Script, tokens: tuple[int, ...], start: int) -> Logits:
        """A cold replay of a history in a context of its own, and the logits of `tokens` after it, [n, n_vocab]."""


class LocalStage:
    """A stage in this process."""

    def __init__(self, setup: Setup) -> None:
        self._bench = _bench(setup)
        self._contexts: dict[int, Context] = {}
        self._blobs: list[Blob] = []
        self._settings = ContextSettings()

    def open(self, settings: ContextSettings) -> Mapping[str, Any]:
        """Start afresh; what the memory is and can do."""
        self.close()
        self._settings, self._blobs = settings, []
        context, model = self._context(0), self._bench.model
        return {
            "can_shift": context.can_shift,
            "n_rs_seq": context.n_rs_seq,
            "recurrent": model.is_recurrent or model.is_hybrid,
            "attention": not model.is_recurrent,
            "window": model.n_swa,
            "n_vocab": model.n_vocab,
            "gaps": model.positions_per_embedding > 1,
            "partial": model.is_recurrent or model.is_hybrid or (model.n_swa > 0 and not settings.swa_full),
        }

    def call(self, name: str, context: int, *arguments: Any) -> tuple[Any, Positions]:
        """Make a call in one of the contexts."""
        used = self._context(context)
        result = getattr(self, f"_{name}")(used, *arguments)
        return result, tuple((used.pos_min(s), used.pos_max(s)) for s in range(self._settings.n_seq_max))

    def replay(self, settings: ContextSettings, script: Script, tokens: tuple[int, ...], start: int) -> Logits:
        """The logits of `tokens` after a cold replay of a history, [n, n_vocab]."""
        alone = settings.changed(n_seq_max=1, n_rs_seq=0, swa_full=True)
        with Context(self._bench.model, alone.changed(n_threads=self._bench.setup.n_threads)) as context:
            for op in script:
                if op[0] == "dec":
                    context.decode(op[2], start=op[1], outputs="none")
                elif op[0] == "rm":
                    context.seq_rm(0, *op[1:])
                else:
                    context.seq_add(0, *op[1:])
            return context.decode(tokens, start=start, outputs="all")

    def close(self) -> None:
        """Free the contexts."""
        for context in self._contexts.values():
            context.close()
        self._contexts = {}

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

    def _save(self, context: Context, sequence: int, flags: int) -> tuple[int, int, int]:
        announced = context.announced_bytes(sequence, StateFlags(flags))
        self._blobs.append(context.save(sequence, StateFlags(flags)))
        return len(self._blobs) - 1, announced, len(self._blobs[-1])

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

    def _load_context(self, context: Context, slot: int) -> tuple[int, int]:
        return context.load_context(self._blobs[slot]), len(self._blobs[slot])


class ChildStage:
    """A stage in a child process; a death is raised as the child room does. Replays run in a second child."""

    def __init__(self, setup: Setup, child: Child, references: Child, *, timeout: float = 30.0) -> None:
        self._setup, self._child, self._references, self._timeout = setup, child, references, timeout

    def open(self, settings: ContextSettings) -> Mapping[str, Any]:
        """Start afresh; what the memory is and can do."""
        answer: Mapping[str, Any] = self._child.call(_open, self._setup, settings, timeout=self._timeout)
        return answer

    def call(self, name: str, context: int, *arguments: Any) -> tuple[Any, Positions]:
        """Make a call in one of the contexts."""
        answer: tuple[Any, Positions] = self._child.call(
            _call, self._setup, name, context, arguments, timeout=self._timeout
        )
        return answer

    def replay(self, settings: ContextSettings, script: Script, tokens: tuple[int, ...], start: int) -> Logits:
        """The logits of `tokens` after a cold replay of a history, [n, n_vocab]."""
        logits: Logits = self._references.call(
            _replay, self._setup, settings, script, tokens, start, timeout=self._timeout
        )
        return logits


@lru_cache(maxsize=4)
def _bench(setup: Setup) -> Bench:
    return Bench(setup)


@lru_cache(maxsize=1)
def _stage(setup: Setup) -> LocalStage:
    return LocalStage(setup)


def _open(setup: Setup, settings: ContextSettings) -> Mapping[str, Any]:
    return _stage(setup).open(settings)


def _call(setup: Setup, name: str, context: int, arguments: tuple[Any, ...]) -> tuple[Any, Positions]:
    return _stage(setup).call(name, context, *arguments)


def _replay(setup: Setup, settings: ContextSettings, script: Script, tokens: tuple[int, ...], start: int) -> Logits:
    return _stage(setup).replay(settings, script, tokens, start)
