"""The build and the model under test, as a check sees them. Lives in a child process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from conformance.harness import builds
from conformance.harness.arms.reading import Reader, encoder_of
from conformance.harness.arms.reference import AgentReference
from conformance.harness.arms.replay import ArmParts
from conformance.harness.arms.terminal_slot import place
from conformance.harness.contract.census import ModelCensus, census_of_gguf
from conformance.harness.contract.known import BuildName
from conformance.harness.contract.needs import Subject
from conformance.harness.contract.schema import Kind, Weights
from conformance.harness.engine import (
    Blob,
    CacheSide,
    Context,
    ContextSettings,
    HighLevel,
    Logits,
    Model,
    ModelError,
    StateError,
    StateFlags,
    Vision,
    has_high_level,
    has_vision,
)
from conformance.harness.engine.child import Child
from conformance.harness.faults import FAULTS
from conformance.harness.measure.deviation import Deviation, nmse, of_layers, of_logits
from conformance.harness.measure.kld import Scores, surprise
from conformance.harness.precision.emulation import layer_map
from conformance.harness.precision.reference import Reference
from conformance.harness.precision.scoring import Arm, Scorer
from conformance.harness.state import BlobError, LayerMap, SequenceState, compare, lengthened, parse, part
from fixtures import models
from fixtures.corpora import corpus
from fixtures.trained import TRAINED, fixture_path

Tokens = npt.NDArray[np.int32]
Piece = tuple[npt.NDArray[Any], npt.NDArray[np.int32]]
"""What is decoded next and at which positions: tokens int32 [n] at [n], or embeddings float32 [n, n_embd] at [4, n]."""
Floor = Literal["repeat", "threads", "ubatch"]
_FLOAT32_BYTES = 4
Flash = Literal["off", "on"]

_UNDER = ", flash attention "
_SPEED_TOKENS = 32
_LEAST_MEMORY = 1e-8  # NMSE; the effect of another past is 1e-3 and more on every fixture model
_NOISE_SEED, _NOISE_TOKENS = 99, 24
_KEPT_REPLAYS = 256
_FLOOR_SECONDS = 0.4  # of prefill for each run of a floor, within the bounds below
_FLOOR_TOKENS = (48, 600)
_FLOOR_ROWS = 16
_NEIGHBOUR_TOKENS = 5
_TEXT_TOKENS = 64
_FILL_TOKENS = 64
_TRAINED_SHARE = 0.6  # of the surprise that a uniform guess has
_MANUAL_CHARACTERS = 60_000
_VARIANTS: dict[Floor, tuple[dict[str, int], ...]] = {
    "repeat": ({},),
    "ubatch": (
        {"n_ubatch": 8},
        {"n_ubatch": 64},
        {"end_calls": _FLOOR_ROWS},
        {"n_seq_max": 2, "kv_unified": True},
    ),
    "threads": ({"n_threads": 2},),
}


@dataclass(frozen=True)
class Noise:
    """How far runs lie apart that should agree: NMSE of logits, and NMSE of the worst layer of the state.

    The latter is infinite where no state of the model can be read.
    """

    logits: float
    state: float


@dataclass(frozen=True)
class Setup:
    """All that a process needs to run a check: picklable, printable, and enough for a replay on another machine.

    Attributes:
        build: reference of the build under test.
        model: name of a fixture model, or the path of a GGUF.
        fault: name of the planted fault that makes the engine lie, None for the engine as it is.
        n_threads: threads for every context.
        other: reference of a second build, which checks that exchange states run in a process of its own.

    """

    build: str
    model: str
    fault: str | None = None
    n_threads: int = 1
    other: str | None = None

    @property
    def model_path(self) -> Path:
        """The GGUF; a fixture model is written first when the cache does not hold it."""
        return fixture_path(self.model) if self.model in (*models.names(), *TRAINED) else Path(self.model)


@dataclass(frozen=True)
class Measurement:
    """What one case of one check gave, and the seconds of it spent inside the build."""

    deviation: Deviation
    seconds_in_library: float


@dataclass(frozen=True)
class Acquaintance:
    """What a first look at a model under a build found; every figure is measured.

    Attributes:
        kinds: memory kinds, as the build says.
        capabilities: what was seen to work.
        floors: by kind of floor and flash attention; cells are compared by position. repeat: the same again; ubatch: the
            same sums in other pieces, at ubatch 8 and 64 against 512, with the last tokens one by one, and with a few
            cells of another sequence in front; threads: 2 against 1.
        remembers: whether logits depend on what was decoded before; where they do not, nothing that is kept can matter,
            and no check that compares logits would mean anything.
        prefill_tokens_per_second: of a short text, flash attention off.
        n_bytes: size of the weights.
        weights: whether all of them are float32; narrower ones are computed with in other ways at other batch sizes.

    """

    kinds: frozenset[Kind]
    capabilities: frozenset[str]
    floors: dict[tuple[Floor, Flash], Noise]
    prefill_tokens_per_second: float
    n_bytes: int
    remembers: bool = True
    weights: Weights = "float32"

    def beside(self, other: Acquaintance) -> Acquaintance:
        """What holds under both of two builds: the larger noise, the slower speed, what works in both."""
        return replace(
            self,
            capabilities=self.capabilities & other.capabilities,
            floors={
                key: Noise(max(noise.logits, other.floors[key].logits), max(noise.state, other.floors[key].state))
                for key, noise in self.floors.items()
            },
            prefill_tokens_per_second=min(self.prefill_tokens_per_second, other.prefill_tokens_per_second),
        )

    def as_record(self) -> dict[str, Any]:
        """The figures as JSON-able values."""
        return {
            "floors": {f"{floor}{_UNDER}{flash}": asdict(noise) for (floor, flash), noise in self.floors.items()},
            "prefill_tokens_per_second": round(self.prefill_tokens_per_second),
            "weight_bytes": self.n_bytes,
            "weights": self.weights,
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any], kinds: Iterable[Kind], capabilities: Iterable[str]) -> Acquaintance:
        """Read back what `as_record` gave."""
        floors: dict[tuple[Floor, Flash], Noise] = {}
        for key, noise in record["floors"].items():
            floor, _, flash = key.partition(_UNDER)
            floors[floor, flash] = Noise(**{name: float(value) for name, value in noise.items()})
        return cls(
            frozenset(kinds),
            frozenset(capabilities),
            floors,
            record["prefill_tokens_per_second"],
            record["weight_bytes"],
            weights=record["weights"],
        )


class Bench:
    """One model loaded in one build. Contexts made here are always new, so nothing leaks from case to case."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.library = builds.load(setup.build)
        self.model = Model(self.library, setup.model_path)
        self.census: ModelCensus = census_of_gguf(setup.model_path)
        self._context: Callable[[Model, ContextSettings], Context] = (
            FAULTS[setup.fault].context if setup.fault else Context
        )
        self.reference = FAULTS[setup.fault].reference if setup.fault else Reference()
        self.agent = FAULTS[setup.fault].agent if setup.fault else AgentReference()
        self.arm_parts = FAULTS[setup.fault].arm_parts if setup.fault else ArmParts()
        self._exact: dict[tuple[bytes, int], Logits] = {}
        self._scores: dict[tuple[bytes, int, Arm], Scores] = {}
        self._cold: dict[tuple[ContextSettings, tuple[bytes, ...]], Logits] = {}

    @property
    def other(self) -> Child:
        """A process for the second build, under this one's memory limit; a call there names that build in its `Setup`."""
        assert self.setup.other is not None
        return _process_for(self.setup.other)

    def context(self, settings: ContextSettings) -> Context:
        """A new context, to be used as a context manager."""
        return self._context(self.model, settings.changed(n_threads=self.setup.n_threads))

    def high_level(self) -> HighLevel:
        """A new `llama_cpp.Llama` on the model, to be used as a context manager."""
        made = FAULTS[self.setup.fault].high_level if self.setup.fault else HighLevel
        return made(self.library, self.setup.model_path)

    @contextmanager
    def used_context(self, settings: ContextSettings) -> Iterator[Context]:
        """A context in which every sequence was decoded into and removed: zeros would hide reads of what nobody wrote."""
        noise = self.texts(_NOISE_SEED, *[_NOISE_TOKENS] * settings.n_seq_max)
        with self.context(settings) as context:
            for sequence, text in enumerate(noise):
                context.decode(text, sequence=sequence)
            for sequence in range(settings.n_seq_max):
                if not context.seq_rm(sequence):
                    raise StateError(f"the build refused to remove the whole of sequence {sequence}")
            yield context

    def cold(self, settings: ContextSettings, *pieces: Tokens) -> Logits:
        """A cold replay: every row of logits of the last piece, after the others, in a context that did nothing else.

        The context has the same settings but a single sequence, no rollback and the full sliding window.
        """
        settings = settings.changed(n_seq_max=1, n_rs_seq=0, swa_full=True)
        *history, last = pieces
        key = settings, tuple(piece.tobytes() for piece in pieces)
        if key not in self._cold:
            if len(self._cold) >= _KEPT_REPLAYS:
                self._cold.pop(next(iter(self._cold)))
            with Context(self.model, settings.changed(n_threads=self.setup.n_threads)) as context:
                for piece in history:
                    context.decode(piece, outputs="none")
                self._cold[key] = context.decode(last, outputs="all")
        return self._cold[key]

    def texts(self, seed: int, *counts: int) -> list[Tokens]:
        """Consecutive pieces of one random text, int32 [count] each; every token of the vocabulary may occur."""
        drawn = np.random.default_rng(seed).integers(0, self.model.n_vocab, sum(counts), dtype=np.int32)
        return np.split(drawn, np.cumsum(counts)[:-1])

    def real_text(self, chunk: int, n: int) -> Tokens:
        """One of the pieces of n tokens that the reference manual of Python consists of, int32 [n], as this model reads it."""
        return _piece_of_manual(self.model, chunk, n)

    def scorer(self, ubatch: int) -> Scorer:
        """Scores cache types and tails over this model in steps of `ubatch`."""
        return Scorer(
            self.model, self.census, ubatch, self.setup.n_threads, context=self._context, tailed=self.reference.tailed
        )

    def divergence(self, arm: Arm, text: Tokens, ubatch: int) -> Scores:
        """How far an arm is from the exact cache over the second half of a text; measured once for each of them."""
        key = (text.tobytes(), ubatch)
        if (*key, arm) not in self._scores:
            scorer = self.scorer(ubatch)
            if key not in self._exact:
                self._exact = {key: scorer.exact(text)}  # one at a time: a whole vocabulary for every position
            self._scores[*key, arm] = scorer.scores(arm, text, self._exact[key])
        return self._scores[*key, arm]

    def rows(self, context: Context, layer: int, side: CacheSide) -> tuple[Tokens, npt.NDArray[np.float16]]:
        """Positions int32 [cells] and K or V rows float16 [cells, width] that a context holds of one attention layer."""
        assert self.layers is not None
        state = self.state(context.save())
        kept = next(
            cache for cache, layers in zip(state.attention, self.layers.attention, strict=True) if layer in layers
        )
        return kept.cells.positions, part(state, layer, side, layers=self.layers).values()

    def image(self, seed: int, width: int, height: int, position: int) -> Piece:
        """An image of width x height embeddings at a position: all share t, y and x count from it, z is 0.

        The embeddings are normal noise, which costs no vision encoder. What follows goes to position + max(width, height).
        """
        embeddings = np.random.default_rng(seed).standard_normal((width * height, self.model.n_embd_inp), np.float32)
        return embeddings, place(width, height, position)

    @cached_property
    def vision(self) -> Vision:
        """The vision tower of a fixture model that has one."""
        name = models.projector(self.setup.model)
        assert name is not None
        return Vision(self.model, models.path(name), n_threads=self.setup.n_threads)

    def reader(self, *, pixels: bool = False) -> Reader:
        """Reads transcripts: screenshots are noise, or `pixels` that went through the vision tower."""
        return Reader(self.model, self.arm_parts.embeddings(encoder_of(self.vision)) if pixels else None)

    @property
    def subject(self) -> Subject:
        """The model, by the name it has in a report, with the kinds of memory that the build gives it."""
        path = self.setup.model_path
        is_fixture = self.setup.model in (*models.names(), *TRAINED)
        return Subject(self.setup.model if is_fixture else path.stem, path, memory_kinds(self.model))

    @property
    def build_name(self) -> BuildName:
        """What the build is called among known failures."""
        identity = self.library.identity()
        return BuildName(identity.build_number, identity.package, identity.package_version, identity.digest)

    @property
    def layers(self) -> LayerMap | None:
        """Which model layer each layer of a blob is; None where the metadata does not tell."""
        census = self.census
        if census.attention is None or census.recurrent is None:
            return None
        return layer_map(census)

    def state(self, blob: Blob, *, partial: bool = False) -> SequenceState:
        """A sequence blob, parsed; what the metadata declares decides between two readings, and never more.

        A partial blob of a model with a sliding window or a recurrent state holds these layers alone.
        """
        try:
            return parse(blob)
        except BlobError:
            attention, recurrent = self.census.attention, self.census.recurrent
            return parse(
                blob,
                attention_layers=None
                if attention is None
                else sum(layer.sliding or not partial for layer in attention),
                recurrent_layers=None if recurrent is None else len(recurrent),
            )

    def fill(self, context: Context, n_tokens: int) -> None:
        """Make an empty sequence 0 hold `n_tokens`, where only the time of what follows matters.

        One attention cache is filled with the rows of a short text over again, which takes no prefill. Otherwise, with no
        attention, a sliding window, or a state that cannot be read or is refused, the whole text is decoded.
        """
        (text,) = self.texts(0, n_tokens)
        context.decode(text[:_FILL_TOKENS], outputs="none")
        try:
            longer = lengthened(self.state(context.save()), n_tokens)
        except ValueError:
            longer = None
        if longer is None or context.load(longer) == 0:
            context.seq_rm(0)
            context.decode(text, outputs="none")

    def reorders(self, n_tokens: int) -> bool:
        """Whether a restore after so many tokens lays the same cells out in another order.

        That is so when a sliding window has left cells behind: they are not saved, and the rest moves together. Sums over
        cells are then taken in another order, and bits need not agree.
        """
        window = self.census.sliding_window or self.model.n_swa  # the build knows more architectures than the census
        return 0 < window < n_tokens

    def close(self) -> None:
        """Free the model and what reads images for it."""
        if "vision" in vars(self):
            self.vision.close()
        self.model.close()


