"""The parser reads what an independent writer wrote, refuses everything else in one way, and copies nothing."""

from __future__ import annotations

import pickle
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.harness.state import BlobError, SequenceState, census, parse, split_file
from conformance.selftests.blob_writer import FORMATS, Attention, Described, Recurrent, Tensor, described, hybrid_40


def assert_reads_as(state: SequenceState, wanted: Described) -> None:
    shows_cells = any(len(cache.positions) for cache in wanted.attention)
    assert wanted.format.name in state.layout.formats
    assert state.layout.cell_ext == (wanted.n_ext if shows_cells else None)
    assert state.layout.rotation == (wanted.format.rotation if shows_cells else None)
    assert state.source == (wanted.source if wanted.format.head else None)
    assert len(state.attention) == len(wanted.attention)
    for cache, attention in zip(state.attention, wanted.attention, strict=True):
        np.testing.assert_array_equal(cache.cells.positions, attention.positions)
        assert cache.n_stream == attention.n_stream
        if len(attention.positions) == 0:
            assert (cache.stream, cache.layers) == (None, ())
            continue
        assert cache.stream == attention.stream
        assert cache.rotation == (attention.rotation if wanted.format.rotation else None)
        for index, values in enumerate((cache.cells.x, cache.cells.y, cache.cells.token)):
            assert (values is None) == (index >= wanted.n_ext)
            if values is not None:
                np.testing.assert_array_equal(values, attention.ext[:, index])
        assert len(cache.layers) == len(attention.k)
        for number, layer in enumerate(cache.layers):
            assert layer.k.type == attention.k[number].type
            np.testing.assert_array_equal(layer.k.bytes, attention.k[number].rows)
            assert (layer.v is None) == (attention.v is None)
            if layer.v is not None and attention.v is not None:
                assert (layer.v.type, layer.v.transposed) == (attention.v[number].type, attention.v_transposed)
                rows = layer.v.units.reshape(layer.v.n_cells, layer.v.row_size)
                np.testing.assert_array_equal(rows, attention.v[number].rows)
    assert (state.recurrent is None) == (wanted.recurrent is None)
    if state.recurrent and wanted.recurrent:
        np.testing.assert_array_equal(state.recurrent.cells.positions, wanted.recurrent.positions)
        assert state.recurrent.n_model_layer == wanted.recurrent.n_model_layer
        assert len(state.recurrent.layers) == len(wanted.recurrent.r)
        for number, memory in enumerate(state.recurrent.layers):
            np.testing.assert_array_equal(memory.r.bytes, wanted.recurrent.r[number].rows)
            np.testing.assert_array_equal(memory.s.bytes, wanted.recurrent.s[number].rows)


def read_or_refused(
    blob: bytes, attention_layers: int | None = None, recurrent_layers: int | None = None
) -> SequenceState | None:
    """The state, which accounts for every byte, or None when the blob is refused at a place within it."""
    try:
        state = parse(blob, attention_layers=attention_layers, recurrent_layers=recurrent_layers)
    except BlobError as refused:
        where = refused.where
    else:
        assert census(state).n_bytes == len(blob)
        return state
    assert 0 <= where <= len(blob)
    return None


@given(wanted=described())
def test_every_format_and_kind_is_read_as_it_was_written(wanted: Described) -> None:
    assert_reads_as(parse(wanted.write()), wanted)


@given(wanted=described())
def test_the_census_adds_up_to_the_blob(wanted: Described) -> None:
    blob = wanted.write()
    counted = census(parse(blob))
    assert counted.n_bytes == len(blob)
    stored = [cache for cache in wanted.attention if len(cache.positions)]
    rows = [tensor.rows for cache in stored for tensor in (*cache.k, *(cache.v or ()))]
    assert counted.kv_bytes_per_token == sum(tensor.shape[1] for tensor in rows)
    assert counted.k_bytes + counted.v_bytes == sum(tensor.size for tensor in rows)
    memory = wanted.recurrent
    assert counted.r_bytes == sum(tensor.rows.size for tensor in memory.r) if memory else counted.r_bytes == 0
    assert counted.s_bytes == sum(tensor.rows.size for tensor in memory.s) if memory else counted.s_bytes == 0


