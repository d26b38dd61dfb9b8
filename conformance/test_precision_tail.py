"""A tail of exact rows over a quantized body: specs/precision_tail.yaml."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from conformance.harness.bench import Bench, Case
from conformance.harness.engine import CacheSide, Context
from conformance.harness.exam import NotDecidable, Undecided, verifies
from conformance.harness.exam.examination import contract
from conformance.harness.measure.deviation import Deviation, nmse, of_amount, of_count, of_logits, of_printed, worst
from conformance.harness.measure.kld import median_change, surprise
from conformance.harness.precision.body import body
from conformance.harness.precision.codecs import CodecError
from conformance.harness.precision.document import Document, cache_mib, load_document
from conformance.harness.precision.emulation import EXACT, CacheChoice, TailedSequence, settings_for
from conformance.harness.precision.kvarn import GROUP
from conformance.harness.precision.memory import Run, ring_rows, tail_rows
from conformance.harness.precision.oracle import Rows, softmax
from conformance.harness.precision.scoring import Arm
from conformance.harness.precision.tail import select_rows

Tokens = NDArray[np.int32]
_SHARP = 40.0  # the score of a query for its own key
_FAR = 0.999  # of the attention on rows older than the tail
_WORDS = 2000  # tokens of real text from which the words of a passage are drawn
_RECOGNISED = 5  # tokens after which a passage is known to come again
SIDES: tuple[CacheSide, ...] = ("k", "v")


class Tailed(Case):
    """A random text decoded in steps of `ubatch` under a body and a tail."""

    text_seed: int
    tokens: int
    ubatch: int
    body: str
    tail: int

    def open(self, bench: Bench, context: object) -> TailedSequence:
        """The sequence in a context; a body that this model's heads do not fit is no case."""
        try:
            return bench.reference.tailed(context, bench.census, CacheChoice.of(self.body, self.tail))  # type: ignore[arg-type]
        except CodecError as error:
            raise NotDecidable(str(error)) from None


class RolledBack(Tailed):
    """The same, rolled back by `back_tokens`, and some more decoded behind that."""

    back_tokens: int
    more_tokens: int


class Covered(Case):
    """A text under a tail that is as long, or longer by `surplus`."""

    text_seed: int
    tokens: int
    ubatch: int
    body: str
    surplus: int


class Compared(Case):
    """A piece of real text under one body at two tails."""

    chunk: int
    context_tokens: int
    ubatch: int
    body: str
    shorter: int
    longer: int


class ComparedBodies(Case):
    """A piece of real text under a coarse and a fine body, without a tail and with one."""

    chunk: int
    context_tokens: int
    ubatch: int
    coarser: str
    finer: str
    tail: int


class Far(Case):
    """A random text under a body and a tail, and queries for its old rows."""

    text_seed: int
    tokens: int
    body: str
    tail: int


class FarCopy(Case):
    """A passage of random words, real text after it, and the passage again, under a body and a tail between the two."""

    text_seed: int
    passage_tokens: int
    between_tokens: int
    ubatch: int
    body: str
    tail: int


class OfTheBuild(Case):
    """A random text in a cache type and a tail that the build offers itself."""

    text_seed: int
    tokens: int
    cache_type: str
    tail: int


class Knee(Case):
    """A piece of real text under one body, without a tail, with one, and with one of twice its length."""

    chunk: int
    context_tokens: int
    ubatch: int
    body: str
    tail: int


class Request(Case):
    """A tail asked for on a layer that sees so many rows."""

    tail: int
    window: int
    body: str


class InWindow(Case):
    """A random text under a tail as long as the model's window, or longer by `beyond`."""

    text_seed: int
    tokens: int
    ubatch: int
    body: str
    beyond: int


class Ring(Case):
    """A context of a model with a sliding window."""

    context: int
    ubatch: int


class Figure(Case):
    """A model of the document and a tail decoded on the model at hand."""

    document_model: str
    text_seed: int
    tokens: int
    ubatch: int
    tail: int


def first_attention_layer(bench: Bench) -> int:
    """The layer whose rows no earlier attention layer influences."""
    if not bench.census.attention:
        raise Undecided(f"the layers of architecture {bench.census.arch!r} are not known here; add a rule to census.py")
    return bench.census.attention[0].index


Sides = dict[CacheSide, NDArray[np.float16]]


