"""Cards: their arithmetic, and that under the bundled build every fixture is conditioned and notices every loss."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from conformance.harness.engine import BUNDLED, Library, Model
from conformance.harness.engine.child import Child
from fixtures import models
from fixtures.cards import Card, CardSettings, Floors, Sensitivity, card_of, measure_card
from fixtures.vocabulary import SPECIAL_TOKENS, tokenize

QUICK = CardSettings(text_seeds=(1,), floor_tokens=300, prefix_tokens=100)
PLACES: tuple[tuple[int, Literal["k", "v"]], ...] = ((0, "k"), (1, "k"), (1, "v"))
TEXT = "Grüße, 世界 👋\n\n" + "".join(SPECIAL_TOKENS) + "  0 <|im_start"

with_bundled = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python, the bundled build, is not installed"
)


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child() as child:
        yield child


def card(
    batched: float,
    ubatch_1: float,
    *,
    cells: tuple[float, ...] = (3e-6, 2e-6),
    parts: tuple[float, ...] = (4e-3, 2e-3, 1e-3),
    past: float = 1e-2,
) -> Card:
    floors = Floors(repeat=0, threads_2=0, ubatch_64=batched, ubatch_7=batched / 2, ubatch_1=ubatch_1)
    return Card(
        model="m.gguf",
        model_digest="0",
        arch="a",
        kinds=("attention",),
        build={},
        measured="2026-01-01",
        settings=CardSettings(),
        prefix_tokens=150,
        flash_attn_off=floors,
        flash_attn_on=floors,
        restored=0,
        past=past,
        layers=tuple(
            Sensitivity(layer=layer, part=part, nmse=nmse)
            for (layer, part), nmse in zip(PLACES[: len(parts)], parts, strict=True)
        ),
        cells=tuple(Sensitivity(layer=i, part="k", nmse=v) for i, v in enumerate(cells)),
    )


def test_the_least_is_found_and_set_against_its_own_floor() -> None:
    measured = card(batched=1e-9, ubatch_1=1e-10)
    assert measured.least_layer is not None
    assert (measured.least_layer.layer, measured.least_layer.part) == (1, "v")
    assert measured.least("k") == measured.layers[1]
    assert measured.least("s") is None
    assert measured.layer_ratio == pytest.approx(1e6)
    assert measured.cell_ratio == pytest.approx(2e4)


@pytest.mark.parametrize(("ubatch_1", "needed"), [(1e-10, False), (1e-8, True), (0.0, False)])
def test_single_cells_need_bit_equality_where_noise_comes_near(ubatch_1: float, needed: bool) -> None:
    assert card(batched=0.0, ubatch_1=ubatch_1).needs_bit_equality_for_cells is needed


def test_without_attention_there_is_no_cell_to_lose() -> None:
    measured = card(batched=0.0, ubatch_1=1.0, cells=())
    assert (measured.cell_ratio, measured.needs_bit_equality_for_cells) == (None, False)
    assert measured.layer_ratio == float("inf")


@pytest.mark.parametrize(
    ("measured", "short"),
    [
        (card(1e-10, 1e-10), ()),
        (card(2e-9, 1e-10, parts=(1e-3,)), ("noise of batched runs",)),
        (card(2e-9, 1e-10, parts=(1e-5,)), ("noise of batched runs", "a layer's loss is")),
        (card(0, 2e-8), ("noise at ubatch 1",)),
        (card(2e-6, 0, parts=(1.0,)), ("noise of batched runs", "noise with flash attention")),
        (card(0, 0, parts=(1e-3, 9e-6)), ("a layer's loss moves",)),
        (card(0, 0, past=9e-5), ("another past",)),
        (card(0, 0, parts=(), cells=()), ()),
    ],
)
def test_what_is_short_of_a_good_fixture_is_named(measured: Card, short: tuple[str, ...]) -> None:
    assert len(measured.shortcomings) == len(short)
    assert all(said.startswith(what) for said, what in zip(measured.shortcomings, short, strict=True))


def test_a_card_without_a_readable_state_has_no_least_layer() -> None:
    measured = card(1e-9, 1e-9, parts=(), cells=())
    assert (measured.least_layer, measured.layer_ratio, measured.cell_ratio) == (None, None, None)


@with_bundled
@pytest.mark.parametrize("name", models.names())
def test_a_fixture_is_quiet_and_notices_the_loss_of_any_layer(name: str, child: Child) -> None:
    measured: Card = child.call(measure_card, models.path(name), BUNDLED, QUICK)
    census = models.recipe(name).census
    seen = {(s.layer, s.part) for s in measured.layers}
    attention = {(layer.index, part) for layer in census.attention or () for part in ("k", "v")}
    recurrent = {
        (x.index, part) for x in census.recurrent or () for part, n in (("r", x.r_values), ("s", x.s_values)) if n
    }
    assert seen == attention | recurrent
    assert measured.restored == measured.flash_attn_off.repeat == measured.flash_attn_on.repeat == 0
    assert not measured.shortcomings
    assert measured.flash_attn_off.batched <= (1e-9 if census.sliding_window else 1e-12)
    assert not measured.needs_bit_equality_for_cells


def _round_trip(model_path: Path, text: str) -> tuple[list[int], bytes]:
    with Model(Library(BUNDLED), model_path) as model:
        tokens = model.tokenize(text).tolist()
        return tokens, b"".join(model.piece(token) for token in tokens)


@with_bundled
@pytest.mark.parametrize("name", models.names())
def test_the_build_tokenizes_as_the_vocabulary_says_and_back(name: str, child: Child) -> None:
    assert child.call(_round_trip, models.path(name), TEXT) == (tokenize(TEXT), TEXT.encode())


@with_bundled
def test_a_card_is_kept_and_a_damaged_one_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.path("mamba2-mini")
    monkeypatch.setenv("LLAMA_CONFORMANCE_CACHE", str(tmp_path))
    first = card_of(model, BUNDLED, QUICK)
    (kept,) = tmp_path.glob("cards/*.json")
    assert first.build["digest"] in kept.name
    kept.write_text(kept.read_text().replace(first.measured, "1999-12-31"))
    assert card_of(model, BUNDLED, QUICK).measured == "1999-12-31"
    other = QUICK.model_copy(update={"probe_tokens": 2})
    assert card_of(model, BUNDLED, other).settings == other
    kept.write_text("{")
    assert card_of(model, BUNDLED, QUICK).measured == first.measured
