"""The build and the model under test as a check sees them, and what a check draws."""

from .bench import (
    Acquaintance,
    Bench,
    Floor,
    Measurement,
    Noise,
    Piece,
    Setup,
    Tokens,
    bench_of,
    introduce,
    measure,
    meet,
    try_on_device,
)
from .case import FLOAT_TYPES, Case, Decode
from .clock import DECODED, decode_seconds

__all__ = [
    "DECODED",
    "FLOAT_TYPES",
    "Acquaintance",
    "Bench",
    "Case",
    "Decode",
    "Floor",
    "Measurement",
    "Noise",
    "Piece",
    "Setup",
    "Tokens",
    "bench_of",
    "decode_seconds",
    "introduce",
    "measure",
    "meet",
    "try_on_device",
]
