"""The statistics that ladders are told in: specs/kld_statistics.yaml."""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conformance.harness.bench import Bench, Case
from conformance.harness.engine import Logits
from conformance.harness.exam import verifies
from conformance.harness.exam.examination import contract
from conformance.harness.measure.deviation import Deviation, of_amount, of_count, worst
from conformance.harness.measure.kld import KldRun, KldStatistics, Scores, score, score_records, similarity
from conformance.harness.measure.kld_base import read_base, write_base
from conformance.harness.measure.rederivation import Rederivation
from conformance.harness.precision.document import Document, cache_mib, load_document, rederive
from conformance.harness.precision.emulation import settings_for

Tokens = NDArray[np.int32]
_SIZE_KEYS = "/kv_mib/"
_SPREAD = 1.2  # of the logarithms of drawn divergences: their 99th percentile is then .0157, the document's .019


class Text(Case):
    """A random text."""

    text_seed: int
    tokens: int


class TwoCaches(Text):
    """A random text in the exact cache and in one of a type."""

    cache_type: str


class Outlier(Case):
    """A run of so many positions, one of which is an outlier."""

    text_seed: int
    positions: int


class Steps(Text):
    """A random text decoded in steps of two sizes."""

    ubatch: int


class Claims(Case):
    """The document's figures, from one of its models on."""

    document_model: str


def two_runs(bench: Bench, case: TwoCaches) -> tuple[Tokens, Logits, Logits]:
    """A text, and its logits under the exact cache and under the other one."""
    (text,) = bench.texts(case.text_seed, case.tokens)
    logits = []
    for kind in ("f16", case.cache_type):
        settings = settings_for(case.tokens, 32, type_k=kind, type_v=kind, reach_cache=False)
        with bench.context(settings) as context:
            logits.append(context.decode(text, outputs="all")[:-1])
    return text, logits[0], logits[1]


@verifies("KS-01", case=Text)
def test_a_run_against_itself_diverges_by_exactly_nothing(bench: Bench, case: Text) -> Deviation:
    (text,) = bench.texts(case.text_seed, case.tokens)
    with bench.context(settings_for(case.tokens, 32, reach_cache=False)) as context:
        logits = context.decode(text, outputs="all")[:-1]
    found = bench.reference.score(logits, logits, text[1:])
    different = int((~found.same_top).sum())
    return worst(
        [
            of_amount(
                float(np.abs(found.kld).max()), "KLD of a run against itself", "nats", "0", f"{found.kld.max():.3g}"
            ),
            of_count(different, 0, "other top tokens than its own", "tokens"),
        ]
    )


@verifies("KS-02", case=TwoCaches)
def test_the_statistics_are_those_that_llama_perplexity_defines(bench: Bench, case: TwoCaches) -> Deviation:
    text, base, other = two_runs(bench, case)
    scores = bench.reference.score(base, other, text[1:])
    run = bench.reference.statistics()
    run.add(scores)
    seen = asdict(run.statistics())
    expected = _by_definition(base.astype(np.float64), other.astype(np.float64), text[1:])
    found = [
        of_amount(
            _relative(float(seen[name]), value),
            f"{name} off its definition",
            "share",
            f"{value:.9g}",
            f"{seen[name]:.9g}",
        )
        for name, value in expected.items()
    ]
    likeness = similarity(expected["mean"])
    found.append(of_amount(_relative(likeness, math.exp(-expected["mean"])), "exp(-mean)", "share"))
    return worst([*found, _through_a_base_file(text, base, other, scores)])


