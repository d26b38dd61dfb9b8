"""The arms as policies over engine calls: a transcript is replayed, and what each step cost is read from the engine."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar

import numpy as np

from conformance.harness.engine import Context, Model, StateError
from conformance.harness.engine.process import peak_bytes
from conformance.harness.prompts.layouts import ImagePiece, Piece, Prompt, TextPiece
from conformance.harness.prompts.transcript import Transcript

from .counts import COUNTED, ArmName
from .profile import StepProfile
from .reading import Embeddings, Reader
from .terminal_slot import Checkpoint, CheckpointKind, Cursor, Image, Logits, TerminalSlot


def calls(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, ...]]:
    """The pieces that are prefilled together: an image alone, the texts between two places that a prompt can change at.

    Where the same prompt is prefilled by whatever arm, the same calls are made, so that bits can be compared.
    """
    for _, together in groupby(pieces, _call_of):
        yield tuple(together)


def _call_of(piece: Piece) -> object:
    if isinstance(piece, ImagePiece):
        return piece  # frozen, and different steps differ
    if piece.role in ("marker", "slot_heading", "closing"):
        return piece.role, piece.step
    return piece.step  # what an evicted screenshot became, turn, action and tool of one step; 0 is the preamble


def tokens_of(pieces: Sequence[Piece]) -> list[int]:
    """The ids of texts, one after the other."""
    return [token for piece in pieces if isinstance(piece, TextPiece) for token in piece.tokens]


def prefill(cursor: Cursor, pieces: Sequence[Piece], reader: Reader) -> None:
    """Append pieces of a prompt."""
    for together in calls(pieces):
        if isinstance(together[0], ImagePiece):
            cursor.image(reader.image(together[0].screenshot))
        else:
            cursor.text(tokens_of(together))


@dataclass(frozen=True)
class Asked:
    """A step's prompt, once it is prefilled.

    Attributes:
        prompt: the whole.
        reused: tokens of it that the arm did not prefill, because cache or checkpoint held them.
        logits: float32 [n_vocab], in front of the action.

    """

    prompt: Prompt
    reused: int
    logits: Logits


class Arm(ABC):
    """One way to keep a cache through a task.

    Args:
        cursor: the end of an empty sequence.
        reader: reads texts and screenshots.
        transcript: the task.
        window: W, how many screenshots are shown.

    """

    name: ClassVar[ArmName]

    def __init__(self, cursor: Cursor, reader: Reader, transcript: Transcript, window: int) -> None:
        self.cursor, self.reader, self.transcript, self.window = cursor, reader, transcript, window

    @abstractmethod
    def look(self, step: int) -> Asked:
        """Bring the cache to a step's prompt. Steps come in order; the first may be any, at the price of its whole prompt."""

    @property
    @abstractmethod
    def kept_bytes(self) -> int:
        """Bytes of all checkpoints that are kept."""

    def prompt(self, step: int) -> Prompt:
        """A step's prompt in the arm's layout."""
        return COUNTED[self.name].layout(self.transcript, step, self.window, self.reader.vocabulary)

    def action(self, step: int) -> tuple[int, ...]:
        """What the transcript says that was decided on at a step."""
        return self.reader.vocabulary.tokens(self.transcript.steps[step - 1].action)

    def act(self, step: int) -> None:
        """Decode the action of a step token by token, as when a model generates it."""
        for token in self.action(step):
            self.cursor.token(token)

    def _asked(self, prompt: Prompt, reused: int) -> Asked:
        if self.cursor.logits is None:
            raise StateError("a prompt of no tokens has no logits")
        return Asked(prompt, reused, self.cursor.logits)


