"""Base of what is read from YAML files."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Entry(BaseModel):
    """Base of everything in a spec file: strict, closed to unknown keys, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def wrong(problem: str, todo: str = "") -> PydanticCustomError:
    """An error that says what to do itself, or leaves that to the description of the field."""
    return PydanticCustomError("spec", "{problem}", {"problem": problem, "todo": todo})
