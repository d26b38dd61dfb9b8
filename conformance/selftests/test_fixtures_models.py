"""Fixture models: the same bytes every time, a new file for every change, one good file whoever writes it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import fields, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from typer.testing import CliRunner

from conformance.harness.contract.census import census_of_gguf
from fixtures import models
from fixtures.architectures import Recipe
from tools.models import app

NAMES = models.names()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLAMA_CONFORMANCE_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_gives_the_same_bytes_every_time(name: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    models.write(models.recipe(name), first)
    models.write(models.recipe(name), second)
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size < 15_000_000


def _changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    for field in fields(recipe):
        value: Any = getattr(recipe, field.name)
        if isinstance(value, tuple):
            value = (*value[:-1], value[-1] + 1)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            value += 1
        else:
            continue
        yield field.name, replace(recipe, **{field.name: value})


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_enters_the_digest(name: str) -> None:
    recipe = models.recipe(name)
    digests = {field: changed.digest for field, changed in _changes(recipe)}
    assert {field for field, digest in digests.items() if digest == recipe.digest} == set()
    assert len(set(digests.values())) == len(digests) > 5
    assert replace(recipe, purpose="another").digest == recipe.digest


def test_another_seed_gives_other_weights_in_the_same_shapes(tmp_path: Path) -> None:
    recipe = models.recipe("qwen3-mini-32")
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    models.write(recipe, first)
    models.write(replace(recipe, seed=recipe.seed + 1), second)
    for a, b in zip(GGUFReader(first).tensors, GGUFReader(second).tensors, strict=True):
        assert (a.name, tuple(a.shape)) == (b.name, tuple(b.shape))
        drawn = "norm" not in a.name
        assert np.array_equal(a.data, b.data) is not drawn


@pytest.mark.parametrize("name", NAMES)
def test_the_census_of_a_file_is_its_recipes(name: str) -> None:
    assert census_of_gguf(models.path(name)) == models.recipe(name).census


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_in_a_file_are_those_the_census_speaks_of(name: str) -> None:
    census = models.recipe(name).census
    assert census.attention is not None
    shapes = {tensor.name: tuple(int(n) for n in tensor.shape) for tensor in GGUFReader(models.path(name)).tensors}
    keys = {il: shapes[key] for il in range(census.n_layer) if (key := f"blk.{il}.attn_k.weight") in shapes}
    assert keys == {layer.index: (census.n_embd, layer.n_head_kv * layer.key_dim) for layer in census.attention}
    assert set(census.attention_layers or ()) ^ set(census.recurrent_layers or ()) == set(range(census.n_layer))
    assert shapes["token_embd.weight"] == (census.n_embd, census.n_vocab)


def test_holo3_mini_has_holo3s_40_layers() -> None:
    census = models.recipe("holo3-mini").census
    assert census.attention_layers == tuple(range(3, 40, 4))
    assert len(census.recurrent_layers or ()) == 30
    assert census.rope_sections == (3, 3, 2, 0)


def test_a_model_is_written_once_and_then_kept(cache: Path) -> None:
    path = models.path("qwen3-mini-32")
    assert path.parent == cache
    path.write_bytes(b"kept")
    assert models.path("qwen3-mini-32").read_bytes() == b"kept"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LLAMA_CONFORMANCE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/llama-conformance"),
        ({"HOME": "/c"}, "/c/.cache/llama-conformance"),
    ],
)
def test_the_cache_follows_the_environment(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LLAMA_CONFORMANCE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert models.cache_folder() == Path(expected)


def test_a_failed_write_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(_: Recipe, target: Path) -> None:
        target.write_bytes(b"GGUF")
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(models, "write", write_half)
    with pytest.raises(OSError, match="No space left"):
        models.path("qwen3-mini-32")
    assert list(cache.iterdir()) == []


def _write_at_once(start: Barrier) -> None:
    start.wait()
    models.path("qwen35-mini")


def test_concurrent_writers_leave_one_good_file(cache: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(3)
    writers = [spawn.Process(target=_write_at_once, args=(start,)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert [path.name for path in cache.iterdir()] == [models.kept_path("qwen35-mini").name]
    models.write(models.recipe("qwen35-mini"), cache / "alone.gguf")
    assert models.path("qwen35-mini").read_bytes() == (cache / "alone.gguf").read_bytes()


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(models.UnknownModel, match=r"'holo4-mini'; there are holo3-mini, qwen35-mini"):
        models.path("holo4-mini")


def test_the_tool_writes_named_models_and_lists_all(cache: Path) -> None:
    made = CliRunner().invoke(app, ["make", "lfm2-mini", "mamba2-mini"])
    assert made.exit_code == 0
    assert [Path(line) for line in made.stdout.split()] == [models.kept_path(n) for n in ("lfm2-mini", "mamba2-mini")]
    listed = CliRunner().invoke(app, ["list"]).stdout
    assert listed.count("not written") == len(NAMES) - 2
    assert all(name in listed for name in NAMES)


@pytest.mark.parametrize(
    "arguments",
    [
        ["make", "qwen3-mini-32", "nope"],
        ["card", "nope"],
        ["card", "/nowhere/nope.gguf"],
        ["card", __file__],
        ["card", "qwen3-mini-32", "--build", "/nowhere"],
    ],
)
def test_the_tool_refuses_bad_input_with_one_line(arguments: list[str], cache: Path) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert arguments[-1] in result.stderr


def test_builds_that_take_the_heads_of_mamba2_from_the_attention_find_them_there() -> None:
    metadata = models.recipe("mamba2-mini").metadata()
    assert metadata["mamba2.attention.head_count"] == metadata["mamba2.ssm.time_step_rank"]
