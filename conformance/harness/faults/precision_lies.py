"""Tails, bodies, sizes and statistics that lie: each overrides what one lie needs and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from conformance.harness.contract.census import ModelCensus, census_of_gguf
from conformance.harness.engine import KVARN_BITS, CacheSide, Context, ContextSettings, Logits, Model, ModelError
from conformance.harness.engine.context import Outputs
from conformance.harness.measure.kld import Doubles, Floats, KldRun, KldStatistics, Scores, Tokens, score
from conformance.harness.precision.body import Body, KVarNBody, StandardBody, body
from conformance.harness.precision.codecs import CodecError
from conformance.harness.precision.emulation import EXACT, CacheChoice, TailedSequence, settings_for
from conformance.harness.precision.kvarn import KVarN
from conformance.harness.precision.memory import AttentionLayers, Footprint, Run, footprint
from conformance.harness.precision.oracle import Rows, attend
from conformance.harness.precision.tail import Selection, resolve_tail


class OneRowShort(TailedSequence):
    """A tail of N keeps N - 1 rows."""

    def _resolved(self, kept: Body, window: int | None) -> int:
        return max(super()._resolved(kept, window) - 1, 0)


class OldestRowsExact(TailedSequence):
    """Keeps the oldest N rows exact and sends the newest into the body at once."""

    def _demote(self, coming: int) -> None:
        for part in self._parts:
            part.rewritten = max(part.rewritten, min(part.ledger.tail, self.rows))
            part.ledger.demoted = self.rows
        super()._demote(coming)


class LongerTailsKeepLess(TailedSequence):
    """A tail of N rows keeps 256 - N."""

    def _resolved(self, kept: Body, window: int | None) -> int:
        return max(256 - super()._resolved(kept, window), 0)


class ShortTailsIgnored(TailedSequence):
    """A tail of less than 100 rows is none."""

    def _resolved(self, kept: Body, window: int | None) -> int:
        resolved = super()._resolved(kept, window)
        return resolved if resolved >= 100 else 0


class SinkQuantized(TailedSequence):
    """Sends the first rows of KVarN into records too."""

    def _demote(self, coming: int) -> None:
        for part in self._parts:
            part.sink = 0
        super()._demote(coming)


class RollbackClaimsExact(TailedSequence):
    """After a roll back the books say that the tail is whole again."""

    def roll_back(self, rows: int) -> None:
        super().roll_back(rows)
        for part in self._parts:
            part.ledger.demoted = max(0, part.ledger.rows - part.ledger.tail)


class WindowNotPromoted(TailedSequence):
    """A tail as long as the window still quantizes the oldest row that a sliding layer sees."""

    def _resolved(self, kept: Body, window: int | None) -> int:
        resolved = super()._resolved(kept, window)
        return resolved - 1 if resolved == window else resolved


class _OtherBody(TailedSequence):
    """Decodes over another body than the one that was chosen."""

    def _body(self, name: str, head_dim: int, side: CacheSide) -> Body:
        return self._lie(super()._body(name, head_dim, side), head_dim, side)

    def _lie(self, kept: Body, head_dim: int, side: CacheSide) -> Body:
        raise NotImplementedError


class FinerTypesAreCoarser(_OtherBody):
    """The more bits a standard type has, the fewer are used."""

    def _lie(self, kept: Body, head_dim: int, side: CacheSide) -> Body:
        swapped = {"q2_0": "q8_0", "q3_0": "q6_0", "q4_0": "q5_0", "q5_0": "q4_0", "q6_0": "q3_0", "q8_0": "q2_0"}
        return body(swapped.get(kept.name, kept.name), head_dim, side, rotated=self.choice.rotated)


class KVarNInTwoBits(_OtherBody):
    """Every KVarN type is kept in records of two bits."""

    def _lie(self, kept: Body, head_dim: int, side: CacheSide) -> Body:
        return KVarNBody(KVarN(2, head_dim, side)) if isinstance(kept, KVarNBody) else kept


class NeverRotated(_OtherBody):
    """Standard bodies are kept without the rotation."""

    def _lie(self, kept: Body, head_dim: int, side: CacheSide) -> Body:
        return replace(kept, width=None) if isinstance(kept, StandardBody) else kept


@dataclass(frozen=True)
class _Twice:
    """A body whose rows go through it a second time, scaled a little in between."""

    inner: Body

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def group(self) -> int:
        return self.inner.group

    @property
    def sink(self) -> int:
        return self.inner.sink

    def round_trip(self, rows: Floats) -> Floats:
        scale = np.float32(0.97)
        twice: Floats = self.inner.round_trip(scale * self.inner.round_trip(rows)) / scale
        return twice


class QuantizedTwice(_OtherBody):
    """Rows are quantized, scaled, and quantized again."""

    def _lie(self, kept: Body, head_dim: int, side: CacheSide) -> Body:
        return _Twice(kept)


@dataclass(frozen=True)
class _WrongZero(_Twice):
    """A body whose zero point is off by a twentieth of a row's range."""

    def round_trip(self, rows: Floats) -> Floats:
        offset = np.float32(0.05) * (rows.max(axis=-1, keepdims=True) - rows.min(axis=-1, keepdims=True))
        shifted: Floats = self.inner.round_trip(rows) + offset
        return shifted