def _by_definition(base: NDArray[np.float64], other: NDArray[np.float64], following: Tokens) -> dict[str, float]:
    """The statistics written one by one, in float64."""
    p, q = (logits - _log_sum(logits)[:, None] for logits in (base, other))
    kld = np.array(
        [
            sum(math.exp(a) * (a - b) for a, b in zip(*pair, strict=True))
            for pair in zip(p.tolist(), q.tolist(), strict=True)
        ]
    )
    rows = np.arange(len(following))
    dp = np.exp(q[rows, following]) - np.exp(p[rows, following])
    ordered = np.sort(kld)

    def quantile(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return float(ordered[low] + (place - low) * (ordered[high] - ordered[low]))

    return {
        "median": quantile(0.5),
        "mean": float(kld.sum() / len(kld)),
        "p90": quantile(0.9),
        "p99": quantile(0.99),
        "p99_9": quantile(0.999),
        "maximum": float(ordered[-1]),
        "minimum": float(ordered[0]),
        "same_top": float((base.argmax(axis=1) == other.argmax(axis=1)).mean()),
        "rms_dp": math.sqrt(float((dp**2).sum() / len(dp))),
    }


def _log_sum(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    peak = logits.max(axis=1)
    total: NDArray[np.float64] = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
    return total


def _relative(seen: float, expected: float) -> float:
    """How far apart, as a share, beyond what double precision leaves open."""
    off = abs(seen - expected) / max(abs(expected), 1e-12)
    return off if off > 1e-6 or math.isnan(off) else 0.0


def _through_a_base_file(text: Tokens, base: Logits, other: Logits, scores: Scores) -> Deviation:
    """Scores against the 16-bit base file, written and read again, against those from logits."""
    tokens = text[None]
    first = tokens.shape[1] // 2
    with tempfile.TemporaryDirectory() as folder:
        write_base(Path(folder) / "base.kld", tokens, [base[first:]], "0" * 64)
        kept = read_base(Path(folder) / "base.kld")
        found = score_records(np.array(kept.records(0)), other[first:], text[first + 1 :])
    off = float(np.abs(found.kld - scores.kld[first:]).max())
    return of_amount(off if off > 2e-3 else 0.0, "KLD through a base file of 16 bits off that from logits", "nats")


@verifies("KS-03", case=Outlier)
def test_one_outlier_misleads_the_mean_and_not_the_median(bench: Bench, case: Outlier) -> Deviation:
    figures = contract()["KS-03"].figures
    outlier, stated = float(figures["kld_of_the_outlier"].value), float(figures["moves_the_mean_by"].value)
    rng = np.random.default_rng(case.text_seed)
    kld = rng.lognormal(math.log(float(figures["median"].value)), _SPREAD, case.positions)
    finer = kld * float(figures["median_of_the_finer"].value) / float(figures["median"].value)
    moved = finer.copy()
    moved[int(rng.integers(case.positions))] = outlier
    coarser, before, after = (_statistics(bench, values) for values in (kld, finer, moved))
    mean, median = after.mean - before.mean, after.median - before.median
    scaled = stated * float(figures["positions"].value) / case.positions
    return worst(
        [
            of_amount(
                abs(mean - scaled) / scaled - 0.05,
                "what one outlier adds to the mean off the stated amount",
                "share",
                f"{scaled:.6f}",
                f"{mean:.6f}",
            ),
            of_amount(
                abs(median) / before.median - 1e-3,
                "what one outlier adds to the median",
                "share",
                "nothing",
                f"{median:.3g}",
            ),
            of_count(int(after.median < coarser.median), 1, "medians that keep the finer run in front", "medians"),
            of_count(int(after.mean > coarser.mean), 1, "means that put the finer run behind", "means"),
        ]
    )


def _statistics(bench: Bench, kld: NDArray[np.float64]) -> KldStatistics:
    run = bench.reference.statistics()
    run.add(Scores(kld, np.zeros(len(kld)), np.ones(len(kld), dtype=np.bool_)))
    return run.statistics()


@verifies("KS-04", case=TwoCaches)
def test_the_plus_minus_is_a_standard_error_within_the_run_and_nan_never_passes(
    bench: Bench, case: TwoCaches
) -> Deviation:
    text, base, other = two_runs(bench, case)
    run = bench.reference.statistics()
    scores = score(base, other, text[1:])
    run.add(scores)
    seen = run.statistics().mean_within_run
    expected = float(scores.kld.std(ddof=1) / math.sqrt(len(scores.kld)))
    broken = other.copy()
    broken[case.text_seed % len(broken), 0] = np.nan
    spoiled = bench.reference.statistics()
    spoiled.add(score(base, broken, text[1:]))
    statistics = spoiled.statistics()
    figures = [value for name, value in asdict(statistics).items() if name not in ("positions", "nonfinite")]
    return worst(
        [
            of_amount(
                _relative(seen, expected),
                "± of the mean off the standard error",
                "share",
                f"{expected:.6g}",
                f"{seen:.6g}",
            ),
            of_count(statistics.nonfinite, 1, "positions that are not finite", "positions"),
            of_count(sum(map(math.isnan, figures)), len(figures), "statistics that are NaN", "statistics"),
        ]
    )


@verifies("KS-05", case=Claims)
def test_the_documents_arithmetic_comes_out_again(bench: Bench, case: Claims) -> Deviation:
    document = _document()
    lines = _rederived()
    others = [line for line in lines if _SIZE_KEYS not in line.id]
    wrong = [line.id for line in others if line.verdict == "disagrees"]
    for line in lines:
        if line.id.startswith(case.document_model + _SIZE_KEYS):
            kind, tail = line.id.split("/")[2:]
            size = cache_mib(document, case.document_model, kind, int(tail), bench.reference.footprint)
            if abs(size - Fraction(line.stated)) > Fraction(1, 100):
                wrong.append(line.id)
    return Deviation(
        float(len(wrong)), "figures that do not come out again, count", ", ".join(wrong[:3]), "0", str(len(wrong))
    )


@cache
def _document() -> Document:
    return load_document()


@cache
def _rederived() -> list[Rederivation]:
    return rederive(_document())


@verifies("KS-06", case=Steps)
def test_scoring_token_by_token_and_in_batches_agree(bench: Bench, case: Steps) -> Deviation:
    (text,) = bench.texts(case.text_seed, case.tokens)
    logits = []
    for size in (1, case.ubatch):
        with bench.context(settings_for(case.tokens, size, reach_cache=False)) as context:
            logits.append(context.decode(text, outputs="all")[:-1])
    run = KldRun()
    run.add(score(logits[1], logits[0], text[1:]))
    seen = run.statistics()
    return of_amount(seen.median, "median KLD of token by token against batches", "nats", "0", f"{seen.median:.3g}")
