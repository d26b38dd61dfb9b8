"""Steps that must be refused: they change nothing, or at most empty the sequence that they were about."""

from __future__ import annotations

from .findings import WrongResult
from .states import half_a_state_is_known, pending_is_known, take_refusal, usable
from .steps import step
from .walk import Key, Walk

_BEYOND = 1 << 20


@step(2)
def decode_wrongly(walk: Walk, key: Key, y: int, z: int) -> None:
    """A batch that is invalid."""
    context, sequence = key
    held = walk.held[key]
    start, tokens = held.next, list(walk.tokens(held.next, 3, z))
    positions, sequences = list(range(start, start + 3)), [[sequence]] * 3
    match y % 9:
        case 0:
            sequences = [[walk.settings.n_seq_max]] * 3
        case 1:
            tokens[1] = walk.memory.n_vocab
        case 2 if held.positions and walk.memory.position_components == 1:
            positions = [p + 2 for p in positions]
        case 3 if held.positions:
            positions = [p - 1 for p in positions]
        case 4:
            tokens[2] = -1
        case 5:
            positions.reverse()
        case 6:
            tokens, positions, sequences = [], [], []
        case 7 if walk.streams:
            others = (sequence + 1) % walk.settings.n_seq_max
            sequences = [sorted([sequence, others])] * 3
            if walk.held[context, others] != held:
                return
        case _:
            sequences = [[-1]] * 3
    line = f"seen = dec(c{context}, {tokens}, {positions}, {sequences})"
    code, _logits = walk.make(line, "decode", context, tokens, positions, sequences)
    if code == 0:
        raise WrongResult("decode of an invalid batch", "other than 0", code)
    walk.check(context)


@step(1)
def name_no_sequence(walk: Walk, key: Key, y: int, z: int) -> None:
    """A memory call on an id that no sequence has."""
    context, sequence = key
    id = (walk.settings.n_seq_max, 255, 256, -2, _BEYOND)[y % 5]
    if walk.memory.attention and walk.avoids("SM-03/sequence-ids-out-of-range"):
        return
    if walk.memory.attention and not walk.streams and 0 <= id < 256:
        return
    calls: list[tuple[str, str, tuple[int, ...]]] = [
        ("seq_rm", "rm", (id, -1, -1)),
        ("seq_rm", "rm", (id, 1, 3)),
        ("seq_cp", "cp", (id, sequence, -1, -1)),
        ("seq_cp", "cp", (sequence, id, -1, -1)),
        ("seq_pos_max", "ends", (id,)),
    ]
    if walk.memory.can_shift:
        calls += [("seq_add", "add", (id, 1, -1, 2)), ("seq_div", "div", (id, 0, -1, 2))]
    name, method, arguments = calls[z % len(calls)]
    walk.make(f'seen = memory(c{context}, "{name}", {", ".join(map(str, arguments))})', method, context, *arguments)
    walk.check(context)


@step(1)
def divide_by_zero(walk: Walk, key: Key, y: int, z: int) -> None:
    """Positions divided by 0."""
    context, sequence = key
    if walk.avoids("SM-03/division-by-zero") or not walk.memory.can_shift:
        return
    walk.make(f'memory(c{context}, "seq_div", {sequence}, 0, -1, 0)', "div", context, sequence, 0, -1, 0)
    walk.check(context)


@step(1)
def load_into_no_sequence(walk: Walk, key: Key, y: int, z: int) -> None:
    """A state into an id that no sequence has."""
    context, _ = key
    saved = usable(walk, y, {0})
    id = (-1, walk.settings.n_seq_max, -2)[z % 3]
    out_of_range = id != -1 and walk.memory.attention and walk.avoids("SM-03/sequence-ids-out-of-range")
    if saved is None or walk.avoids("RB-01/load-into-no-sequence") or out_of_range:
        return
    line = f"seen = load(c{context}, b{walk.saved.index(saved)}, {id})"
    consumed, _given = walk.make(line, "load", context, saved.slot, id, 0)
    take_refusal(walk, context, [], consumed)


