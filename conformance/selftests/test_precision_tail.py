from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from conformance.harness.precision.codecs import codec
from conformance.harness.precision.kvarn import GROUP, SINK_ROWS
from conformance.harness.precision.oracle import Doubles, Rows, attend, softmax
from conformance.harness.precision.tail import Selection, TailError, TailLedger, resolve_tail, select_rows

WINDOWS = st.none() | st.integers(1, 5000)


@pytest.mark.parametrize(
    ("requested", "window", "standard", "kvarn"),
    [
        (0, None, 0, 128),
        (1, None, 1, 128),
        (127, None, 127, 128),
        (128, None, 128, 128),
        (129, None, 129, 256),
        (1024, None, 1024, 1024),
        (4096, 1000, 1000, 1000),
        (2048, 1024, 1024, 1024),
        (0, 64, 0, 64),
    ],
)
def test_a_requested_tail_resolves(requested: int, window: int | None, standard: int, kvarn: int) -> None:
    assert resolve_tail(requested, window=window) == standard
    assert resolve_tail(requested, kvarn=True, window=window) == kvarn


@given(requested=st.integers(0, 10000), more=st.integers(0, 3000), window=WINDOWS, kvarn=st.booleans())
def test_asking_for_more_never_gives_less_and_never_more_than_the_window(
    requested: int, more: int, window: int | None, kvarn: bool
) -> None:
    rows = resolve_tail(requested, kvarn=kvarn, window=window)
    assert rows <= resolve_tail(requested + more, kvarn=kvarn, window=window)
    assert rows >= min(requested, window or requested)
    if window is None:
        assert not kvarn or rows % GROUP == 0
    else:
        assert rows <= window


def test_lengths_that_make_no_sense_are_refused() -> None:
    with pytest.raises(TailError, match="tail of -1 rows"):
        resolve_tail(-1)
    with pytest.raises(TailError, match="window of 0 rows"):
        resolve_tail(5, window=0)


@given(data=st.data(), tail=st.integers(0, 12), window=st.none() | st.integers(1, 12), sink=st.integers(0, 4))
def test_the_newest_visible_rows_are_exact_for_each_query(
    data: st.DataObject, tail: int, window: int | None, sink: int
) -> None:
    positions = data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=20))
    queries = data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=4))
    selection = select_rows(np.array(positions), np.array(queries), tail, window=window, sink=sink)
    in_order = sorted(range(len(positions)), key=lambda row: (positions[row], row))
    for query, visible, exact in zip(queries, selection.visible, selection.exact, strict=True):
        seen = [r for r in in_order if positions[r] <= query and (window is None or query - positions[r] < window)]
        assert set(np.flatnonzero(visible)) == set(seen)
        newest = seen[max(0, len(seen) - tail) :]
        assert set(np.flatnonzero(exact)) == set(newest) | (set(in_order[:sink]) & set(seen))


@given(rows=st.integers(1, 1000), requested=st.integers(0, 600), window=st.none() | st.integers(1, 600))
def test_a_kvarn_row_is_read_from_the_body_only_when_its_group_is_complete(
    rows: int, requested: int, window: int | None
) -> None:
    tail = resolve_tail(requested, kvarn=True, window=window)
    sink = SINK_ROWS if window is None else 0
    chosen = select_rows(np.arange(rows), np.array([rows - 1]), tail, window=window, sink=sink)
    quantized = np.flatnonzero(chosen.visible & ~chosen.exact)
    assert np.all(quantized // GROUP * GROUP + GROUP <= rows)
    if window is None:
        assert np.all(quantized >= SINK_ROWS)


STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=30)


@given(tail=st.integers(0, 30), steps=STEPS)
def test_the_ledger_knows_which_rows_have_lost_their_exact_values(tail: int, steps: list[tuple[bool, int]]) -> None:
    ledger = TailLedger(tail)
    exact: list[bool] = []
    for commit, amount in steps:
        if commit:
            leaving = ledger.commit(amount)
            exact += [True] * amount
            older = range(max(0, len(exact) - tail))
            assert list(leaving) == [row for row in older if exact[row]]
            for row in older:
                exact[row] = False
        else:
            ledger.roll_back(max(0, len(exact) - amount))
            del exact[ledger.rows :]
        newest = exact[max(0, len(exact) - tail) :]
        assert ledger.missing == newest.count(False)
    ledger.commit(tail)
    assert ledger.missing == 0


def test_rolling_back_into_the_body_leaves_the_tail_partial_for_as_many_rows() -> None:
    ledger = TailLedger(tail=100)
    ledger.commit(1000)
    ledger.roll_back(500)
    assert ledger.missing == 100
    ledger.commit(99)
    assert ledger.missing == 1
    ledger.commit(1)
    assert ledger.missing == 0


def test_steps_that_make_no_sense_are_refused() -> None:
    ledger = TailLedger(tail=4)
    ledger.commit(3)
    with pytest.raises(TailError, match="cannot commit -1"):
        ledger.commit(-1)
    with pytest.raises(TailError, match="cannot roll back to 4 rows; 3 are committed"):
        ledger.roll_back(4)


