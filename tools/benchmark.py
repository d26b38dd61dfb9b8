"""How fast the precision tools and the arms' harness are on this machine, beside what they must reach. A benchmark, no test.

    python -m tools.benchmark [codecs kld tail native arms] [--model smollm2-135m] [--perplexity PATH] [--threads N]

codecs: round trips of every standard cache type. kld: scoring positions of a vocabulary of 49,152. tail: what the emulated
tail adds to a plain run, in steps of 32 and of 1. native: both passes that score the build's own q4_0 against the exact
cache; with the path of a llama-perplexity of the same build also its two passes over the same tokens. arms: the share of each
arm's wall that is not spent inside the build, over the first steps of the document's trace in small (on holo3-mini, unless
--model says otherwise).

Rates are by CPU time, so that other work on the machine counts as little as it can; wall times mean something on an idle
machine only, and the load is printed. Exit code 0, or 2 when a model or program cannot be used.
"""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from conformance.harness.arms.counts import ARMS, LABELS, ArmName, counts
from conformance.harness.arms.document import load_document, trace_transcript
from conformance.harness.arms.reading import Reader
from conformance.harness.arms.replay import ArmParts, ProfiledRun
from conformance.harness.contract.census import GGUFError, ModelCensus, census_of_gguf
from conformance.harness.engine import BUNDLED, Context, ContextSettings, EngineError, Library, Model
from conformance.harness.measure.kld import score
from conformance.harness.precision.codecs import CODECS
from conformance.harness.precision.emulation import CacheChoice, TailedSequence, settings_for
from conformance.harness.precision.scoring import Arm, Scorer
from conformance.harness.prompts.scaling import scaled
from conformance.harness.report.arms import harness_share
from fixtures.corpora import corpus
from fixtures.trained import FetchError, model_path

_VALUES = 1 << 23  # float32 of a codec's round trip
_VOCABULARY, _POSITIONS = 49_152, 512
_CHUNKS, _CONTEXT, _UBATCH = 4, 1024, 512
_TRAINED, _HYBRID = "smollm2-135m", "holo3-mini"
_TRACE_SCALE, _TRACE_STEPS = 0.05, 8  # of real tasks' tokens: at full size the harness weighs less still


class Part(StrEnum):
    """What can be timed."""

    CODECS = "codecs"
    KLD = "kld"
    TAIL = "tail"
    NATIVE = "native"
    ARMS = "arms"


@dataclass(frozen=True)
class Spent:
    """Seconds of one run: by the clock, and of CPU over all threads."""

    wall: float
    cpu: float

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.wall + other.wall, self.cpu + other.cpu)

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.wall:.1f} s wall, {self.cpu:.1f} s CPU"


@dataclass(frozen=True)
class Line:
    """One figure beside what must be reached."""

    what: str
    figure: str
    must: str


class BenchmarkError(ValueError):
    """A benchmark that cannot be run; one line: what, where, what to do."""


