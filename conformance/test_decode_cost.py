"""What a token costs to decode, by what the cache holds and how that came there: specs/decode_cost.yaml.

Times are taken of `llama_decode` alone, for single tokens in contexts that were filled before, in blocks that go round all
of them. Every figure comes with the interval that noise leaves open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from conformance.harness.bench import DECODED, Bench, Case, decode_seconds
from conformance.harness.engine import Context, ContextSettings, StateError
from conformance.harness.exam import verifies
from conformance.harness.measure.deviation import Deviation, of_estimate
from conformance.harness.measure.timing import (
    AffineFit,
    Doubles,
    Estimate,
    affine_fit,
    interleaved,
    largest,
    ratio,
    size,
    smallest,
    symmetric,
)

_PAD = 256  # builds read whole multiples of so many cells
_SHARES = (0.0625, 0.25, 0.5, 0.75, 1.0)  # of the context: the depths that a line is fitted to
_CHUNK, _UBATCH = 64, 128


class Timed(Case):
    """A token is timed in every context in each of `blocks` rounds, behind `context_tokens` of context."""

    context_tokens: int
    blocks: int
    confidence_percent: int

    @property
    def confidence(self) -> float:
        """Of every interval, 0 to 1."""
        return self.confidence_percent / 100

    def settings(self, tokens: int, **more: Any) -> ContextSettings:
        """Room for some tokens and those decoded behind them; the micro-batches are short, for the buffers' sake."""
        room = -(-DECODED * (self.blocks + 1) // _PAD) * _PAD
        return ContextSettings(n_ctx=tokens + room, n_ubatch=_UBATCH, **more)

    def seconds(self, contexts: Mapping[str, Context]) -> dict[str, Doubles]:
        """Seconds per token in each context, float64 [blocks]."""
        arms = {name: partial(decode_seconds, context) for name, context in contexts.items()}
        return interleaved(arms, self.blocks)


class Doubled(Timed):
    """The context was doubled so many times."""

    doublings: int


class ManySequences(Timed):
    """The context has room for so many sequences."""

    sequences: int


class Holes(Timed):
    """Every `hole_tokens` tokens are followed by as many empty cells."""

    hole_tokens: int


class Typed(Timed):
    """Keys and values are of a cache type."""

    cache_type: str


class Tailed(Typed):
    """The newest `tail` rows are exact."""

    tail: int


@contextmanager
def _contexts(bench: Bench, settings: ContextSettings, names: Iterable[str]) -> Iterator[dict[str, Context]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(bench.context(settings)) for name in names}


def _factor(name: str, factor: Estimate, seconds: Mapping[str, Doubles], reference: str, more: str = "") -> Deviation:
    """How many times as long something takes, in words with both times."""
    expected, seen = (f"{np.median(seconds[each]) * 1e3:.4g} ms a token" for each in (reference, name))
    return of_estimate(factor, "time, as a factor", f"{name} against {reference}", expected, seen + more)


# -- DC-02


def _restored(bench: Bench, context: Context, tokens: int, source: Context) -> None:
    context.restore(source.save())


def _rebuilt(bench: Bench, context: Context, tokens: int, source: Context) -> None:
    """A checkpoint at half of the text, another text behind it, back to the checkpoint, and the rest in small pieces."""
    half, rest, detour = bench.texts(0, tokens // 2, tokens - tokens // 2, _CHUNK)
    context.decode(half, outputs="none")
    checkpoint = context.save()
    context.decode(detour, outputs="none")
    context.restore(checkpoint)
    for piece in np.split(rest, range(_CHUNK, len(rest), _CHUNK)):
        context.decode(piece, outputs="none")


def _into_holes(bench: Bench, context: Context, tokens: int, source: Context) -> None:
    """In turns with another sequence up to half of the text; then that one is removed and its cells are taken over."""
    half, rest = bench.texts(0, tokens // 2, tokens - tokens // 2)
    for piece in np.split(half, range(_CHUNK, len(half), _CHUNK)):
        context.decode(piece, outputs="none")
        context.decode(piece, sequence=1, outputs="none")
    if not context.seq_rm(1):
        raise StateError("the build refused to remove the whole of sequence 1")
    context.decode(rest, outputs="none")


_WAYS: dict[str, Callable[[Bench, Context, int, Context], None]] = {
    "restored": _restored,
    "rebuilt in pieces": _rebuilt,
    "prefilled into holes": _into_holes,
}


@verifies("DC-02", case=Timed)
def test_decode_takes_as_long_whatever_filled_the_cache(bench: Bench, case: Timed) -> Deviation:
    tokens, reference = case.context_tokens, "prefilled"
    settings = case.settings(tokens, n_seq_max=2, kv_unified=True)
    with _contexts(bench, settings, (reference, *_WAYS)) as contexts:
        contexts[reference].decode(*bench.texts(0, tokens), outputs="none")
        for way, fill in _WAYS.items():
            fill(bench, contexts[way], tokens, contexts[reference])
            held = contexts[way].pos_min(), contexts[way].pos_max()
            if held != (expected := (contexts[reference].pos_min(), tokens - 1)):
                raise StateError(
                    f"{way}: positions {held[0]} to {held[1]} where {expected[0]} to {expected[1]} were decoded"
                )
        seconds = case.seconds(contexts)
    times = {way: symmetric(ratio(seconds[way], seconds[reference], case.confidence)) for way in _WAYS}
    return _factor(*largest(times), seconds, reference)


# -- DC-03, DC-06


def _line(bench: Bench, case: Timed, **settings: Any) -> AffineFit:
    """Seconds per token against context, over contexts of several depths."""
    depths = [int(case.context_tokens * share) for share in _SHARES]
    with _contexts(bench, case.settings(case.context_tokens, **settings), map(str, depths)) as contexts:
        for depth, context in zip(depths, contexts.values(), strict=True):
            bench.fill(context, depth)
        seconds = case.seconds(contexts)
    return affine_fit(np.repeat(depths, case.blocks), np.concatenate(list(seconds.values())), case.confidence)


def _in_words(line: AffineFit) -> str:
    slope = line.per_token
    return (
        f"{line.at_zero.value * 1e3:.4g} ms + {slope.value:.3g} s x context "
        f"({slope.low:.3g} to {slope.high:.3g} at {slope.confidence:.0%})"
    )


def _rise(line: AffineFit, case: Timed, expected: str, what: str = "", more: str = "") -> Deviation:
    rise = line.rise(case.context_tokens)
    where = f"{case.context_tokens} tokens of context"
    return of_estimate(rise, "time, added by the context as a share", where, expected, what + _in_words(line) + more)


@verifies("DC-03/attention", case=Timed)
def test_attention_makes_a_token_slower_with_context(bench: Bench, case: Timed) -> Deviation:
    return _rise(_line(bench, case), case, "a slope")


@verifies("DC-03/share-of-attention", case=Timed)
def test_attention_is_a_third_of_a_tokens_time(bench: Bench, case: Timed) -> Deviation:
    return _rise(_line(bench, case), case, "attention in a third of the time")


@verifies("DC-03/recurrent", case=Timed)
def test_recurrent_layers_take_as_long_at_any_depth(bench: Bench, case: Timed) -> Deviation:
    line = _line(bench, case)
    rise = size(line.rise(case.context_tokens))
    where = f"{case.context_tokens} tokens of context"
    return of_estimate(rise, "time, added or taken by the context as a share", where, "no slope", _in_words(line))


@verifies("DC-06/cache-types", case=Typed)
def test_quantized_caches_make_a_token_slower_with_context_too(bench: Bench, case: Typed) -> Deviation:
    return _against_f16(bench, case)


@verifies("DC-06/native-tail", case=Tailed)
def test_a_tail_makes_a_token_slower_with_context_too(bench: Bench, case: Tailed) -> Deviation:
    return _against_f16(bench, case, kv_tail=case.tail)


def _against_f16(bench: Bench, case: Typed, **more: Any) -> Deviation:
    exact = _line(bench, case, flash_attn="on")
    typed = _line(bench, case, flash_attn="on", type_k=case.cache_type, type_v=case.cache_type, **more)
    times = typed.per_token.value / exact.per_token.value
    seen = f", {times:.2f} x the slope of f16"
    return _rise(typed, case, f"a slope; f16: {_in_words(exact)}", f"{case.cache_type}: ", seen)


# -- DC-04


@verifies("DC-04/growing", case=Doubled)
def test_every_doubling_of_the_context_makes_a_token_slower(bench: Bench, case: Doubled) -> Deviation:
    depths = [case.context_tokens >> halved for halved in range(case.doublings, -1, -1)]
    names = [f"{depth} tokens" for depth in depths]
    settings = case.settings(case.context_tokens)
    with _contexts(bench, settings, names) as contexts:
        for depth, context in zip(depths, contexts.values(), strict=True):
            bench.fill(context, depth)
        seconds = case.seconds(contexts)
    before = dict(zip(names[1:], names, strict=False))
    steps = {name: ratio(seconds[name], seconds[before[name]], case.confidence) for name in before}
    name, step = smallest(steps)
    return _factor(name, step, seconds, before[name])


@verifies("DC-04/bounded", case=Timed)
def test_steps_that_go_back_to_a_checkpoint_do_not_slow_down(bench: Bench, case: Timed) -> Deviation:
    settings = case.settings(case.context_tokens)
    with bench.context(settings) as bounded, bench.context(settings) as untouched:
        bench.fill(bounded, case.context_tokens)
        bench.fill(untouched, case.context_tokens)
        checkpoint = bounded.save()

        def step() -> float:
            bounded.restore(checkpoint)
            return decode_seconds(bounded)

        seconds = interleaved({"bounded": step, "untouched": partial(decode_seconds, untouched)}, case.blocks)
    times = affine_fit(np.arange(case.blocks), seconds["bounded"] / seconds["untouched"], case.confidence)
    rise = size(times.rise(case.blocks))
    seen = f"{times.at_zero.value:.3g} + {times.per_token.value:.2g} x step"
    return of_estimate(rise, "time, added or taken by all steps as a share", f"{case.blocks} steps", "no slope", seen)


# -- DC-05


@verifies("DC-05/sequence-ids", case=ManySequences)
def test_a_token_of_the_last_sequence_takes_as_long_as_one_of_the_first(bench: Bench, case: ManySequences) -> Deviation:
    settings = case.settings(case.context_tokens, n_seq_max=case.sequences, kv_unified=True)
    first, last = "sequence 0", f"sequence {case.sequences - 1}"
    with _contexts(bench, settings, (first, last)) as contexts:
        bench.fill(contexts[first], case.context_tokens)
        contexts[last].restore(contexts[first].save(), case.sequences - 1)
        arms = {
            first: partial(decode_seconds, contexts[first]),
            last: partial(decode_seconds, contexts[last], case.sequences - 1),
        }
        seconds = interleaved(arms, case.blocks)
    return _factor(last, symmetric(ratio(seconds[last], seconds[first], case.confidence)), seconds, first)


@verifies("DC-05/fragmentation", case=Holes)
def test_holes_in_the_cache_cost_no_more_than_tokens_there_would(bench: Bench, case: Holes) -> Deviation:
    spanned = 2 * case.context_tokens
    settings = case.settings(spanned, n_seq_max=2, kv_unified=True)
    (text,) = bench.texts(0, case.context_tokens)
    holes, whole, short = "with holes", f"{spanned} tokens", f"{case.context_tokens} tokens"
    with _contexts(bench, settings, (holes, whole, short)) as contexts:
        for piece in np.split(text, range(case.hole_tokens, len(text), case.hole_tokens)):
            contexts[holes].decode(piece, outputs="none")
            contexts[holes].decode(piece, sequence=1, outputs="none")
        if not contexts[holes].seq_rm(1):
            raise StateError("the build refused to remove the whole of sequence 1")
        bench.fill(contexts[whole], spanned)
        bench.fill(contexts[short], case.context_tokens)
        seconds = case.seconds(contexts)
    times, more = (ratio(seconds[holes], seconds[against], case.confidence) for against in (whole, short))
    return _factor(holes, times, seconds, whole, f", {more.value:.2f} x that of {short} without holes")