@lru_cache(maxsize=1)
def _process_for(_build: str) -> Child:
    return Child()


@lru_cache(maxsize=16)
def bench_of(setup: Setup) -> Bench:
    """The bench of a setup in this process; models stay loaded between calls."""
    return Bench(setup)


def measure(setup: Setup, body: Callable[[Bench, Any], Deviation], case: Any) -> Measurement:
    """Run one case of a check; models stay loaded between calls."""
    bench = bench_of(setup)
    before = bench.library.seconds
    deviation = body(bench, case)
    return Measurement(deviation, bench.library.seconds - before)


def introduce(setup: Setup) -> tuple[Subject, BuildName]:
    """Load a model in a build and say what both are called."""
    bench = bench_of(setup)
    return bench.subject, bench.build_name


def meet(setup: Setup, floors: tuple[Floor, ...]) -> Acquaintance:
    """A first look at a model: its kinds, what works, how noisy it is, how fast.

    Args:
        setup: the build and the model.
        floors: the kinds of noise to measure.

    """
    bench = bench_of(setup)
    speed = _prefill_speed(bench)
    fewest, most = _FLOOR_TOKENS
    room = max(min(1024, bench.model.n_ctx_train) - _FLOOR_ROWS, 1)
    text, end = bench.texts(0, min(max(int(speed * _FLOOR_SECONDS), fewest), most, room), _FLOOR_ROWS)

    def run(flash: Flash, *, end_calls: int = 1, **variant: int) -> tuple[Logits, SequenceState | None]:
        settings = ContextSettings(n_threads=setup.n_threads, flash_attn=flash).changed(**variant)
        with bench._context(bench.model, settings) as context:
            if settings.n_seq_max > 1:
                context.decode(end[:_NEIGHBOUR_TOKENS], sequence=1, outputs="none")
            context.decode(text, outputs="none")
            logits = [context.decode(part, outputs="all") for part in np.split(end, end_calls)]
            return np.concatenate(logits), _readable(bench, context.save())

    measured: dict[tuple[Floor, Flash], Noise] = {}
    flashes: tuple[Flash, ...] = ("off", "on")
    for flash in flashes:
        logits, state = run(flash)
        for floor in floors:
            others = [run(flash, **variant) for variant in _VARIANTS[floor]]
            measured[floor, flash] = Noise(
                max(of_logits(other, logits).value for other, _ in others),
                max(_apart(other, state) for _, other in others),
            )
    return Acquaintance(
        kinds=memory_kinds(bench.model),
        capabilities=frozenset(_capabilities(bench)),
        floors=measured,
        prefill_tokens_per_second=speed,
        n_bytes=bench.model.n_bytes,
        weights="float32" if bench.model.n_bytes >= _FLOAT32_BYTES * bench.model.n_parameters else "narrower",
        remembers=_remembers(bench),
    )