@step(1)
def shift_where_not_allowed(walk: Walk, key: Key, y: int, z: int) -> None:
    """A shift and a division where positions cannot be shifted."""
    context, sequence = key
    if walk.memory.can_shift or walk.avoids("SP-02/shift-where-it-is-not-allowed"):
        return
    name, method, arguments = [("seq_add", "add", (sequence, 1, -1, 2)), ("seq_div", "div", (sequence, 0, -1, 2))][
        y % 2
    ]
    walk.make(f'memory(c{context}, "{name}", {", ".join(map(str, arguments))})', method, context, *arguments)
    walk.check(context)


@step(1)
def save_into_too_little(walk: Walk, key: Key, y: int, z: int) -> None:
    """A buffer that is shorter than announced."""
    context, sequence = key
    line = f"seen = save_short(c{context}, {sequence}, {1 + y % 40})"
    written = walk.make(line, "save_short", context, sequence, 1 + y % 40)
    if written:
        raise WrongResult("bytes written into a buffer that is too short", 0, written)
    walk.check(context)


@step(1)
def load_cut(walk: Walk, key: Key, y: int, z: int) -> None:
    """A state without its end."""
    context, sequence = key
    saved = usable(walk, y, {0})
    if saved is None or half_a_state_is_known(walk):
        return
    blob = f"b{walk.saved.index(saved)}"
    line = f"seen = load(c{context}, {blob}[: len({blob}) * {z % 1000} // 1000], {sequence})"
    consumed, _given = walk.make(line, "load", context, saved.slot, sequence, 0, z % 1000)
    take_refusal(walk, context, [sequence], consumed)


@step(1)
def load_noise(walk: Walk, key: Key, y: int, z: int) -> None:
    """As many random bytes as a state has."""
    context, sequence = key
    saved = usable(walk, y, {0})
    if saved is None:
        return
    noise = f"np.random.default_rng({saved.slot}).integers(0, 256, len(b{walk.saved.index(saved)}), np.uint8).tobytes()"
    line = f"seen = load(c{context}, {noise}, {sequence})"
    consumed, _given = walk.make(line, "load_noise", context, saved.slot, sequence)
    take_refusal(walk, context, [sequence], consumed)


@step(1)
def load_with_other_flags(walk: Walk, key: Key, y: int, z: int) -> None:
    """A full state as a partial one or the reverse, where they differ."""
    context, sequence = key
    saved = usable(walk, y, {0, 1})
    if saved is None or not walk.partial_is_less or not saved.held[0].positions or half_a_state_is_known(walk):
        return
    if pending_is_known(walk, key):
        return
    line = f"seen = load(c{context}, b{walk.saved.index(saved)}, {sequence}, {1 - saved.flags})"
    consumed, _given = walk.make(line, "load", context, saved.slot, sequence, 1 - saved.flags)
    take_refusal(walk, context, [sequence], consumed)


@step(1)
def load_cut_on_device(walk: Walk, key: Key, y: int, z: int) -> None:
    """A state on the device without the end of its description."""
    saved = usable(walk, y, {2})
    if saved is None or walk.avoids("RB-01/on-device-restore-of-a-bad-blob"):
        return
    blob, context = f"b{walk.saved.index(saved)}", saved.context
    line = f"seen = load(c{context}, {blob}[: len({blob}) * {z % 1000} // 1000], {key[1]}, 2)"
    consumed, _given = walk.make(line, "load", context, saved.slot, key[1], 2, z % 1000)
    take_refusal(walk, context, [key[1]], consumed)


@step(1)
def load_cut_context(walk: Walk, key: Key, y: int, z: int) -> None:
    """A whole context's state without its end."""
    context, _ = key
    saved = usable(walk, y, {0}, whole=True)
    if saved is None or half_a_state_is_known(walk) or walk.avoids("RB-01/truncated-context"):
        return
    blob = f"w{walk.saved.index(saved)}"
    line = f"seen = load_context(c{context}, {blob}[: len({blob}) * {z % 1000} // 1000])"
    consumed, _given = walk.make(line, "load_context", context, saved.slot, z % 1000)
    take_refusal(walk, context, walk.sequences, consumed)
