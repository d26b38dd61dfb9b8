"""A context of the build under test: decode, memory operations, state."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .errors import BuildError, DecodeError, ModelError, StateError
from .library import AbortCallback, Batch, EvalCallback
from .model import Model

#: ggml type numbers of the cache types that upstream llama.cpp offers.
CACHE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
#: Bits of the KVarN types, which no upstream build has. They are no ggml types: a fork's context takes them apart.
KVARN_BITS = {f"kvarn{bits}": bits for bits in (2, 3, 4, 5, 6, 8)}
_FLASH = {"auto": -1, "off": 0, "on": 1}

Logits = npt.NDArray[np.float32]
Blob = npt.NDArray[np.uint8]
Outputs = Literal["last", "all", "none"]
CacheSide = Literal["k", "v"]

# How llama.cpp names a cache tensor, and the view of it from its first row that a graph writes through; newer builds
# put the name of the cache before the side.
_TENSOR_FUNCTIONS = ("ggml_get_name", "ggml_get_data", "ggml_nbytes")
_CACHE_VIEW = re.compile(rb"cache_\w*([kv])_l(\d+)(?: \(view\))?")


class StateFlags(IntFlag):
    """Flags of the `_ext` state functions."""

    FULL = 0
    PARTIAL_ONLY = 1
    ON_DEVICE = 2


@dataclass(frozen=True)
class ContextSettings:
    """What a context is made with; sizes are in tokens.

    Flash attention is off and one thread is used unless asked otherwise: parity needs the least noisy path, and two
    spinning threads slow tiny models down. With `reach_cache` the build's own cache tensors are looked for, so that
    `Context.cache_rows` can read and write them in place. `kv_tail` rows of a precision tail, and KVarN for both types,
    are asked of builds that have them as the fork BeeLlama does (see layouts.yaml).
    """

    n_ctx: int = 1024
    n_batch: int = 1024
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_rs_seq: int = 0
    n_threads: int = 1
    flash_attn: Literal["auto", "off", "on"] = "off"
    type_k: str = "f16"
    type_v: str = "f16"
    swa_full: bool = False
    kv_unified: bool = False
    reach_cache: bool = False
    kv_tail: int = 0

    def __post_init__(self) -> None:
        known = (*CACHE_TYPES, *KVARN_BITS)
        for name in ("type_k", "type_v"):
            if getattr(self, name) not in known:
                raise ModelError(f"{name}={getattr(self, name)!r}: no such cache type; choose from {', '.join(known)}")
        if (self.type_k in KVARN_BITS) != (self.type_v in KVARN_BITS):
            raise ModelError(f"type_k={self.type_k!r}, type_v={self.type_v!r}: KVarN keeps both; name it for both")
        if self.flash_attn not in _FLASH:
            raise ModelError(f"flash_attn={self.flash_attn!r}: choose from {', '.join(_FLASH)}")

    def changed(self, **settings: Any) -> ContextSettings:
        """A copy with some settings replaced."""
        return replace(self, **settings)


@dataclass
class TokenBatch:
    """One `llama_decode` call: n tokens or n embeddings.

    Attributes:
        tokens: int32 [n], or None when `embeddings` is given.
        embeddings: float32 [n, n_embd], or None.
        positions: int32 [n]; [4, n] (t, y, x, z) for embeddings of a model with multi-dimensional positions; None lets
            the build number them itself.
        sequences: per token the sequence ids it belongs to; one int for all tokens.
        outputs: bool [n], which tokens give logits.

    """

    tokens: npt.NDArray[np.int32] | None
    positions: npt.NDArray[np.int32] | None
    outputs: npt.NDArray[np.int8]
    sequences: int | Sequence[Sequence[int]] = 0
    embeddings: npt.NDArray[np.float32] | None = None
    _kept: list[Any] = field(default_factory=list, repr=False)

    def __len__(self) -> int:
        return len(self.outputs)

    def as_struct(self) -> Batch:
        """The `llama_batch`, pointing into this object's arrays, which must outlive the call."""
        n = len(self)
        if isinstance(self.sequences, int):  # all tokens point at the one id
            counts, ids = np.ones(n, np.int32), np.array([self.sequences], np.int32)
            pointers = np.full(n, ids.ctypes.data, np.uint64)
        else:
            counts = np.fromiter((len(s) for s in self.sequences), np.int32, n)
            ids = np.fromiter((i for s in self.sequences for i in s), np.int32, int(counts.sum()))
            starts = np.concatenate(([0], np.cumsum(counts[:-1], dtype=np.int64))) * ids.itemsize
            pointers = (ids.ctypes.data + starts).astype(np.uint64)
        arrays = [
            None if self.tokens is None else np.ascontiguousarray(self.tokens, np.int32),
            None if self.embeddings is None else np.ascontiguousarray(self.embeddings, np.float32),
            None if self.positions is None else np.ascontiguousarray(self.positions, np.int32),
            counts,
            pointers,
            np.ascontiguousarray(self.outputs, np.int8),
        ]
        self._kept = [*arrays, ids]
        return Batch(n, *[None if a is None else a.ctypes.data for a in arrays])


