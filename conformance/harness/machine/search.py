"""Searches for faults: hypothesis draws walks, what it finds is shrunk, told apart, matched and written down."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from conformance.harness.bench import Setup
from conformance.harness.engine import ContextSettings
from conformance.harness.engine.child import Child

from .avoid import AVOIDABLE, DEADLY
from .findings import Finding
from .found import Found, cluster_of, kept_in, script_of, shows
from .shrink import shrink
from .stage import ChildStage, Stage
from .steps import STEPS, run, take
from .walk import References, Step, Walk, settings_of

_STEPS_IN_A_WALK, _WALKS_IN_A_ROUND = 30, 100
_MEMORY_LIMIT = 8 << 30


@dataclass
class Search:
    """A search on one model.

    Attributes:
        limit, factor: of noise, as `References` takes them.
        folder: where findings are kept, hypothesis' examples, and how far earlier runs came; the search goes on from there.
        known: the known failures that the build and the model have.
        avoid: those among them to keep clear of from the start; those met on the way are added.
        say: is told how far the search is.
        walks, calls, seconds: of this run; `before` holds those of earlier ones.

    """

    setup: Setup
    limit: float
    factor: float
    folder: Path
    known: frozenset[str]
    avoid: set[str]
    say: Callable[[str], None] = print
    shrink_seconds: float = 20.0
    found: dict[str, Found] = field(default_factory=dict)
    walks: int = 0
    steps: int = 0
    calls: int = 0
    seconds: float = 0.0
    before: dict[str, Any] = field(default_factory=dict)

    def run(self, seconds: float, seed: int) -> None:
        """Search for so long."""
        self.resume()
        with Child(memory_limit=_MEMORY_LIMIT) as child, Child(memory_limit=_MEMORY_LIMIT) as references:
            self.search(ChildStage(self.setup, child, references), seconds, seed)

    def resume(self) -> None:
        """Take up what earlier runs left in the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.found = kept_in(self.folder, self.setup.model, self.setup.build)
        if self._progress.exists():
            self.before = json.loads(self._progress.read_text())

    def search(self, stage: Stage, seconds: float, seed: int) -> None:
        """Search on a stage for so long: first what earlier runs found, then what nobody has seen."""
        begin = time.perf_counter()
        references = References(stage, self.limit, self.factor)
        self._look_again(references)
        number = self.before.get("next_seed", seed)
        is_first = True
        while (left := seconds - (time.perf_counter() - begin)) > 0:
            caught = self._round(references, number, begin + seconds, reuse=is_first)
            number, is_first = number + 1, False
            if caught is not None and left > 1:
                self._take(references, *caught)
            self.seconds = time.perf_counter() - begin
            self._keep_progress(number)
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
            f"{self._model}: {self.seconds:.0f} s, {self.walks} walks, {self.steps} steps, {self.calls} calls, "
            f"{rate:.0f} calls/s, {len(self.found)} findings ({known} known)"
        )

    @property
    def _progress(self) -> Path:
        return self.folder / f"progress-{self._model}.txt"

    def _keep_progress(self, next_seed: int) -> None:
        done = {name: self.before.get(name, 0) + getattr(self, name) for name in ("walks", "steps", "calls", "seconds")}
        self._progress.write_text(json.dumps({"next_seed": next_seed, **done}))

    def _look_again(self, references: References) -> None:
        """Whether what earlier runs found is still there."""
        for found in self.found.values():
            walk = Walk(
                references.stage,
                ContextSettings(**found.settings),
                references,
                self.avoid - {found.known, found.cluster},
            )
            found.is_fixed = run(walk, [tuple(step) for step in found.steps]) is None  # type: ignore[misc]
            self.calls += walk.calls
            found.keep(self.folder)
            if found.cluster in AVOIDABLE and not found.is_fixed:
                self.avoid.add(found.cluster)

    def _round(
        self, references: References, seed: int, until: float, *, reuse: bool
    ) -> tuple[ContextSettings, list[Step], Finding] | None:
        """One round of drawn walks; the first that found something. With `reuse` what failed in earlier runs comes first."""
        search = self
        caught: list[tuple[ContextSettings, list[Step], Finding]] = []

        class Machine(RuleBasedStateMachine):
            def __init__(self) -> None:
                super().__init__()
                self.steps: list[Step] = []
                self.walk: Walk | None = None

            @initialize(settings=settings())
            def begin(self, settings: ContextSettings) -> None:
                if time.perf_counter() > until or caught:
                    return
                search.walks += 1
                self.walk = Walk(references.stage, settings, references, search.avoid)
                self._guarded(self.walk.open)

            def step(self, step: Step) -> None:
                self.steps.append(step)
                if self.walk is not None:
                    walk = self.walk
                    search.steps += 1
                    self._guarded(lambda: take(walk, step))

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

        for name, each in STEPS.items():
            for copy in range(each.weight):
                setattr(Machine, f"{name}_{copy}", _rule(name))
        with suppress(Finding, Flaky):  # it is kept in `caught`
            run_state_machine_as_test(
                hypothesis.seed(seed)(Machine),
                settings=hypothesis.settings(
                    max_examples=_WALKS_IN_A_ROUND,
                    stateful_step_count=_STEPS_IN_A_WALK,
                    deadline=None,
                    database=DirectoryBasedExampleDatabase(self.folder / "examples" / Path(self.setup.model).stem),
                    suppress_health_check=list(HealthCheck),
                    phases=[Phase.reuse, Phase.generate] if reuse else [Phase.generate],
                    print_blob=False,
                    report_multiple_bugs=False,
                    verbosity=hypothesis.Verbosity.quiet,
                ),
            )
        return caught[0] if caught else None

    def _take(self, references: References, settings: ContextSettings, steps: list[Step], finding: Finding) -> None:
        """Shrink a finding, tell it from others, match it, write it down."""

        def again(fewer: Sequence[Step], avoid: Collection[str] = ()) -> tuple[Finding | None, Walk]:
            walk = Walk(references.stage, settings, references, {*self.avoid, *avoid})
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
        family = next((id for id in candidates if again(shrunk, {id})[0] is None), None)
        known = (
            family if family in self.known else None
        )  # else it has come back, or is in a build that nobody looked at
        cluster = family or cluster_of(met, walk, settings)
        if family:
            self.avoid.add(family)
        if cluster in self.found:
            self.found[cluster].count += 1
            self.found[cluster].keep(self.folder)
            return
        kept = Found(
            cluster, self.setup.model, self.setup.build, asdict(settings), list(shrunk), list(walk.lines), met.what,
            met.expected, met.seen, met.deviation, walk.limit, known,
        )  # fmt: skip
        self.found[cluster] = kept
        script = self.folder / f"{kept.slug}.py"
        script.write_text(script_of(kept, script.name, walk))
        kept.replays = shows(script, self.setup.model_path)
        kept.keep(self.folder)


def _rule(name: str) -> Any:
    def act(self: Any, numbers: tuple[int, int, int]) -> None:
        self.step((name, *numbers))

    return rule(numbers=st.tuples(*[st.integers(0, 1023)] * 3))(act)


def settings() -> st.SearchStrategy[ContextSettings]:
    """The settings that contexts are drawn with."""
    return st.builds(
        settings_of,
        n_seq_max=st.sampled_from([1, 2, 3, 4, 8]),
        n_rs_seq=st.sampled_from([0, 4, 1, 2, 3, 8]),
        kv_unified=st.booleans(),
        swa_full=st.booleans(),
        flash_attn=st.booleans(),
        ubatch=st.sampled_from([512, 8, 32]),
        type_k=st.sampled_from(["f16", "f32", "q8_0", "bf16", "q4_0"]),
        snug=st.booleans(),
    )
