"""The arms of an agent loop: specs/agent_arms.yaml."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

import numpy as np
import numpy.typing as npt

from conformance.harness.arms.cost import Call, PrefillCost, calls_behind
from conformance.harness.arms.counts import ARMS, COUNTED, ArmName, StepCounts, crossover
from conformance.harness.arms.counts import counts as counts_of
from conformance.harness.arms.profile import StepProfile
from conformance.harness.arms.reading import Reader, drawn_pixels, encoder_of
from conformance.harness.arms.replay import Arm, ProfiledRun, Terminal, checkpoints_for, prefill
from conformance.harness.arms.terminal_slot import Cursor
from conformance.harness.bench import Bench, Case, Setup
from conformance.harness.engine import Context, ContextSettings, Logits, Pixels
from conformance.harness.engine.child import Child
from conformance.harness.engine.process import resident_bytes
from conformance.harness.exam import NotDecidable, verifies
from conformance.harness.measure.deviation import (
    Deviation,
    of_amount,
    of_count,
    of_estimate,
    of_layers,
    of_logits,
    worst,
)
from conformance.harness.measure.kld import score
from conformance.harness.measure.timing import Estimate, largest, ratio, symmetric
from conformance.harness.prompts.layouts import ImagePiece, Prompt, TextPiece
from conformance.harness.prompts.transcript import Screenshot, Step, Text, Transcript
from conformance.harness.state import compare

_SPARE_CELLS = 512  # so that what goes wrong shows in what is compared, and not as a full cache
_CROSSING: tuple[ArmName, ArmName] = ("terminal_slot", "evict")


class Loop(Case):
    """A task replayed with the newest `window` screenshots shown."""

    transcript: Transcript
    window: int
    ubatch: int


class SlotLoop(Loop):
    """The same by the terminal slot, whose checkpoints are kept in one of its ways."""

    checkpoints: Literal["partial", "full", "on_device"]


class ArmLoop(Loop):
    """The same by one of the arms."""

    arm: ArmName


class PixelLoop(Case):
    """A task of `steps` steps whose screenshots are pixels of width x height tokens, every third of them seen before."""

    text_seed: int
    preamble_tokens: int
    said_tokens: int
    steps: int
    width: int
    height: int
    window: int


class Picture(Case):
    """An image of noise of width x height tokens."""

    seed: int
    width: int
    height: int


class Greedy(Case):
    """A task in which each step's action is what the model finds likeliest, `action_tokens` long."""

    text_seed: int
    preamble_tokens: int
    action_tokens: int
    steps: int
    width: int
    height: int
    window: int


class LongLoop(Case):
    """A task of equal steps: `warm_steps` until memory is taken, `steps` more in which no more may be."""

    arm: ArmName
    warm_steps: int
    steps: int
    window: int
    allowed_kib: int


class TimedLoop(Case):
    """A task of equal steps, replayed by every arm in each of `blocks` rounds, between measurements of single calls."""

    text_seed: int
    preamble_tokens: int
    said_tokens: int
    steps: int
    width: int
    height: int
    window: int
    blocks: int
    confidence_percent: int


def _context(bench: Bench, transcript: Transcript, window: int, ubatch: int, *arms: ArmName) -> ContextSettings:
    """Room for the whole task in each of these arms; a case that no context of the model can hold tells nothing."""
    reader = bench.reader()
    steps = [step for arm in arms for step in counts_of(arm, transcript, window, reader.vocabulary)]
    if max(step.n_positions for step in steps) > bench.model.n_ctx_train:
        raise NotDecidable("the transcript takes more positions than the model was trained on")
    cells = max(step.live_cells for step in steps) + _SPARE_CELLS
    return ContextSettings(n_ctx=cells, n_batch=1024, n_ubatch=ubatch)


def _arm(bench: Bench, context: Context, name: ArmName, case: Loop, reader: Reader | None = None) -> Arm:
    chosen = case.checkpoints if isinstance(case, SlotLoop) else "partial"
    kept = None if chosen == "partial" else chosen  # what is partial depends on the model's kind of memory
    return bench.arm_parts.arm(name, context, reader or bench.reader(), case.transcript, case.window, kept)


