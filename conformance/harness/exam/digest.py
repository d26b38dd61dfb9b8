"""What an earlier result must share with a run to stand for it."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_SOURCES = ("conformance", "fixtures", "specs")
_DRAWING = ("hypothesis", "numpy")  # other versions may draw other cases or compute other figures


def suite_digest() -> str:
    """SHA-256 over everything that shapes what a run finds, first 16 hex digits: sources, specs, what draws."""
    total = hashlib.sha256("".join(f"{name} {metadata.version(name)}\n" for name in _DRAWING).encode())
    for folder in _SOURCES:
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml") and "selftests" not in path.parts:
                total.update(str(path.relative_to(_ROOT)).encode() + path.read_bytes())
    return total.hexdigest()[:16]
