"""Which published builds a check fails on: the first bad and the first good one, found by bisection.

    python -m tools.bisect --check ID --builds SOURCE [--model NAME] [--from VERSION] [--to VERSION]
    python -m tools.bisect --finding FINDING.json --builds SOURCE ...

ID is an invariant or one case family of it, such as SM-01/rollback-across-ubatches; FINDING.json is what `tools.fuzz` kept
of a finding; SOURCE is pypi:xllamacpp, npm:@node-llama-cpp/linux-x64, pypi:llama-cpp-python or pypi:llama-cpp-py-sync.
Known failures count as failures here. A build that cannot be loaded, or that refuses the model, is stepped over. What was
found out about a build is kept, so that a run that was stopped goes on. Exit code 0 when a boundary was found, 1 when all
builds that were run fare alike, 2 when it could not be made.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from conformance.harness import builds
from conformance.harness.contract.census import GGUFError, census_of_gguf
from conformance.harness.contract.load import SpecError
from conformance.harness.contract.needs import Subject, applies, kinds_of
from conformance.harness.contract.schema import Invariant
from conformance.harness.engine import BuildError, EngineError
from conformance.harness.engine.origin import origin_of
from conformance.harness.exam.bisection import Reading, Value, boundaries, read_check, read_finding, span
from conformance.harness.exam.digest import suite_digest
from conformance.harness.exam.examination import contract
from conformance.harness.exam.session import file_digest, subject_of
from conformance.harness.machine.found import Found
from conformance.harness.machine.steps import STEPS
from fixtures import models
from tools.command import refuse

_USUAL = ("qwen35-mini", "qwen3-mini", "gemma3-mini", "lfm2-mini", "mamba2-mini", "rwkv7-mini", "holo3-mini")
_PAST = {"bad": "fails", "good": "holds", "absent": "does not apply"}


def main(
    source: Annotated[str, typer.Option("--builds", metavar="SOURCE", help="Where builds are taken from.")],
    check: Annotated[str | None, typer.Option(metavar="ID", help="The invariant or case family.")] = None,
    finding: Annotated[Path | None, typer.Option(metavar="JSON", help="A finding of tools.fuzz instead.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Fixture model or GGUF; default: a small one it applies to.")
    ] = None,
    oldest: Annotated[str | None, typer.Option("--from", metavar="VERSION", help="Oldest version to look at.")] = None,
    newest: Annotated[str | None, typer.Option("--to", metavar="VERSION", help="Newest version to look at.")] = None,
    profile: Annotated[str, typer.Option(help="How many cases: smoke, standard or deep.")] = "standard",
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    each: Annotated[bool, typer.Option("--each", help="Run every build instead of bisecting.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run again what was run before.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Which published builds a check fails on: the first bad and the first good one, found by bisection."""
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    try:
        read, asked = _question(check, finding, model, profile, seed)
        chosen = span(builds.parse_source(source), oldest, newest)
        console.print(f"{asked['check']} on {asked['model']}: {len(chosen)} builds from {chosen[0]} to {chosen[-1]}")
        readings: dict[int, Reading] = {}

        def look(place: int) -> Value:
            if place not in readings:
                build = str(chosen[place])
                builds.resolve(build)
                with console.status(f"running {build}"):
                    readings[place] = _kept({**asked, "build": build}, lambda: read(build), fresh)
                console.print(f"[{len(readings)}] {_named(chosen[place])}: {_told(readings[place])}")
            return readings[place].value

        if each:
            for place in range(len(chosen)):
                look(place)
        found = boundaries(len(chosen), look)
    except (EngineError, SpecError, GGUFError, models.UnknownModel) as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}")
    _show(chosen, readings, found, asked, as_json)
    if all(reading.value == "untestable" for reading in readings.values()):
        refuse("nothing could be told on any of these builds; see the reasons above")
    raise typer.Exit(0 if found else 1)


