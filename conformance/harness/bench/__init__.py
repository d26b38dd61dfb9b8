"""The build and the model under test as a check sees them, and what a check draws."""

from .bench import Acquaintance, Bench, Floor, Measurement, Setup, identify, measure, meet, try_on_device
from .case import Case, Decode

__all__ = [
    "Acquaintance",
    "Bench",
    "Case",
    "Decode",
    "Floor",
    "Measurement",
    "Setup",
    "identify",
    "measure",
    "meet",
    "try_on_device",
]