@settings(deadline=None, max_examples=25)
@given(wanted=described())
def test_a_truncated_blob_of_known_layers_is_refused_unless_a_shorter_state_has_as_many(wanted: Described) -> None:
    blob = wanted.write()
    n_attention = sum(len(cache.k) for cache in wanted.attention if len(cache.positions))
    n_recurrent = len(wanted.recurrent.r) if wanted.recurrent else 0
    for end in range(len(blob)):
        state = read_or_refused(blob[:end], n_attention, n_recurrent)
        if state:
            assert end in wanted.readable_prefixes, f"{end} of {len(blob)} bytes read as {state.outline}"


def test_a_truncated_blob_reads_as_a_state_only_where_it_is_a_complete_shorter_one() -> None:
    wanted = hybrid_40(np.random.default_rng(9), n_cells=2)
    blob = wanted.write()
    readable = [end for end in range(len(blob) + 1) if read_or_refused(blob[:end])]
    assert readable == wanted.readable_prefixes


def test_the_expected_number_of_layers_refuses_the_truncations_that_are_complete_states() -> None:
    wanted = hybrid_40(np.random.default_rng(0))
    blob = wanted.write()
    keys_alone, attention_alone, *less_recurrent, whole = wanted.readable_prefixes
    assert whole == len(blob)
    assert "without V" in parse(blob[:keys_alone]).outline
    assert parse(blob[:attention_alone]).recurrent is None
    assert [parse(blob[:end]).outline[-20:] for end in less_recurrent][-1] == "(1 cells, 15 layers)"
    for end in (keys_alone, attention_alone, *less_recurrent):
        with pytest.raises(BlobError, match="not the expected number of layers"):
            parse(blob[:end], attention_layers=10, recurrent_layers=30)
    assert parse(blob, attention_layers=10, recurrent_layers=30).n_bytes == whole


