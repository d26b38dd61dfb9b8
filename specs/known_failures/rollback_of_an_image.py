"""A rollback of the second of two images takes back all of its tokens.

python rollback_of_an_image.py MODEL.gguf     exit code 1, or the death of the process, when the fault shows
"""
import ctypes, sys
import numpy as np
import llama_cpp as L

L.llama_log_set(LOG := L.llama_log_callback(lambda *_: None), None)
MODEL = L.llama_model_load_from_file(sys.argv[1].encode(), L.llama_model_default_params())
N_VOCAB = L.llama_vocab_n_tokens(L.llama_model_get_vocab(MODEL))
T = np.random.default_rng(0).integers(0, N_VOCAB, 4096).astype(np.int32)

def context(**settings):
    p = L.llama_context_default_params()
    usual = dict(n_ctx=2048, n_batch=2048, n_ubatch=512, n_threads=1, n_threads_batch=1, flash_attn_type=0, swa_full=False)
    for name, value in {**usual, **settings}.items():
        setattr(p, name, value)
    return L.llama_init_from_model(MODEL, p)

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

def memory(c, call, *arguments):
    return getattr(L, "llama_memory_" + call)(L.llama_get_memory(c), *arguments)

def verdict(expected, seen, what=""):
    rows = isinstance(seen, np.ndarray)
    far = ((seen - expected) ** 2).sum() / (expected**2).sum() if rows else float(expected != seen)
    print(what, "expected %s, seen %s;" % ((expected[0, :3], seen[0, :3]) if rows else (expected, seen)), "nmse %.2g" % far)
    sys.exit(bool(not far <= 1e-5))

c, k = context(n_rs_seq=10), context()
dec(c, T[:50], 0)
emb(c, 0, 4, 50, 0, 2), emb(c, 4, 4, 52, 0, 2)  # two images of 2 x 2
print("removal returned", memory(c, "seq_rm", 0, 52, -1))
seen = dec(c, T[50:53], 52)
dec(k, T[:50], 0), emb(k, 0, 4, 50, 0, 2)
verdict(dec(k, T[50:53], 52), seen)
