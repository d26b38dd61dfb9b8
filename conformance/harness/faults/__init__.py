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
    "hybrid-state-grows": Fault(
        "the recurrent half of the state holds one more cell for every 128 tokens",
        ("AR-02", "AR-04"),
        "qwen35-mini",
        lies.RecurrentStateGrows,
    ),
    "cache-type-ignored": Fault(
        "every cache is f16, whatever was asked for", ("AR-03", "AR-04"), "qwen3-mini", lies.CacheTypeIgnored
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
    "restores-wear-out": Fault(
        "every restore after a context's first weakens one recurrent layer's s",
        ("RP-05",),
        "qwen35-mini",
        lies.RestoresWearOut,
    ),
    "file-tokens-cut": Fault(
        "a file gives back all of its tokens but the last", ("RP-06",), "qwen3-mini", lies.FileTokensCut
    ),
    "context-file-short": Fault(
        "a file of the whole context brings back its first sequence only",
        ("RP-06",),
        "rwkv7-mini",
        lies.ContextFileShort,
    ),
    "context-size-sticks": Fault(
        "a restore puts each value of one layer into the next cell where n_ctx is another",
        ("RP-07",),
        "qwen3-mini",
        lies.ContextSizeSticks,
    ),
    "restore-spills-over": Fault(
        "a restore clears part of the next sequence", ("RP-08",), "qwen35-mini", lies.RestoreSpillsOver
    ),
    "removal-spills-over": Fault(
        "a removal takes the newest token of the next sequence along", ("RP-08",), "qwen3-mini", lies.RemovalSpillsOver
    ),
    "image-positions-swapped": Fault(
        "a restore takes x for y and y for x", ("RP-10",), "qwen35-mini", lies.ImagePositionsSwapped
    ),
    "partial-is-full": Fault("a partial state is the full one", ("RP-13",), "holo3-mini", lies.PartialIsFull),
    "window-partial-is-full": Fault("a partial state is the full one", ("RP-13",), "gemma3-mini", lies.PartialIsFull),
    "empty-state-ignored": Fault(
        "the state of an empty sequence is accepted and changes nothing",
        ("RP-06/empty-over-used",),
        "mamba2-mini",
        lies.EmptyStateIgnored,
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
