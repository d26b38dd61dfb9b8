"""Terminal slot and arms over a memory made of Python lists, their journal, their report; no engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness.arms.counts import ARMS, ArmName, StepCounts, counts
from conformance.harness.arms.journal import Journal
from conformance.harness.arms.profile import ProfileError, RunSettings, StepProfile
from conformance.harness.arms.reading import Embeddings
from conformance.harness.arms.replay import ARM_TYPES, CellGauge, calls
from conformance.harness.arms.terminal_slot import CheckpointKind, Cursor, Image, Logits, TerminalSlot, place
from conformance.harness.engine import StateError
from conformance.harness.prompts.layouts import ImagePiece, PromptError, Vocabulary, byte_vocabulary
from conformance.harness.prompts.scaling import scaled
from conformance.harness.prompts.strategies import transcripts
from conformance.harness.prompts.transcript import Screenshot, Step, Text, Transcript
from conformance.harness.report.arms import Bound, answer, mean_depth, write_forms
from tools.arms import in_turns


class ListMemory:
    """A hybrid memory in miniature: attention keeps a cell for every token, the recurrent half one digest of all.

    As in llama.cpp, a removal that the recurrent half cannot follow is refused, a partial state is the recurrent half
    alone, and loading it leaves the attention cells as they are.
    """

    def __init__(self) -> None:
        self.cells: list[tuple[int, bytes]] = []
        self.digest, self.end = b"", -1
        self.kept: list[tuple[bytes, int, list[tuple[int, bytes]]]] = []

    def decode(self, tokens: npt.ArrayLike, *, start: int, sequence: int) -> Logits:
        for place_of, token in enumerate(np.asarray(tokens).tolist()):
            self._append(start + place_of, str(token).encode())
        return self._logits()

    def decode_embeddings(
        self, embeddings: npt.NDArray[np.float32], positions: npt.NDArray[np.int32], *, sequence: int
    ) -> Logits:
        for row, position in zip(embeddings, positions.T.reshape(len(embeddings), -1), strict=True):
            self._append(int(position[0]), row.tobytes() + position.tobytes())
        return self._logits()

    def _append(self, position: int, content: bytes) -> None:
        self.cells.append((position, content))
        self.digest = hashlib.sha256(self.digest + content).digest()
        self.end = max(self.end, position)

    def _logits(self) -> Logits:
        seen = hashlib.sha256(repr(self.cells).encode() + self.digest).digest()
        return np.frombuffer(seen, np.uint8).astype(np.float32)[np.newaxis]

    def save(self, sequence: int, flags: Any) -> npt.NDArray[np.uint8]:
        self.kept.append((self.digest, self.end, list(self.cells)))
        return np.array([len(self.kept) - 1, int(flags)], np.uint8)

    def load(self, blob: npt.NDArray[np.uint8], sequence: int, flags: Any) -> int:
        self.digest, self.end, cells = self.kept[int(blob[0])]
        if not flags:
            self.cells = list(cells)
        return len(blob)

    def seq_rm(self, sequence: int, begin: int) -> bool:
        if begin == 0:
            self.digest, self.end = b"", -1
        if self.end >= begin:
            return False
        self.cells = [cell for cell in self.cells if cell[0] < begin]
        return True


def picture(seed: int, width: int, height: int) -> Image:
    return Image(np.full((width * height, 2), seed, np.float32), width, height)


PARTS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 9), min_size=0, max_size=3),
        st.builds(picture, st.integers(0, 5), st.integers(1, 3), st.integers(1, 3)),
    ),
    max_size=4,
)


@given(
    preamble=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    steps=st.lists(st.tuples(PARTS, st.integers(0, 3), st.lists(st.integers(0, 9), max_size=4)), max_size=5),
    checkpoints=st.sampled_from(["partial", "full", "on_device"]),
)
def test_a_terminal_slot_is_what_a_prefill_of_everything_is(
    preamble: list[int], steps: list[tuple[list[Any], int, list[int]]], checkpoints: CheckpointKind
) -> None:
    memory = ListMemory()
    slot = TerminalSlot(Cursor(memory, components=4, checkpoints=checkpoints))
    slot.begin(preamble)
    history = list(preamble)
    for window, n_action, said in steps:
        seen = slot.look(window)
        fresh = Cursor(ListMemory(), components=4)
        fresh.text(history)
        for part in window:
            (fresh.image if isinstance(part, Image) else fresh.text)(part)
        assert fresh.logits is not None
        assert seen.tolist() == fresh.logits.tolist()
        assert (slot.cursor.cells, slot.cursor.position) == (fresh.cells, fresh.position)
        assert slot.cursor.cells == len(memory.cells)
        for token in range(n_action):
            slot.decode(token)
        slot.remember(said)
        history += said


def test_a_slot_without_a_preamble_has_nothing_to_show() -> None:
    with pytest.raises(StateError, match="begin with a preamble"):
        TerminalSlot(Cursor(ListMemory(), components=4)).look([])


@pytest.mark.parametrize("refuses", ["load", "seq_rm"])
def test_a_refused_restore_is_said(refuses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ListMemory()
    slot = TerminalSlot(Cursor(memory, components=4))
    slot.begin([1, 2])
    slot.look([[3]])
    monkeypatch.setattr(memory, refuses, lambda *_, **__: 0)
    with pytest.raises(StateError, match="the context refused"):
        slot.remember([4])


def test_an_image_is_laid_out_row_by_row_from_its_position() -> None:
    assert place(3, 2, 7).tolist() == [[7] * 6, [7, 7, 7, 8, 8, 8], [7, 8, 9, 7, 8, 9], [0] * 6]


class ListReader:
    """Texts by bytes, screenshots as pictures."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def image(self, screenshot: Screenshot) -> Image:
        return picture(screenshot.seed, screenshot.width, screenshot.height)


