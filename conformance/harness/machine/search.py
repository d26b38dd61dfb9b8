"""Searches for faults: hypothesis draws walks, what it finds is shrunk, told apart, matched and written down."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from conformance.harness.bench import Setup
from conformance.harness.engine import ContextSettings
from conformance.harness.engine.child import Child

from .script import write_script
from .stage import ChildStage, Stage
from .walk import AVOIDABLE, DEADLY, STEPS, Finding, Replays, Step, Walk, run, settings_of

_STEPS_IN_A_WALK, _WALKS_IN_A_ROUND = 30, 100
_SMALLEST_NUMBERS = (0, 1, 2, 3, 5, 8)


@dataclass
class Found:
    """A fault as it is saved; `known` is the id of the known failure that explains it.

    Attributes:
        cluster: one fault is one cluster: kind, last call, what was said, kind of settings, kind of model.
        steps: the shrunk walk.
        count: how often it was met.
        replays: whether its script shows it in a process of its own.

    """

    cluster: str
    model: str
    build: str
    settings: dict[str, Any]
    steps: list[Step]
    calls: list[str]
    what: str
    expected: str
    seen: str
    deviation: float | None
    limit: float
    known: str | None = None
    count: int = 1
    replays: bool = False

    @property
    def slug(self) -> str:
        """A file name."""
        return "".join(c if c.isalnum() else "-" for c in self.cluster.lower()).strip("-")[:100]


@dataclass
class Search:
    """A search on one model.

    Attributes:
        avoid: known failures to keep clear of from the start; those met on the way are added.
        folder: where findings are kept; earlier ones there are counted on.
        say: is told how far the search is.

    """

    setup: Setup
    limit: float
    folder: Path
    avoid: set[str]
    say: Callable[[str], None] = print
    database: Path | None = None
    shrink_seconds: float = 20.0
    found: dict[str, Found] = field(default_factory=dict)
    walks: int = 0
    calls: int = 0
    seconds: float = 0.0
    _replays: Replays = field(default_factory=dict)

    def run(self, seconds: float, seed: int) -> None:
        """Search for so long."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("*.json"):
            kept = json.loads(path.read_text())
            if kept["model"] == self.setup.model:
                self.found[kept["cluster"]] = Found(**kept)
        begin = time.perf_counter()
        with Child(memory_limit=8 << 30) as child, Child(memory_limit=8 << 30) as references:
            stage = ChildStage(self.setup, child, references)
            number = seed
            while (left := seconds - (time.perf_counter() - begin)) > 0:
                caught = self._round(stage, number, begin + seconds)
                number += 1
                self.seconds = time.perf_counter() - begin
                if caught is not None and left > 1:
                    self._take(stage, *caught)
                self.seconds = time.perf_counter() - begin
                self.say(self.line())

    @property
    def _model(self) -> str:
        """The model's name: a file's without its folder."""
        return Path(self.setup.model).stem

    def line(self) -> str:
        """How far it is, in a line."""
        rate = self.calls / self.seconds if self.seconds else 0.0
        known = sum(found.known is not None for found in self.found.values())
        return (
            f"{self._model}: {self.seconds:.0f} s, {self.walks} walks, {self.calls} calls, {rate:.0f} calls/s, "
            f"{len(self.found)} findings ({known} known)"
        )

    def _round(self, stage: Stage, seed: int, until: float) -> tuple[ContextSettings, list[Step], Finding] | None:
        """One round of drawn walks; the first that found something."""
        search = self
        caught: list[tuple[ContextSettings, list[Step], Finding]] = []

        class Machine(RuleBasedStateMachine):
            def __init__(self) -> None:
                super().__init__()
                self.steps: list[Step] = []
                self.walk: Walk | None = None
                search.walks += 1

            @initialize(settings=settings())
            def begin(self, settings: ContextSettings) -> None:
                if time.perf_counter() > until or caught:
                    return
                self.walk = Walk(stage, settings, search.limit, search.avoid, search._replays)
                self._guarded(self.walk.open)

            def step(self, step: Step) -> None:
                self.steps.append(step)
                if self.walk is not None:
                    walk = self.walk
                    self._guarded(lambda: walk.step(step))

            def _guarded(self, act: Callable[[], None]) -> None:
                try:
                    act()
                except Finding as finding:
                    assert self.walk is not None
                    caught.append((self.walk.settings, list(self.steps), finding))
                    self._end()
                    raise

            def _end(self) -> None:
                if self.walk is not None:
                    search.calls += self.walk.calls
                    self.walk = None

            def teardown(self) -> None:
                if self.walk is not None:
                    self._guarded(self.walk.finish)
                self._end()

        for name, weight in STEPS.items():
            for copy in range(weight):
                setattr(Machine, f"{name}_{copy}", _rule(name))
        seeded = hypothesis.seed(seed)(Machine)
        with suppress(Finding, Flaky):  # it is kept in `caught`
            run_state_machine_as_test(
                seeded,
                settings=hypothesis.settings(
                    max_examples=_WALKS_IN_A_ROUND,
                    stateful_step_count=_STEPS_IN_A_WALK,
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                    phases=[Phase.generate],
                    print_blob=False,
                    report_multiple_bugs=False,
                    verbosity=hypothesis.Verbosity.quiet,
                ),
            )
        return caught[0] if caught else None

    def _take(self, stage: Stage, settings: ContextSettings, steps: list[Step], finding: Finding) -> None:
        """Shrink a finding, tell it from others, match it, write it down."""

        def again(fewer: Sequence[Step], avoid: Collection[str] = ()) -> tuple[Finding | None, Walk]:
            walk = Walk(stage, settings, self.limit, {*self.avoid, *avoid}, self._replays)
            met = run(walk, fewer)
            self.calls += walk.calls
            return met, walk

        def same(met: Finding | None) -> bool:
            return met is not None and met.kind == finding.kind

        shrunk = shrink(steps, lambda fewer: same(again(fewer)[0]), time.perf_counter() + self.shrink_seconds)
        met, walk = again(shrunk)
        if met is None:
            return  # a walk that only failed once is no finding that anyone can use
        candidates = sorted(set(AVOIDABLE) - self.avoid, key=lambda id: ((id in DEADLY) != (met.kind == "death"), id))
        known = next((id for id in candidates if again(shrunk, {id})[0] is None), None)
        place = met.seen if met.kind == "death" else walk.last
        where = "unified" if settings.kv_unified else "streams"
        cluster = known or f"{met.kind}, {place}, {where}, {_kind(walk.memory)}"
        if known:
            self.avoid.add(known)
        if cluster in self.found:
            self.found[cluster].count += 1
            self._keep(self.found[cluster])
            return
        kept = Found(
            cluster, self.setup.model, self.setup.build, asdict(settings), list(shrunk), list(walk.lines), met.what,
            met.expected, met.seen, met.deviation, self.limit, known,
        )  # fmt: skip
        self.found[cluster] = kept
        script = self.folder / f"{kept.slug}.py"
        script.write_text(_script(kept, script.name, walk))
        kept.replays = _shows(script, self.setup)
        self._keep(kept)

    def _keep(self, found: Found) -> None:
        (self.folder / f"{found.slug}-{self._model}.json").write_text(json.dumps(asdict(found), indent=1))


