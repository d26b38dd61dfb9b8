"""Runs the arms of an agent loop on a model: what evict, no-evict and a terminal slot cost on this machine.

    python -m tools.arms --transcript T.yaml --model GGUF [--mmproj MM] [options]
    python -m tools.arms --trace [--scale 0.05] --model GGUF [options]

Writes ARM.jsonl (a line for each finished step), arms.html, arms.png and arms.svg into --out. A run that was interrupted
goes on behind its last finished step. The arms take turns, step by step, so that a machine that is busy for a while is so for
all of them. Without --mmproj screenshots are noise embeddings, which cost no vision encoder.

Exit code 0, 130 when interrupted, or 2 when a transcript, model, mmproj or setting cannot be used.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from rich.console import Console

from conformance.harness import builds
from conformance.harness.arms.counts import ARMS, LABELS, ArmName, require_parts, require_room
from conformance.harness.arms.counts import counts as counts_of
from conformance.harness.arms.document import load_document, trace_transcript
from conformance.harness.arms.journal import Journal
from conformance.harness.arms.profile import ProfileError, RunSettings
from conformance.harness.arms.reading import Embeddings, Reader, encoder_of, pixels_of, try_vision, vocabulary_of
from conformance.harness.arms.replay import ArmParts, ProfiledRun, checkpoints_for
from conformance.harness.arms.terminal_slot import CheckpointKind
from conformance.harness.contract.load import SpecError
from conformance.harness.engine import BUNDLED, Context, ContextSettings, EngineError, Model, Vision
from conformance.harness.engine.child import Child, ChildDeath
from conformance.harness.prompts.files import read_transcript
from conformance.harness.prompts.layouts import PromptError
from conformance.harness.prompts.scaling import scaled
from conformance.harness.prompts.transcript import Transcript
from conformance.harness.report.arms import Bound, answer, terminal_table, write_forms
from fixtures import models
from tools.command import MOST_THREADS, MOST_TOKENS, progress_bars, refusing, run

_REFUSED = (ChildDeath, EngineError, ProfileError, PromptError, SpecError)
_DEFAULT_ARMS = "evict,append_only,terminal_slot"
_SPARE_CELLS = 16


@contextmanager
def _resumable() -> Iterator[None]:
    """Refuses what cannot be used; an interruption says how to go on."""
    try:
        with refusing(*_REFUSED, files="give a file that can be read, a folder that can be written"):
            yield
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on behind the last finished step", err=True)
        raise typer.Exit(130) from None


def arms(
    model: Annotated[str, typer.Option(help="A GGUF, or the name of a fixture model.")],
    transcript: Annotated[Path | None, typer.Option(help="A transcript, YAML or JSON.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="The document's own trace instead.")] = False,
    which: Annotated[str, typer.Option("--arms", help=f"Any of {', '.join(ARMS)}.")] = _DEFAULT_ARMS,
    window: Annotated[int, typer.Option(max=MOST_TOKENS, help="W, the screenshots that are shown.")] = 3,
    mmproj: Annotated[str | None, typer.Option(help="The model's vision tower, a GGUF or a fixture's name.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, max=MOST_TOKENS, help="Only the first steps.")] = None,
    scale: Annotated[
        float, typer.Option(help="Shrink drawn texts and screenshots to this share of their tokens.")
    ] = 1.0,
    context: Annotated[
        int | None, typer.Option(min=1, max=MOST_TOKENS, help="Cells of the context; default: what each arm needs.")
    ] = None,
    checkpoints: Annotated[str, typer.Option(help=f"auto, or one of {', '.join(get_args(CheckpointKind))}.")] = "auto",
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="Arm after arm, so that peak memory is each arm's own.")
    ] = False,
    ubatch: Annotated[int, typer.Option(min=1, max=MOST_TOKENS)] = 512,
    flash: Annotated[str, typer.Option(help="Flash attention: auto, off, on.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, max=MOST_THREADS)] = min(os.cpu_count() or 1, MOST_THREADS),
    build: Annotated[str, typer.Option(help=builds.BUILD_HELP)] = BUNDLED,
    out: Annotated[Path, typer.Option(help="Folder for profiles and report.")] = Path("arms"),
) -> None:
    """Run the arms and write what they cost."""
    with _resumable(), ExitStack() as stack:
        names = _arms(which)
        task, folder, whole = _task(transcript, trace)
        whole = scaled(whole, scale)
        part = whole.first(steps) if steps else whole
        path, tower = _fixture(model), mmproj and _fixture(mmproj)
        library = builds.load(build)
        loaded = stack.enter_context(Model(library, path))
        vocabulary = vocabulary_of(loaded)
        require_parts(part, context or loaded.n_ctx_train)
        counts = {arm: counts_of(arm, part, window, vocabulary) for arm in names}
        needed = {arm: max(step.live_cells for step in counts[arm]) for arm in names}
        for arm in names:
            require_room(counts[arm], arm, part, context or needed[arm], loaded.n_ctx_train)
        _require_use(context, max(*needed.values(), loaded.n_ctx_train))
        _require_images(part, folder, has_tower=bool(tower))
        encode = None
        if tower:
            with Child() as child:  # a damaged file ends the process at its first image
                child.call(try_vision, build, str(path), str(tower))
            vision = stack.enter_context(Vision(loaded, tower, n_threads=threads))
            encode = Embeddings(encoder_of(vision))
        reader = Reader(loaded, encode, folder)
        kept = _checkpoints(checkpoints, loaded)
        settings = {
            "task": task,
            "transcript": hashlib.sha256(whole.to_json().encode()).hexdigest()[:16],
            "scale": scale,
            "window": window,
            "checkpoints": kept,
            "ubatch": ubatch,
            "flash_attention": flash,
            "threads": threads,
            "images": Path(tower).name if tower else "noise embeddings",
        }
        model_identity = {"file": path.name, "bytes": path.stat().st_size, "says": loaded.description()}
        out.mkdir(parents=True, exist_ok=True)
        journals = {
            arm: Journal(
                out / f"{arm}.jsonl",
                RunSettings(
                    arm=arm,
                    build=library.identity().as_dict() | {"symbols": []},
                    model=model_identity,
                    settings=settings,
                ),
            )
            for arm in names
        }
        settings_of = {
            arm: ContextSettings(
                n_ctx=context or needed[arm] + _SPARE_CELLS,
                n_batch=2048,
                n_ubatch=ubatch,
                n_threads=threads,
                flash_attn=_flash(flash),
            )
            for arm in names
        }
        runs = {
            arm: _run(arm, loaded, settings_of[arm], reader, part, window, kept, journals[arm], task) for arm in names
        }
        for each in runs.values():
            stack.callback(each.close)  # its context goes before the model does
        with progress_bars() as progress:
            bars = {arm: progress.add_task(LABELS[arm], total=len(part.steps)) for arm in names}
            for arm, done in in_turns(runs, one_by_one=one_by_one):
                progress.update(bars[arm], completed=done)
        profiles = {arm: journals[arm].steps[: len(part.steps)] for arm in names}
        new = tuple(step.prefilled_tokens for step in counts_of("append_only", part, window, vocabulary))
        about = {"model": path.name, "build": library.identity().version, "steps": len(part.steps), **settings}
        write_forms(out, profiles, counts, Bound(new), about)
        console = Console(highlight=False, markup=False)
        console.print(terminal_table(profiles))
        for line in answer(profiles, counts):
            console.print(line, soft_wrap=True)
        console.print(f"results in {out}")


def _run(
    arm: ArmName,
    model: Model,
    settings: ContextSettings,
    reader: Reader,
    transcript: Transcript,
    window: int,
    kept: CheckpointKind,
    journal: Journal,
    task: str,
) -> Generator[int]:
    """Run what is left of an arm; yields how many steps are done."""
    done = len(journal.steps)
    yield done
    if done >= len(transcript.steps):
        return
    with Context(model, settings) as context:
        profiled = ProfiledRun(context, ArmParts().arm(arm, context, reader, transcript, window, kept), task)
        if done:
            profiled.catch_up(done)
        for number in range(done + 1, len(transcript.steps) + 1):
            journal.append(profiled.step(number))
            yield number


def in_turns(runs: Mapping[ArmName, Iterator[int]], *, one_by_one: bool) -> Iterator[tuple[ArmName, int]]:
    """Go on with the arm that is furthest back, or with each to its end; yields it and how many of its steps are done."""
    done = dict.fromkeys(runs, -1)
    while done:
        arm = next(iter(done)) if one_by_one else min(done, key=lambda arm: done[arm])
        try:
            done[arm] = next(runs[arm])
            yield arm, done[arm]
        except StopIteration:
            del done[arm]


def _task(transcript: Path | None, trace: bool) -> tuple[str, Path, Transcript]:
    """Name, folder of its images, and content of the task."""
    if (transcript is None) != trace:
        raise PromptError("name one task: --transcript FILE, or --trace")
    if transcript is None:
        return "trace", Path(), trace_transcript(load_document())
    return transcript.stem, transcript.parent, read_transcript(transcript)


def _require_images(task: Transcript, folder: Path, *, has_tower: bool) -> None:
    """Refuse image files that cannot be read, or that nothing encodes, before the first step is run."""
    for number, step in enumerate(task.steps, 1):
        if step.screenshot and step.screenshot.path is not None:
            if not has_tower:
                raise PromptError(
                    f"step {number}: the image file {step.screenshot.path} needs a vision tower; give it with --mmproj"
                )
            pixels_of(str(folder / step.screenshot.path))


def _require_use(context: int | None, most: int) -> None:
    """Refuse a context that nothing here could fill: beyond the machine's memory it would end the process."""
    if context is not None and context > most:
        raise PromptError(
            f"--context {context}: {most} cells are the most that this task or the model's trained context fills; "
            "give no more, or leave it out"
        )


