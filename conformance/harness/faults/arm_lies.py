"""Agent loops that go wrong: each overrides what one mistake needs and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from conformance.harness.arms.reading import Embeddings
from conformance.harness.arms.replay import AppendOnly, Asked, Chronological, Evict, Terminal, prefill
from conformance.harness.arms.terminal_slot import (
    Checkpoint,
    Cursor,
    Image,
    Logits,
    Positions,
    TerminalSlot,
    Tokens,
    place,
)
from conformance.harness.engine import Blob, Context, ContextSettings, Model, Pixels, StateFlags
from conformance.harness.engine.context import Outputs
from conformance.harness.prompts.layouts import Extent, ImagePiece, Prompt


class SlotOneImageLate(TerminalSlot):
    """Takes the checkpoint behind the first image of the window instead of in front of it."""

    def look(self, window: Sequence[Tokens | Image]) -> Logits:
        first = next((place for place, piece in enumerate(window) if isinstance(piece, Image)), None)
        if first is None:
            return super().look(window)
        super().look(window[: first + 1])
        self.checkpoint = self.cursor.checkpoint()
        return super().look(window[first + 1 :])


class SlotAbsorbsTwice(TerminalSlot):
    """Appends every text behind the preamble twice."""

    def remember(self, text: Tokens) -> None:
        if self.checkpoint.cells:
            super().remember(text)
        super().remember(text)


class SlotNeverComesBack(TerminalSlot):
    """Takes the end of the window for its beginning: the checkpoint is not restored."""

    def _return(self) -> None:
        return


class HoardsStates(Cursor):
    """Keeps a megabyte whenever it comes back to a checkpoint."""

    _hoard: ClassVar[list[object]] = []

    def restore(self, checkpoint: Checkpoint) -> None:
        super().restore(checkpoint)
        self._hoard.append(np.ones(1 << 20, np.uint8))


class OldestImageKept(Terminal):
    """Shows the first screenshot of all in the place of the oldest of the window."""

    def prompt(self, step: int) -> Prompt:
        pieces = list(super().prompt(step).pieces)
        shown = [place for place, piece in enumerate(pieces) if isinstance(piece, ImagePiece)]
        seen = [each.screenshot for each in self.transcript.steps[:step] if each.screenshot]
        if len(seen) > self.window:
            pieces[shown[0]] = ImagePiece(seen[0], pieces[shown[0]].step)
        return Prompt(tuple(pieces))


class HitThatWasNone(Terminal):
    """Begins anew at every step, and counts the history as reused."""

    def look(self, step: int) -> Asked:
        claimed = self.slot.checkpoint.cells
        self.cursor.memory.seq_rm(self.cursor.sequence, 0)
        self.cursor.position = self.cursor.cells = 0
        self.slot, self._remembered = TerminalSlot(self.cursor), -1
        return replace(super().look(step), reused=claimed)


class _StartsAnew(Chronological):
    """Prefills the whole prompt, and counts what the cache held as reused."""

    def _return(self, prompt: Prompt) -> int:
        claimed = super()._return(prompt)
        self.cursor.restore(self._points[0])
        prefill(self.cursor, prompt.pieces[: prompt.starts.index(self._extent(prompt, claimed))], self.reader)
        return claimed

    @staticmethod
    def _extent(prompt: Prompt, tokens: int) -> Extent:
        return next(extent for extent in prompt.starts if extent.tokens == tokens)


class EvictStartsAnew(_StartsAnew, Evict):
    """In the arm that evicts."""


class AppendStartsAnew(_StartsAnew, AppendOnly):
    """In the arm that only appends."""


class ActionForgotten(AppendOnly):
    """Takes the last token of each action back out of the cache."""

    def act(self, step: int) -> None:
        super().act(step)
        if self.action(step):
            self.cursor.memory.seq_rm(self.cursor.sequence, self.cursor.position - 1)


class AxesSwapped(Cursor):
    """Swaps x and y of every image."""

    def place(self, image: Image) -> Positions:
        return place(image.width, image.height, self.position)[[0, 2, 1, 3]]


class AdvancesByTokens(Cursor):
    """Moves the position on by the number of an image's tokens."""

    def step(self, image: Image) -> int:
        return image.width * image.height


class StaleEmbeddings(Embeddings):
    """Takes two images of one size for the same."""

    def key(self, pixels: Pixels) -> str:
        return str(pixels.shape)


class LogitsAreNoNumbers(Context):
    """Hands out logits one of which is not a number."""

    def logits(self, n_outputs: int) -> Logits:
        rows = super().logits(n_outputs)
        rows[:, 0] = np.nan
        return rows


class ImageContinuedAskew(Context):
    """Swaps x and y of an image's embeddings when they do not begin with the image's first."""

    def decode_embeddings(
        self,
        embeddings: npt.NDArray[np.float32],
        positions: npt.NDArray[np.int32],
        *,
        sequence: int = 0,
        outputs: Outputs = "last",
    ) -> Logits:
        t, y, x, _ = positions[:, 0]
        askew = positions if t == y == x else positions[[0, 2, 1, 3]]
        return super().decode_embeddings(embeddings, askew, sequence=sequence, outputs=outputs)


class DeviceStateOneLate(Context):
    """Of the states kept inside the context, loads the one before the newest."""

    def __init__(self, model: Model, settings: ContextSettings | None = None) -> None:
        super().__init__(model, settings)
        self._kept: list[Blob] = []

    def save(self, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> Blob:
        if flags & StateFlags.ON_DEVICE:
            self._kept.append(super().save(sequence, flags & ~StateFlags.ON_DEVICE))
        return super().save(sequence, flags)

    def load(self, blob: Blob, sequence: int = 0, flags: StateFlags = StateFlags.FULL) -> int:
        if flags & StateFlags.ON_DEVICE:
            return super().load(self._kept[-2:][0], sequence, flags & ~StateFlags.ON_DEVICE)
        return super().load(blob, sequence, flags)
