"""A walk: calls made on a stage and in a plain model of what each sequence must hold, compared at every step.

The model knows a sequence as the history that a correct library would have of it: what was decoded, and the inner
removals, shifts and divisions since, which a cold replay repeats. What a replay repeats it cannot judge: where a
recurrent state is involved, a sequence is set aside after an inner removal, until it is emptied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.harness.engine import ContextSettings, EngineError, Logits
from conformance.harness.engine.child import ChildDeath
from conformance.harness.measure.deviation import nmse

from .findings import Death, WrongLogits, WrongPositions, WrongResult, WrongState
from .history import Held, Op, Script, text
from .stage import Memory, Seen, Stage, reference_settings

Step = tuple[str, int, int, int]
"""A call's name and three numbers; the walk makes arguments of them that fit what it holds, so any may follow any."""
Key = tuple[int, int]
"""A sequence: the number of its context, and its id there."""

_KEPT_REPLAYS = 4000
_TEXTS, _TEXT_STRIDE = 4, 1000
_SIGNS_OF_ZERO = 1e-300  # NMSE of states whose numbers are equal
_LONG, _SHORT, _BEYOND_SNUG = 900, 120, 300


@dataclass
class Saved:
    """A blob and what it must hold: one sequence, or all of a context, which no sequence then names."""

    slot: int
    context: int
    sequence: int | None
    held: tuple[Held, ...]
    flags: int = 0
    shared: frozenset[int] = frozenset()
    is_valid: bool = True


@dataclass
class References:
    """Cold replays by history, and how noisy they are; shared between walks on one model.

    Attributes:
        limit: the largest NMSE that is noise wherever less than a `factor`-th of it was measured as such.

    """

    stage: Stage
    limit: float
    factor: float
    _logits: dict[tuple[ContextSettings, Script, Op], Logits] = field(default_factory=dict)
    _noise: dict[ContextSettings, float] = field(default_factory=dict)

    def logits(self, settings: ContextSettings, script: Script, op: Op) -> Logits:
        """The logits of one more decode after a history, [n, n_vocab]."""
        key = reference_settings(settings), script, op
        if key not in self._logits:
            if len(self._logits) >= _KEPT_REPLAYS:
                self._logits.pop(next(iter(self._logits)))
            self._logits[key] = self.stage.replay(*key)
        return self._logits[key]

    def limit_for(self, settings: ContextSettings) -> float:
        """The largest NMSE of logits that is noise with these cache types."""
        key = reference_settings(settings).changed(n_ubatch=512)
        if key not in self._noise:
            self._noise[key] = self.stage.noise(key)
        return max(self.limit, self.factor * self._noise[key])


