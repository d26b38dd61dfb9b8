"""What a walk may do, and how often in proportion."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from .findings import Finding
from .walk import Key, Step, Walk

Act = Callable[[Walk, Key, int, int], None]
"""Makes one call, or none where nothing fits, on a sequence; two numbers choose its arguments."""

_LARGEST = 1 << 10


@dataclass(frozen=True)
class Weighted:
    """A step and its weight."""

    act: Act
    weight: int


STEPS: dict[str, Weighted] = {}


def step(weight: int) -> Callable[[Act], Act]:
    """Make a step of a function."""

    def enter(act: Act) -> Act:
        STEPS[act.__name__] = Weighted(act, weight)
        return act

    return enter


def take(walk: Walk, step: Step) -> None:
    """Make one call and compare."""
    name, x, y, z = step
    context, sequence = (x // 8) % 2 if x >= 8 else 0, x % walk.settings.n_seq_max
    STEPS[name].act(walk, (context, sequence), y, z)


def run(walk: Walk, steps: Collection[Step]) -> Finding | None:
    """Walk the steps from a new context; the first finding, or None."""
    try:
        walk.open()
        for each in steps:
            take(walk, each)
        walk.finish()
    except Finding as finding:
        return finding
    return None


def random_steps(seed: int, n: int) -> list[Step]:
    """Steps drawn by their weights."""
    random = np.random.default_rng(seed)
    weights = np.array([each.weight for each in STEPS.values()], float)
    names = random.choice(list(STEPS), n, p=weights / weights.sum()).tolist()
    return [(name, *map(int, random.integers(0, _LARGEST, 3))) for name in names]
