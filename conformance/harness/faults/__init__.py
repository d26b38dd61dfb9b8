"""Engines that lie in one planned way each, to prove that the checks bite.

A fault is a `Context` whose one method does not do what it says. Everything else, the build included, is real.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance.harness.engine import Context, HighLevel
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
        high_level: the lying `llama_cpp.Llama`.

    """

    lie: str
    caught_by: tuple[str, ...]
    model: str
    context: type[Context] = Context
    verdict: str = "FAIL"
    reference: Reference = field(default_factory=Reference)
    high_level: type[HighLevel] = HighLevel


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
    "source-sequence-ignored": Fault(
        "a save always saves sequence 0", ("RP-03",), "qwen3-mini", lies.SourceSequenceIgnored
    ),
    "forgets-everything": Fault(
        "nothing is kept from one call to the next; the first look at a model notices",
        (),
        "qwen3-mini",
        lies.ForgetsBeforeEveryDecode,
    ),
    "save-empties-the-source": Fault(
        "a save removes what it saved", ("RP-01",), "qwen3-mini", lies.SaveEmptiesTheSource
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
        "two identical decodes differ by a relative 1e-6",
        ("RP-01", "BT-05/repeats"),
        "qwen3-mini",
        lies.NotRepeatable,
        "UNKNOWN",
    ),
    "removal-forgotten-by-attention": Fault(
        "a removal of a suffix says yes and does nothing",
        (
            "SM-01/suffix-removal",
            "DC-01/rebuilt",
        ),
        "qwen3-mini",
        lies.RemovalForgotten,
    ),
    "rollback-forgotten": Fault(
        "a removal of a suffix says yes and does nothing",
        (
            "SM-01/rollback-whole-last-batch",
            "SM-01/rollback-after-single-tokens",
            "SM-01/rollback-within-the-last-batch",
            "SM-01/rollback-across-ubatches",
            "SM-01/rollback-after-another-sequence-came",
        ),
        "lfm2-mini",
        lies.RemovalForgotten,
    ),
    "image-rollback-forgotten": Fault(
        "a removal of a suffix says yes and does nothing",
        ("SM-01/rollback-of-an-image",),
        "qwen35-mini",
        lies.RemovalForgotten,
    ),
    "removal-below-the-window-forgotten": Fault(
        "a removal of a suffix says yes and does nothing",
        ("SM-07/sliding-window-removal-below-the-window",),
        "gemma3-mini",
        lies.RemovalForgotten,
    ),
    "refuses-and-removes": Fault(
        "a removal of a part is refused and takes the whole sequence",
        ("SM-02",),
        "mamba2-mini",
        lies.RefusesAndRemoves,
    ),
    "removes-open-ranges-only": Fault(
        "a removal of a range with an end, or of all sequences, is refused",
        (
            "SM-03/whole-removal",
            "SM-03/removal-wildcard",
        ),
        "qwen3-mini",
        lies.RemovesOpenRangesOnly,
    ),
    "empty-range-takes-the-last": Fault(
        "a removal of an empty range takes the last token",
        ("SM-03/empty-ranges", "SM-13"),
        "qwen3-mini",
        lies.EmptyRangeTakesTheLast,
    ),
    "unused-sequence-is-the-first": Fault(
        "a removal of a sequence without tokens takes sequence 0",
        ("SM-03/unused-sequences",),
        "qwen3-mini",
        lies.UnusedSequenceIsTheFirst,
    ),
    "no-sequence-is-the-first": Fault(
        "a call on an id that no sequence has is made on sequence 0",
        ("SM-03/sequence-ids-out-of-range",),
        "mamba2-mini",
        lies.NoSequenceIsTheFirst,
    ),
    "zero-divides": Fault(
        "positions divided by 0 become 0",
        ("SM-03/division-by-zero",),
        "mamba2-mini",
        lies.ZeroDivides,
    ),
    "shifts-every-sequence": Fault(
        "a shift and a division move the positions of every sequence",
        ("SM-06/shifting-a-copy-moves-the-original",),
        "qwen3-mini",
        lies.ShiftsEverySequence,
    ),
    "clear-forgotten": Fault(
        "clearing and keeping one sequence do nothing",
        (
            "SM-04/emptied",
            "SM-04/keeping-one-removes-the-others",
        ),
        "mamba2-mini",
        lies.ClearForgotten,
    ),
    "empty-state-ignored": Fault(
        "the state of an unused sequence is accepted and does nothing",
        ("SM-04/empty-blob-into-a-dirty-sequence",),
        "mamba2-mini",
        lies.EmptyStateIgnored,
    ),
    "copy-forgotten": Fault(
        "copying a sequence does nothing",
        (
            "SM-05/copies-diverge",
            "SM-05/save-while-a-copy-is-pending",
            "SM-05/source-changed-while-a-copy-is-pending",
            "SM-09/unified-and-separate-agree",
        ),
        "mamba2-mini",
        lies.CopyForgotten,
    ),
    "copy-takes-all": Fault(
        "a copy of a part takes the whole sequence",
        ("SM-09/partial-copy-between-streams",),
        "qwen3-mini",
        lies.CopyTakesAll,
    ),
    "trims-every-sequence": Fault(
        "a removal of a part takes it from every sequence",
        (
            "SM-06/trimming-a-copy-moves-the-original",
            "SM-06/saving-the-context-after-trimming-a-copy",
        ),
        "qwen3-mini",
        lies.TrimsEverySequence,
    ),
    "decode-trims-the-first": Fault(
        "decoding into sequence 1 takes the last token of sequence 0",
        ("SM-06/neighbours",),
        "qwen3-mini",
        lies.DecodeTrimsTheFirst,
    ),
    "positions-of-nothing": Fault(
        "an empty sequence is said to begin at 0",
        ("SM-07/positions-of-what-was-decoded",),
        "mamba2-mini",
        lies.PositionsOfNothing,
    ),
    "positions-after-abort": Fault(
        "the last position counts tokens whose decode was aborted",
        ("SM-07/abort-leaves-a-wrong-position",),
        "qwen3-mini",
        lies.PositionsAfterAbort,
    ),
    "automatic-positions-mixed-up": Fault(
        "tokens without positions are decoded from the last to the first",
        ("SM-08",),
        "mamba2-mini",
        lies.AutomaticPositionsMixedUp,
    ),
    "full-cache-forgets": Fault(
        "a full cache loses a token of another sequence",
        ("SM-10",),
        "qwen3-mini",
        lies.FullCacheForgets,
    ),
    "leaks-on-load": Fault(
        "every restore keeps 64 KiB",
        ("SM-11",),
        "mamba2-mini",
        lies.LeaksOnLoad,
    ),
    "allocates-on-load": Fault(
        "every restore needs 400 MiB",
        (
            "RB-01/mutated-header",
            "RB-01/every-field",
            "RB-01/mutated-file",
        ),
        "mamba2-mini",
        lies.AllocatesOnLoad,
    ),
    "attention-rows-off-by-one": Fault(
        "a restore puts each key of one layer into the next cell",
        ("DC-01/restored",),
        "qwen3-mini",
        lies.AttentionRowOffByOne,
    ),
    "shift-forgotten": Fault(
        "a shift does nothing",
        (
            "RP-01/save-while-a-shift-is-pending",
            "SP-03/shift-with-quantized-unrotated-keys",
            "SP-03/shift-with-bf16-keys",
        ),
        "qwen3-mini",
        lies.ShiftForgotten,
    ),
    "shift-removes": Fault(
        "a shift that is not possible removes the sequence",
        ("SP-02/shift-where-it-is-not-allowed",),
        "qwen35-mini",
        lies.ShiftForgotten,
    ),
    "starts-wrong": Fault(
        "another token is decoded first in sequence 1 and in micro-batches of less than 8",
        (
            "BT-01",
            "BT-03/sequence-ids",
        ),
        "qwen3-mini",
        lies.StartsWrong,
    ),
    "sequences-mixed-up": Fault(
        "rows of several sequences are mixed up, and shared tokens belong to one",
        (
            "BT-02",
            "BT-03/order-of-rows",
            "BT-03/coupled-sequences",
        ),
        "qwen3-mini",
        lies.SequencesMixedUp,
    ),
    "threads-matter": Fault(
        "two threads give logits that are a thousandth larger",
        ("BT-05/threads",),
        "mamba2-mini",
        lies.ThreadsMatter,
    ),
    "accepts-any-state": Fault(
        "every state is said to have been read",
        (
            "RB-01/rejected-restore-leaves-half-a-state",
            "RB-01/truncated-restore-into-an-empty-context",
            "RB-01/truncated-file",
            "RB-01/random-bytes",
            "RB-01/on-device-restore-of-a-bad-blob",
            "RB-01/truncated-context",
            "RB-01/every-cut",
            "RB-01/positions-out-of-range",
            "RB-01/load-into-no-sequence",
            "RP-01/quantized-cache-on-device",
            "RP-12/other-cache-type",
            "RP-12/other-layout-of-v",
            "RP-12/other-number-of-streams",
            "RP-12/other-model",
            "RP-12/rotated-and-unrotated-keys-interchange",
        ),
        "qwen3-mini",
        lies.AcceptsAnyState,
    ),
    "cache-types-ignored": Fault(
        "every cache is f16, whatever was asked for",
        ("RB-02/quantized-v-without-flash-attention",),
        "qwen3-mini",
        lies.CacheTypeIgnored,
    ),
    "accepts-any-batch": Fault(
        "every batch is said to have been decoded",
        (
            "RB-02/invalid-batch",
            "RB-03",
        ),
        "qwen3-mini",
        lies.AcceptsAnyBatch,
    ),
    "answers-the-first-prompt": Fault(
        "the high-level interface generates from the first prompt it saw",
        (
            "SM-12/second-completion",
            "SM-12/high-level-edited-history",
        ),
        "qwen3-mini",
        high_level=lies.AnswersTheFirstPrompt,
    ),
    "forgets-what-it-loads": Fault(
        "the high-level interface is empty after a load, and ignores a reset",
        (
            "SM-12/loaded-state",
            "SM-12/high-level-truncated-load-state",
            "SM-12/high-level-sample-after-load-state",
            "SM-12/reset",
        ),
        "qwen3-mini",
        high_level=lies.ForgetsWhatItLoads,
    ),
    "whole-context-forgotten": Fault(
        "a whole context is restored as an empty one",
        ("RP-01/long-decode-after-a-context-was-restored",),
        "qwen3-mini",
        lies.ContextForgotten,
    ),
    "copy-fills-the-cache": Fault(
        "after a copy there is no room for more than 8 tokens",
        ("SM-10/sliding-cells-of-a-copy",),
        "gemma3-mini",
        lies.CopyFillsTheCache,
    ),
    "removal-leaves-the-state": Fault(
        "a removal of a whole sequence forgets its positions only",
        (
            "SM-04/emptied-while-a-rollback-is-pending",
            "SM-05/copy-of-a-rolled-back-sequence",
            "SM-07/rollback-into-a-gap",
        ),
        "lfm2-mini",
        lies.RemovalLeavesTheLast,
    ),
    "snapshots-mix-up-logits": Fault(
        "with rollback snapshots the logits are those of another token",
        ("RB-02/rollback-depth-of-a-micro-batch",),
        "lfm2-mini",
        lies.SnapshotsMixUpLogits,
    ),
}

__all__ = ["FAULTS", "Fault"]
