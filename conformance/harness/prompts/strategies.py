"""Draws transcripts: small where nothing else is asked for, so that what fails shrinks to something readable."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from .transcript import Screenshot, Step, Text, Transcript

Bounds = tuple[int, int]

_BYTES_PER_CHARACTER = 4  # at most, in UTF-8; no vocabulary that falls back to bytes needs more tokens
_GRIDS = 4
_FIXED = ("turn", "closing", "evicted", "slot_heading")
_LONGEST_FIXED = 30  # tokens of each text that a layout repeats


def transcripts(
    *,
    preamble: Bounds = (1, 2000),
    steps: Bounds = (1, 100),
    text: Bounds = (0, 400),
    width: Bounds = (1, 60),
    height: Bounds = (1, 34),
) -> st.SearchStrategy[Transcript]:
    """Transcripts within bounds: tokens of the preamble, steps, tokens of each text, grid of each image in patches.

    Actions and tools' answers may be strings of any characters or drawn, tools may say nothing, steps may bring no
    screenshot or one that was seen before. Each drawn text and each new screenshot has a content of its own. Shrinks to
    one step without a screenshot and with empty texts.
    """
    grids = st.lists(st.tuples(st.integers(*width), st.integers(*height)), min_size=1, max_size=_GRIDS)
    seen = st.one_of(st.none(), st.integers(0, _GRIDS - 1), st.just("again"))
    step = st.tuples(seen, _texts(text), st.one_of(st.none(), _texts(text)))
    return st.builds(
        _transcript,
        st.integers(*preamble),
        grids,
        st.tuples(*[st.integers(0, _LONGEST_FIXED)] * len(_FIXED)),
        _lengths(*steps).flatmap(lambda n: st.lists(step, min_size=n, max_size=n)),
    )


def extremes(preamble: Bounds, steps: Bounds, text: Bounds, width: Bounds, height: Bounds) -> tuple[Transcript, ...]:
    """The transcripts of fewest and of most tokens that `transcripts` draws within these bounds."""
    least = (None, text[0], None)
    most = (0, text[1], text[1])
    return (
        _transcript(preamble[0], [], (0,) * len(_FIXED), [least] * steps[0]),
        _transcript(preamble[1], [(width[1], height[1])], (_LONGEST_FIXED,) * len(_FIXED), [most] * steps[1]),
    )


def _lengths(low: int, high: int) -> st.SearchStrategy[int]:
    """Evenly from a range, in tens and ones: a long task that fails becomes a short one in a single step of shrinking."""
    tens, ones = divmod(high - low, 10)
    return st.tuples(st.integers(0, tens), st.integers(0, 9 if tens else ones)).map(
        lambda drawn: min(low + 10 * drawn[0] + drawn[1], high)
    )


def _texts(bounds: Bounds) -> st.SearchStrategy[int | str]:
    """A number of tokens, or a string of no more."""
    low, high = bounds
    strings = st.text(
        st.characters(codec="utf-8", exclude_characters="\0"), min_size=low, max_size=high // _BYTES_PER_CHARACTER
    )
    return st.one_of(st.integers(low, high), strings) if high // _BYTES_PER_CHARACTER >= low else st.integers(low, high)


def _transcript(preamble: int, grids: list[tuple[int, int]], fixed: tuple[int, ...], drawn: list[Any]) -> Transcript:
    steps: list[Step] = []
    screenshots: list[Screenshot] = []
    for number, (seen, action, tool) in enumerate(drawn, 1):
        screenshot = None
        if seen == "again" and screenshots:
            screenshot = screenshots[number % len(screenshots)]
        elif seen is not None:
            width, height = grids[0 if seen == "again" else seen % len(grids)]
            screenshot = Screenshot(width=width, height=height, seed=number)
        if screenshot:
            screenshots.append(screenshot)
        steps.append(
            Step(
                screenshot=screenshot,
                action=_text(2 * number, action),
                tool=tool if tool is None else _text(2 * number + 1, tool),
            )
        )
    others = {
        name: Text.drawn(seed, tokens) if tokens else Text(string="")
        for seed, (name, tokens) in enumerate(zip(_FIXED, fixed, strict=True), 2 * len(steps) + 2)
    }
    return Transcript(preamble=Text.drawn(0, preamble), steps=tuple(steps), **others)


def _text(seed: int, drawn: int | str) -> Text:
    return Text(string=drawn) if isinstance(drawn, str) else Text.drawn(seed, drawn)
