"""A restored state continues as if nothing had happened: specs/restore_parity.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np

from conformance.harness.bench import FLOAT_TYPES, Bench, Case, Decode, Piece, Tokens
from conformance.harness.engine import Blob, Context, ContextSettings, Logits, StateError, StateFlags
from conformance.harness.exam import NotDecidable, Undecided, verifies
from conformance.harness.measure.deviation import Deviation, of_count, of_layers, of_logits, worst
from conformance.harness.precision import memory
from conformance.harness.state import Cells, census, compare

FLAGS = {"full": StateFlags.FULL, "partial_only": StateFlags.PARTIAL_ONLY}


class Checkpoint(Decode):
    """A checkpoint after `prefix_tokens`; `suffix_tokens` follow."""

    prefix_tokens: int
    suffix_tokens: int


class CachedCheckpoint(Checkpoint):
    """A checkpoint of a cache of some type."""

    cache_type: str

    def reordered(self, bench: Bench) -> bool:
        """Whether the restore lays cells out in another order; quantized caches are then too noisy to compare."""
        reordered = bench.reorders(self.prefix_tokens)
        if reordered and self.cache_type not in FLOAT_TYPES:
            raise NotDecidable(
                f"cells of a {self.cache_type} cache in another order: one rounding more decides a whole step"
            )
        return reordered


class Elsewhere(Checkpoint):
    """A checkpoint restored into a used context, perhaps into another sequence."""

    other_tokens: int
    source_sequence: int
    target_sequence: int
    kv_unified: bool


class Detour(Checkpoint):
    """A checkpoint that the sequence comes back to after a detour of `discarded_tokens`."""

    discarded_tokens: int


class Rounds(Decode):
    """After `prefix_tokens`, so many rounds in which `generated_tokens` are generated, discarded and generated again."""

    prefix_tokens: int
    generated_tokens: int
    rounds: int


class Filed(Decode):
    """Two sequences of `tokens` and `other_tokens`; a file takes the first or both, and `suffix_tokens` follow.

    The context that loads it has decoded `replaced_tokens` before.
    """

    tokens: int
    other_tokens: int
    replaced_tokens: int
    suffix_tokens: int
    scope: Literal["sequence", "sequence_of_a_stream", "context", "context_of_streams"]

    @property
    def whole(self) -> bool:
        """Whether the file holds all of the context."""
        return self.scope.startswith("context")

    @property
    def kv_unified(self) -> bool:
        """Whether both sequences share one stream of cells."""
        return "stream" not in self.scope


class Loose(Case):
    """A case whose sums may be taken in other pieces or another order, in short texts too.

    There, one cached f16 value that rounds the other way outweighs all other noise, with flash attention or without. So
    what is tolerated is the larger noise of both: the field is not called `flash_attn`, by which a case claims its own.
    """

    text_seed: int
    ubatch: int
    flash: Literal["off", "on"]


class Moved(Loose):
    """A checkpoint after `prefix_tokens` restored into a context with other sizes than the one that saved it."""

    prefix_tokens: int
    suffix_tokens: int
    batch: int
    other_batch: int
    other_ubatch: int
    other_threads: int
    other_ctx: int
    other_sequences: int

    def in_other_pieces(self, bench: Bench) -> bool:
        """Whether the context that resumes takes sums in other pieces or another order than the first.

        That is so with other micro-batches behind the first token, with threads that share the cells of one token, as
        they do in flash attention, and with a ring, whose rows depend on n_ubatch and n_seq_max.
        """
        n = self.suffix_tokens - 1
        return (
            _pieces(n, self.batch, self.ubatch) != _pieces(n, self.other_batch, self.other_ubatch)
            or (self.flash == "on" and self.other_threads != bench.setup.n_threads)
            or bench.census.sliding_window is not None
        )


class Neighbours(Loose):
    """Three sequences of `tokens`, one of which is brought back from `detour_tokens` or removed; the others go on."""

    tokens: int
    detour_tokens: int
    suffix_tokens: int
    touched_sequence: int
    operation: Literal["restore", "remove"]
    kv_unified: bool


class Images(Decode):
    """Text, an image, text, the same image turned, text; a checkpoint behind the first image or before the second."""

    before_tokens: int
    between_tokens: int
    after_tokens: int
    width: int
    height: int
    checkpoint: Literal["behind_an_image", "before_an_image"]

    def pieces(self, bench: Bench) -> list[Piece]:
        """All five, each at the positions that follow from the one before."""
        position, pieces = 0, []
        texts = bench.texts(self.text_seed, self.before_tokens, self.between_tokens, self.after_tokens)
        sizes = [(self.width, self.height), (self.height, self.width)]
        for number, text in enumerate(texts):
            pieces.append((text, np.arange(position, position + len(text), dtype=np.int32)))
            position += len(text)
            if number < len(sizes):
                pieces.append(bench.image(self.text_seed + number, *sizes[number], position))
                position += max(sizes[number])
        return pieces


class OnDevice(Decode):
    """A sequence saved after `prefix_tokens`, loaded after a detour of `detour_tokens`, `rounds` times, each 3 tokens on.

    Where it `moves`, another sequence of `other_tokens` is meanwhile removed and decoded again, longer.
    """

    prefix_tokens: int
    detour_tokens: int
    other_tokens: int
    suffix_tokens: int
    flags: str
    moves: bool
    rounds: int
    kv_unified: bool


class Grown(Case):
    """A text, and the same with more behind it."""

    text_seed: int
    tokens: int
    more_tokens: int


class Save(Case):
    """A save after `tokens`, with flags by name."""

    text_seed: int
    tokens: int
    flags: str


@verifies("RP-01", case=CachedCheckpoint)
def test_a_restored_checkpoint_continues_as_if_nothing_had_happened(bench: Bench, case: CachedCheckpoint) -> Deviation:
    prefix, suffix = bench.texts(case.text_seed, case.prefix_tokens, case.suffix_tokens)
    settings, reordered = case.settings(cache_type=case.cache_type), case.reordered(bench)
    with (
        bench.context(settings) as straight,
        bench.context(settings) as saved,
        bench.context(settings) as resumed,
    ):
        straight.decode(prefix)
        expected = straight.decode(suffix, outputs="all")
        saved.decode(prefix)
        resumed.restore(saved.save())
        after_save = of_logits(saved.decode(suffix, outputs="all"), expected)
        after_restore = of_logits(resumed.decode(suffix, outputs="all"), expected)
    # A save leaves what it saves alone, in bits; only a restore can lay cells out anew.
    return after_save if after_save.value else after_restore.with_cells_in_another_order(reordered)


@verifies("RP-02", case=CachedCheckpoint)
def test_a_restored_checkpoint_leaves_every_layer_as_in_an_uninterrupted_run(
    bench: Bench, case: CachedCheckpoint
) -> Deviation:
    prefix, suffix = bench.texts(case.text_seed, case.prefix_tokens, case.suffix_tokens)
    settings, reordered = case.settings(cache_type=case.cache_type), case.reordered(bench)
    with (
        bench.context(settings) as straight,
        bench.context(settings) as saved,
        bench.context(settings) as resumed,
    ):
        straight.decode(prefix)
        straight.decode(suffix)
        saved.decode(prefix)
        blob = saved.save()
        resumed.restore(blob)
        at_once = of_layers(compare(bench.state(blob), bench.state(resumed.save()), layers=bench.layers))
        if at_once.value:
            return at_once
        resumed.decode(suffix)
        expected, seen = bench.state(straight.save()), bench.state(resumed.save())
    rows = compare(expected, seen, layers=bench.layers, by_position=reordered)
    return of_layers(rows).with_cells_in_another_order(reordered)


@verifies("RP-03", case=Elsewhere)
def test_a_checkpoint_restores_into_a_used_context_and_another_sequence(bench: Bench, case: Elsewhere) -> Deviation:
    prefix, suffix, other = bench.texts(case.text_seed, case.prefix_tokens, case.suffix_tokens, case.other_tokens)
    settings = case.settings(n_ctx=2048, n_seq_max=2, kv_unified=case.kv_unified)
    with (
        bench.context(settings) as straight,
        bench.context(settings) as saved,
        bench.context(settings) as used,
    ):
        straight.decode(prefix)
        expected = straight.decode(suffix, outputs="all")
        saved.decode(prefix, sequence=case.source_sequence)
        for sequence in (0, 1):
            used.decode(other, sequence=sequence)
        for sequence in (0, 1):
            if not used.seq_rm(sequence):
                raise StateError(f"the build refused to remove the whole of sequence {sequence}")
        used.restore(saved.save(case.source_sequence), case.target_sequence)
        deviation = of_logits(used.decode(suffix, sequence=case.target_sequence, outputs="all"), expected)
    return deviation.with_cells_in_another_order(bench.reorders(case.prefix_tokens))


@verifies("RP-04", case=Detour)
def test_a_partial_restore_and_the_removal_of_the_attention_suffix_equal_a_full_restore(
    bench: Bench, case: Detour
) -> Deviation:
    prefix, detour, suffix = bench.texts(case.text_seed, case.prefix_tokens, case.discarded_tokens, case.suffix_tokens)
    settings = case.settings()
    with (
        bench.context(settings) as straight,
        bench.context(settings) as restored,
        bench.context(settings) as returned,
    ):
        straight.decode(prefix)
        uninterrupted = straight.decode(suffix, outputs="all")
        returned.decode(prefix)
        full, partial = returned.save(), returned.save(flags=StateFlags.PARTIAL_ONLY)
        restored.restore(full)
        after_full = restored.decode(suffix, outputs="all")
        returned.decode(detour)
        returned.restore(partial, flags=StateFlags.PARTIAL_ONLY)
        if not returned.seq_rm(0, case.prefix_tokens):
            raise StateError("the build refused to remove the attention suffix after a partial restore")
        after_partial = returned.decode(suffix, start=case.prefix_tokens, outputs="all")
    references = [after_full] if bench.reorders(case.prefix_tokens) else [after_full, uninterrupted]
    return worst(of_logits(after_partial, reference) for reference in references)


@verifies("RP-05", case=Rounds)
def test_rounds_of_saving_and_restoring_do_not_drift(bench: Bench, case: Rounds) -> Deviation:
    (prefix,) = bench.texts(case.text_seed, case.prefix_tokens)
    with bench.context(case.settings()) as context:
        first_choice = int(context.decode(prefix)[0].argmax())
        saved = [context.save()]
        generated = []
        for _ in range(case.rounds):
            for _ in ("go on", "go on again from the save"):
                generated.append(_generated(context, first_choice, case.generated_tokens))
                context.restore(saved[-1])
            saved.append(context.save())
    bytes_kept = worst(_of_states(bench, saved[0], each) for each in saved[1:])
    choices_kept = worst(_of_generated(each, generated[0]) for each in generated[1:])
    return _first_bytes(bytes_kept, choices_kept.with_cells_in_another_order(bench.reorders(case.prefix_tokens)))


@verifies("RP-06", case=Filed)
def test_a_file_brings_back_a_sequence_or_a_whole_context_with_its_tokens(bench: Bench, case: Filed) -> Deviation:
    return _through_a_file(bench, case)


@verifies("RP-06/context-of-streams", case=Filed)
def test_a_file_brings_back_a_context_whose_sequences_have_streams_of_their_own(bench: Bench, case: Filed) -> Deviation:
    return _through_a_file(bench, case)


def _through_a_file(bench: Bench, case: Filed) -> Deviation:
    text, other, replaced, suffix = bench.texts(
        case.text_seed, case.tokens, case.other_tokens, case.replaced_tokens, case.suffix_tokens
    )
    settings = case.settings(n_ctx=2048, n_seq_max=2, kv_unified=case.kv_unified)
    filed = [text, other] if case.whole else [text]
    with (
        TemporaryDirectory() as folder,
        bench.context(settings) as straight,
        bench.context(settings) as saved,
        bench.context(settings) as loaded,
    ):
        _decode_each(straight, filed)
        expected = [straight.decode(suffix, sequence=sequence, outputs="all") for sequence in range(len(filed))]
        _decode_each(saved, [text, other])
        if len(text) or case.whole:  # an empty one over a used one is SM-04's
            _decode_each(loaded, [replaced])
        through_file = _context_through_file if case.whole else _sequence_through_file
        tokens = through_file(saved, loaded, Path(folder) / "state", text)
        seen = [loaded.decode(suffix, sequence=sequence, outputs="all") for sequence in range(len(filed))]
    reordered = any(bench.reorders(len(each)) for each in filed)
    logits = worst(of_logits(a, b) for a, b in zip(seen, expected, strict=True))
    return _first_bytes(_of_tokens(tokens, text), logits.with_cells_in_another_order(reordered))


@verifies("RP-07", case=Moved)
def test_a_checkpoint_restores_into_a_context_of_other_sizes(bench: Bench, case: Moved) -> Deviation:
    prefix, first, rest = bench.texts(case.text_seed, case.prefix_tokens, 1, case.suffix_tokens - 1)
    settings = ContextSettings(
        n_batch=case.batch,
        n_ubatch=case.ubatch,
        flash_attn=case.flash,
        kv_unified=True,  # one stream, however many sequences
    )
    other = settings.changed(
        n_batch=case.other_batch, n_ubatch=case.other_ubatch, n_ctx=case.other_ctx, n_seq_max=case.other_sequences
    )
    with (
        bench.context(settings) as straight,
        bench.context(settings) as saved,
        bench.context(other) as resumed,
    ):
        straight.decode(prefix)
        expected = [straight.decode(first), straight.decode(rest, outputs="all")]
        saved.decode(prefix)
        resumed.restore(saved.save())
        resumed.set_threads(case.other_threads)
        seen = [resumed.decode(first)]
        resumed.set_threads(bench.setup.n_threads)  # two threads on a busy machine wait for each other
        seen.append(resumed.decode(rest, outputs="all"))
    deviation = of_logits(np.concatenate(seen), np.concatenate(expected))
    return deviation.with_cells_in_another_order(case.in_other_pieces(bench))


@verifies("RP-08", case=Neighbours)
def test_restoring_or_removing_a_sequence_leaves_the_others_as_they_are(bench: Bench, case: Neighbours) -> Deviation:
    *texts, detour, suffix = bench.texts(case.text_seed, *[case.tokens] * 3, case.detour_tokens, case.suffix_tokens)
    settings = ContextSettings(
        n_ctx=768, n_ubatch=case.ubatch, n_seq_max=3, flash_attn=case.flash, kv_unified=case.kv_unified
    )
    others = [sequence for sequence in range(3) if sequence != case.touched_sequence]
    with bench.context(settings) as left_alone, bench.context(settings) as context:
        for each in (left_alone, context):
            _decode_each(each, texts)
        checkpoint = context.save(case.touched_sequence)
        for each in (left_alone, context):
            each.decode(detour, sequence=case.touched_sequence)
        before = [context.save(sequence) for sequence in others]
        if case.operation == "restore":
            context.restore(checkpoint, case.touched_sequence)
        elif not context.seq_rm(case.touched_sequence):
            raise StateError(f"the build refused to remove the whole of sequence {case.touched_sequence}")
        after = [context.save(sequence) for sequence in others]
        expected, seen = (
            [each.decode(suffix, sequence=sequence, outputs="all") for sequence in others]
            for each in (left_alone, context)
        )
    bytes_kept = worst(_of_states(bench, a, b) for a, b in zip(before, after, strict=True))
    logits_kept = worst(of_logits(a, b) for a, b in zip(seen, expected, strict=True))
    reordered = case.kv_unified and not bench.model.is_recurrent  # what follows takes the cells that became free
    return _first_bytes(bytes_kept, logits_kept.with_cells_in_another_order(reordered))


@verifies("RP-09", case=Save)
def test_the_announced_written_and_consumed_sizes_of_a_state_are_equal(bench: Bench, case: Save) -> Deviation:
    flags = FLAGS[case.flags]
    if flags and not bench.library.has("llama_state_seq_get_data_ext"):
        raise NotDecidable("this build has no partial states")
    with bench.context(ContextSettings()) as context:
        context.decode(*bench.texts(case.text_seed, case.tokens))
        announced = context.announced_bytes(flags=flags)
        blob = context.save(flags=flags)
        consumed = context.load(blob, flags=flags)
    return worst(
        [
            of_count(len(blob), announced, "written against announced"),
            of_count(consumed, len(blob), "consumed against written"),
        ]
    )


@verifies("RP-10", case=Images)
def test_image_positions_survive_a_checkpoint(bench: Bench, case: Images) -> Deviation:
    pieces = case.pieces(bench)
    cut = 2 if case.checkpoint == "behind_an_image" else 3
    settings = case.settings()
    with (
        bench.context(settings) as straight,
        bench.context(settings) as saved,
        bench.context(settings) as resumed,
    ):
        _decode_pieces(straight, pieces[:cut])
        expected = _decode_pieces(straight, pieces[cut:])
        _decode_pieces(saved, pieces[:cut])
        blob = saved.save()
        resumed.restore(blob)
        restored = resumed.save()
        logits = of_logits(_decode_pieces(resumed, pieces[cut:]), expected)
        end = bench.state(resumed.save()).attention[0].cells
    return worst([_of_states(bench, blob, restored), _of_positions(end, pieces), logits])


@verifies("RP-11", case=OnDevice)
def test_a_state_kept_inside_the_context_equals_one_kept_by_the_host(bench: Bench, case: OnDevice) -> Deviation:
    settings = case.settings(n_seq_max=2, kv_unified=case.kv_unified)
    ends = []
    for place in (StateFlags.FULL, StateFlags.ON_DEVICE):
        with bench.context(settings) as context:
            logits = _rounds_of_one_place(context, bench, case, FLAGS[case.flags] | place)
            ends.append((logits, context.save()))
    (expected, state_expected), (seen, state_seen) = ends
    return worst([of_logits(seen, expected), _of_states(bench, state_expected, state_seen)])


@verifies("RP-13", case=Grown)
def test_a_partial_checkpoint_holds_no_more_than_a_window_and_a_recurrent_state(bench: Bench, case: Grown) -> Deviation:
    declared = bench.census
    if declared.attention is None or declared.recurrent is None:
        raise Undecided(f"the layers of architecture {declared.arch!r} are not known here; add a rule to census.py")
    settings = ContextSettings(n_ctx=2048, n_ubatch=32, swa_full=False)
    run = memory.Run(settings.n_ctx, settings.n_ubatch)
    sliding = [
        memory.AttentionLayers(1, layer.n_head_kv, layer.key_dim, layer.value_dim, declared.sliding_window)
        for layer in declared.attention
        if layer.sliding
    ]
    bytes_f32 = 4
    bound = memory.footprint(sliding, run, "f16").total
    bound += sum(bytes_f32 * (layer.r_values + layer.s_values) for layer in declared.recurrent)
    deviations = []
    with bench.context(settings) as context:
        for text in bench.texts(case.text_seed, case.tokens, case.more_tokens):
            context.decode(text)
            blob = context.save(flags=StateFlags.PARTIAL_ONLY)
            held = census(bench.state(blob, partial=True))
            rows = len(blob) - held.header_bytes - held.cell_bytes
            deviations.append(of_count(sum(held.attention_layers), len(sliding), "attention layers", "layers"))
            deviations.append(of_count(max(rows, bound), bound, "rows beyond the bound"))
    return worst(deviations)


def _rounds_of_one_place(context: Context, bench: Bench, case: OnDevice, flags: StateFlags) -> Logits:
    """Rounds of save, detour and restore of sequence 0; the logits behind them."""
    n_more, n_longer = 3, 8
    longest = case.other_tokens + n_longer * case.rounds
    prefix, more, detour, other, suffix = bench.texts(
        case.text_seed, case.prefix_tokens, n_more * case.rounds, case.detour_tokens, longest, case.suffix_tokens
    )
    context.decode(other[: case.other_tokens], sequence=1)
    context.decode(prefix)
    for number, piece in enumerate(np.split(more, case.rounds), 1):
        context.decode(piece)
        end = context.pos_max() + 1
        blob = context.save(flags=flags)
        context.decode(detour)
        if case.moves:
            if not context.seq_rm(1):
                raise StateError("the build refused to remove the whole of sequence 1")
            context.decode(other[: case.other_tokens + n_longer * number], sequence=1)
        context.restore(blob, flags=flags)
        if flags & StateFlags.PARTIAL_ONLY and not context.seq_rm(0, end):
            raise StateError(f"the build refused to remove positions from {end} on after a partial restore")
    return context.decode(suffix, outputs="all")


def _pieces(n: int, batch: int, ubatch: int) -> list[int]:
    """The micro-batches in which n tokens are decoded."""
    calls = [min(batch, n - begin) for begin in range(0, n, batch)]
    return [min(ubatch, call - begin) for call in calls for begin in range(0, call, ubatch)]


def _generated(context: Context, choice: int, n: int) -> Logits:
    """The logits of n greedy steps, of which the first decodes `choice`."""
    rows = []
    for _ in range(n):
        rows.append(context.decode([choice])[0])
        choice = int(rows[-1].argmax())
    return np.stack(rows)


def _of_generated(seen: Logits, expected: Logits) -> Deviation:
    """Of the logits up to the first choice that differs; the rows behind it answer to different tokens."""
    differ = np.flatnonzero(seen.argmax(axis=1) != expected.argmax(axis=1))
    n = int(differ[0]) + 1 if len(differ) else len(expected)
    return of_logits(seen[:n], expected[:n])


def _of_states(bench: Bench, expected: Blob, seen: Blob) -> Deviation:
    return of_layers(compare(bench.state(expected), bench.state(seen), layers=bench.layers, by_position=True))


def _first_bytes(kept: Deviation, computed: Deviation) -> Deviation:
    """What must be kept bit by bit in any case, else what was computed from it, which may be another order's."""
    return computed if kept.value == 0 else kept


