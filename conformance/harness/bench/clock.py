"""The time that a build takes to decode, measured around its own call and nothing of Python."""

from __future__ import annotations

import numpy as np

from conformance.harness.engine import Context, DecodeError, TokenBatch

_TOKEN = 1
DECODED = 2
"""Tokens that a sequence grows by while one of them is timed."""


def decode_seconds(context: Context, sequence: int = 0) -> float:
    """Seconds that one more token takes in a sequence, in the middle of a decode.

    The token before it is not counted: it brings the memory of this context back into the processor's caches, so that
    it does not matter what ran in between.

    Raises:
        DecodeError: the build returned other than 0.

    """
    position, before = context.pos_max(sequence) + 1, 0.0
    for place in range(position, position + DECODED):
        before = context.seconds
        batch = TokenBatch(np.array([_TOKEN], np.int32), np.array([place], np.int32), np.ones(1, np.int8), sequence)
        if code := context.process(batch):
            raise DecodeError(code, f"llama_decode returned {code} for one token at {place}")
    return context.seconds - before