class Chronological(Arm):
    """Keeps what the cache holds as long as the next prompt begins with it, and comes back to a checkpoint where not."""

    def __init__(self, cursor: Cursor, reader: Reader, transcript: Transcript, window: int) -> None:
        super().__init__(cursor, reader, transcript, window)
        self.step = 0
        self._held: tuple[Piece, ...] = ()
        self._points: list[Checkpoint] = [cursor.checkpoint()]
        self._closes = bool(reader.vocabulary.tokens(transcript.closing))

    def keeps(self, previous: Piece, following: Piece) -> bool:
        """Whether a checkpoint is taken between two pieces: in front of what no later prompt repeats."""
        return following.role == "closing"

    def stays(self, prompt: Prompt, point: Checkpoint) -> bool:
        """Whether a checkpoint is kept beyond the next step; the newest one always is kept until then."""
        return False

    def reaches(self, prompt: Prompt, point: Checkpoint) -> bool:
        """Whether a checkpoint, in front of which the prompt is as before, may be come back to."""
        return True

    def look(self, step: int) -> Asked:
        """Come back to what the prompt shares with the cache, and prefill the rest."""
        self.step, prompt = step, self.prompt(step)
        reused = self._return(prompt)
        rest = prompt.after(reused)
        previous = next(
            (piece for piece, at in zip(prompt.pieces, prompt.starts[1:], strict=True) if at.tokens == reused), None
        )
        for together in calls(rest):
            if previous and self.keeps(previous, together[0]) and self._points[-1].cells != self.cursor.cells:
                self._points.append(self.cursor.checkpoint())
            prefill(self.cursor, together, self.reader)
            previous = together[-1]
        self._held = prompt.pieces
        newest = self._points[-1]
        self._points = [
            point for point in self._points if point.cells == 0 or point is newest or self.stays(prompt, point)
        ]
        return self._asked(prompt, reused)

    def act(self, step: int) -> None:
        """Decode the action; it stays in the cache."""
        super().act(step)
        if tokens := self.action(step):
            self._held = (*self._held, TextPiece(tokens, "action", step))

    def _return(self, prompt: Prompt) -> int:
        """Come back to the furthest place that the prompt shares with the cache; the tokens in front of it."""
        held = Prompt(self._held)
        shared = prompt.common_prefix(held).tokens
        whole = Checkpoint(None, self.cursor.position, self.cursor.cells, self.cursor.logits)
        if not self._closes and shared == held.n_tokens and self.reaches(prompt, whole):
            return shared
        while self._points[-1].cells > shared or not self.reaches(prompt, self._points[-1]):
            self._points.pop()
        self.cursor.restore(self._points[-1])
        return self._points[-1].cells

    @property
    def kept_bytes(self) -> int:
        """Of every checkpoint that can still be come back to."""
        return sum(point.n_bytes for point in self._points)


class AppendOnly(Chronological):
    """Nothing is ever rewritten, so the cache is only added to."""

    name = "append_only"


class EvictIdeal(Chronological):
    """With a checkpoint in front of every screenshot, since each will be rewritten."""

    name = "evict_ideal"

    def keeps(self, previous: Piece, following: Piece) -> bool:
        """In front of a screenshot too."""
        screenshot = following.role in ("marker", "image") and previous.step != following.step
        return screenshot or super().keeps(previous, following)

    def stays(self, prompt: Prompt, point: Checkpoint) -> bool:
        """In front of a screenshot that is still shown."""
        oldest = next((piece.step for piece in prompt.pieces if piece.role == "image"), 0)
        parts = zip(prompt.pieces, prompt.starts, strict=False)
        return point.cells >= next((at.tokens for piece, at in parts if piece.step == oldest), 0)


class Evict(Chronological):
    """As the document runs it: from the first eviction on nothing but the preamble is reused."""

    name = "evict"

    def keeps(self, previous: Piece, following: Piece) -> bool:
        """Behind the preamble too."""
        return previous.role == "preamble" or super().keeps(previous, following)

    def stays(self, prompt: Prompt, point: Checkpoint) -> bool:
        """The one behind the preamble."""
        return point.cells <= prompt.starts[1].tokens

    def reaches(self, prompt: Prompt, point: Checkpoint) -> bool:
        """Once a screenshot was evicted, only the preamble."""
        seen = sum(step.screenshot is not None for step in self.transcript.steps[: self.step])
        return seen <= self.window or point.cells <= prompt.starts[1].tokens


class Terminal(Arm):
    """Preamble and texts behind a checkpoint, the newest screenshots behind it at every step."""

    name = "terminal_slot"

    def __init__(
        self,
        cursor: Cursor,
        reader: Reader,
        transcript: Transcript,
        window: int,
        slot: type[TerminalSlot] = TerminalSlot,
    ) -> None:
        super().__init__(cursor, reader, transcript, window)
        self.slot = slot(cursor)
        self._remembered = -1  # the newest step whose texts are in the history; 0 is the preamble

    def look(self, step: int) -> Asked:
        """Remember what was said since, then prefill the window."""
        prompt = self.prompt(step)
        reused = self.slot.checkpoint.cells
        window = prompt.after(self.reader.vocabulary.parts(self.transcript).history_tokens(step))
        history = prompt.pieces[: len(prompt.pieces) - len(window)]
        for together in calls([piece for piece in history if piece.step > self._remembered]):
            self.slot.remember(tokens_of(together))
        self._remembered = step - 1
        self.slot.look([self._read(together) for together in calls(window)])
        return self._asked(prompt, reused)

    def act(self, step: int) -> None:
        """Decode the action behind the window; it is remembered with the next prompt."""
        for token in self.action(step):
            self.slot.decode(token)

    def _read(self, together: tuple[Piece, ...]) -> list[int] | Image:
        first = together[0]
        return self.reader.image(first.screenshot) if isinstance(first, ImagePiece) else tokens_of(together)

    @property
    def kept_bytes(self) -> int:
        """Of the one checkpoint."""
        return self.slot.checkpoint.n_bytes


ARM_TYPES: dict[ArmName, type[Arm]] = {arm.name: arm for arm in (Evict, EvictIdeal, AppendOnly, Terminal)}


