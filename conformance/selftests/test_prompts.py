import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from conformance.harness.arms.counts import ARMS, ArmName, StepCounts, counts, crossover, require_parts, require_room
from conformance.harness.arms.document import load_document, trace_transcript
from conformance.harness.bench import Case, Setup
from conformance.harness.contract.load import SpecError
from conformance.harness.contract.schema import TranscriptBounds
from conformance.harness.exam.check import every_check
from conformance.harness.exam.drawing import drawn_ahead
from conformance.harness.exam.examination import contract, replay_command
from conformance.harness.prompts.files import read_transcript, write_transcript
from conformance.harness.prompts.layouts import (
    VISION_END,
    VISION_START,
    Extent,
    ImagePiece,
    Layout,
    Prompt,
    PromptError,
    TextPiece,
    append_only,
    byte_vocabulary,
    evict,
    terminal_slot,
)
from conformance.harness.prompts.scaling import decoded_at_most, ended_within
from conformance.harness.prompts.strategies import transcripts
from conformance.harness.prompts.transcript import Screenshot, Step, Text, Transcript

BYTES = byte_vocabulary()
LAYOUTS = (evict, append_only, terminal_slot)
SMALL = transcripts(preamble=(1, 20), steps=(1, 8), text=(0, 12), width=(1, 4), height=(1, 3))
quick = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))


class Loop(Case):
    transcript: Transcript
    window: int


def task(*said: int, images: bool = True, **fixed: Text) -> Transcript:
    """Steps with 2 x 3 screenshots and drawn actions of these lengths behind a preamble of 10 tokens."""
    steps = (
        Step(
            screenshot=Screenshot(width=2, height=3, seed=number) if images else None, action=Text.drawn(number, tokens)
        )
        for number, tokens in enumerate(said, 1)
    )
    return Transcript(preamble=Text.drawn(0, 10), steps=tuple(steps), **fixed)


def written(prompt: Prompt) -> list[str]:
    """A prompt in words: role and step of every piece."""
    return [f"{piece.role} {piece.step}" for piece in prompt.pieces if piece.role != "marker"]