class Context:
    """One `llama_context`. Use as a context manager.

    Attributes:
        borrows_logits: logits are the build's own memory, which the next call overwrites, and no copies; for whoever
            decodes in calls of at most `n_batch` and is done with them by then.

    Every setting that the build can report is read back when the context is made: a struct layout that put a value into
    the wrong field stops here.

    Attributes:
        seconds: wall time spent in `llama_decode` so far, without what Python does around it; CPU builds compute within
            the call.

    Raises:
        ModelError: the build refused to make the context.
        BuildError: the read-back failed.

    """

    def __init__(self, model: Model, settings: ContextSettings | None = None) -> None:
        self.model = model
        self.library = model.library
        self.settings = settings or ContextSettings()
        asked = self.settings
        params = self.library.default_params(self.library.context_layout, "llama_context_default_params")
        params.n_ctx, params.n_batch, params.n_ubatch = asked.n_ctx, min(asked.n_batch, asked.n_ctx), asked.n_ubatch
        params.n_seq_max = asked.n_seq_max
        params.n_threads = params.n_threads_batch = asked.n_threads
        params.flash_attn_type = _FLASH[asked.flash_attn]
        self._choose_cache(params)
        params.offload_kqv = params.op_offload = False
        params.swa_full, params.kv_unified, params.no_perf = asked.swa_full, asked.kv_unified, False
        if self.library.context_layout.has("n_rs_seq"):
            params.n_rs_seq = asked.n_rs_seq
        self.borrows_logits = False
        self._cache: dict[tuple[CacheSide, int], tuple[int, int]] = {}  # address and bytes
        self._cache_known = False
        self._on_node = EvalCallback(self._note_cache_tensor)
        if asked.reach_cache and all(self.library.has(name) for name in _TENSOR_FUNCTIONS):
            params.cb_eval = ctypes.cast(self._on_node, ctypes.c_void_p)
        self.handle: int | None = self.library.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise ModelError(
                f"model {model.path.name}: the build refused to make a context with {asked} "
                f"({self.library.last_error() or 'it gave no reason'})"
            )
        self._read_back()
        self.memory: int = self.library.llama_get_memory(self.handle)
        self.seconds = 0.0
        self._abort: Any = None

    def _choose_cache(self, params: Any) -> None:
        """Set cache types and tail, or ModelError where this build has no place for them."""
        asked = self.settings
        if asked.kv_tail:
            if not self.library.has_tail:
                raise ModelError(f"{self.library.path}: this build has no precision tail of its own")
            params.kv_tail_tokens = asked.kv_tail
        if asked.type_k not in KVARN_BITS:
            params.type_k, params.type_v = CACHE_TYPES[asked.type_k], CACHE_TYPES[asked.type_v]
            return
        if not self.library.has_kvarn:
            raise ModelError(f"{self.library.path}: this build has no KVarN types")
        key, value = KVARN_BITS[asked.type_k], KVARN_BITS[asked.type_v]
        params.kvarn_type = self.library.llama_kvarn_type_from_name(f"kvarn_k{key}v{value}_g128".encode())
        params.kvarn_key_bits, params.kvarn_value_bits = key, value

    def _read_back(self) -> None:
        asked, library = self.settings, self.library
        expected = {
            "n_seq_max": asked.n_seq_max,
            "n_threads": asked.n_threads,
            "n_threads_batch": asked.n_threads,
            "n_ubatch": min(asked.n_ubatch, self.n_batch),
        }
        seen = {name: getattr(library, f"llama_{name}")(self.handle) for name in expected}
        wrong = [
            f"{name} set to {expected[name]}, read {seen[name]}" for name in expected if seen[name] != expected[name]
        ]
        if not min(asked.n_ctx, self.model.n_ctx_train) <= self.n_ctx < asked.n_ctx + 256 * asked.n_seq_max:
            wrong.append(f"n_ctx set to {asked.n_ctx}, read {self.n_ctx}")
        if library.has("llama_n_ctx_seq") and asked.n_seq_max > 1:
            per_sequence = library.llama_n_ctx_seq(self.handle)
            if (per_sequence == self.n_ctx) != asked.kv_unified:
                wrong.append(
                    f"kv_unified set to {asked.kv_unified}, read {self.n_ctx} cells, {per_sequence} a sequence"
                )
        if self.n_rs_seq not in (0, asked.n_rs_seq):
            wrong.append(f"n_rs_seq set to {asked.n_rs_seq}, read {self.n_rs_seq}")
        if wrong:
            self.close()
            raise BuildError(
                f"{library.path}: struct layout {library.context_layout.id} failed its read-back ({'; '.join(wrong)}); "
                "a wrong layout would give wrong results, so the run stops here"
            )

    # -- what the context is

    @property
    def n_ctx(self) -> int:
        """Cells for attention, over all sequences."""
        return int(self.library.llama_n_ctx(self.handle))

    @property
    def n_batch(self) -> int:
        """Most tokens that one decode call may hold; more abort the process."""
        return int(self.library.llama_n_batch(self.handle))

    @property
    def n_rs_seq(self) -> int:
        """Recurrent snapshots per sequence for rollback; 0 where the build or the model has none."""
        return int(self.library.llama_n_rs_seq(self.handle)) if self.library.has("llama_n_rs_seq") else 0

    # -- decode

    def decode(
        self,
        tokens: npt.ArrayLike,
        *,
        start: int | None = None,
        sequence: int = 0,
        outputs: Outputs = "last",
    ) -> Logits:
        """Decode tokens into one sequence, in calls of at most `n_batch`.

        Args:
            tokens: int [n], n >= 1.
            start: position of the first token; None continues after the sequence's last position.
            sequence: id of the sequence.
            outputs: which tokens give logits.

        Returns:
            float32 [1, n_vocab], [n, n_vocab] or [0, n_vocab]; a copy.

        Raises:
            DecodeError: the build returned other than 0.

        """
        ids = np.ascontiguousarray(tokens, np.int32)
        first = self.pos_max(sequence) + 1 if start is None else start
        positions = np.arange(first, first + len(ids), dtype=np.int32)
        flags = np.full(len(ids), outputs == "all", np.int8)
        if outputs == "last":
            flags[-1] = 1
        return self._in_calls(
            len(ids), lambda part: TokenBatch(ids[part], positions[part], flags[part], sequence), self.n_batch
        )

    def decode_embeddings(
        self,
        embeddings: npt.NDArray[np.float32],
        positions: npt.NDArray[np.int32],
        *,
        sequence: int = 0,
        outputs: Outputs = "last",
    ) -> Logits:
        """Decode embeddings, float32 [n, n_embd], at positions int32 [n] or [4, n] (t, y, x, z); see `decode`."""
        n = len(embeddings)
        flags = np.full(n, outputs == "all", np.int8)
        if outputs == "last":
            flags[-1] = 1
        return self._in_calls(
            n,
            lambda part: TokenBatch(None, positions[..., part], flags[part], sequence, embeddings[part]),
            self.n_batch,
        )

    def _in_calls(self, n: int, batch: Callable[[slice], TokenBatch], size: int) -> Logits:
        rows = []
        for begin in range(0, n, size):
            part = batch(slice(begin, min(begin + size, n)))
            code = self.process(part)
            if code != 0:
                raise DecodeError(
                    code,
                    f"llama_decode returned {code} for {len(part)} tokens at {begin} of {n} "
                    f"({self.library.last_error() or 'no reason logged'})",
                )
            rows.append(self.logits(int(np.count_nonzero(part.outputs))))
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def process(self, batch: TokenBatch) -> int:
        """One `llama_decode` call as it is; returns the build's code and raises nothing."""
        struct, before = batch.as_struct(), self.library.seconds
        code = int(self.library.llama_decode(self.handle, struct))
        self.seconds += self.library.seconds - before
        self._cache_known = bool(self._cache)
        return code

    def logits(self, n_outputs: int) -> Logits:
        """The last call's logits, float32 [n_outputs, n_vocab]; a copy unless `borrows_logits`."""
        n_vocab = self.model.n_vocab
        if n_outputs == 0:
            return np.empty((0, n_vocab), np.float32)
        address = self.library.llama_get_logits(self.handle)
        if not address:
            raise StateError(f"llama_get_logits gave no logits where {n_outputs} rows were asked for")
        view = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (n_outputs, n_vocab))
        return view if self.borrows_logits else view.copy()

    def on_abort(self, asks: Callable[[], bool] | None) -> None:
        """Install a function that the build asks between graph nodes whether to abort; None removes it."""
        self._abort = AbortCallback(lambda _: asks()) if asks else AbortCallback()
        self.library.llama_set_abort_callback(self.handle, self._abort, None)

    def set_threads(self, n_threads: int) -> None:
        """Change the number of threads for prefill and decode."""
        self.library.llama_set_n_threads(self.handle, n_threads, n_threads)

    def perf_counts(self) -> dict[str, float]:
        """The build's own counters: p_eval_ms, eval_ms, n_p_eval, n_eval."""
        assert self.handle is not None
        return self.library.perf_counts(self.handle)

    def reset_perf_counts(self) -> None:
        """Set the build's counters to zero."""
        self.library.llama_perf_context_reset(self.handle)

    # -- sequence memory

    def seq_rm(self, sequence: int, begin: int = -1, end: int = -1) -> bool:
        """Remove positions [begin, end) of a sequence; negative ends are open, a negative sequence means all."""
        return bool(self.library.llama_memory_seq_rm(self.memory, sequence, begin, end))

    def seq_cp(self, source: int, destination: int, begin: int = -1, end: int = -1) -> None:
        """Let `destination` hold what `source` holds at [begin, end)."""
        self.library.llama_memory_seq_cp(self.memory, source, destination, begin, end)

    def seq_keep(self, sequence: int) -> None:
        """Remove every other sequence."""
        self.library.llama_memory_seq_keep(self.memory, sequence)

    def seq_add(self, sequence: int, begin: int, end: int, delta: int) -> None:
        """Shift positions [begin, end) by delta. Aborts the process where `can_shift` is false."""
        self.library.llama_memory_seq_add(self.memory, sequence, begin, end, delta)

    def seq_div(self, sequence: int, begin: int, end: int, divisor: int) -> None:
        """Divide positions [begin, end), rounding down."""
        self.library.llama_memory_seq_div(self.memory, sequence, begin, end, divisor)

    def clear(self, *, contents: bool = True) -> None:
        """Forget every sequence; with `contents`, zero the buffers too."""
        self.library.llama_memory_clear(self.memory, contents)

    def pos_min(self, sequence: int = 0) -> int:
        """Smallest position held for the sequence, -1 when it is empty."""
        return int(self.library.llama_memory_seq_pos_min(self.memory, sequence))

    def pos_max(self, sequence: int = 0) -> int:
        """Largest position held for the sequence, -1 when it is empty."""
        return int(self.library.llama_memory_seq_pos_max(self.memory, sequence))

    @property
    def can_shift(self) -> bool:
        """Whether positions of this memory can be shifted."""
        return bool(self.library.llama_memory_can_shift(self.memory))

    # -- the cache in place

    def _note_cache_tensor(self, tensor: int, _asks: bool, _: int | None) -> bool:
        """Keep where the cache tensors lie that the first graph uses; no node is ever waited for."""
        if not self._cache_known and (found := _CACHE_VIEW.fullmatch(self.library.ggml_get_name(tensor))):
            side: CacheSide = "k" if found[1] == b"k" else "v"
            place = self.library.ggml_get_data(tensor), self.library.ggml_nbytes(tensor)
            _, known = self._cache.get((side, int(found[2])), (0, 0))
            if place[1] > known:  # the view that is written through is the whole tensor, the one that is read is not
                self._cache[side, int(found[2])] = place
        return False

    def cache_rows(self, side: CacheSide, layer: int, n_rows: int, row_size: int) -> Blob | None:
        """The first rows of a cache tensor in the build's own memory, uint8 [n_rows, row_size], writable.

        Row i is cell i of the first stream; V has rows only with flash attention on. None where the tensor was not
        found: without `reach_cache`, before the first decode, or in a build that does not tell. The caller answers for
        the size of a row, and compares with a saved state before it trusts the place. Valid until the context closes.
        """
        address, n_bytes = self._cache.get((side, layer), (0, 0))
        if not address:
            return None
        if n_rows * row_size > n_bytes:
            raise StateError(f"{side} of layer {layer} takes {n_bytes} bytes, not {n_rows} rows of {row_size}")
        return np.ctypeslib.as_array((ctypes.c_uint8 * (n_rows * row_size)).from_address(address)).reshape(
            n_rows, row_size
        )

    def cache_bytes(self, side: CacheSide, layer: int) -> int | None:
        """Bytes of a cache tensor, all its cells; None as `cache_rows`."""
        return self._cache.get((side, layer), (0, None))[1]

    # -- state in memory

    def announced_bytes(self, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        """Bytes that the build says the sequence's state takes."""
        if flags:
            return int(self.library.llama_state_seq_get_size_ext(self.handle, sequence, flags))
        return int(self.library.llama_state_seq_get_size(self.handle, sequence))

    def save(self, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> Blob:
        """The sequence's state, uint8 [n] with n the bytes the build wrote.

        Raises:
            StateError: the build wrote more than it announced, or nothing.

        """
        blob = np.empty(self.announced_bytes(sequence, flags), np.uint8)
        target, size = blob.ctypes.data, len(blob)
        if flags:
            written = self.library.llama_state_seq_get_data_ext(self.handle, target, size, sequence, flags)
        else:
            written = self.library.llama_state_seq_get_data(self.handle, target, size, sequence)
        return self._written(blob, written, f"sequence {sequence} ({flags!r})")

    def save_into(self, buffer: Blob, sequence: int = 0) -> int:
        """Write the sequence's state into a buffer that may be too small; returns the bytes that the build says it wrote."""
        return int(self.library.llama_state_seq_get_data(self.handle, buffer.ctypes.data, len(buffer), sequence))

    def load(self, blob: Blob, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        """Restore a sequence from a blob; returns the bytes the build consumed, 0 when it refused."""
        source = np.ascontiguousarray(blob)
        if flags:
            return int(
                self.library.llama_state_seq_set_data_ext(self.handle, source.ctypes.data, len(source), sequence, flags)
            )
        return int(self.library.llama_state_seq_set_data(self.handle, source.ctypes.data, len(source), sequence))

    def restore(self, blob: Blob, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> None:
        """Load a blob that must fit; raises `StateError` when the build refuses it."""
        if self.load(blob, sequence, flags) == 0:
            raise StateError(f"the build refused to load a state of {len(blob)} bytes that it wrote itself ({flags!r})")

    def announced_context_bytes(self) -> int:
        """Bytes that the build says the whole context's state takes."""
        return int(self.library.llama_state_get_size(self.handle))

    def save_context(self) -> Blob:
        """The whole context's state, uint8 [n]; raises as `save`."""
        blob = np.empty(self.announced_context_bytes(), np.uint8)
        written = self.library.llama_state_get_data(self.handle, blob.ctypes.data, len(blob))
        return self._written(blob, written, "the whole context")

    def load_context(self, blob: Blob) -> int:
        """Restore the whole context; returns the bytes the build consumed, 0 when it refused."""
        source = np.ascontiguousarray(blob)
        return int(self.library.llama_state_set_data(self.handle, source.ctypes.data, len(source)))

    @staticmethod
    def _written(blob: Blob, written: int, what: str) -> Blob:
        if written > len(blob):
            raise StateError(f"state of {what}: announced {len(blob)} bytes, wrote {written}")
        if written == 0 and len(blob) > 0:
            raise StateError(f"state of {what}: announced {len(blob)} bytes, wrote none")
        return blob[:written]

    # -- state in files

    def save_file(self, path: str | Path, tokens: npt.ArrayLike = (), sequence: int = 0) -> int:
        """Write a sequence with its tokens to a file; returns the bytes written, 0 when it failed."""
        ids = np.ascontiguousarray(tokens, np.int32)
        return int(
            self.library.llama_state_seq_save_file(self.handle, str(path).encode(), sequence, ids.ctypes.data, len(ids))
        )

    def load_file(
        self, path: str | Path, sequence: int = 0, *, capacity: int = 65536
    ) -> tuple[int, npt.NDArray[np.int32]]:
        """Read a sequence from a file; returns the bytes consumed (0 when refused) and its tokens, int32 [n]."""
        tokens, count = np.empty(capacity, np.int32), ctypes.c_size_t(0)
        consumed = self.library.llama_state_seq_load_file(
            self.handle, str(path).encode(), sequence, tokens.ctypes.data, capacity, ctypes.addressof(count)
        )
        return int(consumed), tokens[: count.value].copy()

    def save_context_file(self, path: str | Path, tokens: npt.ArrayLike = ()) -> bool:
        """Write the whole context with its tokens to a file."""
        ids = np.ascontiguousarray(tokens, np.int32)
        return bool(self.library.llama_state_save_file(self.handle, str(path).encode(), ids.ctypes.data, len(ids)))

    def load_context_file(self, path: str | Path, *, capacity: int = 65536) -> tuple[bool, npt.NDArray[np.int32]]:
        """Read the whole context from a file; returns whether it was accepted, and its tokens, int32 [n]."""
        tokens, count = np.empty(capacity, np.int32), ctypes.c_size_t(0)
        accepted = self.library.llama_state_load_file(
            self.handle, str(path).encode(), tokens.ctypes.data, capacity, ctypes.addressof(count)
        )
        return bool(accepted), tokens[: count.value].copy()

    # -- life

    def close(self) -> None:
        """Free the context; again is harmless."""
        if self.handle is not None:
            self.library.llama_free(self.handle)
            self.handle = None

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