class Layer:
    """One layer's rows and queries, its body in a coarse type, and the tail that the rule asks for."""

    def __init__(self, seed: int, rows: int = 96, tail: int = 32) -> None:
        rng = np.random.default_rng(seed)
        self.queries = rng.standard_normal((2, 4, 64)).astype(np.float32)  # two heads, four queries
        self.exact = Rows(*rng.standard_normal((2, 2, rows, 64)).astype(np.float32))
        coarse = codec("q3_0")
        self.body = Rows(coarse.round_trip(self.exact.keys), coarse.round_trip(self.exact.values))
        self.positions, self.at, self.tail = np.arange(rows), np.arange(rows - 4, rows), tail
        self.selection = select_rows(self.positions, self.at, tail)

    def attend(self, selection: Selection | None = None) -> Doubles:
        return attend(self.queries, self.body, self.exact, selection or self.selection)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_attention_is_one_softmax_over_body_and_tail(seed: int) -> None:
    layer = Layer(seed, rows=40, tail=7)
    seen = layer.attend()
    for head in range(2):
        for i, position in enumerate(layer.at):
            rows = range(position + 1)
            sources = [layer.exact if row > position - 7 else layer.body for row in rows]
            query = layer.queries[head, i].astype(np.float64)
            weights = np.exp([query @ source.keys[head, row] / 8 for source, row in zip(sources, rows, strict=True)])
            values = np.array([source.values[head, row] for source, row in zip(sources, rows, strict=True)])
            np.testing.assert_allclose(seen[head, i], weights @ values / weights.sum(), rtol=1e-10, atol=1e-12)


def test_a_tail_over_all_rows_reads_nothing_from_the_body_and_none_reads_all() -> None:
    layer = Layer(1)
    everything = select_rows(layer.positions, layer.at, 96)
    nothing = select_rows(layer.positions, layer.at, 0)
    for selection, source in ((everything, layer.exact), (nothing, layer.body)):
        np.testing.assert_array_equal(layer.attend(selection), attend(layer.queries, source, source, selection))


def two_softmaxes(layer: Layer) -> Doubles:
    """Body and tail attended apart and added by their share of the rows."""
    visible, exact = layer.selection.visible, layer.selection.exact
    share = exact.sum(axis=1)[:, None] / visible.sum(axis=1)[:, None]
    tail = layer.attend(Selection(exact, exact))
    older = layer.attend(Selection(visible & ~exact, np.zeros_like(exact)))
    merged: Doubles = share * tail + (1 - share) * older
    return merged


def one_row_short(layer: Layer) -> Doubles:
    return layer.attend(select_rows(layer.positions, layer.at, layer.tail - 1))


def one_row_long(layer: Layer) -> Doubles:
    return layer.attend(select_rows(layer.positions, layer.at, layer.tail + 1))


def oldest_rows_exact(layer: Layer) -> Doubles:
    visible = layer.selection.visible
    return layer.attend(Selection(visible, visible & (layer.positions < layer.tail)))


def tail_dropped(layer: Layer) -> Doubles:
    visible, exact = layer.selection.visible, layer.selection.exact
    return layer.attend(Selection(visible & ~exact, np.zeros_like(exact)))


def body_dropped(layer: Layer) -> Doubles:
    return layer.attend(Selection(layer.selection.exact, layer.selection.exact))


def boundary_of_the_first_query_for_all(layer: Layer) -> Doubles:
    visible = layer.selection.visible
    return layer.attend(Selection(visible, visible & layer.selection.exact[:1]))


def values_from_the_body(layer: Layer) -> Doubles:
    return attend(layer.queries, layer.body, Rows(layer.exact.keys, layer.body.values), layer.selection)


def quantized_twice(layer: Layer) -> Doubles:
    coarse = codec("q3_1")
    again = Rows(coarse.round_trip(layer.body.keys), coarse.round_trip(layer.body.values))
    return attend(layer.queries, again, layer.exact, layer.selection)


def in_float32(layer: Layer) -> NDArray[np.float32]:
    """The same rule in the precision that an engine would use: what may differ."""
    scores = [layer.queries @ rows.keys.swapaxes(-1, -2) / np.float32(8) for rows in (layer.body, layer.exact)]
    exact = layer.selection.exact
    masked = np.where(layer.selection.visible, np.where(exact, scores[1], scores[0]), -np.inf)
    weights = softmax(masked.astype(np.float64)).astype(np.float32)
    tail: NDArray[np.float32] = np.where(exact, weights, 0) @ layer.exact.values
    older: NDArray[np.float32] = np.where(exact, 0, weights) @ layer.body.values
    return tail + older


FAULTS = [
    two_softmaxes,
    one_row_short,
    one_row_long,
    oldest_rows_exact,
    tail_dropped,
    body_dropped,
    boundary_of_the_first_query_for_all,
    values_from_the_body,
    quantized_twice,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_fault_differs_far_above_rounding(fault: Callable[[Layer], Doubles], seed: int) -> None:
    layer = Layer(seed)
    right = layer.attend()
    rounding = np.square(in_float32(layer) - right).sum()
    assert np.square(fault(layer) - right).sum() > 1e6 * rounding
