"""llama_cpp.Llama.sample right after load_state in a new instance aborts the process.

python high_level_sample_after_load_state.py MODEL.gguf     exit code 1, or the death of the process, when the fault shows
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
a, b = llama(), llama()
a.eval(T[:20].tolist())
b.load_state(a.save_state())
verdict(a.sample(temp=0.0), b.sample(temp=0.0), 'token:')