def _arms(text: str) -> list[ArmName]:
    names = [name.strip() for name in text.split(",")]
    chosen: list[ArmName] = [arm for arm in ARMS if arm in names]
    if unknown := sorted(set(names) - set(ARMS)):
        raise PromptError(f"--arms: there is no arm {unknown[0]!r}; choose from {', '.join(ARMS)}")
    return chosen


def _checkpoints(text: str, model: Model) -> CheckpointKind:
    kinds: tuple[CheckpointKind, ...] = get_args(CheckpointKind)
    if text == "auto":
        return checkpoints_for(model)
    for kind in kinds:
        if kind == text:
            return kind
    raise PromptError(f"--checkpoints {text!r}: choose auto or one of {', '.join(kinds)}")


def _flash(text: str) -> Literal["auto", "off", "on"]:
    for choice in get_args(Literal["auto", "off", "on"]):
        if choice == text:
            return choice  # type: ignore[no-any-return]
    raise PromptError(f"--flash {text!r}: choose auto, off or on")


def _fixture(name: str) -> Path:
    """The path of a GGUF, or of a fixture by its name."""
    known = {*models.names(), *(models.projector(model) for model in models.names())}
    return models.path(name) if name in known and not Path(name).exists() else Path(name)


if __name__ == "__main__":
    run(arms)
