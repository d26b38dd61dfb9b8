"""A precision-per-memory ladder of one model over one text: every cache type at every tail, next to what it costs.

Scores are kept per chunk of text and arm as soon as they are there, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.harness.contract.census import ModelCensus
from conformance.harness.measure.kld import KldRun, KldStatistics, MedianChange, Scores, median_change, similarity
from conformance.harness.precision.body import body
from conformance.harness.precision.codecs import CODECS, CodecError
from conformance.harness.precision.emulation import CacheChoice
from conformance.harness.precision.memory import AttentionLayers, Run, footprint
from conformance.harness.precision.scoring import Arm, Records, Scorer
from conformance.harness.precision.tail import resolve_tail

_SEED = 1
_PAD = 256


class LadderError(ValueError):
    """A ladder that cannot be made; one line: what, where, what to do."""


@dataclass(frozen=True)
class LadderRow:
    """One arm: what it costs and how far it moves the model.

    Attributes:
        name: cache type, K/V apart where they differ.
        exact_rows: rows of the tail as layers without a window resolve it.
        native: the build's own cache type; otherwise emulated over the exact cache.
        bits: per cached value of the body, the mean of K and V.
        mib, share: memory by the model of it, and as a share of the same cache in bf16.
        since_no_tail: paired change of the median against the same type at the first tail; None for that itself.
        seconds, cpu_seconds: of decoding and scoring, all threads.

    """

    name: str
    tail: int
    exact_rows: int
    native: bool
    bits: float
    mib: float
    share: float
    statistics: KldStatistics
    likeness: float
    since_no_tail: MedianChange | None
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class LadderPlan:
    """What a ladder is made of: tokens int32 [chunks, context], and the identity that a resumed run must share."""

    tokens: NDArray[np.int32]
    arms: tuple[Arm, ...]
    identity: dict[str, Any]


@dataclass(frozen=True)
class PairChange:
    """An asymmetric pair against its reverse, K one type and V another, at one tail.

    `change` is the paired change of the median from `reverse` to `name`.
    """

    name: str
    reverse: str
    tail: int
    median: float
    median_of_reverse: float
    change: MedianChange


def arms_of(
    types: Sequence[str], tails: Sequence[int], native: Sequence[str], native_tails: Sequence[int] = (0,)
) -> tuple[Arm, ...]:
    """Every type (``q4_0``, or ``q5_0/q4_0`` for K and V) at every tail, then the native types at every native tail."""
    emulated = []
    for name in types:
        key, _, value = name.partition("/")
        emulated += [Arm(CacheChoice(key, value or key, tail)) for tail in tails]
    return (*emulated, *(Arm.native_of(name, tail) for name in native for tail in native_tails))


def check_arms(arms: Sequence[Arm], census: ModelCensus, model: str) -> None:
    """LadderError, in one line, for a type that does not exist or cannot take this model's heads; else TailError."""
    for arm in arms:
        resolve_tail(arm.choice.tail)
        for layer in census.attention or ():
            try:
                for kept, head_dim in (
                    (body(arm.choice.key, layer.key_dim, "k"), layer.key_dim),
                    (body(arm.choice.value, layer.value_dim, "v"), layer.value_dim),
                ):
                    if kept.name in CODECS:
                        CODECS[kept.name].bytes_per_row(head_dim)
            except CodecError as error:
                raise LadderError(f"--types {arm.name}, {model}: {error}") from None


def cut(tokens: NDArray[np.int32], context: int, chunks: int, bos: int | None, corpus: str) -> NDArray[np.int32]:
    """The first chunks of a text, int32 [chunks, context]; LadderError, which names the corpus, when it is shorter."""
    if len(tokens) < context * chunks:
        raise LadderError(
            f"corpus {corpus} has {len(tokens)} tokens; {chunks} x {context} are needed, give a longer text or a smaller --context"
        )
    parts = tokens[: context * chunks].reshape(chunks, context)
    return parts if bos is None else np.concatenate([np.full((chunks, 1), bos, np.int32), parts[:, 1:]], axis=1)


def measure(
    plan: LadderPlan,
    scorer: Scorer,
    folder: Path,
    base_of: Callable[[int], NDArray[np.float32] | Records] | None = None,
) -> Iterator[tuple[int, int]]:
    """Score every arm over every chunk that `folder`, which was claimed, does not hold yet; yields (done, total) each time."""
    total, done = len(plan.arms) * len(plan.tokens), 0
    for chunk, tokens in enumerate(plan.tokens):
        base: NDArray[np.float32] | Records | None = None
        for arm in plan.arms:
            path = _scores_path(folder, arm, chunk)
            if not path.exists():
                if base is None:
                    base = base_of(chunk) if base_of else scorer.exact(tokens)
                begin, cpu = time.perf_counter(), time.process_time()
                scores = scorer.scores(arm, tokens, base)
                spent = [time.perf_counter() - begin, time.process_time() - cpu]
                partial = path.with_suffix(".partial")
                with partial.open("wb") as file:
                    np.savez(file, kld=scores.kld, dp=scores.dp, same_top=scores.same_top, spent=spent)
                partial.replace(path)
            done += 1
            yield done, total


