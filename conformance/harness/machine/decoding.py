"""Steps that decode: tokens and embeddings, one sequence and several, aborted, and without room."""

from __future__ import annotations

from .findings import WrongPositions
from .steps import step
from .walk import Key, Walk

_LONG_BATCH, _SNUG_BATCH, _SHORT_BATCH = 300, 120, 40


@step(10)
def decode(walk: Walk, key: Key, y: int, z: int) -> None:
    """Tokens of one sequence, at positions that are given or left to the library."""
    held = walk.held[key]
    most = _LONG_BATCH if walk.longest > 500 else _SNUG_BATCH if walk.is_snug else _SHORT_BATCH
    n = 1 + y % most
    if held.next + n > walk.longest:
        return
    walk.decode_next(key, walk.tokens(held.next, n, z), "seen = dec", automatic=bool(z & 8))


@step(2)
def decode_embeddings(walk: Walk, key: Key, y: int, z: int) -> None:
    """Embeddings of one sequence: a row of positions, or an image where positions are multi-dimensional."""
    context, sequence = key
    held, components = walk.held[key], walk.memory.position_components
    width = z % 4 if components > 1 else 0
    n, first = (width * (1 + y % 3) if width else 1 + y % 12), z % 500
    if held.next + n > walk.longest:
        return
    start = None if z & 8 and components == 1 else held.next
    line = f"seen = emb(c{context}, {first}, {n}, {start}, {sequence}, {width})"
    code, logits = walk.make(line, "embed", context, first, n, width, start, sequence)
    if walk.is_decoded(code, context, {sequence: n}):
        walk.compare(held, ("emb", held.next, first, n, width), logits)
        walk.settle({key: held.embedded(first, n, width)}, context, {key: n})


@step(3)
def decode_together(walk: Walk, key: Key, y: int, z: int) -> None:
    """Tokens of several sequences in one batch, of unequal number, one sequence after the other or in turns."""
    context, _ = key
    chosen = [s for s in walk.sequences if z >> s & 1] or [key[1]]
    rows, new, sizes = [], {}, {}
    for s in chosen:
        held = walk.held[context, s]
        n = sizes[s] = 1 + (y + 5 * s * (y // 12 % 2)) % 12
        if held.next + n > walk.longest:
            return
        tokens = walk.tokens(held.next, n, z // 4 + s)
        new[context, s] = held.decoded(tokens, alone=False)
        rows += [(i, s, tokens[i], held.next + i) for i in range(n)]
    if y % 2:
        rows.sort()
    before = {key: walk.held[key] for key in new}
    tokens_, positions = tuple(r[2] for r in rows), tuple(r[3] for r in rows)
    sequences = [[r[1]] for r in rows]
    line = f"seen = dec(c{context}, {list(tokens_)}, {list(positions)}, {sequences})"
    code, logits = walk.make(line, "decode", context, tokens_, positions, sequences)
    if not walk.is_decoded(code, context, sizes):
        return
    for (_c, s), held in before.items():
        walk.rows = [i for i, row in enumerate(rows) if row[1] == s]
        walk.compare(held, new[context, s].script[-1], logits[walk.rows])
    walk.rows = ":"
    walk.settle(new, context, {(context, s): n for s, n in sizes.items()})


@step(2)
def decode_coupled(walk: Walk, key: Key, y: int, z: int) -> None:
    """Tokens that belong to every sequence that holds the same as one, where all share one cache."""
    context, _ = key
    held = walk.held[key]
    if not (walk.settings.kv_unified and walk.memory.attention):
        return
    alike = [s for s in walk.sequences if walk.held[context, s] == held]
    waits = any("rollback" in walk.waiting((context, s)) for s in alike)
    if walk.slides and held.positions:
        alike = [s for s in alike if (context, s) in walk.shared]  # others may have lost cells of their own
    n = 1 + y % 20
    if len(alike) < 2 or waits or held.next + n > walk.longest:
        return
    tokens, positions = walk.tokens(held.next, n, z), tuple(range(held.next, held.next + n))
    line = f"seen = dec(c{context}, {walk.slice(held.next, n, z)}, {held.next}, [{alike}] * {n})"
    code, logits = walk.make(line, "decode", context, tokens, positions, [alike] * n)
    if not walk.is_decoded(code, context, dict.fromkeys(alike, n), n):
        return
    walk.compare(held, ("dec", held.next, tokens), logits)
    keys = [(context, s) for s in alike]
    walk.shared.update(keys)
    walk.settle(dict.fromkeys(keys, held.decoded(tokens, alone=False)), context, dict.fromkeys(keys, n))


@step(1)
def decode_aborted(walk: Walk, key: Key, y: int, z: int) -> None:
    """More tokens than a micro-batch, aborted somewhere."""
    context, sequence = key
    held, n = walk.held[key], walk.settings.n_ubatch + 1 + y % 20
    known = walk.memory.recurrent and walk.avoids("SM-07/abort-leaves-a-wrong-position")
    if n > 80 or held.next + n > walk.longest or known:
        return
    tokens, positions = walk.tokens(held.next, n, z), tuple(range(held.next, held.next + n))
    asks = f"ASKED = iter(range({20 + z % 200})); ABORT = L.ggml_abort_callback(lambda _: next(ASKED, None) is None)"
    walk.lines.append(f"{asks}; L.llama_set_abort_callback(c{context}, ABORT, None)")
    walk.lines.append(f"seen = dec(c{context}, {walk.slice(held.next, n, z)}, {held.next}, {sequence})")
    line = f"L.llama_set_abort_callback(c{context}, L.ggml_abort_callback(), None)"
    code, logits = walk.make(line, "decode", context, tokens, positions, sequence, 20 + z % 200)
    new = held.decoded(tokens)
    if code == 2:
        _, high = walk.make(f"seen = ends(c{context}, {sequence})", "ends", context, sequence)
        if not held.next - 1 <= high < held.next + n:
            raise WrongPositions("last position after an abort", f"{held.next - 1} to {held.next + n - 1}", high)
        new = new.without_suffix(high + 1)
    elif walk.is_decoded(code, context, {sequence: n}):
        walk.compare(held, ("dec", held.next, tokens), logits)
    else:
        return
    walk.settle({key: new}, context, {key: 1 << 20})