def _from_scratch(bench: Bench, context: Context, prompt: Prompt, reader: Reader) -> Cursor:
    """A prompt prefilled into an empty context in the calls that the arms make, by an engine that tells the truth."""
    context.clear()
    cursor = Cursor(context, components=bench.model.positions_per_embedding)
    prefill(cursor, prompt.pieces, reader)
    return cursor


def _row(logits: Logits | None) -> Logits:
    assert logits is not None
    return logits[np.newaxis]


def _of_slot(bench: Bench, case: SlotLoop, reader: Reader, truth: Reader) -> Deviation:
    """The worst step's logits of the terminal slot against a prefill of the same layout from scratch."""
    settings = _context(bench, case.transcript, case.window, case.ubatch, "terminal_slot")
    deviations = []
    with bench.context(settings) as context, Context(bench.model, settings) as scratch:
        arm = _arm(bench, context, "terminal_slot", case, reader)
        for number in range(1, len(case.transcript.steps) + 1):
            asked = arm.look(number)
            prompt = COUNTED["terminal_slot"].layout(case.transcript, number, case.window, truth.vocabulary)
            expected = _from_scratch(bench, scratch, prompt, truth).logits
            found = of_logits(_row(asked.logits), _row(expected))
            deviations.append(found.with_cells_in_another_order(bench.reorders(prompt.n_tokens)))
            arm.act(number)
    return worst(deviations)


@verifies("AA-06", case=SlotLoop)
def test_each_step_of_the_terminal_slot_equals_a_prefill_from_scratch(bench: Bench, case: SlotLoop) -> Deviation:
    return _of_slot(bench, case, bench.reader(), bench.reader())


@verifies("AA-06/on-device", case=SlotLoop)
def test_each_step_equals_a_prefill_from_scratch_with_checkpoints_on_the_device(
    bench: Bench, case: SlotLoop
) -> Deviation:
    return _of_slot(bench, case, bench.reader(), bench.reader())


@verifies("AA-06/pixels", case=PixelLoop)
def test_each_step_equals_a_prefill_from_scratch_with_screenshots_of_pixels(bench: Bench, case: PixelLoop) -> Deviation:
    seeds = [number - 3 if number % 3 == 0 and number > 3 else number for number in range(1, case.steps + 1)]
    steps = tuple(
        Step(
            screenshot=Screenshot(width=case.width, height=case.height, seed=case.text_seed + seed),
            action=Text.drawn(case.text_seed + number, case.said_tokens),
        )
        for number, seed in enumerate(seeds)
    )
    transcript = Transcript(preamble=Text.drawn(case.text_seed, case.preamble_tokens), steps=steps)
    loop = SlotLoop(transcript=transcript, window=case.window, ubatch=512, checkpoints="partial")
    encoded_anew = Reader(bench.model, encoder_of(bench.vision))
    return _of_slot(bench, loop, bench.reader(pixels=True), encoded_anew)


@verifies("AA-07", case=SlotLoop)
def test_the_advanced_checkpoint_equals_a_fresh_prefill_of_preamble_and_history(
    bench: Bench, case: SlotLoop
) -> Deviation:
    settings = _context(bench, case.transcript, case.window, case.ubatch, "terminal_slot")
    reader, deviations = bench.reader(), []
    with bench.context(settings) as context, Context(bench.model, settings) as scratch:
        arm = _arm(bench, context, "terminal_slot", case)
        assert isinstance(arm, Terminal)
        for number in range(1, len(case.transcript.steps) + 1):
            arm.look(number)
            arm.act(number)
            arm.cursor.restore(arm.slot.checkpoint)
            prompt = COUNTED["terminal_slot"].layout(case.transcript, number, case.window, reader.vocabulary)
            n_history = reader.vocabulary.parts(case.transcript).history_tokens(number)
            history = Prompt(prompt.pieces[: len(prompt.pieces) - len(prompt.after(n_history))])
            fresh = _from_scratch(bench, scratch, history, reader)
            cells = of_count(arm.cursor.cells, fresh.cells, "cells of the history", "cells")
            positions = of_count(context.pos_max(), scratch.pos_max(), "last position of the history", "positions")
            states = bench.state(context.save()), bench.state(scratch.save())
            layers = of_layers(compare(*reversed(states), layers=bench.layers, by_position=True))
            deviations += [cells, positions, layers.with_cells_in_another_order(bench.reorders(prompt.n_tokens))]
    return worst(deviations)