@quick
@given(transcript=SMALL, window=st.integers(1, 8))
def test_a_transcript_survives_yaml_json_a_recording_and_a_replay_line(
    transcript: Transcript, window: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("t") / "t.yaml"
    write_transcript(path, transcript)
    assert read_transcript(path) == transcript
    path.write_text(transcript.to_json(), encoding="utf-8")
    assert read_transcript(path) == transcript
    case = Loop(transcript=transcript, window=window)
    assert Loop(**case.model_dump()) == case
    assert hash(Loop.model_validate_json(case.model_dump_json())) == hash(case)
    assert replayed(case) == case


@pytest.mark.parametrize("text", ['say "no"', "it's", "a\\", '\\"', "\U0001f600\n", "$HOME `x`"])
def test_a_replay_line_keeps_quotes_and_characters_of_any_kind(text: str) -> None:
    case = Loop(transcript=Transcript(preamble=Text(string=text), steps=(Step(action=Text(string=text)),)), window=1)
    assert replayed(case) == case


def replayed(case: Loop) -> Loop:
    """The case that a shell hands to the replay."""
    seen: list[Any] = []
    *_, code = shlex.split(replay_command(Setup("bundled", "holo3-mini"), "module:name", case))
    eval(code.partition("; ")[2], {"replay": lambda reference, fields, **setup: seen.append(fields)})
    return Loop(**seen[0])


@pytest.mark.parametrize("text", ["1e5", "no", "0o7", "1_0", "~", "2026-01-01", "1:30", " a ", "\x85", "\ufeff", "'"])
def test_texts_that_look_like_something_else_stay_texts(text: str, tmp_path: Path) -> None:
    transcript = Transcript(preamble=Text(string=text), steps=(Step(action=Text(string=text)),))
    write_transcript(tmp_path / "t.yaml", transcript)
    assert read_transcript(tmp_path / "t.yaml") == transcript


def test_a_case_counts_the_tokens_of_every_prompt_of_its_transcript() -> None:
    assert Loop(transcript=task(5, 7), window=1).n_tokens == (10 + 8 + 5) + (10 + 8 + 5 + 8 + 7)


NO_TEXT = "neither a string nor a drawn text; write a string, or {seed: 7, tokens: 30}"
EMPTY = "preamble: the preamble is empty; write the system prompt there, or {seed: 0, tokens: 1} or more"
PATCHES = "write a number of merged patches, 1 to 2147483647"


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("steps: [{action: a}]", ["1: preamble: is missing; add it"]),
        (
            "steps: [{action: a}]\npreambel: p",
            ["1: preamble: is missing; add it", "2: preambel: unknown key; did you mean 'preamble'?"],
        ),
        ("steps: [{action: a}]\npreamble: ''", [f"2: {EMPTY}"]),
        ("steps: [{action: a}]\npreamble: {seed: 1, tokens: 0}", [f"2: {EMPTY}"]),
        ("steps: [{action: a}]\npreamble: 5", [f"2: preamble: {NO_TEXT}"]),
        ("preamble: p\nturn:\nsteps: [{action: a}]", [f"2: turn: {NO_TEXT}"]),
        ("preamble: p\nsteps: []", ["2: steps: found a list; write a list of steps, one at least"]),
        ("preamble: p\nsteps:\n  action: a", ["2: steps: found a mapping; write a list of steps, one at least"]),
        ("preamble: p\nsteps:\n- action: a\n- b", ["4: steps[1]: found 'b'; write a mapping"]),
        (
            "preamble: p\nsteps:\n- action: a\n  screenshot:\n    height: 3\n    width: 0",
            [f"6: steps[0].screenshot.width: found 0; {PATCHES}"],
        ),
        (
            "preamble: p\nsteps:\n- action: a\n  screenshot: {width: true,\n    height: '3'}",
            [
                f"4: steps[0].screenshot.width: found true; {PATCHES}",
                f"5: steps[0].screenshot.height: found '3'; {PATCHES}",
            ],
        ),
        (
            "preamble: p\nsteps:\n- action: a\n  screenshot:\n    width: 3\n    hight: 3",
            [
                f"4: steps[0].screenshot.height: is missing; {PATCHES}",
                "6: steps[0].screenshot.hight: unknown key; did you mean 'height'?",
            ],
        ),
        (
            "preamble: p\nsteps:\n- {action: {seed: 1, tokens: 2147483648}}",
            ["3: steps[0].action.tokens: found 2147483648; write a number of tokens, 0 to 2147483647"],
        ),
        ("preamble: p\nsteps:\n- {action: {seed: 1}}", [f"3: steps[0].action: {NO_TEXT}"]),
        (
            "preamble: p\nsteps:\n- tool:\n    seed: 1\n    tokens: -1\n  action: a\n- action: 3",
            [
                "5: steps[0].tool.tokens: found -1; write a number of tokens, 0 to 2147483647",
                f"7: steps[1].action: {NO_TEXT}",
            ],
        ),
        (
            "preamble: p\nsteps:\n- acton: a",
            ["3: steps[0].action: is missing; add it", "3: steps[0].acton: unknown key; did you mean 'action'?"],
        ),
        ("preamble: p\nsteps:\n- {tool: a}", ["3: steps[0].action: is missing; add it"]),
        (
            'steps: [{action: a}]\npreamble: "\\ud800"',
            ["2: preamble: holds half of a pair of surrogates, which is no character; write the whole one"],
        ),
        (
            "preamble: [",
            ["2: not YAML, expected the node content, but found '<stream end>'; correct this line or the one before"],
        ),
    ],
)
def test_a_mistake_in_a_transcript_is_named_by_file_line_and_key_and_nothing_else_is(
    text: str, problems: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(text + "\n", encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        read_transcript(path)
    assert list(caught.value.problems) == [f"{path}:{problem}" for problem in problems]


def test_a_transcript_in_ascii_json_keeps_its_characters(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"preamble": "\U0001f600", "steps": [{"action": "a"}]}), encoding="ascii")
    assert read_transcript(path).preamble == Text(string="\U0001f600")


