"""How tokens are put into batches does not matter: specs/batching.yaml."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conformance.harness.bench import Bench, Case, Decode
from conformance.harness.bench.bench import Tokens
from conformance.harness.engine import Context, ContextSettings, DecodeError, Logits, TokenBatch
from conformance.harness.exam import verifies
from conformance.harness.measure.deviation import Deviation, of_logits, worst


class Split(Case):
    """A text cut into calls of these sizes, in micro-batches of `ubatch`."""

    text_seed: int
    first_tokens: int
    second_tokens: int
    third_tokens: int
    ubatch: int


class Coupled(Case):
    """Several sequences in one unified cache."""

    text_seed: int
    sequences: int
    prefix_tokens: int
    batch_tokens: int
    ubatch: int


class Together(Coupled):
    """Several sequences in one batch."""

    kv_unified: bool


class SplitImage(Decode):
    """A text, an image of width x height cut behind a share of its tokens, a text."""

    before_tokens: int
    after_tokens: int
    width: int
    height: int
    cut_percent: int


class Repeat(Case):
    """The same text twice."""

    text_seed: int
    tokens: int
    ubatch: int


_Row = tuple[int, Sequence[int], int]  # token, sequence ids, position


def _decoded(context: Context, rows: Sequence[_Row]) -> Logits:
    """The logits of every row of one batch, float32 [n, n_vocab]."""
    n = len(rows)
    tokens = np.array([token for token, _, _ in rows], np.int32)
    positions = np.array([position for _, _, position in rows], np.int32)
    batch = TokenBatch(tokens, positions, np.ones(n, np.int8), [list(ids) for _, ids, _ in rows])
    if (code := context.process(batch)) != 0:
        raise DecodeError(
            code, f"llama_decode returned {code} for a batch of {n} tokens ({context.library.last_error()})"
        )
    return context.logits(n)


def _settings(case: Coupled, *, kv_unified: bool) -> ContextSettings:
    n = case.sequences
    return ContextSettings(n_ctx=256 * n, n_batch=1024, n_ubatch=case.ubatch, n_seq_max=n, kv_unified=kv_unified)


def _one_by_one(texts: Sequence[Tokens], ids: Sequence[int], start: int) -> list[_Row]:
    """Rows of one sequence after the other."""
    return [(int(token), (id,), start + i) for id, text in zip(ids, texts, strict=True) for i, token in enumerate(text)]


@verifies("BT-01", case=Split)
def test_any_split_into_batches_and_micro_batches_gives_the_same(bench: Bench, case: Split) -> Deviation:
    sizes = case.first_tokens, case.second_tokens, case.third_tokens
    pieces = bench.texts(case.text_seed, *sizes)
    with bench.used_context(ContextSettings(n_ubatch=case.ubatch)) as context:
        rows = np.concatenate([context.decode(piece, outputs="all") for piece in pieces])
    return of_logits(rows, bench.cold(ContextSettings(), np.concatenate(pieces)))


@verifies("BT-02", case=Together)
def test_sequences_in_one_batch_are_as_if_alone(bench: Bench, case: Together) -> Deviation:
    n = case.sequences
    prefixes = bench.texts(case.text_seed, *[case.prefix_tokens + i for i in range(n)])
    texts = bench.texts(case.text_seed + 1, *[case.batch_tokens] * n)
    found = []
    with bench.used_context(_settings(case, kv_unified=case.kv_unified)) as context:
        _decoded(context, _one_by_one(prefixes, range(n), 0))
        rows = [
            (int(text[i]), (id,), len(prefix) + i)
            for i in range(case.batch_tokens)
            for id, (prefix, text) in enumerate(zip(prefixes, texts, strict=True))
        ]
        logits = _decoded(context, rows)
        for id in range(n):
            found.append(of_logits(logits[id::n], bench.cold(ContextSettings(), prefixes[id], texts[id])))
    return worst(found)


@verifies("BT-03/order-of-rows", case=Together)
def test_the_order_of_sequences_in_a_batch_does_not_matter(bench: Bench, case: Together) -> Deviation:
    texts = bench.texts(case.text_seed, *[case.batch_tokens] * case.sequences)
    ids = range(case.sequences)
    with bench.used_context(_settings(case, kv_unified=case.kv_unified)) as context:
        rows = _one_by_one(texts, ids, 0)
        shuffled = np.random.default_rng(case.text_seed).permutation(len(rows))
        order = sorted(range(len(rows)), key=lambda i: (rows[i][2], shuffled[i]))  # positions must rise
        logits = _decoded(context, [rows[i] for i in order])
    seen = np.empty_like(logits)
    seen[order] = logits
    expected = np.concatenate([bench.cold(ContextSettings(), text) for text in texts])
    return of_logits(seen, expected)


@verifies("BT-03/sequence-ids", case=Together)
def test_which_sequence_ids_are_used_does_not_matter(bench: Bench, case: Together) -> Deviation:
    (text,) = bench.texts(case.text_seed, case.prefix_tokens + case.batch_tokens)
    prefix, rest = np.split(text, [case.prefix_tokens])
    found = []
    with bench.used_context(_settings(case, kv_unified=case.kv_unified)) as context:
        for id in reversed(range(case.sequences)):
            context.decode(prefix, sequence=id)
            logits = context.decode(rest, sequence=id, outputs="all")
            found.append(of_logits(logits, bench.cold(ContextSettings(), prefix, rest)))
    return worst(found)


@verifies("BT-03/coupled-sequences", case=Coupled)
def test_tokens_of_several_sequences_at_once_are_as_if_decoded_into_each(bench: Bench, case: Coupled) -> Deviation:
    prefix, *texts = bench.texts(case.text_seed, case.prefix_tokens, *[case.batch_tokens] * case.sequences)
    ids = range(case.sequences)
    found = []
    with bench.used_context(_settings(case, kv_unified=True)) as context:
        shared = _decoded(context, [(int(token), tuple(ids), i) for i, token in enumerate(prefix)])
        found.append(of_logits(shared, bench.cold(ContextSettings(), prefix)))
        for id, text in zip(ids, texts, strict=True):
            logits = context.decode(text, sequence=id, outputs="all")
            found.append(of_logits(logits, bench.cold(ContextSettings(), prefix, text)))
    return worst(found)


@verifies("BT-04", case=SplitImage)
def test_an_image_split_at_any_boundary_equals_the_unsplit_one(bench: Bench, case: SplitImage) -> Deviation:
    before, after = bench.texts(case.text_seed, case.before_tokens, case.after_tokens)
    embeddings, positions = bench.image(case.text_seed, case.width, case.height, len(before))
    n = len(embeddings)
    cut = 1 + (n - 2) * case.cut_percent // 100
    rows = []
    for parts in ([slice(0, n)], [slice(0, cut), slice(cut, n)]):
        with bench.context(case.settings(cache_type="f32")) as context:
            context.decode(before)
            of_image = [
                context.decode_embeddings(embeddings[part], positions[:, part], outputs="all") for part in parts
            ]
            next_position = len(before) + max(case.width, case.height)
            rows.append(np.concatenate([*of_image, context.decode(after, start=next_position, outputs="all")]))
    unsplit, split = rows
    return of_logits(split, unsplit)


@verifies("BT-05/repeats", case=Repeat)
def test_repeats_have_the_same_bits(bench: Bench, case: Repeat) -> Deviation:
    (text,) = bench.texts(case.text_seed, case.tokens)
    rows = []
    for _ in range(2):
        with bench.context(ContextSettings(n_ubatch=case.ubatch)) as context:
            rows.append(context.decode(text, outputs="all"))
    return of_logits(*rows)


@verifies("BT-05/threads", case=Repeat)
def test_threads_do_not_matter(bench: Bench, case: Repeat) -> Deviation:
    (text,) = bench.texts(case.text_seed, case.tokens)
    with bench.context(ContextSettings(n_ubatch=case.ubatch)) as context:
        context.set_threads(2)
        rows = context.decode(text, outputs="all")
    return of_logits(rows, bench.cold(ContextSettings(n_ubatch=case.ubatch), text))