def _readable(bench: Bench, blob: Blob) -> SequenceState | None:
    """The state in a blob, None where its format is not known here."""
    try:
        return bench.state(blob)
    except BlobError:
        return None


def _apart(state: SequenceState | None, expected: SequenceState | None) -> float:
    """The worst layer's deviation, cells compared by position; infinite where a state cannot be read."""
    if state is None or expected is None:
        return math.inf
    return of_layers(compare(expected, state, by_position=True)).value


def memory_kinds(model: Model) -> frozenset[Kind]:
    """What memory the build gives a model."""
    kinds: set[Kind] = {"recurrent"} if model.is_recurrent else {"attention"}
    if model.is_hybrid:
        kinds |= {"hybrid", "recurrent"}
    if model.n_swa > 0:
        kinds.add("sliding_window")
    return frozenset(kinds)


def _remembers(bench: Bench) -> bool:
    """Whether one token gives clearly other logits after two different texts."""
    rows = []
    for seed in (0, 1):
        (text,) = bench.texts(seed, _SPEED_TOKENS)
        with bench.context(ContextSettings(n_ctx=256)) as context:
            context.decode(text, outputs="none")
            rows.append(context.decode([1]))
    return nmse(rows[0], rows[1]) > _LEAST_MEMORY


def _prefill_speed(bench: Bench) -> float:
    """Tokens per second of a short prefill; the better of two, since the first one also reads the weights."""
    (text,) = bench.texts(0, _SPEED_TOKENS)
    seconds = []
    with bench.context(ContextSettings(n_ctx=256)) as context:
        for _ in range(2):
            begin = time.perf_counter()
            context.decode(text)
            seconds.append(time.perf_counter() - begin)
    return _SPEED_TOKENS / min(seconds)