@given(wanted=described(), data=st.data())
def test_mutated_blobs_raise_nothing_but_blob_errors(wanted: Described, data: st.DataObject) -> None:
    blob = bytearray(wanted.write())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(blob) - 1, 0)))
        match data.draw(st.sampled_from(["byte", "word", "insert", "delete"])):
            case "byte":
                blob[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
            case "word":
                word = data.draw(st.sampled_from([0, 1, 2, 255, 2**31 - 1, 2**31, 2**32 - 1]))
                blob[at // 4 * 4 : at // 4 * 4 + 4] = word.to_bytes(4, "little")
            case "insert":
                blob[at:at] = bytes(data.draw(st.integers(1, 8)))
            case "delete":
                del blob[at : at + data.draw(st.integers(1, 8))]
    read_or_refused(bytes(blob))


@given(blob=st.binary(max_size=200), head=st.booleans())
def test_arbitrary_bytes_raise_nothing_but_blob_errors(blob: bytes, head: bool) -> None:
    read_or_refused((0xAF143CD8).to_bytes(4, "little") + blob if head else blob)


@pytest.mark.parametrize("field", range(0, 84, 4))
def test_absurd_counts_allocate_nothing(field: int) -> None:
    wanted = replace(hybrid_40(np.random.default_rng(1)), format=FORMATS[4])
    blob = bytearray(wanted.write())
    blob[8 + field : 12 + field] = b"\xfe\xff\xff\x7f"
    tracemalloc.start()
    read_or_refused(bytes(blob))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_views_lie_in_the_given_buffer_and_are_writable_when_it_is() -> None:
    blob = np.frombuffer(bytearray(hybrid_40(np.random.default_rng(3)).write()), np.uint8)
    state = parse(blob)
    cache, memory = state.attention[0], state.recurrent
    assert memory is not None
    views = [cache.cells.positions, cache.cells.x, cache.layers[9].k.bytes, memory.layers[29].s.values()]
    assert all(view is not None and np.shares_memory(view, blob) for view in views)
    memory.layers[29].s.values()[0, -1] = 0.5
    assert blob[-4:].view("<f4")[0] == 0.5
    fixed = parse(blob.tobytes()).attention[0].layers[0].k.bytes
    assert not fixed.flags.writeable


def test_transposed_v_shows_its_values_by_cell_without_a_copy() -> None:
    rng = np.random.default_rng(4)
    values = rng.standard_normal((3, 32)).astype("<f2")
    cache = Attention(
        positions=np.arange(3, dtype=np.int32),
        ext=np.zeros((3, 3), np.int32),
        k=(Tensor.random(rng, "f16", 3, 32),),
        v=(Tensor("f16", values.view(np.uint8)),),
        v_transposed=True,
    )
    blob = np.frombuffer(bytearray(Described(FORMATS[0], False, 0, (cache,), None).write()), np.uint8)
    v = parse(blob).attention[0].layers[0].v
    assert v is not None
    assert v.bytes.shape == (32, 3, 2)
    np.testing.assert_array_equal(v.values(), values)
    assert np.shares_memory(v.values(), blob)
    with pytest.raises(TypeError, match="q8_0 rows have no numpy view"):
        replace(v, type="q8_0").values()


@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8))
def test_bfloat16_rows_read_as_the_floats_whose_upper_halves_they_are(values: list[float]) -> None:
    bits = np.array(values, "<f4").view(np.uint32) & 0xFFFF0000
    halves = (bits >> 16).astype("<u2").view(np.uint8).reshape(1, -1)
    cache = Attention(np.zeros(1, np.int32), np.zeros((1, 3), np.int32), (Tensor("bf16", halves),), None)
    k = parse(Described(FORMATS[3], False, 0, (cache,), None).write()).attention[0].layers[0].k
    np.testing.assert_array_equal(k.floats()[0], bits.view("<f4").astype(np.float64))


def test_a_head_is_demanded_or_forbidden_when_told() -> None:
    wanted = hybrid_40(np.random.default_rng(5))
    with_head = wanted.write()
    parse(with_head, head=True)
    assert parse(with_head[8:], head=False).layout.formats == ("F4",)
    with pytest.raises(BlobError, match="a head stands where none is expected"):
        parse(with_head, head=False)
    with pytest.raises(BlobError, match="the magic of a head is missing"):
        parse(with_head[8:], head=True)


def test_two_exact_readings_are_both_named_and_an_expected_count_decides() -> None:
    # An empty attention cache and three empty layers of r = 12 bytes, s = 0 bytes; or one cell at position 0, whose r
    # rows, as long as a row head, look like the heads of the next layers.
    rng, none = np.random.default_rng(12), np.empty(0, np.int32)
    r, s = (tuple(Tensor.random(rng, "f32", 0, n) for _ in range(3)) for n in (3, 0))
    empty = Attention(none, np.empty((0, 3), np.int32), (), None)
    blob = Described(FORMATS[2], False, 0, (empty,), Recurrent(none, 4, r, s)).write()
    with pytest.raises(BlobError) as refused:
        parse(blob)
    assert "attention (0 cells, 0 layers) + recurrent (0 cells, 3 layers)" in str(refused.value)
    assert "and as recurrent (1 cells, 2 layers)" in str(refused.value)
    assert len(parse(blob, recurrent_layers=3).attention) == 1
    assert len(parse(blob, recurrent_layers=2).attention) == 0


def test_a_second_occupied_stream_is_named() -> None:
    tensor = Tensor.random(np.random.default_rng(6), "f16", 1, 32)
    cache = Attention(np.zeros(1, np.int32), np.zeros((1, 3), np.int32), (tensor,), (tensor,), n_stream=2)
    blob = bytearray(Described(FORMATS[2], False, 0, (cache,), None).write())
    blob[-4:] = (1).to_bytes(4, "little")
    with pytest.raises(BlobError, match=f"byte {len(blob) - 4}: cells in a second stream"):
        parse(blob)