class WrongZeroPoint(_OtherBody):
    """Every row comes back a little too high."""

    def _lie(self, kept: Body, head_dim: int, side: CacheSide) -> Body:
        return _WrongZero(kept)


def body_with_wrong_zero_point(name: str, head_dim: int, side: CacheSide, *, rotated: bool = True) -> Body:
    """As `body`, every row a little too high."""
    return _WrongZero(body(name, head_dim, side, rotated=rotated))


def body_with_transposed_v(name: str, head_dim: int, side: CacheSide, *, rotated: bool = True) -> Body:
    """As `body`, but V tiles of KVarN are laid out like K tiles."""
    return body(name, head_dim, "k", rotated=rotated)


def two_softmaxes(queries: Floats, older: Rows, newest: Rows, selection: Selection) -> Doubles:
    """Attention over the body and over the tail, each under a softmax of its own, and the mean of both."""
    parts = []
    for chosen in (selection.visible & ~selection.exact, selection.exact):
        if chosen.any(axis=-1).all():
            parts.append(attend(queries, older, newest, Selection(chosen, selection.exact & chosen)))
    mean: Doubles = np.mean(parts, axis=0)
    return mean


def attention_without_the_tail(queries: Floats, older: Rows, newest: Rows, selection: Selection) -> Doubles:
    """Attention that sees the rows of the body and not those of the tail."""
    older_only = selection.visible & ~selection.exact
    seen = np.where(older_only.any(axis=-1, keepdims=True), older_only, selection.visible)
    return attend(queries, older, newest, Selection(seen, selection.exact))


def attention_over_exact_rows(queries: Floats, older: Rows, newest: Rows, selection: Selection) -> Doubles:
    """Attention that reads every row exactly where there is a tail at all."""
    every = selection.visible if selection.exact.any() else selection.exact
    return attend(queries, older, newest, Selection(selection.visible, every))


def resolved_without_groups(requested: int, *, kvarn: bool = False, window: int | None = None) -> int:
    """As `resolve_tail`, without rounding up to KVarN's groups."""
    return resolve_tail(requested, window=window)


def footprint_without_ubatch(groups: Sequence[AttentionLayers], run: Run, kind: str) -> Footprint:
    """As `footprint`, without room for the micro-batch in flight beside the tail."""
    return footprint(groups, replace(run, ubatch=0), kind)


def footprint_without_stage(groups: Sequence[AttentionLayers], run: Run, kind: str) -> Footprint:
    """As `footprint`, without KVarN's staging rows."""
    return replace(footprint(groups, run, kind), stage=0)


def score_of_rounded_base(base: Floats, candidate: Floats, tokens: Tokens) -> Scores:
    """As `score`, against a base that was first rounded to 16 bits."""
    return score(base.astype(np.float16).astype(np.float32), candidate, tokens)