@given(
    transcript=transcripts(preamble=(1, 6), steps=(1, 6), text=(0, 8), width=(1, 3), height=(1, 3)),
    window=st.integers(1, 3),
    name=st.sampled_from(ARMS),
)
def test_every_arm_prefills_what_is_counted_and_holds_its_prompt(
    transcript: Transcript, window: int, name: ArmName
) -> None:
    reader: Any = ListReader(byte_vocabulary())
    memory = ListMemory()
    arm = ARM_TYPES[name](Cursor(memory, components=4), reader, transcript, window)
    for expected in counts(name, transcript, window, reader.vocabulary):
        asked = arm.look(expected.step)
        assert (asked.reused, arm.cursor.cells) == (expected.reused_tokens, asked.prompt.n_tokens)
        fresh = Cursor(ListMemory(), components=4)
        for together in calls(asked.prompt.pieces):
            for piece in together:
                if isinstance(piece, ImagePiece):
                    fresh.image(reader.image(piece.screenshot))
                else:
                    fresh.text(piece.tokens)
        assert fresh.logits is not None
        assert asked.logits.tolist() == fresh.logits.tolist()
        arm.act(expected.step)
        assert (len(memory.cells), arm.cursor.position) == (expected.live_cells, expected.n_positions)


def test_embeddings_are_kept_by_what_the_pixels_are_and_forgotten_oldest_first() -> None:
    asked: list[int] = []

    def encode(pixels: npt.NDArray[np.uint8]) -> Image:
        asked.append(int(pixels[0, 0, 0]))
        return picture(asked[-1], 1, 1)

    kept = Embeddings(encode, keep=2)
    shades = {shade: np.full((2, 3, 3), shade, np.uint8) for shade in range(3)}
    for shade in (0, 1, 0, 2, 0, 1):
        assert kept(shades[shade].copy()).embeddings[0, 0] == shade
    assert kept(shades[1].reshape(3, 2, 3)).embeddings[0, 0] == 1
    assert asked == [0, 1, 2, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "slides", "works"),
    [((20, 28, 36), False, True), ((20, 28, 36), True, False), ((20, 20, 20), False, False)],
)
def test_cells_are_read_from_sizes_where_these_grow_evenly(sizes: tuple[int, ...], slides: bool, works: bool) -> None:
    gauge = CellGauge(sizes, slides=slides)
    assert gauge.works is works
    if works:
        assert gauge.cells(20 + 8 * 41) == 42


