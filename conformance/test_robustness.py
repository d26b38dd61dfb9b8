"""What does not fit is refused, and nothing breaks: specs/robustness.yaml."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.harness.bench import Bench, Case, Setup, Tokens
from conformance.harness.contract.census import census_of_gguf
from conformance.harness.engine import Blob, Context, ContextSettings, Library, ModelError, StateFlags, TokenBatch
from conformance.harness.engine.child import Child, ChildDeath
from conformance.harness.engine.process import little_memory, peak_bytes, reset_peak
from conformance.harness.exam import NotDecidable, verifies
from conformance.harness.measure.deviation import Deviation, of_count, of_logits, worst
from conformance.harness.state import Rows, SequenceState
from fixtures import models

_NEXT = 3
_FEW_FIELDS = 24
_OUT_OF_RANGE = ("huge", "all ones")
_SETTINGS = ContextSettings(n_ctx=512, n_batch=512)
_SEQUENCE_FLAGS = {"full": StateFlags.FULL, "partial": StateFlags.PARTIAL_ONLY}


class Cut(Case):
    """Of a state after `prefix_tokens` so many thousandths are left."""

    text_seed: int
    prefix_tokens: int
    kept: int


class CutContext(Case):
    """Of the state of a whole context so many bytes are left."""

    text_seed: int
    prefix_tokens: int
    kept_bytes: int


class Misdirected(Case):
    """A state is loaded into an id that no sequence has."""

    text_seed: int
    prefix_tokens: int
    kv_unified: bool


class Mutated(Case):
    """In the structure of a state one field, chosen by a number, gets another value."""

    text_seed: int
    prefix_tokens: int
    field: int
    value: str


class MutatedFile(Mutated):
    """The same in a file; `allowed_mib` bounds what reading it may allocate, `allowed_seconds` how long it may take."""

    allowed_mib: int
    allowed_seconds: int


class MutatedBlob(MutatedFile):
    """The same in memory."""


class EveryField(Case):
    """Another value in each field of the structure of a state."""

    text_seed: int
    prefix_tokens: int
    value: str
    allowed_mib: int
    allowed_seconds: int


class EveryCut(Case):
    """A state after `prefix_tokens`, cut at every place that the structure has."""

    text_seed: int
    prefix_tokens: int


class OutOfRange(Case):
    """The position of one cell of a state is out of range; the last cell is a recurrent one where there is any."""

    text_seed: int
    prefix_tokens: int
    cell: str
    value: str


class Bad(Case):
    """A blob that is none."""

    text_seed: int
    prefix_tokens: int
    bad: str


class Unsupported(Case):
    """A setting or a call that the interface rules out."""

    text_seed: int
    prefix_tokens: int
    what: str


class Ending(Case):
    """A way in which a build can end its process, or not answer."""

    ending: str


class Foreign(Case):
    """A state from a context of other settings, loaded after `other_tokens`."""

    text_seed: int
    prefix_tokens: int
    other_tokens: int


class ForeignType(Foreign):
    """The types of the keys, where it was saved and where it is loaded."""

    saved_as: str
    loaded_as: str


def _refused(bench: Bench, context: Context, history: list[Tokens], prompt: Tokens, sequence: int = 0) -> Deviation:
    """Whether after a refused load the sequence is unchanged, or empty in both halves, and works."""
    n = sum(map(len, history))
    low, high = context.pos_min(sequence), context.pos_max(sequence)
    if high == -1 and low != -1:
        return Deviation(1.0, "half a state left", "positions", "none, or all as before", f"{low} to {high}")
    if high == -1:
        history = []
    elif high != n - 1:
        return of_count(high, n - 1, "largest position after a refused load", "")
    logits = context.decode(prompt, start=high + 1, sequence=sequence, outputs="all")
    return of_logits(logits, bench.cold(context.settings, *history, prompt))


def _usable(bench: Bench, context: Context, prompt: Tokens) -> Deviation:
    """Whether a context can be emptied and takes a prompt as a fresh one does."""
    emptied = of_count(int(context.seq_rm(0)), 1, "removals that worked", "")
    return worst(
        [emptied, of_logits(context.decode(prompt, start=0, outputs="all"), bench.cold(context.settings, prompt))]
    )


def _accepted(consumed: int) -> Deviation:
    return Deviation(float(consumed != 0), "loads that were accepted", "load" if consumed else "", "0", str(consumed))


@contextmanager
def _cheaply(library: Library, case: MutatedFile | EveryField) -> Iterator[list[Deviation]]:
    """Notes whether what is done inside stays within the time and the memory that the case allows.

    There is no more than four times that memory: whether a build that asks for gigabytes is given them would else depend on
    what the process holds, and take half a minute. That it asked for more stands in its log.
    """
    found: list[Deviation] = []
    reset_peak()
    begin, peak = time.perf_counter(), peak_bytes()
    library.log.clear()
    with little_memory(4 * case.allowed_mib << 20):
        yield found
    took, grew = time.perf_counter() - begin, peak_bytes() - peak
    asked = sum("bad_alloc" in text for _, text in library.log)
    found.append(of_count(asked, 0, "allocations beyond all memory there was", ""))
    found.append(of_count(max(int(took) - case.allowed_seconds, 0), 0, "seconds beyond what is allowed", "s"))
    found.append(of_count(max(grew - (case.allowed_mib << 20), 0), 0, "bytes allocated beyond what is allowed"))


# -- RB-01


@verifies("RB-01/rejected-restore-leaves-half-a-state", case=Cut)
def test_a_cut_state_is_refused_by_a_used_sequence(bench: Bench, case: Cut) -> Deviation:
    prefix, prompt = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    with bench.used_context(_SETTINGS) as context:
        context.decode(prefix)
        blob = context.save()
        consumed = context.load(blob[: len(blob) * case.kept // 1000].copy())
        return worst([_accepted(consumed), _refused(bench, context, [prefix], prompt)])


@verifies("RB-01/truncated-restore-into-an-empty-context", case=Cut)
def test_a_cut_state_is_refused_by_an_empty_context(bench: Bench, case: Cut) -> Deviation:
    prefix, prompt = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    with bench.context(_SETTINGS) as context, bench.context(_SETTINGS) as empty:
        context.decode(prefix)
        blob = context.save()
        consumed = empty.load(blob[: len(blob) * case.kept // 1000].copy())
        return worst([_accepted(consumed), _refused(bench, empty, [], prompt)])


@verifies("RB-01/mutated-header", case=MutatedBlob)
def test_a_state_with_another_header_field_does_no_harm(bench: Bench, case: MutatedBlob) -> Deviation:
    prefix, prompt = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    with bench.used_context(_SETTINGS) as context:
        context.decode(prefix)
        blob = _mutated(bench, context.save(), case)
        with _cheaply(bench.library, case) as cost:
            context.load(blob)
        return worst([*cost, _usable(bench, context, prompt)])


def _mutated(bench: Bench, blob: Blob, case: Mutated) -> Blob:
    """A copy of a blob in which one 32-bit field outside of the tensors has another value."""
    structure, positions = _structure(bench.state(blob), blob)
    places = np.flatnonzero(structure)
    place = int(places[case.field % (len(places) // 4) * 4])
    if case.value in _OUT_OF_RANGE and place in positions:
        raise NotDecidable("a position that is out of range is judged by itself")
    return _with_field(blob, place, case.value)


def _with_field(blob: Blob, place: int, value: str) -> Blob:
    """A copy of a blob with another value in the 32-bit field at a place."""
    copy = blob.copy()
    word = copy[place : place + 4].view("<u4")
    word[0] = {"zero": 0, "one more": int(word[0]) + 1 & 0xFFFFFFFF, "huge": 0x7FFFFFFF, "all ones": 0xFFFFFFFF}[value]
    return copy


def _structure(state: SequenceState, blob: Blob) -> tuple[npt.NDArray[np.bool_], frozenset[int]]:
    """Which bytes of a blob are not a tensor's, bool [n], and where the positions of its cells stand."""

    def place(view: npt.NDArray[Any]) -> int:
        return int(view.__array_interface__["data"][0] - blob.__array_interface__["data"][0])

    structure = np.ones(len(blob), bool)
    for rows in _tensors(state):
        structure[place(rows.bytes) : place(rows.bytes) + rows.bytes.size] = False
    caches = [cache.cells for cache in state.attention] + ([state.recurrent.cells] if state.recurrent else [])
    positions = (place(cells.positions[i : i + 1]) for cells in caches for i in range(len(cells)))
    return structure, frozenset(positions)


