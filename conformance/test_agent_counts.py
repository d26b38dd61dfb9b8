"""What the arms of an agent loop send and hold, by counts alone: specs/agent_arms.yaml, as far as no engine is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from conformance.harness.arms.counts import ARMS, LABELS, ArmName, StepCounts
from conformance.harness.arms.document import load_document, trace_transcript
from conformance.harness.bench import Bench, Case
from conformance.harness.exam import verifies
from conformance.harness.measure.deviation import Deviation, of_count, worst
from conformance.harness.prompts.layouts import (
    VISION_END,
    VISION_START,
    Extent,
    Prompt,
    PromptError,
    TextPiece,
    Vocabulary,
)
from conformance.harness.prompts.transcript import Screenshot, Step, Text, Transcript

BOUNDED: tuple[ArmName, ...] = ("evict", "evict_ideal", "terminal_slot")


class Task(Case):
    """A task whose newest `window` screenshots are shown."""

    transcript: Transcript
    window: int


class RoomyTask(Task):
    """The same in a context of so many cells, on a model trained on so many positions."""

    cells: int
    positions: int


class EqualSteps(Case):
    """A task of equal steps: texts of `said` tokens and screenshots of width x height behind a preamble."""

    preamble: int
    said: int
    width: int
    height: int
    steps: int
    window: int

    def transcript(self) -> Transcript:
        """The task; no two of its texts or screenshots have the same content."""
        steps = tuple(
            Step(
                screenshot=Screenshot(width=self.width, height=self.height, seed=number),
                action=Text.drawn(number, self.said),
            )
            for number in range(1, self.steps + 1)
        )
        return Transcript(preamble=Text.drawn(0, self.preamble), steps=steps)


class Row(Case):
    """A row of the document's trace."""

    row: int


class Lengths:
    """How long the parts of a transcript are, and what follows from that: the statements of the specs, written again.

    Steps count from 1. Attributes without a step are tokens of a text; `markers` are both markers of a screenshot.
    """

    def __init__(self, transcript: Transcript, window: int, vocabulary: Vocabulary) -> None:
        def n(text: Text | None) -> int:
            return 0 if text is None else len(vocabulary.tokens(text))

        self.window = window
        self.preamble, self.turn, self.closing = n(transcript.preamble), n(transcript.turn), n(transcript.closing)
        self.evicted, self.heading = n(transcript.evicted), n(transcript.slot_heading)
        self.markers = n(Text(string=VISION_START)) + n(Text(string=VISION_END))
        self.images = [step.screenshot for step in transcript.steps]
        self.actions = [n(step.action) for step in transcript.steps]
        self.tools = [n(step.tool) for step in transcript.steps]

    def seen(self, step: int) -> list[int]:
        """The steps up to this one that brought a screenshot."""
        return [number for number, image in enumerate(self.images[:step], 1) if image]

    def shown(self, step: int) -> list[int]:
        """The newest of them."""
        return self.seen(step)[-self.window :]

    def image(self, step: int) -> int:
        """Tokens of a step's screenshot and its markers."""
        image = self.images[step - 1]
        return image.width * image.height + self.markers if image else 0

    def said(self, step: int) -> int:
        """Tokens of a step's action and of what the tool answered."""
        return self.actions[step - 1] + self.tools[step - 1]

    def texts(self, step: int) -> int:
        """Tokens of a step's prompt but for screenshots and what takes their place."""
        return (
            self.preamble + sum(self.turn + self.said(number) for number in range(1, step)) + self.turn + self.closing
        )

    def chronological(self, step: int, shown: list[int]) -> int:
        """Tokens of a step's prompt in which these screenshots are shown and others stand as their text."""
        seen = self.seen(step)
        return self.texts(step) + sum(self.image(number) if number in shown else self.evicted for number in seen)

    def kept(self, prompt: int, step: int) -> int:
        """Tokens of the cache that a step without an eviction goes on from; `prompt` is that of the step before."""
        if step == 1:
            return 0
        return prompt - self.closing if self.closing else prompt + self.actions[step - 2]


def _vocabulary(bench: Bench) -> Vocabulary:
    return bench.reader().vocabulary


def _counts(
    bench: Bench, arm: ArmName, transcript: Transcript, window: int, vocabulary: Vocabulary
) -> tuple[StepCounts, ...]:
    return bench.agent.counts(arm, transcript, window, vocabulary, bench.agent.counted)


def _prompts(bench: Bench, arm: ArmName, case: Task, vocabulary: Vocabulary) -> Iterator[tuple[int, Prompt]]:
    layout = bench.agent.counted[arm].layout
    for step in range(1, len(case.transcript.steps) + 1):
        yield step, layout(case.transcript, step, case.window, vocabulary)


