"""More bits, less divergence, and the reference beside the build's own cache types: specs/kv_ladder.yaml."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from conformance.harness.bench import Bench, Case
from conformance.harness.engine import CacheSide
from conformance.harness.exam import verifies
from conformance.harness.measure.deviation import Deviation, of_amount, worst
from conformance.harness.measure.kld import median_change
from conformance.harness.precision.body import body
from conformance.harness.precision.codecs import codec
from conformance.harness.precision.emulation import EXACT, CacheChoice, settings_for
from conformance.harness.precision.rotation import rotate
from conformance.harness.precision.scoring import Arm
from conformance.harness.state import part
from conformance.test_precision_tail import SIDES, Sides, exact_rows, first_attention_layer, of_rise

FINER = {"q2_0": "q3_0", "q3_0": "q4_0", "q4_0": "q5_0", "q5_0": "q6_0", "q6_0": "q8_0"}
NEXT_STANDARD = {"kvarn4": "q5_0", "kvarn5": "q6_0", "kvarn6": "q8_0"}


class Step(Case):
    """A piece of real text under a body and the next finer one, at a tail."""

    chunk: int
    context_tokens: int
    ubatch: int
    coarser: str
    tail: int


class Native(Case):
    """A random text in the build's own cache type."""

    text_seed: int
    tokens: int
    ubatch: int
    cache_type: str


class Beside(Case):
    """A piece of real text under the build's own cache type and under the emulated one, token by token."""

    chunk: int
    context_tokens: int
    cache_type: str


class Apart(Case):
    """A piece of real text with only K, and only V, in a type, and with either of them one type finer."""

    chunk: int
    context_tokens: int
    ubatch: int
    body: str


class AboveStandard(Case):
    """A piece of real text under a KVarN type and under the standard type a bit above it, the same rows exact."""

    chunk: int
    context_tokens: int
    ubatch: int
    body: str


@verifies("KL-01", case=Step)
def test_more_bits_do_not_raise_the_median_divergence(bench: Bench, case: Step) -> Deviation:
    text = bench.real_text(case.chunk, case.context_tokens)
    coarse, fine = (
        bench.divergence(Arm(CacheChoice.of(name, case.tail)), text, case.ubatch).kld
        for name in (case.coarser, FINER[case.coarser])
    )
    return of_rise(coarse, fine, f"{FINER[case.coarser]} against {case.coarser} at a tail of {case.tail}")


@verifies("KL-02", case=Native)
def test_the_emulated_body_has_the_blocks_of_the_builds_own_cache_type(bench: Bench, case: Native) -> Deviation:
    (text,) = bench.texts(case.text_seed, case.tokens)
    layer = first_attention_layer(bench)
    kind = codec(case.cache_type)
    settings = settings_for(case.tokens, case.ubatch)
    found = []
    with (
        bench.context(settings.changed(reach_cache=False, type_k="f32", type_v="f32")) as plain,
        bench.context(settings.changed(reach_cache=False, type_k=kind.name, type_v=kind.name)) as native,
    ):
        plain.decode(text, outputs="none")
        native.decode(text, outputs="none")
        exact, kept = bench.state(plain.save()), bench.state(native.save())
    for side in SIDES:
        found.append(_blocks(bench, kind.name, layer, side, exact, kept))
    return worst(found)


def _blocks(bench: Bench, kind: str, layer: int, side: CacheSide, exact: object, kept: object) -> Deviation:
    """Share of a layer's blocks that are not those of the exact rows, encoded as the reference's body does."""
    rows = part(exact, layer, side, layers=bench.layers).floats().astype(np.float32)  # type: ignore[arg-type]
    seen = part(kept, layer, side, layers=bench.layers)  # type: ignore[arg-type]
    shape = next(each for each in bench.census.attention or () if each.index == layer)
    what = f"blocks of {side.upper()} in layer {layer} that differ from the reference's {kind}"
    if seen.type != kind:
        return Deviation(1.0, what, what, kind, seen.type)
    chosen = bench.reference.body(kind, shape.key_dim if side == "k" else shape.value_dim, side)
    width = getattr(chosen, "width", None)
    expected = codec(kind).encode(rotate(rows, width) if width else rows)
    differs = (expected.reshape(seen.units.shape) != seen.units).any(axis=-1)
    share = float(differs.mean())
    return Deviation(share, what, what if share else "", "0 blocks", f"{int(differs.sum())} of {differs.size}")


