"""Sequences are removed, copied and counted as if each were alone: specs/sequence_memory.yaml.

The oracle is a cold replay: what a sequence must hold is decoded from nothing in a fresh context, and the next logits
must agree. Contexts under test were used before, so that what nobody wrote is noise and not zeros.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from conformance.harness.bench import Bench, Case
from conformance.harness.bench.bench import Tokens
from conformance.harness.engine import Context, ContextSettings, StateError, StateFlags, TokenBatch
from conformance.harness.engine.process import resident_bytes
from conformance.harness.exam import NotDecidable, verifies
from conformance.harness.exam.examination import known_failures
from conformance.harness.machine.avoid import avoidable
from conformance.harness.machine.stage import LocalStage
from conformance.harness.machine.steps import random_steps, run
from conformance.harness.machine.walk import References, Walk, settings_of
from conformance.harness.measure.deviation import Deviation, of_count, of_logits, worst
from conformance.harness.state import splice

_NEXT = 3  # tokens decoded after an operation: short memories forget, so the first rows count most
_WHOLE = {"open": (-1, -1), "from zero": (0, -1), "beyond the end": (0, 1 << 20), "open to beyond": (-1, 1 << 20)}


class Text(Case):
    """A sequence of `prefix_tokens`; what follows is short."""

    text_seed: int
    prefix_tokens: int


class Rollback(Text):
    """The last `depth` tokens are taken back in a context that keeps `n_rs_seq` snapshots of a recurrent state."""

    n_rs_seq: int
    depth: int


class EmptiedRollback(Rollback):
    """The whole sequence is removed after that, by one of the ways to say so, or because another one is kept."""

    arguments: str


class SingleTokens(Rollback):
    """The last `single_tokens` tokens were decoded one by one."""

    single_tokens: int


class WithinBatch(Rollback):
    """The last batch had `more_tokens` tokens besides those taken back."""

    more_tokens: int


class AcrossUbatches(WithinBatch):
    """The last batch took several micro-batches."""

    ubatch: int


class Image(Text):
    """Two images of `width` x `height` embeddings follow in one batch, and the second is taken back."""

    width: int
    height: int


class Suffix(Text):
    """A suffix of `removed_tokens` is taken back."""

    removed_tokens: int


class Removal(Text):
    """A range inside a sequence, given in hundredths of its length; `end` 101 is open."""

    begin: int
    end: int
    n_rs_seq: int


class Middle(Suffix):
    """`more_tokens` follow on the `removed_tokens`."""

    more_tokens: int


class NoSequence(Text):
    """A call on an id that no sequence has."""

    call: str
    id: int


class Division(Text):
    """Positions from `begin` on are divided."""

    begin: int


class WholeRemoval(Text):
    """All of a sequence, by one of the ways to say so."""

    arguments: str
    kv_unified: bool


class Range(Text):
    """A range that holds no position."""

    empty: str


class Call(Text):
    """A call with arguments outside of what there is."""

    call: str


class Cleared(Text):
    """The context is emptied in some way after `other_tokens`."""

    other_tokens: int
    way: str


class Refill(Text):
    """A sequence of `other_tokens` is overwritten."""

    other_tokens: int


class Copy(Text):
    """A copy of a sequence."""

    kv_unified: bool
    used_destination: bool


class Refilled(Text):
    """The source of a copy, the copy, or everything is `replaced` at once."""

    kv_unified: bool
    replaced: str


class PartialCopy(Text):
    """A copy of the first `copied_tokens` tokens."""

    copied_tokens: int
    kv_unified: bool


class Trim(Text):
    """The last `depth` tokens of a copy are removed."""

    depth: int
    kv_unified: bool


class MovedCopy(Text):
    """The positions of a copy are moved `by` a shift or a division."""

    by: str
    kv_unified: bool


class OnDevice(Text):
    """A state is kept on the device, of a cache of some type."""

    cache_type: str


class Neighbours(Text):
    """Another sequence holds `other_tokens`."""

    other_tokens: int
    kv_unified: bool


class Neighbour(Neighbours):
    """Something is done to the other sequence."""

    call: str


class Pieces(Text):
    """A text in two calls."""

    more_tokens: int
    ubatch: int


class Gap(Text):
    """The last token moves on by `gap` positions, and is removed."""

    gap: int


class Abort(Text):
    """A decode of `aborted_tokens` is aborted in its second micro-batch."""

    aborted_tokens: int
    ubatch: int


class Grown(Text):
    """`more_tokens` follow in one call."""

    more_tokens: int


class Full(Text):
    """A cache is filled in batches of `batch_tokens`."""

    batch_tokens: int
    kv_unified: bool


class Rounds(Text):
    """`rounds` of saving, restoring and removing; memory may grow by `allowed_mib`, an allocator's own ups and downs."""

    rounds: int
    allowed_mib: int


class Pending(Case):
    """`removed` tokens at `begin` are removed and the rest moves up."""

    text_seed: int
    prefix_tokens: int
    begin: int
    removed: int


def _settings(**changes: object) -> ContextSettings:
    return ContextSettings(n_ctx=512, n_batch=512).changed(**changes)


def _continued(
    bench: Bench, context: Context, history: list[Tokens], following: Tokens, sequence: int = 0
) -> Deviation:
    """Whether a sequence holds exactly `history`: by its positions, and by what `following` gives."""
    history = [piece for piece in history if len(piece)]
    n = sum(map(len, history))
    seen = context.pos_max(sequence)
    position = of_count(seen, n - 1, f"largest position of sequence {sequence}", "")
    if position.value:
        return position
    logits = context.decode(following, start=n, sequence=sequence, outputs="all")
    return of_logits(logits, bench.cold(context.settings, *history, following))