def test_a_transcript_that_fails_shrinks_to_one_that_can_be_read() -> None:
    def fails(transcript: Transcript) -> bool:
        shown = sum(step.screenshot is not None for step in transcript.steps)
        return shown > 2 and counts("terminal_slot", transcript, 2, BYTES)[-1].prompt_tokens > 40

    some = transcripts(preamble=(1, 50), steps=(1, 4), text=(0, 8))
    shrunk = find(some, fails, settings=settings(database=None, derandomize=True, max_examples=200, deadline=None))
    assert len(shrunk.steps) == 3
    assert 40 < counts("terminal_slot", shrunk, 2, BYTES)[-1].prompt_tokens <= 50
    assert len(str(shrunk.model_dump())) < 600


DECODED = [
    (invariant.id, name)
    for invariant in contract()
    for name, space in invariant.search.items()
    if space.transcript and not space.transcript.only_counted
]


def test_what_is_only_counted_is_checked_without_an_engine_and_all_else_is_bounded() -> None:
    engine = {
        check.id for check in every_check().values() if check.reference.startswith("conformance.test_agent_arms:")
    }
    transcripts_of = {
        invariant.id: space.transcript
        for invariant in contract()
        for space in invariant.search.values()
        if space.transcript
    }
    assert {id for id, bounds in transcripts_of.items() if not bounds.only_counted} == engine & set(transcripts_of)
    assert {id for id, _ in DECODED} > {"AA-01/engine", "AA-06", "AA-07", "AA-08/engine", "AA-10", "AA-14/engine"}


@pytest.mark.parametrize(("id", "name"), DECODED)
def test_no_drawn_transcript_has_a_check_decode_more_than_its_profile_says(id: str, name: str) -> None:
    for profile in contract().profiles.values():
        most = profile.decoded_tokens.most
        invariant = contract()[id].decoding_at_most(most)
        bounds = invariant.search[name].transcript
        assert bounds is not None
        assert bounds.decoded_tokens[1] <= most
        for case in drawn_ahead(every_check()[id], invariant, 15, 0):
            assert decoded_at_most(getattr(case, name)) <= most


def test_standard_decodes_at_most_4000_tokens_for_a_transcript() -> None:
    assert contract().profile("standard").decoded_tokens.most == 4000


@quick
@given(transcript=SMALL, window=st.integers(1, 8))
def test_no_two_arms_nor_an_arm_and_a_prefill_from_scratch_decode_more_than_is_foreseen(
    transcript: Transcript, window: int
) -> None:
    from_scratch, by_arm = [], []
    for arm in ARMS:
        steps = counts(arm, transcript, window, BYTES)
        from_scratch.append(sum(step.prompt_tokens for step in steps))
        by_arm.append(sum(step.prefilled_tokens + step.decoded_tokens for step in steps))
    foreseen = decoded_at_most(transcript)
    assert max(by_arm) * 2 <= foreseen
    assert max(map(sum, zip(from_scratch, by_arm, strict=True))) <= foreseen


@quick
@given(transcript=SMALL, most=st.integers(1, 900))
def test_a_task_that_decodes_too_much_is_ended_and_no_sooner_than_it_must(transcript: Transcript, most: int) -> None:
    kept = ended_within(transcript, most)
    n = len(kept.steps)
    assert kept == transcript.first(n)
    assert n == 1 or decoded_at_most(kept) <= most
    assert n == len(transcript.steps) or decoded_at_most(transcript.first(n + 1)) > most


