"""One llama.cpp build: find it, describe it, drive it, survive it. The only room that knows ctypes."""

from .context import (
    CACHE_TYPES,
    KVARN_BITS,
    Blob,
    CacheSide,
    Context,
    ContextSettings,
    Logits,
    StateFlags,
    TokenBatch,
)
from .errors import BuildError, DecodeError, EngineError, ModelError, StateError
from .high_level import HighLevel, has_high_level
from .library import BUNDLED, BuildIdentity, Library, digest_of, find_library
from .model import Model
from .vision import EncodedImage, Pixels, Vision, has_vision

__all__ = [
    "BUNDLED",
    "CACHE_TYPES",
    "KVARN_BITS",
    "Blob",
    "BuildError",
    "BuildIdentity",
    "CacheSide",
    "Context",
    "ContextSettings",
    "DecodeError",
    "EncodedImage",
    "EngineError",
    "HighLevel",
    "Library",
    "Logits",
    "Model",
    "ModelError",
    "Pixels",
    "StateError",
    "StateFlags",
    "TokenBatch",
    "Vision",
    "digest_of",
    "find_library",
    "has_high_level",
    "has_vision",
]