def _of_tokens(found: Iterable[tuple[str, int, int]], arm: ArmName) -> Deviation:
    """The worst of counts: (what and at which step, seen, expected)."""
    return worst([of_count(seen, expected, f"{LABELS[arm]}: {what}", "tokens") for what, seen, expected in found])


def _hits(bench: Bench, arm: ArmName, case: Task, vocabulary: Vocabulary) -> Deviation:
    """Tokens counted as reused that the cache did not hold at that place."""
    parts = vocabulary.parts(case.transcript)
    held: Prompt | None = None
    found = []
    counted = _counts(bench, arm, case.transcript, case.window, vocabulary)
    for (step, prompt), counts in zip(_prompts(bench, arm, case, vocabulary), counted, strict=True):
        real = prompt.common_prefix(held).tokens if held else 0
        found.append((f"reused without a hit at step {step}", max(counts.reused_tokens - real, 0), 0))
        action = (piece for piece in parts.said[step - 1] if piece.role == "action")
        held = Prompt((*prompt.pieces, *action))
    return _of_tokens(found, arm)


@verifies("AA-01", case=Task)
def test_evict_reuses_the_preamble_and_no_more_once_a_screenshot_has_been_evicted(
    bench: Bench, case: Task
) -> Deviation:
    vocabulary = _vocabulary(bench)
    lengths = Lengths(case.transcript, case.window, vocabulary)
    found = []
    before = 0
    as_run, ideal = (_counts(bench, arm, case.transcript, case.window, vocabulary) for arm in ("evict", "evict_ideal"))
    for run, best in zip(as_run, ideal, strict=True):
        step = run.step
        prompt = lengths.chronological(step, lengths.shown(step))
        gone = lengths.seen(step)[: -case.window]
        kept = lengths.kept(before, step)
        front = kept
        if gone and step in lengths.seen(step):
            front = lengths.chronological(gone[-1], []) - lengths.evicted - lengths.turn - lengths.closing
        found += [
            (f"prompt at step {step}", run.prompt_tokens, prompt),
            (f"reused at step {step}", run.reused_tokens, lengths.preamble if gone else kept),
            (f"prefilled at step {step}", run.prefilled_tokens, prompt - (lengths.preamble if gone else kept)),
            (f"reused at step {step}, with ideal checkpoints", best.reused_tokens, front),
        ]
        before = prompt
    return worst(
        [_of_tokens(found, "evict"), *(_hits(bench, arm, case, vocabulary) for arm in ("evict", "evict_ideal"))]
    )


@verifies("AA-01/the-documents-trace", case=Row)
def test_the_five_rows_of_the_documents_trace_come_out(bench: Bench, case: Row) -> Deviation:
    document = load_document()
    row = document.trace.rows[case.row]
    transcript, window = trace_transcript(document), document.trace.max_images
    counts = _counts(bench, "evict", transcript, window, _vocabulary(bench))[row.step - 1]
    return _of_tokens(
        [
            (f"prompt at step {row.step}", counts.prompt_tokens, row.prompt),
            (f"reused at step {row.step}", counts.reused_tokens, row.reused),
            (f"prefilled at step {row.step}", counts.prefilled_tokens, row.prefilled),
        ],
        "evict",
    )


@verifies("AA-02", case=Task)
def test_no_evict_prefills_what_is_new_whatever_the_depth(bench: Bench, case: Task) -> Deviation:
    vocabulary = _vocabulary(bench)
    lengths = Lengths(case.transcript, case.window, vocabulary)
    found = []
    previous: Prompt | None = None
    counted = _counts(bench, "append_only", case.transcript, case.window, vocabulary)
    for (step, prompt), counts in zip(_prompts(bench, "append_only", case, vocabulary), counted, strict=True):
        new = lengths.image(step) + lengths.turn + lengths.closing
        if step == 1:
            new += lengths.preamble
        else:
            new += lengths.said(step - 1) if lengths.closing else lengths.tools[step - 2]
        found.append((f"prefilled at step {step}", counts.prefilled_tokens, new))
        if previous:
            whole = Extent(previous.n_tokens - lengths.closing, previous.n_positions - lengths.closing)
            same = prompt.common_prefix(previous)
            found += [
                (f"tokens of step {step - 1} at step {step}", min(same.tokens, whole.tokens), whole.tokens),
                (f"positions of step {step - 1} at step {step}", min(same.positions, whole.positions), whole.positions),
            ]
        previous = prompt
    return worst([_of_tokens(found, "append_only"), _hits(bench, "append_only", case, vocabulary)])


