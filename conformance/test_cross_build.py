"""States that one build saves and another loads: specs/cross_build.yaml."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

import numpy as np

from conformance.harness.bench import Bench, Decode, Setup, Tokens, bench_of
from conformance.harness.engine import Blob, Context, ContextSettings, StateError, StateFlags
from conformance.harness.exam import verifies
from conformance.harness.measure.deviation import Deviation, of_count, of_logits, worst

Writer = Literal["the other", "this"]
Answer = TypeVar("Answer")
_NEXT = 3


class Exchange(Decode):
    """A state after `prefix_tokens` goes to the other build, where a sequence of `other_tokens` is; `suffix_tokens` follow."""

    prefix_tokens: int
    other_tokens: int
    suffix_tokens: int

    def texts(self, bench: Bench) -> list[Tokens]:
        """The text that is saved, the other sequence's, what follows the first, what follows the other."""
        return bench.texts(self.text_seed, self.prefix_tokens, self.other_tokens, self.suffix_tokens, _NEXT)


class Both(Exchange):
    """The same in either direction."""

    writer: Writer


@dataclass(frozen=True)
class Reading:
    """What a build did with a state: the bytes it says it took, 0 for a refusal, and how far it then goes astray."""

    consumed: int
    deviation: Deviation


@verifies("XB-01", case=Exchange)
def test_a_state_of_the_other_build_is_taken_over_or_refused(bench: Bench, case: Exchange) -> Deviation:
    return _in_memory(bench, case, "the other")


@verifies("XB-02", case=Exchange)
def test_a_state_is_taken_over_or_refused_by_the_other_build(bench: Bench, case: Exchange) -> Deviation:
    return _in_memory(bench, case, "this")


@verifies("XB-03", case=Both)
def test_a_file_is_taken_over_or_refused_by_the_other_build(bench: Bench, case: Both) -> Deviation:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        write, read = _sides(bench, case.writer)
        size = write(_write_file, case, path)
        return _remarked(read(_read_file, case, path), size)


@verifies("XB-04", case=Both)
def test_a_partial_state_of_the_other_build_is_never_accepted_and_wrong(bench: Bench, case: Both) -> Deviation:
    write, read = _sides(bench, case.writer)
    blob = write(_written, case, StateFlags.PARTIAL_ONLY)
    return _remarked(read(_read_partial, case, blob), len(blob))


def _in_memory(bench: Bench, case: Exchange, writer: Writer) -> Deviation:
    write, read = _sides(bench, writer)
    blob = write(_written, case, StateFlags.FULL)
    return _remarked(read(_read_full, case, blob), len(blob))


def _sides(bench: Bench, writer: Writer) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How to call a function of this module in the process of the writing build, and in that of the reading one."""
    assert bench.setup.other is not None
    setup = Setup(bench.setup.other, bench.setup.model, None, bench.setup.n_threads)

    def here(function: Callable[..., Answer], *arguments: object) -> Answer:
        return function(bench.setup, *arguments)

    def there(function: Callable[..., Answer], *arguments: object) -> Answer:
        answer: Answer = bench.other.call(function, setup, *arguments)
        return answer

    return (there, here) if writer == "the other" else (here, there)


def _remarked(reading: Reading, size: int) -> Deviation:
    """What the reading showed; a state is taken over as a whole or not at all."""
    if not reading.consumed:
        return replace(reading.deviation, remark="refused")
    whole = of_count(reading.consumed, size, "bytes that were taken of a state")
    return replace(worst([whole, reading.deviation]), remark="taken over")


def _settings(case: Exchange) -> ContextSettings:
    return case.settings(n_seq_max=2)


def _written(setup: Setup, case: Exchange, flags: StateFlags) -> Blob:
    bench = bench_of(setup)
    with bench.context(_settings(case)) as context:
        context.decode(case.texts(bench)[0])
        return context.save(flags=flags)


def _write_file(setup: Setup, case: Exchange, path: Path) -> int:
    bench = bench_of(setup)
    with bench.context(_settings(case)) as context:
        prefix = case.texts(bench)[0]
        context.decode(prefix)
        size = context.save_file(path, prefix)
        if size != path.stat().st_size:
            raise StateError(f"the build says it wrote {size} bytes into a file of {path.stat().st_size}")
        return size


def _read_full(setup: Setup, case: Exchange, blob: Blob) -> Reading:
    return _read(setup, case, lambda context: context.load(blob, 1))


def _read_file(setup: Setup, case: Exchange, path: Path) -> Reading:
    tokens: list[Tokens] = []

    def load(context: Context) -> int:
        consumed, came = context.load_file(path, 1)
        tokens.append(came)
        return consumed

    reading = _read(setup, case, load)
    prefix = case.texts(bench_of(setup))[0]
    if reading.consumed and not np.array_equal(tokens[0], prefix):
        return replace(
            reading, deviation=Deviation(1.0, "tokens", "the tokens in the file", str(prefix), str(tokens[0]))
        )
    return reading


def _read(setup: Setup, case: Exchange, load: Callable[[Context], int]) -> Reading:
    """Load into sequence 1 beside a text in sequence 0, and see what both go on with."""
    bench, settings = bench_of(setup), _settings(case)
    prefix, other, suffix, after = case.texts(bench)
    with bench.context(settings) as context:
        context.decode(other)
        consumed = load(context)
        empty = of_count(context.pos_max(1), -1, "last position of the place that was refused", "")
        seen = context.decode(suffix, sequence=1, outputs="all")
        beside = context.decode(after, outputs="all")
    expected = bench.cold(settings, prefix, suffix) if consumed else bench.cold(settings, suffix)
    deviations = [of_logits(seen, expected), of_logits(beside, bench.cold(settings, other, after))]
    return Reading(consumed, worst(deviations if consumed else [empty, *deviations]))


def _read_partial(setup: Setup, case: Exchange, blob: Blob) -> Reading:
    """Go on from the text, load, remove what lies behind it, and see what follows; after a refusal, begin again."""
    bench, settings = bench_of(setup), _settings(case)
    prefix, detour, suffix, _ = case.texts(bench)
    with bench.context(settings) as context:
        context.decode(prefix)
        context.decode(detour)
        consumed = context.load(blob, flags=StateFlags.PARTIAL_ONLY)
        begin = len(prefix) if consumed else 0
        if not context.seq_rm(0, begin):
            raise StateError(f"the build refused to remove what lies behind position {begin}")
        if not consumed:
            context.decode(prefix)
        seen = context.decode(suffix, start=len(prefix), outputs="all")
    return Reading(consumed, of_logits(seen, bench.cold(settings, prefix, suffix)))
