"""A comparison finds exactly the byte that differs, names its place, and orders layers as the model does."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from conformance.harness.state import (
    LayerMap,
    SequenceState,
    compare,
    first_difference,
    lengthened,
    parse,
    part,
    splice,
)
from conformance.harness.state.sequence import PartName
from conformance.selftests.blob_writer import Described, Tensor, described, hybrid_40

HYBRID_LAYERS = LayerMap((tuple(range(3, 40, 4)),), tuple(il for il in range(40) if il % 4 != 3))


def editable(blob: bytes) -> SequenceState:
    return parse(np.frombuffer(bytearray(blob), np.uint8))


def hybrid(seed: int = 0, n_cells: int = 3) -> SequenceState:
    return editable(hybrid_40(np.random.default_rng(seed), n_cells).write())


@given(wanted=described())
def test_a_state_equals_itself_in_every_layer(wanted: Described) -> None:
    blob = wanted.write()
    rows = compare(parse(blob), parse(blob))
    assert all(row.equal for row in rows)
    assert first_difference(rows) is None
    stored = sum(len(cache.k) for cache in wanted.attention if len(cache.positions))
    assert len(rows) == stored + (len(wanted.recurrent.r) if wanted.recurrent else 0)


@given(wanted=described(), data=st.data())
def test_one_flipped_bit_is_found_in_its_layer_part_and_cell(wanted: Described, data: st.DataObject) -> None:
    a, b = editable(wanted.write()), editable(wanted.write())
    places: list[tuple[PartName, int, int]] = []
    for cache, stored in enumerate(b.attention):
        for layer, attention in enumerate(stored.layers):
            places.append(("k", cache, layer))
            if attention.v:
                places.append(("v", cache, layer))
    if b.recurrent and len(b.recurrent.cells):
        for layer, memory in enumerate(b.recurrent.layers):
            if memory.r.row_size:
                places.append(("r", 0, layer))
            if memory.s.row_size:
                places.append(("s", 0, layer))
    assume(places)
    name, cache, layer = data.draw(st.sampled_from(places))
    rows = part(b, layer, name, cache=cache)
    cell, unit, byte = (data.draw(st.integers(0, n - 1)) for n in rows.units.shape)
    rows.units[cell, unit, byte] ^= 1 << data.draw(st.integers(0, 7))

    (unequal,) = [row for row in compare(a, b) if not row.equal]
    kind = "attention" if name in "kv" else "recurrent"
    assert (unequal.kind, unequal.cache, unequal.layer) == (kind, cache, layer)
    assert unequal.first is not None
    assert (unequal.first.part, unequal.first.cell) == (name, cell)
    is_value = unequal.first.unit == "value"
    assert unequal.first.index == (unit if is_value else unit * rows.unit_size + byte)
    cells = b.attention[cache].cells if name in "kv" else b.recurrent and b.recurrent.cells
    assert cells
    assert unequal.first.position == cells.positions[cell]
    assert unequal.first.a != unequal.first.b
    others = [deviation.value for other, deviation in unequal.deviations.items() if other != name]
    assert others == [0.0] * len(others)
    if not is_value:
        assert unequal.deviations[name].measure == "fraction of differing bytes"
        assert unequal.deviations[name].value == pytest.approx(1 / rows.units.size)
    json.dumps(unequal.to_dict(), allow_nan=False)


def test_a_forty_layer_hybrid_gives_forty_rows_in_model_order() -> None:
    a, b = hybrid(), hybrid()
    rows = compare(a, b, layers=HYBRID_LAYERS)
    assert [row.layer for row in rows] == list(range(40))
    assert [row.layer for row in rows if row.kind == "attention"] == list(range(3, 40, 4))

    part(a, 17, "s", layers=HYBRID_LAYERS).values()[0, 21] = 0.125
    part(b, 17, "s", layers=HYBRID_LAYERS).values()[0, 21] = 0.0
    rows = compare(a, b, layers=HYBRID_LAYERS)
    assert [row.layer for row in rows if not row.equal] == [17]
    assert first_difference(rows) == "layer 17 (recurrent), s, cell 0 (position 2), value 21: 0.125 against 0.0"
    values = part(a, 17, "s", layers=HYBRID_LAYERS).floats()
    expected = 0.125**2 / np.square(values).sum()
    assert rows[17].deviations["s"].value == pytest.approx(expected)
    assert rows[17].to_dict()["s"] == rows[17].to_dict()["deviation"] == rows[17].deviations["s"].value
    assert rows[17].to_dict()["r"] == 0.0


def test_layers_without_a_map_are_numbered_within_their_cache() -> None:
    rows = compare(hybrid(), hybrid())
    assert [(row.kind, row.layer) for row in rows[9:11]] == [("attention", 9), ("recurrent", 0)]


def test_a_partial_state_takes_the_last_caches_of_the_map() -> None:
    state = hybrid()
    partial = parse(np.concatenate([state.head, state.recurrent.raw])) if state.recurrent else None
    assert partial is not None
    assert [row.layer for row in compare(partial, partial, layers=HYBRID_LAYERS)] == list(HYBRID_LAYERS.recurrent)
    window = replace(HYBRID_LAYERS, attention=((0, 1), *HYBRID_LAYERS.attention))
    assert len(compare(state, state, layers=window)) == 40
    for misfit in (LayerMap(), LayerMap(((0, 1),), HYBRID_LAYERS.recurrent), LayerMap(HYBRID_LAYERS.attention)):
        with pytest.raises(ValueError, match="does not fit a state of attention"):
            compare(state, state, layers=misfit)


def test_bytes_decide_where_values_cannot() -> None:
    a, b = hybrid(), hybrid()
    for state, zero, bits in ((a, 0.0, 0x7FC00000), (b, -0.0, 0x7FC00001)):
        assert state.recurrent is not None
        state.recurrent.layers[0].r.values()[0, 0] = zero
        state.recurrent.layers[1].s.values()[0, 3] = np.array(bits, np.uint32).view(np.float32)
    zeros, nans = compare(a, b, layers=HYBRID_LAYERS)[0:2]
    assert (zeros.equal, zeros.deviations["r"].value) == (False, 0.0)
    assert str(zeros.first).endswith("value 0: 0.0 against -0.0")
    assert not nans.equal
    assert math.isnan(nans.deviations["s"].value)
    assert str(nans.first).endswith("value 3: nan (0x7fc00000) against nan (0x7fc00001)")
    assert nans.to_dict()["s"] == nans.to_dict()["deviation"] == "NaN"
    assert all(row.equal for row in compare(a, a))


def test_quantized_rows_are_compared_by_the_byte() -> None:
    a, b = hybrid(), hybrid()
    part(a, 7, "k", layers=HYBRID_LAYERS).bytes[2, 67] = 0x0A
    part(b, 7, "k", layers=HYBRID_LAYERS).bytes[2, 67] = 0x1F
    row = compare(a, b, layers=HYBRID_LAYERS)[7]
    assert str(row.first) == "k, cell 2 (position 2), byte 67: 0x0a against 0x1f"
    assert (row.deviations["k"].value, row.deviations["v"].measure) == (1 / (3 * 68), "NMSE")


def test_cells_that_differ_are_a_row_of_their_own() -> None:
    a, b = hybrid(), hybrid()
    b.attention[0].cells.positions[1] = 9
    x = b.attention[0].cells.x
    assert x is not None
    x[0] = 4
    assert b.recurrent is not None
    b.recurrent.cells.positions[0] = 5
    cells = [row for row in compare(a, b, layers=HYBRID_LAYERS) if row.layer is None]
    assert [row.kind for row in cells] == ["attention cells", "recurrent cells"]
    assert first_difference(cells[:1]) == "attention cells, position, cell 1 (position 1): 1 against 9"
    assert first_difference(cells[1:]) == "recurrent cells, position, cell 0 (position 2): 2 against 5"
    b.attention[0].cells.positions[1] = 1
    assert first_difference(compare(a, b)) == "attention cells, x, cell 0 (position 0): 0 against 4"


def test_shapes_that_differ_are_differences() -> None:
    rows = compare(hybrid(n_cells=3), hybrid(n_cells=4), layers=HYBRID_LAYERS)
    assert first_difference(rows) == "attention cells, count: 3 against 4"
    assert {row.equal for row in rows if row.kind == "attention"} == {False}
    attention = next(row for row in rows if row.kind == "attention")
    assert str(attention.first) == "k: 3 cells of 68 bytes in q8_0 against 4 cells of 68 bytes in q8_0"
    assert attention.to_dict()["k"] == "Infinity"


def test_a_part_that_one_state_lacks_is_a_difference() -> None:
    whole = hybrid()
    assert whole.recurrent is not None
    alone = parse(np.concatenate([whole.head, whole.recurrent.raw]))
    rows = compare(whole, alone, layers=HYBRID_LAYERS)
    assert [row.layer for row in rows if not row.equal] == list(range(3, 40, 4))
    assert first_difference(rows) == "layer 3 (attention), k: 3 cells of 68 bytes in q8_0 against nothing"
    assert first_difference(compare(alone, whole, layers=HYBRID_LAYERS)) == (
        "layer 3 (attention), k: nothing against 3 cells of 68 bytes in q8_0"
    )


def test_v_is_compared_by_channel_across_storage_orders() -> None:
    wanted = hybrid_40(np.random.default_rng(1))
    turned = replace(wanted, attention=(replace(wanted.attention[0], v_transposed=True),))
    a, b = parse(wanted.write()), editable(turned.write())
    assert all(row.equal for row in compare(a, b))
    part(b, 4, "v").values()[1, 63] = 2.0
    (row,) = [row for row in compare(a, b) if not row.equal]
    assert row.first is not None
    assert (row.layer, row.first.cell, row.first.index, row.first.b) == (4, 1, 63, "2.0")


def test_a_splice_takes_attention_from_one_state_and_recurrent_memory_from_the_other() -> None:
    a, b = hybrid(1, n_cells=3), hybrid(2, n_cells=5)
    spliced = parse(splice(a, b))
    unequal_a = {row.kind for row in compare(spliced, a) if not row.equal}
    unequal_b = {row.kind for row in compare(spliced, b) if not row.equal}
    assert unequal_a == {"recurrent", "recurrent cells"}
    assert unequal_b == {"attention", "attention cells"}
    assert b.recurrent is not None
    with pytest.raises(ValueError, match="nothing to splice"):
        splice(parse(np.concatenate([b.head, b.recurrent.raw])), b)


@given(wanted=described(), n_tokens=st.integers(1, 40))
def test_a_longer_state_repeats_cells_and_rows(wanted: Described, n_tokens: int) -> None:
    state = parse(wanted.write())
    if len(wanted.attention) != 1 or not len(wanted.attention[0].positions):
        with pytest.raises(ValueError, match="cannot be made longer"):
            lengthened(state, n_tokens)
        return
    (cache,) = wanted.attention
    again = np.resize(np.arange(len(cache.positions)), n_tokens)

    def repeated(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(replace(tensor, rows=tensor.rows[again]) for tensor in tensors)

    memory = wanted.recurrent
    longer = replace(
        wanted,
        attention=(
            replace(
                cache,
                positions=np.arange(n_tokens, dtype=np.int32),
                ext=cache.ext[again],
                k=repeated(cache.k),
                v=None if cache.v is None else repeated(cache.v),
            ),
        ),
        recurrent=memory and replace(memory, positions=np.full(len(memory.positions), n_tokens - 1, np.int32)),
    )
    assert lengthened(state, n_tokens).tobytes() == longer.write()


def test_rows_are_edited_in_place() -> None:
    a, b = hybrid(), hybrid()
    rows = part(b, 11, "v", layers=HYBRID_LAYERS)
    rows.units[:] = np.roll(rows.units, 1, axis=0)
    part(b, 4, "s", layers=HYBRID_LAYERS).bytes[:] = 0
    compared = compare(a, b, layers=HYBRID_LAYERS)
    assert [row.layer for row in compared if not row.equal] == [4, 11]
    np.testing.assert_array_equal(rows.values()[1:], part(a, 11, "v", layers=HYBRID_LAYERS).values()[:-1])
    assert compared[4].deviations["s"].value == 1.0
    for layer, name in ((3, "r"), (4, "k"), (40, "s")):
        with pytest.raises(LookupError, match=f"no {name} of layer {layer} in a state of attention"):
            part(b, layer, name, layers=HYBRID_LAYERS)  # type: ignore[arg-type]
