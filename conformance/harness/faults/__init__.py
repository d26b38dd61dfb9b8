"""Engines that lie in one planned way each, to prove that the checks bite.

A fault is a `Context` whose one method does not do what it says. Everything else, the build included, is real.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance.harness.engine import Context
from conformance.harness.precision.reference import Reference

from . import lies, precision_lies


@dataclass(frozen=True)
class Fault:
    """One planned lie.

    Attributes:
        lie: what this engine does wrong, in one sentence.
        caught_by: ids of the invariants that must not pass on it.
        model: the fixture model on which it is shown.
        context: the lying engine, or the true one where the precision reference lies instead.
        reference: the precision reference, with the part that lies.
        verdict: how the checks must end.

    """

    lie: str
    caught_by: tuple[str, ...]
    model: str
    context: type[Context] = Context
    verdict: str = "FAIL"
    reference: Reference = field(default_factory=Reference)


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
        "every cache is f16, whatever was asked for", ("AR-03", "AR-04", "KL-02"), "qwen3-mini", lies.CacheTypeIgnored
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
    "tail-one-row-short": Fault(
        "a tail of N rows keeps N - 1",
        ("PT-01", "PT-02"),
        "qwen3-mini",
        reference=Reference(tailed=precision_lies.OneRowShort),
    ),
    "oldest-rows-exact": Fault(
        "the oldest N rows are exact, not the newest",
        ("PT-01",),
        "qwen3-mini",
        reference=Reference(tailed=precision_lies.OldestRowsExact),
    ),
    "quantized-twice": Fault(
        "rows go through the body twice",
        ("PT-01",),
        "qwen3-mini",
        reference=Reference(tailed=precision_lies.QuantizedTwice),
    ),
    "wrong-zero-point-in-the-cache": Fault(
        "rows come back from the body a little too high",
        ("PT-01",),
        "qwen3-mini",
        reference=Reference(tailed=precision_lies.WrongZeroPoint),
    ),
    "two-softmaxes": Fault(
        "body and tail have a softmax each",
        ("PT-01",),
        "qwen3-mini",
        reference=Reference(attend=precision_lies.two_softmaxes),
    ),
    "longer-tails-keep-less": Fault(
        "a tail of N rows keeps 256 - N",
        ("PT-03", "PT-04"),
        "smollm2-135m",
        reference=Reference(tailed=precision_lies.LongerTailsKeepLess),
    ),
    "short-tails-ignored": Fault(
        "a tail of less than 100 rows is none",
        ("PT-10",),
        "smollm2-135m",
        reference=Reference(tailed=precision_lies.ShortTailsIgnored),
    ),
    "tail-reaches-everything": Fault(
        "with a tail every row is read exactly",
        ("PT-05",),
        "qwen3-mini",
        reference=Reference(attend=precision_lies.attention_over_exact_rows),
    ),
    "tail-without-groups": Fault(
        "a tail over KVarN is not rounded up to groups",
        ("PT-06",),
        "qwen3-mini",
        reference=Reference(resolve_tail=precision_lies.resolved_without_groups),
    ),
    "window-not-promoted": Fault(
        "a tail as long as the window still quantizes the oldest row in it",
        ("SW-01",),
        "gemma3-mini",
        reference=Reference(tailed=precision_lies.WindowNotPromoted),
    ),
    "sliding-ring-is-whole": Fault(
        "layers with a window keep every row", ("SW-02",), "gemma3-mini", precision_lies.SlidingRingIsWhole
    ),
    "tail-memory-without-ubatch": Fault(
        "a tail is given no room for the micro-batch in flight",
        ("PT-07", "KS-05"),
        "qwen3-mini",
        reference=Reference(footprint=precision_lies.footprint_without_ubatch),
    ),
    "roll-back-claims-exact": Fault(
        "after a roll back the tail is said to be whole again",
        ("PT-08",),
        "qwen3-mini",
        reference=Reference(tailed=precision_lies.RollbackClaimsExact),
    ),
    "finer-types-are-coarser": Fault(
        "the more bits a type has the fewer are used",
        ("KL-01",),
        "smollm2-135m",
        reference=Reference(tailed=precision_lies.FinerTypesAreCoarser),
    ),
    "body-with-wrong-zero-point": Fault(
        "rows come back from the body a little too high",
        ("KN-01",),
        "qwen3-mini",
        reference=Reference(body=precision_lies.body_with_wrong_zero_point),
    ),
    "v-tiles-transposed": Fault(
        "V records are laid out like K records",
        ("KN-01",),
        "qwen3-mini",
        reference=Reference(body=precision_lies.body_with_transposed_v),
    ),
    "never-rotated": Fault(
        "bodies are kept without the rotation",
        ("KL-05",),
        "smollm2-135m",
        reference=Reference(tailed=precision_lies.NeverRotated),
    ),
    "one-side-is-coarser": Fault(
        "a side that is quantized alone is kept in q2_0",
        ("KL-03",),
        "smollm2-135m",
        reference=Reference(tailed=precision_lies.OneSideIsCoarser),
    ),
    "kvarn-in-two-bits": Fault(
        "every KVarN type has two bits",
        ("KN-02", "KL-04"),
        "smollm2-135m",
        reference=Reference(tailed=precision_lies.KVarNInTwoBits),
    ),
    "sink-quantized": Fault(
        "the first rows go into records too",
        ("KN-03",),
        "qwen3-mini",
        reference=Reference(tailed=precision_lies.SinkQuantized),
    ),
    "base-rounded": Fault(
        "logits are scored against a base rounded to 16 bits",
        ("KS-01", "KS-02"),
        "qwen3-mini",
        reference=Reference(score=precision_lies.score_of_rounded_base),
    ),
    "median-of-means": Fault(
        "the median is that of the means of blocks",
        ("KS-02", "KS-03"),
        "qwen3-mini",
        reference=Reference(statistics=precision_lies.MedianOfMeans),
    ),
    "nan-dropped": Fault(
        "positions that are not finite are left out",
        ("KS-04",),
        "qwen3-mini",
        reference=Reference(statistics=precision_lies.NaNDropped),
    ),
    "single-tokens-are-sharper": Fault(
        "a token decoded alone gets larger logits", ("KS-06",), "qwen3-mini", precision_lies.SingleTokensAreSharper
    ),
    "not-repeatable": Fault(
        "two identical decodes differ by a relative 1e-6", ("RP-01",), "qwen3-mini", lies.NotRepeatable, "UNKNOWN"
    ),
}

__all__ = ["FAULTS", "Fault"]
