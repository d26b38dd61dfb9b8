"""What this process takes of the machine's memory (Linux)."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def resident_bytes() -> int:
    """Resident memory; what was freed is handed back first, so that taking it again shows as growth."""
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def reset_peak() -> None:
    """Let `peak_bytes` count from here."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most resident memory since `reset_peak`."""
    return _status("VmHWM")


@contextmanager
def little_memory(headroom: int) -> Iterator[None]:
    """Lets this process take `headroom` bytes of address space more than it has; what asks for more is refused at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = _status("VmSize") + headroom
    ceilings = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *ceilings]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
