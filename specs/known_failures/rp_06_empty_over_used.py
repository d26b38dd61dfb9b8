"""The state of an empty sequence, loaded over a sequence that holds tokens, is accepted and leaves attention cells behind.

Usage: python specs/known_failures/rp_06_empty_over_used.py [BUILD]
Prints what each kind of model is left with and exits 1 while the build shows the fault.
"""

from __future__ import annotations

import sys

import numpy as np

from conformance.harness.engine import BUNDLED, Context, Library, Model
from fixtures import models


def main(build: str) -> int:
    """Load an empty sequence's state over eight tokens of a dense and of a hybrid model."""
    library, text = Library(build), np.arange(8)
    shown = 0
    for name in ("qwen3-mini", "qwen35-mini"):
        with Model(library, models.path(name)) as model, Context(model) as empty, Context(model) as used:
            used.decode(text)
            consumed = used.load(empty.save())
            first, last = used.pos_min(), used.pos_max()
            print(f"{name}: {consumed} bytes accepted, then positions {first} to {last}; expected -1 to -1")
            shown += (first, last) != (-1, -1)
    return int(shown > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else BUNDLED))