def test_a_bounded_transcript_that_fails_shrinks_to_one_that_can_be_read() -> None:
    bounds = TranscriptBounds(preamble_tokens=(1, 60), steps=(1, 9), text_tokens=(0, 12)).decoding_at_most(4000)

    def fails(transcript: Transcript) -> bool:
        return sum(step.screenshot is not None for step in transcript.steps) > 2

    shrunk = find(
        bounds.strategy(), fails, settings=settings(database=None, derandomize=True, max_examples=300, deadline=None)
    )
    assert len(shrunk.steps) == 3
    assert len(str(shrunk.model_dump())) < 600


def test_each_layout_in_words() -> None:
    transcript = task(1, 1, 1, 1, turn=Text(string="t"), closing=Text(string="c"), slot_heading=Text(string="h"))
    assert written(evict(transcript, 3, 2, BYTES)) == (
        [
            "preamble 0",
            "evicted 1",
            "turn 1",
            "action 1",
            "image 2",
            "turn 2",
            "action 2",
            "image 3",
            "turn 3",
            "closing 3",
        ]
    )
    assert written(append_only(transcript, 2, 1, BYTES)) == (
        ["preamble 0", "image 1", "turn 1", "action 1", "image 2", "turn 2", "closing 2"]
    )
    assert written(terminal_slot(transcript, 3, 2, BYTES)) == (
        [
            "preamble 0",
            "turn 1",
            "action 1",
            "turn 2",
            "action 2",
            "slot_heading 3",
            "image 2",
            "image 3",
            "turn 3",
            "closing 3",
        ]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_of_nothing_and_a_step_that_is_not_there_are_refused(layout: Layout) -> None:
    with pytest.raises(PromptError, match="W = 0: a window of no screenshot shows the agent nothing; give 1 or more"):
        layout(task(1), 1, 0, BYTES)
    for step in (0, 2):
        with pytest.raises(PromptError, match=f"step {step}: the transcript has steps 1 to 1"):
            layout(task(1), step, 1, BYTES)


def test_cells_count_tokens_and_positions_the_longer_side() -> None:
    prompt = append_only(task(5, 5), 2, 1, BYTES)
    assert (prompt.n_tokens, prompt.n_positions) == (10 + 8 + 5 + 8, 10 + 5 + 5 + 5)
    assert [(span.begin, span.end, span.position) for span in prompt.images] == [(11, 17, 11), (24, 30, 21)]


def flat(prompt: Prompt) -> list[object]:
    """A prompt token by token; an image is itself, once for each of its tokens."""
    return [
        unit
        for piece in prompt.pieces
        for unit in (piece.tokens if isinstance(piece, TextPiece) else [piece.screenshot] * piece.n_tokens)
    ]


@quick
@given(transcript=SMALL, other=SMALL, window=st.integers(1, 4), data=st.data())
def test_the_common_prefix_is_that_of_the_tokens_and_never_ends_inside_an_image(
    transcript: Transcript, other: Transcript, window: int, data: st.DataObject
) -> None:
    prompts = [
        data.draw(st.sampled_from(LAYOUTS))(each, data.draw(st.integers(1, len(each.steps))), window, BYTES)
        for each in (transcript, data.draw(st.sampled_from([transcript, other])))
    ]
    a, b = map(flat, prompts)
    same = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    found = prompts[0].common_prefix(prompts[1])
    assert found == prompts[1].common_prefix(prompts[0])
    assert found.tokens == same
    rest = prompts[0].after(found.tokens)
    assert found.positions + sum(piece.n_positions for piece in rest) == prompts[0].n_positions


@quick
@given(transcript=SMALL, data=st.data())
def test_what_lies_behind_a_place_is_the_rest_of_the_prompt(transcript: Transcript, data: st.DataObject) -> None:
    prompt = append_only(transcript, len(transcript.steps), 1, BYTES)
    place = data.draw(st.integers(0, prompt.n_tokens))
    inside = [span for span in prompt.images if span.begin < place < span.end]
    if inside:
        with pytest.raises(PromptError, match=f"token {place} lies inside the image of step {inside[0].step}"):
            prompt.after(place)
    else:
        assert flat(Prompt(prompt.after(place))) == flat(prompt)[place:]
    for outside in (-1, prompt.n_tokens + 1):
        with pytest.raises(PromptError, match=f"has no end at {outside}"):
            prompt.after(outside)


def test_pieces_cut_otherwise_are_the_same_prompt() -> None:
    image = ImagePiece(Screenshot(width=2, height=2), 1)
    one = Prompt((TextPiece((1, 2, 3), "preamble", 0), image, TextPiece((4,), "action", 1)))
    other = Prompt(
        (TextPiece((1,), "preamble", 0), TextPiece((2, 3), "action", 1), image, TextPiece((5,), "action", 1))
    )
    assert one.common_prefix(other) == Extent(7, 5)


def test_markers_are_tokens_of_their_own() -> None:
    start, end = (BYTES.tokens(Text(string=marker)) for marker in (VISION_START, VISION_END))
    assert len(start) == len(end) == 1
    assert start != end
    assert min(*start, *end) >= BYTES.n_vocab


PUBLISHED = {
    "evict_ideal": [534, 152, 156, 503, 510, 513],
    "append_only": [534, 152, 156, 158, 159, 159],
    "terminal_slot": [558, 237, 291, 293, 294, 294],
}
"""Six steps, images of 48 tokens, W = 3: tokens decoded at each step, as they were measured on llama.cpp."""


@pytest.mark.parametrize("arm", ARMS)
def test_six_steps_cost_what_was_measured_once_and_evict_grows(arm: ArmName) -> None:
    steps = tuple(
        Step(
            screenshot=Screenshot(width=8, height=6, seed=number), action=Text(string=""), tool=Text.drawn(number, said)
        )
        for number, said in enumerate([91, 95, 97, 98, 98, 98])
    )
    transcript = Transcript(
        preamble=Text.drawn(10, 473),
        steps=steps,
        turn=Text.drawn(11, 11),
        evicted=Text.drawn(12, 26),
        slot_heading=Text.drawn(13, 24),
    )
    prefilled = [step.prefilled_tokens for step in counts(arm, transcript, 3, BYTES)]
    assert prefilled == PUBLISHED.get(arm, [534, 152, 156, 503, 638, 773])


def test_the_documents_trace_comes_out_in_its_five_rows_and_in_the_sum() -> None:
    document = load_document()
    steps = counts("evict", trace_transcript(document), document.trace.max_images, BYTES)
    for row in document.trace.rows:
        step = steps[row.step - 1]
        assert (step.prompt_tokens, step.reused_tokens, step.prefilled_tokens) == (
            row.prompt,
            row.reused,
            row.prefilled,
        )
    assert sum(step.prefilled_tokens for step in steps) == 1_618_217
    grows = [step.prompt_tokens for step in steps]
    assert grows == sorted(grows)


def test_a_hit_of_an_empty_closing_takes_the_action_along() -> None:
    plain, closed = (counts("append_only", task(7, 7, closing=Text(string=text)), 1, BYTES)[1] for text in ("", "cc"))
    assert (plain.reused_tokens, plain.prefilled_tokens) == (10 + 8 + 7, 8)
    assert (closed.reused_tokens, closed.prefilled_tokens) == (10 + 8, 7 + 8 + 2)


def test_without_screenshots_nothing_is_ever_evicted() -> None:
    arms = {arm: counts(arm, task(5, 6, 7, images=False), 1, BYTES) for arm in ARMS}
    assert arms["evict"] == arms["evict_ideal"] == arms["append_only"]
    assert [step.prefilled_tokens for step in arms["terminal_slot"]] == [10, 5, 6]


def step(number: int, prefilled: int) -> StepCounts:
    return StepCounts(number, prefilled, 0, prefilled, 0, prefilled, prefilled)


@pytest.mark.parametrize(
    ("cheaper", "dearer", "since"),
    [([1, 1, 1], [2, 2, 2], 1), ([3, 1, 1], [2, 2, 2], 2), ([1, 2, 1], [2, 2, 2], 3), ([1, 1, 2], [2, 2, 2], None)],
)
def test_a_crossover_is_for_good(cheaper: list[int], dearer: list[int], since: int | None) -> None:
    one, other = ([step(number, n) for number, n in enumerate(arm, 1)] for arm in (cheaper, dearer))
    assert crossover(one, other) == since


@pytest.mark.parametrize(
    ("cells", "positions", "says"),
    [
        (5, 1000, "step 1: the image takes 6 tokens, more than the context of 5; use a smaller screenshot"),
        (30, 1000, "step 2: no-evict needs 32 cells, and the context has 30; use a smaller W, shorter texts or fewer"),
        (1000, 25, "step 2: no-evict needs 26 positions, and the model was trained on 25"),
        (32, 26, None),
    ],
)
def test_what_does_not_fit_is_refused_with_its_step(cells: int, positions: int, says: str | None) -> None:
    transcript = task(3, 3)
    found = counts("append_only", transcript, 1, BYTES)
    assert found[-1].live_cells == 32

    def fit() -> None:
        require_room(found, "append_only", transcript, cells, positions)

    _refuses(fit, says)


@pytest.mark.parametrize(
    ("transcript", "says"),
    [
        (task(3, 3), "step 1: the image takes 6 tokens, more than the context of 5; use a smaller screenshot"),
        (task(3, 2**31 - 1, images=False), "the text preamble takes 10 tokens, more than the context of 5"),
        (task(3, images=False).model_copy(update={"preamble": Text.drawn(0, 5)}), None),
        (
            task(3, 2**31 - 1, images=False).model_copy(update={"preamble": Text.drawn(0, 5)}),
            "step 2: the action takes 2147483647 tokens, more than the context of 5; use a shorter one",
        ),
    ],
)
def test_a_part_that_no_context_holds_is_refused_before_it_is_read(transcript: Transcript, says: str | None) -> None:
    _refuses(lambda: require_parts(transcript, 5), says)


def _refuses(fit: Callable[[], None], says: str | None) -> None:
    if says is None:
        fit()
    else:
        with pytest.raises(PromptError) as caught:
            fit()
        assert str(caught.value).startswith(says)
        assert "\n" not in str(caught.value)


@quick
@given(transcript=transcripts(preamble=(3, 9), steps=(2, 5), text=(1, 6), width=(2, 4), height=(1, 2)))
def test_drawn_transcripts_stay_within_their_bounds(transcript: Transcript) -> None:
    assert 3 <= len(BYTES.tokens(transcript.preamble)) <= 9
    assert 2 <= len(transcript.steps) <= 5
    for each in transcript.steps:
        for text in (each.action, *([each.tool] if each.tool else [])):
            assert 1 <= len(BYTES.tokens(text)) <= 6
        if each.screenshot:
            assert 2 <= each.screenshot.width <= 4
            assert 1 <= each.screenshot.height <= 2


def test_steps_without_and_with_repeated_screenshots_strings_and_long_tasks_are_drawn() -> None:
    drawn: list[Transcript] = []

    @settings(deadline=None, max_examples=30, database=None, derandomize=True, phases=[Phase.generate])
    @given(transcript=transcripts())
    def draw(transcript: Transcript) -> None:
        drawn.append(transcript)

    draw()
    shots = [[each.screenshot for each in transcript.steps if each.screenshot] for transcript in drawn]
    assert max(len(transcript.steps) for transcript in drawn) > 80
    assert any(len(seen) < len(transcript.steps) for seen, transcript in zip(shots, drawn, strict=True))
    assert any(len(set(seen)) < len(seen) for seen in shots)
    assert any(not (each.action.string or "").isascii() for transcript in drawn for each in transcript.steps)
