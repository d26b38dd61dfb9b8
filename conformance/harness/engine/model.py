"""A loaded model of the build under test."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ModelError
from .library import Library, ProgressCallback

_ROPE_TYPES = {-1: "none", 0: "norm", 2: "neox", 8: "mrope", 24: "vision", 40: "imrope"}
_SENTINEL = 0x6C6C616D


class Model:
    """A GGUF loaded on the CPU. Use as a context manager; every `Context` must be closed before it.

    Attributes:
        n_vocab, n_embd, n_layer: as the build read them.
        n_embd_inp: values of one embedding that the model takes; more than n_embd where the vision tower feeds deeper layers.
        n_swa: attention window of the sliding layers in tokens, 0 without one.
        rope_type: "none", "norm", "neox", "mrope", "imrope" or "vision".

    """

    def __init__(self, library: Library, path: str | Path) -> None:
        self.library = library
        self.path = Path(path)
        if not self.path.is_file():
            raise ModelError(f"model {self.path}: no such file; give the path of a GGUF")
        params = library.default_params(library.model_layout, "llama_model_default_params")
        params.n_gpu_layers = 0
        progress: list[int | None] = []

        def on_progress(_: float, sentinel: int | None) -> bool:
            progress.append(sentinel)
            return True

        callback = ProgressCallback(on_progress)
        params.progress_callback = ctypes.cast(callback, ctypes.c_void_p)
        params.progress_callback_user_data = _SENTINEL
        handle = library.llama_model_load_from_file(str(self.path).encode(), params)
        if not handle:
            reason = library.last_error() or "it gave no reason"
            raise ModelError(
                f"model {self.path}: the build refused to load it ({reason}); check the file and its architecture"
            )
        self.handle: int | None = handle
        if not progress or set(progress) != {_SENTINEL}:
            self.close()
            raise ModelError(
                f"{library.path}: struct layout {library.model_layout.id} failed its read-back (the progress callback was "
                "not called with the pointer that was set); a wrong layout would give wrong results, so the run stops here"
            )
        self.n_vocab: int = library.llama_vocab_n_tokens(self.vocabulary)
        self.n_embd: int = library.llama_model_n_embd(handle)
        self.n_embd_inp: int = (
            library.llama_model_n_embd_inp(handle) if library.has("llama_model_n_embd_inp") else self.n_embd
        )
        self.n_layer: int = library.llama_model_n_layer(handle)
        self.n_ctx_train: int = library.llama_model_n_ctx_train(handle)
        self.n_swa: int = library.llama_model_n_swa(handle)
        self.is_recurrent: bool = library.llama_model_is_recurrent(handle)
        self.is_hybrid: bool = library.llama_model_is_hybrid(handle)
        self.n_bytes: int = library.llama_model_size(handle)
        self.n_parameters: int = library.llama_model_n_params(handle)
        rope = library.llama_model_rope_type(handle)
        self.rope_type = _ROPE_TYPES.get(rope, f"type {rope}")

    @property
    def vocabulary(self) -> int:
        """The build's vocabulary pointer."""
        return int(self.library.llama_model_get_vocab(self.handle))

    @property
    def positions_per_embedding(self) -> int:
        """Position components per embedding: 4 with multi-dimensional rotary positions, else 1."""
        return 4 if self.rope_type in {"mrope", "imrope", "vision"} else 1

    def description(self) -> str:
        """What the build calls the model, for example "qwen35moe 0.5B F16"."""
        return self._text(lambda buffer, size: self.library.llama_model_desc(self.handle, buffer, size))

    def metadata(self, key: str) -> str | None:
        """A scalar metadata value as text, or None when the model lacks the key."""
        return (
            self._text(
                lambda buffer, size: self.library.llama_model_meta_val_str(self.handle, key.encode(), buffer, size)
            )
            or None
        )

    def tokenize(self, text: str, *, special: bool = True) -> npt.NDArray[np.int32]:
        """Token ids of a text, int32 [n]; with `special`, chat and vision markers become single tokens."""
        raw = text.encode()
        tokens = np.empty(len(raw) + 8, np.int32)
        n = self.library.llama_tokenize(self.vocabulary, raw, len(raw), tokens.ctypes.data, len(tokens), False, special)
        if n < 0:
            raise ModelError(f"model {self.path}: the build cannot tokenize a text of {len(raw)} bytes (returned {n})")
        return tokens[:n].copy()

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for, markers included."""
        buffer = ctypes.create_string_buffer(256)
        n = self.library.llama_token_to_piece(self.vocabulary, token, buffer, len(buffer), 0, True)
        return buffer.raw[: max(n, 0)]

    def close(self) -> None:
        """Free the model; again is harmless."""
        if self.handle is not None:
            self.library.llama_model_free(self.handle)
            self.handle = None

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _text(call: Any) -> str:
        buffer = ctypes.create_string_buffer(4096)
        return buffer.value.decode(errors="replace") if call(buffer, len(buffer)) >= 0 else ""
