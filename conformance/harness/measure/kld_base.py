"""llama-perplexity's file of base log-probabilities (``--kl-divergence-base``, version 1), read and written.

Little-endian: the eight bytes ``_logits_``, then i32 context length, vocabulary and chunks, the tokens i32 [chunks,
context], and per chunk one record for each position from the middle of the context to the last but one. A record is
f32 scale, f32 least log-probability, one u16 per token of the vocabulary, and a u16 of padding when that number is odd;
log-probability = scale * u16 + least, with nothing more than 16 below the likeliest.

The file names no model. Files written here get a second file beside them with the model's digest and the base file's
own. A file without one is foreign: it can be read, and is marked unverified.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conformance.harness.measure.kld import Floats, KldError

_MAGIC = b"_logits_"
_HEAD = struct.Struct("<8s3i")
_RANGE = np.float32(16)


@dataclass(frozen=True)
class KldBase:
    """A base file that is complete. `verified` when its digest file vouches for it, and then `model_sha256` is set.

    `tokens` int32 [chunks, context] as the text gave them; a model that begins with BOS was fed that in place of the
    first token of each chunk.
    """

    path: Path
    vocabulary: int
    tokens: NDArray[np.int32]
    verified: bool
    model_sha256: str | None = None

    @property
    def first(self) -> int:
        """The first scored position of each chunk: the logits at p are scored on the token at p + 1."""
        context: int = self.tokens.shape[1]
        return context // 2

    @property
    def following(self) -> NDArray[np.int32]:
        """The tokens that scored positions predict, int32 [chunks, scored positions]."""
        return self.tokens[:, self.first + 1 :]

    def records(self, chunk: int) -> NDArray[np.uint16]:
        """The records of one chunk, uint16 [scored positions, record width], mapped and not read into memory."""
        shape = (self.following.shape[1], _record_width(self.vocabulary))
        start = _records_start(self.tokens.shape) + chunk * 2 * shape[0] * shape[1]
        return np.memmap(self.path, dtype="<u2", mode="r", offset=start, shape=shape)

    def require(self, tokens: NDArray[np.integer], vocabulary: int, model_sha256: str) -> None:
        """KldError unless this base is of these tokens [chunks, context] and, where it says, of this model.

        A foreign base passes on its tokens alone.
        """
        if self.vocabulary != vocabulary:
            raise KldError(f"{self.path}: the base has {self.vocabulary} tokens, the model {vocabulary}; another model")
        if not np.array_equal(self.tokens, tokens):
            raise KldError(
                f"{self.path}: the base was made of other text or another tokenizer; write it again from this corpus"
            )
        if self.model_sha256 not in (None, model_sha256):
            raise KldError(f"{self.path}: the base was made with another model; write it again with this one")


def read_base(path: Path) -> KldBase:
    """Open a base file; KldError when it is none, is cut short, or is not what its digest file says."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
            size = os.fstat(file.fileno()).st_size
            magic, context, vocabulary, chunks = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0, 0)
            if magic != _MAGIC or context < 2 or vocabulary < 1 or chunks < 1:
                raise KldError(f"{path}: not a KLD base file of version 1")
            expected = _records_start((chunks, context)) + chunks * _scored(context) * 2 * _record_width(vocabulary)
            if size != expected:
                raise KldError(f"{path}: has {size} bytes where its header promises {expected}; write it again")
            tokens = np.frombuffer(file.read(4 * chunks * context), dtype="<i4").reshape(chunks, context)
        model = _vouched_model(path)
    except OSError as error:
        raise KldError(f"{error.filename}: cannot be read: {error.strerror}") from None
    return KldBase(path, vocabulary, tokens, verified=model is not None, model_sha256=model)


def _vouched_model(path: Path) -> str | None:
    """The model digest that the digest file of a base vouches for; None when the base has no digest file."""
    digest = _digest_path(path)
    if not digest.exists():
        return None
    try:
        recorded = json.loads(digest.read_text(encoding="utf-8"))
        base, model = str(recorded["base_sha256"]), str(recorded["model_sha256"])
    except (ValueError, KeyError, TypeError):
        raise KldError(f"{digest}: not the digest file of a KLD base; remove it to use the base unverified") from None
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != base:
            raise KldError(f"{path}: has changed since {digest.name} was written; write it again")
    return model


def write_base(path: Path, tokens: NDArray[np.integer], logits: Iterable[Floats], model_sha256: str) -> KldBase:
    """Write a base file and its digest file.

    `tokens` [chunks, context]; `logits` yields float32 [n, vocabulary] blocks of any n, in all the scored positions of
    the chunks in turn. The file appears under its name only when it is complete. KldError when a logit is not finite
    or the positions do not add up.
    """
    chunks, context = tokens.shape
    expected = chunks * _scored(context)
    partial = path.with_name(path.name + ".partial")
    digest = hashlib.sha256()
    written = vocabulary = 0
    try:
        with partial.open("wb") as file:
            for block in logits:
                parts = [encode_records(block).tobytes()]
                if not written:
                    vocabulary = block.shape[1]
                    parts[:0] = [_HEAD.pack(_MAGIC, context, vocabulary, chunks), tokens.astype("<i4").tobytes()]
                for part in parts:
                    digest.update(part)
                    file.write(part)
                written += len(block)
        if written != expected:
            raise KldError(f"{path}: {written} positions of logits for {chunks} chunks of {context}; give {expected}")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    recorded = {"base_sha256": digest.hexdigest(), "model_sha256": model_sha256}
    _digest_path(path).write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    return KldBase(path, vocabulary, tokens.astype(np.int32), verified=True, model_sha256=model_sha256)


def encode_records(logits: Floats) -> NDArray[np.uint16]:
    """Records uint16 [n, record width] of logits float32 [n, vocabulary], in llama-perplexity's own float32 steps."""
    if not np.isfinite(logits).all():
        raise KldError("a base file cannot hold logits that are infinite or not a number")
    most = logits.max(axis=1, keepdims=True)
    least = np.maximum(logits.min(axis=1, keepdims=True), most - _RANGE)
    total = np.exp(logits - most).sum(axis=1, keepdims=True, dtype=np.float64)
    scale = (most - least) / np.float32(65535)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    inverse[np.isinf(inverse)] = 0  # all logits equal, or as good as equal
    records = np.zeros((len(logits), _record_width(logits.shape[1])), dtype="<u2")
    header = np.concatenate([scale, least - most - np.log(total).astype(np.float32)], axis=1)
    records[:, :4] = header.astype("<f4").view("<u2")
    records[:, 4 : 4 + logits.shape[1]] = np.rint(inverse * np.maximum(logits - least, np.float32(0)))
    return records


def _record_width(vocabulary: int) -> int:
    return 4 + vocabulary + vocabulary % 2


def _scored(context: int) -> int:
    return context - 1 - context // 2


def _records_start(shape: tuple[int, ...]) -> int:
    return _HEAD.size + 4 * shape[0] * shape[1]


def _digest_path(path: Path) -> Path:
    return path.with_name(path.name + ".digest.json")