class CellGauge:
    """Cells of a sequence as the engine's own sizes tell them, where a state grows evenly with every cell."""

    def __init__(self, sizes: Sequence[int], *, slides: bool) -> None:
        """Sizes of the state with 1, 2 and 3 cells, and whether a sliding window will leave cells behind."""
        self._first, self._each = sizes[0], sizes[1] - sizes[0]
        self.works = self._each > 0 and sizes[2] - sizes[1] == self._each and not slides

    def cells(self, n_bytes: int) -> int:
        """The cells of a state of so many bytes."""
        return 1 + (n_bytes - self._first) // self._each


class ProfiledRun:
    """Runs an arm in a context and profiles each step.

    Args:
        context: new; nothing else decodes in it.
        arm: over a cursor in this context.
        task: name of the task in the profiles.

    """

    def __init__(self, context: Context, arm: Arm, task: str) -> None:
        self.context, self.arm, self.task = context, arm, task
        self.gauge = self._prime()
        self.asked: Asked | None = None

    def _prime(self) -> CellGauge:
        """Three tokens and one more, so that the engine's counters, which never say 0, can be subtracted."""
        sizes = []
        for n in (2, 1):
            self.context.decode(np.zeros(n, np.int32), start=0 if n == 2 else 2)
            sizes.append(self.context.announced_bytes())
        self.context.seq_rm(0)
        self.context.decode([0], start=0)
        sizes.insert(0, self.context.announced_bytes())
        self.context.seq_rm(0)
        return CellGauge(sizes, slides=self.context.model.n_swa > 0)

    def catch_up(self, step: int) -> None:
        """Bring the cache to where it was after a step, in as few calls as can be and without a profile."""
        self.arm.look(step)
        self.arm.act(step)

    def step(self, number: int) -> StepProfile:
        """Run a step.

        Raises:
            StateError: the engine prefilled another number of tokens than the arm did not reuse, or refused a checkpoint.
            DecodeError: the engine refused a call.

        """
        library, context, begin = self.context.library, self.context, time.perf_counter()
        before, seconds = self._counted(), library.seconds
        asked = self.asked = self.arm.look(number)
        prefilled, prefill_seconds = self._counted() - before, library.seconds - seconds
        if asked.reused + prefilled != asked.prompt.n_tokens:
            raise StateError(
                f"step {number}: the arm took {asked.reused} of {asked.prompt.n_tokens} tokens for reused, and the engine "
                f"prefilled {prefilled}"
            )
        seconds = library.seconds
        self.arm.act(number)
        decoded = self._counted() - before - prefilled
        decode_seconds = library.seconds - seconds
        return StepProfile(
            arm=self.arm.name,
            task=self.task,
            step=number,
            prompt_tokens=asked.prompt.n_tokens,
            reused_tokens=asked.prompt.n_tokens - prefilled,
            prefilled_tokens=prefilled,
            decoded_tokens=decoded,
            hit_ratio=1 - prefilled / asked.prompt.n_tokens,
            hit_ratio_label="measured",
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            tokens_per_second=decoded / decode_seconds if decode_seconds else 0.0,
            live_cells=self.gauge.cells(context.announced_bytes()) if self.gauge.works else self.arm.cursor.cells,
            state_bytes=self.arm.kept_bytes,
            peak_rss_bytes=peak_bytes(),
            logits_digest=hashlib.sha256(asked.logits.tobytes()).hexdigest()[:16],
            wall_seconds=time.perf_counter() - begin,
        )

    def _counted(self) -> int:
        """Tokens that the engine's counters say it has decoded."""
        counts = self.context.perf_counts()
        return int(counts["n_p_eval"] + counts["n_eval"])


def checkpoints_for(model: Model) -> CheckpointKind:
    """How a model's states are kept: not at all where a removal is enough, else the part that no removal brings back."""
    if not (model.is_recurrent or model.is_hybrid or model.n_swa > 0):
        return "removal"
    return "partial" if model.library.has("llama_state_seq_get_data_ext") else "full"


@dataclass(frozen=True)
class ArmParts:
    """What arms are made of."""

    types: Mapping[ArmName, type[Arm]] = field(default_factory=lambda: ARM_TYPES)
    cursor: type[Cursor] = Cursor
    slot: type[TerminalSlot] = TerminalSlot
    embeddings: type[Embeddings] = Embeddings

    def arm(
        self,
        name: ArmName,
        context: Context,
        reader: Reader,
        transcript: Transcript,
        window: int,
        checkpoints: CheckpointKind | None = None,
    ) -> Arm:
        """An arm over sequence 0 of an empty context.

        Args:
            name: which arm.
            context: for this arm alone.
            reader: of the context's model.
            transcript: the task.
            window: W.
            checkpoints: how states are kept; None chooses by the model's kind of memory.

        """
        model = context.model
        cursor = self.cursor(
            context,
            components=model.positions_per_embedding,
            checkpoints=checkpoints or checkpoints_for(model),
        )
        arm = self.types[name]
        if issubclass(arm, Terminal):
            return arm(cursor, reader, transcript, window, self.slot)
        return arm(cursor, reader, transcript, window)
