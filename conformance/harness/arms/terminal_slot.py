"""The terminal slot: an agent loop whose screenshots stand at the end of the prompt, behind a checkpoint of all text.

What an agent author needs to lift into a loop of their own: NumPy, an exception, and a context with the few calls of
`Memory`, such as `conformance.harness.engine.Context`.

    slot = TerminalSlot(Cursor(context, components=4))
    slot.begin(preamble)
    for each step:
        logits = slot.look(window)            # restores the checkpoint and prefills the newest screenshots
        action = [... slot.decode(token) ...] # over a small cache that does not grow with the screenshots seen
        slot.remember(action + answer)        # into the text history, and the checkpoint moves on

Exact for attention and recurrent layers alike: a restored state and a prefilled suffix are what a prefill of the whole
prompt gives. Source: "Holo3-35B-A3B: The KV-cache optimum", section 4, the per-step algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from conformance.harness.engine import StateError

Tokens = npt.ArrayLike
Logits = npt.NDArray[np.float32]
Blob = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int32]
CheckpointKind = Literal["partial", "full", "on_device", "removal"]


class Memory(Protocol):
    """The calls of a llama.cpp context that an agent loop needs; signatures and errors as in `engine.Context`."""

    def decode(self, tokens: Tokens, *, start: int, sequence: int) -> Logits:
        """Decode tokens at `start`; the logits behind the last of them, float32 [1, n_vocab]."""

    def decode_embeddings(self, embeddings: npt.NDArray[np.float32], positions: Positions, *, sequence: int) -> Logits:
        """Decode embeddings at positions int32 [n] or [4, n]; logits as `decode`."""

    def save(self, sequence: int, flags: Any) -> Blob:
        """The state of a sequence."""

    def load(self, blob: Blob, sequence: int, flags: Any) -> int:
        """Bring it back; 0 when the build refuses it."""

    def seq_rm(self, sequence: int, begin: int) -> bool:
        """Remove the positions from `begin` on; False when the build refuses."""


class _Flags(IntFlag):
    """LLAMA_STATE_SEQ_FLAGS_* of llama.h."""

    FULL = 0
    PARTIAL_ONLY = 1
    ON_DEVICE = 2


_FLAGS: dict[CheckpointKind, _Flags] = {
    "partial": _Flags.PARTIAL_ONLY,
    "full": _Flags.FULL,
    "on_device": _Flags.PARTIAL_ONLY | _Flags.ON_DEVICE,
}


@dataclass(frozen=True, eq=False)
class Image:
    """A screenshot as the model reads it: embeddings float32 [width * height, n_embd], row by row from the top left."""

    embeddings: npt.NDArray[np.float32]
    width: int
    height: int


def place(width: int, height: int, position: int) -> Positions:
    """Positions of an image, int32 [4, n]: all share t, y and x count from it row by row, z is 0.

    Source: Qwen3-VL's M-RoPE as libmtmd lays it out (tools/mtmd/mtmd.cpp).
    """
    n = width * height
    y, x = np.divmod(np.arange(n, dtype=np.int32), np.int32(width))
    return np.stack([np.full(n, position, np.int32), position + y, position + x, np.zeros(n, np.int32)])


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A place in a sequence that it can be brought back to.

    Attributes:
        blob: the state, None where a removal of what follows is enough.
        position: of what follows. An image takes fewer positions than cells, so both are kept.
        cells: taken in front of it.
        logits: behind its last token, None for an empty sequence.

    """

    blob: Blob | None
    position: int
    cells: int
    logits: Logits | None

    @property
    def n_bytes(self) -> int:
        """Bytes that the host keeps for it."""
        return 0 if self.blob is None else len(self.blob)


