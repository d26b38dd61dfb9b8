"""The time that a build takes to decode, measured around its own call and nothing of Python."""

from __future__ import annotations

import numpy as np

from conformance.harness.engine import Context, DecodeError, TokenBatch

_TOKEN = 1


def decode_seconds(context: Context, sequence: int = 0) -> float:
    """Seconds that one token takes behind what a sequence holds, which it makes longer by one.

    Raises:
        DecodeError: the build returned other than 0.

    """
    position, before = context.pos_max(sequence) + 1, context.seconds
    batch = TokenBatch(np.array([_TOKEN], np.int32), np.array([position], np.int32), np.ones(1, np.int8), sequence)
    if code := context.process(batch):
        raise DecodeError(code, f"llama_decode returned {code} for one token at {position}")
    return context.seconds - before
