"""Walks: the plain model is right about an honest library, and finds, shrinks and writes down what a lying one does.

The library is a fake that keeps token lists and whose logits are a function of them, so no build is needed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness.bench import Setup
from conformance.harness.contract.known import BuildName, Known, load_known_failures, match
from conformance.harness.contract.needs import Subject, kinds_of
from conformance.harness.contract.schema import Kind
from conformance.harness.engine import ContextSettings, Logits, ModelError
from conformance.harness.exam.examination import SPECS, contract
from conformance.harness.machine.avoid import AVOIDABLE, avoidable
from conformance.harness.machine.findings import Finding
from conformance.harness.machine.found import Found, cluster_of, faults
from conformance.harness.machine.history import Held, Op, Script, embedding_positions
from conformance.harness.machine.script import write_script
from conformance.harness.machine.search import Search
from conformance.harness.machine.shrink import shrink
from conformance.harness.machine.stage import Memory, Seen
from conformance.harness.machine.steps import STEPS, random_steps, run
from conformance.harness.machine.walk import References, Step, Walk, settings_of
from fixtures import models

SCRIPTS = SPECS / "known_failures"
CONTRACT = contract()
N_VOCAB = 50
Row = tuple[int, int, int]  # position, all that its token saw, and the number of its cell


def content(rows: Sequence[Row]) -> int:
    """What a sequence holds, as a number; a hash of numbers is the same in every run."""
    return hash(tuple(row[:2] for row in rows))


def logits_after(rows: Sequence[Row]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits that any other history would change."""
    seed = content(rows) % (1 << 32)
    return np.random.default_rng(seed).standard_normal(N_VOCAB).astype(np.float32)


