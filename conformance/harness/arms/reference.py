"""The parts of the agent loop that checks use, in one place, so that a planted fault can replace any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from conformance.harness.measure.rederivation import Rederivation

from .counts import COUNTED, ArmName, CountedArm, StepCounts, counts, crossover, require_room
from .document import Document, rederive
from .optimum import Optimum, TaskOptimum, optimum, optimum_of


@dataclass(frozen=True)
class AgentReference:
    """What stands for each part: the function or class of that name unless a fault says otherwise."""

    counted: Mapping[ArmName, CountedArm] = field(default_factory=lambda: COUNTED)
    counts: Callable[..., tuple[StepCounts, ...]] = counts
    crossover: Callable[..., int | None] = crossover
    require_room: Callable[..., None] = require_room
    optimum_of: Callable[..., TaskOptimum] = optimum_of
    optimum: Callable[..., Optimum] = optimum
    rederive: Callable[[Document], list[Rederivation]] = rederive
