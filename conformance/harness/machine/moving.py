"""Steps that remove, copy, keep, shift and divide sequences."""

from __future__ import annotations

from collections.abc import Iterable

from .findings import WrongResult
from .history import Held
from .steps import step
from .walk import Key, Walk

_FAR = 1 << 20
_WHOLE = ((-1, -1), (0, -1), (0, _FAR), (-1, _FAR))
_SHIFTED_POSITIONS = 100


@step(2)
def remove(walk: Walk, key: Key, y: int, z: int) -> None:
    """A whole sequence, or all of them, spelled in some way."""
    context, sequence = key
    begin, end = _WHOLE[y % 4]
    everything = z % 4 == 0 and not (walk.memory.recurrent and walk.avoids("SM-03/removal-wildcard"))
    which, concerned = (-1, list(walk.sequences)) if everything else (sequence, [sequence])
    if end > 0 and _rollback_waits(walk, context, concerned):
        return
    if not _removes(walk, context, which, begin, end):
        raise WrongResult("removal of all sequences" if everything else "removal of a whole sequence", True, False)
    for s in concerned:
        walk.put((context, s), Held())
    walk.check(context)


@step(5)
def remove_suffix(walk: Walk, key: Key, y: int, z: int) -> None:
    """The last tokens of a sequence, by an open end or one that is far behind."""
    context, sequence = key
    held = walk.held[key]
    if len(held.positions) < 2:
        return
    depth = 1 + y % min(12 if y % 3 else 200, len(held.positions) - 1)
    begin = held.positions[-depth]
    if begin <= 0 or rollback_is_known(walk, key, depth) or below_window_is_known(walk, held, begin):
        return
    if _removes(walk, context, sequence, begin, _FAR if z % 4 == 1 else -1):
        walk.change(key, held.without_suffix(begin), "rollback")
        walk.last_batch[key] = 0
    walk.check(context)


@step(2)
def remove_inside(walk: Walk, key: Key, y: int, z: int) -> None:
    """A range that is not the end of a sequence, its first positions among others."""
    context, sequence = key
    held = walk.held[key]
    n = len(held.positions)
    if n < 4 or walk.slides:
        return
    first = y % (n - 2)
    begin, end = held.positions[first], held.positions[min(first + 1 + z % 10, n - 2)] + 1
    if held.positions[-1] < end:
        return
    if _removes(walk, context, sequence, begin if first or z % 2 else -1, end):
        walk.change(key, held.without(max(begin, 0), end, judged=not walk.memory.recurrent))
    walk.check(context)


@step(1)
def remove_range_of_all(walk: Walk, key: Key, y: int, z: int) -> None:
    """A range of positions, of every sequence at once."""
    context, _ = key
    everyone = [(context, s) for s in walk.sequences]
    longest = max(walk.held[each].next for each in everyone)
    begin, n = 1 + y % max(longest, 1), 1 + z % 10
    end = -1 if z % 3 == 0 else begin + n
    if walk.slides or _waits_for_rollback(walk, everyone):
        return
    if not _removes(walk, context, -1, begin, end):
        if not walk.memory.recurrent:
            raise WrongResult("removal of a range of all sequences of an attention cache", True, False)
    else:
        for each in everyone:
            held = walk.held[each]
            if not any(begin <= p and (end < 0 or p < end) for p in held.positions):
                continue
            is_suffix = end < 0 or held.positions[-1] < end
            inner = held.without(begin, end, judged=not walk.memory.recurrent)
            walk.change(each, held.without_suffix(begin) if is_suffix else inner)
            walk.last_batch[each] = 0
    walk.check(context)


