"""Step profiles on disk while an arm runs: each step is written when it ends, and a later run goes on behind it."""

from __future__ import annotations

from pathlib import Path

from .profile import ProfileError, RunSettings, StepProfile, read_profiles, write_profiles


class Journal:
    """The profile file of one arm.

    Args:
        path: of the file; its folder must exist.
        run: what is run; a file of another run is refused.

    Attributes:
        steps: the steps that are finished.

    Raises:
        ProfileError: the file holds a broken line (named by its number), or belongs to another run.

    """

    def __init__(self, path: Path, run: RunSettings) -> None:
        self.path = path
        self.steps: list[StepProfile] = []
        if path.exists() and self._whole_lines() > 1:
            found = read_profiles(path)
            if found.run != run:
                raise ProfileError(
                    f"{path}: holds steps of another run ({_difference(found.run, run)}); name another --out, or remove it"
                )
            self.steps = list(found.steps)
        else:
            write_profiles(path, run, ())

    def append(self, step: StepProfile) -> None:
        """Write a finished step at once."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(step.model_dump_json(exclude_none=True) + "\n")
        self.steps.append(step)

    def _whole_lines(self) -> int:
        """Lines that were written to their end; what was torn off behind them is cut away."""
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            self.path.write_bytes(whole)
        return whole.count(b"\n")


def _difference(theirs: RunSettings, ours: RunSettings) -> str:
    """The first thing that two runs do not share, in words."""
    before, now = theirs.model_dump(), ours.model_dump()
    for part in ("build", "model", "settings"):
        for name in sorted({*before[part], *now[part]}):
            if before[part].get(name) != now[part].get(name):
                return f"{part} {name}: {before[part].get(name)} there, {now[part].get(name)} here"
    return f"{theirs.arm} there, {ours.arm} here"
