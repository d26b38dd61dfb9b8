"""Layouts: how a transcript at some step becomes the prompt that the model is given.

Three of them. Chronological with older screenshots rewritten in place to a text (evict), chronological with everything
kept (append-only), and preamble, text history and the newest screenshots at the end (terminal slot). No layout touches an
engine; what a text costs in tokens is said by a `Vocabulary`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal

import numpy as np

from .transcript import Screenshot, Text, Transcript

Role = Literal["preamble", "marker", "image", "evicted", "turn", "action", "tool", "slot_heading", "closing"]

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
"""Markers around each image, of models of the Qwen-VL kind."""


class PromptError(Exception):
    """A transcript, a window or a prompt that cannot be; one line: what, where, what to do."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Reads texts as token ids.

    Attributes:
        n_vocab: drawn texts hold any id below it.
        tokenize: a string to ids; the markers of the chat template are single ids where the model has them.

    """

    n_vocab: int
    tokenize: Callable[[str], Iterable[int]]
    _strings: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    _parts: list[Parts] = field(default_factory=list, repr=False)

    def tokens(self, text: Text) -> tuple[int, ...]:
        """The ids of a text."""
        if text.string is None:
            return tuple(np.random.default_rng(text.seed).integers(0, self.n_vocab, text.tokens).tolist())
        if text.string not in self._strings:
            self._strings[text.string] = tuple(map(int, self.tokenize(text.string))) if text.string else ()
        return self._strings[text.string]

    def parts(self, transcript: Transcript) -> Parts:
        """The pieces of a transcript; those of the last one that was read are kept."""
        if not self._parts or self._parts[0].transcript is not transcript:
            self._parts[:] = [Parts(transcript, self)]
        return self._parts[0]


_MARKER_IDS = {VISION_START: 256, VISION_END: 257}


def byte_vocabulary() -> Vocabulary:
    """A vocabulary that needs no model: a token for each byte of UTF-8, and one for each marker that stands alone."""
    return Vocabulary(256, lambda text: [_MARKER_IDS[text]] if text in _MARKER_IDS else list(text.encode()))


@dataclass(frozen=True)
class TextPiece:
    """Consecutive tokens of a prompt that belong together; `step` is 0 for the preamble."""

    tokens: tuple[int, ...]
    role: Role
    step: int

    @property
    def n_tokens(self) -> int:
        """Cells that it takes."""
        return len(self.tokens)

    @property
    def n_positions(self) -> int:
        """One for each token."""
        return len(self.tokens)


@dataclass(frozen=True)
class ImagePiece:
    """The embeddings of a screenshot; cannot be divided, since all of them share their first position."""

    screenshot: Screenshot
    step: int
    role: Literal["image"] = "image"

    @property
    def n_tokens(self) -> int:
        """Cells that it takes."""
        return self.screenshot.n_tokens

    @property
    def n_positions(self) -> int:
        """By how much the position of what follows is moved on."""
        return self.screenshot.n_positions


Piece = TextPiece | ImagePiece


@dataclass(frozen=True)
class Extent:
    """A length from the beginning of a prompt, in tokens (cells) and in positions."""

    tokens: int
    positions: int


@dataclass(frozen=True)
class ImageSpan:
    """Where an image lies: tokens [begin, end) of the prompt, its first position, the step that brought it."""

    step: int
    screenshot: Screenshot
    begin: int
    end: int
    position: int


@dataclass(frozen=True)
class Prompt:
    """What the model is given before it decides on a step's action."""

    pieces: tuple[Piece, ...]

    @cached_property
    def starts(self) -> tuple[Extent, ...]:
        """What lies in front of each piece, and last the whole prompt."""
        tokens = accumulate((piece.n_tokens for piece in self.pieces), initial=0)
        positions = accumulate((piece.n_positions for piece in self.pieces), initial=0)
        return tuple(map(Extent, tokens, positions))

    @property
    def n_tokens(self) -> int:
        """Cells that the prompt takes."""
        return self.starts[-1].tokens

    @property
    def n_positions(self) -> int:
        """The position of what follows the prompt."""
        return self.starts[-1].positions

    @property
    def images(self) -> tuple[ImageSpan, ...]:
        """The images from first to last."""
        return tuple(
            ImageSpan(piece.step, piece.screenshot, at.tokens, at.tokens + piece.n_tokens, at.positions)
            for piece, at in zip(self.pieces, self.starts, strict=False)
            if isinstance(piece, ImagePiece)
        )

    def common_prefix(self, other: Prompt) -> Extent:
        """How much of this prompt the other begins with; images count as a whole or not at all."""
        tokens = positions = place = 0
        for place, (mine, its) in enumerate(zip(self.pieces, other.pieces, strict=False)):  # noqa: B007
            if mine is not its and _units(mine) != _units(its):
                break
            tokens, positions = tokens + mine.n_tokens, positions + mine.n_positions
        else:
            place = min(len(self.pieces), len(other.pieces))
        for mine_unit, its_unit in zip(_flat(self.pieces[place:]), _flat(other.pieces[place:]), strict=False):
            if mine_unit != its_unit:
                break
            tokens += 1 if isinstance(mine_unit, int) else mine_unit.n_tokens
            positions += 1 if isinstance(mine_unit, int) else mine_unit.n_positions
        return Extent(tokens, positions)

    def after(self, tokens: int) -> tuple[Piece, ...]:
        """The pieces behind so many tokens, the first of them cut where that lies inside a text.

        Raises:
            PromptError: it lies inside an image, or behind the end.

        """
        if not 0 <= tokens <= self.n_tokens:
            raise PromptError(f"a prompt of {self.n_tokens} tokens has no end at {tokens}; give a place inside it")
        rest = []
        for piece, at in zip(self.pieces, self.starts, strict=False):
            inside = tokens - at.tokens
            if inside <= 0:
                rest.append(piece)
            elif inside < piece.n_tokens:
                if isinstance(piece, ImagePiece):
                    raise PromptError(
                        f"token {tokens} lies inside the image of step {piece.step}; a prompt can be cut before or behind it"
                    )
                rest.append(TextPiece(piece.tokens[inside:], piece.role, piece.step))
        return tuple(piece for piece in rest if piece.n_tokens)