def _kind(memory: Mapping[str, Any]) -> str:
    """The kind of a memory, for telling faults apart."""
    if not memory:
        return "before anything"
    if memory["recurrent"]:
        return "hybrid" if memory["attention"] else "recurrent"
    return "sliding window" if memory["window"] else "attention"


def _rule(name: str) -> Any:
    def act(self: Any, numbers: tuple[int, int, int]) -> None:
        self.step((name, *numbers))

    return rule(numbers=st.tuples(*[st.integers(0, 1023)] * 3))(act)


def settings() -> st.SearchStrategy[ContextSettings]:
    """The settings that contexts are drawn with."""
    return st.builds(
        settings_of,
        n_seq_max=st.integers(1, 4),
        n_rs_seq=st.sampled_from([0, 4, 1, 2, 8]),
        kv_unified=st.booleans(),
        swa_full=st.booleans(),
        flash_attn=st.booleans(),
        ubatch=st.sampled_from([512, 8, 32]),
        type_k=st.sampled_from(["f16", "f32"]),
    )


def shrink(steps: Sequence[Step], fails: Callable[[Sequence[Step]], bool], until: float) -> list[Step]:
    """Fewer steps and smaller numbers that still fail: delta debugging by halves, then numbers one by one."""
    kept = list(steps)
    size = max(len(kept) // 2, 1)
    while size and time.perf_counter() < until:
        begin, shorter = 0, False
        while begin < len(kept) and time.perf_counter() < until:
            fewer = kept[:begin] + kept[begin + size :]
            if fewer and fails(fewer):
                kept, shorter = fewer, True
            else:
                begin += size
        size = size if shorter and size == 1 else size // 2
    for index in range(len(kept)):
        for place in range(3):
            for number in _SMALLEST_NUMBERS:
                name, *numbers = kept[index]
                if time.perf_counter() > until or number >= numbers[place]:
                    break
                numbers[place] = number
                x, y, z = numbers
                smaller: list[Step] = [*kept[:index], (name, x, y, z), *kept[index + 1 :]]
                if fails(smaller):
                    kept = smaller
                    break
    return kept


def _script(found: Found, name: str, walk: Walk) -> str:
    """The finding as a script."""
    settings = ContextSettings(**found.settings)
    named = {
        "n_ctx": settings.n_ctx, "n_batch": settings.n_batch, "n_ubatch": settings.n_ubatch,
        "n_seq_max": settings.n_seq_max, "n_rs_seq": settings.n_rs_seq, "kv_unified": settings.kv_unified,
        "swa_full": settings.swa_full, "flash_attn_type": int(settings.flash_attn == "on"),
        "type_k": {"f16": 1, "f32": 0}[settings.type_k], "type_v": {"f16": 1, "f32": 0}[settings.type_v],
    }  # fmt: skip
    made = ", ".join(f"{key}={value!r}" for key, value in named.items())
    body = [
        f"S = dict({made})",
        "c0, c1, seen = context(**S), context(**S), None",
        "for c in (c0, c1):  # memory that was used, not zeros",
        '    [dec(c, T[-24:], 0, s) for s in range(S["n_seq_max"])]',
        '    [memory(c, "seq_rm", s, -1, -1) for s in range(S["n_seq_max"])]',
        *found.calls,
    ]
    if walk.expected_script is not None:
        script, tokens, start = walk.expected_script
        body.append("k = context(**{**S, 'n_seq_max': 1, 'n_rs_seq': 0, 'swa_full': True})")
        for op in script:
            if op[0] == "dec":
                body.append(f"dec(k, {list(op[2])}, {op[1]})")
            else:
                body.append(f'memory(k, "seq_{op[0]}", 0, {", ".join(map(str, op[1:]))})')
        body += [f"expected = dec(k, {list(tokens)}, {start})"]
        body.append(f"verdict(expected, seen[{walk.rows}])")
    elif found.what.startswith("positions"):
        sequence = found.what.split()[3]
        body.append(f"here = memory(c0, 'seq_pos_min', {sequence}), memory(c0, 'seq_pos_max', {sequence})")
        body.append(f"there = memory(c1, 'seq_pos_min', {sequence}), memory(c1, 'seq_pos_max', {sequence})")
        shown = found.seen.replace(" to ", ", ")
        body.append(
            f"verdict(False, ({shown}) in (here, there), 'expected {found.expected}: positions {found.seen} found:')"
        )
    else:
        body.append(f"print('expected {found.expected}, seen', seen)")
        body.append(
            f"sys.exit(str(seen) == {found.seen!r} or (isinstance(seen, int) and {found.seen!r} == str(bool(seen))))"
        )
    return write_script(name, f"{found.cluster}: {found.what}", body)


def _shows(script: Path, setup: Setup) -> bool:
    """Whether the script fails in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(script), str(setup.model_path)], capture_output=True, timeout=120, check=False
    )
    return done.returncode != 0 and b"Traceback" not in done.stderr
