"""Engines that lie in one planned way each, to prove that the checks bite.

A fault is a `Context` whose one method does not do what it says. Everything else, the build included, is real.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance.harness.arms.reference import AgentReference
from conformance.harness.arms.replay import ARM_TYPES, ArmParts
from conformance.harness.engine import Context, HighLevel
from conformance.harness.precision.reference import Reference
from conformance.harness.prompts.layouts import evict

from . import arm_lies, layout_lies, lies, optimum_lies, precision_lies, slow_lies


@dataclass(frozen=True)
class Fault:
    """One planned lie.

    Attributes:
        lie: what this engine does wrong, in one sentence.
        caught_by: ids of the invariants that must not pass on it.
        model: the fixture model on which it is shown.
        context: the lying engine, or the true one where the precision reference lies instead.
        reference: the precision reference, with the part that lies.
        verdict: how the checks must end; PASS for a control, which shows that a check can pass where no build at hand
            lets it run.
        high_level: the lying `llama_cpp.Llama`.
        agent: the layouts, counts and computed optimum of the agent loop, with the part that lies.
        arm_parts: the arms of the agent loop, with the part that lies.

    """

    lie: str
    caught_by: tuple[str, ...]
    model: str
    context: type[Context] = Context
    verdict: str = "FAIL"
    reference: Reference = field(default_factory=Reference)
    high_level: type[HighLevel] = HighLevel
    agent: AgentReference = field(default_factory=AgentReference)
    arm_parts: ArmParts = field(default_factory=ArmParts)


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
        ("RP-06", "RP-06/context-of-streams"),
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
    "tail-dropped": Fault(
        "attention does not see the rows of the tail",
        ("PT-01", "PT-02"),
        "qwen3-mini",
        reference=Reference(tailed=precision_lies.TailDropped),
    ),
    "tail-dropped-by-the-oracle": Fault(
        "attention does not see the rows of the tail",
        ("PT-01",),
        "qwen3-mini",
        reference=Reference(attend=precision_lies.attention_without_the_tail),
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
        ("PT-05/attention-on-old-rows",),
        "qwen3-mini",
        reference=Reference(attend=precision_lies.attention_over_exact_rows),
    ),
    "tail-is-everything": Fault(
        "with a tail every row stays exact",
        ("PT-05/far-copy",),
        "smollm2-135m",
        reference=Reference(tailed=precision_lies.TailIsEverything),
    ),
    "native-by-emulation": Fault(
        "nothing: a build that offers a tail and KVarN types of its own, and keeps to the reference",
        ("PT-09/tail", "PT-09/kvarn"),
        "qwen3-mini",
        precision_lies.NativeByEmulation,
        verdict="PASS",
    ),
    "native-tail-ignored": Fault(
        "a build that offers a tail of its own gives the body alone",
        ("PT-09/tail",),
        "qwen3-mini",
        precision_lies.NativeTailIgnored,
    ),
    "native-kvarn-is-standard": Fault(
        "a build that offers KVarN types of its own keeps the standard types of as many bits",
        ("PT-09/kvarn",),
        "qwen3-mini",
        precision_lies.NativeKVarNIsStandard,
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
    "window-not-promoted-when-trained": Fault(
        "a tail as long as the window still quantizes the oldest row in it",
        ("SW-01/trained",),
        "gemma3-270m",
        reference=Reference(tailed=precision_lies.WindowNotPromoted),
    ),
    "tail-of-the-window-keeps-less": Fault(
        "a tail of N rows keeps 256 - N",
        ("PT-03/past-the-window",),
        "gemma3-270m",
        reference=Reference(tailed=precision_lies.LongerTailsKeepLess),
    ),
    "sliding-ring-is-whole": Fault(
        "layers with a window keep every row", ("SW-02",), "gemma3-mini", precision_lies.SlidingRingIsWhole
    ),
    "kvarn-without-stage": Fault(
        "KVarN is given no room for the group that is filling",
        ("AR-04", "KS-05"),
        "qwen3-mini",
        reference=Reference(footprint=precision_lies.footprint_without_stage),
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
    "both-sides-quantized": Fault(
        "both sides are quantized where one of them was to stay exact",
        ("KL-03",),
        "smollm2-135m",
        reference=Reference(tailed=precision_lies.BothSidesQuantized),
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
        ("SM-02", "SP-01"),
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
    "noisy": Fault(
        "logits of micro-batches of every size are half a percent apart, so that the measured noise would excuse anything",
        ("BT-01",),
        "qwen3-mini",
        lies.Noisy,
        verdict="UNKNOWN",
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
    "removal-in-the-middle-agreed-to": Fault(
        "a hybrid says yes to the removal of a range from the middle and does nothing",
        ("SP-01",),
        "qwen35-mini",
        lies.RemovalForgotten,
    ),
    "splice-without-effect": Fault(
        "a restore brings back the recurrent state that was saved last, whatever was spliced",
        ("SP-04",),
        "holo3-mini",
        lies.TakesTheLastRecurrentState,
    ),
    "slow-after-restore": Fault(
        "every token takes many times as long once a state was restored",
        ("DC-02",),
        "decode-cost-mini",
        slow_lies.SlowAfterRestore,
    ),
    "slower-with-every-restore": Fault(
        "a token takes longer for every state that was restored",
        ("DC-04/bounded",),
        "decode-cost-mini",
        slow_lies.SlowerWithEveryRestore,
    ),
    "slower-with-depth": Fault(
        "a recurrent model takes longer for a token the more came before it",
        ("DC-03/recurrent",),
        "mamba2-mini",
        slow_lies.SlowerWithDepth,
    ),
    "slower-when-short": Fault(
        "a token takes longer the less the context holds",
        ("DC-03/attention", "DC-04/growing", "DC-06/cache-types"),
        "decode-cost-mini",
        slow_lies.SlowerWhenShort,
    ),
    "native-tail-slower-when-short": Fault(
        "a token takes longer the less a context with a tail of the build's own holds",
        ("DC-06/native-tail",),
        "decode-cost-mini",
        slow_lies.NativeTailSlowerWhenShort,
    ),
    "keeps-a-window": Fault(
        "a token sees no more than the last 100 tokens, and takes as long at any depth",
        ("DC-03/share-of-attention",),
        "decode-cost-mini",
        slow_lies.KeepsAWindow,
    ),
    "slow-in-other-sequences": Fault(
        "a token of any sequence but the first takes many times as long",
        ("DC-05/sequence-ids",),
        "decode-cost-mini",
        slow_lies.SlowInOtherSequences,
    ),
    "slow-after-removal": Fault(
        "every token takes many times as long once a sequence was removed",
        ("DC-05/fragmentation",),
        "decode-cost-mini",
        slow_lies.SlowAfterRemoval,
    ),
    "foreign-state-misread": Fault(
        "a restore brings back the convolution windows and drops the delta states",
        ("XB-01", "XB-04"),
        "qwen35-mini",
        lies.DeltaStateDropped,
    ),
    "state-saved-wrong": Fault(
        "a save halves the state of one recurrent layer",
        ("XB-02", "XB-04"),
        "qwen35-mini",
        lies.SavesAnotherRecurrentState,
    ),
    "refuses-and-trims": Fault(
        "every state is refused, and a token of another sequence is lost with it",
        ("XB-01", "XB-03"),
        "qwen3-mini",
        lies.RefusesAndTrims,
    ),
    "checkpoint-one-image-late": Fault(
        "the terminal slot takes its checkpoint behind the first image of the window",
        ("AA-06", "AA-07"),
        "qwen35-mini",
        arm_parts=ArmParts(slot=arm_lies.SlotOneImageLate),
    ),
    "text-absorbed-twice": Fault(
        "the terminal slot appends every text to its history twice",
        ("AA-06", "AA-07", "AA-15", "AA-03/engine", "AA-14/engine"),
        "qwen35-mini",
        arm_parts=ArmParts(slot=arm_lies.SlotAbsorbsTwice),
    ),
    "checkpoint-not-restored": Fault(
        "the terminal slot goes on behind the window of the step before",
        ("AA-04/engine", "AA-06"),
        "qwen35-mini",
        arm_parts=ArmParts(slot=arm_lies.SlotNeverComesBack),
    ),
    "oldest-image-kept": Fault(
        "the terminal slot shows the first screenshot of all in the place of the oldest of the window",
        ("AA-06",),
        "qwen35-mini",
        arm_parts=ArmParts(types=ARM_TYPES | {"terminal_slot": arm_lies.OldestImageKept}),
    ),
    "axes-swapped": Fault(
        "x and y of every image's positions are swapped",
        ("AA-06", "AA-06/on-device"),
        "qwen35-mini",
        arm_parts=ArmParts(cursor=arm_lies.AxesSwapped),
    ),
    "positions-advance-by-tokens": Fault(
        "the text behind an image stands as many positions on as the image has tokens",
        ("AA-06", "AA-14/engine"),
        "qwen35-mini",
        arm_parts=ArmParts(cursor=arm_lies.AdvancesByTokens),
    ),
    "removal-forgotten-by-the-loop": Fault(
        "removing the window says yes and does nothing",
        ("AA-04/engine", "AA-06", "AA-07"),
        "qwen35-mini",
        lies.RemovalForgotten,
    ),
    "hit-that-was-none": Fault(
        "the history is prefilled again at every step and counted as reused",
        ("AA-03/engine", "AA-08/engine"),
        "holo3-mini",
        arm_parts=ArmParts(types=ARM_TYPES | {"terminal_slot": arm_lies.HitThatWasNone}),
    ),
    "evicted-but-kept": Fault(
        "evict begins anew at every step and counts the preamble as reused",
        ("AA-01/engine",),
        "qwen3-mini",
        arm_parts=ArmParts(types=ARM_TYPES | {"evict": arm_lies.EvictStartsAnew}),
    ),
    "appended-in-pieces": Fault(
        "no-evict begins anew at every step and counts all that was there as reused",
        ("AA-02/engine",),
        "qwen3-mini",
        arm_parts=ArmParts(types=ARM_TYPES | {"append_only": arm_lies.AppendStartsAnew}),
    ),
    "action-forgotten": Fault(
        "no-evict takes its action back",
        ("AA-05/engine",),
        "qwen3-mini",
        arm_parts=ArmParts(types=ARM_TYPES | {"append_only": arm_lies.ActionForgotten}),
    ),
    "stale-embedding": Fault(
        "the cache of embeddings takes two images of one size for the same",
        ("AA-06/pixels", "AA-11"),
        "holo3-mini",
        arm_parts=ArmParts(embeddings=arm_lies.StaleEmbeddings),
    ),
    "states-hoarded": Fault(
        "a megabyte is kept for every step",
        ("AA-12", "AA-12/evict"),
        "qwen3-mini",
        arm_parts=ArmParts(cursor=arm_lies.HoardsStates),
    ),
    "slow-images": Fault(
        "every image is decoded twice, the first time for nothing", ("AA-13",), "holo3-mini", slow_lies.SlowImages
    ),
    "logits-are-no-numbers": Fault(
        "a value among the logits is not a number", ("AA-10",), "qwen3-mini", arm_lies.LogitsAreNoNumbers
    ),
    "image-continued-askew": Fault(
        "x and y are swapped where an image goes on in a second call",
        ("BT-04",),
        "qwen35-mini",
        arm_lies.ImageContinuedAskew,
    ),
    "device-state-one-late": Fault(
        "of the states kept inside the context, the one before the newest is loaded",
        ("RP-11",),
        "qwen35-mini",
        arm_lies.DeviceStateOneLate,
    ),
    "hit-across-an-eviction": Fault(
        "what evict rewrote is counted as reused",
        ("AA-01", "AA-01/the-documents-trace"),
        "holo3-mini",
        agent=AgentReference(counted=layout_lies.counted("evict", reused=layout_lies.hit_across_an_eviction)),
    ),
    "no-evict-rewrites": Fault(
        "no-evict rewrites older screenshots",
        ("AA-02", "AA-05"),
        "holo3-mini",
        agent=AgentReference(counted=layout_lies.counted("append_only", layout=evict)),
    ),
    "newest-text-twice": Fault(
        "the terminal slot appends the newest text twice",
        ("AA-03", "AA-03/equal-steps", "AA-04"),
        "holo3-mini",
        agent=AgentReference(
            counted=layout_lies.counted("terminal_slot", layout=layout_lies.with_the_newest_text_twice)
        ),
    ),
    "window-one-wider": Fault(
        "the terminal slot shows W + 1 screenshots",
        ("AA-09", "AA-03", "AA-03/equal-steps", "AA-04"),
        "holo3-mini",
        agent=AgentReference(counted=layout_lies.counted("terminal_slot", layout=layout_lies.one_screenshot_more)),
    ),
    "oldest-screenshot-shown": Fault(
        "the terminal slot shows the first screenshot of all in the place of the oldest of the window",
        ("AA-09",),
        "holo3-mini",
        agent=AgentReference(counted=layout_lies.counted("terminal_slot", layout=layout_lies.oldest_screenshots)),
    ),
    "checkpoint-counted-one-image-late": Fault(
        "the first screenshot of the window is counted as part of the checkpoint",
        ("AA-03",),
        "holo3-mini",
        agent=AgentReference(
            counted=layout_lies.counted("terminal_slot", reused=layout_lies.checkpoint_one_image_late)
        ),
    ),
    "positions-by-tokens": Fault(
        "positions advance by an image's tokens",
        ("AA-14",),
        "holo3-mini",
        agent=AgentReference(counted=layout_lies.counted("terminal_slot", layout=layout_lies.positions_by_tokens)),
    ),
    "room-for-positions-forgotten": Fault(
        "a task that takes more positions than were trained on is accepted",
        ("AA-14",),
        "holo3-mini",
        agent=AgentReference(require_room=layout_lies.room_for_positions_forgotten),
    ),
    "crossover-one-late": Fault(
        "the crossover is said to be one step later",
        ("AA-08",),
        "holo3-mini",
        agent=AgentReference(crossover=layout_lies.crossover_one_late),
    ),
    "sink-rewritten": Fault(
        "evict drops the first token of the preamble",
        ("SP-05",),
        "holo3-mini",
        agent=AgentReference(counted=layout_lies.counted("evict", layout=layout_lies.sink_rewritten)),
    ),
    "optimum-clamped": Fault(
        "the optimum is never worse than evict",
        ("OP-01",),
        "holo3-mini",
        agent=AgentReference(optimum=optimum_lies.clamped),
    ),
    "decode-swapped-too": Fault(
        "the optimum decodes as fast as no-evict does",
        ("OP-01",),
        "holo3-mini",
        agent=AgentReference(optimum=optimum_lies.with_decode_of_no_evict),
    ),
    "means-before-the-difference": Fault(
        "the optimum is computed from means over tasks",
        ("OP-01",),
        "holo3-mini",
        agent=AgentReference(optimum=optimum_lies.means_before_the_difference),
    ),
    "residual-hidden": Fault(
        "a negative rest of wall time is told as none",
        ("OP-02",),
        "holo3-mini",
        agent=AgentReference(optimum=optimum_lies.residual_hidden),
    ),
    "energy-by-prefill": Fault(
        "energy is scaled by the share of new prefill",
        ("OP-03",),
        "holo3-mini",
        agent=AgentReference(optimum=optimum_lies.energy_by_prefill),
    ),
    "new-content-without-markers": Fault(
        "two tokens of every step's new content are forgotten",
        ("OP-04",),
        "holo3-mini",
        agent=AgentReference(optimum_of=optimum_lies.without_markers),
    ),
    "long-tasks-kept": Fault(
        "tasks of more than 20 steps enter the means",
        ("OP-05",),
        "holo3-mini",
        agent=AgentReference(optimum=optimum_lies.long_tasks_kept),
    ),
    "digits-taken-for-exact": Fault(
        "printed digits are taken for exact numbers",
        ("OP-06",),
        "holo3-mini",
        agent=AgentReference(rederive=optimum_lies.rederive_from_exact_digits),
    ),
    "bound-without-disclaimer": Fault(
        "the bound is told like any figure",
        ("OP-07",),
        "holo3-mini",
        agent=AgentReference(optimum=optimum_lies.without_disclaimer),
    ),
    "bound-told-as-measured": Fault(
        "every figure is labelled as measured",
        ("OP-07",),
        "holo3-mini",
        agent=AgentReference(optimum=optimum_lies.told_as_measured),
    ),
}

__all__ = ["FAULTS", "Fault"]
