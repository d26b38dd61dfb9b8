"""Fewer steps and smaller numbers that still show a finding."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .walk import Step

_SMALLEST_NUMBERS = (0, 1, 2, 3, 5, 8)


def shrink(steps: Sequence[Step], fails: Callable[[Sequence[Step]], bool], until: float) -> list[Step]:
    """Delta debugging by halves, then numbers one by one; `until` is a reading of time.perf_counter."""
    kept = list(steps)
    size = max(len(kept) // 2, 1)
    while size and time.perf_counter() < until:
        begin, shorter = 0, False
        while begin < len(kept) and time.perf_counter() < until:
            fewer = kept[:begin] + kept[begin + size :]
            if fewer and fails(fewer):
                kept, shorter = fewer, True
            else:
                begin += size
        size = size if shorter and size == 1 else size // 2
    for index in range(len(kept)):
        for place in range(3):
            for number in _SMALLEST_NUMBERS:
                name, *numbers = kept[index]
                if time.perf_counter() > until or number >= numbers[place]:
                    break
                numbers[place] = number
                x, y, z = numbers
                smaller: list[Step] = [*kept[:index], (name, x, y, z), *kept[index + 1 :]]
                if fails(smaller):
                    kept = smaller
                    break
    return kept
