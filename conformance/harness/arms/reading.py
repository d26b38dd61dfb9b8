"""What a model reads of a transcript: token ids of its texts, embeddings of its screenshots."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image as Picture
from PIL import UnidentifiedImageError

from conformance.harness import builds
from conformance.harness.engine import Model, Pixels, Vision
from conformance.harness.prompts.layouts import PromptError, Vocabulary
from conformance.harness.prompts.transcript import Screenshot

from .terminal_slot import Image

PIXELS_PER_TOKEN = 32
"""Along one embedding of a Qwen-VL kind of vision tower: patches of 16 pixels, two by two merged."""
_KEPT_IMAGES = 32


def vocabulary_of(model: Model) -> Vocabulary:
    """How a model reads texts."""
    return Vocabulary(model.n_vocab, lambda text: model.tokenize(text).tolist())


def drawn_pixels(screenshot: Screenshot) -> Pixels:
    """Noise of the size that becomes a screenshot's tokens, uint8 [32 height, 32 width, 3]; its seed chooses it."""
    shape = PIXELS_PER_TOKEN * screenshot.height, PIXELS_PER_TOKEN * screenshot.width, 3
    return np.random.default_rng(screenshot.seed).integers(0, 256, shape, np.uint8)


def pixels_of(path: str) -> Pixels:
    """The pixels of an image file, uint8 [height, width, 3]; PromptError when it cannot be read."""
    try:
        with Picture.open(path) as picture:
            return np.asarray(picture.convert("RGB"))
    except UnidentifiedImageError:
        raise PromptError(f"{path}: not an image that can be read; give a PNG or JPEG") from None
    except OSError as error:
        raise PromptError(f"{path}: {error.strerror or error}; give an image file that can be read") from None


class Embeddings:
    """Encoded images by the hash of their pixels: a screenshot that is shown again is not encoded again.

    Args:
        encode: pixels to an image.
        keep: how many images are kept; the ones not asked for longest are dropped.

    Attributes:
        n_encoded: images that were encoded, not found.

    """

    def __init__(self, encode: Callable[[Pixels], Image], keep: int = _KEPT_IMAGES) -> None:
        self._encode, self._keep = encode, keep
        self._kept: OrderedDict[str, Image] = OrderedDict()
        self.n_encoded = 0

    def __call__(self, pixels: Pixels) -> Image:
        """The image of these pixels."""
        key = self.key(pixels)
        if key not in self._kept:
            self._kept[key] = self._encode(pixels)
            self.n_encoded += 1
            if len(self._kept) > self._keep:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def key(self, pixels: Pixels) -> str:
        """SHA-256 over size and pixels."""
        return hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).hexdigest()


class Reader:
    """Reads screenshots for one model, through a vision tower or as noise that costs no encoder.

    Args:
        model: the text model.
        encode: pixels to an image, None for noise.
        folder: where relative paths of screenshots start.

    """

    def __init__(self, model: Model, encode: Callable[[Pixels], Image] | None = None, folder: Path = Path()) -> None:
        self.model, self.encode, self.folder = model, encode, folder
        self.vocabulary = vocabulary_of(model)

    def image(self, screenshot: Screenshot) -> Image:
        """The embeddings of a screenshot.

        Raises:
            PromptError: it names a file and there is no vision tower, or its tokens are not the announced ones.

        """
        if self.encode is None:
            if screenshot.path is not None:
                raise PromptError(f"{screenshot.path}: an image file needs a vision tower; give it with --mmproj")
            return Image(_noise(screenshot, self.model.n_embd_inp), screenshot.width, screenshot.height)
        path = screenshot.path
        image = self.encode(drawn_pixels(screenshot) if path is None else pixels_of(str(self.folder / path)))
        if (image.width, image.height) != (screenshot.width, screenshot.height):
            raise PromptError(
                f"{path or f'a drawn screenshot of seed {screenshot.seed}'}: becomes {image.width} x {image.height} tokens, "
                f"the transcript says {screenshot.width} x {screenshot.height}; correct its width and height there"
            )
        return image


def encoder_of(vision: Vision) -> Callable[[Pixels], Image]:
    """A vision tower as what `Embeddings` and `Reader` ask for."""

    def encode(pixels: Pixels) -> Image:
        encoded = vision.encode(pixels)
        return Image(encoded.embeddings, encoded.nx, encoded.ny)

    return encode


def try_vision(build: str, model: str, mmproj: str) -> None:
    """Encode one small image; what a child process is asked to do before this one trusts a file that was never tried.

    Raises:
        EngineError: the build refuses the model, the mmproj or both together.

    """
    with Model(builds.load(build), model) as loaded, Vision(loaded, mmproj) as vision:
        vision.encode(drawn_pixels(Screenshot(width=4, height=4)))


def _noise(screenshot: Screenshot, width: int) -> npt.NDArray[np.float32]:
    seed = screenshot.seed, screenshot.width, screenshot.height
    return np.random.default_rng(seed).standard_normal((screenshot.n_tokens, width), np.float32)
