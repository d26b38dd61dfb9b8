"""The census: llama.cpp's rules per architecture, and every damaged file refused with one clear line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness.contract.census import GGUFError, ModelCensus, census_of_gguf
from fixtures import models

Written = Callable[..., Path]
COMMON = {"block_count": 12, "context_length": 4096, "embedding_length": 96, "attention.head_count": 6}
STATES = {"ssm.inner_size": 32, "ssm.state_size": 8, "ssm.conv_kernel": 4}


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Writes a GGUF without tensors: keys of the architecture, None for one that is to be left out."""

    def write(arch: str, keys: dict[str, Any]) -> Path:
        writer = GGUFWriter(tmp_path / f"{arch}.gguf", arch)
        for key, value in {**COMMON, **keys}.items():
            if isinstance(value, list):
                writer.add_array(f"{arch}.{key}", value)
            elif value is not None:
                kind = GGUFValueType.get_type(value) if isinstance(value, str) else GGUFValueType.UINT32
                writer.add_key_value(f"{arch}.{key}", value, kind)
        writer.add_token_list(["a", "b", "c"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return tmp_path / f"{arch}.gguf"

    return write


def census(written: Written, arch: str, **keys: Any) -> ModelCensus:
    return census_of_gguf(written(arch, {key.replace("__", "."): value for key, value in keys.items()}))


def test_head_dims_follow_from_the_width_unless_they_are_named(written: Written) -> None:
    plain = census(written, "llama")
    assert plain.attention is not None
    assert [(x.n_head_kv, x.key_dim, x.value_dim, x.sliding) for x in plain.attention] == [(6, 16, 16, False)] * 12
    assert (plain.recurrent, plain.n_vocab, plain.sliding_window, plain.rope_sections) == ((), 3, None, None)
    named = census(written, "qwen3", attention__head_count_kv=2, attention__key_length=40, attention__value_length=24)
    assert named.attention is not None
    assert {(x.n_head_kv, x.key_dim, x.value_dim) for x in named.attention} == {(2, 40, 24)}


def test_heads_may_differ_from_layer_to_layer(written: Written) -> None:
    found = census(written, "llama", block_count=3, attention__head_count_kv=[1, 2, 3])
    assert [x.n_head_kv for x in found.attention or ()] == [1, 2, 3]


def test_multi_token_prediction_layers_are_left_out(written: Written) -> None:
    found = census(written, "glm4moe", nextn_predict_layers=1)
    assert (found.n_layer, found.attention_layers) == (11, tuple(range(11)))


@pytest.mark.parametrize(
    ("arch", "keys", "window", "full"),
    [
        ("gemma3", {"attention__sliding_window": 64}, 64, (5, 11)),
        ("gemma3", {"attention__sliding_window": 64, "attention__sliding_window_pattern": 3}, 64, (2, 5, 8, 11)),
        ("gemma3", {"attention__sliding_window": 64, "attention__sliding_window_pattern": [1, 0] * 6}, 64, tuple(range(1, 12, 2))),
        ("gemma3", {}, None, tuple(range(12))),
        ("gemma3", {"attention__sliding_window": 0}, None, tuple(range(12))),
        ("gemma2", {}, 4096, tuple(range(1, 12, 2))),
        ("gpt-oss", {"attention__sliding_window": 128}, 128, tuple(range(1, 12, 2))),
        ("qwen2", {"attention__sliding_window": 64}, None, tuple(range(12))),
        ("afmoe", {"attention__sliding_window": 64}, 64, (3, 7, 11)),
        ("laguna", {"attention__sliding_window": 64}, 64, (0, 4, 8)),
        ("cohere2moe", {"attention__sliding_window": 64, "attention__sliding_window_pattern": 3}, 64, (0, 3, 6, 9)),
        ("exaone-moe", {}, 128, (3, 7, 11)),
        ("gemma3n", {"attention__sliding_window": 64}, 64, (4, 9)),
        ("gemma4", {"attention__sliding_window": 64, "attention__sliding_window_pattern": [1, 1, 0] * 4}, 64, (2, 5, 8, 11)),
        ("llama4", {}, 8192, (3, 7, 11)),
        ("llama4", {"attention__sliding_window": 64}, 8192, (3, 7, 11)),
        ("llama4", {"attention__sliding_window": 0}, None, tuple(range(12))),
        ("smallthinker", {"attention__sliding_window": 64}, 4096, (0, 4, 8)),
        ("smallthinker", {}, None, tuple(range(12))),
        ("plamo3", {"attention__sliding_window": 64, "attention__sliding_window_pattern": 0}, 64, ()),
    ],
)  # fmt: skip
def test_which_layers_slide(
    written: Written, arch: str, keys: dict[str, Any], window: int | None, full: tuple[int, ...]
) -> None:
    found = census(written, arch, **keys)
    assert found.sliding_window == window
    assert found.sliding_layers == tuple(il for il in range(12) if il not in full)


@pytest.mark.parametrize(
    ("arch", "keys", "attention", "sizes"),
    [
        ("qwen35moe", STATES | {"ssm.group_count": 2}, (3, 7, 11), (3 * (32 + 2 * 2 * 8), 8 * 32)),
        ("qwen3next", STATES | {"ssm.group_count": 2, "full_attention_interval": 6}, (5, 11), (192, 256)),
        ("qwen35", STATES | {"ssm.group_count": 1, "attention.recurrent_layers": [True, False] * 6}, (1, 3, 5, 7, 9, 11), (144, 256)),
        ("jamba", STATES | {"attention.head_count_kv": [0, 0, 2] * 4}, (2, 5, 8, 11), (96, 256)),
        ("lfm2", {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 0, 2] * 4}, (2, 5, 8, 11), (192, 0)),
        ("mamba", STATES | {"attention.head_count": None}, (), (96, 256)),
        ("arwkv7", {"attention.head_count": None, "wkv.head_size": 32, "token_shift_count": 1}, (), (96, 96 * 32)),
        ("plamo2", STATES | {"attention.head_count_kv": [0, 0, 2] * 4, "ssm.group_count": 0}, (2, 5, 8, 11), (96, 256)),
        ("minimax-01", {"attention.key_length": 8}, (7,), (0, 6 * 8 * 8)),
        ("kimi-linear", {"attention.head_count_kv": [0, 0, 1] * 4, "ssm.conv_kernel": 4, "kda.head_dim": 8}, (2, 5, 8, 11), (3 * 3 * 6 * 8, 6 * 64)),
        ("rwkv7", {"attention.head_count": None, "wkv.head_size": 32, "token_shift_count": 2}, (), (192, 96 * 32)),
    ],
)  # fmt: skip
def test_which_layers_are_recurrent_and_how_large(
    written: Written, arch: str, keys: dict[str, Any], attention: tuple[int, ...], sizes: tuple[int, int]
) -> None:
    found = census_of_gguf(written(arch, keys))
    assert found.recurrent is not None
    assert found.attention_layers == attention
    assert found.recurrent_layers == tuple(il for il in range(12) if il not in attention)
    assert {(x.r_values, x.s_values) for x in found.recurrent} == {sizes}


def test_a_layer_of_falcon_h1_is_both_and_one_of_nemotron_h_may_be_neither(written: Written) -> None:
    both = census_of_gguf(written("falcon-h1", STATES | {"ssm.group_count": 1}))
    assert both.attention_layers == both.recurrent_layers == tuple(range(12))
    keys = {"attention.head_count_kv": [0, 2, 0] * 4, "feed_forward_length": [0, 0, 64] * 4, "ssm.group_count": 1}
    either = census_of_gguf(written("nemotron_h", STATES | keys))
    assert (either.attention_layers, either.recurrent_layers) == ((1, 4, 7, 10), (0, 3, 6, 9))


def test_a_latent_cache_holds_keys_alone_and_a_sliding_layer_may_have_heads_of_its_own(written: Written) -> None:
    latent = census_of_gguf(
        written("kimi-k3", {"attention.head_count_kv": [0, 1] * 6, "attention.key_length": 40, "ssm.conv_kernel": 4, "kda.head_dim": 8})
    )  # fmt: skip
    assert {(x.n_head_kv, x.key_dim, x.value_dim) for x in latent.attention or ()} == {(1, 40, 0)}
    keys = {"attention.sliding_window": 64, "attention.sliding_window_pattern": [1, 0] * 6}
    heads = {"attention.key_length": 32, "attention.key_length_swa": 8, "attention.value_length_swa": 24}
    sliding = census_of_gguf(written("gemma4", keys | heads))
    assert [(x.key_dim, x.value_dim) for x in sliding.attention or ()] == [(8, 24), (32, 16)] * 6


def test_layers_that_use_the_cache_of_an_earlier_one_have_none(written: Written) -> None:
    keys = {
        "attention.sliding_window": 64,
        "attention.sliding_window_pattern": [1, 0] * 6,
        "attention.shared_kv_layers": 4,
    }
    assert census_of_gguf(written("gemma4", keys)).attention_layers == tuple(range(8))
    deep = census_of_gguf(written("gemma3n", {"attention.sliding_window": 64, "block_count": 30}))
    assert deep.attention_layers == tuple(range(20))


def test_a_pattern_that_the_file_must_give_is_missed(written: Written) -> None:
    assert "mimo2.attention.sliding_window_pattern is missing" in refusal(
        written("mimo2", {"attention.sliding_window": 64})
    )


def test_an_architecture_without_a_rule_is_unknown_not_guessed(written: Written) -> None:
    found = census(written, "deepseek2", attention__kv_lora_rank=512)
    assert (found.arch, found.n_layer, found.n_embd) == ("deepseek2", 12, 96)
    assert (found.attention, found.recurrent, found.sliding_layers) == (None, None, None)
    assert census(written, "llama", attention__head_count=[0] * 12).attention is None
    windowed = census(written, "deepseek4", attention__sliding_window=64)
    assert (windowed.sliding_window, windowed.attention, windowed.sliding_layers) == (64, None, None)


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        ("llama", {"block_count": None}, "llama.block_count is missing"),
        ("llama", {"block_count": "many"}, "llama.block_count is 'many', not a count"),
        ("llama", {"block_count": 100_000}, "not within 1 to 512"),
        ("llama", {"nextn_predict_layers": 12}, "not within 1 to 512"),
        ("llama", {"attention.head_count_kv": [1, 2]}, "one count for each of 12 layers, it holds 2"),
        ("qwen35", STATES | {"full_attention_interval": 0}, "full_attention_interval is 0"),
        ("mamba2", {"ssm.inner_size": 32}, "mamba2.ssm.state_size is missing"),
    ],
)
def test_a_file_without_what_every_model_has_is_refused(
    written: Written, arch: str, keys: dict[str, Any], message: str
) -> None:
    path = written(arch, keys)
    assert message in refusal(path)
    assert refusal(path).startswith(f"{path}: ")