class FakeStage:
    """An honest attention cache: what a later token saw stays part of it, whatever is removed afterwards."""

    def open(self, settings: ContextSettings) -> Memory:
        self.n, self.unified = settings.n_seq_max, settings.kv_unified
        self.cells = settings.n_ctx if self.unified else settings.n_ctx // self.n
        self.held: dict[tuple[int, int], list[Row]] = {(c, s): [] for c in (0, 1) for s in range(self.n)}
        self.blobs: list[Any] = []
        self.given = 0
        return Memory(
            can_shift=True, n_rs_seq=0, recurrent=False, attention=True, window=0, n_vocab=N_VOCAB,
            position_components=1, cells=self.cells,
        )  # fmt: skip

    def call(self, name: str, context: int, *arguments: Any) -> Any:
        return getattr(self, name)(context, *arguments)

    def observe(self, context: int) -> tuple[Seen, ...]:
        return tuple(self.look(context, s) for s in range(self.n))

    def look(self, context: int, sequence: int) -> Seen:
        held = self.held[context, sequence]
        positions = tuple(row[0] for row in held)
        low, high = self.ends(context, sequence)
        size = 10 + len(held)
        return Seen(low, high, size, size, content(held), (positions,), ())

    def ends(self, context: int, sequence: int) -> tuple[int, int]:
        held = self.held.get((context, sequence))
        return (held[0][0], held[-1][0]) if held else (-1, -1)

    def replayed(self, script: Script) -> FakeStage:
        alone = FakeStage()
        alone.open(ContextSettings(n_ctx=1 << 20))
        for op in script:
            if op[0] in ("dec", "emb"):
                alone.repeat(op)
            else:
                getattr(alone, op[0])(0, 0, *op[1:])
        return alone

    def repeat(self, op: Op) -> Logits:
        if op[0] == "dec":
            logits = self.decode(0, op[2], range(op[1], op[1] + len(op[2])), 0)[1]
        else:
            logits = self.embed(0, op[2], op[3], op[4], op[1], 0)[1]
        assert logits is not None
        return logits

    def replay(self, settings: ContextSettings, script: Script, op: Op) -> Logits:
        return self.replayed(script).repeat(op)

    def state_deviation(self, context: int, sequence: int, settings: ContextSettings, script: Script) -> float:
        return float(content(self.held[context, sequence]) != content(self.replayed(script).held[0, 0]))

    def noise(self, settings: ContextSettings) -> float:
        return 0.0

    def decode(
        self, context: int, tokens: Any, positions: Any, sequences: Any, abort_after: int = 0
    ) -> tuple[int, Logits | None]:
        ids = [[sequences]] * len(tokens) if isinstance(sequences, int) else sequences
        if positions is None:
            start = self.ends(context, ids[0][0])[1] + 1
            positions = [start + i for i in range(len(tokens))]
        before = {s: list(rows) for (c, s), rows in self.held.items() if c == context}
        code, rows = self.entered(context, tokens, positions, ids)
        if code:
            self.held.update({(context, s): rows_ for s, rows_ in before.items()})
            return code, None
        return 0, np.array(rows)

    def entered(self, context: int, tokens: Any, positions: Any, ids: Any) -> tuple[int, list[Logits]]:
        rows: list[Logits] = []
        for token, position, several in zip(tokens, positions, ids, strict=True):
            if len(several) > 1 and not self.unified:
                return -1, []
            self.given += 1
            for s in several:
                held = self.held[context, s] if 0 <= s < self.n else None
                if held is None or not 0 <= token < N_VOCAB + 10**6 or token == N_VOCAB:
                    return -1, []
                if held and position != held[-1][0] + 1:
                    return -1, []
                held.append((position, hash((token, content(held))), self.given))
            if self.used(context, several[0]) > self.cells:
                return 1, []
            rows.append(logits_after(self.held[context, several[0]]))
        return (0, rows) if rows else (-1, [])

    def used(self, context: int, sequence: int) -> int:
        """Cells that the sequence's cache has given away; sequences that hold the same rows share them."""
        if not self.unified:
            return len(self.held[context, sequence])
        return len({row for (c, _), rows in self.held.items() if c == context for row in rows})

    def embed(
        self, context: int, first: int, n: int, width: int, start: int | None, sequence: int
    ) -> tuple[int, Logits | None]:
        tokens = [N_VOCAB + 1 + first + i for i in range(n)]
        return self.decode(context, tokens, None if start is None else range(start, start + n), sequence)

    def rm(self, context: int, sequence: int, begin: int, end: int) -> bool:
        begin, end = max(begin, 0), end if end >= 0 else 1 << 30
        for s in range(self.n) if sequence == -1 else {sequence} & set(range(self.n)):
            self.held[context, s] = [row for row in self.held[context, s] if not begin <= row[0] < end]
        return True

    def cp(self, context: int, source: int, destination: int, begin: int, end: int) -> None:
        end = end if end >= 0 else 1 << 30
        if (context, source) in self.held and (context, destination) in self.held and source != destination:
            copied = [row for row in self.held[context, source] if max(begin, 0) <= row[0] < end]
            self.held[context, destination] = copied

    def keep(self, context: int, sequence: int) -> None:
        for s in range(self.n):
            if s != sequence:
                self.held[context, s] = []

    def add(self, context: int, sequence: int, begin: int, end: int, delta: int) -> None:
        self.moved(context, sequence, begin, end, lambda position: position + delta)

    def div(self, context: int, sequence: int, begin: int, end: int, divisor: int) -> None:
        self.moved(context, sequence, begin, end, lambda position: position // divisor if divisor else position)

    def moved(self, context: int, sequence: int, begin: int, end: int, to: Any) -> None:
        if (context, sequence) in self.held:
            held = self.held[context, sequence]
            end = end if end >= 0 else 1 << 30
            self.held[context, sequence] = [(to(p) if begin <= p < end else p, seen, cell) for p, seen, cell in held]

    def clear(self, context: int, contents: bool) -> None:
        for s in range(self.n):
            self.held[context, s] = []

    def save(self, context: int, sequence: int, flags: int) -> tuple[int, int, int]:
        self.blobs.append(list(self.held[context, sequence]))
        return len(self.blobs) - 1, 10, 10

    def save_short(self, context: int, sequence: int, missing: int) -> int:
        return 0

    def load(self, context: int, slot: int, sequence: int, flags: int, thousandths: int = 1000) -> tuple[int, int]:
        if thousandths < 1000 or not 0 <= sequence < self.n:
            return 0, 5
        before = self.held[context, sequence]
        self.held[context, sequence] = self.in_new_cells(self.blobs[slot])
        if self.used(context, sequence) > self.cells:
            self.held[context, sequence] = before
            return 0, 10
        return 10, 10

    def in_new_cells(self, rows: Sequence[Row]) -> list[Row]:
        self.given += len(rows)
        return [(position, seen, self.given - i) for i, (position, seen, _) in enumerate(rows)]

    def load_noise(self, context: int, slot: int, sequence: int) -> tuple[int, int]:
        return 0, 10

    def through_file(self, context: int, source: int, destination: int) -> int:
        return self.load(context, self.save(context, source, 0)[0], destination, 0)[0]

    def save_context(self, context: int) -> tuple[int, int, int]:
        self.blobs.append([list(self.held[context, s]) for s in range(self.n)])
        return len(self.blobs) - 1, 10, 10

    def load_context(self, context: int, slot: int, thousandths: int = 1000) -> tuple[int, int]:
        if thousandths < 1000:
            return 0, 5
        for s in range(self.n):
            self.held[context, s] = list(self.blobs[slot][s])
        return 10, 10

    def context_through_file(self, context: int, destination: int) -> bool:
        return self.load_context(destination, self.save_context(context)[0])[0] > 0


class ForgetsTheSuffix(FakeStage):
    """Keeps one token too many."""

    def rm(self, context: int, sequence: int, begin: int, end: int) -> bool:
        return super().rm(context, sequence, begin + (begin > 0 and end < 0), end)


class CopiesNothing(FakeStage):
    def cp(self, context: int, source: int, destination: int, begin: int, end: int) -> None:
        pass


class LoadsAnotherToken(FakeStage):
    def load(self, context: int, slot: int, sequence: int, flags: int, thousandths: int = 1000) -> tuple[int, int]:
        answer = super().load(context, slot, sequence, flags, thousandths)
        if answer[0] and self.held[context, sequence]:
            position, _, cell = self.held[context, sequence][0]
            self.held[context, sequence][0] = (position, 7, cell)
        return answer


class AcceptsWhatIsCut(FakeStage):
    def load(self, context: int, slot: int, sequence: int, flags: int, thousandths: int = 1000) -> tuple[int, int]:
        return (5, 5) if thousandths < 1000 else super().load(context, slot, sequence, flags)


class AcceptsEveryBatch(FakeStage):
    def decode(
        self, context: int, tokens: Any, positions: Any, sequences: Any, abort_after: int = 0
    ) -> tuple[int, Logits | None]:
        code, logits = super().decode(context, tokens, positions, sequences, abort_after)
        return max(code, 0), logits


class TouchesANeighbour(FakeStage):
    """A save changes what the first sequence holds."""

    def save(self, context: int, sequence: int, flags: int) -> tuple[int, int, int]:
        if sequence and self.held[context, 0]:
            position, _, cell = self.held[context, 0][-1]
            self.held[context, 0][-1] = position, 7, cell
        return super().save(context, sequence, flags)


class LosesACell(FakeStage):
    """After a clear there is one cell less."""

    def clear(self, context: int, contents: bool) -> None:
        super().clear(context, contents)
        self.cells -= 1


class AnnouncesTooMuch(FakeStage):
    """Of a sequence that begins late."""

    def look(self, context: int, sequence: int) -> Seen:
        seen = super().look(context, sequence)
        return replace(seen, announced=seen.announced + (seen.low > 0))


class NamesWhatItDoesNotHold(FakeStage):
    """The bytes lack the first of many cells."""

    def look(self, context: int, sequence: int) -> Seen:
        seen = super().look(context, sequence)
        cells = (seen.cells or ((),))[0]
        return replace(seen, cells=(cells[len(cells) > 20 :],))


class MixesUpEmbeddings(FakeStage):
    """Every second embedding is the one before."""

    def embed(
        self, context: int, first: int, n: int, width: int, start: int | None, sequence: int
    ) -> tuple[int, Logits | None]:
        return super().embed(context, first - first % 2, n, width, start, sequence)


WIDE = settings_of(3, 0, True, True, False, 32, "f16")
SNUG = settings_of(3, 0, False, True, False, 32, "f16", snug=True)
TIGHT = settings_of(3, 0, True, True, False, 32, "f16", snug=True)


def walked(stage: FakeStage, steps: Sequence[Step], settings: ContextSettings = WIDE) -> tuple[Finding | None, Walk]:
    walk = Walk(stage, settings, References(stage, 1e-5, 100))
    return run(walk, steps), walk


@given(st.integers(0, 1 << 20), st.sampled_from([WIDE, SNUG, TIGHT]))
def test_an_honest_library_gives_no_finding(seed: int, settings: ContextSettings) -> None:
    found, walk = walked(FakeStage(), random_steps(seed, 60), settings)
    assert found is None, (str(found), walk.lines)


def test_where_a_cache_type_is_refused_another_one_is_walked() -> None:
    class Plain(FakeStage):
        def open(self, settings: ContextSettings) -> Memory:
            if settings.type_k == "q8_0":
                raise ModelError("no such cache")
            return super().open(settings)

    found, walk = walked(Plain(), random_steps(0, 20), WIDE.changed(type_k="q8_0"))
    assert found is None
    assert walk.settings.type_k == "f16"
    assert walk.lines


def test_a_snug_cache_is_full_in_some_walks() -> None:
    codes = set()

    class Watched(FakeStage):
        def decode(self, *arguments: Any) -> tuple[int, Logits | None]:
            code, logits = super().decode(*arguments)
            codes.add(code)
            return code, logits

    for seed in range(20):
        walked(Watched(), [step for step in random_steps(seed, 60) if step[0] == "decode"], SNUG)
    assert 1 in codes


@pytest.mark.parametrize(
    ("stage", "settings", "kind", "last"),
    [
        (ForgetsTheSuffix, WIDE, "wrong positions", "rm"),
        (CopiesNothing, WIDE, "wrong positions", "cp"),
        (LoadsAnotherToken, WIDE, "wrong logits", "decode"),
        (AcceptsWhatIsCut, WIDE, "wrong result", "load"),
        (AcceptsEveryBatch, WIDE, "wrong result", "decode"),
        (TouchesANeighbour, WIDE, "wrong state", "save"),
        (LosesACell, SNUG, "wrong result", "decode"),
        (AnnouncesTooMuch, WIDE, "wrong result", "add"),
        (NamesWhatItDoesNotHold, WIDE, "wrong state", "decode"),
        (MixesUpEmbeddings, WIDE, "wrong logits", "embed"),
    ],
)
def test_a_lie_is_found_and_shrunk_to_a_few_calls(
    stage: type[FakeStage], settings: ContextSettings, kind: str, last: str
) -> None:
    for seed in range(200):
        steps = random_steps(seed, 40)
        found, walk = walked(stage(), steps, settings)
        if found is not None and found.kind == kind and walk.last == last:
            break
    assert found is not None

    def fails(fewer: Sequence[Step]) -> bool:
        met, walk = walked(stage(), fewer, settings)
        return met is not None and (met.kind, walk.last) == (kind, last)

    shrunk = shrink(steps, fails, float("inf"))
    found, walk = walked(stage(), shrunk, settings)
    assert found is not None
    assert (found.kind, walk.last) == (kind, last)
    assert len(walk.lines) <= 7


def test_every_step_is_made_in_some_walk() -> None:
    made = {name for seed in range(60) for name, *_ in random_steps(seed, 40)}
    assert made == set(STEPS)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 59))
