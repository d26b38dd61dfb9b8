"""Walks: the plain model is right about an honest library, and finds, shrinks and writes down what a lying one does.

The library is a fake that keeps token lists and whose logits are a function of them, so no build is needed.
"""

from __future__ import annotations

import ast
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness.contract.known import load_known_failures
from conformance.harness.engine import ContextSettings, Logits
from conformance.harness.exam.examination import SPECS, contract
from conformance.harness.machine.script import write_script
from conformance.harness.machine.search import shrink
from conformance.harness.machine.stage import Positions, Script
from conformance.harness.machine.walk import AVOIDABLE, STEPS, Finding, Held, Step, Walk, random_steps, run, settings_of

SCRIPTS = SPECS / "known_failures"
N_VOCAB = 50
Row = tuple[int, int]  # position, token


def logits_after(rows: Sequence[Row]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits that any other history would change."""
    seed = zlib.crc32(repr(rows).encode())
    return np.random.default_rng(seed).standard_normal(N_VOCAB).astype(np.float32)


class FakeStage:
    """An honest attention cache: what a later token saw stays part of it, whatever is removed afterwards."""

    def open(self, settings: ContextSettings) -> Mapping[str, Any]:
        self.n = settings.n_seq_max
        self.held: dict[tuple[int, int], list[tuple[int, int]]] = {(c, s): [] for c in (0, 1) for s in range(self.n)}
        self.blobs: list[Any] = []
        return {
            "can_shift": True, "n_rs_seq": 0, "recurrent": False, "attention": True, "window": 0, "n_vocab": N_VOCAB,
            "gaps": False, "partial": False,
        }  # fmt: skip

    def call(self, name: str, context: int, *arguments: Any) -> tuple[Any, Positions]:
        result = getattr(self, name)(context, *arguments)
        ends = []
        for s in range(self.n):
            positions = [position for position, _ in self.held[context, s]]
            ends.append((positions[0], positions[-1]) if positions else (-1, -1))
        return result, tuple(ends)

    def replay(self, settings: ContextSettings, script: Script, tokens: tuple[int, ...], start: int) -> Logits:
        alone = FakeStage()
        alone.open(ContextSettings())
        for op in script:
            if op[0] == "dec":
                alone.decode(0, op[2], range(op[1], op[1] + len(op[2])), 0)
            elif op[0] == "rm":
                alone.rm(0, 0, *op[1:])
            else:
                alone.add(0, 0, *op[1:])
        logits = alone.decode(0, tokens, range(start, start + len(tokens)), 0)[1]
        assert logits is not None
        return logits

    def decode(
        self, context: int, tokens: Any, positions: Any, sequences: Any, abort_after: int = 0
    ) -> tuple[int, Logits | None]:
        ids = [[sequences]] * len(tokens) if isinstance(sequences, int) else sequences
        if positions is None:
            positions = range(len(self.held[context, ids[0][0]]), 1 << 20)
            positions = [self.held[context, ids[0][0]][-1][0] + 1 + i for i in range(len(tokens))]
        before = {s: list(rows) for (c, s), rows in self.held.items() if c == context}
        rows = []
        for token, position, several in zip(tokens, positions, ids, strict=True):
            for s in several:
                held = self.held[context, s] if 0 <= s < self.n else None
                if held is None or token >= N_VOCAB or (held and position != held[-1][0] + 1):
                    self.held.update({(context, s): rows_ for s, rows_ in before.items()})
                    return -1, None
                held.append((position, zlib.crc32(repr((token, held)).encode())))
            rows.append(logits_after(self.held[context, several[0]]))
        return 0, np.array(rows)

    def rm(self, context: int, sequence: int, begin: int, end: int) -> bool:
        begin, end = max(begin, 0), end if end >= 0 else 1 << 30
        for s in range(self.n) if sequence < 0 else (sequence,):
            self.held[context, s] = [row for row in self.held[context, s] if not begin <= row[0] < end]
        return True

    def cp(self, context: int, source: int, destination: int, begin: int, end: int) -> None:
        end = end if end >= 0 else 1 << 30
        self.held[context, destination] = [row for row in self.held[context, source] if max(begin, 0) <= row[0] < end]

    def keep(self, context: int, sequence: int) -> None:
        for s in range(self.n):
            if s != sequence:
                self.held[context, s] = []

    def add(self, context: int, sequence: int, begin: int, end: int, delta: int) -> None:
        self.held[context, sequence] = [(p + delta if p >= begin else p, t) for p, t in self.held[context, sequence]]

    def div(self, context: int, sequence: int, begin: int, end: int, divisor: int) -> None:
        self.held[context, sequence] = [(p // divisor, t) for p, t in self.held[context, sequence]]

    def clear(self, context: int, contents: bool) -> None:
        for s in range(self.n):
            self.held[context, s] = []

    def save(self, context: int, sequence: int, flags: int) -> tuple[int, int, int]:
        self.blobs.append(list(self.held[context, sequence]))
        return len(self.blobs) - 1, 10, 10

    def load(self, context: int, slot: int, sequence: int, flags: int, thousandths: int = 1000) -> tuple[int, int]:
        if thousandths < 1000:
            return 0, 5
        self.held[context, sequence] = list(self.blobs[slot])
        return 10, 10

    def load_noise(self, context: int, slot: int, sequence: int) -> tuple[int, int]:
        return 0, 10

    def through_file(self, context: int, source: int, destination: int) -> int:
        self.held[context, destination] = list(self.held[context, source])
        return 10

    def save_context(self, context: int) -> tuple[int, int, int]:
        self.blobs.append([list(self.held[context, s]) for s in range(self.n)])
        return len(self.blobs) - 1, 10, 10

    def load_context(self, context: int, slot: int) -> tuple[int, int]:
        for s in range(self.n):
            self.held[context, s] = list(self.blobs[slot][s])
        return 10, 10


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
        if self.held[context, sequence]:
            position, _ = self.held[context, sequence][0]
            self.held[context, sequence][0] = (position, 7)
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


SETTINGS = settings_of(3, 0, True, True, False, 32, "f16")


def walked(stage: FakeStage, steps: Sequence[Step]) -> tuple[Finding | None, Walk]:
    walk = Walk(stage, SETTINGS, 1e-5)
    return run(walk, steps), walk


@given(st.integers(0, 1 << 20))
def test_an_honest_library_gives_no_finding(seed: int) -> None:
    found, walk = walked(FakeStage(), random_steps(seed, 60))
    assert found is None, (str(found), walk.lines)


@pytest.mark.parametrize(
    ("stage", "kind", "last"),
    [
        (ForgetsTheSuffix, "wrong positions", "rm"),
        (CopiesNothing, "wrong positions", "cp"),
        (LoadsAnotherToken, "wrong logits", "decode"),
        (AcceptsWhatIsCut, "wrong result", "load"),
        (AcceptsEveryBatch, "wrong result", "decode"),
    ],
)
def test_a_lie_is_found_and_shrunk_to_a_few_calls(stage: type[FakeStage], kind: str, last: str) -> None:
    for seed in range(200):
        steps = random_steps(seed, 40)
        found, walk = walked(stage(), steps)
        if found is not None:
            break
    assert found is not None
    assert found.kind == kind

    def fails(fewer: Sequence[Step]) -> bool:
        met = walked(stage(), fewer)[0]
        return met is not None and met.kind == kind

    shrunk = shrink(steps, fails, float("inf"))
    found, walk = walked(stage(), shrunk)
    assert found is not None
    assert walk.last == last
    assert len(walk.lines) <= 5


def test_every_step_is_made_in_some_walk() -> None:
    made = {name for seed in range(40) for name, *_ in random_steps(seed, 40)}
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
    assert len(path.read_text().splitlines()) <= 66


def test_whatever_a_walk_keeps_clear_of_has_a_check_of_its_own_and_is_a_known_failure() -> None:
    known = {entry.entry.id for entry in load_known_failures(SCRIPTS)}
    assert set(AVOIDABLE) <= known
    assert set(AVOIDABLE) <= set(contract().invariants)
