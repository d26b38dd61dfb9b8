"""A memory call on an id that no sequence has must do nothing, as on an empty sequence.

python sequence_ids_out_of_range.py MODEL.gguf     exit code 1, or the death of the process, when the fault shows
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

def memory(c, call, *arguments):
    return getattr(L, "llama_memory_" + call)(L.llama_get_memory(c), *arguments)

def verdict(expected, seen, what=""):
    rows = isinstance(seen, np.ndarray)
    far = ((seen - expected) ** 2).sum() / (expected**2).sum() if rows else float(expected != seen)
    print(what, "expected %s, seen %s;" % ((expected[0, :3], seen[0, :3]) if rows else (expected, seen)), "nmse %.2g" % far)
    sys.exit(bool(not far <= 1e-5))

c = context(n_seq_max=2)
dec(c, T[:50], 0)
memory(c, "seq_add", 256, -1, -1, 1)
verdict(49, memory(c, "seq_pos_max", 0), "last position of sequence 0:")