def _question(
    id: str | None, finding: Path | None, model: str | None, profile: str, seed: int
) -> tuple[Callable[[str], Reading], dict[str, Any]]:
    """What is run on each build, and all that its result depends on besides the build."""
    if (id is None) == (finding is None):
        raise BuildError("name one of --check ID and --finding JSON")
    asked: dict[str, Any]
    if finding is not None:
        found = _finding(finding)
        steps = hashlib.sha256(finding.read_bytes()).hexdigest()[:16]
        asked = {"check": found.cluster, "model": found.model, "finding": steps, "suite": suite_digest()}
        return lambda build: read_finding(build, found), asked
    assert id is not None
    specs = contract()
    if id not in specs.invariants and (families := [each for each in specs.invariants if each.startswith(f"{id}/")]):
        raise BuildError(f"--check {id}: name one of its case families: {', '.join(families)}")
    invariant = specs[id]
    specs.profile(profile)
    name = model or _usual_model(invariant)
    if name not in models.names():
        census_of_gguf(Path(name))
    bytes_of_model = file_digest(subject_of(name).path)
    asked = {
        "check": id, "model": name, "bytes": bytes_of_model, "profile": profile, "seed": seed, "suite": suite_digest(),
    }  # fmt: skip
    return lambda build: read_check(build, name, id, specs, profile, seed), asked


def _usual_model(invariant: Invariant) -> str:
    for name in (*_USUAL, *models.names()):
        path = models.path(name)
        subject = Subject(name, path, kinds_of(census_of_gguf(path)), frozenset(invariant.needs.capabilities))
        if applies(invariant, subject) is None:
            return name
    raise BuildError(f"--check {invariant.id}: applies to no fixture model; name one with --model")


def _finding(path: Path) -> Found:
    try:
        found = Found(**json.loads(path.read_bytes()))
        unknown = {name for name, *_ in found.steps} - STEPS.keys()
    except (ValueError, TypeError):
        raise BuildError(
            f"--finding {path}: holds no finding; give the .json that tools.fuzz wrote beside the script"
        ) from None
    if unknown:
        raise BuildError(
            f"--finding {path}: has steps that walks no longer take: {', '.join(sorted(unknown))}; search again"
        )
    return found


def _kept(key: dict[str, Any], read: Callable[[], Reading], fresh: bool) -> Reading:
    """The reading of an earlier run with the same key, else a new one, which is kept where it tells something."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    path = models.cache_folder() / "bisect" / f"{name}.json"
    if path.is_file() and not fresh:
        return Reading(**json.loads(path.read_text()))
    reading = read()
    if reading.value == "untestable":
        return reading
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{name}.{secrets.token_hex(4)}")
    partial.write_text(json.dumps(asdict(reading)))
    os.replace(partial, path)
    return reading


def _named(build: builds.Published) -> str:
    release = origin_of(builds.resolve(str(build))).release
    return f"{build} ({release})" if release else str(build)


def _told(reading: Reading) -> str:
    deviation = "" if reading.deviation is None else f" (deviation {reading.deviation:.2g})"
    return f"{reading.value}{deviation}: {' '.join(reading.why.split())}"[:300]


def _show(
    chosen: Sequence[builds.Published],
    readings: dict[int, Reading],
    found: Sequence[tuple[int, int]],
    asked: dict[str, Any],
    as_json: bool,
) -> None:
    named = {place: _named(chosen[place]) for place in readings}
    if as_json:
        pairs = [
            {"from": str(chosen[low]), "to": str(chosen[high]), "becomes": readings[high].value} for low, high in found
        ]
        rows = [{"build": str(chosen[place]), **asdict(readings[place])} for place in sorted(readings)]
        typer.echo(json.dumps({**asked, "boundaries": pairs, "readings": rows}, indent=1))
        return
    for place in sorted(readings):
        typer.echo(f"{readings[place].value:10} {named[place]}")
    for low, high in found:
        between = [str(chosen[place]) for place in range(low + 1, high)]
        gap = f"; between them {', '.join(between)} cannot be tested" if between else ""
        now, before = readings[high].value, readings[low].value
        typer.echo(f"first {now}: {named[high]}; last {before}: {named[low]}{gap}")
    values = {reading.value for reading in readings.values()} - {"untestable"}
    if not found:
        typer.echo(
            f"no boundary: {asked['check']} {_PAST[values.pop()] if values else 'could not be tested'} on every build that was run"
        )
    if assumed := len(chosen) - len(readings):
        typer.echo(f"{assumed} of {len(chosen)} builds were not run: taken to fare as those on both sides of them do")


def run() -> None:
    """The command line."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=__doc__)(main)
    app()


if __name__ == "__main__":
    run()