# -- journal


def profile(arm: ArmName, step: int, prefilled: int = 10, reused: int = 5, seconds: float = 1.0) -> StepProfile:
    return StepProfile(
        arm=arm,
        task="task",
        step=step,
        prompt_tokens=prefilled + reused,
        reused_tokens=reused,
        prefilled_tokens=prefilled,
        decoded_tokens=2,
        hit_ratio=reused / (prefilled + reused),
        hit_ratio_label="measured",
        prefill_seconds=seconds,
        decode_seconds=0.5,
        tokens_per_second=4.0,
        live_cells=100 * step,
    )


def run(**settings: Any) -> RunSettings:
    return RunSettings(arm="evict", build={"version": "1"}, model={"file": "m"}, settings={"window": 3, **settings})


def test_a_journal_goes_on_behind_what_was_finished(tmp_path: Path) -> None:
    path = tmp_path / "evict.jsonl"
    first = Journal(path, run())
    for step in (1, 2):
        first.append(profile("evict", step))
    with path.open("a") as file:
        file.write('{"arm": "evict", "ta')  # the run was killed here
    second = Journal(path, run())
    assert [step.step for step in second.steps] == [1, 2]
    second.append(profile("evict", 3))
    assert Journal(path, run()).steps == [profile("evict", step) for step in (1, 2, 3)]


def test_a_journal_that_holds_no_step_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "evict.jsonl"
    Journal(path, run())
    assert Journal(path, run(window=4)).steps == []
    path.write_text("")
    assert Journal(path, run()).steps == []


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda lines: [lines[0], lines[1], "{}", *lines[3:]], "evict.jsonl:3: "),
        (lambda lines: [lines[0], *lines[2:]], "evict.jsonl:2: step 2"),
        (lambda lines: [lines[0].replace('"window":3', '"window":2'), *lines[1:]], "settings window: 2 there, 3 here"),
    ],
)
def test_a_journal_names_what_is_wrong(tmp_path: Path, edit: Callable[[list[str]], list[str]], says: str) -> None:
    path = tmp_path / "evict.jsonl"
    journal = Journal(path, run())
    for step in (1, 2, 3):
        journal.append(profile("evict", step))
    path.write_text("\n".join(edit(path.read_text().splitlines())) + "\n")
    with pytest.raises(ProfileError) as refused:
        Journal(path, run())
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


# -- scaling


@given(transcript=transcripts(), factor=st.floats(0.01, 1))
def test_a_scaled_transcript_keeps_its_shape(transcript: Transcript, factor: float) -> None:
    strings = [text for step in transcript.steps for text in (step.action, step.tool) if text and text.string]
    if factor < 1 and strings:
        with pytest.raises(PromptError, match="given in full"):
            scaled(transcript, factor)
        return
    small = scaled(transcript, factor)
    assert len(small.steps) == len(transcript.steps)
    for before, after in zip(transcript.steps, small.steps, strict=True):
        assert (before.screenshot is None) == (after.screenshot is None)
        if before.screenshot and after.screenshot:
            assert after.screenshot.seed == before.screenshot.seed
            assert 1 <= after.screenshot.n_tokens <= before.screenshot.n_tokens
    assert small.preamble.tokens == max(1, round((transcript.preamble.tokens or 0) * factor))


@pytest.mark.parametrize("factor", [0, -1, 1.5, float("nan")])
def test_a_scale_that_is_no_share_is_refused(factor: float) -> None:
    one = Transcript(preamble=Text.drawn(0, 1), steps=(Step(action=Text.drawn(1, 1)),))
    with pytest.raises(PromptError, match="give a share"):
        scaled(one, factor)


# -- report