def _units(piece: Piece) -> object:
    """What two pieces must share to mean the same to a model."""
    return piece.tokens if isinstance(piece, TextPiece) else piece.screenshot


def _flat(pieces: Sequence[Piece]) -> Iterator[int | Screenshot]:
    for piece in pieces:
        if isinstance(piece, TextPiece):
            yield from piece.tokens
        else:
            yield piece.screenshot


class Parts:
    """The pieces that the prompts of one transcript are put together from; empty texts are none.

    Attributes:
        transcript: what was read.
        preamble: its piece.
        images: for each step the screenshot between its markers, nothing where it brought none.
        evicted: for each step what takes the place of its screenshot.
        turns: for each step the head of the model's turn.
        said: for each step its action and the tool's answer.
        closings, headings: for each step the end of its prompt, and what stands in front of its terminal slot.
        screenshots: the numbers of the steps that brought one.

    """

    def __init__(self, transcript: Transcript, vocabulary: Vocabulary) -> None:
        self.transcript, self.vocabulary = transcript, vocabulary
        self.preamble = self.text(transcript.preamble, "preamble", 0)
        numbers = range(1, len(transcript.steps) + 1)
        self.turns = [self.text(transcript.turn, "turn", number) for number in numbers]
        self.closings = [self.text(transcript.closing, "closing", number) for number in numbers]
        self.headings = [self.text(transcript.slot_heading, "slot_heading", number) for number in numbers]
        self.evicted = [
            self.text(transcript.evicted, "evicted", number) if step.screenshot else ()
            for number, step in enumerate(transcript.steps, 1)
        ]
        opening, ending = (Text(string=marker) for marker in (VISION_START, VISION_END))
        self.images: list[tuple[Piece, ...]] = [
            (
                *self.text(opening, "marker", number),
                ImagePiece(step.screenshot, number),
                *self.text(ending, "marker", number),
            )
            if step.screenshot
            else ()
            for number, step in enumerate(transcript.steps, 1)
        ]
        self.said = [
            self.text(step.action, "action", number) + (self.text(step.tool, "tool", number) if step.tool else ())
            for number, step in enumerate(transcript.steps, 1)
        ]
        self.screenshots = [number for number, step in enumerate(transcript.steps, 1) if step.screenshot]

        said = (
            sum(piece.n_tokens for piece in turn + answer) for turn, answer in zip(self.turns, self.said, strict=True)
        )
        self._history = list(accumulate(said, initial=sum(piece.n_tokens for piece in self.preamble)))

    def text(self, text: Text, role: Role, number: int) -> tuple[TextPiece, ...]:
        """The piece of a text, none where it is empty."""
        tokens = self.vocabulary.tokens(text)
        return (TextPiece(tokens, role, number),) if tokens else ()

    def history_tokens(self, step: int) -> int:
        """Tokens of the preamble and of all texts before a step: what lies in front of its terminal slot."""
        return self._history[step - 1]

    def action_tokens(self, step: int) -> int:
        """Tokens of a step's action."""
        return sum(piece.n_tokens for piece in self.said[step - 1] if piece.role == "action")

    def ending(self, step: int) -> tuple[Piece, ...]:
        """What the prompt of a step ends with, behind what was seen."""
        return self.turns[step - 1] + self.closings[step - 1]