@verifies("AA-10", case=Loop)
def test_layout_drift_is_reported(bench: Bench, case: Loop) -> Deviation:
    rows: dict[ArmName, list[Logits]] = {"evict": [], "terminal_slot": []}
    settings = _context(bench, case.transcript, case.window, case.ubatch, *rows)
    n = len(case.transcript.steps)
    for name, found in rows.items():
        with bench.context(settings) as context:
            arm = _arm(bench, context, name, case)
            for number in range(1, n + 1):
                found.append(arm.look(number).logits)
                arm.act(number)
    evict, slot = np.stack(rows["evict"]), np.stack(rows["terminal_slot"])
    scores = score(evict, slot, evict.argmax(axis=1))
    told = f"{int(scores.same_top.sum())} of {n} steps with the same likeliest token, median KLD {np.median(scores.kld):.3g}"
    return Deviation(float(scores.kld.mean()), "mean KLD of terminal slot from evict", "all steps", "", told)


@verifies("AA-11", case=Picture)
def test_a_screenshot_encodes_to_the_same_bits_wherever_it_is_encoded(bench: Bench, case: Picture) -> Deviation:
    pixels = drawn_pixels(Screenshot(width=case.width, height=case.height, seed=case.seed))
    other = drawn_pixels(Screenshot(width=case.width, height=case.height, seed=case.seed + 1))
    cached = bench.arm_parts.embeddings(encoder_of(bench.vision))
    first, again = cached(pixels).embeddings, encoder_of(bench.vision)(pixels).embeddings
    cached(other)
    kept, of_other = cached(pixels.copy()).embeddings, cached(other).embeddings
    with Child() as child:
        elsewhere = child.call(encode_alone, bench.setup, pixels)
    told_apart = of_logits(of_other, encoder_of(bench.vision)(other).embeddings)
    return worst([told_apart, *(of_logits(each, again) for each in (first, kept, elsewhere))])


def encode_alone(setup: Setup, pixels: Pixels) -> npt.NDArray[np.float32]:
    """The embeddings of an image from a vision tower that has done nothing else; run in a process of its own."""
    return encoder_of(Bench(replace(setup, fault=None)).vision)(pixels).embeddings


@verifies("AA-12", case=LongLoop)
def test_memory_is_flat_over_a_long_run_of_a_bounded_arm(bench: Bench, case: LongLoop) -> Deviation:
    return _of_growth(bench, case)


@verifies("AA-12/evict", case=LongLoop)
def test_memory_is_flat_over_a_long_run_of_evict_as_the_document_runs_it(bench: Bench, case: LongLoop) -> Deviation:
    return _of_growth(bench, case)


def _of_growth(bench: Bench, case: LongLoop) -> Deviation:
    """Resident memory that the later steps took beyond the allowance."""
    steps = tuple(
        Step(screenshot=Screenshot(width=4, height=3, seed=number), action=Text.drawn(number, 4))
        for number in range(case.warm_steps + case.steps)
    )
    loop = Loop(transcript=Transcript(preamble=Text.drawn(0, 20), steps=steps), window=case.window, ubatch=512)
    with bench.context(_context(bench, loop.transcript, case.window, 512, case.arm)) as context:
        arm = _arm(bench, context, case.arm, loop)
        for number in range(1, len(steps) + 1):
            arm.look(number)
            arm.act(number)
            if number == case.warm_steps:
                resident = resident_bytes()
        grown = resident_bytes() - resident
    allowed = case.allowed_kib << 10
    return of_amount(
        max(grown - allowed, 0), f"growth beyond {case.allowed_kib} KiB", "bytes", f"{allowed}", f"{grown}"
    )


