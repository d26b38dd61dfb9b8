"""The state of a whole context, saved where every sequence has a stream of its own, comes back wrong.

python context_file_of_two_streams.py LIBRARY MODEL.gguf     exit code 1 when the fault shows

LIBRARY is a file that holds libllama, of any build since 2026: only what has kept its place is used of its structs.
"""
import ctypes, sys
import numpy as np

L = ctypes.CDLL(sys.argv[1])

class Settings(ctypes.Structure):  # longer than the build's, which fills and reads its own part
    _fields_ = [("n_ctx", ctypes.c_uint32), ("n_batch", ctypes.c_uint32), ("n_ubatch", ctypes.c_uint32),
                ("n_seq_max", ctypes.c_uint32), ("rest", ctypes.c_uint8 * 496)]

class Batch(ctypes.Structure):
    _fields_ = [("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)), ("embd", ctypes.c_void_p),
                ("pos", ctypes.POINTER(ctypes.c_int32)), ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
                ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))), ("logits", ctypes.POINTER(ctypes.c_int8))]

P, N = ctypes.c_void_p, ctypes.c_size_t
for name, result, arguments in (
    ("model_default_params", Settings, []), ("context_default_params", Settings, []), ("batch_init", Batch, [ctypes.c_int32] * 3),
    ("model_load_from_file", P, [ctypes.c_char_p, Settings]), ("init_from_model", P, [P, Settings]),
    ("decode", ctypes.c_int32, [P, Batch]), ("get_logits", ctypes.POINTER(ctypes.c_float), [P]), ("model_get_vocab", P, [P]),
    ("vocab_n_tokens", ctypes.c_int32, [P]), ("state_get_size", N, [P]), ("state_get_data", N, [P, P, N]), ("state_set_data", N, [P, P, N]),
):
    call = getattr(L, "llama_" + name)
    call.restype, call.argtypes = result, arguments
MODEL = L.llama_model_load_from_file(sys.argv[2].encode(), L.llama_model_default_params())
N_VOCAB = L.llama_vocab_n_tokens(L.llama_model_get_vocab(MODEL))


def context():
    settings = L.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = 512, 2
    return L.llama_init_from_model(MODEL, settings)


def dec(c, token, position, sequence):
    batch = L.llama_batch_init(1, 0, 1)
    batch.n_tokens = batch.n_seq_id[0] = batch.logits[0] = 1
    batch.token[0], batch.pos[0], batch.seq_id[0][0] = token, position, sequence
    return L.llama_decode(c, batch) or np.ctypeslib.as_array(L.llama_get_logits(c), (N_VOCAB,)).copy()


written, loaded = context(), context()
for sequence in (0, 1):
    dec(written, 10 + sequence, 0, sequence)
size = L.llama_state_get_size(written)
blob = ctypes.create_string_buffer(size)
L.llama_state_set_data(loaded, blob, L.llama_state_get_data(written, blob, size))
for sequence in (0, 1):
    expected, seen = (dec(c, 20, 1, sequence) for c in (written, loaded))
    far = ((seen - expected) ** 2).sum() / (expected**2).sum()
    print("sequence %d: expected %s, seen %s; nmse %.2g" % (sequence, expected[:3], seen[:3], far))
    if not far < 1e-5:
        sys.exit(1)