@step(1)
def remove_nothing(walk: Walk, key: Key, y: int, z: int) -> None:
    """A range without a position: behind the end, far behind, with equal ends, the wrong way round; nothing may change."""
    context, sequence = key
    n = walk.held[key].next
    middle = max(n // 2, 1)
    begin, end = [(n, -1), (n + 5, n + 9), (middle, middle), (_FAR, -1), (middle + 3, middle)][y % 5]
    if begin > 0:
        _removes(walk, context, sequence, begin, end)
        walk.check(context)


@step(1)
def keep(walk: Walk, key: Key, y: int, z: int) -> None:
    """All sequences but one are emptied."""
    context, sequence = key
    others = [s for s in walk.sequences if s != sequence]
    if walk.streams and walk.avoids("SM-04/keeping-one-removes-the-others"):
        return
    if _rollback_waits(walk, context, others):
        return
    walk.make(f'memory(c{context}, "seq_keep", {sequence})', "keep", context, sequence)
    for s in others:
        walk.put((context, s), Held())
    walk.check(context)


@step(1)
def clear(walk: Walk, key: Key, y: int, z: int) -> None:
    """Everything is forgotten, with or without the contents."""
    context, _ = key
    walk.make(f'memory(c{context}, "clear", {bool(y % 2)})', "clear", context, bool(y % 2))
    for s in walk.sequences:
        walk.put((context, s), Held())
    walk.check(context)


@step(3)
def copy(walk: Walk, key: Key, y: int, z: int) -> None:
    """A whole sequence, its beginning, or a middle part, into one that is empty or emptied first; or onto itself."""
    context, sequence = key
    destination, held = y % walk.settings.n_seq_max, walk.held[key]
    target = context, destination
    is_late = walk.streams and walk.avoids("SM-05/source-changed-while-a-copy-is-pending")
    if destination == sequence or not held.positions:
        if destination == sequence or not (walk.held[target].positions or is_late):
            _copies(walk, context, sequence, destination, -1, -1)  # nothing
            walk.check(context)
        return
    if walk.slides and walk.settings.kv_unified and walk.avoids("SM-10/sliding-cells-of-a-copy"):
        return
    begin, end = -1, -1
    if z % 4 == 1 and held.judged and held.is_decoded_only and not walk.memory.recurrent and not walk.slides:
        begin, end = (
            held.positions[z // 8 % len(held.positions) if z & 16 else 0],
            held.positions[z // 4 % len(held.positions)],
        )
        if (walk.streams and walk.avoids("SM-09/partial-copy-between-streams")) or begin >= end:
            begin, end = -1, -1
    if walk.memory.n_rs_seq and "rollback" in walk.waiting(key) and walk.avoids("SM-05/copy-of-a-rolled-back-sequence"):
        return
    if walk.held[target].positions:
        remove(walk, target, 0, 1)
    _copies(walk, context, sequence, destination, begin, end)
    copied = held
    if end >= 0:
        copied = held.without_suffix(end)
        copied = copied.without(0, begin, judged=True) if begin > 0 else copied
    walk.put(target, copied)
    walk.last_batch[target] = walk.last_batch.get(key, 0)
    walk.wait(target, walk.waiting(key) | {"copy"})
    if copied.positions:
        walk.shared.update((key, target))
    walk.check(context)
    if is_late:
        walk.decode_next(target, walk.tokens(copied.next, 1, z), "seen = dec")  # which makes the copy


@step(2)
def shift(walk: Walk, key: Key, y: int, z: int) -> None:
    """A range moves up and leaves a gap, moves down into one, or moves by nothing; the order stays."""
    context, sequence = key
    held = walk.held[key]
    positions = held.positions
    if len(positions) < 2 or held.next > _SHIFTED_POSITIONS or _moves_others(walk, key):
        return
    if not walk.memory.can_shift or walk.slides or _shift_is_known(walk):
        return
    first = y % len(positions)
    last = len(positions) - 1 if z % 3 else min(first + z % 7, len(positions) - 1)
    begin = positions[first]
    end = -1 if last == len(positions) - 1 else positions[last] + 1
    up = 10 if end < 0 else max(positions[last + 1] - positions[last] - 1, 0)
    down = begin - (positions[first - 1] + 1 if first else 0)
    delta = -(z // 8 % (down + 1)) if z & 1 and down > 0 else z // 8 % (up + 1)
    if first and positions[first - 1] == begin:
        return
    walk.make(
        f'memory(c{context}, "seq_add", {sequence}, {begin}, {end}, {delta})',
        "add",
        context,
        sequence,
        begin,
        end,
        delta,
    )
    if delta:
        walk.change(key, held.shifted(begin, end, delta), "shift")
    walk.check(context)


@step(1)
def divide(walk: Walk, key: Key, y: int, z: int) -> None:
    """All positions are divided, so that several tokens share one."""
    context, sequence = key
    held = walk.held[key]
    if (
        not held.positions
        or not walk.memory.can_shift
        or walk.slides
        or _moves_others(walk, key)
        or _shift_is_known(walk)
    ):
        return
    divisor = 1 + y % 3
    line = f'memory(c{context}, "seq_div", {sequence}, 0, -1, {divisor})'
    walk.make(line, "div", context, sequence, 0, -1, divisor)
    if divisor > 1 and held.positions != (0,):
        walk.change(key, held.divided(0, -1, divisor), "shift")
    walk.check(context)


def _removes(walk: Walk, context: int, sequence: int, begin: int, end: int) -> bool:
    line = f'seen = memory(c{context}, "seq_rm", {sequence}, {begin}, {end})'
    return bool(walk.make(line, "rm", context, sequence, begin, end))


def _copies(walk: Walk, context: int, source: int, destination: int, begin: int, end: int) -> None:
    line = f'memory(c{context}, "seq_cp", {source}, {destination}, {begin}, {end})'
    walk.make(line, "cp", context, source, destination, begin, end)


# -- what is known to fail


def _rollback_waits(walk: Walk, context: int, sequences: Iterable[int]) -> bool:
    """Whether one of these has a rollback that no decode has followed, where emptying it other than by open ends is known to fail."""
    known = walk.avoids("SM-04/emptied-while-a-rollback-is-pending")
    return known and _waits_for_rollback(walk, [(context, s) for s in sequences])


def _waits_for_rollback(walk: Walk, keys: Iterable[Key]) -> bool:
    return bool(walk.memory.n_rs_seq) and any("rollback" in walk.waiting(key) for key in keys)


def rollback_is_known(walk: Walk, key: Key, depth: int) -> bool:
    """Whether taking back so many tokens of a recurrent state is known to fail."""
    if not walk.memory.n_rs_seq:
        return False
    last = walk.last_batch.get(key, 0)
    if walk.avoids("SM-06/trimming-a-copy-moves-the-original") and key in walk.shared:
        return True
    if walk.avoids("SM-01/rollback-whole-last-batch") and depth >= last:
        return True
    if walk.avoids("SM-01/rollback-after-another-sequence-came") and key in walk.moved:
        return True
    if walk.avoids("SM-07/rollback-into-a-gap") and walk.held[key].has_gap:
        return True
    single = last == 1 or "rollback" in walk.waiting(key)
    return single and walk.avoids("SM-01/rollback-after-single-tokens")


def below_window_is_known(walk: Walk, held: Held, begin: int) -> bool:
    """Whether a removal of what lies at a position and after is known to fail, because the window has moved on."""
    window = walk.memory.window if walk.slides else 0
    known = walk.avoids("SM-07/sliding-window-removal-below-the-window")
    return bool(window) and known and held.next > window and begin < held.next


def _moves_others(walk: Walk, key: Key) -> bool:
    """Whether moving a sequence's positions is known to move those of another one that shares its cells."""
    shares = key in walk.shared and (walk.memory.recurrent or not walk.streams)
    return shares and walk.avoids("SM-06/shifting-a-copy-moves-the-original")


def _shift_is_known(walk: Walk) -> bool:
    """Whether a shift of keys of this type is known to end the process."""
    type_k = walk.settings.type_k
    if type_k == "bf16":
        return walk.avoids("SP-03/shift-with-bf16-keys")
    return type_k not in ("f16", "f32") and walk.avoids("SP-03/shift-with-quantized-unrotated-keys")
