"""llama_cpp.Llama.load_state of a cut state raises and leaves n_tokens over an emptied cache.

python high_level_truncated_load_state.py MODEL.gguf     exit code 1, or the death of the process, when the fault shows
"""
import ctypes, sys
import numpy as np
import llama_cpp as L

L.llama_log_set(LOG := L.llama_log_callback(lambda *_: None), None)
MODEL = L.llama_model_load_from_file(sys.argv[1].encode(), L.llama_model_default_params())
N_VOCAB = L.llama_vocab_n_tokens(L.llama_model_get_vocab(MODEL))
T = np.random.default_rng(0).integers(0, N_VOCAB, 4096).astype(np.int32)

def verdict(expected, seen, what=""):
    rows = isinstance(seen, np.ndarray)
    far = ((seen - expected) ** 2).sum() / (expected**2).sum() if rows else float(expected != seen)
    print(what, "expected %s, seen %s;" % ((expected[0, :3], seen[0, :3]) if rows else (expected, seen)), "nmse %.2g" % far)
    sys.exit(bool(not far <= 1e-5))

llama = lambda: L.Llama(sys.argv[1], n_ctx=1024, n_ubatch=32, n_threads=1, logits_all=True, swa_full=False, verbose=False)
a = llama()
a.eval(T[:61].tolist())
state = a.save_state()
state.llama_state_size = len(state.llama_state) // 10
state.llama_state = state.llama_state[: state.llama_state_size]
try:
    a.load_state(state)
except RuntimeError as error:
    print(error, '- n_tokens is', a.n_tokens)
n = a.n_tokens
a.eval(T[200:203].tolist())
b = llama()
b.eval(T[:n].tolist())
b.eval(T[200:203].tolist())
verdict(b.scores[n : n + 3].copy(), a.scores[n : n + 3].copy())