def exact_rows(bench: Bench, layer: int, text: Tokens, ubatch: int) -> Sides:
    """A layer's K and V rows [tokens, width] as the exact cache holds them when nothing has been rewritten."""
    whole: Sides = {}
    with bench.context(settings_for(len(text), ubatch)) as context:
        context.decode(text, outputs="none")
        for side in SIDES:
            positions, rows = every_row(bench, context, layer, side, len(text))
            whole[side] = np.zeros((len(text), rows.shape[1]), np.float16)
            whole[side][positions] = rows
    return whole


def every_row(
    bench: Bench, context: Context, layer: int, side: CacheSide, n: int
) -> tuple[Tokens, NDArray[np.float16]]:
    """Positions and rows of a layer in a context that decoded n tokens with `swa_full`.

    Those that a window has left behind too, where the build tells where its cache lies: they are not in a saved state.
    """
    positions, saved = bench.rows(context, layer, side)
    found = context.cache_rows(side, layer, n, saved.shape[1] * saved.itemsize)
    return (positions, saved) if found is None else (np.arange(n, dtype=np.int32), found.view(np.float16).copy())


def of_rows(wrong: NDArray[np.bool_], what: str) -> Deviation:
    """How many rows are wrong."""
    count = int(wrong.sum())
    where = f"{what}, first at position {int(wrong.argmax())}" if count else ""
    return Deviation(float(count), f"wrong {what} of {len(wrong)}, rows", where, "0 rows", f"{count} rows")


@verifies("PT-01", case=Tailed)
def test_the_newest_rows_are_exact_the_older_ones_are_the_bodys_and_one_softmax_covers_both(
    bench: Bench, case: Tailed
) -> Deviation:
    (text,) = bench.texts(case.text_seed, case.tokens)
    layer = first_attention_layer(bench)
    shape = next(each for each in bench.census.attention or () if each.index == layer)
    window = bench.census.sliding_window if shape.sliding else None
    found = [_oracle(bench, case.text_seed)]
    with bench.context(settings_for(case.tokens, case.ubatch)) as context:
        logits = case.open(bench, context).decode(text, outputs="last")[-1]
        seen = {side: bench.rows(context, layer, side) for side in SIDES}
    found.append(_unseen(bench, case, text, logits))
    whole = exact_rows(bench, layer, text, case.ubatch)
    for side, exact in whole.items():
        positions, rows = seen[side]
        visible = case.tokens if window is None else min(case.tokens, window)  # older ones need not be saved
        found.append(of_count(min(len(positions), visible), visible, f"{side.upper()} rows of layer {layer}", "rows"))
        kept = body(case.body, shape.key_dim if side == "k" else shape.value_dim, side)
        older = _older(case, kept.group, 0 if window else kept.sink, window)
        expected = exact.copy()
        if len(older):
            expected[older] = kept.round_trip(exact[older].astype(np.float32)).astype(np.float16)
        wrong = (rows.view(np.uint16) != expected[positions].view(np.uint16)).any(axis=1)
        found.append(of_rows(wrong, f"{side.upper()} rows of layer {layer}"))
    return worst(found)


def _unseen(bench: Bench, case: Tailed, text: Tokens, logits: NDArray[np.float32]) -> Deviation:
    """How many of two tokens, one in the tail and one older, make no difference to the last logits when exchanged."""
    before_last_step, oldest = (case.tokens - 1) // case.ubatch * case.ubatch, max(case.tokens - case.tail, 0)
    places = {"the tail": range(oldest, before_last_step), "the body": range(min(oldest, before_last_step))}
    unseen = []
    for name, place in places.items():
        if len(place):
            exchanged = text.copy()
            position = place[case.text_seed % len(place)]
            exchanged[position] = (text[position] + 1) % bench.model.n_vocab
            with bench.context(settings_for(case.tokens, case.ubatch)) as context:
                if np.array_equal(case.open(bench, context).decode(exchanged, outputs="last")[-1], logits):
                    unseen.append(f"position {position} in {name}")
    where = ", ".join(unseen)
    return Deviation(float(len(unseen)), "tokens that attention does not see, count", where, "none", where)


