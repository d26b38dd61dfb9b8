"""Writes a fault down as a script that needs llama-cpp-python and numpy, and not this project."""

from __future__ import annotations

import re
from collections.abc import Sequence

_HEAD = '''\
"""{title}

python {name} MODEL.gguf     exit code 1, or the death of the process, when the fault shows
{note}"""
import ctypes, sys
import numpy as np
import llama_cpp as L

L.llama_log_set(LOG := L.llama_log_callback(lambda *_: None), None)
MODEL = L.llama_model_load_from_file(sys.argv[1].encode(), L.llama_model_default_params())
N_VOCAB = L.llama_vocab_n_tokens(L.llama_model_get_vocab(MODEL))
T = np.random.default_rng({seed}).integers(0, N_VOCAB, 4096).astype(np.int32)
'''

#: What a body may use, by name; a script has only what it needs.
_PARTS = {
    "context": """\
def context(**settings):
    p = L.llama_context_default_params()
    usual = dict(n_ctx=2048, n_batch=2048, n_ubatch=512, n_threads=1, n_threads_batch=1, flash_attn_type=0, swa_full=False)
    for name, value in {**usual, **settings}.items():
        setattr(p, name, value)
    return L.llama_init_from_model(MODEL, p)
""",
    "dec": """\
def dec(c, tokens, start, seq=0):
    b, n = L.llama_batch_init(len(tokens), 0, 8), len(tokens)
    b.n_tokens = n
    for i in range(n):
        ids = [seq] if isinstance(seq, int) else seq[i]
        b.token[i], b.n_seq_id[i], b.logits[i] = int(tokens[i]), len(ids), 1
        b.pos[i] = start + i if isinstance(start, int) else start[i] if start else 0
        for j, id in enumerate(ids):
            b.seq_id[i][j] = id
    b.pos = b.pos if start is not None else None
    return L.llama_decode(c, b) or np.ctypeslib.as_array(L.llama_get_logits(c), (n, N_VOCAB)).copy()
""",
    "emb": """\
def emb(c, first, n, start, seq=0, width=0):
    rows = np.random.default_rng(1).standard_normal((512, L.llama_model_n_embd(MODEL)), np.float32)[first : first + n]
    b, many = L.llama_batch_init(n, rows.shape[1], 1), L.llama_model_rope_type(MODEL) in (8, 24, 40)
    b.n_tokens, line = n, np.arange(n)
    ctypes.memmove(b.embd, np.ascontiguousarray(rows).ctypes.data, rows.nbytes)
    t, y, x = (0 * line, line // width, line % width) if width else (line, line, line)
    p = np.concatenate([t, y, x, 0 * line - (start or 0)][: 4 if many else 1]).astype(np.int32) + np.int32(start or 0)
    b.pos = p.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)) if start is not None else None
    for i in range(n):
        b.n_seq_id[i], b.seq_id[i][0], b.logits[i] = 1, seq, 1
    return L.llama_decode(c, b) or np.ctypeslib.as_array(L.llama_get_logits(c), (n, N_VOCAB)).copy()
""",
    "memory": """\
def memory(c, call, *arguments):
    return getattr(L, "llama_memory_" + call)(L.llama_get_memory(c), *arguments)
""",
    "ends": """\
def ends(c, seq):
    return memory(c, "seq_pos_min", seq), memory(c, "seq_pos_max", seq)
""",
    "save": """\
def save(c, seq=0, flags=0):
    blob = (ctypes.c_uint8 * L.llama_state_seq_get_size_ext(c, seq, flags))()
    return bytes(blob[: L.llama_state_seq_get_data_ext(c, blob, len(blob), seq, flags)])
""",
    "save_short": """\
def save_short(c, seq, missing):
    blob = (ctypes.c_uint8 * max(L.llama_state_seq_get_size(c, seq) - missing, 0))()
    return L.llama_state_seq_get_data(c, blob, len(blob), seq)
""",
    "load": """\
def load(c, blob, seq=0, flags=0):
    return L.llama_state_seq_set_data_ext(c, (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob), len(blob), seq, flags)
""",
    "save_context": """\
def save_context(c):
    blob = (ctypes.c_uint8 * L.llama_state_get_size(c))()
    return bytes(blob[: L.llama_state_get_data(c, blob, len(blob))])
""",
    "load_context": """\
def load_context(c, blob):
    return L.llama_state_set_data(c, (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob), len(blob))
""",
    "verdict": """\
def verdict(expected, seen, what=""):
    rows = isinstance(seen, np.ndarray)
    far = ((seen - expected) ** 2).sum() / (expected**2).sum() if rows else float(expected != seen)
    print(what, "expected %s, seen %s;" % ((expected[0, :3], seen[0, :3]) if rows else (expected, seen)), "nmse %.2g" % far)
    sys.exit(bool(not far <= 1e-5))
""",
}


def write_script(name: str, title: str, body: Sequence[str], *, note: str = "", seed: int = 0) -> str:
    """A script's text.

    Args:
        name: of the file, for its own usage line.
        title: what must hold and does not.
        body: lines that end in `verdict(expected, seen)`; they may use the parts by name, and the tokens T.
        note: more lines for the top, each ending in a line break.
        seed: of the tokens.

    """
    text = "\n".join(body)
    used = [part for part in _PARTS if _uses(text, part) or (part == "memory" and _uses(text, "ends"))]
    head = _HEAD.format(name=name, title=title, note=note, seed=seed)
    return "\n".join([head, *(_PARTS[part] for part in used), text]) + "\n"


def _uses(text: str, part: str) -> bool:
    return re.search(rf"\b{part}\(", text) is not None
