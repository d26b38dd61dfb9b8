"""Puts a build to the test: ties checks to specs, draws cases, runs them in a child, judges, and remembers."""

from .check import REGISTRY, BoundCheck, NotDecidable, Undecided, verifies
from .examination import replay

__all__ = ["REGISTRY", "BoundCheck", "NotDecidable", "Undecided", "replay", "verifies"]
