"""What each arm prefills, reuses and holds at every step, from the lengths of a transcript's parts alone; no engine.

Evict is counted in two readings, told apart by name everywhere. As the document runs it (``evict``), nothing behind the
preamble is reused once a screenshot has been evicted. With ideal checkpoints (``evict_ideal``), a checkpoint exists at every
place where a prompt can begin to differ, so that everything in front of the rewritten screenshot is reused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from conformance.harness.prompts.layouts import (
    Layout,
    Parts,
    Prompt,
    PromptError,
    Vocabulary,
    append_only,
    evict,
    terminal_slot,
)
from conformance.harness.prompts.transcript import FIXED_TEXTS, Transcript

ArmName = Literal["evict", "evict_ideal", "append_only", "terminal_slot"]
ARMS: tuple[ArmName, ...] = get_args(ArmName)

LABELS: Mapping[ArmName, str] = {
    "evict": "evict, as the document runs it",
    "evict_ideal": "evict, with a checkpoint at every change point",
    "append_only": "no-evict",
    "terminal_slot": "terminal slot",
}
"""The arms in words."""


@dataclass(frozen=True)
class StepCounts:
    """One step of an arm, in tokens.

    Attributes:
        prompt_tokens: the whole prompt, markers counted; reused_tokens + prefilled_tokens.
        reused_tokens: of it, what was in the cache or in a checkpoint before.
        decoded_tokens: the action.
        live_cells: cells taken once the action is decoded, which is when there are most of them.
        n_positions: the position behind the action.

    """

    step: int
    prompt_tokens: int
    reused_tokens: int
    prefilled_tokens: int
    decoded_tokens: int
    live_cells: int
    n_positions: int


@dataclass(frozen=True)
class Moment:
    """A step as a rule of reuse sees it: the prompts of this step and of the one before it (None at the first)."""

    transcript: Transcript
    step: int
    window: int
    vocabulary: Vocabulary
    prompt: Prompt
    previous: Prompt | None

    @property
    def parts(self) -> Parts:
        """The pieces of the transcript."""
        return self.vocabulary.parts(self.transcript)

    @property
    def kept(self) -> int:
        """Tokens that the cache holds of the step before and that stay: its prompt, its action too unless a closing is between."""
        if self.previous is None:
            return 0
        closing = sum(piece.n_tokens for piece in self.parts.closings[self.step - 2])
        return (
            self.previous.n_tokens - closing
            if closing
            else self.previous.n_tokens + self.parts.action_tokens(self.step - 1)
        )

    @property
    def evicted(self) -> int | None:
        """The step whose screenshot was shown last among those that no longer are; None before the first eviction."""
        seen = bisect_right(self.parts.screenshots, self.step)
        return self.parts.screenshots[seen - self.window - 1] if seen > self.window else None


def reused_by_evict(moment: Moment) -> int:
    """As the document runs it: from the first eviction on the preamble and no more."""
    return moment.prompt.starts[1].tokens if moment.evicted is not None else moment.kept


def reused_by_evict_ideal(moment: Moment) -> int:
    """With a checkpoint at every change point: everything in front of the screenshot that this step evicts."""
    if moment.evicted is None or moment.step not in moment.parts.screenshots:
        return moment.kept
    pieces = zip(moment.prompt.pieces, moment.prompt.starts, strict=False)
    return next(at.tokens for piece, at in pieces if piece.step >= moment.evicted)


def reused_by_append_only(moment: Moment) -> int:
    """Everything that the cache holds."""
    return moment.kept


def reused_by_terminal_slot(moment: Moment) -> int:
    """The checkpoint of the step before: preamble and the texts that were history then."""
    return 0 if moment.previous is None else moment.parts.history_tokens(moment.step - 1)


@dataclass(frozen=True)
class CountedArm:
    """An arm as far as counts go: its layout, and how much of a step's prompt it finds in cache or checkpoint."""

    layout: Layout
    reused: Callable[[Moment], int]


