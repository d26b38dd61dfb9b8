"""What is here to be examined and with what, and one line for each thing that is wrong with the set-up.

    python -m tools.doctor [--build BUILD] [--model GGUF] [--json]

Exit code 0 when a run can start, 2 when something must be put right first.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from packaging.requirements import Requirement
from rich.console import Console

from conformance.harness import builds
from conformance.harness.bench import Setup, meet
from conformance.harness.builds import BUILD_HELP
from conformance.harness.contract.census import GGUFError, census_of_gguf
from conformance.harness.contract.known import load_known_failures
from conformance.harness.contract.load import SpecError
from conformance.harness.engine import BUNDLED, EngineError, abi
from conformance.harness.engine.child import Child, ChildDeath
from conformance.harness.exam.examination import SPECS, contract
from conformance.harness.exam.session import GIB, child_for
from fixtures import models

_LOOK_SECONDS = 8.0
_LOOKED_AT = "qwen35-mini"  # a small model that shows most capabilities


def examine(build: str, model: str | None) -> tuple[dict[str, Any], list[str]]:
    """The set-up as JSON-able findings, and what is wrong with it, a line each."""
    problems: list[str] = []
    findings: dict[str, Any] = {"versions": _versions(problems), "machine": _machine(problems)}
    try:
        specs = contract()
        known = load_known_failures(SPECS / "known_failures")
        findings["specs"] = {"invariants": len(specs.invariants), "known_failures": len(known)}
    except SpecError as error:
        problems += error.problems
    findings["models"] = _models(problems)
    if model is not None:
        try:
            census_of_gguf(Path(model))
        except GGUFError as error:
            problems.append(f"--model: {error}")
            model = None
        except OSError as error:
            problems.append(f"--model {model}: {error.strerror}; give the path of a GGUF")
            model = None
    with child_for([Path(model)] if model else []) as child:
        findings["build"] = _build(child, build, model or _LOOKED_AT, problems)
    return findings, problems


def _build(child: Child, build: str, model: str, problems: list[str]) -> dict[str, Any] | None:
    found: dict[str, Any] | None = None
    try:
        builds.resolve(build)
        found = child.call(builds.identify, build, timeout=_LOOK_SECONDS)
        look = child.call(meet, Setup(build, model), (), timeout=_LOOK_SECONDS)
        found["capabilities"] = {
            "on": model,
            "found": sorted(look.capabilities),
            "prefill_tokens_per_second": round(look.prefill_tokens_per_second),
        }
    except EngineError as error:
        problems.append(str(error))
    except ChildDeath as death:
        problems.append(f"build {build!r}: {death}; rebuild it for this machine")
    return found


def _versions(problems: list[str]) -> dict[str, str]:
    versions = {"python": platform.python_version(), "llama-conformance": metadata.version("llama-conformance")}
    for line in metadata.requires("llama-conformance") or ():
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            versions[requirement.name] = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            problems.append(f"package {requirement.name} is missing; run `pip install -e .`")
            continue
        if not requirement.specifier.contains(versions[requirement.name], prereleases=True):
            problems.append(
                f"package {requirement.name} is {versions[requirement.name]}, not {requirement.specifier}; "
                "run `pip install -e .`"
            )
    return versions


def _machine(problems: list[str]) -> dict[str, Any]:
    available = psutil.virtual_memory().available
    try:
        abi.refuse_unknown_cpu()
    except EngineError as error:
        problems.append(str(error))
    if available < GIB:
        problems.append(f"only {available / GIB:.1f} GiB of memory are free; the fixture models need about 1 GiB")
    return {"cpu": platform.machine(), "cores": os.cpu_count(), "free_memory_gib": round(available / GIB, 1)}


def _models(problems: list[str]) -> dict[str, Any]:
    folder = models.cache_folder()
    try:
        kept = {name: models.path(name).stat().st_size for name in models.names()}
    except OSError as error:
        problems.append(
            f"model cache {folder}: {error.strerror}; set LLAMA_CONFORMANCE_CACHE to a folder that can be written"
        )
        kept = {}
    return {"cache": str(folder), "bytes": kept}


def _print(findings: dict[str, Any], problems: list[str]) -> None:
    console = Console(markup=False, highlight=False, soft_wrap=True)
    build = findings["build"]
    if build:
        console.print(f"build     {build['version']}, commit {build['commit']}, digest {build['digest']}")
        console.print(f"          {build['library']}")
        console.print(f"layouts   context {build['context_layout']}, model {build['model_layout']}")
        if look := build.get("capabilities"):
            console.print(
                f"can       {', '.join(look['found'])} (on {look['on']}, {look['prefill_tokens_per_second']} tokens/s prefill)"
            )
    machine, kept = findings["machine"], findings["models"]
    console.print(f"machine   {machine['cpu']}, {machine['cores']} cores, {machine['free_memory_gib']} GiB free")
    console.print(f"models    {', '.join(kept['bytes']) or 'none'} in {kept['cache']}")
    if "specs" in findings:
        console.print(
            f"specs     {findings['specs']['invariants']} invariants, {findings['specs']['known_failures']} known failures"
        )
    console.print("versions  " + ", ".join(f"{name} {version}" for name, version in findings["versions"].items()))
    for problem in problems:
        console.print(f"WRONG     {problem}")
    console.print("nothing is wrong" if not problems else f"{len(problems)} thing(s) to put right")


def main(
    build: Annotated[str, typer.Option(help=BUILD_HELP)] = BUNDLED,
    model: Annotated[str | None, typer.Option(help="A GGUF to look at with it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """What is here to be examined and with what, and what is wrong with it."""
    findings, problems = examine(build, model)
    if as_json:
        print(json.dumps({**findings, "problems": problems}, indent=2))
    else:
        _print(findings, problems)
    sys.exit(2 if problems else 0)


if __name__ == "__main__":
    typer.run(main)
