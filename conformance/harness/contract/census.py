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


def _by_interval(usual: int) -> _RecurrentRule:
    def rule(keys: _Keys, n: int) -> tuple[_Flags, _Flags]:
        if "attention.recurrent_layers" in keys:
            recurrent = tuple(bool(flag) for flag in keys.per_layer("attention.recurrent_layers", n))
        else:
            interval = keys.positive("full_attention_interval", usual)
            recurrent = tuple((il + 1) % interval != 0 for il in range(n))
        return tuple(not flag for flag in recurrent), recurrent

    return rule


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


def _delta_attention(keys: _Keys) -> tuple[int, int]:
    """Three convolutions, of queries, keys and values; a square matrix for each head of the first layer."""
    head_dim, n_head = keys.number("kda.head_dim"), keys.per_layer("attention.head_count", 1)[0]
    return 3 * (keys.positive("ssm.conv_kernel") - 1) * n_head * head_dim, n_head * head_dim**2


def _linear_attention(keys: _Keys) -> tuple[int, int]:
    return 0, keys.per_layer("attention.head_count", 1)[0] * _head_dim(keys, "key") ** 2


def _short_convolution(keys: _Keys) -> tuple[int, int]:
    return keys.number("embedding_length") * (keys.positive("shortconv.l_cache") - 1), 0


_SizeRule = Callable[[_Keys], tuple[int, int]]

_HYBRID: Final[dict[str, tuple[_RecurrentRule, _SizeRule]]] = {
    "qwen3next": (_by_interval(4), _convolution_and_states),
    "qwen35": (_by_interval(4), _convolution_and_states),
    "qwen35moe": (_by_interval(4), _convolution_and_states),
    "minimax-01": (_by_interval(8), _linear_attention),
    "kimi-linear": (_by_head_count, _delta_attention),
    "kimi-k3": (_by_head_count, _delta_attention),
    "bailingmoe3": (_by_head_count, _delta_attention),
    "plamo2": (_by_head_count, _convolution_and_states),
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
    "rwkv6qwen2": _token_shift_and_states,
    "rwkv7": _token_shift_and_states,
    "arwkv7": _token_shift_and_states,
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


@dataclass(frozen=True)
class _Sliding:
    """Which layers slide where the file does not say it.

    Attributes:
        period: one of so many layers sees all tokens; 0: all slide; None: the file must say it.
        dense_first: the one is the first of them, not the last.
        window: tokens a sliding layer sees where the file does not say it; 0: then none slides.
        fixed: tokens it sees whatever else than 0 the file says; None: as many as the file says.

    """

    period: int | None
    dense_first: bool = False
    window: int = 0
    fixed: int | None = None


_SLIDING: Final = {
    "afmoe": _Sliding(4),
    "cohere2": _Sliding(4),
    "cohere2moe": _Sliding(4, dense_first=True),
    "exaone-moe": _Sliding(4, window=128),
    "gemma2": _Sliding(2, window=4096),
    "gemma3": _Sliding(6),
    "gemma3n": _Sliding(5),
    "gemma4": _Sliding(None),
    "gpt-oss": _Sliding(2),
    "granite_swa": _Sliding(None),
    "laguna": _Sliding(4, dense_first=True),
    "lfm2": _Sliding(0),
    "llama4": _Sliding(4, window=8192, fixed=8192),
    "maple": _Sliding(None),
    "mellum": _Sliding(4),
    "mimo2": _Sliding(None),
    "muse-glimmer": _Sliding(4),
    "olmo2": _Sliding(4),
    "plamo3": _Sliding(8),
    "smallthinker": _Sliding(4, dense_first=True, fixed=4096),
    "spark2_5": _Sliding(None),
    "step35": _Sliding(None),
}
_WINDOW_ALONE: Final = frozenset(("deepseek4", "dots3note"))
"""Architectures that slide, with an index or compressed cells beside keys and values, whose layers are not known here."""
_LATENT: Final = frozenset(("kimi-linear", "kimi-k3", "bailingmoe3"))
"""Architectures whose cache holds one compressed row a token, from which keys and values are both computed."""
_GEMMA3N_OWN_CACHES: Final = 20
"""Layers of gemma3n behind so many use the cache of an earlier one."""


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
    if arch in _WINDOW_ALONE:
        return keys.number("attention.sliding_window") or None
    if arch not in _SLIDING:
        return None
    rule = _SLIDING[arch]
    window = keys.number("attention.sliding_window", rule.window)
    return (rule.fixed or window) if window else None


def _layers(
    keys: _Keys, arch: str, n: int, window: int | None
) -> tuple[tuple[AttentionLayer, ...], tuple[RecurrentLayer, ...]] | None:
    if arch in _RECURRENT:
        return (), _recurrent(_RECURRENT[arch](keys), (True,) * n)
    if arch in _HYBRID:
        which, size = _HYBRID[arch]
        attends, recurs = which(keys, n)
        recurrent = _recurrent(size(keys), recurs)
    elif arch in _PLAIN or arch in _SLIDING:
        own = _own_caches(keys, arch, n)
        attends, recurrent = tuple(il < own for il in range(n)), ()
    else:
        return None
    slides = _slides(keys, arch, n) if window else (False,) * n
    attention = _attention(keys, attends, slides, latent=arch in _LATENT)
    return None if attention is None else (attention, recurrent)


def _slides(keys: _Keys, arch: str, n: int) -> _Flags:
    rule, key = _SLIDING[arch], "attention.sliding_window_pattern"
    if keys.is_array(key):
        return tuple(bool(flag) for flag in keys.per_layer(key, n))
    period = keys.number(key, rule.period)
    dense = 0 if rule.dense_first else period - 1
    return tuple(period == 0 or il % period != dense for il in range(n))


def _recurrent(sizes: tuple[int, int], recurs: _Flags) -> tuple[RecurrentLayer, ...]:
    return tuple(RecurrentLayer(il, *sizes) for il, flag in enumerate(recurs) if flag)


def _attention(keys: _Keys, attends: _Flags, slides: _Flags, *, latent: bool) -> tuple[AttentionLayer, ...] | None:
    """None when the first layer has no heads: llama.cpp takes the head dims from there."""
    n = len(attends)
    heads = keys.per_layer("attention.head_count", n)
    if heads[0] == 0:
        return None
    heads_kv = keys.per_layer("attention.head_count_kv", n) if "attention.head_count_kv" in keys else heads

    def layer(il: int) -> AttentionLayer:
        key, value = (_head_dim(keys, side, sliding=slides[il]) for side in ("key", "value"))
        return AttentionLayer(il, heads_kv[il], key, 0 if latent else value, slides[il])

    return tuple(layer(il) for il in range(n) if attends[il])


def _head_dim(keys: _Keys, side: str, *, sliding: bool = False) -> int:
    """Values of a head's key or value."""
    default = keys.number("embedding_length") // keys.per_layer("attention.head_count", 1)[0]
    everywhere = keys.number(f"attention.{side}_length", default)
    return keys.number(f"attention.{side}_length_swa", everywhere) if sliding else everywhere


def _own_caches(keys: _Keys, arch: str, n: int) -> int:
    """How many layers, counted from the first, have a cache; those behind them use that of an earlier one."""
    if arch == "gemma3n":
        return _GEMMA3N_OWN_CACHES
    return n - keys.number("attention.shared_kv_layers", 0) if arch == "gemma4" else n
