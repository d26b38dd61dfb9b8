"""Models of any architecture: what is made of a loader's complaints, how weights are filled, what becomes of a build that dies."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness.contract.census import census_of_gguf
from conformance.harness.engine import BUNDLED, ModelError
from fixtures.auto import Draft, auto_model, auto_path, draft, filled, known_architectures, names_in
from fixtures.cards import card_of
from fixtures.vocabulary import N_VOCAB

with_bundled = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python, the bundled build, is not installed"
)
NAMES = st.from_regex(r"[a-z][a-z0-9_.-]{1,11}", fullmatch=True)
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@pytest.mark.parametrize(
    ("said", "key", "value"),
    [
        ("key not found in model: some.expert_count", "some.expert_count", 4),
        ("key not found in model: some.of_its_own", "some.of_its_own", 1),
        ("array key not found in model: some.of_its_own", "some.of_its_own", (1, 1, 1, 1)),
        ("array key not found in model: some.attention.sliding_window_pattern", "some.attention.sliding_window_pattern", (1, 0, 1, 0)),
        ("key some.block_count has wrong type u32 but expected type f32", "some.block_count", 4.0),
        ("key some.block_count has wrong type u32 but expected type bool", "some.block_count", True),
    ],
)  # fmt: skip
def test_a_key_that_the_loader_misses_is_given(said: str, key: str, value: object) -> None:
    made = Draft.of("some")
    assert made.amend(f"error loading model hyperparameters: {said}")
    assert (made.values[key], type(made.values[key])) == (value, type(value))
    assert not made.amend(said)


def test_a_tensor_is_given_with_the_shape_of_the_first_layer_and_then_with_the_one_that_is_asked_for() -> None:
    made = Draft.of("some")
    assert made.amend("missing tensor 'blk.0.a.weight'")
    assert made.amend("check_tensor_dims: tensor 'blk.0.a.weight' has wrong shape; expected   64,  288, got   1, 1")
    assert made.amend("check_tensor_dims: tensor 'blk.3.a.weight' not found")
    assert (made.shapes["blk.0.a.weight"], made.shapes["blk.3.a.weight"]) == ((288, 64), (288, 64))
    assert not made.amend("something else is wrong")


@given(
    keys=st.dictionaries(NAMES, st.booleans(), max_size=5),
    tensors=st.dictionaries(NAMES.map(lambda name: f"blk.{len(name) % 4}.{name}.weight"), SHAPES, max_size=8),
)
def test_a_loader_that_names_one_thing_at_a_time_gets_all_of_them(
    keys: dict[str, bool], tensors: dict[str, tuple[int, ...]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("auto") / "model.gguf"

    def complaint(file: Path) -> str | None:
        reader = GGUFReader(file)
        there = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
        for key, is_float in keys.items():
            field = reader.fields.get(f"some.{key}")
            if field is None:
                return f"key not found in model: some.{key}"
            if is_float and field.types[0].name != "FLOAT32":
                return f"key some.{key} has wrong type u32 but expected type f32"
        for name, shape in tensors.items():
            if name not in there:
                return f"missing tensor '{name}'"
            if there[name] != shape:
                return f"tensor '{name}' has wrong shape; expected {', '.join(map(str, reversed(shape)))}, got 1"
        return None

    made = draft("some", path, complaint)
    assert complaint(path) is None
    assert {f"some.{key}" for key in keys} <= set(made.values)
    assert set(made.shapes) == {"token_embd.weight", *tensors}
    assert made.shapes["token_embd.weight"] == (N_VOCAB, 128)


def test_a_complaint_that_nothing_cures_is_told() -> None:
    with pytest.raises(ModelError, match=r"architecture 'some': it is Tuesday"):
        draft("some", Path("/dev/null"), lambda _: "it is Tuesday")


@given(name=NAMES, shape=SHAPES, residual=st.floats(0.1, 1))
def test_a_projection_keeps_the_size_of_what_it_projects_and_a_branch_gives_its_share(
    name: str, shape: tuple[int, ...], residual: float
) -> None:
    for prefix in ("blk.0.attn_output", "blk.3.ffn_down_exps", "blk.1.ssm_out", "blk.2.time_mix_output"):
        whole, share = (filled(f"{prefix}.weight", (*shape, 64), each).values(1) for each in (1.0, residual))
        np.testing.assert_allclose(share, residual * whole, rtol=1e-6)
    whole, small = (filled("blk.0.time_mix_value.weight", (*shape, 64), 1, normed=n).values(1) for n in (False, True))
    np.testing.assert_allclose(small, 0.1 * whole, rtol=1e-6)
    values = filled(f"{name}.weight", (*shape, 64), residual).values(1)
    assert values.shape == (*shape, 64)
    assert np.isfinite(values).all()


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("blk.0.attn_norm.weight", 1, 1),
        ("blk.0.attn_norm.bias", 0, 0),
        ("blk.0.attn_q_norm.weight", 0.7, 0.7),
        ("blk.0.post_ffw_norm.weight", 0.25, 0.25),
        ("blk.0.ssm_a", -1, -0.1),
        ("blk.0.ssm_dt.bias", -3, -3),
        ("blk.0.exp_probs_b.bias", 0, 0),
        ("blk.0.time_mix_decay.weight", -6, -3),
        ("blk.0.time_mix_lerp_fused.weight", 0.5, 0.5),
        ("rope_freqs.weight", 1, 1),
    ],
)
def test_norms_only_normalise_and_decays_decay_slowly(name: str, low: float, high: float) -> None:
    values = filled(name, (16,), 0.25).values(1)
    assert (values.min(), values.max()) == (pytest.approx(low), pytest.approx(high))


@given(names=st.lists(NAMES, min_size=1, max_size=6), junk=st.binary(max_size=20), end=st.integers(0, 9))
def test_every_name_in_a_library_is_found_and_every_end_of_one(names: list[str], junk: bytes, end: int) -> None:
    content = junk + b"\0" + b"\0".join(name.encode() for name in names) + b"\0" + junk
    found = names_in(content)
    assert set(names) <= found
    tail = names[0][min(end, len(names[0]) - 2) :]
    assert tail in found or not tail[0].isalpha()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLAMA_CONFORMANCE_CACHE", str(cache))
    return cache


@with_bundled
def test_a_hybrid_is_made_conditioned_and_kept(own_cache: Path) -> None:
    made = auto_model("granitehybrid")
    assert (made.kinds, made.shortcomings, made.is_swept) == (("attention", "hybrid", "recurrent"), (), True)
    assert made.path is not None
    assert made.path.is_relative_to(own_cache)
    census = census_of_gguf(made.path)
    assert (census.attention_layers, census.recurrent_layers) == ((1, 3), (0, 2))
    written = made.path.stat().st_mtime_ns
    assert auto_path("granitehybrid").stat().st_mtime_ns == written
    card = card_of(made.path, BUNDLED)
    assert (card.arch, card.kinds, card.restored) == ("granitehybrid", made.kinds, 0)


@with_bundled
@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        ("no-such-thing", "unknown model architecture: 'no-such-thing'"),
        ("dream", "keeps no memory"),
        ("clip", "CLIP cannot be used as main model"),
        ("chameleon", "aborted (SIGABRT): ggml.c:"),
    ],
)
def test_an_architecture_of_which_no_model_can_be_made_has_a_reason(arch: str, reason: str, own_cache: Path) -> None:
    made = auto_model(arch)
    assert (made.path, made.is_swept) == (None, False)
    assert reason in made.reason
    assert "\n" not in made.reason
    with pytest.raises(ModelError, match=arch):
        auto_path(arch)


def test_the_architectures_of_a_build_are_asked_for_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fixtures.auto._digest_of_build", lambda build: f"of {build}")
    kept = own_cache / "auto" / "architectures-of mine.txt"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("jamba\nmamba")
    assert known_architectures("mine") == ("jamba", "mamba")
