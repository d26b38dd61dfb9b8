"""The Hadamard rotation that spreads outliers over a head before its rows are quantized.

llama.cpp rotates a side of its cache when that side's type is a quantized one and the head dimension is a multiple of
64: K over the largest power of two from 64 up that divides the head dimension, V over 64 values always. K is rotated
after RoPE and Q with it, so that their products stay; the output of attention is rotated back over V's width. The
matrix is the symmetric orthonormal Walsh-Hadamard matrix in Sylvester's order, its own inverse
(llama-kv-cache.cpp, llama-graph.cpp; the environment variable LLAMA_ATTN_ROT_DISABLE switches it off).
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np

from conformance.harness.precision.codecs import CodecError, Floats

Side = Literal["k", "v"]


@cache
def hadamard(n: int) -> Floats:
    """The orthonormal Walsh-Hadamard matrix, float32 [n, n], read-only; CodecError unless n is a power of two."""
    if n < 1 or n & (n - 1):
        raise CodecError(f"a Hadamard rotation over {n} values does not exist; the width must be a power of two")
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix /= np.sqrt(np.float32(n))
    matrix.flags.writeable = False
    return matrix


def rotate(rows: Floats, width: int) -> Floats:
    """Rotate every `width` neighbouring values of float32 [..., n]; rotating twice gives the rows back.

    CodecError when n is not a multiple of the width.
    """
    if rows.shape[-1] % width:
        raise CodecError(f"rows of {rows.shape[-1]} values cannot be rotated {width} at a time")
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite stays so, for the codec to refuse
        return (rows.reshape(-1, width) @ hadamard(width)).reshape(rows.shape)


def native_width(head_dim: int, side: Side) -> int | None:
    """Over how many values llama.cpp rotates that side of a quantized cache; None when it does not."""
    if head_dim % 64:
        return None
    return head_dim & -head_dim if side == "k" else 64
