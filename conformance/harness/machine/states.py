"""Steps that save and load states: one sequence and whole contexts, in memory, on the device and through files."""

from __future__ import annotations

from collections.abc import Collection

from .findings import WrongResult
from .history import Held
from .moving import below_window_is_known
from .steps import step
from .walk import Key, Saved, Walk

_PARTIAL, _ON_DEVICE = 1, 2


@step(4)
def save(walk: Walk, key: Key, y: int, z: int) -> None:
    """One sequence, with any flags."""
    context, sequence = key
    if pending_is_known(walk, key):
        return
    flags = (0, 0, 1, 2, 3)[y % 5]
    line = f"b{len(walk.saved)} = save(c{context}, {sequence}, {flags})"
    slot, announced, written = walk.make(line, "save", context, sequence, flags)
    if announced != written:
        raise WrongResult("bytes written of a state", announced, written)
    if flags & _ON_DEVICE:
        for saved in walk.saved:
            if saved.flags & _ON_DEVICE and (saved.context, saved.sequence) == key:
                saved.is_valid = False
    walk.saved.append(Saved(slot, context, sequence, (walk.held[key],), flags))
    walk.check(context)
    if not flags and z % 2:
        walk.judge_state(key)


@step(4)
def load(walk: Walk, key: Key, y: int, z: int) -> None:
    """A state into any sequence of any context, or of its own context where it lies on the device."""
    flags = {0} if walk.partial_is_less else {0, _PARTIAL}
    if z % 2 and not (walk.is_quantized and walk.avoids("RP-01/quantized-cache-on-device")):
        flags |= {flag | _ON_DEVICE for flag in flags}
    saved = usable(walk, y, flags)
    if saved is None:
        return
    context, sequence = (saved.context if saved.flags & _ON_DEVICE else key[0]), key[1]
    (held,) = saved.held
    overwrites = not held.positions and walk.held[context, sequence].positions
    if overwrites and walk.avoids("SM-04/empty-blob-into-a-dirty-sequence"):
        return
    room = _room_for(walk, (context, sequence), held)
    if room is not True and half_a_state_is_known(walk):
        return
    line = f"seen = load(c{context}, b{walk.saved.index(saved)}, {sequence}, {saved.flags})"
    consumed, given = walk.make(line, "load", context, saved.slot, sequence, saved.flags)
    if not consumed and room is not True:
        take_refusal(walk, context, [sequence], consumed)
        return
    take_load(walk, (context, sequence), held, consumed, given)


@step(3)
def load_partial(walk: Walk, key: Key, y: int, z: int) -> None:
    """A partial state into its own sequence, or another one that still holds its history; what came after it is removed."""
    bad = walk.memory.window and walk.is_quantized and walk.avoids("RP-01/quantized-cache-on-device")
    saved = usable(walk, y, {_PARTIAL} if bad else {_PARTIAL, _PARTIAL | _ON_DEVICE})
    if saved is None or not walk.partial_is_less or not saved.held[0].positions or not saved.held[0].judged:
        return
    target = key if z % 2 else (saved.context, saved.sequence or 0)
    context, sequence = target if not saved.flags & _ON_DEVICE else (saved.context, target[1])
    target = context, sequence
    held, now = saved.held[0], walk.held[target]
    if not now.extends(held) or below_window_is_known(walk, now, held.next) or pending_is_known(walk, target):
        return
    if walk.memory.n_rs_seq and target in walk.shared and walk.avoids("SM-06/trimming-a-copy-moves-the-original"):
        return
    line = f"seen = load(c{context}, b{walk.saved.index(saved)}, {sequence}, {saved.flags})"
    consumed, given = walk.make(line, "load", context, saved.slot, sequence, saved.flags)
    if consumed != given:
        raise WrongResult("bytes consumed of a partial state that fits", given, consumed)
    line = f'seen = memory(c{context}, "seq_rm", {sequence}, {held.next}, -1)'
    if not walk.make(line, "rm", context, sequence, held.next, -1):
        raise WrongResult("removal of the suffix after a partial load", True, False)
    walk.put(target, held)
    walk.last_batch[target] = 0
    walk.check(context)


@step(1)
def through_file(walk: Walk, key: Key, y: int, z: int) -> None:
    """A sequence is written to a file and read into another one."""
    context, sequence = key
    held, target = walk.held[key], (context, y % walk.settings.n_seq_max)
    if not held.positions or pending_is_known(walk, key):
        return
    room = _room_for(walk, target, held)
    if room is not True and half_a_state_is_known(walk):
        return
    line = f"seen = load(c{context}, save(c{context}, {sequence}), {target[1]})  # through a file"
    consumed = walk.make(line, "through_file", context, sequence, target[1])
    if not consumed and room is not True:
        take_refusal(walk, context, [target[1]], 0)
        return
    take_load(walk, target, held, int(bool(consumed)), 1)