@verifies("KL-03", case=Apart)
def test_errors_of_k_and_of_v_are_measured_apart_and_asymmetric_pairs_are_reported(
    bench: Bench, case: Apart
) -> Deviation:
    text = bench.real_text(case.chunk, case.context_tokens)
    coarse, fine = case.body, FINER[case.body]
    exact = exact_rows(bench, first_attention_layer(bench), text, case.ubatch)
    wrong = sum(
        _rows_beside_their_type(bench, case, text, exact, choice)
        for choice in (CacheChoice(coarse, EXACT), CacheChoice(EXACT, coarse))
    )
    arms = CacheChoice(coarse, EXACT), CacheChoice(EXACT, coarse), CacheChoice(coarse, fine), CacheChoice(fine, coarse)
    key, value, v_above, k_above = (bench.divergence(Arm(choice), text, case.ubatch).kld for choice in arms)
    change = median_change(v_above, k_above, seed=1)
    return Deviation(
        float(wrong),
        "rows of a side that are not those of its type, rows",
        "a side that was to stay exact, or one that was to be quantized" if wrong else "",
        "0 rows",
        f"{wrong} rows; median KLD of K alone in {coarse} {np.median(key):.6f}, V alone {np.median(value):.6f}; "
        f"K {fine} over V {coarse} {np.median(k_above):.6f}, the reverse {np.median(v_above):.6f}, "
        f"difference {change.change:+.6f} [{change.low:+.6f}, {change.high:+.6f}]",
    )


def _rows_beside_their_type(
    bench: Bench, case: Apart, text: NDArray[np.int32], exact: Sides, choice: CacheChoice
) -> int:
    """Rows of the first attention layer, K and V, that are not what the side's type makes of the exact ones."""
    layer = first_attention_layer(bench)
    shape = next(each for each in bench.census.attention or () if each.index == layer)
    before_last_step = (len(text) - 1) // case.ubatch * case.ubatch
    wrong = 0
    with bench.context(settings_for(len(text), case.ubatch)) as context:
        bench.reference.tailed(context, bench.census, choice).decode(text, outputs="none")
        seen = {side: bench.rows(context, layer, side) for side in SIDES}
    of_side = {"k": (choice.key, shape.key_dim), "v": (choice.value, shape.value_dim)}
    for side in SIDES:
        name, head_dim = of_side[side]
        expected = exact[side].copy()
        if name != EXACT:
            older = expected[:before_last_step].astype(np.float32)
            expected[:before_last_step] = body(name, head_dim, side).round_trip(older)
        positions, rows = seen[side]
        wrong += int((rows.view(np.uint16) != expected[positions].view(np.uint16)).any(axis=1).sum())
    return wrong


@verifies("KL-04", case=AboveStandard)
def test_kvarn_keeps_up_with_the_standard_type_a_bit_above_it(bench: Bench, case: AboveStandard) -> Deviation:
    text = bench.real_text(case.chunk, case.context_tokens)
    standard = NEXT_STANDARD[case.body]
    mine, theirs = (
        float(np.median(bench.divergence(Arm(choice), text, case.ubatch).kld))
        for choice in (CacheChoice.of(case.body), CacheChoice.of(standard, as_kvarn=True))
    )
    return of_amount(
        mine - theirs, f"median KLD of {case.body} above {standard}", "nats", f"{theirs:.6f}", f"{mine:.6f}"
    )


@verifies("KL-05", case=Beside)
def test_token_by_token_the_emulated_body_diverges_as_the_builds_own_type(bench: Bench, case: Beside) -> Deviation:
    text = bench.real_text(case.chunk, case.context_tokens)
    native, emulated = (
        float(np.median(bench.divergence(arm, text, 1).kld))
        for arm in (Arm.native_of(case.cache_type), Arm(CacheChoice.of(case.cache_type)))
    )
    off = abs(float(np.log2(emulated / native))) if native > 0 and emulated > 0 else float("nan")
    return of_amount(
        off, f"median KLD of emulated against native {case.cache_type}", "octaves", f"{native:.6f}", f"{emulated:.6f}"
    )