def _fields(structure: npt.NDArray[np.bool_]) -> list[int]:
    """Where the 32-bit fields of a blob stand; of many cells the first and the last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], structure.astype(np.int8), [0]])))
    fields: list[int] = []
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        words = list(range(int(begin), int(end) - 3, 4))
        fields += words if len(words) <= 2 * _FEW_FIELDS else words[:_FEW_FIELDS] + words[-_FEW_FIELDS:]
    return fields


def _tensors(state: SequenceState) -> Iterator[Rows]:
    for cache in state.attention:
        for layer in cache.layers:
            yield layer.k
            if layer.v is not None:
                yield layer.v
    for recurrent in state.recurrent.layers if state.recurrent else ():
        yield recurrent.r
        yield recurrent.s


@verifies("RB-01/every-field", case=EveryField)
def test_another_value_in_any_field_of_a_state_does_no_harm(bench: Bench, case: EveryField) -> Deviation:
    """Every field outside of the tensors in turn, positions out of range aside."""
    prefix, prompt = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    with bench.used_context(_SETTINGS) as context:
        context.decode(prefix)
        blob = context.save()
        structure, positions = _structure(bench.state(blob), blob)
        found = []
        for place in _fields(structure):
            if case.value in _OUT_OF_RANGE and place in positions:
                continue
            with _cheaply(bench.library, case) as cost:
                context.load(_with_field(blob, place, case.value))
            found += [_at(place, each) for each in (*cost, _usable(bench, context, prompt))]
        return worst(found)


@verifies("RB-01/every-cut", case=EveryCut)
def test_a_state_that_was_cut_anywhere_is_refused(bench: Bench, case: EveryCut) -> Deviation:
    """At the borders of every field, at both ends of every tensor and within it."""
    prefix, prompt = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    with bench.used_context(_SETTINGS) as context:
        context.decode(prefix)
        blob = context.save()
        structure, _positions = _structure(bench.state(blob), blob)
        borders = np.flatnonzero(np.diff(structure.astype(np.int8))) + 1
        within = (borders[:-1] + borders[1:]) // 2
        cuts = sorted(
            {0, len(blob) - 1, *_fields(structure), *(borders - 1).tolist(), *borders.tolist(), *within.tolist()}
        )
        found = []
        for cut in cuts:
            consumed = context.load(blob[:cut].copy())
            found += [_at(cut, each) for each in (_accepted(consumed), _refused(bench, context, [prefix], prompt))]
            context.seq_rm(0)
            context.restore(blob)
        return worst(found)


def _at(place: int, deviation: Deviation) -> Deviation:
    return replace(deviation, where=f"byte {place}: {deviation.where}") if deviation.value else deviation


@verifies("RB-01/positions-out-of-range", case=OutOfRange)
def test_a_state_with_a_position_out_of_range_does_no_harm(bench: Bench, case: OutOfRange) -> Deviation:
    prefix, prompt = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    with bench.used_context(_SETTINGS) as context:
        context.decode(prefix)
        blob = context.save()
        _, positions = _structure(bench.state(blob), blob)
        place = max(positions) if case.cell == "last" else min(positions)
        context.load(_with_field(blob, place, case.value))
        removed = of_count(int(context.seq_rm(0)), 1, "removals that worked", "")
        if (left := of_count(context.pos_max(), -1, "largest position once it was removed", "")).value:
            return worst([removed, left])
        logits = context.decode(prompt, start=0, outputs="all")
        return worst([removed, of_logits(logits, bench.cold(_SETTINGS, prompt))])


@verifies("RB-01/truncated-file", case=Cut)
def test_a_cut_file_is_refused(bench: Bench, case: Cut) -> Deviation:
    prefix, prompt = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    with bench.used_context(_SETTINGS) as context, tempfile.TemporaryDirectory() as folder:
        context.decode(prefix)
        file = Path(folder) / "state"
        context.save_file(file, prefix)
        content = file.read_bytes()
        file.write_bytes(content[: len(content) * case.kept // 1000])
        consumed, _ = context.load_file(file)
        return worst([_accepted(consumed), _usable(bench, context, prompt)])


@verifies("RB-01/mutated-file", case=MutatedFile)
def test_a_file_with_another_header_field_does_no_harm(bench: Bench, case: MutatedFile) -> Deviation:
    prefix, prompt = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    with bench.used_context(_SETTINGS) as context, tempfile.TemporaryDirectory() as folder:
        context.decode(prefix)
        file = Path(folder) / "state"
        context.save_file(file, prefix)
        content = np.fromfile(file, np.uint8)
        head = content[: 4 * (case.field % 3 + 1)].view("<u4")  # magic, version, number of tokens
        head[-1] = {"zero": 0, "one more": int(head[-1]) + 1, "huge": 0x7FFFFFFF, "all ones": 0xFFFFFFFF}[case.value]
        content.tofile(file)
        with _cheaply(bench.library, case) as cost:
            context.load_file(file)
        return worst([*cost, _usable(bench, context, prompt)])


@verifies("RB-01/random-bytes", case=Bad)
def test_bytes_that_are_no_state_are_refused(bench: Bench, case: Bad) -> Deviation:
    prefix, prompt = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    with bench.used_context(_SETTINGS) as context:
        context.decode(prefix)
        consumed = context.load(_bad(context.save(), case))
        return worst([_accepted(consumed), _refused(bench, context, [prefix], prompt)])


@verifies("RB-01/truncated-context", case=CutContext)
def test_a_cut_state_of_a_whole_context_is_refused(bench: Bench, case: CutContext) -> Deviation:
    prefix, other, prompt = bench.texts(case.text_seed, case.prefix_tokens, 20, _NEXT)
    settings = _SETTINGS.changed(n_seq_max=2, n_ctx=1024)
    with bench.used_context(settings) as context, bench.used_context(settings) as elsewhere:
        context.decode(prefix)
        context.decode(other, sequence=1)
        consumed = elsewhere.load_context(context.save_context()[: case.kept_bytes].copy())
        return worst([_accepted(consumed), *(_refused(bench, elsewhere, [], prompt, sequence=s) for s in (0, 1))])


@verifies("RB-01/load-into-no-sequence", case=Misdirected)
def test_a_state_loaded_into_no_sequence_is_refused(bench: Bench, case: Misdirected) -> Deviation:
    prefix, other, prompt = bench.texts(case.text_seed, case.prefix_tokens, 20, _NEXT)
    with bench.used_context(_SETTINGS.changed(n_seq_max=2, n_ctx=1024, kv_unified=case.kv_unified)) as context:
        context.decode(prefix)
        context.decode(other, sequence=1)
        consumed = context.load(context.save(), -1)
        held = worst(
            of_count(context.pos_max(s), len(text) - 1, f"largest position of sequence {s}", "")
            for s, text in enumerate((prefix, other))
        )
        if consumed or held.value:
            return worst([_accepted(consumed), held])
        return _refused(bench, context, [prefix], prompt)


@verifies("RB-01/on-device-restore-of-a-bad-blob", case=Bad)
def test_a_bad_blob_is_refused_on_the_device_too(bench: Bench, case: Bad) -> Deviation:
    prefix, prompt = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    with bench.used_context(_SETTINGS) as context:
        context.decode(prefix)
        consumed = context.load(_bad(context.save(flags=StateFlags.ON_DEVICE), case), flags=StateFlags.ON_DEVICE)
        return worst([_accepted(consumed), _refused(bench, context, [prefix], prompt)])


def _bad(blob: Blob, case: Bad) -> Blob:
    random = np.random.default_rng(case.text_seed)
    match case.bad:
        case "nothing":
            return blob[:0].copy()
        case "short":
            return blob[: len(blob) // 2].copy()
        case "noise":
            return random.integers(0, 256, len(blob), np.uint8)
        case _:
            return np.full(len(blob), int(case.bad), np.uint8)


# -- RB-02


@verifies("RB-02/quantized-v-without-flash-attention", case=Unsupported)
def test_quantized_values_without_flash_attention_are_refused(bench: Bench, case: Unsupported) -> Deviation:
    try:
        with bench.context(_SETTINGS.changed(type_v=case.what, flash_attn="off")) as context:
            context.decode(*bench.texts(case.text_seed, case.prefix_tokens))
    except ModelError:
        return Deviation(0.0, "settings that were accepted")
    return Deviation(
        1.0, "settings that were accepted", f"V of {case.what} without flash attention", "refused", "a context"
    )


@verifies("RB-02/invalid-batch", case=Unsupported)
def test_an_invalid_batch_is_refused_and_changes_nothing(bench: Bench, case: Unsupported) -> Deviation:
    if case.what == "positions that leave a gap" and bench.model.positions_per_embedding > 1:
        raise NotDecidable("positions of images leave gaps")
    prefix, text, prompt = bench.texts(case.text_seed, case.prefix_tokens, 4, _NEXT)
    n = case.prefix_tokens
    after = np.arange(n, n + 4, dtype=np.int32)
    flags = np.zeros(4, np.int8)
    batch = {
        "sequence beyond the last": TokenBatch(text, after, flags, 1),
        "negative sequence": TokenBatch(text, after, flags, -1),
        "positions that overlap": TokenBatch(text, after - 2, flags),
        "positions that leave a gap": TokenBatch(text, after + 2, flags),
        "positions that fall": TokenBatch(text, after[::-1].copy(), flags),
        "token beyond the vocabulary": TokenBatch(np.full(4, bench.model.n_vocab, np.int32), after, flags),
        "negative token": TokenBatch(np.full(4, -1, np.int32), after, flags),
        "no token": TokenBatch(text[:0], after[:0], flags[:0]),
    }[case.what]
    with bench.used_context(_SETTINGS) as context:
        context.decode(prefix)
        code = context.process(batch)
        said = Deviation(
            float(code == 0), "invalid batches that were accepted", case.what if code == 0 else "", "-1", "0"
        )
        position = of_count(context.pos_max(), n - 1, "largest position after an invalid batch", "")
        if said.value or position.value:
            return worst([said, position])
        return of_logits(context.decode(prompt, start=n, outputs="all"), bench.cold(_SETTINGS, prefix, prompt))


class Depth(Case):
    """As many rollback snapshots as a micro-batch has tokens, or more."""

    text_seed: int
    prefix_tokens: int
    n_rs_seq: int
    ubatch: int


@verifies("RB-02/rollback-depth-of-a-micro-batch", case=Depth)
def test_more_snapshots_than_a_micro_batch_has_tokens_are_refused_or_work(bench: Bench, case: Depth) -> Deviation:
    prefix, prompt = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    settings = _SETTINGS.changed(n_rs_seq=case.n_rs_seq, n_ubatch=case.ubatch)
    try:
        with bench.used_context(settings) as context:
            context.decode(prefix)
            return of_logits(context.decode(prompt, outputs="all"), bench.cold(settings, prefix, prompt))
    except ModelError:
        return Deviation(0.0, "settings that were accepted")


# -- RB-03


@verifies("RB-03", case=Ending)
def test_the_end_of_a_build_is_a_result(bench: Bench, case: Ending) -> Deviation:
    seen = "an answer"
    with Child(memory_limit=4 << 30) as child:
        try:
            child.call(_ended, bench.setup, case.ending, timeout=60 if case.ending != "hang" else 5)
        except ChildDeath as death:
            seen = death.verdict
        except (ModelError, MemoryError):
            seen = "refused"
        survived = child.call(os.getpid) != os.getpid()
    expected = {"abort": ("CRASH", "refused"), "hang": ("TIMEOUT",), "memory": ("CRASH", "refused")}[case.ending]
    ended = Deviation(
        float(seen not in expected), "endings that are no result", case.ending, " or ".join(expected), seen
    )
    return worst([ended, of_count(int(survived), 1, "runs that went on", "")])


def _ended(setup: Setup, ending: str) -> None:
    """Make the build end its process, never answer, or ask for more memory than there is."""
    bench = Bench(setup)
    (text,) = bench.texts(0, 64)
    if ending == "memory":
        with bench.context(ContextSettings(n_ctx=1 << 23)) as context:
            context.decode(text)
        return
    with bench.context(ContextSettings(n_ctx=256, n_batch=32)) as context:
        if ending == "hang":
            context.on_abort(_never)
            context.decode(text[:32])
        elif context.process(TokenBatch(text, np.arange(64, dtype=np.int32), np.zeros(64, np.int8))) != 0:
            raise ModelError("a batch beyond n_batch was refused")


def _never() -> bool:
    while True:
        time.sleep(3600)


# -- RP-12


def _loaded_elsewhere(bench: Bench, case: Foreign, saved: ContextSettings, loaded: ContextSettings) -> Deviation:
    prefix, other, prompt = bench.texts(case.text_seed, case.prefix_tokens, case.other_tokens, _NEXT)
    with bench.used_context(saved) as context, bench.used_context(loaded) as elsewhere:
        context.decode(prefix)
        elsewhere.decode(other)
        consumed = elsewhere.load(context.save())
        return worst([_accepted(consumed), _usable(bench, elsewhere, prompt)])


@verifies("RP-12/other-cache-type", case=ForeignType)
def test_a_state_of_another_cache_type_is_refused(bench: Bench, case: ForeignType) -> Deviation:
    if case.saved_as == case.loaded_as:
        raise NotDecidable("the types are the same")
    saved, loaded = (_SETTINGS.changed(type_k=name) for name in (case.saved_as, case.loaded_as))
    return _loaded_elsewhere(bench, case, saved, loaded)


@verifies("RP-12/other-layout-of-v", case=Foreign)
def test_a_state_with_v_laid_out_otherwise_is_refused(bench: Bench, case: Foreign) -> Deviation:
    return _loaded_elsewhere(bench, case, _SETTINGS.changed(flash_attn="on"), _SETTINGS)


@verifies("RP-12/other-number-of-streams", case=Foreign)
def test_a_state_with_another_number_of_streams_is_refused(bench: Bench, case: Foreign) -> Deviation:
    return _loaded_elsewhere(bench, case, _SETTINGS, _SETTINGS.changed(n_seq_max=2, n_ctx=1024))


class ForeignModel(Foreign):
    """The state of another fixture model."""

    other_model: str


@verifies("RP-12/other-model", case=ForeignModel)
def test_a_state_of_another_model_is_refused(bench: Bench, case: ForeignModel) -> Deviation:
    same = census_of_gguf(models.path(case.other_model)) == bench.census
    other_bench = Bench(Setup(bench.setup.build, "rwkv7-mini" if same else case.other_model))
    try:
        with other_bench.context(_SETTINGS) as foreign:
            foreign.decode(*other_bench.texts(case.text_seed, case.prefix_tokens))
            blob = foreign.save()
    finally:
        other_bench.close()
    other, prompt = bench.texts(case.text_seed, case.other_tokens, _NEXT)
    with bench.used_context(_SETTINGS) as context:
        context.decode(other)
        consumed = context.load(blob)
        return worst([_accepted(consumed), _usable(bench, context, prompt)])


@verifies("RP-12/rotated-and-unrotated-keys-interchange", case=ForeignType)
def test_keys_that_are_rotated_otherwise_are_refused_or_fit(bench: Bench, case: ForeignType) -> Deviation:
    prefix, prompt = bench.texts(case.text_seed, case.prefix_tokens, _NEXT)
    settings = _SETTINGS.changed(type_k=case.saved_as)
    with bench.context(settings) as context:
        context.decode(prefix)
        blob = context.save()
        expected = context.decode(prompt, outputs="all")
    with Child(environment={"LLAMA_ATTN_ROT_DISABLE": "1"}) as child:
        seen = child.call(_continued_from, bench.setup, settings, blob, prompt)
    return Deviation(0.0, "NMSE of logits") if seen is None else of_logits(seen, expected)


def _continued_from(
    setup: Setup, settings: ContextSettings, blob: Blob, prompt: Tokens
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]] | None:
    """What follows a state in this process; None where it is refused."""
    with Bench(setup).context(settings) as context:
        return context.decode(prompt, outputs="all") if context.load(blob) else None
