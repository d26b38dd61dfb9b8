"""What the state of a sequence consists of: specs/architecture.yaml."""

from __future__ import annotations

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from conformance.harness.bench import Bench, Case
from conformance.harness.engine import ContextSettings
from conformance.harness.exam import Undecided, verifies
from conformance.harness.measure.deviation import Deviation, of_count, worst
from conformance.harness.state import census


class Text(Case):
    """A text of so many tokens."""

    text_seed: int
    tokens: int


class LongerText(Text):
    """A text, and the same with more behind it."""

    more_tokens: int


class CachedText(Text):
    """A text in a cache of some type."""

    cache_type: str


@verifies("AR-01", case=Text)
def test_the_state_of_a_sequence_holds_every_layer(bench: Bench, case: Text) -> Deviation:
    declared = bench.census
    if declared.attention is None or declared.recurrent is None:
        raise Undecided(f"the layers of architecture {declared.arch!r} are not known here; add a rule to census.py")
    with bench.context(ContextSettings()) as context:
        context.decode(*bench.texts(case.text_seed, case.tokens))
        state = bench.state(context.save())
    attention = sorted(
        (layer.k.row_size, layer.v.row_size if layer.v else 0) for cache in state.attention for layer in cache.layers
    )
    recurrent = [(layer.r.row_size, layer.s.row_size) for layer in (state.recurrent.layers if state.recurrent else ())]
    bytes_f16, bytes_f32 = 2, 4
    return worst(
        [
            of_count(len(attention), len(declared.attention), "attention layers", "layers"),
            of_count(len(recurrent), len(declared.recurrent), "recurrent layers", "layers"),
            of_count(
                _matching(
                    attention,
                    sorted(
                        (bytes_f16 * a.n_head_kv * a.key_dim, bytes_f16 * a.n_head_kv * a.value_dim)
                        for a in declared.attention
                    ),
                ),
                len(declared.attention),
                "attention layers with rows of the declared size",
                "layers",
            ),
            of_count(
                _matching(recurrent, [(bytes_f32 * r.r_values, bytes_f32 * r.s_values) for r in declared.recurrent]),
                len(declared.recurrent),
                "recurrent layers with r and s of the declared size",
                "layers",
            ),
        ]
    )


def _matching(seen: list[tuple[int, int]], declared: list[tuple[int, int]]) -> int:
    return sum(a == b for a, b in zip(seen, declared, strict=False))


@verifies("AR-02", case=LongerText)
def test_recurrent_state_has_the_same_size_at_every_context_length(bench: Bench, case: LongerText) -> Deviation:
    text, more = bench.texts(case.text_seed, case.tokens, case.more_tokens)
    with bench.context(ContextSettings(n_ctx=2048)) as context:
        sizes = []
        for piece in (text, more):
            context.decode(piece)
            counted = census(bench.state(context.save()))
            sizes.append(counted.r_bytes + counted.s_bytes)
    return of_count(sizes[1], sizes[0], "recurrent state")


@verifies("AR-03", case=CachedText)
def test_attention_state_grows_by_an_exact_number_of_bytes_with_every_token(
    bench: Bench, case: CachedText
) -> Deviation:
    declared = bench.census
    if declared.attention is None:
        raise Undecided(f"the layers of architecture {declared.arch!r} are not known here; add a rule to census.py")
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[case.cache_type.upper()]]
    settings = ContextSettings(
        flash_attn="on" if block > 1 else "off",  # a quantized V needs it
        type_k=case.cache_type,
        type_v=case.cache_type,
    )
    with bench.context(settings) as context:
        context.decode(*bench.texts(case.text_seed, case.tokens))
        state = bench.state(context.save())
    base, *sliding = [len(cache.cells) for cache in state.attention]
    deviations = [of_count(base, case.tokens, "cells of the whole context", "cells")]
    for cells in sliding:
        held = min(max(cells, min(case.tokens, declared.sliding_window or 0)), case.tokens)
        deviations.append(of_count(cells, held, "cells of the sliding window", "cells"))
    values = sum(
        (sliding[0] if layer.sliding and sliding else base) * layer.n_head_kv * (layer.key_dim + layer.value_dim)
        for layer in declared.attention
    )
    counted = census(state)
    kv_bytes = f"K and V in {case.cache_type}"
    return worst([*deviations, of_count(counted.k_bytes + counted.v_bytes, values * block_bytes // block, kv_bytes)])
