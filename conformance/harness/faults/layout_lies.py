"""Layouts and counts that lie: each overrides what one lie needs and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conformance.harness.arms.counts import (
    COUNTED,
    ArmName,
    Moment,
    StepCounts,
    crossover,
    require_room,
    reused_by_terminal_slot,
)
from conformance.harness.prompts.layouts import ImagePiece, Prompt, TextPiece, Vocabulary, evict, terminal_slot
from conformance.harness.prompts.transcript import Transcript


def counted(*arms: ArmName, **parts: Any) -> Mapping[ArmName, Any]:
    """The counted arms, some of them with another layout or another rule of reuse."""
    return {**COUNTED, **{arm: replace(COUNTED[arm], **parts) for arm in arms}}


def hit_across_an_eviction(moment: Moment) -> int:
    """Counts everything of the step before as reused, also what was rewritten."""
    return min(moment.kept, moment.prompt.n_tokens)


def with_the_newest_text_twice(transcript: Transcript, step: int, window: int, vocabulary: Vocabulary) -> Prompt:
    """Appends the newest text to the history twice."""
    prompt = terminal_slot(transcript, step, window, vocabulary)
    said = vocabulary.parts(transcript).said[step - 2] if step > 1 else ()
    history = sum(piece.role in ("preamble", "action", "tool") for piece in prompt.pieces)
    place = max((n + 1 for n, piece in enumerate(prompt.pieces) if piece.role in ("action", "tool")), default=history)
    return Prompt((*prompt.pieces[:place], *said, *prompt.pieces[place:]))


def one_screenshot_more(transcript: Transcript, step: int, window: int, vocabulary: Vocabulary) -> Prompt:
    """Shows W + 1 screenshots."""
    return terminal_slot(transcript, step, window + 1, vocabulary)


def oldest_screenshots(transcript: Transcript, step: int, window: int, vocabulary: Vocabulary) -> Prompt:
    """Shows the oldest screenshot in the place of the oldest of the window."""
    prompt = terminal_slot(transcript, step, window, vocabulary)
    parts = vocabulary.parts(transcript)
    if not prompt.images:
        return prompt
    oldest, replaced = parts.screenshots[0], prompt.images[0].step
    first = ImagePiece(transcript.steps[oldest - 1].screenshot, oldest)  # type: ignore[arg-type]
    return Prompt(
        tuple(first if piece.role == "image" and piece.step == replaced else piece for piece in prompt.pieces)
    )


@dataclass(frozen=True)
class _FlatImage(ImagePiece):
    """An image whose every token takes a position."""

    @property
    def n_positions(self) -> int:
        return self.n_tokens


def positions_by_tokens(transcript: Transcript, step: int, window: int, vocabulary: Vocabulary) -> Prompt:
    """Moves positions on by the tokens of an image."""
    prompt = terminal_slot(transcript, step, window, vocabulary)
    return Prompt(
        tuple(
            _FlatImage(piece.screenshot, piece.step) if isinstance(piece, ImagePiece) else piece
            for piece in prompt.pieces
        )
    )


def checkpoint_one_image_late(moment: Moment) -> int:
    """Takes the first screenshot of the window for part of the checkpoint."""
    first = (
        moment.previous.images[0].end - moment.previous.images[0].begin
        if moment.previous and moment.previous.images
        else 0
    )
    return reused_by_terminal_slot(moment) + first


def sink_rewritten(transcript: Transcript, step: int, window: int, vocabulary: Vocabulary) -> Prompt:
    """Drops the first token once a screenshot was evicted."""
    prompt = evict(transcript, step, window, vocabulary)
    first = prompt.pieces[0]
    if not isinstance(first, TextPiece) or not any(piece.role == "evicted" for piece in prompt.pieces):
        return prompt
    return Prompt((replace(first, tokens=first.tokens[1:]), *prompt.pieces[1:]))


def crossover_one_late(cheaper: Sequence[StepCounts], dearer: Sequence[StepCounts]) -> int | None:
    """Says one step more."""
    found = crossover(cheaper, dearer)
    return None if found is None else found + 1


def room_for_positions_forgotten(
    steps: Sequence[StepCounts], arm: ArmName, transcript: Transcript, n_ctx: int, n_positions: int
) -> None:
    """Looks at cells alone."""
    require_room(steps, arm, transcript, n_ctx, max(step.n_positions for step in steps))