def test_taking_back_a_suffix_is_as_if_it_was_never_decoded(first: int, second: int, begin: int) -> None:
    tokens = tuple(range(first + second))
    held = Held().decoded(tokens[:first]).decoded(tokens[first:]).without_suffix(begin)
    kept = tokens[:begin]
    assert held.positions == tuple(range(len(kept)))
    assert tuple(token for op in held.script for token in op[2]) == kept


def test_an_inner_removal_stays_in_the_history_because_later_tokens_have_seen_it() -> None:
    held = Held().decoded((1, 2, 3, 4, 5)).without(1, 3, judged=True)
    assert held.positions == (0, 3, 4)
    assert held.script == (("dec", 0, (1, 2, 3, 4, 5)), ("rm", 1, 3))
    assert held.next == 5


def test_a_script_is_python_and_short() -> None:
    text = write_script("a.py", "A title", ["c = context()", "verdict(1, 1)"])
    ast.parse(text)
    assert len(text.splitlines()) <= 52


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_the_script_of_a_known_failure_needs_no_part_of_this_project(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = {
        str(node.module if isinstance(node, ast.ImportFrom) else name.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert imported <= {"ctypes", "sys", "os", "subprocess", "tempfile", "numpy", "llama_cpp"}
    assert len(path.read_text().splitlines()) <= 60


def test_whatever_a_walk_keeps_clear_of_has_a_check_of_its_own_and_is_a_known_failure() -> None:
    known = {entry.entry.id for entry in load_known_failures(SCRIPTS)}
    assert set(AVOIDABLE) <= known
    assert set(AVOIDABLE) <= set(CONTRACT.invariants)


QWEN3 = Subject("qwen3-mini", Path("qwen3-mini.gguf"), frozenset[Kind]({"attention"}))
MAMBA2 = Subject("mamba2-mini", Path("mamba2-mini.gguf"), frozenset[Kind]({"recurrent"}))
BUNDLED_NOW = BuildName(package="llama-cpp-python", version="0.3.36")
KEEPING = "SM-04/keeping-one-removes-the-others"


@pytest.mark.parametrize(
    ("subject", "build", "avoided"),
    [
        (QWEN3, BUNDLED_NOW, True),
        (MAMBA2, BUNDLED_NOW, False),
        (QWEN3, BuildName(package="llama-cpp-python", version="0.3.35"), False),
        (QWEN3, BuildName(package="some-fork", version="0.2"), False),
    ],
)
def test_a_known_failure_is_kept_clear_of_where_its_entry_covers_the_build_and_the_model(
    subject: Subject, build: BuildName, avoided: bool
) -> None:
    assert (KEEPING in avoidable(load_known_failures(SCRIPTS), subject, build)) == avoided


class KeepsTheOthers(FakeStage):
    """As the bundled build: keeping one sequence removes nothing where each has a stream."""

    def keep(self, context: int, sequence: int) -> None:
        if self.unified:
            super().keep(context, sequence)


STREAMS = settings_of(3, 0, False, True, False, 32, "f16")


def test_what_is_kept_clear_of_is_met_where_it_is_not_known() -> None:
    steps: list[Step] = [("decode", 0, 5, 0), ("keep", 1, 0, 0)]
    stage = KeepsTheOthers()
    references = References(stage, 1e-5, 100)
    assert run(Walk(stage, STREAMS, references, {KEEPING}), steps) is None
    found = run(Walk(stage, STREAMS, references), steps)
    assert found is not None
    assert found.kind == "wrong positions"


class Enough(Exception):
    """A search has gone on for long enough."""


def searched(
    stage: FakeStage, folder: Path, *, known: frozenset[str] = frozenset(), avoid: bool = True, rounds: int = 30
) -> Search:
    """A search on a fake until it has met something new, or so many rounds."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if len(search.found) > before or len(lines) == rounds:
            raise Enough

    setup, avoided = Setup("bundled", "qwen3-mini"), set(known) if avoid else set()
    search = Search(setup, 1e-5, 100, folder, known, avoided, say, shrink_seconds=float("inf"))
    search.resume()
    before = len(search.found)
    with pytest.raises(Enough):
        search.search(stage, float("inf"), seed=0)
    return search


def test_a_search_keeps_what_it_finds_goes_on_from_there_and_says_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.harness.machine.search.shows", lambda script, model: True)
    first = searched(KeepsTheOthers(), tmp_path, known=frozenset({KEEPING}), avoid=False)
    assert set(first.found) == {KEEPING}
    assert first.found[KEEPING].known == KEEPING
    assert not first.found[KEEPING].is_fixed
    assert list((tmp_path / "examples").rglob("*"))
    ast.parse((tmp_path / f"{first.found[KEEPING].slug}.py").read_text())

    again = searched(KeepsTheOthers(), tmp_path, known=frozenset({KEEPING}), avoid=False, rounds=1)
    assert again.before["next_seed"] > 0
    assert again.before["walks"] == first.walks
    assert set(again.found) == {KEEPING}
    assert again.found[KEEPING].count == first.found[KEEPING].count  # known by now, and kept clear of

    cured = searched(FakeStage(), tmp_path, rounds=1)
    assert cured.found[KEEPING].is_fixed
    assert KEEPING not in cured.avoid
    assert [(fault.cluster, fault.is_fixed) for fault in faults(cured.found.values())] == [(KEEPING, True)]


def test_a_fault_that_no_entry_covers_is_not_known_though_its_family_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.harness.machine.search.shows", lambda script, model: True)
    search = searched(KeepsTheOthers(), tmp_path)
    assert search.found[KEEPING].known is None


def made_up(cluster: str, model: str, *, known: str | None = None, calls: int = 3, is_fixed: bool = False) -> Found:
    return Found(
        cluster, model, "bundled", {}, [], ["call"] * calls, "", "", "", None, 0.0, known, 2, True, is_fixed
    )  # fmt: skip


def test_findings_of_one_cluster_are_one_fault_over_all_models() -> None:
    listed = faults(
        [
            made_up("wrong logits, rm, unified, hybrid", "qwen35-mini", calls=5),
            made_up("SM-01/a", "qwen35-mini", known="SM-01/a"),
            made_up("wrong logits, rm, unified, hybrid", "lfm2-mini"),
            made_up("wrong logits, rm, streams, hybrid", "lfm2-mini", is_fixed=True),
        ]
    )
    assert [(fault.cluster, fault.count, fault.models, len(fault.first.calls), fault.is_fixed) for fault in listed] == [
        ("wrong logits, rm, streams, hybrid", 2, ["lfm2-mini"], 3, True),
        ("wrong logits, rm, unified, hybrid", 4, ["lfm2-mini", "qwen35-mini"], 3, False),
        ("SM-01/a", 2, ["qwen35-mini"], 3, False),
    ]


@pytest.mark.parametrize(
    ("other", "same"),
    [({}, True), ({"n_seq_max": 5}, True), ({"kv_unified": True}, False), ({"type_k": "q8_0"}, False)],
)
def test_findings_with_another_kind_of_settings_are_another_cluster(other: dict[str, Any], same: bool) -> None:
    def cluster(settings: ContextSettings) -> str:
        found, walk = walked(ForgetsTheSuffix(), [("decode", 0, 5, 0), ("remove_suffix", 0, 1, 0)], settings)
        assert found is not None
        return cluster_of(found, walk, settings)

    assert (cluster(STREAMS) == cluster(STREAMS.changed(**other))) == same


@given(st.integers(0, 100), st.integers(1, 9), st.integers(0, 3))
def test_an_image_holds_one_position_and_a_row_of_embeddings_many(start: int, n: int, width: int) -> None:
    positions = embedding_positions(start, n, width, 4)
    assert positions.shape == (4, n)
    assert set(positions[0].tolist()) == ({start} if width else set(range(start, start + n)))
    held = Held().decoded(tuple(range(start))).embedded(0, n, width)
    assert held.positions[start:] == tuple(positions[0].tolist())


def shown_on() -> Iterator[tuple[Known, str]]:
    """Every known failure of the bundled build, and the first model of its check that it concerns."""
    for known in load_known_failures(SCRIPTS):
        listed = CONTRACT[known.entry.id].models
        for name in (*known.entry.models, *(models.names() if listed == ("all",) else listed)):
            subject = Subject(name, models.path(name), kinds_of(models.recipe(name).census))
            if match([known], known.entry.id, subject, BUNDLED_NOW):
                yield known, name
                break


@pytest.mark.parametrize(
    ("known", "model"), [*shown_on()], ids=lambda given: getattr(given, "entry", None) and given.entry.id
)
def test_every_known_failure_of_the_bundled_build_shows_when_its_script_is_run(known: Known, model: str) -> None:
    done = subprocess.run(
        [sys.executable, str(known.replay), str(models.path(model))], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr


def test_the_docs_name_every_known_failure_of_the_bundled_build() -> None:
    page = (SPECS.parent / "docs" / "sequence-memory.md").read_text()
    topics = ("SM", "RB", "RP", "SP", "BT", "DC")
    missing = {known.entry.id for known, _ in shown_on() if known.entry.id.startswith(topics)} - set(page.split())
    assert not missing
