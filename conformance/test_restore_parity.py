"""A restored state continues as if nothing had happened: specs/restore_parity.yaml."""

from __future__ import annotations

from conformance.harness.bench import FLOAT_TYPES, Bench, Case, Decode
from conformance.harness.engine import ContextSettings, StateError, StateFlags
from conformance.harness.exam import NotDecidable, verifies
from conformance.harness.measure.deviation import Deviation, of_count, of_layers, of_logits, worst
from conformance.harness.state import compare

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
    target_sequence: int
    kv_unified: bool


class Detour(Checkpoint):
    """A checkpoint that the sequence comes back to after a detour of `discarded_tokens`."""

    discarded_tokens: int


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
        deviation = of_logits(resumed.decode(suffix, outputs="all"), expected)
    return deviation.with_cells_in_another_order(reordered)


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
        resumed.restore(saved.save())
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
        saved.decode(prefix)
        for sequence in (0, 1):
            used.decode(other, sequence=sequence)
        for sequence in (0, 1):
            if not used.seq_rm(sequence):
                raise StateError(f"the build refused to remove the whole of sequence {sequence}")
        used.restore(saved.save(), case.target_sequence)
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


@verifies("RP-09", case=Save)
def test_the_announced_written_and_consumed_sizes_of_a_state_are_equal(bench: Bench, case: Save) -> Deviation:
    flags = FLAGS[case.flags]
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
