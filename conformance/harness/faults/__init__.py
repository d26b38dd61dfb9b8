"""Engines that lie in one planned way each, to prove that the checks bite.

A fault is a `Context` whose one method does not do what it says. Everything else, the build included, is real.
"""

from __future__ import annotations

from dataclasses import dataclass

from conformance.harness.engine import Context

from . import lies


@dataclass(frozen=True)
class Fault:
    """One planned lie.

    Attributes:
        lie: what this engine does wrong, in one sentence.
        caught_by: ids of the invariants that must not pass on it.
        model: the fixture model on which it is shown.
        context: the lying engine.
        verdict: how the checks must end.

    """

    lie: str
    caught_by: tuple[str, ...]
    model: str
    context: type[Context]
    verdict: str = "FAIL"


FAULTS: dict[str, Fault] = {
    "layer-missing": Fault("the saved state lacks its last layer", ("AR-01",), "holo3-mini", lies.LayerMissing),
    "attention-layer-missing": Fault(
        "the saved state lacks its last layer", ("AR-01",), "qwen3-mini", lies.LayerMissing
    ),
    "recurrent-state-grows": Fault(
        "the recurrent state holds one more cell for every 128 tokens",
        ("AR-02",),
        "mamba2-mini",
        lies.RecurrentStateGrows,
    ),
    "cache-type-ignored": Fault(
        "every cache is f16, whatever was asked for", ("AR-03",), "qwen3-mini", lies.CacheTypeIgnored
    ),
    "recurrent-layer-stale": Fault(
        "a restore leaves one recurrent layer's s as it was in an empty context",
        ("RP-01", "RP-02", "RP-03", "RP-04"),
        "holo3-mini",
        lies.RecurrentLayerStale,
    ),
    "delta-state-dropped": Fault(
        "a restore brings back the convolution windows and drops the delta states",
        ("RP-01", "RP-02", "RP-03", "RP-04"),
        "holo3-mini",
        lies.DeltaStateDropped,
    ),
    "attention-row-off-by-one": Fault(
        "a restore puts each key of one layer into the next cell",
        ("RP-01", "RP-02", "RP-03"),
        "holo3-mini",
        lies.AttentionRowOffByOne,
    ),
    "used-context-shows-through": Fault(
        "a restore into a context that was used keeps one layer of the removed sequence",
        ("RP-03",),
        "holo3-mini",
        lies.UsedContextShowsThrough,
    ),
    "target-sequence-ignored": Fault(
        "a restore always goes to sequence 0", ("RP-03",), "qwen3-mini", lies.TargetSequenceIgnored
    ),
    "removal-forgotten": Fault(
        "removing a suffix says yes and does nothing", ("RP-04",), "holo3-mini", lies.RemovalForgotten
    ),
    "announced-too-large": Fault(
        "the announced size of a state is 8 bytes more than what is written",
        ("RP-09",),
        "holo3-mini",
        lies.AnnouncedTooLarge,
    ),
    "consumed-short": Fault(
        "a restore says that it read 4 bytes less than it did", ("RP-09",), "mamba2-mini", lies.ConsumedShort
    ),
    "aborts-on-partial-save": Fault(
        "saving a partial state aborts the process", ("RP-04", "RP-09"), "holo3-mini", lies.AbortsOnPartialSave, "CRASH"
    ),
    "hangs-on-partial-save": Fault(
        "saving a partial state never returns", ("RP-04",), "qwen35-mini", lies.HangsOnPartialSave, "TIMEOUT"
    ),
    "not-repeatable": Fault(
        "two identical decodes differ by a relative 1e-6", ("RP-01",), "qwen3-mini", lies.NotRepeatable, "UNKNOWN"
    ),
}

__all__ = ["FAULTS", "Fault"]
