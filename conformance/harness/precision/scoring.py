"""How far caches of some type and tail move a model's next-token distributions from those of its exact cache.

Text is teacher-forced: every arm decodes the same tokens in steps of the same size as the exact cache, and the logits of
the second half of the context are scored on the token that follows, as llama-perplexity does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conformance.harness.contract.census import ModelCensus
from conformance.harness.engine import CACHE_TYPES, KVARN_BITS, Context, ContextSettings, Library, Logits, Model
from conformance.harness.measure.kld import Scores, score, score_records
from conformance.harness.precision.emulation import EXACT, CacheChoice, TailedSequence, settings_for

Tokens = NDArray[np.int32]
Records = NDArray[np.uint16]


@dataclass(frozen=True)
class Arm:
    """A cache under comparison: emulated over a 16-bit cache, or `native`, the build's own of that type."""

    choice: CacheChoice
    native: bool = False

    @property
    def name(self) -> str:
        """For people: ``q4_0``, ``kvarn4/q5_0``, with ``native`` or ``not rotated`` where that holds."""
        choice = self.choice
        types = choice.key if choice.key == choice.value else f"{choice.key}/{choice.value}"
        how = " native" if self.native else " with KVarN's exact rows" if choice.as_kvarn else ""
        return types + how + ("" if choice.rotated else " not rotated")

    @classmethod
    def native_of(cls, name: str, tail: int = 0) -> Arm:
        """The build's own cache type, and its own tail where it has one."""
        return cls(CacheChoice.of(name, tail), native=True)


def native_types(library: Library) -> tuple[str, ...]:
    """The quantized cache types that a build has: those of every upstream build, and KVarN where it offers that."""
    standard = tuple(name for name in CACHE_TYPES if name not in ("f32", "f16", "bf16"))
    return (*standard, *KVARN_BITS) if library.has_kvarn else standard


@dataclass(frozen=True)
class Scorer:
    """What all arms over one model have in common.

    Attributes:
        context: makes a context of the model.
        tailed: decodes over a body and a tail.
        ubatch: tokens in a step, of the exact cache as of every arm.

    """

    model: Model
    census: ModelCensus
    ubatch: int
    n_threads: int = 1
    context: Callable[[Model, ContextSettings], Context] = Context
    tailed: Callable[[Context, ModelCensus, CacheChoice], TailedSequence] = TailedSequence

    def steps(self, arm: Arm, tokens: Tokens, *, borrowed: bool = False) -> Generator[Logits, None, None]:
        """Logits of the scored positions, step by step: float32 [n, n_vocab] from the middle to the last but one.

        What is `borrowed` holds until the next step only.
        """
        choice = arm.choice
        emulated = not arm.native and {choice.key, choice.value} != {EXACT}
        settings = settings_for(len(tokens), self.ubatch, n_threads=self.n_threads, reach_cache=emulated)
        if arm.native:
            settings = settings.changed(type_k=choice.key, type_v=choice.value, kv_tail=choice.tail)
        first = first_scored(len(tokens))
        with self.context(self.model, settings) as context:
            context.borrows_logits = borrowed
            decode: Callable[..., Logits] = context.decode
            if emulated:
                decode = self.tailed(context, self.census, choice).decode
            for start in range(0, len(tokens) - 1, self.ubatch):
                step = tokens[start : start + self.ubatch]  # with the last token: kernels take rows by fours
                if start + len(step) <= first:
                    decode(step, outputs="none")
                else:
                    scored = slice(max(first - start, 0), len(tokens) - 1 - start)
                    yield decode(step, outputs="all")[scored]

    def exact(self, tokens: Tokens) -> Logits:
        """The exact cache's logits of the scored positions, float32 [scored, n_vocab]."""
        steps = list(self.steps(Arm(CacheChoice.of(EXACT)), tokens))
        return steps[0] if len(steps) == 1 else np.concatenate(steps)

    def scores(self, arm: Arm, tokens: Tokens, base: Logits | Records | None = None) -> Scores:
        """Score an arm over tokens int32 [n] against the exact cache.

        `base` holds the exact cache's logits of every scored position, float32 [scored, n_vocab], or records of a KLD base
        file. Without it the exact cache decodes beside the arm, step by step, and its logits are copied nowhere.
        """
        following = tokens[first_scored(len(tokens)) + 1 :]
        judge: Callable[..., Scores] = score if base is None or base.dtype != np.uint16 else score_records
        found: list[Scores] = []
        done = 0
        with closing(self.steps(Arm(CacheChoice.of(EXACT)), tokens, borrowed=True)) as exact:  # begins when first asked
            for logits in self.steps(arm, tokens, borrowed=True):
                span = slice(done, done + len(logits))
                found.append(judge(base[span] if base is not None else next(exact), logits, following[span]))
                done += len(logits)
        return Scores(*(np.concatenate([getattr(part, name) for part in found]) for name in ("kld", "dp", "same_top")))


def first_scored(n: int) -> int:
    """The first of n positions that is scored."""
    return n // 2