def rows(plan: LadderPlan, census: ModelCensus, folder: Path, ubatch: int) -> list[LadderRow]:
    """The table of a measured plan, in the order of its arms."""
    context = plan.tokens.shape[1]
    groups = _groups(census)
    padded = -(-context // _PAD) * _PAD
    whole = footprint(groups, Run(padded, ubatch), "bf16").total
    found: list[LadderRow] = []
    firsts: dict[str, NDArray[np.float64]] = {}
    for arm in plan.arms:
        run, spent = _collected(plan, arm, folder)
        statistics, kld = run.statistics(), run.kld
        first = firsts.setdefault(arm.name, kld)
        choice = arm.choice
        size = footprint(groups, Run(padded, ubatch, tail=choice.tail), choice.key, choice.value).total
        kvarn = choice.key.startswith("kvarn")
        found.append(
            LadderRow(
                name=arm.name,
                tail=choice.tail,
                exact_rows=resolve_tail(choice.tail, kvarn=kvarn),
                native=arm.native,
                bits=_bits(choice, census),
                mib=size / (1 << 20),
                share=size / whole,
                statistics=statistics,
                likeness=similarity(statistics.mean),
                since_no_tail=None if first is kld else median_change(first, kld, seed=_SEED),
                seconds=float(spent[0]),
                cpu_seconds=float(spent[1]),
            )
        )
    return found


def pairs(plan: LadderPlan, folder: Path) -> list[PairChange]:
    """Of a measured plan, every asymmetric pair whose reverse was measured too, K in the type of more bits first."""
    found = []
    arms = {(arm.choice.key, arm.choice.value, arm.choice.tail): arm for arm in plan.arms if not arm.native}
    for (key, value, tail), arm in arms.items():
        reverse = arms.get((value, key, tail))
        if reverse and _nominal_bits(key) > _nominal_bits(value):
            kld, other = (_collected(plan, each, folder)[0].kld for each in (arm, reverse))
            medians = float(np.median(kld)), float(np.median(other))
            found.append(PairChange(arm.name, reverse.name, tail, *medians, median_change(other, kld, seed=_SEED)))
    return found


def _collected(plan: LadderPlan, arm: Arm, folder: Path) -> tuple[KldRun, NDArray[np.float64]]:
    """All scores of an arm, and the seconds that they took: by the clock, and of CPU."""
    run, spent = KldRun(), np.zeros(2)
    for chunk in range(len(plan.tokens)):
        with np.load(_scores_path(folder, arm, chunk)) as kept:
            run.add(Scores(kept["kld"], kept["dp"], kept["same_top"]))
            spent += kept["spent"]
    return run, spent


def _nominal_bits(name: str) -> float:
    return CODECS[name].bits_per_value if name in CODECS else float(name.removeprefix("kvarn"))


def as_dict(row: LadderRow) -> dict[str, Any]:
    """A row as JSON-able values, statistics and change inlined."""
    values = asdict(row)
    statistics, change = values.pop("statistics"), values.pop("since_no_tail") or {}
    return {**values, **statistics, **{f"change_{name}": value for name, value in change.items()}}


def _bits(choice: CacheChoice, census: ModelCensus) -> float:
    layer = (census.attention or ())[0]
    sides = [body(choice.key, layer.key_dim, "k"), body(choice.value, layer.value_dim, "v")]
    kept = [getattr(side, "codec", None) or getattr(side, "kvarn", None) for side in sides]
    return float(np.mean([side.bits_per_value for side in kept if side is not None]))


def _groups(census: ModelCensus) -> list[AttentionLayers]:
    return [
        AttentionLayers(
            1, layer.n_head_kv, layer.key_dim, layer.value_dim, census.sliding_window if layer.sliding else None
        )
        for layer in census.attention or ()
    ]


def _scores_path(folder: Path, arm: Arm, chunk: int) -> Path:
    name = f"{arm.name} {arm.choice.tail}".replace("/", "+").replace(" ", "-")
    return folder / f"{name}-{chunk}.npz"


def claim(folder: Path, identity: dict[str, Any]) -> None:
    """Make the folder of a run's scores; LadderError when it holds those of another run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "identity.json"
    text = json.dumps(identity, indent=1, sort_keys=True)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        differing = _differing(path, identity)
        raise LadderError(f"{path.parent}: holds scores of another run ({differing} differs); name another --out")
    path.write_text(text, encoding="utf-8")


def _differing(path: Path, identity: dict[str, Any]) -> str:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return ", ".join(name for name in identity if kept.get(name) != identity[name]) or "something"
    except (ValueError, AttributeError):
        return "everything"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