def benchmark(
    parts: Annotated[list[Part] | None, typer.Argument(help="What to time; everything when nothing is named.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"A GGUF, or the name of a fixture or fetched model; default {_TRAINED}, for `arms` {_HYBRID}."
        ),
    ] = None,
    build: Annotated[str, typer.Option(help="'bundled', a folder, or a libllama file.")] = BUNDLED,
    perplexity: Annotated[
        Path | None, typer.Option(help="llama-perplexity of the same build, to compare with.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="For `native`, on both sides; the rest has one.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Of each figure, in turn; the best counts.")] = 2,
) -> None:
    """Time the precision tools and the arms' harness."""
    chosen = parts or list(Part)
    load = os.getloadavg()[0]
    table = Table("what", "figure", "must reach", box=None)
    console = Console(highlight=False, width=140)
    try:
        for line in _lines(chosen, model, build, perplexity, threads, repeats):
            table.add_row(line.what, line.figure, line.must)
            console.print(f"{line.what}: {line.figure}", style="dim")
    except (BenchmarkError, EngineError, FetchError, GGUFError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    console.print(table)
    console.print(
        f"{os.cpu_count()} cores, load {load:.1f} before and {os.getloadavg()[0]:.1f} after; numpy {np.__version__}"
    )


def _lines(
    chosen: Sequence[Part], model: str | None, build: str, perplexity: Path | None, threads: int, repeats: int
) -> Iterator[Line]:
    if Part.CODECS in chosen:
        yield from _codecs(repeats)
    if Part.KLD in chosen:
        yield _kld(repeats)
    if Part.TAIL in chosen or Part.NATIVE in chosen:
        path = model_path(model or _TRAINED)
        census = census_of_gguf(path)
        if not census.attention:
            raise BenchmarkError(f"{path}: no attention layers are known of {census.arch!r}; use another model")
        with Model(Library(build), path) as loaded:
            text = corpus("pydoc")[:60_000]
            tokens = loaded.tokenize(text, special=False)
            if len(tokens) < _CHUNKS * _CONTEXT:
                raise BenchmarkError(f"{path}: reads the pydoc corpus as {len(tokens)} tokens only; use another model")
            if Part.TAIL in chosen:
                yield from _tail(loaded, census, tokens, repeats)
            if Part.NATIVE in chosen:
                yield from _native(loaded, census, tokens, text, perplexity, threads, repeats)
    if Part.ARMS in chosen:
        with Model(Library(build), model_path(model or _HYBRID)) as loaded:
            yield from _arms(loaded, repeats)


def _arms(model: Model, repeats: int) -> Iterator[Line]:
    """The harness around each arm; in every repeat the arms take turns, step by step."""
    document = load_document()
    task = scaled(trace_transcript(document), _TRACE_SCALE).first(_TRACE_STEPS)
    reader, window = Reader(model), document.trace.max_images
    around: dict[ArmName, list[Around]] = {arm: [] for arm in ARMS}
    for _ in range(repeats):
        with ExitStack() as stack:
            runs = {}
            for arm in ARMS:
                cells = max(step.live_cells for step in counts(arm, task, window, reader.vocabulary))
                context = stack.enter_context(Context(model, ContextSettings(n_ctx=cells + 1)))
                runs[arm] = ProfiledRun(context, ArmParts().arm(arm, context, reader, task, window), "benchmark")
                around[arm].append(Around(lambda: model.library.seconds))
            for number in range(1, _TRACE_STEPS + 1):
                for arm, run in runs.items():
                    around[arm][-1].call(partial(run.step, number))
    for arm, each in around.items():
        best = min(each, key=lambda one: one.share)
        figure = f"{best.share:.1%} of {best.wall:.2f} s wall"
        yield Line(f"harness around {LABELS[arm]}, {_TRACE_STEPS} steps at {_TRACE_SCALE:g}", figure, "<= 5 %")


class Around:
    """Wall time of calls, and how much of it another clock counted.

    Args:
        inside: seconds of the other clock so far.
        clock: seconds of the wall so far.

    """

    def __init__(self, inside: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self._inside, self._clock = inside, clock
        self.wall = self.inside = 0.0

    def call(self, run: Callable[[], object]) -> None:
        """Make a call and add up what it took."""
        wall, inside = self._clock(), self._inside()
        run()
        self.wall += self._clock() - wall
        self.inside += self._inside() - inside

    @property
    def share(self) -> float:
        """Of the wall time, what the other clock did not count."""
        return harness_share(self.wall, self.inside)


def _codecs(repeats: int) -> Iterator[Line]:
    values = np.random.default_rng(0).standard_normal((_VALUES // 128, 128), np.float32)
    for name, codec in CODECS.items():
        spent = _best(repeats, partial(codec.round_trip, values))
        must = "" if codec.block == 1 else ">= 120 MB/s"
        yield Line(f"round trip in {name}", f"{values.nbytes / 1e6 / spent.cpu:.0f} MB/s of f32", must)


def _kld(repeats: int) -> Line:
    rng = np.random.default_rng(0)
    base = rng.normal(0, 3, (_POSITIONS, _VOCABULARY)).astype(np.float32)
    candidate = base + rng.normal(0, 0.1, base.shape).astype(np.float32)
    following = rng.integers(0, _VOCABULARY, _POSITIONS)
    spent = _best(repeats, partial(score, base, candidate, following))
    return Line("KLD statistics", f"{_POSITIONS / spent.cpu:.0f} positions/s", ">= 1000")


def _tail(model: Model, census: ModelCensus, tokens: NDArray[np.int32], repeats: int) -> Iterator[Line]:
    bodies = {
        "q4_0": CacheChoice.of("q4_0"),
        "q4_0 with a tail of 256": CacheChoice.of("q4_0", 256),
        "kvarn4": CacheChoice.of("kvarn4"),
    }
    for ubatch, n, must in ((32, _CONTEXT, "<= 50 %"), (1, _CONTEXT // 2, "<= 150 %")):
        run = partial(_decode, model, census, tokens[:n], ubatch)
        best = _best_of(
            repeats, {"": partial(run, None), **{name: partial(run, each) for name, each in bodies.items()}}
        )
        plain = best.pop("")
        for name, spent in best.items():
            extra = f"{spent.cpu / plain.cpu - 1:+.0%} CPU, {spent.wall / plain.wall - 1:+.0%} wall, of {plain.text}"
            yield Line(f"emulated {name}, steps of {ubatch}, {n} tokens", extra, must)


def _decode(
    model: Model, census: ModelCensus, tokens: NDArray[np.int32], ubatch: int, choice: CacheChoice | None
) -> None:
    """All logits of a text, in the exact cache or under a body and a tail."""
    with Context(model, settings_for(len(tokens), ubatch, reach_cache=choice is not None)) as context:
        decode = context.decode if choice is None else TailedSequence(context, census, choice).decode
        for start in range(0, len(tokens), ubatch):
            decode(tokens[start : start + ubatch], outputs="all")


def _native(
    model: Model,
    census: ModelCensus,
    tokens: NDArray[np.int32],
    text: str,
    perplexity: Path | None,
    threads: int,
    repeats: int,
) -> Iterator[Line]:
    chunks = tokens[: _CHUNKS * _CONTEXT].reshape(_CHUNKS, _CONTEXT)
    scorer = Scorer(model, census, _UBATCH, threads)

    def ours() -> None:
        for chunk in chunks:
            scorer.scores(Arm.native_of("q4_0"), chunk)

    runs: dict[str, Callable[[], object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if perplexity:
            (Path(folder) / "text.txt").write_text(text, encoding="utf-8")
            runs["llama-perplexity"] = partial(_perplexity, perplexity, model.path, Path(folder), threads)
        best = _best_of(repeats, {**runs, "here": ours})
    what = f"exact and q4_0, both passes, {_CHUNKS} x {_CONTEXT} tokens, {threads} threads"
    yield Line(f"{what}, here", best["here"].text, "")
    if perplexity:
        theirs = best["llama-perplexity"]
        yield Line(f"{what}, llama-perplexity", theirs.text, "")
        ratio = f"{best['here'].wall / theirs.wall:.2f} of its wall, {best['here'].cpu / theirs.cpu:.2f} of its CPU"
        yield Line("here against llama-perplexity", ratio, "<= 1.0 of its wall")


def _perplexity(program: Path, model: Path, folder: Path, threads: int) -> None:
    """Both passes of llama-perplexity over the text in a folder: the base, then q4_0 against it."""
    fixed = ["-m", model, "-f", folder / "text.txt", "-c", _CONTEXT, "--chunks", _CHUNKS, "-t", threads, "-b", 2048]
    fixed += ["-ub", _UBATCH, "-fa", "on", "--kl-divergence-base", folder / "base.kld"]
    for kind, more in (("f16", []), ("q4_0", ["--kl-divergence"])):
        command = [str(each) for each in (program.resolve(), *fixed, "-ctk", kind, "-ctv", kind, *more)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise BenchmarkError(f"{program}: {error.strerror}; give the path of llama-perplexity") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
            raise BenchmarkError(f"{program}: ended with {done.returncode} ({last}); is it llama-perplexity?")


def _best(repeats: int, run: Callable[[], object]) -> Spent:
    return _best_of(repeats, {"": run})[""]


def _best_of(repeats: int, runs: dict[str, Callable[[], object]]) -> dict[str, Spent]:
    """The least wall and the least CPU time of each run; they take turns, so that a slow spell falls on all."""
    found: dict[str, list[Spent]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            with _timed(found[name]):
                run()
    return {name: Spent(min(s.wall for s in each), min(s.cpu for s in each)) for name, each in found.items()}


@contextmanager
def _timed(into: list[Spent]) -> Iterator[None]:
    wall, cpu = time.perf_counter(), _cpu()
    yield
    into.append(Spent(time.perf_counter() - wall, _cpu() - cpu))


def _cpu() -> float:
    """CPU seconds of this process and of the children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    typer.run(benchmark)
