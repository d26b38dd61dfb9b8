"""Smaller transcripts of the same shape, for what would take too long at full size."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

from .layouts import PromptError
from .transcript import Screenshot, Step, Text, Transcript


def scaled(transcript: Transcript, factor: float) -> Transcript:
    """A transcript with every drawn text and every screenshot `factor` times as many tokens, one at least.

    Screenshots keep their proportions as far as whole patches allow. Nothing else changes: as many steps, each with what it
    had.

    Raises:
        PromptError: the factor is not above 0 and at most 1, or a text or screenshot is given in full and cannot shrink.

    """
    if not 0 < factor <= 1:
        raise PromptError(f"a scale of {factor:g}: give a share above 0, up to 1")
    if factor == 1:
        return transcript
    texts = {name: _text(getattr(transcript, name), factor) for name in ("preamble", "turn", "closing", "slot_heading")}
    steps = tuple(
        Step(
            screenshot=step.screenshot and _screenshot(step.screenshot, factor),
            action=_text(step.action, factor),
            tool=step.tool and _text(step.tool, factor),
        )
        for step in transcript.steps
    )
    return transcript.model_copy(update={**texts, "steps": steps, "evicted": _text(transcript.evicted, factor)})


_PASSES = 2  # a check decodes a task by two arms, or by one and once more from scratch
_MARKERS = 2


def decoded_at_most(transcript: Transcript) -> int:
    """Tokens that a check decodes for a transcript at most, in a vocabulary of bytes that has the markers.

    Every prompt whole and every action, twice: as if no arm reused anything.
    """
    return _PASSES * sum(_prompts(transcript))


def ended_within(transcript: Transcript, most: int) -> Transcript:
    """The first steps of a task, as many as decode `most` tokens at most, but one at least."""
    totals = [_PASSES * total for total in accumulate(_prompts(transcript))]
    kept = max(1, bisect_right(totals, most))
    return transcript if kept == len(totals) else transcript.first(kept)


def _prompts(transcript: Transcript) -> Iterator[int]:
    """The longest prompt that any layout makes of each step, with its action."""
    ending = _length(transcript.slot_heading) + _length(transcript.turn) + _length(transcript.closing)
    history, seen = _length(transcript.preamble), 0
    for step in transcript.steps:
        if step.screenshot:
            seen += max(step.screenshot.n_tokens + _MARKERS, _length(transcript.evicted))
        action = _length(step.action)
        yield history + seen + ending + action
        history += _length(transcript.turn) + action + (_length(step.tool) if step.tool else 0)


def _length(text: Text) -> int:
    return (text.tokens or 0) if text.string is None else len(text.string.encode())


def _text(text: Text, factor: float) -> Text:
    if text.string:
        raise PromptError(
            f"a scale of {factor:g}: the text {text.string[:20]!r} is given in full; only drawn texts shrink"
        )
    if text.seed is None or not text.tokens:
        return text
    return Text.drawn(text.seed, max(1, round(text.tokens * factor)))


def _screenshot(screenshot: Screenshot, factor: float) -> Screenshot:
    if screenshot.path is not None:
        raise PromptError(
            f"a scale of {factor:g}: the image {screenshot.path} is given in full; only drawn ones shrink"
        )
    side = math.sqrt(factor)
    width, height = (max(1, round(side * each)) for each in (screenshot.width, screenshot.height))
    return screenshot.model_copy(update={"width": width, "height": height})