@step(2)
def save_context(walk: Walk, key: Key, y: int, z: int) -> None:
    """A whole context."""
    context, _ = key
    if not _context_can_be_saved(walk, context):
        return
    line = f"w{len(walk.saved)} = save_context(c{context})"
    slot, announced, written = walk.make(line, "save_context", context)
    if written > announced:
        raise WrongResult("bytes written of a context", announced, written)
    held = tuple(walk.held[context, s] for s in walk.sequences)
    shared = frozenset(s for s in walk.sequences if (context, s) in walk.shared)
    walk.saved.append(Saved(slot, context, None, held, shared=shared))
    walk.check(context)


@step(2)
def load_context(walk: Walk, key: Key, y: int, z: int) -> None:
    """A whole context, back into itself or into the other one."""
    context, _ = key
    saved = usable(walk, y, {0}, whole=True)
    if saved is None:
        return
    line = f"seen = load_context(c{context}, w{walk.saved.index(saved)})"
    consumed, given = walk.make(line, "load_context", context, saved.slot)
    if consumed != given:
        raise WrongResult("bytes consumed of a context's state", given, consumed)
    _take_context(walk, context, saved)


@step(1)
def context_through_file(walk: Walk, key: Key, y: int, z: int) -> None:
    """A whole context is written to a file and read into the other one, or into itself."""
    context, _ = key
    destination = (context + y) % 2
    if not _context_can_be_saved(walk, context):
        return
    line = f"seen = load_context(c{destination}, save_context(c{context}))  # through a file"
    walk.touch(*((destination, s) for s in walk.sequences))
    if not walk.make(line, "context_through_file", context, destination):
        raise WrongResult("a context's file that was read", True, False)
    walk.make(f"seen = ends(c{destination}, 0)", "ends", destination, 0)
    held = tuple(walk.held[context, s] for s in walk.sequences)
    shared = frozenset(s for s in walk.sequences if (context, s) in walk.shared)
    _take_context(walk, destination, Saved(-1, context, None, held, shared=shared))


def usable(walk: Walk, y: int, flags: Collection[int], *, whole: bool = False) -> Saved | None:
    """One of the states that may be loaded."""
    found = [each for each in walk.saved if each.flags in flags and each.is_valid and (each.sequence is None) == whole]
    return found[y % len(found)] if found else None


def take_load(walk: Walk, key: Key, held: Held, consumed: int, given: int) -> None:
    """A state that fits was loaded into a sequence."""
    if consumed != given:
        raise WrongResult("bytes consumed of a state that fits", given, consumed)
    walk.put(key, held)
    walk.last_batch[key] = 0
    walk.shared.discard(key)
    walk.check(key[0])


def take_refusal(walk: Walk, context: int, sequences: Collection[int], consumed: int) -> None:
    """What is no state, or has no room, was loaded: each sequence that was meant is as it was, or empty."""
    if consumed:
        raise WrongResult("bytes consumed of what is no state", 0, consumed)
    for s in sequences:
        if walk.make(f"seen = ends(c{context}, {s})", "ends", context, s) == (-1, -1):
            walk.put((context, s), Held())
    walk.check(context)


def pending_is_known(walk: Walk, key: Key) -> bool:
    """Whether saving before a decode has done what waits is known to fail."""
    known = {
        "shift": "RP-01/save-while-a-shift-is-pending",
        "copy": "SM-05/save-while-a-copy-is-pending",
    }
    return any(what in walk.waiting(key) and walk.avoids(id) for what, id in known.items())


def half_a_state_is_known(walk: Walk) -> bool:
    """Whether what is refused is known to leave a part, because the memory has two."""
    halves = (walk.memory.recurrent and walk.memory.attention) or walk.memory.window
    return bool(halves) and walk.avoids("RB-01/rejected-restore-leaves-half-a-state")


def _room_for(walk: Walk, key: Key, held: Held) -> bool | None:
    """Whether a state has room once its destination is emptied."""
    before = walk.held[key]
    walk.held[key] = Held()
    room = walk.fits(key[0], {key[1]: len(held.positions)})
    walk.held[key] = before
    return room


def _context_can_be_saved(walk: Walk, context: int) -> bool:
    keys = [(context, s) for s in walk.sequences]
    if any(pending_is_known(walk, key) for key in keys):
        return False
    crowded = any(key in walk.shared or walk.waiting(key) for key in keys)
    if walk.memory.n_rs_seq and crowded and walk.avoids("SM-06/saving-the-context-after-trimming-a-copy"):
        return False
    return not (walk.slides and walk.avoids("RP-01/long-decode-after-a-context-was-restored"))


def _take_context(walk: Walk, context: int, saved: Saved) -> None:
    for s in walk.sequences:
        key = context, s
        walk.put(key, saved.held[s])
        walk.last_batch[key] = 0
        walk.shared.discard(key)
        if s in saved.shared:
            walk.shared.add(key)
    walk.check(context)
