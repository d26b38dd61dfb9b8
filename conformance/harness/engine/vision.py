"""Screenshots as embeddings: libmtmd of the build under test, encoder side only."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from . import abi
from .errors import BuildError, ModelError, StateError
from .library import EvalCallback, Library
from .model import Model

Pixels = npt.NDArray[np.uint8]
"""An image, uint8 [height, width, 3], red first."""

_p, _i, _u, _z = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_size_t
_IMAGE = 1  # mtmd_input_chunk_type
_SENTINEL = 0x6D746D64
_PROMPT_BYTES = 256
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mtmd_default_marker": (ctypes.c_char_p, ()),
    "mtmd_free": (None, (_p,)),
    "mtmd_support_vision": (ctypes.c_bool, (_p,)),
    "mtmd_bitmap_init": (_p, (_u, _u, _p)),
    "mtmd_bitmap_free": (None, (_p,)),
    "mtmd_input_chunks_init": (_p, ()),
    "mtmd_input_chunks_size": (_z, (_p,)),
    "mtmd_input_chunks_get": (_p, (_p, _z)),
    "mtmd_input_chunks_free": (None, (_p,)),
    "mtmd_input_chunk_get_type": (_i, (_p,)),
    "mtmd_input_chunk_get_n_tokens": (_z, (_p,)),
    "mtmd_input_chunk_get_n_pos": (_i, (_p,)),
    "mtmd_input_chunk_get_tokens_image": (_p, (_p,)),
    "mtmd_image_tokens_get_nx": (_z, (_p,)),
    "mtmd_image_tokens_get_ny": (_z, (_p,)),
    "mtmd_tokenize": (_i, (_p, _p, _p, _p, _z)),
    "mtmd_encode_chunk": (_i, (_p, _p)),
    "mtmd_get_output_embd": (_p, (_p,)),
}


@dataclass(frozen=True)
class EncodedImage:
    """An image as the text model reads it.

    Attributes:
        embeddings: float32 [nx * ny, n_embd_inp], row by row from the top left.
        nx, ny: tokens across and down. With multi-dimensional positions the image takes max(nx, ny) positions.

    """

    embeddings: npt.NDArray[np.float32]
    nx: int
    ny: int


def has_vision(library: Library) -> bool:
    """Whether the build comes with a libmtmd that this suite can drive."""
    handle = library.companion("mtmd", "mtmd_init_from_file")
    return handle is not None and all(hasattr(handle, name) for name in _FUNCTIONS)


class Vision:
    """A vision encoder (mmproj GGUF) in front of a model. Use as a context manager; close it before the model.

    A damaged file may pass the loader and end the process at the first image: try a new one in a child process.

    Args:
        model: the text model that the embeddings are for.
        path: the mmproj.
        n_threads: threads for encoding.

    Raises:
        BuildError: the build has no libmtmd, or its parameters are laid out in a way that is not known here.
        ModelError: the file is missing, or the build refused it: another width than the model's, no vision encoder.

    """

    def __init__(self, model: Model, path: str | Path, *, n_threads: int = 1) -> None:
        self.model, self.path = model, Path(path)
        if not self.path.is_file():
            raise ModelError(f"mmproj {self.path}: no such file; give the path of a GGUF")
        if not has_vision(model.library):
            raise BuildError(f"{model.library.path}: has no libmtmd beside it, so it cannot read images")
        library = model.library.companion("mtmd", "mtmd_init_from_file")
        assert library is not None
        self._call = {name: model.library.timed(getattr(library, name), *types) for name, types in _FUNCTIONS.items()}
        seen = abi.probe(library.mtmd_context_params_default)
        layout = abi.recognise("mtmd_context_params", seen, model.library.path)
        params = layout.structure.from_buffer_copy(seen.content[: ctypes.sizeof(layout.structure)])
        self._nodes_of: set[int | None] = set()
        self._on_node = EvalCallback(self._note)
        params.use_gpu = params.print_timings = params.warmup = False
        params.n_threads = n_threads
        params.flash_attn_type = 0
        params.cb_eval = ctypes.cast(self._on_node, _p)
        params.cb_eval_user_data = _SENTINEL
        model.library.log_here(library, "mtmd_log_set", "mtmd_helper_log_set")
        load = model.library.timed(library.mtmd_init_from_file, _p, [ctypes.c_char_p, _p, layout.structure])
        self.handle: int | None = load(str(self.path).encode(), model.handle, params)
        if not self.handle:
            reason = " ".join(model.library.last_error().split()) or "it gave no reason"
            raise ModelError(
                f"mmproj {self.path}: the build refused it for {model.path.name} ({reason}); "
                "give the mmproj that was made for this model"
            )
        if not self._call["mtmd_support_vision"](self.handle):
            self.close()
            raise ModelError(f"mmproj {self.path}: holds no vision encoder; give one for images")

    def _note(self, _node: int, _asks: bool, sentinel: int | None) -> bool:
        """Keep what the build hands back with every node of the encoder's graph; none is waited for."""
        self._nodes_of.add(sentinel)
        return False

    def grid(self, pixels: Pixels) -> tuple[int, int]:
        """Tokens across and down that an image becomes, without encoding it."""
        with _Chunk(self, pixels) as chunk:
            return chunk.nx, chunk.ny

    def encode(self, pixels: Pixels) -> EncodedImage:
        """The embeddings of an image.

        Raises:
            ModelError: the build cannot take the image, or gave another number of embeddings than it announced.
            BuildError: the read-back of the parameters failed.

        """
        with _Chunk(self, pixels) as chunk:
            if self._call["mtmd_encode_chunk"](self.handle, chunk.handle) != 0:
                raise ModelError(
                    f"mmproj {self.path}: the build cannot encode an image of {pixels.shape[1]}x{pixels.shape[0]} pixels "
                    f"({self.model.library.last_error() or 'it gave no reason'})"
                )
            if self._nodes_of != {_SENTINEL}:
                raise BuildError(
                    f"{self.model.library.path}: mtmd_context_params failed its read-back (the callback was not called "
                    "with the pointer that was set); a wrong layout would give wrong results, so the run stops here"
                )
            address = self._call["mtmd_get_output_embd"](self.handle)
            if not address:
                raise StateError("mtmd_get_output_embd gave no embeddings after an image was encoded")
            shape = chunk.nx * chunk.ny, self.model.n_embd_inp
            view = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), shape)
            return EncodedImage(view.copy(), chunk.nx, chunk.ny)

    def close(self) -> None:
        """Free the encoder; again is harmless."""
        if self.handle is not None:
            self._call["mtmd_free"](self.handle)
            self.handle = None

    def __enter__(self) -> Vision:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Chunk:
    """The image chunk of one image, cut into patches but not encoded."""

    def __init__(self, vision: Vision, pixels: Pixels) -> None:
        if pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape or pixels.dtype != np.uint8:
            raise ModelError(f"an image of {pixels.dtype} {list(pixels.shape)}: give uint8 [height, width, 3]")
        self._call = call = vision._call
        height, width, _ = pixels.shape
        data = np.ascontiguousarray(pixels)
        # Builds disagree on whether a text's length stands behind its pointer. A text of 256 bytes reads the same either
        # way: a length of 256, or its bytes as the two flags add_special 0 and parse_special 1.
        marker: bytes = call["mtmd_default_marker"]()
        prompt = ctypes.create_string_buffer(marker.ljust(_PROMPT_BYTES))
        text = (ctypes.c_uint64 * 3)(ctypes.addressof(prompt), _PROMPT_BYTES, 1 << 8)
        bitmap = call["mtmd_bitmap_init"](width, height, data.ctypes.data)
        bitmaps = (_p * 1)(bitmap)
        self._chunks = call["mtmd_input_chunks_init"]()
        code = call["mtmd_tokenize"](vision.handle, self._chunks, ctypes.addressof(text), ctypes.addressof(bitmaps), 1)
        call["mtmd_bitmap_free"](bitmap)
        chunks = [
            call["mtmd_input_chunks_get"](self._chunks, i) for i in range(call["mtmd_input_chunks_size"](self._chunks))
        ]
        images = [chunk for chunk in chunks if call["mtmd_input_chunk_get_type"](chunk) == _IMAGE]
        if code != 0 or len(images) != 1:
            self.close()
            raise ModelError(
                f"mmproj {vision.path}: the build cannot take an image of {width}x{height} pixels (code {code}, "
                f"{len(images)} image chunks)"
            )
        self.handle = images[0]
        tokens = call["mtmd_input_chunk_get_tokens_image"](self.handle)
        self.nx, self.ny = int(call["mtmd_image_tokens_get_nx"](tokens)), int(call["mtmd_image_tokens_get_ny"](tokens))
        n = int(call["mtmd_input_chunk_get_n_tokens"](self.handle))
        if n != self.nx * self.ny:
            self.close()
            raise ModelError(
                f"mmproj {vision.path}: an image of {self.nx}x{self.ny} tokens is announced with {n}; only projectors "
                "that lay tokens out as a grid are known here"
            )

    def close(self) -> None:
        self._call["mtmd_input_chunks_free"](self._chunks)

    def __enter__(self) -> _Chunk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
