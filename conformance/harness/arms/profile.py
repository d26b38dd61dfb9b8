"""Step profiles: what an arm leaves of every step it ran, as JSON lines behind one line about the run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from conformance.harness.contract.entry import Entry, wrong

from .counts import ArmName

Label = Literal["measured", "computed", "assumed"]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, description="seconds, 0 or more")]
Count = Annotated[int, Field(ge=0, description="a whole number from 0 up")]


Shape = TypeVar("Shape", bound=Entry)


class ProfileError(Exception):
    """A profile file that cannot be used; one line: file, line, what is wrong, what to do."""


class RunSettings(Entry):
    """The first line: what was run. Everything that two runs must share to be compared is in `build`, `model`, `settings`.

    Attributes:
        profile: version of this format.
        build: the build's identity.
        model: name or path, digest.
        settings: of the context, the transcript and the layout.

    """

    profile: Literal[1] = 1
    arm: ArmName
    build: dict[str, Any]
    model: dict[str, Any]
    settings: dict[str, Any]


class StepProfile(Entry):
    """One step of one task.

    Attributes:
        task: name of the task; its steps are numbered from 1.
        prompt_tokens, reused_tokens, prefilled_tokens: the prompt and its two parts, markers and images counted.
        decoded_tokens: tokens of the action.
        hit_ratio: reused / prompt; `hit_ratio_label` says whether the engine's counters said so.
        prefill_seconds, decode_seconds: wall time inside the engine.
        tokens_per_second: of decoding.
        live_cells: cells of the sequence once the action is decoded.
        state_bytes: size of the checkpoint that the arm keeps, 0 for none.
        peak_rss_bytes: of the process, so far.
        logits_digest: of the logits in front of the action, "" where none were read.
        score: of the whole task, where known; the same on each of its steps.
        wall_seconds: of the whole step, tools and machines included.
        power_watts: mean package power during the step.

    """

    arm: ArmName
    task: str
    step: Annotated[int, Field(ge=1, description="the number of the step, from 1")]
    prompt_tokens: Count
    reused_tokens: Count
    prefilled_tokens: Count
    decoded_tokens: Count
    hit_ratio: Annotated[float, Field(ge=0, le=1, description="a share from 0 to 1")]
    hit_ratio_label: Literal["measured", "assumed"]
    prefill_seconds: Seconds
    decode_seconds: Seconds
    tokens_per_second: Annotated[float, Field(ge=0, description="a number from 0 up")]
    live_cells: Count
    state_bytes: Count = 0
    peak_rss_bytes: Count = 0
    logits_digest: str = ""
    score: float | None = None
    wall_seconds: Seconds | None = None
    power_watts: Annotated[float | None, Field(gt=0, description="watts, more than 0")] = None

    @model_validator(mode="after")
    def _adds_up(self) -> StepProfile:
        if self.reused_tokens + self.prefilled_tokens != self.prompt_tokens:
            raise wrong("reused and prefilled tokens do not add up to the prompt", "correct one of the three")
        return self


class Profiles(Entry):
    """A profile file."""

    run: RunSettings
    steps: tuple[StepProfile, ...]


def write_profiles(path: Path, run: RunSettings, steps: Iterable[StepProfile]) -> None:
    """Write a profile file; a step that is appended later is a line more."""
    lines = [run.model_dump_json(), *(step.model_dump_json(exclude_none=True) for step in steps)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_profiles(path: Path) -> Profiles:
    """Read a profile file.

    Raises:
        ProfileError: it cannot be read, a line is broken (named by its number), a step is missing or of another arm.

    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror}; give the profiles that an arm wrote") from None
    if len(lines) < 2:
        raise ProfileError(f"{path}: holds no step; give the profiles that an arm wrote")
    run = _line(path, 1, lines[0], RunSettings)
    steps = tuple(_line(path, number, line, StepProfile) for number, line in enumerate(lines[1:], 2))
    following: dict[str, int] = {}
    for number, step in enumerate(steps, 2):
        expected = following.get(step.task, 1)
        if step.step != expected:
            raise ProfileError(
                f"{path}:{number}: step {step.step} of task {step.task!r} where step {expected} belongs; "
                "keep the lines of a run whole and in order"
            )
        if step.arm != run.arm:
            raise ProfileError(f"{path}:{number}: a step of {step.arm} in a run of {run.arm}; give a file for each arm")
        following[step.task] = expected + 1
    return Profiles(run=run, steps=steps)


def _line(path: Path, number: int, line: bytes, shape: type[Shape]) -> Shape:
    try:
        return shape.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the line"
        raise ProfileError(
            f"{path}:{number}: {place}: {first['msg']}; correct the line, or remove it with the rest of its task"
        ) from None