def _of_tokens(seen: Tokens, expected: Tokens) -> Deviation:
    if len(seen) != len(expected):
        return of_count(len(seen), len(expected), "tokens that come back", "tokens")
    return of_count(int((seen == expected).sum()), len(expected), "tokens that come back unchanged", "tokens")


def _decode_each(context: Context, texts: Sequence[Tokens]) -> None:
    """Decode a text into each sequence; an empty one leaves it empty."""
    for sequence, text in enumerate(texts):
        if len(text):
            context.decode(text, sequence=sequence)


def _sequence_through_file(saved: Context, loaded: Context, path: Path, tokens: Tokens) -> Tokens:
    """Sequence 0 goes from one context to the other; returns the tokens that came along."""
    written = saved.save_file(path, tokens)
    if written != path.stat().st_size:
        raise StateError(f"the build says it wrote {written} bytes into a file of {path.stat().st_size}")
    consumed, returned = loaded.load_file(path)
    if consumed != written:
        raise StateError(f"the build read {consumed} bytes of the {written} that it wrote into a file itself")
    return returned


def _context_through_file(saved: Context, loaded: Context, path: Path, tokens: Tokens) -> Tokens:
    """The whole context, otherwise the same."""
    if not saved.save_context_file(path, tokens):
        raise StateError("the build did not write the whole context into a file")
    accepted, returned = loaded.load_context_file(path)
    if not accepted:
        raise StateError("the build refused a file of the whole context that it wrote itself")
    return returned


def _decode_pieces(context: Context, pieces: Sequence[Piece]) -> Logits:
    """Texts and images one after the other; the logits of all."""
    rows = []
    for content, positions in pieces:
        if content.ndim == 1:
            rows.append(context.decode(content, start=int(positions[0]), outputs="all"))
        else:
            rows.append(context.decode_embeddings(content, positions, outputs="all"))
    return np.concatenate(rows)


def _of_positions(cells: Cells, pieces: Sequence[Piece]) -> Deviation:
    """How many image cells hold other t, y, x than they were decoded at; cells lie in the order of decoding."""
    deviations = []
    ends = np.cumsum([0, *(len(content) for content, _ in pieces)])
    for (_, positions), (begin, end) in zip(pieces, pairwise(ends.tolist()), strict=True):
        if positions.ndim == 1:
            continue
        for name, column, given in zip("tyx", (cells.positions, cells.y, cells.x), positions, strict=False):
            kept = 0 if column is None else int(np.count_nonzero(column[begin:end] == given))
            deviations.append(of_count(kept, end - begin, f"image cells with their {name}", "cells"))
    return worst(deviations)