@pytest.mark.parametrize(
    ("mutation", "message"),
    [
        ({88: 77}, "byte 88: no V order and layer count: 77, 10"),
        ({96: 99}, "byte 96: K of layer 0: 99 is no ggml type"),
        ({100: 69}, "byte 100: K of layer 0: 69 bytes are no row of q8_0"),
        ({104: 1}, "byte 100: K of layer 0: 4294967364 bytes are no row of q8_0"),
    ],
)
def test_the_error_names_the_first_place_that_no_reading_gets_past(mutation: dict[int, int], message: str) -> None:
    wanted = replace(hybrid_40(np.random.default_rng(7)), mrope=True)
    blob = bytearray(wanted.write())
    for at, value in mutation.items():
        blob[at : at + 4] = value.to_bytes(4, "little")
    with pytest.raises(BlobError) as refused:
        parse(blob)
    assert message in str(refused.value)


def test_recurrent_state_is_refused_in_an_order_or_type_that_no_build_writes() -> None:
    rng = np.random.default_rng(10)
    f32, q8_0 = Tensor.random(rng, "f32", 1, 32), Tensor.random(rng, "q8_0", 1, 32)
    memory = Recurrent(np.array([7], np.int32), 1, (f32,), (f32,))
    blob = bytearray(Described(FORMATS[2], False, 0, (), memory).write())
    parse(blob)
    blob[20] = 1
    quantized = Described(FORMATS[2], False, 0, (), replace(memory, s=(q8_0,))).write()
    assert not read_or_refused(bytes(blob))
    assert not read_or_refused(quantized)


def test_the_caches_of_one_context_have_equally_many_streams() -> None:
    tensor = Tensor.random(np.random.default_rng(11), "f16", 1, 32)
    base = Attention(np.ones(1, np.int32), np.zeros((1, 3), np.int32), (tensor,), (tensor,), n_stream=2)
    assert len(parse(Described(FORMATS[2], False, 0, (base, base), None).write()).attention) == 2
    unequal = Described(FORMATS[2], False, 0, (base, replace(base, n_stream=3)), None)
    assert not read_or_refused(unequal.write())


def test_an_empty_cache_behind_one_without_v_does_not_pass_for_its_v() -> None:
    # Its stream count of 2 and two counts of 0 are, byte for byte, the head of empty q4_0 rows.
    tensor = Tensor.random(np.random.default_rng(13), "f16", 1, 32)
    base = Attention(np.ones(1, np.int32), np.zeros((1, 3), np.int32), (tensor,), None, n_stream=2, stream=1)
    empty = replace(base, positions=np.empty(0, np.int32), ext=np.empty((0, 3), np.int32), k=())
    wanted = Described(FORMATS[2], False, 0, (base, empty), None)
    assert_reads_as(parse(wanted.write()), wanted)


def test_a_sequence_file_is_taken_apart() -> None:
    blob = hybrid_40(np.random.default_rng(8)).write()[8:]
    tokens = np.array([5, 6, 7], "<i4")
    content = b"qsgg" + (3).to_bytes(4, "little") + (3).to_bytes(4, "little") + tokens.tobytes() + blob
    file = split_file(content)
    assert file.version == 3
    np.testing.assert_array_equal(file.tokens, tokens)
    assert file.blob.tobytes() == blob
    for end in range(24):
        with pytest.raises(BlobError):
            split_file(content[:end])


def test_what_is_wrong_with_a_blob_travels_between_processes() -> None:
    error = BlobError(12, "too short")
    travelled = pickle.loads(pickle.dumps(error))
    assert (type(travelled), travelled.where, str(travelled)) == (BlobError, 12, str(error))
