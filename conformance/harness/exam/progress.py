"""How far a run is, from the record of cases that the workers keep."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .budget import Sizing


class Progress:
    """Says from time to time how far a run is, while no check ends.

    Args:
        recording: file to which every case is appended before it runs.
        sizings: the searches of the run by (id, model).
        say: prints one line.
        quiet_seconds: how long nothing may have been said before a line is.
    """

    def __init__(
        self,
        recording: Path,
        sizings: Mapping[tuple[str, str], Sizing | None],
        say: Callable[[str], None],
        quiet_seconds: float = 10.0,
    ) -> None:
        self._recording, self._say, self._quiet = recording, say, quiet_seconds
        self._costs = {pair: sizing.seconds / sizing.examples for pair, sizing in sizings.items() if sizing}
        self._total = sum(sizing.seconds for sizing in sizings.values() if sizing)
        self._cases = sum(sizing.examples for sizing in sizings.values() if sizing)
        self._begin = self._last = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._over.set()

    def heard(self) -> None:
        """Something else was said just now."""
        self._last = time.monotonic()

    def line(self) -> str:
        """Cases begun, and the time left by the pace so far against the computed cost of all searches."""
        begun = [tuple(json.loads(line)[key] for key in ("id", "model")) for line in self._lines()]
        done = sum(self._costs.get(pair, 0.0) for pair in begun)
        elapsed = time.monotonic() - self._begin
        left = f", about {elapsed * max(self._total - done, 0) / done:.0f} s left" if done else ""
        return f"... {len(begun)} of about {self._cases} cases begun{left}"

    def _lines(self) -> list[str]:
        """The whole lines of the record."""
        text = self._recording.read_text() if self._recording.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    def _watch(self) -> None:
        while not self._over.wait(self._quiet / 5):
            if time.monotonic() - self._last >= self._quiet:
                self._say(self.line())
                self.heard()