@verifies("AA-15", case=Greedy)
def test_greedy_actions_of_the_terminal_slot_are_those_of_a_prefill_from_scratch(
    bench: Bench, case: Greedy
) -> Deviation:
    reader = bench.reader()
    (preamble,) = bench.texts(case.text_seed, case.preamble_tokens)
    screenshots = [
        Screenshot(width=case.width, height=case.height, seed=case.text_seed + number) for number in range(case.steps)
    ]
    room = case.preamble_tokens + case.steps * case.action_tokens
    room += case.window * case.width * case.height + case.action_tokens + _SPARE_CELLS
    settings = ContextSettings(n_ctx=room, n_batch=1024)
    said = [TextPiece(tuple(preamble.tolist()), "preamble", 0)]
    deviations = []
    with bench.context(settings) as context, Context(bench.model, settings) as scratch:
        components = bench.model.positions_per_embedding
        cursor = bench.arm_parts.cursor(context, components=components, checkpoints=checkpoints_for(bench.model))
        slot = bench.arm_parts.slot(cursor)
        slot.begin(preamble)
        for number in range(1, case.steps + 1):
            window = [ImagePiece(screenshots[i], i + 1) for i in range(max(number - case.window, 0), number)]
            logits = slot.look([reader.image(piece.screenshot) for piece in window])
            action = _generated(slot.decode, logits, case.action_tokens)
            slot.remember(action)
            fresh = _from_scratch(bench, scratch, Prompt((*said, *window)), reader)
            assert fresh.logits is not None
            expected = _generated(fresh.token, fresh.logits, case.action_tokens)
            same = int(np.count_nonzero(np.array(action) == expected))
            deviations.append(of_count(same, len(expected), f"greedy tokens of step {number} that agree", "tokens"))
            said.append(TextPiece(tuple(expected), "action", number))
    return worst(deviations)


def _generated(decode: Callable[[int], Logits], logits: Logits, n: int) -> list[int]:
    """The likeliest token after each other, n of them."""
    tokens: list[int] = []
    for _ in range(n):
        tokens.append(int(logits.argmax()))
        logits = decode(tokens[-1])
    return tokens


def _profiles(bench: Bench, name: ArmName, case: Loop) -> Iterator[tuple[StepProfile, StepCounts, int]]:
    """Every step as the engine's counters tell it, as the counts predict it, and the engine's position behind it."""
    reader = bench.reader()
    settings = _context(bench, case.transcript, case.window, case.ubatch, name)
    predicted = counts_of(name, case.transcript, case.window, reader.vocabulary)
    with bench.context(settings) as context:
        run = ProfiledRun(context, _arm(bench, context, name, case, reader), "drawn")
        for expected in predicted:
            yield run.step(expected.step), expected, run.arm.cursor.position


def _of_profile(seen: StepProfile, expected: StepCounts) -> Deviation:
    """The count of a step that is furthest from the predicted one."""
    return worst(
        of_count(getattr(seen, name), getattr(expected, name), f"{name} of step {expected.step}", "tokens")
        for name in ("prompt_tokens", "reused_tokens", "prefilled_tokens", "decoded_tokens", "live_cells")
    )


def _of_counts(bench: Bench, name: ArmName, case: Loop) -> Deviation:
    return worst(_of_profile(seen, expected) for seen, expected, _ in _profiles(bench, name, case))


@verifies("AA-01/engine", case=Loop)
def test_the_engine_counts_what_evict_is_said_to_prefill(bench: Bench, case: Loop) -> Deviation:
    return worst([_of_counts(bench, "evict", case), _of_counts(bench, "evict_ideal", case)])


@verifies("AA-02/engine", case=Loop)
def test_the_engine_counts_what_no_evict_is_said_to_prefill(bench: Bench, case: Loop) -> Deviation:
    return _of_counts(bench, "append_only", case)


@verifies("AA-03/engine", case=Loop)
def test_the_engine_counts_what_the_terminal_slot_is_said_to_prefill(bench: Bench, case: Loop) -> Deviation:
    return _of_counts(bench, "terminal_slot", case)


@verifies("AA-04/engine", case=Loop)
def test_the_cells_that_the_terminal_slot_holds_are_those_of_the_formula(bench: Bench, case: Loop) -> Deviation:
    return _of_cells(bench, "terminal_slot", case)


@verifies("AA-05/engine", case=Loop)
def test_the_cells_that_no_evict_holds_grow_by_all_that_is_new(bench: Bench, case: Loop) -> Deviation:
    return _of_cells(bench, "append_only", case)


def _of_cells(bench: Bench, name: ArmName, case: Loop) -> Deviation:
    """Cells in the saved state after every step, against the counts."""
    expected = counts_of(name, case.transcript, case.window, bench.reader().vocabulary)
    deviations = []
    with bench.context(_context(bench, case.transcript, case.window, case.ubatch, name)) as context:
        arm = _arm(bench, context, name, case)
        for step in expected:
            arm.look(step.step)
            arm.act(step.step)
            held = max((len(cache.cells) for cache in bench.state(context.save()).attention), default=0)
            deviations.append(of_count(held, step.live_cells, f"cells held at step {step.step}", "cells"))
    return worst(deviations)


