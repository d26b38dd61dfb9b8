"""A walk: calls made on a stage and in a plain model of what each sequence must hold, compared at every step.

The model knows a sequence as the history that a correct library would have of it: the tokens decoded, and the inner
removals and shifts since, which a cold replay repeats. What a replay repeats it cannot judge: where a recurrent state is
involved, a sequence is set aside after an inner removal, until it is emptied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from conformance.harness.engine import ContextSettings, EngineError, Logits
from conformance.harness.engine.child import ChildDeath
from conformance.harness.measure.deviation import nmse

from .stage import Op, Script, Stage, text

Step = tuple[str, int, int, int]
"""A call's name and three numbers; the walk makes arguments of them that fit what it holds, so any may follow any."""

_KEPT_REPLAYS = 4000
_TEXTS, _TEXT_STRIDE = 4, 1000


class Finding(Exception):
    """Something that a correct library would not do."""

    kind: ClassVar[str] = "finding"

    def __init__(self, what: str, expected: object, seen: object, deviation: float | None = None) -> None:
        super().__init__(f"{what}: expected {expected}, seen {seen}")
        self.what, self.expected, self.seen, self.deviation = what, str(expected), str(seen), deviation


class WrongLogits(Finding):
    """The next logits are not those of a cold replay."""

    kind = "wrong logits"


class WrongPositions(Finding):
    """A sequence's positions are not those of what it must hold."""

    kind = "wrong positions"


class WrongResult(Finding):
    """A call returned what it must not."""

    kind = "wrong result"


class Death(Finding):
    """The process died."""

    kind = "death"


@dataclass(frozen=True)
class Held:
    """What a sequence must hold.

    Attributes:
        script: how it came to be.
        positions: of its tokens, rising.
        judged: False after something that a replay cannot judge.

    """

    script: Script = ()
    positions: tuple[int, ...] = ()
    judged: bool = True

    @property
    def next(self) -> int:
        """The position after the last."""
        return self.positions[-1] + 1 if self.positions else 0

    def decoded(self, tokens: tuple[int, ...]) -> Held:
        """With tokens after the last."""
        start = self.next
        op: Op = ("dec", start, tokens)
        return Held((*self.script, op), (*self.positions, *range(start, start + len(tokens))), self.judged)

    def without_suffix(self, begin: int) -> Held:
        """Without what is at `begin` and after: as if never decoded."""
        kept = tuple(position for position in self.positions if position < begin)
        if not kept:
            return Held()
        if any(op[0] != "dec" for op in self.script):
            return Held((*self.script, ("rm", begin, -1)), kept, self.judged)
        ops = tuple(("dec", op[1], op[2][: begin - op[1]]) for op in self.script if op[1] < begin)
        return Held(ops, kept, self.judged)

    def without(self, begin: int, end: int, *, judged: bool) -> Held:
        """Without an inner range, which later tokens have seen."""
        kept = tuple(position for position in self.positions if not begin <= position < end)
        return Held((*self.script, ("rm", begin, end)), kept, self.judged and judged)

    def shifted(self, begin: int, delta: int) -> Held:
        """With everything from `begin` on moved."""
        moved = tuple(position + delta if position >= begin else position for position in self.positions)
        return Held((*self.script, ("add", begin, -1, delta)), moved, self.judged)


@dataclass
class _Saved:
    """A blob and what it must hold: one sequence, or all of a context."""

    slot: int
    context: int
    sequence: int
    held: tuple[Held, ...]
    flags: int
    is_valid: bool = True


Replays = dict[tuple[ContextSettings, Script, tuple[int, ...]], Logits]