Layout = Callable[[Transcript, int, int, Vocabulary], Prompt]
"""(transcript, step from 1, window W, vocabulary) to the prompt of that step."""


def evict(transcript: Transcript, step: int, window: int, vocabulary: Vocabulary) -> Prompt:
    """Everything in the order in which it happened; all but the newest `window` screenshots rewritten in place to a text."""
    parts = vocabulary.parts(transcript)
    shown = newest_screenshots(parts, step, window)
    oldest = shown[0] if shown else 0
    return _chronological(
        parts, step, [*parts.evicted[: oldest - 1], *parts.images[oldest - 1 :]] if oldest else parts.images
    )


def append_only(transcript: Transcript, step: int, window: int, vocabulary: Vocabulary) -> Prompt:
    """Everything in the order in which it happened, nothing rewritten; the window does not matter."""
    parts = vocabulary.parts(transcript)
    newest_screenshots(parts, step, window)
    return _chronological(parts, step, parts.images)


def terminal_slot(transcript: Transcript, step: int, window: int, vocabulary: Vocabulary) -> Prompt:
    """The preamble, all texts before this step, then the newest `window` screenshots, oldest first, at the end."""
    parts = vocabulary.parts(transcript)
    shown = newest_screenshots(parts, step, window)
    history = (piece for earlier in range(step - 1) for piece in parts.turns[earlier] + parts.said[earlier])
    images = (piece for number in shown for piece in parts.images[number - 1])
    return Prompt((*parts.preamble, *history, *parts.headings[step - 1], *images, *parts.ending(step)))


def _chronological(parts: Parts, step: int, seen: Sequence[Sequence[Piece]]) -> Prompt:
    pieces: list[Piece] = [*parts.preamble]
    for earlier in range(step - 1):
        pieces += (*seen[earlier], *parts.turns[earlier], *parts.said[earlier])
    return Prompt((*pieces, *seen[step - 1], *parts.ending(step)))


def newest_screenshots(parts: Parts, step: int, window: int) -> list[int]:
    """The steps, in order, that brought the newest `window` screenshots seen up to a step.

    Raises:
        PromptError: the window holds no screenshot, or the transcript has no such step.

    """
    if window < 1:
        raise PromptError(f"W = {window}: a window of no screenshot shows the agent nothing; give 1 or more")
    if not 1 <= step <= len(parts.said):
        raise PromptError(f"step {step}: the transcript has steps 1 to {len(parts.said)}; name one of them")
    seen = bisect_right(parts.screenshots, step)
    return parts.screenshots[max(seen - window, 0) : seen]