def profiles(steps: int, **seconds: Sequence[float]) -> dict[ArmName, list[StepProfile]]:
    """Steps of these seconds of prefill, over and over."""
    return {
        arm: [
            profile(arm, step, 20 if arm == "evict" else 10, 5, seconds[arm][step % len(seconds[arm])])
            for step in range(1, steps + 1)
        ]
        for arm in ARMS
        if arm in seconds
    }


def counted(found: dict[ArmName, list[StepProfile]]) -> dict[ArmName, tuple[StepCounts, ...]]:
    step = Step(screenshot=Screenshot(width=2, height=2), action=Text.drawn(1, 2))
    task = Transcript(preamble=Text.drawn(0, 5), steps=(step,) * len(found["terminal_slot"]))
    return {arm: counts(arm, task, 1, byte_vocabulary()) for arm in found}


def answers(found: dict[ArmName, list[StepProfile]]) -> tuple[str, str]:
    return answer(found, counted(found))


@pytest.mark.parametrize(
    ("steps", "slot", "verdict"),
    [
        (8, [0.2], "(2.14 to 2.14 with 95% confidence, computed from 8 measured steps): a terminal slot is worth it."),
        (
            8,
            [2.0],
            "(0.60 to 0.60 with 95% confidence, computed from 8 measured steps): a terminal slot is not worth it.",
        ),
        (8, [0.1, 2.0, 0.4, 1.2], "computed from 8 measured steps): UNKNOWN whether a terminal slot is worth it."),
        (5, [0.2], ": UNKNOWN whether a terminal slot is worth it, since 5 steps are too few for an interval."),
    ],
)
def test_the_answer_stands_in_two_lines_and_says_when_it_cannot_tell(
    steps: int, slot: list[float], verdict: str, tmp_path: Path
) -> None:
    found = profiles(steps, evict=[1.0], append_only=[0.1], terminal_slot=slot)
    from_counts, measured = answers(found)
    assert f"prefills {10 * steps} tokens, 0.50 of evict, as the document runs it ({20 * steps}; " in from_counts, (
        from_counts
    )
    assert f"of evict, as the document runs it ({steps}.0 s)" in measured
    assert measured.endswith(verdict), measured
    assert "\n" not in from_counts + measured
    assert answers(found) == (from_counts, measured)
    write_forms(tmp_path, found, counted(found), Bound((8, 6)), {"model": "a <b> model"})
    page = (tmp_path / "arms.html").read_text()
    assert "a &lt;b&gt; model" in page
    assert measured.split("; tokens")[0] in page
    assert (tmp_path / "arms.png").read_bytes().startswith(b"\x89PNG")


def test_the_cheapest_other_arm_decides_whether_a_slot_is_worth_it_and_an_interval_holds_for_both() -> None:
    surely = profiles(8, evict=[5.0], evict_ideal=[1.0], terminal_slot=[0.4])
    assert "evict, with a checkpoint at every change point takes 1.67 times" in answers(surely)[1]
    close = profiles(8, evict=[0.1, 2.1], evict_ideal=[1.1], terminal_slot=[1.0])
    assert answers(close)[1].endswith("UNKNOWN whether a terminal slot is worth it.")


def test_mean_depth_counts_what_stands_in_front() -> None:
    assert mean_depth([profile("evict", 1, prefilled=10, reused=5), profile("evict", 2, 0, 5)]) == 10


def test_arms_take_turns_and_one_that_was_ahead_waits() -> None:
    def left(*done: int) -> Iterator[int]:
        yield from done

    runs = {"evict": left(2, 3, 4), "append_only": left(0, 1, 2, 3, 4)}
    turns = list(in_turns(runs, one_by_one=False))  # type: ignore[arg-type]
    assert turns[:3] == [("evict", 2), ("append_only", 0), ("append_only", 1)]
    assert abs(turns.index(("evict", 4)) - turns.index(("append_only", 4))) == 1
    again = {"evict": left(0, 1), "append_only": left(0, 1)}
    assert [arm for arm, _ in in_turns(again, one_by_one=True)] == ["evict"] * 2 + ["append_only"] * 2  # type: ignore[arg-type]
