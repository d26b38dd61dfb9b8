"""What can be wrong with a build, a model or a call, as one clear line each."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error this room raises; its text is one line that says what, where and what to do."""


class BuildError(EngineError):
    """The build cannot be used: not found, foreign, incomplete, or laid out in a way this suite does not know."""


class ModelError(EngineError):
    """The build refused to load a model or to make a context for it."""


class DecodeError(EngineError):
    """`llama_decode` returned something other than 0.

    Attributes:
        code: what it returned (1 no room, 2 aborted, -1 invalid batch, below -1 fatal).

    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[DecodeError], tuple[int, str]]:
        return type(self), (self.code, str(self))


class StateError(EngineError):
    """The build announced, wrote or read a state in a way that its interface rules out."""
