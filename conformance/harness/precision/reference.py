"""The parts of the precision reference that checks use, in one place, so that a planted fault can replace any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conformance.harness.measure.kld import Floats, KldRun, Scores, Tokens, score
from conformance.harness.precision.body import Body, body
from conformance.harness.precision.emulation import TailedSequence
from conformance.harness.precision.memory import FootprintModel, footprint
from conformance.harness.precision.oracle import Doubles, Rows, attend
from conformance.harness.precision.tail import Selection, resolve_tail


@dataclass(frozen=True)
class Reference:
    """What stands for each part: the function or class of that name unless a fault says otherwise."""

    tailed: type[TailedSequence] = TailedSequence
    body: Callable[..., Body] = body
    resolve_tail: Callable[..., int] = resolve_tail
    attend: Callable[[Floats, Rows, Rows, Selection], Doubles] = attend
    footprint: FootprintModel = footprint
    score: Callable[[Floats, Floats, Tokens], Scores] = score
    statistics: type[KldRun] = KldRun
