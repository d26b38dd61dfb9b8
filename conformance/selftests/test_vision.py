"""Images through libmtmd: what is refused, what is told, what comes back; and the example of the docs runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Picture

from conformance.harness.arms.reading import PIXELS_PER_TOKEN, Reader, drawn_pixels, encoder_of, pixels_of, try_vision
from conformance.harness.bench import Setup, measure
from conformance.harness.engine import Library, Model, ModelError, Pixels, Vision, abi, has_vision
from conformance.harness.engine import library as library_module
from conformance.harness.engine.child import Child
from conformance.harness.exam.check import check_of
from conformance.harness.prompts.layouts import PromptError
from conformance.harness.prompts.transcript import Screenshot, Step, Text, Transcript
from fixtures import models
from fixtures.vision import VisionTower

from .conftest import ROOT

TOWER = "holo3-mini-mmproj"


@pytest.fixture(scope="module")
def library() -> Library:
    found = Library("bundled")
    if not has_vision(found):
        pytest.skip("this build has no libmtmd")
    return found


@pytest.fixture(scope="module")
def model(library: Library) -> Iterator[Model]:
    with Model(library, models.path("holo3-mini")) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def vision(model: Model) -> Iterator[Vision]:
    with Vision(model, models.path(TOWER)) as tower:
        yield tower


@pytest.mark.parametrize(
    ("width", "height", "grid"), [(1, 1, (3, 3)), (100, 100, (3, 3)), (256, 192, (8, 6)), (300, 140, (9, 4))]
)
def test_an_image_becomes_a_token_for_each_square_of_32_pixels(
    vision: Vision, width: int, height: int, grid: tuple[int, int]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    assert vision.grid(pixels) == grid
    encoded = vision.encode(pixels)
    assert (encoded.nx, encoded.ny) == grid
    assert encoded.embeddings.shape == (grid[0] * grid[1], vision.model.n_embd_inp)
    assert encoded.embeddings.std() > 0.1
    assert np.isfinite(encoded.embeddings).all()


def test_the_embeddings_depend_on_every_corner(vision: Vision) -> None:
    pixels = drawn_pixels(Screenshot(width=4, height=3, seed=1))
    first = vision.encode(pixels).embeddings
    for y, x in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        changed = pixels.copy()
        changed[y, x] ^= 255
        assert (vision.encode(changed).embeddings != first).any(axis=1).all()


@pytest.mark.parametrize(
    "pixels", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8)]
)
def test_what_is_no_image_is_refused(vision: Vision, pixels: Pixels) -> None:
    with pytest.raises(ModelError, match="give uint8"):
        vision.encode(pixels)


def test_a_tower_of_another_width_is_refused_in_a_line(library: Library) -> None:
    with Model(library, models.path("rwkv7-mini")) as other, pytest.raises(ModelError) as refused:
        Vision(other, models.path(TOWER))
    assert "mismatch between text model (n_embd = 128) and mmproj (n_embd = 64)" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(model: Model) -> None:
    with pytest.raises(ModelError, match="no such file"):
        Vision(model, "/nonexistent.gguf")


def test_a_damaged_tower_ends_a_child_and_not_this_process(library: Library, tmp_path: Path) -> None:
    class Headless(VisionTower):
        def tensors(self) -> list:  # type: ignore[type-arg]
            return [tensor for tensor in super().tensors() if "position_embd" not in tensor.name]

    damaged = tmp_path / "damaged.gguf"
    models.write(Headless(name="damaged", purpose="", n_embd_text=64), damaged)
    with Child() as child, pytest.raises(Exception, match=r"SIG|refused|cannot"):
        child.call(try_vision, "bundled", str(models.path("holo3-mini")), str(damaged))


def test_a_build_without_libmtmd_says_so(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module.Library, "companion", lambda *_: None)
    assert not has_vision(model.library)
    with pytest.raises(Exception, match="has no libmtmd beside it"):
        Vision(model, models.path(TOWER))


def test_the_layouts_of_its_parameters_are_told_apart_by_their_size() -> None:
    assert [layout.id for layout in abi.known_layouts("mtmd_context_params")] == ["v56", "v64", "v80", "v96"]


def test_the_tower_is_written_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        models.write(models.source(TOWER), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == models.path(TOWER).read_bytes()


def test_a_screenshot_must_be_what_its_transcript_says(vision: Vision, model: Model, tmp_path: Path) -> None:
    Picture.fromarray(np.zeros((3 * PIXELS_PER_TOKEN, 4 * PIXELS_PER_TOKEN, 3), np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no image")
    reader = Reader(model, encoder_of(vision), tmp_path)
    assert reader.image(Screenshot(width=4, height=3, path="a.png")).width == 4
    for width, path, says in (
        (5, "a.png", "becomes 4 x 3 tokens"),
        (4, "b.png", "not an image"),
        (4, "c.png", "No such"),
    ):
        with pytest.raises(PromptError, match=says):
            reader.image(Screenshot(width=width, height=3, path=path))
    with pytest.raises(PromptError, match="--mmproj"):
        Reader(model).image(Screenshot(width=4, height=3, path="a.png"))
    assert pixels_of(str(tmp_path / "a.png")).shape == (96, 128, 3)


def test_a_gate_of_a_millionth_would_miss_the_swapped_axes_of_a_small_image_that_bits_show() -> None:
    task = Transcript(
        preamble=Text.drawn(0, 200),
        steps=(Step(screenshot=Screenshot(width=2, height=2, seed=3), action=Text.drawn(10, 2)),),
        closing=Text.drawn(5, 60),
    )
    check = check_of("conformance.test_agent_arms:test_each_step_of_the_terminal_slot_equals_a_prefill_from_scratch")
    case = check.case.model_validate({"transcript": task, "window": 1, "ubatch": 512, "checkpoints": "partial"})
    swapped, true = (
        measure(Setup("bundled", "holo3-mini", fault), check.body, case).deviation.value
        for fault in ("axes-swapped", None)
    )
    assert true == 0
    assert 1e-10 < swapped < 1e-6


def test_the_example_of_the_docs_runs() -> None:
    done = subprocess.run(
        [sys.executable, "docs/examples/terminal_slot.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 8
    kept = {line.split(" bytes kept")[0].rsplit(", ", 1)[1] for line in lines}
    assert len(kept) == 1  # the checkpoint does not grow
