"""What a walk may find: something that a correct library would not do."""

from __future__ import annotations

from typing import ClassVar

from conformance.harness.engine.child import ChildDeath


class Finding(Exception):
    """Something that a correct library would not do."""

    kind: ClassVar[str] = "finding"

    def __init__(self, what: str, expected: object, seen: object, deviation: float | None = None) -> None:
        super().__init__(f"{what}: expected {expected}, seen {seen}")
        self.what, self.expected, self.seen, self.deviation = what, str(expected), str(seen), deviation


class WrongLogits(Finding):
    """The next logits are not those of a cold replay."""

    kind = "wrong logits"


class WrongState(Finding):
    """The bytes of a state are not those of a cold replay, or of what was not touched."""

    kind = "wrong state"


class WrongPositions(Finding):
    """A sequence's positions are not those of what it must hold."""

    kind = "wrong positions"


class WrongResult(Finding):
    """A call returned what it must not."""

    kind = "wrong result"


class Death(Finding):
    """The process died."""

    kind = "death"

    @classmethod
    def of(cls, call: str, death: ChildDeath) -> Death:
        """The finding that a child's death in a call is."""
        return cls(f"{call}: the build {death.how}", "an answer", _fingerprint(death.stderr) or death.how)


def _fingerprint(stderr: str) -> str:
    """File and line of a failed assertion, or what was thrown."""
    for line in stderr.splitlines():
        if ".cpp:" in line or ".c:" in line:
            return line.rpartition("/")[2][:160]
        if "what():" in line:
            return line.strip()[:160]
    return ""