class MedianOfMeans(KldRun):
    """Takes the median of the means of blocks of 500 positions."""

    def statistics(self) -> KldStatistics:
        kld = self.kld
        blocks = np.array_split(kld, max(len(kld) // 500, 2))
        return replace(super().statistics(), median=float(np.median([block.mean() for block in blocks])))


class NaNDropped(KldRun):
    """Leaves out what is not finite."""

    def add(self, scores: Scores) -> None:
        finite = np.isfinite(scores.kld)
        super().add(Scores(scores.kld[finite], scores.dp[finite], scores.same_top[finite]))


class TailDropped(TailedSequence):
    """Attention sees the rows of the body and those of its own step; the tail's lie in the cache for nothing."""

    def steps(self, tokens: NDArray[np.int32], outputs: Outputs = "all") -> Iterator[Logits]:
        size = self.context.settings.n_ubatch
        for start in range(0, len(tokens), size):
            step, kept = tokens[start : start + size], self.context.save()
            self.context.seq_rm(0, max(self.rows - self.choice.tail, 0))
            seen = self.context.decode(step, outputs=outputs)  # behind the body, since positions may have no gap
            self.context.clear()
            if self.rows:
                self.context.restore(kept)
            list(super().steps(step, outputs))
            yield seen


class TailIsEverything(TailedSequence):
    """With a tail every row is exact, however old."""

    def _resolved(self, kept: Body, window: int | None) -> int:
        resolved = super()._resolved(kept, window)
        return 1 << 20 if self.choice.tail else resolved


class BothSidesQuantized(TailedSequence):
    """Quantizes both sides where one of them was to stay exact."""

    def _made(self, side: CacheSide, name: str, census: ModelCensus) -> Iterator[Any]:
        other = self.choice.value if side == "k" else self.choice.key
        return super()._made(side, other if name == EXACT else name, census)


class NativeByEmulation(Context):
    """Offers a tail and KVarN types as the build's own, and keeps to the reference: the build does the rest in f16."""

    def __init__(self, model: Model, settings: ContextSettings | None = None) -> None:
        asked = settings or ContextSettings()
        self._tailed: TailedSequence | None = None
        if not asked.kv_tail and asked.type_k not in KVARN_BITS:
            super().__init__(model, asked)
            return
        made_of = settings_for(asked.n_ctx, asked.n_ubatch, n_threads=asked.n_threads)
        super().__init__(model, made_of)
        choice = self._chosen(CacheChoice(asked.type_k, asked.type_v, asked.kv_tail))
        try:
            self._tailed = TailedSequence(self, census_of_gguf(model.path), choice)
        except CodecError as error:
            self.close()
            raise ModelError(str(error)) from None

    def _chosen(self, choice: CacheChoice) -> CacheChoice:
        return choice

    def decode(
        self, tokens: ArrayLike, *, start: int | None = None, sequence: int = 0, outputs: Outputs = "last"
    ) -> Logits:
        tailed, self._tailed = self._tailed, None  # it decodes its steps through this very context
        try:
            if tailed is None:
                return super().decode(tokens, start=start, sequence=sequence, outputs=outputs)
            return tailed.decode(np.asarray(tokens, np.int32), outputs)
        finally:
            self._tailed = tailed


class NativeTailIgnored(NativeByEmulation):
    """Offers a tail and gives the body alone."""

    def _chosen(self, choice: CacheChoice) -> CacheChoice:
        return replace(choice, tail=0)


class NativeKVarNIsStandard(NativeByEmulation):
    """Offers KVarN types and keeps the standard type of as many bits."""

    def _chosen(self, choice: CacheChoice) -> CacheChoice:
        bits = KVARN_BITS.get(choice.key)
        name = f"q{bits}_0" if bits else choice.key
        return replace(choice, key=name, value=name, as_kvarn=True)


class SlidingRingIsWhole(Context):
    """Keeps every row of layers with a sliding window, whatever was asked for."""

    def __init__(self, model: Model, settings: ContextSettings | None = None) -> None:
        super().__init__(model, (settings or ContextSettings()).changed(swa_full=True))


class SingleTokensAreSharper(Context):
    """A token that is decoded alone gets logits that are a tenth larger."""

    def logits(self, n_outputs: int) -> Logits:
        exact = super().logits(n_outputs)
        return exact * np.float32(1.1) if n_outputs == 1 else exact