def _older(case: Tailed, group: int, sink: int, window: int | None) -> NDArray[np.int64]:
    """The rows that must have gone into the body before the last step, told by the statement alone."""
    tail = case.tail if group == 1 else max(-(-case.tail // GROUP), 1) * GROUP
    if window is not None and tail >= window:
        return np.arange(0)
    before_last_step = (case.tokens - 1) // case.ubatch * case.ubatch
    stop = max(min(case.tokens - tail, before_last_step), 0)
    return np.arange(sink, max(stop // group * group, sink))


def _oracle(bench: Bench, seed: int) -> Deviation:
    """Attention over body and tail against the same written query by query."""
    rng = np.random.default_rng(seed)
    exact, coarse = (Rows(rng.standard_normal((40, 16)), rng.standard_normal((40, 16))) for _ in range(2))
    queries, positions = rng.standard_normal((12, 16)), np.arange(28, 40)
    seen = bench.reference.attend(queries, coarse, exact, select_rows(np.arange(40), positions, 9))  # type: ignore[arg-type]
    expected = np.empty((12, 16))
    for row, position in enumerate(positions):
        chosen = [exact if position - 9 < n else coarse for n in range(position + 1)]
        keys = np.stack([rows.keys[n] for n, rows in enumerate(chosen)])
        weights = np.exp(keys @ queries[row] / 4)
        expected[row] = weights @ np.stack([rows.values[n] for n, rows in enumerate(chosen)]) / weights.sum()
    off = nmse(seen, expected)
    return of_amount(off if off > 1e-24 else 0.0, "attention over body and tail against one softmax", "NMSE")


@verifies("PT-02", case=Covered)
def test_a_tail_that_covers_the_text_changes_nothing(bench: Bench, case: Covered) -> Deviation:
    (text,) = bench.texts(case.text_seed, case.tokens)
    tailed = Tailed(
        text_seed=case.text_seed,
        tokens=case.tokens,
        ubatch=case.ubatch,
        body=case.body,
        tail=case.tokens + case.surplus,
    )
    settings = settings_for(case.tokens, case.ubatch)
    with bench.context(settings) as plain, bench.context(settings) as context:
        expected = plain.decode(text, outputs="all")
        return of_logits(tailed.open(bench, context).decode(text), expected)


@verifies("PT-03", case=Compared)
def test_the_median_divergence_does_not_rise_with_the_tail(bench: Bench, case: Compared) -> Deviation:
    return _risen_with_the_tail(bench, case)


@verifies("PT-03/past-the-window", case=Compared)
def test_the_median_divergence_does_not_rise_with_the_tail_where_layers_have_a_window(
    bench: Bench, case: Compared
) -> Deviation:
    return _risen_with_the_tail(bench, case)


def _risen_with_the_tail(bench: Bench, case: Compared) -> Deviation:
    text = bench.real_text(case.chunk, case.context_tokens)
    short, long = (
        bench.divergence(Arm(CacheChoice.of(case.body, tail)), text, case.ubatch).kld
        for tail in (case.shorter, case.longer)
    )
    return of_rise(short, long, f"{case.body} at a tail of {case.longer} against {case.shorter}")


def of_rise(before: NDArray[np.float64], after: NDArray[np.float64], what: str) -> Deviation:
    """How far the median rose; 0 where the paired interval of its change lies at or below 0."""
    change = median_change(before, after, seed=1)
    interval = f"{change.change:+.6f} [{change.low:+.6f}, {change.high:+.6f}]"
    rise = 0.0 if change.high <= 0 else change.change
    return of_amount(
        rise,
        f"rise of the median KLD, {what}",
        "nats",
        f"at most {np.median(before):.6f}",
        f"{np.median(after):.6f}, change {interval}",
    )


@verifies("PT-04", case=ComparedBodies)
def test_the_coarser_the_body_the_more_a_tail_gains(bench: Bench, case: ComparedBodies) -> Deviation:
    text = bench.real_text(case.chunk, case.context_tokens)

    def gain(name: str) -> float:
        without, with_tail = (
            np.median(bench.divergence(Arm(CacheChoice.of(name, tail)), text, case.ubatch).kld)
            for tail in (0, case.tail)
        )
        return float(without - with_tail)

    coarse, fine = gain(case.coarser), gain(case.finer)
    return of_amount(
        fine - coarse,
        f"gain of {case.finer} above that of {case.coarser}",
        "nats",
        f"at least {fine:.6f}",
        f"{coarse:.6f}",
    )


@verifies("PT-05/attention-on-old-rows", case=Far)
def test_a_tail_does_not_repair_far_retrieval(bench: Bench, case: Far) -> Deviation:
    (text,) = bench.texts(case.text_seed, case.tokens)
    layer = first_attention_layer(bench)
    shape = next(each for each in bench.census.attention or () if each.index == layer)
    exact, coarse = [], []
    for side, halves in exact_rows(bench, layer, text, 32).items():
        rows, head_dim = halves.astype(np.float32), shape.key_dim if side == "k" else shape.value_dim
        kept = body(case.body, head_dim, side)
        exact.append(rows[:, :head_dim])
        coarse.append(kept.round_trip(rows)[:, :head_dim])
    older = np.arange(0, case.tokens - case.tail - 1, 7)
    queries = exact[0][older] * (
        _SHARP * np.sqrt(shape.key_dim) / np.square(exact[0][older]).sum(axis=1, keepdims=True)
    )
    last = np.full(len(older), case.tokens - 1)
    whole, tail, none = (select_rows(np.arange(case.tokens), last, n) for n in (case.tokens, case.tail, 0))
    weights = softmax(queries.astype(np.float64) @ exact[0].T.astype(np.float64) / np.sqrt(shape.key_dim))
    far = weights[:, : case.tokens - case.tail].sum(axis=1) > _FAR
    if not far.any():
        raise NotDecidable("no query of this text has its attention on old rows")
    true, with_tail, without = (
        bench.reference.attend(queries, Rows(*coarse), Rows(*exact), chosen)[far] for chosen in (whole, tail, none)
    )
    share = float(np.linalg.norm(with_tail - true) / np.linalg.norm(without - true))
    return of_amount(abs(1 - share), "error of far reading with a tail against without", "share", "1", f"{share:.4f}")


@verifies("PT-05/far-copy", case=FarCopy)
def test_a_trained_model_copies_from_beyond_the_tail_as_the_body_lets_it(bench: Bench, case: FarCopy) -> Deviation:
    words = bench.real_text(0, _WORDS)
    passage = np.random.default_rng(case.text_seed).choice(np.unique(words), case.passage_tokens, replace=False)
    between = words[: case.between_tokens]
    text = np.concatenate([passage, between, passage]).astype(np.int32)

    def surprise_of(choice: CacheChoice) -> float:
        """Nats for a token of the passage's second time, after the first few, which only say that it has begun."""
        logits = np.concatenate(list(bench.scorer(case.ubatch).steps(Arm(choice), text)))
        told = passage[_RECOGNISED:]
        return float(surprise(logits[-len(told) :], told).mean())

    exact, without, with_tail = map(
        surprise_of, (CacheChoice.of(EXACT), CacheChoice.of(case.body), CacheChoice.of(case.body, case.tail))
    )
    taken = (without - with_tail) / (without - exact) if without > exact else float("nan")
    return of_amount(
        taken,
        f"surprise by {case.body} at copying that a tail of {case.tail} takes away",
        "share",
        f"{exact:.3f} nats exact, {without:.3f} without a tail",
        f"{with_tail:.3f} nats, {taken:.2f} of the difference taken away",
    )


@verifies("PT-06", case=Request)
def test_a_tail_resolves_to_the_length_that_body_and_window_give_it(bench: Bench, case: Request) -> Deviation:
    kvarn = case.body.startswith("kvarn")
    group = int(contract()["PT-06"].figures["group_rows"].value)
    groups = max((case.tail + group - 1) // group, 1)
    expected = min(group * groups if kvarn else case.tail, case.window)
    seen = bench.reference.resolve_tail(case.tail, kvarn=kvarn, window=case.window)
    found = [of_count(seen, expected, f"a tail of {case.tail} over {case.body} with a window of {case.window}", "rows")]
    own = bench.census.sliding_window
    with bench.context(settings_for(256, 32)) as context:
        try:
            tailed = bench.reference.tailed(context, bench.census, CacheChoice.of(case.body, case.tail))
        except CodecError:
            return worst(found)  # these heads do not fit the body; what a window does is still told above
        for layer in bench.census.attention or ():
            whole = group * groups if kvarn else case.tail
            given = tailed.resolved_tail(layer.index, "k")
            promoted = layer.sliding and own is not None and whole >= own
            found.append(
                of_count(
                    -1 if given is None else given,
                    -1 if promoted else whole,
                    f"the tail of layer {layer.index}",
                    "rows",
                )
            )
    return worst(found)


@verifies("PT-07", case=Figure)
def test_a_tail_costs_what_the_memory_model_says(bench: Bench, case: Figure) -> Deviation:
    found = _stated_sizes(bench, case.document_model)
    (text,) = bench.texts(case.text_seed, case.tokens)
    most = 0
    with bench.context(settings_for(case.tokens, case.ubatch)) as context:
        tailed = bench.reference.tailed(context, bench.census, CacheChoice.of("q8_0", case.tail))
        layer = next(each.index for each in reversed(bench.census.attention or ()) if not each.sliding)
        for start in range(0, case.tokens, case.ubatch):
            tailed.decode(text[start : start + case.ubatch], outputs="none")
            most = max(most, int(tailed.exact_rows(layer).sum()))
    room = tail_rows(case.tail, Run(case.tokens, case.ubatch)) or case.ubatch
    return worst(
        [*found, of_amount(most - room, "exact rows beyond the memory of the tail", "rows", f"{room}", f"{most}")]
    )


@cache
def _document() -> Document:
    return load_document()


@verifies("PT-08", case=RolledBack)
def test_a_rolled_back_or_restored_tail_is_exact_or_says_how_many_rows_it_lacks(
    bench: Bench, case: RolledBack
) -> Deviation:
    text, more = bench.texts(case.text_seed, case.tokens, case.more_tokens)
    layer = next(each.index for each in bench.census.attention or ())
    kept = case.tokens - min(case.back_tokens, case.tokens - 1)
    settings = settings_for(case.tokens + case.more_tokens, case.ubatch)
    with bench.context(settings) as plain:  # the same calls, so that the same kernels see the same rows
        plain.decode(text, outputs="none")
        if not plain.seq_rm(0, kept):
            raise NotDecidable(f"the build refused to remove positions from {kept} on")
        plain.decode(more, outputs="none")
        positions, rows = bench.rows(plain, layer, "k")
        exact = np.zeros_like(rows)
        exact[positions] = rows

    def lacking(tailed: TailedSequence, context: object) -> Deviation:
        """Rows of the newest `tail` that are not exact, against those that the books say."""
        positions, rows = bench.rows(context, layer, "k")  # type: ignore[arg-type]
        newest = positions >= max(tailed.rows - case.tail, 0)
        differs = (rows.view(np.uint16) != exact[positions].view(np.uint16)).any(axis=1)
        return of_count(int((differs & newest).sum()), tailed.missing, "rows of the tail that are not exact", "rows")

    found = []
    with bench.context(settings) as context:
        tailed = case.open(bench, context)
        tailed.decode(text, outputs="none")
        tailed.roll_back(kept)
        found.append(lacking(tailed, context))
        saved = tailed.save()
        tailed.decode(more, outputs="none")
        found.append(lacking(tailed, context))
        tailed.restore(saved)
        found.append(lacking(tailed, context))
    return worst(found)


@verifies("PT-09/tail", case=OfTheBuild)
def test_a_tail_that_the_build_offers_itself_agrees_with_the_reference(bench: Bench, case: OfTheBuild) -> Deviation:
    return _native_against_emulated(bench, case)


@verifies("PT-09/kvarn", case=OfTheBuild)
def test_kvarn_types_that_the_build_offers_itself_agree_with_the_reference(bench: Bench, case: OfTheBuild) -> Deviation:
    return _native_against_emulated(bench, case)


def _native_against_emulated(bench: Bench, case: OfTheBuild) -> Deviation:
    """How far the build's own cache lies from the emulated one, as a share of how far that lies from the exact one."""
    (text,) = bench.texts(case.text_seed, case.tokens)
    settings = settings_for(case.tokens, 1)
    kind = case.cache_type
    own = settings.changed(type_k=kind, type_v=kind, kv_tail=case.tail, reach_cache=False)
    with bench.context(own) as native, bench.context(settings) as plain, bench.context(settings) as context:
        try:
            tailed = bench.reference.tailed(context, bench.census, CacheChoice.of(kind, case.tail))
        except CodecError as error:
            raise NotDecidable(str(error)) from None
        seen, exact, emulated = (
            each.decode(text, outputs="all")[case.tokens // 2 :] for each in (native, plain, tailed)
        )
    moved = nmse(emulated, exact)
    if moved == 0:
        raise NotDecidable(f"no row of this text has gone into {kind}")
    share = nmse(seen, emulated) / moved
    return of_amount(
        share,
        f"error of the build's own {kind} against the emulation, of the emulation's own",
        "share",
        "the emulation's logits",
        f"logits {share:.2g} of the emulation's own error away (NMSE {moved:.2g})",
    )


@verifies("PT-10", case=Knee)
def test_the_first_rows_of_a_tail_gain_more_than_as_many_again(bench: Bench, case: Knee) -> Deviation:
    text = bench.real_text(case.chunk, case.context_tokens)
    none, one, two = (
        float(np.median(bench.divergence(Arm(CacheChoice.of(case.body, tail)), text, case.ubatch).kld))
        for tail in (0, case.tail, 2 * case.tail)
    )
    return of_amount(
        (one - two) - (none - one),
        "gain of the second half of a tail above that of the first",
        "nats",
        f"at most {none - one:.6f}",
        f"{one - two:.6f}",
    )


@verifies("SW-01", case=InWindow)
def test_a_tail_as_long_as_the_window_makes_sliding_layers_wholly_exact(bench: Bench, case: InWindow) -> Deviation:
    return _inexact_in_the_window(bench, case)


@verifies("SW-01/trained", case=InWindow)
def test_a_tail_as_long_as_the_window_makes_sliding_layers_of_a_trained_model_wholly_exact(
    bench: Bench, case: InWindow
) -> Deviation:
    return _inexact_in_the_window(bench, case)


def _inexact_in_the_window(bench: Bench, case: InWindow) -> Deviation:
    (text,) = bench.texts(case.text_seed, case.tokens)
    window = bench.census.sliding_window or 0
    sliding = next(each.index for each in bench.census.attention or () if each.sliding)
    whole = next(each.index for each in bench.census.attention or () if not each.sliding)
    with bench.context(settings_for(case.tokens, case.ubatch)) as context:
        choice = CacheChoice.of(case.body, window + case.beyond)
        tailed = bench.reference.tailed(context, bench.census, choice)
        tailed.decode(text, outputs="none")
        seen = [(side, *every_row(bench, context, sliding, side, case.tokens)) for side in SIDES]
        kept = int(tailed.exact_rows(whole).sum())
    before_last_step = (case.tokens - 1) // case.ubatch * case.ubatch
    expected = max(window + case.beyond, case.tokens - before_last_step)
    found = [of_count(kept, expected, f"exact rows of layer {whole}, which has no window", "rows")]
    exact = exact_rows(bench, sliding, text, case.ubatch)
    for side, positions, rows in seen:
        wrong = (rows.view(np.uint16) != exact[side][positions].view(np.uint16)).any(axis=1)
        found.append(of_rows(wrong, f"{side.upper()} rows of sliding layer {sliding}"))
    return worst([*found, *_stated_sizes(bench, "gemma")])


def _stated_sizes(bench: Bench, model: str) -> list[Deviation]:
    """How far the sizes with a tail, of a model of the document, are from the printed ones."""
    return [
        of_printed(
            cache_mib(_document(), model, kind, tail, bench.reference.footprint),
            printed,
            f"{model}'s {kind} cache with a tail of {tail}",
            "MiB",
        )
        for kind, tail, printed in _document().printed_caches(model)
        if tail > 0
    ]


@verifies("SW-02", case=Ring)
def test_the_builds_own_ring_has_the_rows_that_the_memory_model_gives_it(bench: Bench, case: Ring) -> Deviation:
    window = bench.census.sliding_window or 0
    layer = next(each for each in bench.census.attention or () if each.sliding)
    with bench.context(settings_for(case.context, case.ubatch, swa_full=False)) as context:
        context.decode(bench.texts(0, 1)[0])
        found = context.cache_bytes("k", layer.index)
    if found is None:
        raise Undecided("the build does not tell where its cache tensors are")
    cells = found // (2 * layer.n_head_kv * layer.key_dim)
    return of_count(cells, ring_rows(window, Run(case.context, case.ubatch)), "cells of the sliding layers", "cells")
