"""What the state of a sequence consists of: specs/architecture.yaml."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from conformance.harness.bench import FLOAT_TYPES, Bench, Case
from conformance.harness.contract.census import AttentionLayer
from conformance.harness.engine import ContextSettings
from conformance.harness.exam import Undecided, verifies
from conformance.harness.exam.examination import contract
from conformance.harness.measure.deviation import Deviation, of_count, of_printed, worst
from conformance.harness.precision import memory
from conformance.harness.precision.document import cache_mib, load_document
from conformance.harness.state import SequenceState, census


class Text(Case):
    """A text of so many tokens."""

    text_seed: int
    tokens: int


class LongerText(Text):
    """A text, and the same with more behind it."""

    more_tokens: int


class CachedText(Text):
    """A text in a cache of some type."""

    cache_type: str

    def state(self, bench: Bench) -> SequenceState:
        """What is saved of it."""
        settings = ContextSettings(
            flash_attn="off" if self.cache_type in FLOAT_TYPES else "on",  # a quantized V needs it
            type_k=self.cache_type,
            type_v=self.cache_type,
        )
        with bench.context(settings) as context:
            context.decode(*bench.texts(self.text_seed, self.tokens))
            return bench.state(context.save())


@verifies("AR-01", case=Text)
def test_the_state_of_a_sequence_holds_every_layer(bench: Bench, case: Text) -> Deviation:
    declared = bench.census
    if declared.attention is None or declared.recurrent is None:
        raise Undecided(f"the layers of architecture {declared.arch!r} are not known here; add a rule to census.py")
    with bench.context(ContextSettings()) as context:
        context.decode(*bench.texts(case.text_seed, case.tokens))
        state = bench.state(context.save())
    attention = sorted(
        (layer.k.row_size, layer.v.row_size if layer.v else 0) for cache in state.attention for layer in cache.layers
    )
    recurrent = [(layer.r.row_size, layer.s.row_size) for layer in (state.recurrent.layers if state.recurrent else ())]
    bytes_f16, bytes_f32 = 2, 4
    return worst(
        [
            of_count(len(attention), len(declared.attention), "attention layers", "layers"),
            of_count(len(recurrent), len(declared.recurrent), "recurrent layers", "layers"),
            of_count(
                _matching(
                    attention,
                    sorted(
                        (bytes_f16 * a.n_head_kv * a.key_dim, bytes_f16 * a.n_head_kv * a.value_dim)
                        for a in declared.attention
                    ),
                ),
                len(declared.attention),
                "attention layers with rows of the declared size",
                "layers",
            ),
            of_count(
                _matching(recurrent, [(bytes_f32 * r.r_values, bytes_f32 * r.s_values) for r in declared.recurrent]),
                len(declared.recurrent),
                "recurrent layers with r and s of the declared size",
                "layers",
            ),
        ]
    )


def _matching(seen: list[tuple[int, int]], declared: list[tuple[int, int]]) -> int:
    return sum(a == b for a, b in zip(seen, declared, strict=False))


@verifies("AR-02", case=LongerText)
def test_recurrent_state_has_the_same_size_at_every_context_length(bench: Bench, case: LongerText) -> Deviation:
    text, more = bench.texts(case.text_seed, case.tokens, case.more_tokens)
    with bench.context(ContextSettings(n_ctx=2048)) as context:
        sizes = []
        for piece in (text, more):
            context.decode(piece)
            counted = census(bench.state(context.save()))
            sizes.append(counted.r_bytes + counted.s_bytes)
    return of_count(sizes[1], sizes[0], "recurrent state")


@verifies("AR-03", case=CachedText)
def test_attention_state_grows_by_an_exact_number_of_bytes_with_every_token(
    bench: Bench, case: CachedText
) -> Deviation:
    layers = _attention_layers(bench)
    state = case.state(bench)
    base, *sliding = [len(cache.cells) for cache in state.attention]
    deviations = [of_count(base, case.tokens, "cells of the whole context", "cells")]
    for cells in sliding:
        held = min(max(cells, min(case.tokens, bench.census.sliding_window or 0)), case.tokens)
        deviations.append(of_count(cells, held, "cells of the sliding window", "cells"))
    values = sum(cells * layer.n_head_kv * (layer.key_dim + layer.value_dim) for layer, cells in _cells(layers, state))
    counted = census(state)
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[case.cache_type.upper()]]
    kv_bytes = f"K and V in {case.cache_type}"
    return worst([*deviations, of_count(counted.k_bytes + counted.v_bytes, values * block_bytes // block, kv_bytes)])


@verifies("AR-04", case=CachedText)
def test_the_formulas_that_give_the_size_of_a_saved_state_give_the_documents_sizes(
    bench: Bench, case: CachedText
) -> Deviation:
    layers, kind = _attention_layers(bench), case.cache_type
    state = case.state(bench)
    counted = census(state)
    modelled = sum(cells * memory.bytes_per_token(_shape(layer), kind, kind) for layer, cells in _cells(layers, state))
    stored = counted.k_bytes + counted.v_bytes
    deviations = [of_count(stored, modelled, f"K and V in {kind}")]
    deviations += [
        of_printed(Fraction(stored, modelled) * size, figure, what, unit)
        for what, size, figure, unit in _documents_caches(bench, kind)
    ]
    deviations += [of_printed(size, figure, what, unit) for what, size, figure, unit in _caches_not_stored(bench, kind)]
    recurrent = _recurrent_layers(bench)
    if recurrent:
        stored, modelled = counted.r_bytes + counted.s_bytes, recurrent.bytes_per_sequence
        deviations.append(of_count(stored, modelled, "r and s"))
        size, figure = _documents_recurrent_state()
        deviations.append(of_printed(Fraction(stored, modelled) * size, figure, "Holo3's recurrent state", "MiB"))
    return worst(deviations)


def _attention_layers(bench: Bench) -> tuple[AttentionLayer, ...]:
    declared = bench.census
    if declared.attention is None:
        raise Undecided(f"the layers of architecture {declared.arch!r} are not known here; add a rule to census.py")
    return declared.attention


def _cells(layers: tuple[AttentionLayer, ...], state: SequenceState) -> Iterator[tuple[AttentionLayer, int]]:
    """Every attention layer, with the cells that are saved of its cache."""
    base, *sliding = [len(cache.cells) for cache in state.attention]
    for layer in layers:
        yield layer, sliding[0] if layer.sliding and sliding else base


def _shape(layer: AttentionLayer) -> memory.AttentionLayers:
    return memory.AttentionLayers(1, layer.n_head_kv, layer.key_dim, layer.value_dim)


def _recurrent_layers(bench: Bench) -> memory.RecurrentLayers | None:
    """The model's recurrent layers as the build reads its metadata; None where they are of another sort than Holo3's."""

    def key(name: str) -> int:
        return int(bench.model.metadata(f"{bench.census.arch}.ssm.{name}") or 0)

    if not bench.census.recurrent or not key("inner_size"):
        return None
    n_layer = len(bench.census.recurrent)
    return memory.RecurrentLayers(n_layer, key("conv_kernel"), key("inner_size"), key("group_count"), key("state_size"))


@cache
def _holo3() -> dict[str, Any]:
    """Holo3's geometry and sizes, by their names in the spec."""
    return {name: figure.value for name, figure in contract()["AR-04"].figures.items()}