@dataclass
class Walk:
    """One run of calls.

    Attributes:
        avoid: ids of known failures; what would only meet them again is not done.
        calls: how many calls were made into the build, looks at every sequence included.
        lines: the calls as they were made, for the script of a finding.
        expected_script: what the wrong logits were compared with: a history and one more decode.
        rows: of the last call's logits, which were wrong.
        probed: the sequence whose state was wrong, for the script to decode into.
        held: what each sequence must hold.
        shared: sequences that may share cells with another one.
        moved: sequences whose recurrent cells may have moved since they were decoded, because several others were.

    """

    stage: Stage
    settings: ContextSettings
    references: References
    avoid: Collection[str] = ()
    calls: int = 0
    worst: float = 0.0
    worst_state: float = 0.0
    lines: list[str] = field(default_factory=list)
    last: str = "open"
    expected_script: tuple[Script, Op] | None = None
    rows: list[int] | str = ":"
    probed: Key | None = None
    held: dict[Key, Held] = field(default_factory=dict)
    saved: list[Saved] = field(default_factory=list)
    last_batch: dict[Key, int] = field(default_factory=dict)
    shared: set[Key] = field(default_factory=set)
    moved: set[Key] = field(default_factory=set)
    limit: float = 0.0
    _pending: dict[Key, frozenset[str]] = field(default_factory=dict)
    _digests: dict[Key, int] = field(default_factory=dict)
    _touched: set[Key] = field(default_factory=set)
    _contexts: set[int] = field(default_factory=lambda: {0})
    _has_loaded: bool = False

    def open(self) -> None:
        """Make the first context."""
        too_deep = self.settings.n_rs_seq >= self.settings.n_ubatch
        if too_deep and self.avoids("RB-02/rollback-depth-of-a-micro-batch"):
            self.settings = self.settings.changed(n_ubatch=self.settings.n_rs_seq + 8)
        try:
            self.memory: Memory = self._asked("open", lambda: self.stage.open(self.settings))
        except WrongResult:
            if not self.is_quantized:
                raise
            self.settings = self.settings.changed(type_k="f16", type_v="f16")  # a build need not offer every cache type
            self.memory = self._asked("open", lambda: self.stage.open(self.settings))
        self.limit = self._asked("replay", lambda: self.references.limit_for(self.settings))
        self.held = {(c, s): Held() for c in (0, 1) for s in self.sequences}

    def finish(self) -> None:
        """Compare the next logits and the state of every sequence that holds something, then how much there is room for."""
        for key, held in list(self.held.items()):
            if held.positions and key[0] in self._contexts:
                self.judge_state(key)
                self.decode_next(key, self.tokens(held.next, 1, 3), "seen = dec")
        if self.is_snug and self.memory.attention:
            self._fill()

    # -- what there is

    @property
    def sequences(self) -> range:
        """The ids of a context's sequences."""
        return range(self.settings.n_seq_max)

    @property
    def is_snug(self) -> bool:
        """Whether cells run out within a walk."""
        return self.memory.cells <= 256

    @property
    def slides(self) -> bool:
        """Whether cells below a window may be gone: a state leaves them out even where the cache keeps them."""
        return bool(self.memory.window) and (not self.settings.swa_full or self._has_loaded or self.is_snug)

    @property
    def streams(self) -> bool:
        """Whether each sequence has cells of its own."""
        return self.memory.attention and not self.settings.kv_unified and self.settings.n_seq_max > 1

    @property
    def partial_is_less(self) -> bool:
        """Whether a PARTIAL_ONLY state leaves something out."""
        memory = self.memory
        return (memory.recurrent and memory.attention) or memory.window > 0

    @property
    def is_quantized(self) -> bool:
        """Whether keys or values are."""
        return not {self.settings.type_k, self.settings.type_v} <= {"f32", "f16", "bf16"}

    @property
    def longest(self) -> int:
        """How many positions a sequence may get to."""
        if self.is_snug:
            return _BEYOND_SNUG
        return _LONG if self.memory.window and not self.settings.swa_full and self.memory.cells >= _LONG else _SHORT

    def avoids(self, id: str) -> bool:
        """Whether a known failure is kept clear of."""
        return id in self.avoid

    def tokens(self, start: int, n: int, which: int) -> tuple[int, ...]:
        """What may come at a position, in one of several texts."""
        begin = which % _TEXTS * _TEXT_STRIDE + start % _LONG
        return tuple(text(self.memory.n_vocab)[begin : begin + n].tolist())

    def slice(self, start: int, n: int, which: int) -> str:
        """The same, in a script."""
        begin = which % _TEXTS * _TEXT_STRIDE + start % _LONG
        return f"T[{begin}:{begin + n}]"

    def fits(self, context: int, new: Mapping[int, int], cells: int | None = None) -> bool | None:
        """Whether there is room for so many more tokens of each sequence, in `cells` new ones; None where sharing hides it."""
        if not self.memory.attention:
            return True
        n_held = {s: len(self.held[context, s].positions) for s in self.sequences}
        if self.streams or self.settings.n_seq_max == 1:
            return all(n_held[s] + n <= self.memory.cells for s, n in new.items())
        more = sum(new.values()) if cells is None else cells
        shared = [n_held[s] for s in self.sequences if (context, s) in self.shared]
        most = sum(n_held.values())
        least = most - sum(shared) + max(shared, default=0)
        return True if most + more <= self.memory.cells else False if least + more > self.memory.cells else None

    # -- making calls

    def make(self, line: str, name: str, context: int, *arguments: Any) -> Any:
        """Make a call; a death and an error are findings."""
        self.lines.append(line)
        self.last = name
        self._contexts.add(context)
        self._has_loaded |= "load" in name or "file" in name
        self.calls += 1
        return self._asked(name, lambda: self.stage.call(name, context, *arguments))

    def check(self, context: int) -> None:
        """Look at every sequence of a context: its positions, its bytes, and that nothing happened to what was not meant."""
        seen: tuple[Seen, ...] = self._asked(f"a look after {self.last}", lambda: self.stage.observe(context))
        self.calls += 4 * len(seen)
        for s, now in enumerate(seen):
            key, held = (context, s), self.held[context, s]
            self._check_positions(key, held, now)
            if now.announced != now.written:
                raise WrongResult(f"bytes of the state of sequence {s}", now.announced, now.written)
            self._check_cells(key, held, now)
            if self._is_settled(key) and self._digests.get(key, now.digest) != now.digest:
                raise WrongState(
                    f"state of sequence {s} of context {context} after {self.last}", "as before", "other bytes"
                )
            self._digests[key] = now.digest
        self._touched = {key for key in self._touched if key[0] != context}

    def _is_settled(self, key: Key) -> bool:
        """Whether a sequence must have the bytes that it had: cells that a window has left may go to others at any time."""
        lent = self.memory.window and self.settings.kv_unified and self.held[key].next >= self.memory.window
        return not lent and key not in self._touched and not self.waiting(key) & {"copy", "shift"}

    def touch(self, *keys: Key) -> None:
        """These may have other bytes now."""
        self._touched.update(keys)

    def _asked(self, name: str, ask: Any) -> Any:
        try:
            return ask()
        except ChildDeath as death:
            raise Death.of(name, death) from None
        except EngineError as error:
            raise WrongResult(name, "no error", str(error)) from None

    def _check_positions(self, key: Key, held: Held, now: Seen) -> None:
        if not held.positions:
            expected, fits = "none", (now.low, now.high) == (-1, -1)
        else:
            first, last = held.positions[0], held.positions[-1]
            exact = not self.memory.recurrent and not self.slides
            expected = f"{first} to {last}"
            fits = now.high == last and (now.low == first if exact else first <= now.low <= last)
        if not fits:
            what = f"positions of sequence {key[1]} of context {key[0]} after {self.last}"
            raise WrongPositions(what, expected, f"{now.low} to {now.high}")

    def _check_cells(self, key: Key, held: Held, now: Seen) -> None:
        """Whether the bytes hold what the positions name."""
        if now.cells is None:
            return
        for number, cells in enumerate(now.cells):
            if self.memory.window and number == len(now.cells) - 1:
                seen_next = max(now.low, held.next - self.memory.window + 1)
                expected = tuple(p for p in held.positions if p >= seen_next)
                fits = set(expected) <= set(cells) <= set(held.positions)
            else:
                expected, fits = held.positions, cells == held.positions
            if not fits:
                self._probe(key)
                what = f"cells of sequence {key[1]} of context {key[0]} in cache {number} after {self.last}"
                raise WrongState(what, _in_ranges(expected), _in_ranges(cells))
        last = held.positions[-1:] if self.memory.recurrent else ()
        if now.recurrent != last:
            self._probe(key)
            what = f"recurrent cells of sequence {key[1]} of context {key[0]} after {self.last}"
            raise WrongState(what, _in_ranges(last), _in_ranges(now.recurrent))

    def _probe(self, key: Key) -> None:
        """Let the script show a wrong state by what the sequence gives next."""
        held = self.held[key]
        self.probed, self.expected_script = key, (held.script, ("dec", held.next, self.tokens(held.next, 1, 3)))

    # -- decoding and comparing

    def decode_next(self, key: Key, tokens: tuple[int, ...], seen: str, *, automatic: bool = False) -> None:
        """Decode tokens after the last of one sequence, by itself, and compare."""
        context, sequence = key
        held, n = self.held[key], len(tokens)
        positions = None if automatic else tuple(range(held.next, held.next + n))
        at = None if automatic else held.next
        line = f"{seen}(c{context}, {list(tokens)}, {at}, {sequence})"
        code, logits = self.make(line, "decode", context, tokens, positions, sequence)
        if self.is_decoded(code, context, {sequence: n}):
            self.compare(held, ("dec", held.next, tokens), logits)
            self.settle({key: held.decoded(tokens)}, context, {key: n})

    def is_decoded(self, code: int, context: int, new: Mapping[int, int], cells: int | None = None) -> bool:
        """Whether a decode that is legal was done; it may say 1 only where there is no room, and then nothing happens."""
        room = self.fits(context, new, cells)
        if code == 0 and room is not False:
            return True
        if code == 1 and room is not True:
            self.check(context)
            return False
        expected = {True: "0", False: "1", None: "0 or 1"}[room]
        raise WrongResult(f"decode of {sum(new.values())} tokens", expected, code)

    def settle(self, new: Mapping[Key, Held], context: int, batches: Mapping[Key, int]) -> None:
        """A decode was done: it made all copies and shifts of its context, and the rollbacks of its own sequences."""
        for key, held in new.items():
            self.held[key] = held
            self.last_batch[key] = batches[key]
            self._pending.pop(key, None)
            self.moved.discard(key)
        self.touch(*new)
        if len(new) > 1:
            self.moved.update(key for key in self.held if key[0] == context and key not in new)
        for key, what in self._pending.items():
            if key[0] == context and what - {"rollback"}:
                self._pending[key] = what & {"rollback"}
                self.touch(key)
        self.check(context)

    def compare(self, held: Held, op: Op, logits: Logits) -> None:
        """Compare the logits of a decode with a replay's."""
        if not held.judged:
            return
        expected = self._asked("replay", lambda: self.references.logits(self.settings, held.script, op))
        deviation = nmse(logits, expected)
        if deviation <= self.limit:
            self.worst = max(self.worst, deviation)
            return
        row = int(np.argmax(np.abs(logits - expected).max(axis=1)))
        self.expected_script = held.script, op
        raise WrongLogits(
            f"logits of {len(expected)} rows at {held.next}, row {row}", expected[row, :3], logits[row, :3], deviation
        )

    def judge_state(self, key: Key) -> None:
        """Compare a sequence's bytes with a replay's: exactly where the same batches ran, else within noise."""
        held = self.held[key]
        if not held.judged or not held.is_settled or self.waiting(key) or held.has_gap:
            return
        context, sequence = key
        deviation = self._asked(
            "a look", lambda: self.stage.state_deviation(context, sequence, self.settings, held.script)
        )
        exact = held.as_replayed and not self.memory.attention
        if deviation <= (_SIGNS_OF_ZERO if exact else self.limit):
            self.worst_state = max(self.worst_state, deviation)
            return
        self._probe(key)
        raise WrongState(
            f"state of sequence {sequence} of context {context}", "a replay's", f"NMSE {deviation:.2g}", deviation
        )

    def _fill(self) -> None:
        """Empty the first context and see that all of its cells can be had again."""
        for s in self.sequences:
            self.make(f'memory(c0, "seq_rm", {s}, -1, -1)', "rm", 0, s, -1, -1)
            self.put((0, s), Held())
        self.check(0)
        tokens = tuple(text(self.memory.n_vocab)[: self.memory.cells].tolist())
        for code, part in ((0, tokens), (1, tokens[:1])):
            start = self.held[0, 0].next
            line = f"seen = dec(c0, T[:{len(part)}], {start}, 0)"
            seen, _ = self.make(line, "decode", 0, part, tuple(range(start, start + len(part))), 0)
            if seen != code:
                raise WrongResult(
                    f"decode of {len(part)} tokens into {self.memory.cells - start} free cells", code, seen
                )
            self.put((0, 0), self.held[0, 0].decoded(part))

    # -- what waits for a decode

    def waiting(self, key: Key) -> frozenset[str]:
        """What was asked of a sequence and is done with the next decode only."""
        return self._pending.get(key, frozenset())

    def wait(self, key: Key, what: Iterable[str]) -> None:
        """Something is done with the next decode only."""
        self._pending[key] = self.waiting(key).union(what)

    def change(self, key: Key, held: Held, *waiting: str) -> None:
        """A sequence is another one now; what waits still does, and more."""
        before = self.waiting(key)
        self.put(key, held)
        self._pending[key] = before.union(waiting)

    def put(self, key: Key, held: Held) -> None:
        """A sequence is another one now, and nothing waits."""
        self.held[key] = held
        self.touch(key)
        self._pending.pop(key, None)
        if not held.positions:
            self.shared.discard(key)


def _in_ranges(positions: Iterable[int]) -> str:
    """Positions, shortened."""
    ranges: list[list[int]] = []
    for position in sorted(positions):
        if ranges and position == ranges[-1][1] + 1:
            ranges[-1][1] = position
        else:
            ranges.append([position, position])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in ranges[:6]) or "none"


def settings_of(
    n_seq_max: int, n_rs_seq: int, kv_unified: bool, swa_full: bool, flash_attn: bool, ubatch: int, type_k: str,
    snug: bool = False,
) -> ContextSettings:  # fmt: skip
    """Settings with room for every sequence that a walk may hold; or, `snug`, with less than that."""
    cells = (256 if kv_unified else 256 * n_seq_max) if snug else 1024 * n_seq_max
    takes_any_v = flash_attn or type_k in ("f16", "f32", "bf16")
    return ContextSettings(
        n_ctx=cells,
        n_batch=min(1024, cells),
        n_ubatch=min(ubatch, cells),
        n_seq_max=n_seq_max,
        n_rs_seq=n_rs_seq,
        kv_unified=kv_unified,
        swa_full=swa_full,
        flash_attn="on" if flash_attn else "off",
        type_k=type_k,
        type_v=type_k if takes_any_v else "f16",
    )