@verifies("AA-08/engine", case=Loop)
def test_the_crossover_is_where_the_counts_predict_it(bench: Bench, case: Loop) -> Deviation:
    slot, evict = (list(_profiles(bench, name, case)) for name in _CROSSING)
    predicted = crossover(*([counted for _, counted, _ in steps] for steps in (slot, evict)))
    seen = crossover(
        *(
            [replace(counted, prefilled_tokens=profile.prefilled_tokens) for profile, counted, _ in steps]
            for steps in (slot, evict)
        )
    )
    return of_count(seen or 0, predicted or 0, "step from which on the terminal slot prefills less", "step")


@verifies("AA-14/engine", case=ArmLoop)
def test_positions_are_those_of_the_layout_and_within_the_trained_context(bench: Bench, case: ArmLoop) -> Deviation:
    deviations = []
    for _, expected, position in _profiles(bench, case.arm, case):
        deviations.append(
            of_count(position, expected.n_positions, f"position behind step {expected.step}", "positions")
        )
        beyond = max(position, bench.model.n_ctx_train)
        deviations.append(
            of_count(beyond, bench.model.n_ctx_train, "positions within the trained context", "positions")
        )
    return worst(deviations)


@verifies("AA-13", case=TimedLoop)
def test_the_prefill_of_every_arm_takes_what_an_affine_model_predicts(bench: Bench, case: TimedLoop) -> Deviation:
    steps = tuple(
        Step(
            screenshot=Screenshot(width=case.width, height=case.height, seed=number),
            action=Text.drawn(case.text_seed + number, case.said_tokens),
        )
        for number in range(case.steps)
    )
    preamble = Text.drawn(case.text_seed, case.preamble_tokens)
    loop = Loop(transcript=Transcript(preamble=preamble, steps=steps), window=case.window, ubatch=512)
    settings = _context(bench, loop.transcript, case.window, 512, *ARMS)
    deepest = settings.n_ctx - _SPARE_CELLS
    lengths = (1, case.said_tokens, case.width * case.height, 2 * case.said_tokens)
    singles = [Call(n, share * deepest // 3) for share in range(3) for n in lengths]
    made: dict[ArmName, list[list[Call]]] = {arm: [] for arm in ARMS}
    taken: dict[ArmName, list[float]] = {arm: [] for arm in ARMS}
    of_singles = []
    for _ in range(case.blocks):
        with bench.context(settings) as context:
            of_singles.append(list(_seconds_of(context, bench, singles)))
        for arm in ARMS:
            with bench.context(settings) as context:
                run = ProfiledRun(context, _arm(bench, context, arm, loop), "timed")
                for number in range(1, case.steps + 1):
                    profile = run.step(number)
                    assert run.asked is not None
                    if calls_made := calls_behind(run.asked.prompt, run.asked.reused):
                        made[arm].append(calls_made)
                        taken[arm].append(profile.prefill_seconds)
    cost = PrefillCost.fit(singles, np.median(of_singles, axis=0).tolist())
    factors: dict[str, Estimate] = {
        arm: symmetric(ratio(taken[arm], [cost.seconds(each) for each in made[arm]], case.confidence_percent / 100))
        for arm in ARMS
    }
    name, worst_factor = largest(factors)
    told = ", ".join(f"{arm} {factor.value:.3f}" for arm, factor in factors.items())
    return of_estimate(worst_factor, "prefill time against the model, as a factor", name, "1", told)


def _seconds_of(context: Context, bench: Bench, made: Sequence[Call]) -> Iterator[float]:
    """Seconds that each call takes at its depth; depths must not fall."""
    cursor = Cursor(context, components=1, checkpoints=checkpoints_for(bench.model))
    cursor.text([1])  # what only the first call of a context does is not timed
    for depth, calls_there in groupby(made, lambda call: call.depth):
        cursor.text(bench.texts(depth, max(depth - cursor.cells, 0))[0])
        behind = cursor.checkpoint()
        for call in calls_there:
            before = context.seconds
            cursor.text(bench.texts(0, call.tokens)[0])
            yield context.seconds - before
            cursor.restore(behind)