COUNTED: Mapping[ArmName, CountedArm] = {
    "evict": CountedArm(evict, reused_by_evict),
    "evict_ideal": CountedArm(evict, reused_by_evict_ideal),
    "append_only": CountedArm(append_only, reused_by_append_only),
    "terminal_slot": CountedArm(terminal_slot, reused_by_terminal_slot),
}


def prompts(layout: Layout, transcript: Transcript, window: int, vocabulary: Vocabulary) -> Iterator[Prompt]:
    """The prompt of every step."""
    for step in range(1, len(transcript.steps) + 1):
        yield layout(transcript, step, window, vocabulary)


def counts(
    arm: ArmName,
    transcript: Transcript,
    window: int,
    vocabulary: Vocabulary,
    counted: Mapping[ArmName, CountedArm] = COUNTED,
) -> tuple[StepCounts, ...]:
    """The counts of every step of an arm."""
    found = []
    previous = None
    for step, prompt in enumerate(prompts(counted[arm].layout, transcript, window, vocabulary), 1):
        reused = counted[arm].reused(Moment(transcript, step, window, vocabulary, prompt, previous))
        decoded = vocabulary.parts(transcript).action_tokens(step)
        found.append(
            StepCounts(
                step=step,
                prompt_tokens=prompt.n_tokens,
                reused_tokens=reused,
                prefilled_tokens=prompt.n_tokens - reused,
                decoded_tokens=decoded,
                live_cells=prompt.n_tokens + decoded,
                n_positions=prompt.n_positions + decoded,
            )
        )
        previous = prompt
    return tuple(found)


def crossover(cheaper: Sequence[StepCounts], dearer: Sequence[StepCounts]) -> int | None:
    """The first step from which on `cheaper` prefills fewer tokens than `dearer` at every step; None when there is none."""
    since = None
    for one, other in zip(cheaper, dearer, strict=True):
        if one.prefilled_tokens >= other.prefilled_tokens:
            since = None
        elif since is None:
            since = one.step
    return since


def require_parts(transcript: Transcript, n_ctx: int) -> None:
    """Refuse a part that alone is larger than a context; reads no text, so it may be asked before anything is counted.

    Raises:
        PromptError: the first image that takes more than `n_ctx` tokens, or else the first drawn text.

    """
    _require_images(transcript, n_ctx)
    texts = [(f"the text {name}", getattr(transcript, name)) for name in FIXED_TEXTS]
    for number, step in enumerate(transcript.steps, 1):
        texts += [(f"step {number}: the action", step.action), (f"step {number}: the tool's answer", step.tool)]
    for what, text in texts:
        if text and (text.tokens or 0) > n_ctx:
            raise PromptError(
                f"{what} takes {text.tokens} tokens, more than the context of {n_ctx}; use a shorter one or a larger context"
            )


def _require_images(transcript: Transcript, n_ctx: int) -> None:
    for number, each in enumerate(transcript.steps, 1):
        if each.screenshot and each.screenshot.n_tokens > n_ctx:
            raise PromptError(
                f"step {number}: the image takes {each.screenshot.n_tokens} tokens, more than the context of {n_ctx}; "
                "use a smaller screenshot or a larger context"
            )


def require_room(
    steps: Sequence[StepCounts], arm: ArmName, transcript: Transcript, n_ctx: int, n_positions: int
) -> None:
    """Refuse what does not fit.

    Args:
        steps: the counts of the arm.
        arm: which one they are of.
        transcript: what was counted.
        n_ctx: cells of the context.
        n_positions: positions that the model was trained on.

    Raises:
        PromptError: an image is larger than the context, or the first step that takes too many cells or positions.

    """
    _require_images(transcript, n_ctx)
    for each_step in steps:
        for need, have, what in (
            (each_step.live_cells, n_ctx, "cells, and the context has"),
            (each_step.n_positions, n_positions, "positions, and the model was trained on"),
        ):
            if need > have:
                raise PromptError(
                    f"step {each_step.step}: {LABELS[arm]} needs {need} {what} {have}; "
                    "use a smaller W, shorter texts or fewer steps"
                )