@dataclass
class Walk:
    """One run of calls.

    Attributes:
        limit: the largest NMSE of logits that is noise.
        avoid: ids of known failures; what would only meet them again is not done.
        replays: cold replays by history, shared between walks.
        calls: how many calls were made into the build.
        lines: the calls as they were made, for the script of a finding.
        expected_script: what the wrong logits were compared with: history, tokens and their first position.
        rows: of the last call's logits, which were wrong.

    """

    stage: Stage
    settings: ContextSettings
    limit: float
    avoid: Collection[str] = ()
    replays: Replays = field(default_factory=dict)
    calls: int = 0
    worst: float = 0.0
    lines: list[str] = field(default_factory=list)
    last: str = "open"
    expected_script: tuple[Script, tuple[int, ...], int] | None = None
    rows: list[int] | str = ":"
    _held: dict[tuple[int, int], Held] = field(default_factory=dict)
    _saved: list[_Saved] = field(default_factory=list)
    _pending: dict[tuple[int, int], frozenset[str]] = field(default_factory=dict)
    _last_batch: dict[tuple[int, int], int] = field(default_factory=dict)
    _shared: set[tuple[int, int]] = field(default_factory=set)
    _on_device: dict[tuple[int, int], int] = field(default_factory=dict)
    _contexts: set[int] = field(default_factory=lambda: {0})
    _has_loaded: bool = False
    memory: Mapping[str, Any] = field(default_factory=dict)

    def open(self) -> None:
        """Make the first context."""
        too_deep = self.settings.n_rs_seq >= self.settings.n_ubatch
        if too_deep and self._avoids("RB-02/rollback-depth-of-a-micro-batch"):
            self.settings = self.settings.changed(n_ubatch=self.settings.n_rs_seq + 8)
        try:
            self.memory = self.stage.open(self.settings)
        except ChildDeath as death:
            raise Death(f"open: the build {death.how}", "a context", _fingerprint(death.stderr) or death.how) from None
        self._held = {(c, s): Held() for c in (0, 1) for s in range(self.settings.n_seq_max)}

    def step(self, step: Step) -> None:
        """Make one call and compare."""
        name, x, y, z = step
        context, sequence = (x // 8) % 2 if x >= 8 else 0, x % self.settings.n_seq_max
        getattr(self, f"_do_{name}")(context, sequence, y, z)

    def finish(self) -> None:
        """Compare the next logits of every sequence that holds something."""
        for (context, sequence), held in list(self._held.items()):
            if held.positions and context in self._contexts:
                self._do_decode(context, sequence, 0, 3)

    # -- making calls

    def _make(self, line: str, name: str, context: int, *arguments: Any) -> Any:
        self.lines.append(line)
        self.last = name
        self._contexts.add(context)
        self._has_loaded |= name in ("load", "through_file", "load_context")
        self.calls += 1 + 2 * self.settings.n_seq_max
        try:
            result, positions = self.stage.call(name, context, *arguments)
        except ChildDeath as death:
            raise Death(
                f"{name}: the build {death.how}", "an answer", _fingerprint(death.stderr) or death.how
            ) from None
        except EngineError as error:
            raise WrongResult(name, "no error", str(error)) from None
        self._seen = positions
        return result

    def _check_positions(self, context: int) -> None:
        exact = not self.memory["recurrent"] and not self._slides
        for sequence, (low, high) in enumerate(self._seen):
            held = self._held[context, sequence].positions
            if not held:
                expected, fits = "none", (low, high) == (-1, -1)
            else:
                expected = f"{held[0]} to {held[-1]}"
                fits = high == held[-1] and (low == held[0] if exact else held[0] <= low <= high)
            if not fits:
                raise WrongPositions(
                    f"positions of sequence {sequence} after {self.last}", expected, f"{low} to {high}"
                )

    @property
    def _slides(self) -> bool:
        """Whether cells below a window may be gone: a state leaves them out even where the cache keeps them."""
        return bool(self.memory["window"]) and (not self.settings.swa_full or self._has_loaded)

    def _avoids(self, id: str) -> bool:
        return id in self.avoid

    def _tokens(self, start: int, n: int, which: int) -> tuple[int, ...]:
        begin = which % _TEXTS * _TEXT_STRIDE + start % 900
        return tuple(int(token) for token in text(self.memory["n_vocab"])[begin : begin + n])

    def _slice(self, start: int, n: int, which: int) -> str:
        begin = which % _TEXTS * _TEXT_STRIDE + start % 900
        return f"T[{begin}:{begin + n}]"

    @property
    def _longest(self) -> int:
        return 900 if self.memory["window"] and not self.settings.swa_full else 120

    # -- decoding

    def _do_decode(self, context: int, sequence: int, y: int, z: int) -> None:
        held = self._held[context, sequence]
        n = 1 + y % (300 if self._longest > 500 else 40)
        if held.next + n > self._longest:
            return
        tokens = self._tokens(held.next, n, z)
        positions = None if z & 8 else tuple(range(held.next, held.next + n))
        if positions is None and not held.positions:
            positions = tuple(range(n))
        line = f"seen = dec(c{context}, {self._slice(held.next, n, z)}, {held.next}, {sequence})"
        code, logits = self._make(line, "decode", context, tokens, positions, sequence)
        self._expect_decoded(code, n)
        self._compare(held, tokens, logits)
        self._settle({(context, sequence): held.decoded(tokens)}, context, n)

    def _do_decode_together(self, context: int, _: int, y: int, z: int) -> None:
        n = 1 + y % 12
        rows, new = [], {}
        for sequence in range(self.settings.n_seq_max):
            held = self._held[context, sequence]
            if held.next + n > self._longest:
                return
            tokens = self._tokens(held.next, n, z + sequence)
            new[context, sequence] = held.decoded(tokens)
            rows += [(i, sequence, tokens[i], held.next + i) for i in range(n)]
        if z % 2:
            rows.sort()
        before = {key: self._held[key] for key in new}
        tokens_, positions = tuple(r[2] for r in rows), tuple(r[3] for r in rows)
        sequences = [[r[1]] for r in rows]
        line = f"seen = dec(c{context}, {list(tokens_)}, {list(positions)}, {sequences})"
        code, logits = self._make(line, "decode", context, tokens_, positions, sequences)
        self._expect_decoded(code, len(rows))
        for (_c, sequence), held in before.items():
            at = [i for i, row in enumerate(rows) if row[1] == sequence]
            self.rows = at
            self._compare(held, new[context, sequence].script[-1][2], logits[at])
        self.rows = ":"
        self._settle(new, context, n)

    def _do_decode_coupled(self, context: int, _: int, y: int, z: int) -> None:
        """Tokens that belong to every sequence, where all are empty and share one cache."""
        many = range(self.settings.n_seq_max)
        if not (self.settings.kv_unified and self.memory["attention"] and self.settings.n_seq_max > 1):
            return
        if any(self._held[context, s].positions for s in many):
            return
        n = 1 + y % 20
        tokens, positions = self._tokens(0, n, z), tuple(range(n))
        line = f"seen = dec(c{context}, {self._slice(0, n, z)}, 0, [{list(many)}] * {n})"
        code, logits = self._make(line, "decode", context, tokens, positions, [list(many)] * n)
        self._expect_decoded(code, n)
        self._compare(Held(), tokens, logits)
        self._settle({(context, s): Held().decoded(tokens) for s in many}, context, n)
        self._shared |= {(context, s) for s in many}

    def _do_decode_wrongly(self, context: int, sequence: int, y: int, z: int) -> None:
        """A batch that must be refused."""
        held = self._held[context, sequence]
        start, tokens = held.next, list(self._tokens(held.next, 3, z))
        positions, sequences = list(range(start, start + 3)), [[sequence]] * 3
        match y % 5:
            case 0:
                sequences = [[self.settings.n_seq_max]] * 3
            case 1:
                tokens[1] = self.memory["n_vocab"]
            case 2 if held.positions and not self.memory["gaps"]:
                positions = [p + 2 for p in positions]
            case 3 if held.positions:
                positions = [p - 1 for p in positions]
            case _:
                sequences = [[-1]] * 3
        line = f"seen = dec(c{context}, {tokens}, {positions}, {sequences})"
        code, _logits = self._make(line, "decode", context, tokens, positions, sequences)
        if code != -1:
            raise WrongResult("decode of an invalid batch", -1, code)
        self._check_positions(context)

    def _do_decode_aborted(self, context: int, sequence: int, y: int, z: int) -> None:
        held = self._held[context, sequence]
        n = self.settings.n_ubatch + 1 + y % 20
        recurrent = self.memory["recurrent"]
        if (
            n > 80
            or held.next + n > self._longest
            or (recurrent and self._avoids("SM-07/abort-leaves-a-wrong-position"))
        ):
            return
        tokens, positions = self._tokens(held.next, n, z), tuple(range(held.next, held.next + n))
        asks = (
            f"ASKED = iter(range({20 + z % 200})); ABORT = L.ggml_abort_callback(lambda _: next(ASKED, None) is None)"
        )
        self.lines.append(f"{asks}; L.llama_set_abort_callback(c{context}, ABORT, None)")
        self.lines.append(f"seen = dec(c{context}, {self._slice(held.next, n, z)}, {held.next}, {sequence})")
        line = f"L.llama_set_abort_callback(c{context}, L.ggml_abort_callback(), None)"
        code, logits = self._make(line, "decode", context, tokens, positions, sequence, 20 + z % 200)
        new = held.decoded(tokens)
        if code == 2:
            high = self._seen[sequence][1]
            if not held.next - 1 <= high < held.next + n:
                raise WrongPositions("last position after an abort", f"{held.next - 1} to {held.next + n - 1}", high)
            new = new.without_suffix(high + 1)
        elif code == 0:
            self._compare(held, tokens, logits)
        else:
            self._expect_decoded(code, n)
        self._settle({(context, sequence): new}, context, 1 << 20)

    def _expect_decoded(self, code: int, n: int) -> None:
        if code != 0:
            raise WrongResult(f"decode of {n} tokens that fit", 0, code)

    def _settle(self, new: Mapping[tuple[int, int], Held], context: int, batch: int) -> None:
        for key, held in new.items():
            self._held[key] = held
            self._last_batch[key] = batch
        self._pending = {  # a decode makes all copies and shifts of its context, and the rollbacks of its own sequences
            key: what if key[0] != context else what & {"rollback"}
            for key, what in self._pending.items()
            if key not in new
        }
        self._check_positions(context)

    def _compare(self, held: Held, tokens: tuple[int, ...], logits: Logits) -> None:
        if not held.judged:
            return
        key = self.settings, held.script, tokens
        if key not in self.replays:
            if len(self.replays) >= _KEPT_REPLAYS:
                self.replays.pop(next(iter(self.replays)))
            self.replays[key] = self.stage.replay(self.settings, held.script, tokens, held.next)
            self.calls += 2 + len(held.script)
        expected = self.replays[key]
        deviation = nmse(logits, expected)
        if deviation <= self.limit:
            self.worst = max(self.worst, deviation)
            return
        row = int(np.argmax(np.abs(logits - expected).max(axis=1)))
        self.expected_script = held.script, tokens, held.next
        raise WrongLogits(
            f"logits of {len(tokens)} tokens at {held.next}, row {row}", expected[row, :3], logits[row, :3], deviation
        )

    # -- removing, copying, moving

    def _do_remove(self, context: int, sequence: int, y: int, z: int) -> None:
        """A whole sequence, spelled in some way."""
        begin, end = [(-1, -1), (0, -1), (0, 1 << 20), (-1, 1 << 20)][y % 4]
        everything = z % 4 == 0 and not (self.memory["recurrent"] and self._avoids("SM-03/removal-wildcard"))
        which = -1 if everything else sequence
        if end > 0 and self._rollback_waits(context, range(self.settings.n_seq_max) if everything else (sequence,)):
            return
        line = f'seen = memory(c{context}, "seq_rm", {which}, {begin}, {end})'
        if not self._make(line, "rm", context, which, begin, end):
            raise WrongResult("removal of all sequences" if everything else "removal of a whole sequence", True, False)
        for s in range(self.settings.n_seq_max) if everything else (sequence,):
            self._put(context, s, Held())
        self._check_positions(context)

    def _do_remove_suffix(self, context: int, sequence: int, y: int, _: int) -> None:
        held = self._held[context, sequence]
        if len(held.positions) < 2:
            return
        depth = 1 + y % min(12 if y % 3 else 200, len(held.positions) - 1)
        begin = held.positions[-depth]
        if self._rollback_is_known(context, sequence, depth) or self._below_window_is_known(held, begin):
            return
        line = f'seen = memory(c{context}, "seq_rm", {sequence}, {begin}, -1)'
        if self._make(line, "rm", context, sequence, begin, -1):
            self._change(context, sequence, held.without_suffix(begin), "rollback")
            self._last_batch[context, sequence] = 0
        self._check_positions(context)

    def _rollback_waits(self, context: int, sequences: Iterable[int]) -> bool:
        """Whether one of these has a rollback that no decode has followed, where emptying it other than by open ends is known to fail."""
        known = self.memory["n_rs_seq"] and self._avoids("SM-04/emptied-while-a-rollback-is-pending")
        return bool(known) and any("rollback" in self._waiting(context, s) for s in sequences)

    def _rollback_is_known(self, context: int, sequence: int, depth: int) -> bool:
        if not self.memory["n_rs_seq"]:
            return False
        last = self._last_batch.get((context, sequence), 0)
        if self._avoids("SM-06/trimming-a-copy-moves-the-original") and (context, sequence) in self._shared:
            return True
        if self._avoids("SM-01/rollback-whole-last-batch") and depth >= last:
            return True
        held = self._held[context, sequence]
        has_gap = len(held.positions) < held.next - held.positions[0]
        if self._avoids("SM-07/rollback-into-a-gap") and has_gap:
            return True
        return self._avoids("SM-01/rollback-after-single-tokens") and (
            last == 1 or "rollback" in self._waiting(context, sequence)
        )

    def _below_window_is_known(self, held: Held, begin: int) -> bool:
        window = self.memory["window"] if self._slides else 0
        known = self._avoids("SM-07/sliding-window-removal-below-the-window")
        return bool(window) and known and held.next > window and begin < held.next

    def _do_remove_inside(self, context: int, sequence: int, y: int, z: int) -> None:
        held = self._held[context, sequence]
        n = len(held.positions)
        if n < 4 or self._slides:
            return
        first = y % (n - 2)
        begin, end = held.positions[first], held.positions[min(first + 1 + z % 10, n - 2)] + 1
        line = f'seen = memory(c{context}, "seq_rm", {sequence}, {begin}, {end})'
        if self._make(line, "rm", context, sequence, begin, end):
            self._change(context, sequence, held.without(begin, end, judged=not self.memory["recurrent"]))
        self._check_positions(context)

    def _do_remove_nothing(self, context: int, sequence: int, y: int, _: int) -> None:
        n = self._held[context, sequence].next
        begin, end = [(n, -1), (n + 5, n + 9), (max(n // 2, 1), max(n // 2, 1))][y % 3]
        if begin <= 0:
            return
        self._make(
            f'seen = memory(c{context}, "seq_rm", {sequence}, {begin}, {end})', "rm", context, sequence, begin, end
        )
        self._check_positions(context)

    def _do_keep(self, context: int, sequence: int, *_: int) -> None:
        streams = self.memory["attention"] and not self.settings.kv_unified and self.settings.n_seq_max > 1
        if streams and self._avoids("SM-04/keeping-one-removes-the-others"):
            return
        if self._rollback_waits(context, [s for s in range(self.settings.n_seq_max) if s != sequence]):
            return
        self._make(f'memory(c{context}, "seq_keep", {sequence})', "keep", context, sequence)
        for s in range(self.settings.n_seq_max):
            if s != sequence:
                self._put(context, s, Held())
        self._check_positions(context)

    def _do_clear(self, context: int, _: int, y: int, z: int) -> None:
        self._make(f'memory(c{context}, "clear", {bool(y % 2)})', "clear", context, bool(y % 2))
        for s in range(self.settings.n_seq_max):
            self._put(context, s, Held())
        self._check_positions(context)

    def _do_copy(self, context: int, sequence: int, y: int, z: int) -> None:
        """A whole sequence, or a prefix, into another that is emptied first."""
        destination = y % self.settings.n_seq_max
        held = self._held[context, sequence]
        if destination == sequence or not held.positions:
            return
        if self._slides and self.settings.kv_unified and self._avoids("SM-10/sliding-cells-of-a-copy"):
            return
        partial = (
            z % 4 == 1 and held.judged and not self.memory["recurrent"] and all(op[0] == "dec" for op in held.script)
        )
        partial = partial and not self._slides
        if partial and not self.settings.kv_unified and self._avoids("SM-09/partial-copy-between-streams"):
            partial = False
        waits = self.memory["n_rs_seq"] and "rollback" in self._waiting(context, sequence)
        if waits and self._avoids("SM-05/copy-of-a-rolled-back-sequence"):
            return
        end = 1 + z // 4 % len(held.positions) if partial else -1
        if self._held[context, destination].positions:
            self._do_remove(context, destination, 0, 1)
        line = f'memory(c{context}, "seq_cp", {sequence}, {destination}, {0 if partial else -1}, {end})'
        self._make(line, "cp", context, sequence, destination, 0 if partial else -1, end)
        self._put(context, destination, held.without_suffix(end) if partial else held)
        self._last_batch[context, destination] = self._last_batch.get((context, sequence), 0)
        self._pending[context, destination] = self._waiting(context, sequence) | {"copy"}
        self._shared |= {(context, sequence), (context, destination)}
        self._check_positions(context)
        streams = self.memory["attention"] and not self.settings.kv_unified
        if streams and self._avoids("SM-05/source-changed-while-a-copy-is-pending"):
            self._do_decode(context, destination, 0, z)  # which makes the copy

    def _do_shift(self, context: int, sequence: int, y: int, z: int) -> None:
        """Everything from somewhere on moves up, and leaves a gap."""
        held = self._held[context, sequence]
        if len(held.positions) < 2 or held.next > 100 or (context, sequence) in self._shared:
            return
        if not self.memory["can_shift"] or self._slides:
            return
        begin, delta = held.positions[1 + y % (len(held.positions) - 1)], 1 + z % 10
        line = f'memory(c{context}, "seq_add", {sequence}, {begin}, -1, {delta})'
        self._make(line, "add", context, sequence, begin, -1, delta)
        shifted = held.shifted(begin, delta)
        judged = held.judged and not self.memory["recurrent"]
        self._change(context, sequence, Held(shifted.script, shifted.positions, judged), "shift")
        self._check_positions(context)

    def _do_divide(self, context: int, sequence: int, y: int, _: int) -> None:
        """Positions of the last token are divided, so that a gap closes or nothing changes; only counted, not judged."""
        if not self.memory["can_shift"] or self.memory["recurrent"]:
            return
        held = self._held[context, sequence]
        if len(held.positions) != 1 or (context, sequence) in self._shared:
            return
        self._make(
            f'memory(c{context}, "seq_div", {sequence}, 0, -1, {2 + y % 3})', "div", context, sequence, 0, -1, 2 + y % 3
        )
        self._check_positions(context)

    # -- states

    def _pending_is_known(self, context: int, sequence: int) -> bool:
        waiting = self._waiting(context, sequence)
        known = {
            "shift": "RP-01/save-while-a-shift-is-pending",
            "copy": "SM-05/save-while-a-copy-is-pending",
        }
        return any(what in waiting and self._avoids(id) for what, id in known.items())

    def _do_save(self, context: int, sequence: int, y: int, _: int) -> None:
        held = self._held[context, sequence]
        if self._pending_is_known(context, sequence):
            return
        if not held.positions and self._avoids("SM-04/empty-blob-into-a-dirty-sequence"):
            return
        flags = [0, 0, 1, 2, 3][y % 5]
        line = f"b{len(self._saved)} = save(c{context}, {sequence}, {flags})"
        slot, announced, written = self._make(line, "save", context, sequence, flags)
        if announced != written:
            raise WrongResult("bytes written of a state", announced, written)
        if flags & 2:
            for saved in self._saved:
                if saved.flags & 2 and (saved.context, saved.sequence) == (context, sequence):
                    saved.is_valid = False
        self._saved.append(_Saved(slot, context, sequence, (held,), flags))
        self._check_positions(context)

    def _usable(self, y: int, flags: Collection[int]) -> _Saved | None:
        found = [saved for saved in self._saved if saved.flags in flags and saved.is_valid and len(saved.held) == 1]
        return found[y % len(found)] if found else None

    def _do_load(self, context: int, sequence: int, y: int, z: int) -> None:
        saved = self._usable(y, (0, 2) if z % 2 else (0,))
        if saved is None:
            return
        if saved.flags & 2:
            context = saved.context
        line = f"seen = load(c{context}, b{self._saved.index(saved)}, {sequence}, {saved.flags})"
        consumed, given = self._make(line, "load", context, saved.slot, sequence, saved.flags)
        self._take_load(context, sequence, saved.held[0], consumed, given)

    def _take_load(self, context: int, sequence: int, held: Held, consumed: int, given: int) -> None:
        if consumed != given:
            raise WrongResult("bytes consumed of a state that fits", given, consumed)
        self._put(context, sequence, held)
        self._last_batch[context, sequence] = 0
        self._check_positions(context)

    def _do_return(self, context: int, sequence: int, y: int, _: int) -> None:
        """Load a partial state of this very sequence, and remove what came after it."""
        if not self.memory["partial"]:
            return
        saved = self._usable(y, (1, 3))
        if saved is None or not saved.held[0].positions or not saved.held[0].judged:
            return
        context, sequence = saved.context, saved.sequence
        held, now = saved.held[0], self._held[saved.context, saved.sequence]
        if now.positions[: len(held.positions)] != held.positions or not _extends(now.script, held.script):
            return
        if self._below_window_is_known(now, held.next) or self._pending_is_known(context, sequence):
            return
        line = f"seen = load(c{context}, b{self._saved.index(saved)}, {sequence}, {saved.flags})"
        consumed, given = self._make(line, "load", context, saved.slot, sequence, saved.flags)
        if consumed != given:
            raise WrongResult("bytes consumed of a partial state that fits", given, consumed)
        line = f'memory(c{context}, "seq_rm", {sequence}, {held.next}, -1)'
        if not self._make(line, "rm", context, sequence, held.next, -1):
            raise WrongResult("removal of the suffix after a partial load", True, False)
        self._put(context, sequence, held)
        self._last_batch[context, sequence] = 0
        self._check_positions(context)

    def _do_load_cut(self, context: int, sequence: int, y: int, z: int) -> None:
        """What must be refused leaves the sequence as it was, or empty."""
        saved = self._usable(y, (0,))
        known = (self.memory["recurrent"] and self.memory["attention"]) or self.memory["window"]
        if saved is None or (known and self._avoids("RB-01/rejected-restore-leaves-half-a-state")):
            return
        line = f"b = b{self._saved.index(saved)}; seen = load(c{context}, b[: len(b) * {z % 1000} // 1000], {sequence})"
        consumed, _given = self._make(line, "load", context, saved.slot, sequence, 0, z % 1000)
        self._take_refusal(context, sequence, consumed)

    def _do_load_noise(self, context: int, sequence: int, y: int, _: int) -> None:
        saved = self._usable(y, (0,))
        if saved is None:
            return
        line = f"seen = load(c{context}, bytes(len(b{self._saved.index(saved)})), {sequence})"
        consumed, _given = self._make(line, "load_noise", context, saved.slot, sequence)
        self._take_refusal(context, sequence, consumed)

    def _do_load_cut_on_device(self, context: int, sequence: int, y: int, z: int) -> None:
        saved = self._usable(y, (2,))
        if saved is None or self._avoids("RB-01/on-device-restore-of-a-bad-blob"):
            return
        line = (
            f"b = b{self._saved.index(saved)}; seen = load(c{context}, b[: len(b) * {z % 1000} // 1000], {sequence}, 2)"
        )
        consumed, _given = self._make(line, "load", saved.context, saved.slot, sequence, 2, z % 1000)
        self._take_refusal(saved.context, sequence, consumed)

    def _take_refusal(self, context: int, sequence: int, consumed: int) -> None:
        if consumed:
            raise WrongResult("bytes consumed of what is no state", 0, consumed)
        if self._seen[sequence] == (-1, -1):
            self._put(context, sequence, Held())
        self._check_positions(context)

    def _do_through_file(self, context: int, sequence: int, y: int, _: int) -> None:
        held, destination = self._held[context, sequence], y % self.settings.n_seq_max
        if not held.positions or self._pending_is_known(context, sequence):
            return
        line = f"load(c{context}, save(c{context}, {sequence}), {destination})  # through a file"
        if not self._make(line, "through_file", context, sequence, destination):
            raise WrongResult("bytes read of a file", "more than 0", 0)
        self._put(context, destination, held)
        self._last_batch[context, destination] = 0
        self._check_positions(context)

    def _do_move_context(self, context: int, *_: int) -> None:
        """Save a whole context and load it into the other one."""
        sequences = range(self.settings.n_seq_max)
        if any(self._pending_is_known(context, s) for s in sequences):
            return
        crowded = self._shared or any(self._waiting(context, s) for s in sequences)
        if self.memory["n_rs_seq"] and crowded and self._avoids("SM-06/saving-the-context-after-trimming-a-copy"):
            return
        if self._slides and self._avoids("RP-01/long-decode-after-a-context-was-restored"):
            return
        held = tuple(self._held[context, s] for s in sequences)
        line = f"w = (ctypes.c_uint8 * L.llama_state_get_size(c{context}))(); n = L.llama_state_get_data(c{context}, w, len(w))"
        slot, announced, written = self._make(line, "save_context", context)
        if written > announced:
            raise WrongResult("bytes written of a context", announced, written)
        consumed, given = self._make(
            f"seen = L.llama_state_set_data(c{1 - context}, w, n)", "load_context", 1 - context, slot
        )
        if consumed != given:
            raise WrongResult("bytes consumed of a context's state", given, consumed)
        for s in sequences:
            self._put(1 - context, s, held[s])
            self._last_batch[1 - context, s] = 0
            if (context, s) in self._shared:
                self._shared.add((1 - context, s))
        self._check_positions(1 - context)

    def _waiting(self, context: int, sequence: int) -> frozenset[str]:
        """What was asked of a sequence and is done with the next decode only."""
        return self._pending.get((context, sequence), frozenset())

    def _change(self, context: int, sequence: int, held: Held, *waiting: str) -> None:
        """A sequence is another one now; what waits still does, and more."""
        before = self._waiting(context, sequence)
        self._put(context, sequence, held)
        self._pending[context, sequence] = before.union(waiting)

    def _put(self, context: int, sequence: int, held: Held) -> None:
        key = context, sequence
        self._held[key] = held
        self._pending.pop(key, None)
        if not held.positions:
            self._shared.discard(key)


def _extends(script: Script, start: Script) -> bool:
    """Whether a history begins with another one, and only decoded since."""
    return all(op[0] == "dec" for op in script) and _flat(script)[: len(_flat(start))] == _flat(start)


def _flat(script: Script) -> tuple[int, ...]:
    return tuple(token for op in script if op[0] == "dec" for token in op[2])


def _fingerprint(stderr: str) -> str:
    """File and line of a failed assertion, or what was thrown."""
    for line in stderr.splitlines():
        if ".cpp:" in line or ".c:" in line:
            return line.rpartition("/")[2][:160]
        if "what():" in line:
            return line.strip()[:160]
    return ""


#: What a walk may do, and how often in proportion.
STEPS: dict[str, int] = {
    "decode": 10,
    "decode_together": 3,
    "decode_coupled": 1,
    "decode_wrongly": 1,
    "decode_aborted": 1,
    "remove": 2,
    "remove_suffix": 5,
    "remove_inside": 2,
    "remove_nothing": 1,
    "keep": 1,
    "clear": 1,
    "copy": 3,
    "shift": 2,
    "divide": 1,
    "save": 4,
    "load": 4,
    "return": 2,
    "load_cut": 1,
    "load_noise": 1,
    "load_cut_on_device": 1,
    "through_file": 1,
    "move_context": 1,
}

#: Known failures that a walk can keep clear of.
AVOIDABLE = (
    "SM-01/rollback-whole-last-batch",
    "SM-01/rollback-after-single-tokens",
    "SM-03/removal-wildcard",
    "SM-04/empty-blob-into-a-dirty-sequence",
    "SM-04/keeping-one-removes-the-others",
    "SM-04/emptied-while-a-rollback-is-pending",
    "SM-05/save-while-a-copy-is-pending",
    "SM-05/copy-of-a-rolled-back-sequence",
    "SM-05/source-changed-while-a-copy-is-pending",
    "SM-06/trimming-a-copy-moves-the-original",
    "SM-06/saving-the-context-after-trimming-a-copy",
    "SM-07/abort-leaves-a-wrong-position",
    "SM-07/sliding-window-removal-below-the-window",
    "SM-07/rollback-into-a-gap",
    "SM-09/partial-copy-between-streams",
    "RP-01/save-while-a-shift-is-pending",
    "RB-01/rejected-restore-leaves-half-a-state",
    "RB-01/on-device-restore-of-a-bad-blob",
    "RB-02/rollback-depth-of-a-micro-batch",
    "RP-01/long-decode-after-a-context-was-restored",
    "SM-10/sliding-cells-of-a-copy",
)

#: Those among them that end the process.
DEADLY = frozenset(
    (
        "SM-06/saving-the-context-after-trimming-a-copy",
        "SM-09/partial-copy-between-streams",
        "RB-01/on-device-restore-of-a-bad-blob",
        "RB-02/rollback-depth-of-a-micro-batch",
    )
)


def run(walk: Walk, steps: Collection[Step]) -> Finding | None:
    """Walk the steps from a new context; the first finding, or None."""
    try:
        walk.open()
        for step in steps:
            walk.step(step)
        walk.finish()
    except Finding as finding:
        return finding
    return None


def random_steps(seed: int, n: int) -> list[Step]:
    """Steps drawn by their weights."""
    random = np.random.default_rng(seed)
    weights = np.array(list(STEPS.values()), float)
    names = random.choice(list(STEPS), n, p=weights / weights.sum())
    return [(str(name), *(int(k) for k in random.integers(0, 1 << 10, 3))) for name in names]  # type: ignore[misc]


def settings_of(
    n_seq_max: int, n_rs_seq: int, kv_unified: bool, swa_full: bool, flash_attn: bool, ubatch: int, type_k: str
) -> ContextSettings:
    """Settings with room for every sequence that a walk may hold."""
    return ContextSettings(
        n_ctx=1024 * n_seq_max,
        n_batch=1024,
        n_ubatch=ubatch,
        n_seq_max=n_seq_max,
        n_rs_seq=n_rs_seq,
        kv_unified=kv_unified,
        swa_full=swa_full,
        flash_attn="on" if flash_attn else "off",
        type_k=type_k,
        type_v=type_k,
    )