def _after_removal(
    bench: Bench, context: Context, history: list[Tokens], following: Tokens, sequence: int = 0
) -> Deviation:
    """Remove what comes after `history`: a build may refuse; where it does not, it must be as if never decoded."""
    if not context.seq_rm(sequence, sum(map(len, history))):
        return Deviation(0.0, "removals that were refused")
    return _continued(bench, context, history, following, sequence)


def _is_empty(context: Context, sequence: int = 0) -> Deviation:
    """Whether a sequence is empty in every half of the memory."""
    positions = context.pos_min(sequence), context.pos_max(sequence)
    shown = f"positions {positions[0]} to {positions[1]}"
    return Deviation(float(positions != (-1, -1)), "positions left", shown, "none", shown)


def _unchanged(before: bytes, after: bytes, what: str) -> Deviation:
    if before == after:
        return Deviation(0.0, f"share of differing bytes of {what}")
    if len(before) != len(after):
        return of_count(len(after), len(before), what)
    a, b = np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8)
    places = np.flatnonzero(a != b)
    where = f"{what}, byte {places[0]}"
    return Deviation(
        len(places) / len(a), f"share of differing bytes of {what}", where, str(a[places[0]]), str(b[places[0]])
    )


def _kept(context: Context, sequence: int = 0) -> bytes:
    """A sequence's state, without the sequence id that its head may name."""
    return context.save(sequence).tobytes()


# -- SM-01


@verifies("SM-01/rollback-whole-last-batch", case=Rollback)
def test_a_rollback_of_the_whole_last_batch(bench: Bench, case: Rollback) -> Deviation:
    prefix, batch, following = bench.texts(case.text_seed, case.prefix_tokens, case.depth, _NEXT)
    with bench.used_context(_settings(n_rs_seq=case.n_rs_seq)) as context:
        context.decode(prefix)
        context.decode(batch)
        return _after_removal(bench, context, [prefix], following)


@verifies("SM-01/rollback-after-single-tokens", case=SingleTokens)
def test_a_rollback_after_single_tokens(bench: Bench, case: SingleTokens) -> Deviation:
    prefix, single, following = bench.texts(case.text_seed, case.prefix_tokens, case.single_tokens, _NEXT)
    depth = min(case.depth, case.single_tokens)
    with bench.used_context(_settings(n_rs_seq=case.n_rs_seq)) as context:
        context.decode(prefix)
        for token in np.split(single, len(single)):
            context.decode(token)
        return _after_removal(bench, context, [prefix, single[: len(single) - depth]], following)


@verifies("SM-01/rollback-within-the-last-batch", case=WithinBatch)
def test_a_rollback_within_the_last_batch(bench: Bench, case: WithinBatch) -> Deviation:
    return _rolled_back(bench, case, case.more_tokens, _settings(n_rs_seq=case.n_rs_seq))


@verifies("SM-01/rollback-across-ubatches", case=AcrossUbatches)
def test_a_rollback_across_micro_batches(bench: Bench, case: AcrossUbatches) -> Deviation:
    """The first token of the last micro-batch is the second one that is taken back, or close to it."""
    more = case.more_tokens * case.ubatch - case.depth + 1
    return _rolled_back(bench, case, more, _settings(n_rs_seq=case.n_rs_seq, n_ubatch=case.ubatch))


def _rolled_back(bench: Bench, case: Rollback, more: int, settings: ContextSettings) -> Deviation:
    prefix, batch, following = bench.texts(case.text_seed, case.prefix_tokens, more + case.depth, _NEXT)
    with bench.used_context(settings) as context:
        context.decode(prefix)
        context.decode(batch)
        return _after_removal(bench, context, [prefix, batch[:more]], following)


@verifies("SM-01/rollback-after-another-sequence-came", case=Rollback)
def test_a_rollback_after_another_sequence_came(bench: Bench, case: Rollback) -> Deviation:
    """Sequences 0 and 2 are decoded together, then 0 and a new one between them; 2 is rolled back."""
    text, other, following = bench.texts(case.text_seed, case.prefix_tokens + case.depth, 3, _NEXT)
    prefix = text[: case.prefix_tokens]
    with bench.used_context(_settings(n_rs_seq=case.n_rs_seq, n_seq_max=3, n_ctx=1536)) as context:
        _decode_together(context, {0: (0, other[:1]), 2: (0, text)})
        _decode_together(context, {0: (1, other[1:2]), 1: (0, other[2:])})
        return _after_removal(bench, context, [prefix], following, sequence=2)


@verifies("SM-01/rollback-of-an-image", case=Image)
def test_a_rollback_of_an_image(bench: Bench, case: Image) -> Deviation:
    prefix, following = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    first = bench.image(case.text_seed, case.width, case.height, case.prefix_tokens)
    after = case.prefix_tokens + max(case.width, case.height)
    second = bench.image(case.text_seed + 1, case.width, case.height, after)
    rows = []
    for pieces in ((first, second), (first,)):
        with bench.used_context(_settings(n_rs_seq=10)) as context:
            context.decode(prefix)
            embeddings, positions = (
                np.concatenate(parts, axis=axis) for axis, parts in enumerate(zip(*pieces, strict=True))
            )
            context.decode_embeddings(embeddings, positions)
            if len(pieces) == 2 and not context.seq_rm(0, after):
                return Deviation(0.0, "removals that were refused")
            rows.append(context.decode(following, start=after, outputs="all"))
    return of_logits(*rows)


def _decode_together(context: Context, pieces: Mapping[int, tuple[int, Tokens]]) -> None:
    """One batch of tokens of several sequences, each from its position on."""
    rows = [(s, start + i) for s, (start, tokens) in pieces.items() for i in range(len(tokens))]
    positions = np.array([position for _, position in rows], np.int32)
    tokens = np.concatenate([tokens for _, tokens in pieces.values()])
    code = context.process(TokenBatch(tokens, positions, np.zeros(len(rows), np.int8), [[s] for s, _ in rows]))
    if code != 0:
        raise StateError(f"a decode of {len(rows)} tokens of {len(pieces)} sequences returned {code}")


