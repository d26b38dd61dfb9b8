"""Smaller transcripts of the same shape, for what would take too long at full size."""

from __future__ import annotations

import math

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
