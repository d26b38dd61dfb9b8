"""What a model's metadata says its memory must hold: which layers keep keys and values, which keep recurrent state.

The rules follow llama.cpp of 2026-10-01: which layers are recurrent or slide, src/models/*.cpp (``load_arch_hparams``);
which memory a layer gets, ``llama_model::create_memory``; the sizes, ``llama_hparams::n_embd_r`` and ``n_embd_s``.
An architecture without a rule here has no census: its layers are unknown, never guessed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from conformance.harness.contract.gguf_header import GGUFError, GGUFHeader, read_header

__all__ = ["AttentionLayer", "GGUFError", "ModelCensus", "RecurrentLayer", "census_of_gguf"]


@dataclass(frozen=True)
class AttentionLayer:
    """A layer that keeps keys and values; dims are values for each head and token."""

    index: int
    n_head_kv: int
    key_dim: int
    value_dim: int
    sliding: bool = False


@dataclass(frozen=True)
class RecurrentLayer:
    """A layer that keeps recurrent state; sizes in float32 values for each sequence."""

    index: int
    r_values: int
    s_values: int


@dataclass(frozen=True)
class ModelCensus:
    """The memory a model must show.

    Attributes:
        n_layer: layers a forward pass runs; multi-token-prediction layers behind them are left out.
        rope_sections: rotary pairs of the t, y, x and z positions; None when a token has one position.
        sliding_window: tokens a sliding layer sees; None when no layer slides.
        attention: layers with keys and values in order; None when the architecture is unknown here.
        recurrent: layers with recurrent state in order; None when the architecture is unknown here.

    """

    arch: str
    n_layer: int
    n_embd: int
    n_vocab: int | None
    context_length: int
    rope_sections: tuple[int, ...] | None
    sliding_window: int | None
    attention: tuple[AttentionLayer, ...] | None
    recurrent: tuple[RecurrentLayer, ...] | None

    @property
    def attention_layers(self) -> tuple[int, ...] | None:
        """Indices of the layers that keep keys and values."""
        return None if self.attention is None else tuple(layer.index for layer in self.attention)

    @property
    def recurrent_layers(self) -> tuple[int, ...] | None:
        """Indices of the layers that keep recurrent state."""
        return None if self.recurrent is None else tuple(layer.index for layer in self.recurrent)

    @property
    def sliding_layers(self) -> tuple[int, ...] | None:
        """Indices of the attention layers that see the sliding window only."""
        return None if self.attention is None else tuple(layer.index for layer in self.attention if layer.sliding)


class _Keys:
    """The key-values of one architecture, typed."""

    def __init__(self, header: GGUFHeader, arch: str) -> None:
        self._header, self._arch = header, arch

    def number(self, key: str, default: int | None = None) -> int:
        """The integer under ``<arch>.<key>``; without a default its absence is an error."""
        full = f"{self._arch}.{key}"
        value = self._header.values.get(full, default)
        if value is None:
            raise GGUFError(f"the key {full} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise GGUFError(f"{full} is {value!r}, not a count")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """The same, refusing 0."""
        value = self.number(key, default)
        if value == 0:
            raise GGUFError(f"{self._arch}.{key} is 0")
        return value

    def per_layer(self, key: str, n: int, default: int | None = None) -> tuple[int, ...]:
        """The same for a key that holds one number for all ``n`` layers or one for each."""
        full = f"{self._arch}.{key}"
        value = self._header.values.get(full)
        if not isinstance(value, tuple):
            return (self.number(key, default),) * n
        if len(value) < n or not all(isinstance(item, int) and item >= 0 for item in value):
            raise GGUFError(f"{full} must hold one count for each of {n} layers, it holds {len(value)} values")
        return tuple(int(item) for item in value[:n])

    def is_array(self, key: str) -> bool:
        """Whether ``<arch>.<key>`` is there and holds an array."""
        return f"{self._arch}.{key}" in self._header.lengths

    def __contains__(self, key: str) -> bool:
        return f"{self._arch}.{key}" in self._header.values


_MAX_LAYERS: Final = 512
"""LLAMA_MAX_LAYERS, the most that llama.cpp loads."""

_Flags = tuple[bool, ...]
_RecurrentRule = Callable[[_Keys, int], tuple[_Flags, _Flags]]
"""From key-values and layer count: which layers keep keys and values, which keep recurrent state."""


def _by_interval(keys: _Keys, n: int) -> tuple[_Flags, _Flags]:
    if "attention.recurrent_layers" in keys:
        recurrent = tuple(bool(flag) for flag in keys.per_layer("attention.recurrent_layers", n))
    else:
        interval = keys.positive("full_attention_interval", 4)
        recurrent = tuple((il + 1) % interval != 0 for il in range(n))
    return tuple(not flag for flag in recurrent), recurrent


def _by_head_count(keys: _Keys, n: int) -> tuple[_Flags, _Flags]:
    attends = tuple(count > 0 for count in keys.per_layer("attention.head_count_kv", n))
    return attends, tuple(not flag for flag in attends)


def _by_feed_forward(keys: _Keys, n: int) -> tuple[_Flags, _Flags]:
    """A layer is attention, recurrent or feed-forward, never two of them."""
    mixes = [width == 0 for width in keys.per_layer("feed_forward_length", n)]
    attends = [count > 0 for count in keys.per_layer("attention.head_count_kv", n)]
    pairs = list(zip(mixes, attends, strict=True))
    return tuple(mix and attend for mix, attend in pairs), tuple(mix and not attend for mix, attend in pairs)


def _convolution_and_states(keys: _Keys) -> tuple[int, int]:
    inner, state = keys.number("ssm.inner_size"), keys.number("ssm.state_size")
    width = inner + 2 * keys.number("ssm.group_count", 0) * state
    return (keys.positive("ssm.conv_kernel") - 1) * width, state * inner


def _token_shift_and_states(keys: _Keys) -> tuple[int, int]:
    n_embd = keys.number("embedding_length")
    return keys.number("token_shift_count", 2) * n_embd, n_embd * keys.number("wkv.head_size")


def _short_convolution(keys: _Keys) -> tuple[int, int]:
    return keys.number("embedding_length") * (keys.positive("shortconv.l_cache") - 1), 0


_SizeRule = Callable[[_Keys], tuple[int, int]]

_HYBRID: Final[dict[str, tuple[_RecurrentRule, _SizeRule]]] = {
    "qwen3next": (_by_interval, _convolution_and_states),
    "qwen35": (_by_interval, _convolution_and_states),
    "qwen35moe": (_by_interval, _convolution_and_states),
    "jamba": (_by_head_count, _convolution_and_states),
    "granitehybrid": (_by_head_count, _convolution_and_states),
    "lfm2": (_by_head_count, _short_convolution),
    "lfm2moe": (_by_head_count, _short_convolution),
    "nemotron_h": (_by_feed_forward, _convolution_and_states),
    "nemotron_h_moe": (_by_feed_forward, _convolution_and_states),
    "falcon-h1": (lambda _keys, n: ((True,) * n, (True,) * n), _convolution_and_states),
}
_RECURRENT: Final[dict[str, _SizeRule]] = {
    "mamba": _convolution_and_states,
    "mamba2": _convolution_and_states,
    "rwkv6": _token_shift_and_states,
    "rwkv7": _token_shift_and_states,
}
_PLAIN: Final = frozenset(
    (
        *(
            "arcee",
            "bailingmoe",
            "bloom",
            "command-r",
            "dbrx",
            "deepseek",
            "dots1",
            "ernie4_5",
            "ernie4_5-moe",
            "exaone",
        ),
        *("falcon", "gemma", "glm4", "glm4moe", "gpt2", "gptneox", "granite", "granitemoe", "hunyuan-dense"),
        *("hunyuan-moe", "internlm2", "llama", "minicpm", "minimax-m2", "mistral3", "mpt", "nemotron", "olmo", "olmoe"),
        *("orion", "phi2", "plamo", "qwen", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl"),
        *("qwen3vlmoe", "seed_oss", "smollm3", "stablelm", "starcoder", "starcoder2", "xverse"),
    )
)
"""Architectures whose every layer attends to all tokens."""
_SLIDING_PERIOD: Final = {
    "gemma2": 2,
    "gemma3": 6,
    "cohere2": 4,
    "gpt-oss": 2,
    "lfm2": 0,
    "mellum": 4,
    "olmo2": 4,
    "plamo3": 8,
}
"""The last of so many layers sees all tokens, the others slide, when the file does not say otherwise; 0: all slide."""
_SLIDING_DEFAULT_WINDOW: Final = {"gemma2": 4096}


def census_of_gguf(path: Path) -> ModelCensus:
    """The census of the GGUF at ``path``, from its key-values alone.

    Raises:
        GGUFError: no GGUF, damaged, truncated, or without a key that every model has.
        OSError: the file cannot be opened.

    """
    header = read_header(path)
    try:
        return _census(header)
    except GGUFError as error:
        raise GGUFError(f"{path}: {error}") from None


def _census(header: GGUFHeader) -> ModelCensus:
    arch = header.values.get("general.architecture")
    if not isinstance(arch, str) or not arch.isprintable():
        raise GGUFError(f"general.architecture is {arch!r}, not a name")
    keys = _Keys(header, arch)
    n_layer = keys.number("block_count") - keys.number("nextn_predict_layers", 0)
    if not 0 < n_layer <= _MAX_LAYERS:
        raise GGUFError(f"{arch}.block_count less nextn_predict_layers is {n_layer}, not within 1 to {_MAX_LAYERS}")
    window = _sliding_window(keys, arch)
    known = _layers(keys, arch, n_layer, window)
    sections = "rope.dimension_sections"
    return ModelCensus(
        arch=arch,
        n_layer=n_layer,
        n_embd=keys.number("embedding_length"),
        n_vocab=header.lengths.get("tokenizer.ggml.tokens"),
        context_length=keys.number("context_length"),
        rope_sections=keys.per_layer(sections, header.lengths[f"{arch}.{sections}"])
        if keys.is_array(sections)
        else None,
        sliding_window=window,
        attention=known and known[0],
        recurrent=known and known[1],
    )


def _sliding_window(keys: _Keys, arch: str) -> int | None:
    if arch not in _SLIDING_PERIOD:
        return None
    return keys.number("attention.sliding_window", _SLIDING_DEFAULT_WINDOW.get(arch, 0)) or None


def _layers(
    keys: _Keys, arch: str, n: int, window: int | None
) -> tuple[tuple[AttentionLayer, ...], tuple[RecurrentLayer, ...]] | None:
    if arch in _RECURRENT:
        return (), _recurrent(_RECURRENT[arch](keys), (True,) * n)
    if arch in _HYBRID:
        which, size = _HYBRID[arch]
        attends, recurs = which(keys, n)
        recurrent = _recurrent(size(keys), recurs)
    elif arch in _PLAIN or arch in _SLIDING_PERIOD:
        attends, recurrent = (True,) * n, ()
    else:
        return None
    attention = _attention(keys, attends, _slides(keys, arch, n) if window else (False,) * n)
    return None if attention is None else (attention, recurrent)


def _slides(keys: _Keys, arch: str, n: int) -> _Flags:
    pattern = keys.per_layer("attention.sliding_window_pattern", n, _SLIDING_PERIOD[arch])
    if keys.is_array("attention.sliding_window_pattern"):
        return tuple(bool(flag) for flag in pattern)
    return tuple(period == 0 or il % period < period - 1 for il, period in enumerate(pattern))


def _recurrent(sizes: tuple[int, int], recurs: _Flags) -> tuple[RecurrentLayer, ...]:
    return tuple(RecurrentLayer(il, *sizes) for il, flag in enumerate(recurs) if flag)


def _attention(keys: _Keys, attends: _Flags, slides: _Flags) -> tuple[AttentionLayer, ...] | None:
    """None when the first layer has no heads: llama.cpp takes the head dims from there."""
    n = len(attends)
    heads = keys.per_layer("attention.head_count", n)
    if heads[0] == 0:
        return None
    heads_kv = keys.per_layer("attention.head_count_kv", n) if "attention.head_count_kv" in keys else heads
    default_dim = keys.number("embedding_length") // heads[0]
    key_dim = keys.number("attention.key_length", default_dim)
    value_dim = keys.number("attention.value_length", default_dim)
    return tuple(AttentionLayer(il, heads_kv[il], key_dim, value_dim, slides[il]) for il in range(n) if attends[il])