@verifies("AA-03", case=Task)
def test_the_terminal_slot_prefills_the_window_and_the_new_text(bench: Bench, case: Task) -> Deviation:
    vocabulary = _vocabulary(bench)
    lengths = Lengths(case.transcript, case.window, vocabulary)
    found = []
    counted = _counts(bench, "terminal_slot", case.transcript, case.window, vocabulary)
    for (step, prompt), counts in zip(_prompts(bench, "terminal_slot", case, vocabulary), counted, strict=True):
        window = sum(map(lengths.image, lengths.shown(step)))
        ending = lengths.turn + lengths.closing
        new = lengths.preamble if step == 1 else lengths.turn + lengths.said(step - 1)
        found.append((f"prefilled at step {step}", counts.prefilled_tokens, new + lengths.heading + window + ending))
        if prompt.images:
            behind = prompt.n_tokens - prompt.images[0].begin
            found.append((f"behind the first marker at step {step}", behind, window + ending - lengths.markers // 2))
    return worst([_of_tokens(found, "terminal_slot"), _hits(bench, "terminal_slot", case, vocabulary)])


@verifies("AA-03/equal-steps", case=EqualSteps)
def test_over_100_equal_steps_the_prefill_is_constant_and_the_cells_follow_the_formula(
    bench: Bench, case: EqualSteps
) -> Deviation:
    vocabulary = _vocabulary(bench)
    transcript = case.transcript()
    markers = Lengths(transcript, case.window, vocabulary).markers
    image = case.width * case.height + markers
    found = []
    for counts in _counts(bench, "terminal_slot", transcript, case.window, vocabulary):
        step = counts.step
        held = case.preamble + step * case.said + min(step, case.window) * image
        found.append((f"cells at step {step}", counts.live_cells, held))
        if step >= max(case.window, 2):
            found.append((f"prefilled at step {step}", counts.prefilled_tokens, case.window * image + case.said))
    return _of_tokens(found, "terminal_slot")


@verifies("AA-04", case=Task)
def test_the_terminal_slot_holds_preamble_text_and_at_most_w_screenshots(bench: Bench, case: Task) -> Deviation:
    vocabulary = _vocabulary(bench)
    lengths = Lengths(case.transcript, case.window, vocabulary)
    return _of_tokens(
        (
            (
                f"cells at step {counts.step}",
                counts.live_cells,
                lengths.texts(counts.step)
                + lengths.heading
                + sum(map(lengths.image, lengths.shown(counts.step)))
                + lengths.actions[counts.step - 1],
            )
            for counts in _counts(bench, "terminal_slot", case.transcript, case.window, vocabulary)
        ),
        "terminal_slot",
    )


@verifies("AA-05", case=Task)
def test_no_evicts_cells_grow_by_all_that_is_new(bench: Bench, case: Task) -> Deviation:
    vocabulary = _vocabulary(bench)
    lengths = Lengths(case.transcript, case.window, vocabulary)
    found = []
    before = lengths.preamble + lengths.closing
    for counts in _counts(bench, "append_only", case.transcript, case.window, vocabulary):
        step = counts.step
        tool = lengths.tools[step - 2] if step > 1 else 0
        new = tool + lengths.image(step) + lengths.turn + lengths.actions[step - 1]
        found.append((f"growth of the cells at step {step}", counts.live_cells - before, new))
        before = counts.live_cells
    last = len(case.transcript.steps)
    held, slot = (
        sum(image.end - image.begin for image in prompt.images)
        for prompt in (
            bench.agent.counted[arm].layout(case.transcript, last, case.window, vocabulary)
            for arm in ("append_only", "terminal_slot")
        )
    )
    more = len(lengths.seen(last)) > case.window
    found.append(("more cells of images than the terminal slot, 1 for yes", int(held > slot), int(more)))
    return _of_tokens(found, "append_only")


@verifies("AA-08", case=Task)
def test_the_terminal_slot_prefills_less_than_evict_from_a_step_on_that_the_counts_predict(
    bench: Bench, case: Task
) -> Deviation:
    vocabulary = _vocabulary(bench)
    lengths = Lengths(case.transcript, case.window, vocabulary)
    counted = {arm: _counts(bench, arm, case.transcript, case.window, vocabulary) for arm in ARMS}
    found = [
        (f"below the new content at step {bound.step}", max(bound.prefilled_tokens - own.prefilled_tokens, 0), 0)
        for arm in BOUNDED
        for own, bound in zip(counted[arm], counted["append_only"], strict=True)
    ]
    seen = bench.agent.crossover(counted["terminal_slot"], counted["evict"])
    found.append(("step of the crossover", seen or 0, _predicted_crossover(lengths) or 0))
    return _of_tokens(found, "terminal_slot")


def _predicted_crossover(lengths: Lengths) -> int | None:
    """The first step at which texts before the last turn and evicted screenshots are longer than the slot's heading."""
    for step in range(1, len(lengths.images) + 1):
        gone = lengths.seen(step)[: -lengths.window]
        older = sum(lengths.turn + lengths.said(number) for number in range(1, step - 1))
        if gone and older + len(gone) * lengths.evicted > lengths.heading:
            return step
    return None


@verifies("AA-09", case=Task)
def test_only_the_newest_w_screenshots_are_shown_in_order(bench: Bench, case: Task) -> Deviation:
    vocabulary = _vocabulary(bench)
    lengths = Lengths(case.transcript, case.window, vocabulary)
    evictions = []
    wrong = []
    for arm in BOUNDED:
        for step, prompt in _prompts(bench, arm, case, vocabulary):
            expected = [(number, lengths.images[number - 1]) for number in lengths.shown(step)]
            shown = [(image.step, image.screenshot) for image in prompt.images]
            wrong.append(
                (f"{LABELS[arm]}: screenshots at step {step}, 1 for the newest in order", int(shown == expected))
            )
            if lengths.evicted:
                gone = [piece.step for piece in prompt.pieces if piece.role == "evicted"]
                texts = [] if arm == "terminal_slot" else lengths.seen(step)[: -case.window]
                evictions.append((f"{LABELS[arm]}: texts of screenshots at step {step}", int(gone == texts)))
    return worst([of_count(right, 1, what, "") for what, right in wrong + evictions])


@verifies("AA-14", case=RoomyTask)
def test_positions_stay_within_the_trained_context_in_every_bounded_arm(bench: Bench, case: RoomyTask) -> Deviation:
    vocabulary = _vocabulary(bench)
    lengths = Lengths(case.transcript, case.window, vocabulary)
    found = []
    for arm in BOUNDED:
        counted = _counts(bench, arm, case.transcript, case.window, vocabulary)
        too_far = None
        for (step, prompt), counts in zip(_prompts(bench, arm, case, vocabulary), counted, strict=True):
            shown = [image for number in lengths.shown(step) if (image := lengths.images[number - 1])]
            text = prompt.n_tokens - sum(image.width * image.height for image in shown)
            positions = text + sum(max(image.width, image.height) for image in shown)
            found.append((f"{LABELS[arm]}: position behind the prompt at step {step}", prompt.n_positions, positions))
            ends = positions + lengths.actions[step - 1]
            if too_far is None and (counts.live_cells > case.cells or ends > case.positions):
                too_far = step
        large = [step for step in lengths.seen(len(counted)) if lengths.image(step) - lengths.markers > case.cells]
        expected = large[0] if large else too_far
        refused = _refused(bench, arm, case, counted)
        found.append((f"{LABELS[arm]}: step that is refused, 0 for none", refused, expected or 0))
    return worst([of_count(seen, expected, what, "") for what, seen, expected in found])


def _refused(bench: Bench, arm: ArmName, case: RoomyTask, counted: tuple[StepCounts, ...]) -> int:
    """The step that is named where a task is refused, 0 where it is not."""
    try:
        bench.agent.require_room(counted, arm, case.transcript, case.cells, case.positions)
    except PromptError as error:
        return int(str(error).partition(":")[0].removeprefix("step "))
    return 0


@verifies("SP-05", case=Task)
def test_no_layout_ever_moves_the_preamble(bench: Bench, case: Task) -> Deviation:
    vocabulary = _vocabulary(bench)
    preamble = Prompt((TextPiece(vocabulary.tokens(case.transcript.preamble), "preamble", 0),))
    n = preamble.n_tokens
    deviations = []
    for arm in ARMS:
        counted = _counts(bench, arm, case.transcript, case.window, vocabulary)
        found = []
        for (step, prompt), counts in zip(_prompts(bench, arm, case, vocabulary), counted, strict=True):
            stays = prompt.common_prefix(preamble)
            found += [
                (f"tokens of the preamble in front at step {step}", stays.tokens, n),
                (f"positions of the preamble in front at step {step}", stays.positions, n),
                (f"preamble computed again at step {step}", max(n - counts.reused_tokens, 0) if step > 1 else 0, 0),
            ]
        deviations.append(_of_tokens(found, arm))
    return worst(deviations)