Printed = tuple[str, Fraction, str, str]
"""A cache of the documents: what it is, its size by the memory model, as printed, the unit."""


def _documents_caches(bench: Bench, kind: str) -> list[Printed]:
    """The documents' caches that a build stores as it stores `kind`: of that type and without a tail."""
    sizes = [printed for stored, printed in _precision_tails_caches(bench.reference.footprint) if stored == kind]
    if kind == "f16":
        holo3 = _holo3()
        layers = memory.AttentionLayers(
            holo3["attention_layers"], holo3["kv_heads"], holo3["head_dim"], holo3["head_dim"]
        )
        token = memory.bytes_per_token(layers, kind, kind)
        full = memory.footprint([layers], memory.Run(holo3["context_tokens"]), kind).total
        sizes += [
            ("a token in Holo3's cache", Fraction(token, 1 << 10), str(holo3["kv_per_token"]), "KiB"),
            ("Holo3's cache at full context", Fraction(full, 1 << 30), str(holo3["kv_at_full_context"]), "GiB"),
        ]
    return sizes


def _caches_not_stored(bench: Bench, kind: str) -> list[Printed]:
    """The documents' caches that no build at hand stores like that: other types, KVarN, and everything with a tail."""
    return [printed for stored, printed in _precision_tails_caches(bench.reference.footprint) if stored != kind]


@cache
def _precision_tails_caches(footprint: memory.FootprintModel) -> list[tuple[str | None, Printed]]:
    """Every printed cache of the precision tail's models; in front the type where it has no tail, else None."""
    document = load_document()
    return [
        (
            None if tail else kind,
            (
                f"the {kind} cache of {document.setup.models[model].name} with a tail of {tail}",
                cache_mib(document, model, kind, tail, footprint),
                figure,
                "MiB",
            ),
        )
        for model in document.geometry
        for kind, tail, figure in document.printed_caches(model)
    ]


@cache
def _documents_recurrent_state() -> tuple[Fraction, str]:
    """Holo3's recurrent state in MiB, by the memory model and as printed."""
    holo3 = _holo3()
    layers = memory.RecurrentLayers(
        holo3["recurrent_layers"],
        holo3["conv_kernel"],
        holo3["inner_size"],
        holo3["groups"],
        holo3["state_size"],
    )
    return Fraction(layers.bytes_per_sequence, memory.MIB), str(holo3["recurrent_per_sequence"])
