from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness.measure.interval import exactly, printed
from conformance.harness.precision.codecs import CODECS, CodecError
from conformance.harness.precision.document import cache_mib, load_document
from conformance.harness.precision.kvarn import BITS, KVarN
from conformance.harness.precision.memory import (
    MIB,
    AttentionLayers,
    Footprint,
    RecurrentLayers,
    Run,
    bytes_per_token,
    footprint,
    ring_rows,
    tail_rows,
)

DOCUMENT = load_document()
CACHE_SIZES = {
    name: figure for name, figure in DOCUMENT.printed.items() if name.split("/")[1] == "kv_mib" and figure is not None
}
HOLO3 = AttentionLayers(count=10, kv_heads=2, k_head_dim=256, v_head_dim=256)
SLIDING = AttentionLayers(count=50, kv_heads=16, k_head_dim=256, v_head_dim=256, window=1024)


@pytest.mark.parametrize("name", CACHE_SIZES)
def test_the_memory_model_gives_every_cache_size_to_the_printed_digit(name: str) -> None:
    model, _, kind, tail = name.split("/")
    assert exactly(cache_mib(DOCUMENT, model, kind, int(tail))).overlaps(printed(CACHE_SIZES[name]))


def test_the_document_has_all_cache_sizes_of_both_models() -> None:
    assert len(CACHE_SIZES) == 58


def test_bits_per_value_are_the_documents() -> None:
    ours = {name: each.bits_per_value for name, each in CODECS.items() if name != "f32"}
    ours |= {f"kvarn{bits}": KVarN(bits, 128, side).bits_per_value for bits in BITS for side in ("k", "v")}
    assert ours == DOCUMENT.bits_per_value


def test_holo3_costs_20_kib_a_token_and_5_gib_at_full_context_and_62_8125_mib_of_state() -> None:
    assert bytes_per_token(HOLO3, "f16", "f16") == 20 * 1024
    assert footprint([HOLO3], Run(rows=262144), "f16") == Footprint(body=5 * 1024 * MIB)
    state = RecurrentLayers(count=30, conv_kernel=4, inner_size=4096, groups=16, state_size=128)
    assert Fraction(state.bytes_per_sequence, MIB) == Fraction("62.8125")


def test_a_ring_holds_the_window_and_a_ubatch_and_no_more_than_the_context() -> None:
    assert ring_rows(1024, Run(rows=16640, ubatch=512)) == 1536
    assert ring_rows(1024, Run(rows=16640, ubatch=100)) == 1280
    assert ring_rows(1024, Run(rows=16640, ubatch=512, sequences=2)) == 2560
    assert ring_rows(1024, Run(rows=768, ubatch=512)) == 768


def test_tail_rows_are_padded_for_each_sequence() -> None:
    assert tail_rows(0, Run(rows=4096)) == 0
    assert tail_rows(1, Run(rows=4096, ubatch=512)) == 768
    assert tail_rows(1024, Run(rows=4096, ubatch=512)) == 1536
    assert tail_rows(1024, Run(rows=4096, ubatch=512, sequences=3)) == 3 * 1536 + 512


@pytest.mark.parametrize("kind", ["q4_0", "kvarn4"])
def test_a_tail_over_the_window_turns_the_ring_into_a_plain_one(kind: str) -> None:
    plain = 1536 * bytes_per_token(SLIDING, "f16", "f16")
    for tail in (1024, 2048, 9999):
        assert footprint([SLIDING], Run(rows=16640, tail=tail), kind) == Footprint(tail=plain)
    assert footprint([SLIDING], Run(rows=16640, tail=896), kind).body > 0


@given(
    rows=st.integers(1, 100).map(lambda n: 256 * n),
    kv_heads=st.integers(1, 8),
    dims=st.tuples(*[st.sampled_from([64, 128, 256, 512])] * 2),
    kinds=st.tuples(*[st.sampled_from([*CODECS, *(f"kvarn{bits}" for bits in BITS)])] * 2),
    tail=st.integers(0, 3000),
)
def test_sides_and_layers_add_up(
    rows: int, kv_heads: int, dims: tuple[int, int], kinds: tuple[str, str], tail: int
) -> None:
    run = Run(rows, tail=tail)
    k_dim, v_dim = dims
    key, value = kinds
    both = footprint([AttentionLayers(3, kv_heads, k_dim, v_dim)], run, key, value)
    k_alone = footprint([AttentionLayers(3, kv_heads, k_dim, 0)], run, key, "f16")
    v_alone = footprint([AttentionLayers(3, kv_heads, 0, v_dim)], run, "f16", value)
    assert both == k_alone + v_alone
    assert both == sum((footprint([AttentionLayers(1, kv_heads, k_dim, v_dim)], run, key, value),) * 3, Footprint())


def test_a_geometry_that_a_type_cannot_take_is_refused() -> None:
    with pytest.raises(CodecError, match="q8_0: a row of 80 values"):
        bytes_per_token(AttentionLayers(2, 1, 80, 80), "q8_0", "f16")
    with pytest.raises(CodecError, match="kvarn2 cannot take a head dimension of 80"):
        footprint([AttentionLayers(2, 4, 80, 80)], Run(256), "kvarn2")