@pytest.fixture(scope="module")
def good() -> bytes:
    return models.path("qwen3-mini-32").read_bytes()


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "damaged.gguf"


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_ends_too_early_is_refused(share: float, good: bytes, damaged: Path) -> None:
    damaged.write_bytes(good[: int(share * len(good))])
    with pytest.raises(GGUFError):
        census_of_gguf(damaged)


@given(size=st.integers(24, 12_000))
def test_a_file_that_ends_within_its_head_is_refused(size: int, good: bytes, damaged: Path) -> None:
    damaged.write_bytes(good[:size])
    with pytest.raises(GGUFError):
        census_of_gguf(damaged)


def test_missing_tensor_data_is_named_with_both_sizes(good: bytes, damaged: Path) -> None:
    damaged.write_bytes(good[:-1])
    with pytest.raises(
        GGUFError, match=rf"blk.3.ffn_down.weight ends at byte {len(good)}, the file has {len(good) - 1}"
    ):
        census_of_gguf(damaged)


def refusal(path: Path) -> str:
    """Why the file is refused; empty when it is not."""
    try:
        census_of_gguf(path)
    except GGUFError as error:
        return str(error)
    return ""


@given(at=st.integers(0, 12_000), byte=st.integers(0, 255))
def test_a_wrong_byte_in_the_head_gives_a_census_or_a_refusal(at: int, byte: int, good: bytes, damaged: Path) -> None:
    damaged.write_bytes(good[:at] + bytes([byte]) + good[at + 1 :])
    assert "\n" not in refusal(damaged)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"", "empty"),
        (b"GGML", "not a GGUF file: it begins with b'GGML'"),
        (b"GGUF\x01\0\0\0", "version 1"),
        (b"GGUF\0\0\0\x03", "only little-endian"),
    ],
)
def test_a_foreign_file_is_refused(start: bytes, message: str, good: bytes, damaged: Path) -> None:
    damaged.write_bytes(start and start + good[len(start) :])
    with pytest.raises(GGUFError, match=message):
        census_of_gguf(damaged)


def test_a_file_that_is_not_there_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        census_of_gguf(tmp_path / "none.gguf")