class Cursor:
    """The end of one sequence: appends texts and images, takes checkpoints and comes back to them.

    Args:
        memory: the context.
        components: position components of an embedding: 4 with multi-dimensional positions, else 1.
        sequence: id of the sequence; it must be empty.
        checkpoints: how a state is kept. "partial" keeps the recurrent layers and sliding windows alone and relies on
            what the attention layers still hold; "full" keeps all layers; "on_device" keeps a partial state inside the
            context, where only the newest one is valid; "removal" keeps nothing and suits models whose layers all attend
            to everything.

    Attributes:
        position: of the next token.
        cells: taken by the sequence so far, by this object's own count.
        logits: float32 [n_vocab] behind the last token, None while the sequence is empty.

    """

    def __init__(
        self,
        memory: Memory,
        *,
        components: int,
        sequence: int = 0,
        checkpoints: CheckpointKind = "partial",
    ) -> None:
        self.memory, self.sequence, self.checkpoints = memory, sequence, checkpoints
        self.components = components
        self.position = self.cells = 0
        self.logits: Logits | None = None

    def text(self, tokens: Tokens) -> None:
        """Prefill a text in as few calls as the context allows; an empty one changes nothing."""
        ids = np.asarray(tokens, np.int32)
        if len(ids):
            self.logits = self.memory.decode(ids, start=self.position, sequence=self.sequence)[0]
            self.position += len(ids)
            self.cells += len(ids)

    def token(self, token: int) -> Logits:
        """Decode one token, as when a model generates; the logits behind it, float32 [n_vocab]."""
        self.text([token])
        assert self.logits is not None
        return self.logits

    def image(self, image: Image) -> None:
        """Prefill an image."""
        n = len(image.embeddings)
        if self.components == 1:
            positions, step = np.arange(self.position, self.position + n, dtype=np.int32), n
        else:
            positions, step = self.place(image), self.step(image)
        self.logits = self.memory.decode_embeddings(image.embeddings, positions, sequence=self.sequence)[-1]
        self.position += step
        self.cells += n

    def place(self, image: Image) -> Positions:
        """Where the tokens of an image lie, int32 [4, n]."""
        return place(image.width, image.height, self.position)

    def step(self, image: Image) -> int:
        """By how much an image moves the position of what follows on: its longer side, whatever its tokens."""
        return max(image.width, image.height)

    def checkpoint(self) -> Checkpoint:
        """Keep this place. Behind an image, never inside one: its cells share a position and cannot be told apart."""
        kept = self.checkpoints != "removal" and self.cells
        blob = self.memory.save(self.sequence, flags=_FLAGS[self.checkpoints]) if kept else None
        return Checkpoint(blob, self.position, self.cells, self.logits)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Come back to a place that this sequence went on from.

        The state first, the removal then: a removal that a recurrent state cannot follow is refused, and one that is
        left out is noticed by nobody.

        Raises:
            StateError: the context refuses the state or the removal.

        """
        kind = self.checkpoints
        if checkpoint.blob is not None and not self.memory.load(checkpoint.blob, self.sequence, flags=_FLAGS[kind]):
            raise StateError(
                f"the context refused a {kind} state of {checkpoint.n_bytes} bytes at position {checkpoint.position}; "
                "keep full states, or one checkpoint at a time"
            )
        whole = kind == "full" and checkpoint.blob is not None
        if not whole and not self.memory.seq_rm(self.sequence, checkpoint.position):
            raise StateError(
                f"the context refused to remove positions from {checkpoint.position} on ({kind}); keep full states"
            )
        self.position, self.cells, self.logits = checkpoint.position, checkpoint.cells, checkpoint.logits


class TerminalSlot:
    """Preamble and text history behind one checkpoint, the newest screenshots prefilled behind it at every step.

    Args:
        cursor: the end of an empty sequence.

    Attributes:
        checkpoint: at the end of the text history; the only state that is kept, however long the task.

    """

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.checkpoint = cursor.checkpoint()

    def begin(self, preamble: Tokens) -> None:
        """Prefill what every prompt begins with."""
        self.remember(preamble)

    def look(self, window: Sequence[Tokens | Image]) -> Logits:
        """Prefill the window behind the text history: screenshots, oldest first, with the markers around them.

        Returns:
            float32 [n_vocab]: the logits in front of the action.

        """
        self._return()
        for piece in window:
            if isinstance(piece, Image):
                self.cursor.image(piece)
            else:
                self.cursor.text(piece)
        if self.cursor.logits is None:
            raise StateError(
                "nothing was prefilled yet, so there are no logits; begin with a preamble of a token or more"
            )
        return self.cursor.logits

    def decode(self, token: int) -> Logits:
        """Decode a token of the action behind the window; the logits behind it, float32 [n_vocab]."""
        return self.cursor.token(token)

    def remember(self, text: Tokens) -> None:
        """Append a text (the action, what a tool answered) to the history; the checkpoint moves behind it."""
        self._return()
        self.cursor.text(text)
        self.checkpoint = self.cursor.checkpoint()

    def _return(self) -> None:
        if self.cursor.cells != self.checkpoint.cells:
            self.cursor.restore(self.checkpoint)
