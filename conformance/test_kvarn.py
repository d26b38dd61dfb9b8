"""KVarN's records, what they keep and what they leave exact: specs/kvarn.yaml."""

from __future__ import annotations

import numpy as np

from conformance.harness.bench import Bench, Case
from conformance.harness.exam import NotDecidable, verifies
from conformance.harness.exam.examination import contract
from conformance.harness.measure.deviation import Deviation, of_amount, of_count, worst
from conformance.harness.precision.codecs import CodecError
from conformance.harness.precision.emulation import CacheChoice, settings_for
from conformance.harness.precision.kvarn import GROUP, KVarN
from conformance.harness.precision.rotation import hadamard
from conformance.harness.precision.scoring import Arm
from conformance.test_precision_tail import exact_rows, first_attention_layer, of_rise, of_rows


class Records(Case):
    """A group of the model's own rows in records."""

    text_seed: int
    bits: int
    side: str
    head_dim: int


class Kept(Case):
    """A random text under KVarN."""

    text_seed: int
    tokens: int
    ubatch: int
    body: str


class SameBits(Case):
    """A piece of real text under KVarN and under the standard type of as many bits, the same rows exact."""

    chunk: int
    context_tokens: int
    ubatch: int
    bits: int


@verifies("KN-01", case=Records)
def test_records_have_their_size_and_give_back_their_rows_within_the_limits(bench: Bench, case: Records) -> Deviation:
    side = "k" if case.side == "k" else "v"
    kept = bench.reference.body(f"kvarn{case.bits}", case.head_dim, side)
    rng = np.random.default_rng(case.text_seed)
    channels = np.exp(rng.normal(0, 1, case.head_dim))
    rows = (rng.normal(0, channels, (GROUP, case.head_dim)) + rng.normal(0, channels, case.head_dim)).astype(np.float32)
    matrix = hadamard(case.head_dim).astype(np.float64)
    found = [
        of_amount(
            float(np.abs(matrix @ matrix.T - np.eye(case.head_dim)).max()) - 1e-5, "rotation off orthonormal", "1"
        )
    ]
    tall, wide = (min(case.head_dim, 128), GROUP) if side == "k" else (GROUP, min(case.head_dim, 128))
    size = tall * wide * case.bits // 8 + 2 * (2 * tall + wide)
    inner = getattr(kept, "kvarn", None) or getattr(getattr(kept, "inner", None), "kvarn", None)
    assert isinstance(inner, KVarN)
    records = inner.encode(rows[None])
    found.append(of_count(records.shape[-1], size, "bytes of a record"))
    limit = float(contract()["KN-01"].figures[f"rmse_{case.bits}"].value)
    error = float(np.sqrt(np.mean((kept.round_trip(rows) - rows) ** 2)) / rows.std())
    found.append(
        of_amount(error / limit - 1, f"error of {case.bits} bits above its limit", "share", f"{limit}", f"{error:.4f}")
    )
    return worst(found)


@verifies("KN-02", case=SameBits)
def test_kvarn_diverges_less_than_the_standard_type_of_as_many_bits(bench: Bench, case: SameBits) -> Deviation:
    text = bench.real_text(case.chunk, case.context_tokens)
    standard, kvarn = (
        bench.divergence(Arm(choice), text, case.ubatch).kld
        for choice in (CacheChoice.of(f"q{case.bits}_0", as_kvarn=True), CacheChoice.of(f"kvarn{case.bits}"))
    )
    return of_rise(standard, kvarn, f"kvarn{case.bits} against q{case.bits}_0 with the same rows exact")


@verifies("KN-03", case=Kept)
def test_the_sink_and_the_filling_group_stay_exact(bench: Bench, case: Kept) -> Deviation:
    (text,) = bench.texts(case.text_seed, case.tokens)
    layer = first_attention_layer(bench)
    sink, group = (int(contract()["KN-03"].figures[name].value) for name in ("sink_rows", "group_rows"))
    found = []
    with bench.context(settings_for(case.tokens, case.ubatch)) as context:
        try:
            tailed = bench.reference.tailed(context, bench.census, CacheChoice.of(case.body))
        except CodecError as error:
            raise NotDecidable(str(error)) from None
        tailed.decode(text, outputs="none")
        positions, rows = bench.rows(context, layer, "k")
    exact = exact_rows(bench, layer, text, case.ubatch)["k"][positions]
    differs = (rows.view(np.uint16) != exact.view(np.uint16)).any(axis=1)
    recorded = (positions >= sink) & (positions < (case.tokens - group) // group * group - case.ubatch)
    found.append(
        of_rows(
            differs & ((positions < sink) | (positions >= case.tokens - group)),
            "rows of sink or stage that are not exact",
        )
    )
    found.append(of_rows(~differs & recorded, "rows that should be in records and are exact"))
    return worst(found)