@verifies("SM-01/suffix-removal", case=Suffix)
def test_a_removal_of_a_suffix(bench: Bench, case: Suffix) -> Deviation:
    prefix, removed, following = bench.texts(case.text_seed, case.prefix_tokens, case.removed_tokens, _NEXT)
    with bench.used_context(_settings()) as context:
        context.decode(prefix)
        context.decode(removed)
        return _after_removal(bench, context, [prefix], following)


# -- SM-02


@verifies("SM-02", case=Removal)
def test_a_refused_removal_changes_nothing(bench: Bench, case: Removal) -> Deviation:
    prefix, following = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    begin = max(1, case.begin * case.prefix_tokens // 100)
    end = -1 if case.end > 100 else max(begin + 1, case.end * case.prefix_tokens // 100)
    with bench.used_context(_settings(n_rs_seq=case.n_rs_seq)) as context:
        context.decode(prefix)
        refused = _refused(bench, context, begin, end, [prefix], following)
    if refused is None:
        raise NotDecidable("the build agreed to every partial removal")
    return refused


def _refused(
    bench: Bench, context: Context, begin: int, end: int, history: list[Tokens], following: Tokens
) -> Deviation | None:
    """Ask for the removal of a range from a sequence that holds `history`; what changed, or None where it was agreed to."""
    before, positions = _kept(context), (context.pos_min(), context.pos_max())
    if context.seq_rm(0, begin, end):
        return None
    if (now := (context.pos_min(), context.pos_max())) != positions:
        return Deviation(1.0, "positions moved", "positions", str(positions), str(now))
    same = _unchanged(before, _kept(context), "the state")
    return worst([same, _continued(bench, context, history, following)])


# -- SM-03


@verifies("SM-03/whole-removal", case=WholeRemoval)
def test_a_removal_of_a_whole_sequence_always_works(bench: Bench, case: WholeRemoval) -> Deviation:
    text, other, following = bench.texts(case.text_seed, case.prefix_tokens, 20, _NEXT)
    with bench.used_context(_settings(n_seq_max=2, n_ctx=1024, kv_unified=case.kv_unified)) as context:
        context.decode(text)
        context.decode(other, sequence=1)
        if not context.seq_rm(0, *_WHOLE[case.arguments]):
            return Deviation(
                1.0, "removals refused", f"removal of a whole sequence ({case.arguments})", "true", "false"
            )
        neighbour = _continued(bench, context, [other], following, sequence=1)
        return worst([_is_empty(context), neighbour, _prompted(bench, context, following)])


def _prompted(bench: Bench, context: Context, prompt: Tokens, sequence: int = 0) -> Deviation:
    """Whether an emptied sequence takes a prompt as a fresh context does."""
    logits = context.decode(prompt, start=0, sequence=sequence, outputs="all")
    return of_logits(logits, bench.cold(context.settings, prompt))


@verifies("SM-03/removal-wildcard", case=WholeRemoval)
def test_a_removal_of_all_sequences_always_works(bench: Bench, case: WholeRemoval) -> Deviation:
    text, other, following = bench.texts(case.text_seed, case.prefix_tokens, 20, _NEXT)
    with bench.used_context(_settings(n_seq_max=2, n_ctx=1024, kv_unified=case.kv_unified)) as context:
        context.decode(text)
        context.decode(other, sequence=1)
        if not context.seq_rm(-1, *_WHOLE[case.arguments]):
            return Deviation(1.0, "removals refused", f"removal of all sequences ({case.arguments})", "true", "false")
        return worst([_is_empty(context), _is_empty(context, 1), _prompted(bench, context, following)])


@verifies("SM-03/sequence-ids-out-of-range", case=NoSequence)
def test_calls_on_a_sequence_that_there_is_not_do_nothing(bench: Bench, case: NoSequence) -> Deviation:
    text, following = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    with bench.used_context(_settings(n_seq_max=2, n_ctx=1024)) as context:
        context.decode(text)
        before = _kept(context)
        if case.call in ("shift", "divide") and not context.can_shift:
            raise NotDecidable("positions of this memory cannot be shifted")
        match case.call:
            case "remove":
                context.seq_rm(case.id)
            case "remove a part":
                context.seq_rm(case.id, 1, 3)
            case "copy from":
                context.seq_cp(case.id, 1)
            case "copy to":
                context.seq_cp(0, case.id)
            case "positions":
                context.pos_min(case.id)
                context.pos_max(case.id)
            case "shift":
                context.seq_add(case.id, 1, -1, 2)
            case "divide":
                context.seq_div(case.id, 0, -1, 2)
        same = worst([_unchanged(before, _kept(context), "the state"), _is_empty(context, 1)])
        return worst([same, _continued(bench, context, [text], following)])


@verifies("SM-03/division-by-zero", case=Division)
def test_a_division_by_zero_is_refused(bench: Bench, case: Division) -> Deviation:
    text, following = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    with bench.used_context(_settings()) as context:
        context.decode(text)
        if not context.can_shift:
            raise NotDecidable("positions of this memory cannot be shifted")
        context.seq_div(0, case.begin, -1, 0)
        return _continued(bench, context, [text], following)


@verifies("SM-03/empty-ranges", case=Range)
def test_an_empty_range_removes_nothing(bench: Bench, case: Range) -> Deviation:
    text, following = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    n = case.prefix_tokens
    begin, end = {"equal ends": (n // 2, n // 2), "after the end": (n, -1), "far after the end": (n + 50, n + 60)}[
        case.empty
    ]
    with bench.used_context(_settings()) as context:
        context.decode(text)
        before = _kept(context)
        context.seq_rm(0, begin, end)
        same = _unchanged(before, _kept(context), "the state")
        return worst([same, _continued(bench, context, [text], following)])


@verifies("SM-03/unused-sequences", case=Call)
def test_calls_on_a_sequence_that_holds_nothing_do_nothing(bench: Bench, case: Call) -> Deviation:
    text, following = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    with bench.used_context(_settings(n_seq_max=3, n_ctx=1536)) as context:
        context.decode(text)
        before = _kept(context)
        match case.call:
            case "remove":
                context.seq_rm(2)
            case "remove a part":
                context.seq_rm(2, 3, 5)
            case "copy":
                context.seq_cp(2, 1)
            case "save and load":
                context.load(context.save(2), 1)
        same = worst([_unchanged(before, _kept(context), "the state"), _is_empty(context, 1), _is_empty(context, 2)])
        return worst([same, _continued(bench, context, [text], following)])


# -- SM-04


@verifies("SM-04/emptied", case=Cleared)
def test_an_emptied_context_equals_a_fresh_one(bench: Bench, case: Cleared) -> Deviation:
    prompt, other = bench.texts(case.text_seed, case.prefix_tokens, case.other_tokens)
    with bench.context(_settings(n_seq_max=2, n_ctx=1024)) as context:
        for sequence in (0, 1):
            context.decode(other, sequence=sequence)
        match case.way:
            case "remove each":
                for sequence in (0, 1):
                    context.seq_rm(sequence)
            case "clear":
                context.clear(contents=False)
            case "clear with contents":
                context.clear(contents=True)
        empty = worst([_is_empty(context, sequence) for sequence in (0, 1)])
        return worst([empty, *(_prompted(bench, context, prompt, sequence) for sequence in (0, 1))])


@verifies("SM-04/empty-blob-into-a-dirty-sequence", case=Refill)
def test_loading_the_state_of_an_unused_sequence_empties_a_sequence(bench: Bench, case: Refill) -> Deviation:
    other, prompt = bench.texts(case.text_seed, case.other_tokens, case.prefix_tokens)
    with bench.used_context(_settings(n_seq_max=2, n_ctx=1024)) as context:
        nothing = context.save(1)
        context.decode(other)
        if context.load(nothing) == 0:
            return _continued(bench, context, [other], prompt)
        if (left := _is_empty(context)).value:
            return left
        return _prompted(bench, context, prompt)


@verifies("SM-04/emptied-while-a-rollback-is-pending", case=EmptiedRollback)
def test_a_sequence_emptied_right_after_a_rollback_is_empty(bench: Bench, case: EmptiedRollback) -> Deviation:
    text, prompt = bench.texts(case.text_seed, case.prefix_tokens + case.depth, _NEXT)
    settings = _settings(n_rs_seq=case.n_rs_seq, n_seq_max=2, kv_unified=True)
    with bench.used_context(settings) as context:
        context.decode(text)
        if not context.seq_rm(0, case.prefix_tokens):
            raise NotDecidable("the build refused the rollback")
        if case.arguments == "keep another":
            context.seq_keep(1)
        else:
            context.seq_rm(0, *_WHOLE[case.arguments])
        return worst([_is_empty(context), _prompted(bench, context, prompt)])


@verifies("SM-04/keeping-one-removes-the-others", case=Neighbours)
def test_keeping_one_sequence_removes_the_others(bench: Bench, case: Neighbours) -> Deviation:
    text, other, following = bench.texts(case.text_seed, case.prefix_tokens, case.other_tokens, _NEXT)
    with bench.used_context(_settings(n_seq_max=2, n_ctx=1024, kv_unified=case.kv_unified)) as context:
        context.decode(text)
        context.decode(other, sequence=1)
        context.seq_keep(0)
        kept = _continued(bench, context, [text], following)
        if (left := _is_empty(context, 1)).value:
            return left
        return worst([kept, _prompted(bench, context, following, 1)])


# -- SM-05


@verifies("SM-05/copies-diverge", case=Copy)
def test_a_copied_sequence_then_goes_its_own_way(bench: Bench, case: Copy) -> Deviation:
    text, first, second, used = bench.texts(case.text_seed, case.prefix_tokens, _NEXT, _NEXT, 30)
    with bench.used_context(_settings(n_seq_max=2, n_ctx=1024, kv_unified=case.kv_unified)) as context:
        context.decode(text)
        if case.used_destination:
            context.decode(used, sequence=1)
            context.seq_rm(1)
        context.seq_cp(0, 1)
        copied = _continued(bench, context, [text], second, sequence=1)
        return worst([copied, _continued(bench, context, [text], first)])


@verifies("SM-05/save-while-a-copy-is-pending", case=Copy)
def test_a_copy_is_saved_before_anything_is_decoded(bench: Bench, case: Copy) -> Deviation:
    text, used, following = bench.texts(case.text_seed, case.prefix_tokens, case.prefix_tokens, _NEXT)
    settings = _settings(n_seq_max=2, n_ctx=1024, kv_unified=case.kv_unified)
    with bench.used_context(settings) as context, bench.used_context(settings) as elsewhere:
        context.decode(text)
        if case.used_destination:
            context.decode(used, sequence=1)
            context.seq_rm(1)
        context.seq_cp(0, 1)
        elsewhere.restore(context.save(1))
        return _continued(bench, elsewhere, [text], following)


@verifies("SM-05/source-changed-while-a-copy-is-pending", case=Refilled)
def test_a_copy_is_of_what_the_source_held_when_it_was_copied(bench: Bench, case: Refilled) -> Deviation:
    text, other, following = bench.texts(case.text_seed, case.prefix_tokens, case.prefix_tokens, _NEXT)
    settings = _settings(n_seq_max=2, n_ctx=1024, kv_unified=case.kv_unified)
    with bench.used_context(settings) as context, bench.used_context(settings) as elsewhere:
        for sequence in (0, 1):
            elsewhere.decode(other, sequence=sequence)
        context.decode(text)
        context.seq_cp(0, 1)
        match case.replaced:
            case "source":
                context.restore(elsewhere.save())
            case "copy":
                context.restore(elsewhere.save(), 1)
            case "whole context":
                if context.load_context(elsewhere.save_context()) == 0:
                    raise StateError("the build refused to load the state of a context that it wrote itself")
        held = [text if case.replaced == "copy" else other, text if case.replaced == "source" else other]
        return worst([_continued(bench, context, [held[s]], following, sequence=s) for s in (1, 0)])


@verifies("SM-05/copy-of-a-rolled-back-sequence", case=Rollback)
def test_a_copy_right_after_a_rollback_is_rolled_back_too(bench: Bench, case: Rollback) -> Deviation:
    text, following = bench.texts(case.text_seed, case.prefix_tokens + case.depth, _NEXT)
    with bench.used_context(_settings(n_rs_seq=case.n_rs_seq, n_seq_max=2, kv_unified=True)) as context:
        context.decode(text)
        if not context.seq_rm(0, case.prefix_tokens):
            raise NotDecidable("the build refused the rollback")
        context.seq_cp(0, 1)
        history = [text[: case.prefix_tokens]]
        copied = _continued(bench, context, history, following, sequence=1)
        return worst([copied, _continued(bench, context, history, following)])


# -- SM-06


@verifies("SM-06/trimming-a-copy-moves-the-original", case=Trim)
def test_trimming_a_copy_leaves_the_original(bench: Bench, case: Trim) -> Deviation:
    text, following = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    settings = _settings(n_seq_max=2, n_ctx=1024, n_rs_seq=4, kv_unified=case.kv_unified)
    with bench.used_context(settings) as context:
        context.decode(text)
        context.seq_cp(0, 1)
        context.seq_rm(1, case.prefix_tokens - case.depth)
        return _continued(bench, context, [text], following)


@verifies("SM-06/shifting-a-copy-moves-the-original", case=MovedCopy)
def test_moving_the_positions_of_a_copy_leaves_the_original(bench: Bench, case: MovedCopy) -> Deviation:
    text, following = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    with bench.used_context(_settings(n_seq_max=2, n_ctx=1024, kv_unified=case.kv_unified)) as context:
        context.decode(text)
        context.seq_cp(0, 1)
        if not context.can_shift:
            raise NotDecidable("positions of this memory cannot be shifted")
        if case.by == "shift":
            context.seq_add(1, case.prefix_tokens // 2, -1, 5)
        else:
            context.seq_div(1, 0, -1, 2)
        return _continued(bench, context, [text], following)


@verifies("SM-06/saving-the-context-after-trimming-a-copy", case=Trim)
def test_a_context_can_be_saved_after_a_copy_was_trimmed(bench: Bench, case: Trim) -> Deviation:
    text, following = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    settings = _settings(n_seq_max=2, n_ctx=1024, n_rs_seq=4, kv_unified=case.kv_unified)
    with bench.used_context(settings) as context, bench.used_context(settings) as elsewhere:
        context.decode(text)
        context.seq_cp(0, 1)
        context.seq_rm(1, case.prefix_tokens - case.depth)
        if elsewhere.load_context(context.save_context()) == 0:
            raise StateError("the build refused to load the state of a context that it wrote itself")
        return _continued(bench, elsewhere, [text], following)


@verifies("SM-06/neighbours", case=Neighbour)
def test_what_is_done_to_one_sequence_does_not_touch_another(bench: Bench, case: Neighbour) -> Deviation:
    text, other, more, following = bench.texts(case.text_seed, case.prefix_tokens, case.other_tokens, 20, _NEXT)
    settings = _settings(n_seq_max=3, n_ctx=1536, kv_unified=case.kv_unified)
    with bench.used_context(settings) as context:
        context.decode(other, sequence=1)
        saved = context.save(1)
        context.decode(text)
        before = _kept(context)
        match case.call:
            case "decode":
                context.decode(more, sequence=1)
            case "remove":
                context.seq_rm(1)
            case "remove a suffix":
                context.seq_rm(1, case.other_tokens - 1)
            case "load":
                context.decode(more, sequence=1)
                context.restore(saved, 1)
            case "load what is cut":
                context.load(saved[: len(saved) // 2].copy(), 1)
            case "copy":
                context.seq_cp(1, 2)
            case "keep":
                context.seq_keep(0)
        same = _unchanged(before, _kept(context), "the neighbour's state")
        return worst([same, _continued(bench, context, [text], following)])


# -- SM-07


@verifies("SM-07/positions-of-what-was-decoded", case=Pieces)
def test_positions_name_what_was_decoded(bench: Bench, case: Pieces) -> Deviation:
    first, second = bench.texts(case.text_seed, case.prefix_tokens, case.more_tokens)
    found = []
    with bench.used_context(_settings(n_ctx=2048, n_batch=2048, n_ubatch=case.ubatch)) as context:
        found.append(_is_empty(context))
        n = 0
        for piece in (first, second):
            context.decode(piece)
            n += len(piece)
            low, high = context.pos_min(), context.pos_max()
            found.append(of_count(high, n - 1, "largest position", ""))
            state = bench.state(context.save())
            windows = (None, bench.census.sliding_window)
            for cache, window in zip(state.attention, windows, strict=False):
                held = set(cache.cells.positions.tolist())
                first_held = max(low, 0, high - (window or n) + 1)  # a state leaves out what the window no longer shows
                missing = sum(position not in held for position in range(first_held, high + 1))
                found.append(of_count(missing, 0, f"positions of {low} to {high} without a cell", ""))
            if state.recurrent:
                found.append(
                    of_count(int(state.recurrent.cells.positions[-1]), high, "position of the recurrent cell", "")
                )
    return worst(found)


@verifies("SM-07/abort-leaves-a-wrong-position", case=Abort)
def test_after_an_abort_the_positions_name_what_is_held(bench: Bench, case: Abort) -> Deviation:
    prefix, aborted, following = bench.texts(case.text_seed, case.prefix_tokens, case.aborted_tokens, _NEXT)
    settings = _settings(n_ubatch=case.ubatch)
    asked = 0

    def count() -> bool:
        nonlocal asked
        asked += 1
        return asked > limit

    with bench.used_context(settings) as context:
        context.decode(prefix)
        limit = 1 << 30
        context.on_abort(count)
        context.decode(aborted[: case.ubatch])
        in_one_ubatch = asked
    with bench.used_context(settings) as context:
        context.decode(prefix)
        asked, limit = 0, in_one_ubatch + in_one_ubatch // 2
        context.on_abort(count)
        n = len(aborted)
        positions = np.arange(len(prefix), len(prefix) + n, dtype=np.int32)
        code = context.process(TokenBatch(aborted, positions, np.zeros(n, np.int8)))
        context.on_abort(None)
        if code != 2:
            raise NotDecidable(f"the build asks {in_one_ubatch} times a micro-batch and was not aborted ({code})")
        held = context.pos_max() + 1
        whole = np.concatenate([prefix, aborted])
        return _continued(bench, context, [whole[:held]] if held else [], following)


@verifies("SM-07/sliding-window-removal-below-the-window", case=Suffix)
def test_a_removal_below_the_sliding_window(bench: Bench, case: Suffix) -> Deviation:
    prefix, removed, following = bench.texts(case.text_seed, case.prefix_tokens, case.removed_tokens, _NEXT)
    with bench.used_context(_settings(n_ctx=2048, n_batch=2048, n_ubatch=32)) as context:
        context.decode(prefix)
        context.decode(removed)
        if context.seq_rm(0, len(prefix)):
            return _continued(bench, context, [prefix], following)
        return _continued(bench, context, [prefix, removed], following)


@verifies("SM-07/rollback-into-a-gap", case=Gap)
def test_a_rollback_to_where_positions_have_a_gap(bench: Bench, case: Gap) -> Deviation:
    (text,) = bench.texts(case.text_seed, case.prefix_tokens)
    last = case.prefix_tokens - 1
    with bench.used_context(_settings(n_rs_seq=8)) as context:
        context.decode(text)
        if not context.can_shift:
            raise NotDecidable("positions of this memory cannot be shifted")
        context.seq_add(0, last, -1, case.gap)
        agreed = context.seq_rm(0, last + case.gap)
        expected = last - 1 if agreed else last + case.gap
        low, high = context.pos_min(), context.pos_max()
        crossed = of_count(max(low - high, 0), 0, f"positions from {low} to {high}", "")
        return worst([of_count(high, expected, "largest position", ""), crossed])


# -- SM-08


@verifies("SM-08", case=Pieces)
def test_positions_left_to_the_library_equal_explicit_ones(bench: Bench, case: Pieces) -> Deviation:
    first, second = bench.texts(case.text_seed, case.prefix_tokens, case.more_tokens)
    settings = _settings(n_ubatch=case.ubatch)
    rows = []
    for automatic in (True, False):
        with bench.used_context(settings) as context:
            start = 0
            for piece in (first, second):
                positions = None if automatic else np.arange(start, start + len(piece), dtype=np.int32)
                start += len(piece)
                if (code := context.process(TokenBatch(piece, positions, np.ones(len(piece), np.int8)))) != 0:
                    raise StateError(f"a decode {'without' if automatic else 'with'} positions returned {code}")
                rows.append(context.logits(len(piece)))
    return worst([of_logits(rows[0], rows[2]), of_logits(rows[1], rows[3])])


# -- SM-09


@verifies("SM-09/unified-and-separate-agree", case=Trim)
def test_unified_and_separate_caches_agree(bench: Bench, case: Trim) -> Deviation:
    text, other, following = bench.texts(case.text_seed, case.prefix_tokens, 20, _NEXT)
    found = []
    with bench.used_context(_settings(n_seq_max=2, n_ctx=1024, kv_unified=case.kv_unified)) as context:
        context.decode(text)
        context.decode(other, sequence=1)
        context.seq_rm(1)
        context.seq_cp(0, 1)
        found.append(_continued(bench, context, [text], following, sequence=1))
        context.seq_rm(0)
        found.append(_prompted(bench, context, other))
        found.append(_continued(bench, context, [text, following], other, sequence=1))
    return worst(found)


@verifies("SM-09/partial-copy-between-streams", case=PartialCopy)
def test_a_partial_copy_works_or_is_refused(bench: Bench, case: PartialCopy) -> Deviation:
    text, following = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    copied = min(case.copied_tokens, case.prefix_tokens)
    with bench.used_context(_settings(n_seq_max=2, n_ctx=1024, kv_unified=case.kv_unified)) as context:
        context.decode(text)
        context.seq_cp(0, 1, 0, copied)
        original = _continued(bench, context, [text], following)
        if context.pos_max(1) == -1:
            return original
        return worst([original, _continued(bench, context, [text[:copied]], following, sequence=1)])


# -- SM-10


@verifies("SM-10", case=Full)
def test_a_full_cache_says_so_loses_nothing_and_recovers(bench: Bench, case: Full) -> Deviation:
    settings = _settings(n_seq_max=2, n_ctx=512 if case.kv_unified else 1024, kv_unified=case.kv_unified)
    text, other, following = bench.texts(case.text_seed, 600, case.prefix_tokens, _NEXT)
    with bench.used_context(settings) as context:
        context.decode(other, sequence=1)
        held = code = 0
        while held < len(text) - case.batch_tokens:
            piece = text[held : held + case.batch_tokens]
            positions = np.arange(held, held + len(piece), dtype=np.int32)
            before = _kept(context, 1) if held >= 400 else b""
            code = context.process(TokenBatch(piece, positions, np.zeros(len(piece), np.int8)))
            if code != 0:
                break
            held += len(piece)
        if code != 1:
            raise NotDecidable(f"{held} tokens did not fill the cache")
        found = [of_count(context.pos_max(), held - 1, "largest position in a full cache", "")]
        found.append(_unchanged(before, _kept(context, 1), "the neighbour's state"))
        found.append(of_count(int(context.seq_rm(0)), 1, "removals that worked", ""))
        found.append(_prompted(bench, context, text[:40]))
        found.append(_continued(bench, context, [other], following, sequence=1))
    return worst(found)


@verifies("SM-10/sliding-cells-of-a-copy", case=Grown)
def test_a_copy_does_not_keep_the_cells_that_its_window_has_left(bench: Bench, case: Grown) -> Deviation:
    text, more = bench.texts(case.text_seed, case.prefix_tokens, case.more_tokens)
    settings = _settings(n_ctx=2048, n_batch=2048, n_ubatch=32, n_seq_max=2, kv_unified=True)
    with bench.used_context(settings) as context:
        context.decode(text)
        context.seq_cp(0, 1)
        rows = context.decode(more, outputs="all")
        return of_logits(rows, bench.cold(settings, text, more))


# -- SM-11


@verifies("SM-11", case=Rounds)
def test_a_thousand_rounds_of_saving_and_removing_cost_nothing(bench: Bench, case: Rounds) -> Deviation:
    prefix, more, following = bench.texts(case.text_seed, case.prefix_tokens, 4, _NEXT)
    with bench.used_context(_settings(n_ctx=256, n_batch=256)) as context:
        context.decode(prefix)
        saved = context.save()
        resident = 0
        for number in range(case.rounds):
            context.decode(more, outputs="none")
            context.seq_rm(0)
            context.restore(saved)
            if number == case.rounds // 10:
                resident = resident_bytes()
        grown = resident_bytes() - resident
        sizes = of_count(len(context.save()), len(saved), "size of the state after all rounds")
        capacity = context.n_ctx - case.prefix_tokens - 8
        filled = bench.texts(case.text_seed + 1, capacity)[0]
        continued = _continued(bench, context, [prefix], following)
        context.decode(filled, outputs="none")  # raises where cells were lost
    grew = of_count(max(grown - (case.allowed_mib << 20), 0), 0, "growth of memory")
    return worst([sizes, continued, grew])


# -- SM-13


class RandomWalk(Case):
    """`steps` random calls; a deviation of logits is noise below a power of ten, or below so many times what was measured."""

    walk_seed: int
    steps: int
    sequences: int
    n_rs_seq: int
    kv_unified: bool
    swa_full: bool
    flash_attn: bool
    ubatch: int
    cache_type: str
    snug: bool
    nmse_exponent: int
    noise_factor: int


@verifies("SM-13", case=RandomWalk)
def test_a_random_walk_over_all_calls_finds_nothing_that_is_not_known(bench: Bench, case: RandomWalk) -> Deviation:
    settings = settings_of(
        case.sequences, case.n_rs_seq, case.kv_unified, case.swa_full, case.flash_attn, case.ubatch, case.cache_type,
        case.snug,
    )  # fmt: skip
    stage = LocalStage(bench.setup)
    references = References(stage, 10.0**case.nmse_exponent, case.noise_factor)
    try:
        walk = Walk(stage, settings, references, avoidable(known_failures(), bench.subject, bench.build_name))
        found = run(walk, random_steps(case.walk_seed, case.steps))
    finally:
        stage.close()
    if found is None:
        return Deviation(0.0, "findings of a walk")
    where = f"{found.kind} after {len(walk.lines)} calls, {found.what}; the last: {'; '.join(walk.lines[-3:])}"
    return Deviation(1.0, "findings of a walk", where, found.expected, found.seen)


# -- pending shifts


@verifies("RP-01/save-while-a-shift-is-pending", case=Pending)
def test_a_state_saved_before_a_shift_is_applied_equals_one_saved_after(bench: Bench, case: Pending) -> Deviation:
    text, following = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    rows = []
    settings = _settings(n_seq_max=2)
    for pending in (True, False):
        with bench.used_context(settings) as context, bench.used_context(settings) as elsewhere:
            _close_a_gap(context, text, case)
            kept = case.prefix_tokens - case.removed
            if not pending:  # decoding, into whatever sequence, applies the shift
                context.decode(following[:1], sequence=1)
            elsewhere.restore(context.save())
            rows.append(elsewhere.decode(following, start=kept, outputs="all"))
    return of_logits(*rows)


@verifies("RP-01/long-decode-after-a-context-was-restored", case=Grown)
def test_a_long_decode_after_a_whole_context_was_restored(bench: Bench, case: Grown) -> Deviation:
    text, more = bench.texts(case.text_seed, case.prefix_tokens, case.more_tokens)
    settings = _settings(n_ctx=2048, n_batch=2048, n_ubatch=32)
    with bench.used_context(settings) as context, bench.used_context(settings) as elsewhere:
        context.decode(text)
        context.restore(context.save())
        if elsewhere.load_context(context.save_context()) == 0:
            raise StateError("the build refused to load the state of a context that it wrote itself")
        rows = elsewhere.decode(more, start=case.prefix_tokens, outputs="all")
        return of_logits(rows, bench.cold(settings, text, more))


@verifies("RP-01/quantized-cache-on-device", case=OnDevice)
def test_a_quantized_cache_kept_on_the_device_comes_back(bench: Bench, case: OnDevice) -> Deviation:
    text, other, following = bench.texts(case.text_seed, case.prefix_tokens, case.prefix_tokens, _NEXT)
    settings = _settings(type_k=case.cache_type, type_v=case.cache_type, flash_attn="on")
    rows = []
    for kept_on_device in (True, False):
        with bench.context(settings) as context:
            context.decode(text)
            if kept_on_device:
                saved = context.save(flags=StateFlags.ON_DEVICE)
                context.seq_rm(0)
                context.decode(other)
                context.restore(saved, flags=StateFlags.ON_DEVICE)
            rows.append(context.decode(following, start=case.prefix_tokens, outputs="all"))
    return of_logits(*rows)


def _close_a_gap(context: Context, text: Tokens, case: Pending) -> None:
    context.decode(text)
    end = case.begin + case.removed
    if not context.can_shift:
        raise NotDecidable("positions of this memory cannot be shifted")
    if not context.seq_rm(0, case.begin, end):
        raise NotDecidable("the build refused to remove a middle range")
    context.seq_add(0, end, -1, -case.removed)


@verifies("DC-01/rebuilt", case=Suffix)
def test_what_is_removed_and_decoded_again_has_the_same_bytes(bench: Bench, case: Suffix) -> Deviation:
    prefix, again, other = bench.texts(case.text_seed, case.prefix_tokens, case.removed_tokens, 30)
    with bench.context(_settings()) as straight, bench.context(_settings()) as rebuilt:
        straight.decode(prefix)
        straight.decode(again)
        rebuilt.decode(prefix)
        saved = rebuilt.save()
        rebuilt.decode(other)
        if not rebuilt.seq_rm(0, case.prefix_tokens):
            rebuilt.seq_rm(0)
            rebuilt.restore(saved)
        rebuilt.decode(again)
        return _unchanged(_kept(straight), _kept(rebuilt), "the state")


@verifies("DC-01/restored", case=Suffix)
def test_what_is_restored_and_continued_has_the_same_bytes(bench: Bench, case: Suffix) -> Deviation:
    prefix, again = bench.texts(case.text_seed, case.prefix_tokens, case.removed_tokens)
    with bench.context(_settings()) as straight, bench.used_context(_settings()) as restored:
        straight.decode(prefix)
        saved = straight.save()
        straight.decode(again)
        restored.restore(saved, flags=StateFlags.FULL)
        restored.decode(again)
        return _unchanged(_kept(straight), _kept(restored), "the state")


# -- SP: splicing the middle


@verifies("SP-01", case=Removal)
def test_a_recurrent_model_refuses_to_remove_from_the_middle_or_does_it_exactly(
    bench: Bench, case: Removal
) -> Deviation:
    begin = max(1, case.begin * (case.prefix_tokens - 2) // 100)
    end = begin + 1 + case.end * (case.prefix_tokens - 2 - begin) // 100
    head, middle, tail, following = bench.texts(case.text_seed, begin, end - begin, case.prefix_tokens - end, _NEXT)
    with bench.used_context(_settings(n_rs_seq=case.n_rs_seq)) as context:
        context.decode(np.concatenate([head, middle, tail]))
        refused = _refused(bench, context, begin, end, [head, middle, tail], following)
        if refused is not None:
            return refused
        logits = context.decode(following, outputs="all")
        return of_logits(logits, bench.cold(context.settings, np.concatenate([head, tail]), following))


@verifies("SP-04", case=Middle)
def test_attention_without_a_middle_over_a_state_that_saw_it_is_another_context(
    bench: Bench, case: Middle
) -> Deviation:
    counts = case.prefix_tokens, case.removed_tokens, case.more_tokens, _NEXT
    head, middle, tail, following = bench.texts(case.text_seed, *counts)
    saved = []
    for pieces in ([head, middle, tail], [head, tail]):
        with bench.context(_settings()) as context:
            for piece in pieces:
                context.decode(piece)
            saved.append(bench.state(context.save()))
    seen, unseen = saved
    assert seen.recurrent is not None
    seen.recurrent.cells.positions[:] = len(head) + len(tail) - 1
    with bench.used_context(_settings()) as context:
        context.restore(splice(unseen, seen))
        return of_logits(context.decode(following, outputs="all"), bench.cold(context.settings, head, tail, following))


class Shift(Pending):
    """The same with a cache of some key type."""

    type_k: str


@verifies("SP-02/shift-where-it-is-not-allowed", case=Pending)
def test_a_shift_where_it_is_not_allowed_is_refused(bench: Bench, case: Pending) -> Deviation:
    text, following = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    with bench.used_context(_settings()) as context:
        context.decode(text)
        if context.can_shift:
            raise NotDecidable("positions of this memory can be shifted")
        context.seq_add(0, case.begin, -1, -case.removed)
        return _continued(bench, context, [text], following)


@verifies("SP-03/shift-with-quantized-unrotated-keys", case=Shift)
def test_a_shift_of_quantized_keys_works(bench: Bench, case: Shift) -> Deviation:
    return _shifted(bench, case)


@verifies("SP-03/shift-with-bf16-keys", case=Shift)
def test_a_shift_of_bf16_keys_works(bench: Bench, case: Shift) -> Deviation:
    return _shifted(bench, case)


def _shifted(bench: Bench, case: Shift) -> Deviation:
    text, following = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    with bench.used_context(_settings(type_k=case.type_k)) as context:
        _close_a_gap(context, text, case)
        logits = context.decode(following, start=case.prefix_tokens - case.removed, outputs="all")
    return of_count(int(np.count_nonzero(~np.isfinite(logits))), 0, "logits that are no numbers", "")