def _capabilities(bench: Bench) -> list[str]:
    found = ["state_files"]
    if has_high_level(bench.library):
        found.append("high_level")
    if bench.library.has("llama_state_seq_get_data_ext"):
        found.append("partial_state")
    if bench.model.positions_per_embedding > 1:
        found.append("multi_dimensional_positions")
    if has_vision(bench.library) and models.projector(bench.setup.model):
        found.append("images")
    with bench.context(ContextSettings(n_ctx=256, n_rs_seq=2)) as context:
        if context.can_shift:
            found.append("can_shift")
        if context.n_rs_seq:
            found.append("rollback")
    if _expects_text(bench):
        found.append("trained_weights")
    if _makes_context(bench, ContextSettings(n_ctx=256, flash_attn="on", type_k="q4_0", type_v="q4_0", kv_tail=64)):
        found.append("native_tail")
    if _makes_context(bench, ContextSettings(n_ctx=256, flash_attn="on", type_k="kvarn4", type_v="kvarn4")):
        found.append("native_kvarn")
    return found


def _makes_context(bench: Bench, settings: ContextSettings) -> bool:
    try:
        bench.context(settings).close()
    except ModelError:
        return False
    return True


def _expects_text(bench: Bench) -> bool:
    """Whether the model finds real text much likelier than chance would."""
    if bench.model.metadata("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return False
    text = bench.real_text(0, _TEXT_TOKENS)
    with bench.context(ContextSettings(n_ctx=256)) as context:
        logits = context.decode(text, outputs="all")[:-1]
    return bool(surprise(logits, text[1:]).mean() < _TRAINED_SHARE * np.log(bench.model.n_vocab))


@lru_cache(maxsize=8)
def _manual(model: Model) -> Tokens:
    return model.tokenize(corpus("pydoc")[:_MANUAL_CHARACTERS], special=False)


def _piece_of_manual(model: Model, chunk: int, n: int) -> Tokens:
    tokens = _manual(model)
    start = chunk * n % (len(tokens) - n)
    return tokens[start : start + n]


def try_on_device(setup: Setup) -> bool:
    """Whether a state saved with ON_DEVICE can be loaded again. Some builds abort, so this is a call of its own."""
    bench = bench_of(setup)
    if not bench.library.has("llama_state_seq_get_data_ext"):
        return False
    prefix, suffix = bench.texts(0, 20, 2)
    with bench.context(ContextSettings(n_ctx=256)) as context:
        context.decode(prefix)
        blob = context.save(flags=StateFlags.ON_DEVICE)
        expected = context.decode(suffix)
        context.seq_rm(0)
        if context.load(blob, flags=StateFlags.ON_DEVICE) == 0:
            return False
        return nmse(context.decode(suffix), expected) < 1e-6
