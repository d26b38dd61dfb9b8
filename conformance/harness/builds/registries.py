"""What pip and npm are asked for: which versions there are, and one of them as a file."""

from __future__ import annotations

import bisect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from packaging.version import Version

from conformance.harness.engine import BuildError

from .references import Published, Source

_PIP = (sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check")
_NPM = ("npm", "--no-update-notifier", "--no-fund", "--no-audit", "--fetch-retries=1", "--fetch-retry-mintimeout=500")
_NEIGHBOURS = 2
_LOOK_SECONDS = 0.2
_UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|name resolution|ConnectTimeout|Read timed out|ProxyError|SSLError"
    r"|Max retries exceeded|Connection (?:refused|reset|aborted)"
    r"|code (?:ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH)"
)
_STEP = re.compile(r"\[(\d+)/(\d+)\]")  # as ninja counts what it compiles

Tell = Callable[[str], None]


def published_versions(source: Source) -> tuple[str, ...]:
    """Every version that the registry offers for this machine, oldest first.

    Raises:
        BuildError: the registry cannot be reached, or its client is missing.

    """
    if source.registry == "npm":
        found = _asked([*_npm(), "view", source.package, "versions", "--json"], source)
        listed = json.loads(found)
        versions = [listed] if isinstance(listed, str) else listed
    else:
        only = [] if source.compiled else ["--only-binary=:all:"]
        found = _asked([*_PIP, "--retries=1", "index", "versions", *only, source.package], source)
        line = re.search(r"^Available versions: (.*)$", found, re.MULTILINE)
        versions = line[1].split(", ") if line else []
    return tuple(sorted(versions, key=Version))


def _asked(command: Sequence[str], source: Source) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(_refusal(str(source), done.stdout + done.stderr))
    return done.stdout


def obtain(build: Published, folder: Path, tell: Tell) -> Path:
    """Have the registry's client put a build's archive into a folder; the archive, a wheel or a tarball.

    Args:
        build: what is wanted.
        folder: empty; the client works in it too, so that what it leaves goes with it.
        tell: is told how far it is.

    Raises:
        BuildError: there is no such version (the nearest are named), no connection, or no compiler.

    """
    source = build.source
    if source.registry == "npm":
        command = [*_npm(), "pack", f"{source.package}@{build.version}", "--pack-destination", str(folder)]
    else:
        how = ["--verbose"] if source.compiled else ["--only-binary=:all:"]
        command = [*_PIP, "wheel", "--retries=1", "--no-deps", *how, "--wheel-dir", str(folder)]
        command.append(f"{source.package}=={build.version}")
    code, said = _run(command, folder, tell)
    archives = [*folder.glob("*.whl"), *folder.glob("*.tgz")]
    if code or not archives:
        raise BuildError(_no_such_version(build, said) or _not_compiled(build, said) or _refusal(str(build), said))
    return archives[0]


def _npm() -> Sequence[str]:
    if shutil.which("npm") is None:
        raise BuildError(
            "npm is not installed, and npm: builds are fetched with it; install npm, or choose a pypi: build"
        )
    return _NPM


def _run(command: Sequence[str], folder: Path, tell: Tell) -> tuple[int, str]:
    """Run a client to its end; its exit code and all that it said."""
    work, log = folder / "work", folder / "log"
    work.mkdir()
    environment: Mapping[str, str] = {**os.environ, "TMPDIR": str(work), "npm_config_cache": str(folder / "npm")}
    begin = time.monotonic()
    with log.open("w") as stream:
        client = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=environment,
            start_new_session=True,  # so that a compiler it started ends with it
        )
        try:
            while True:
                try:
                    code = client.wait(_LOOK_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    tell(f"{_step(log) or _size(folder)}, {time.monotonic() - begin:.0f} s")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(client.pid, signal.SIGKILL)
            client.wait()
    return code, log.read_text(errors="replace")


def _step(log: Path) -> str:
    """How far a compilation is, or nothing when none is under way."""
    steps = _STEP.findall(log.read_text(errors="replace")[-4000:])
    return f"compiled {steps[-1][0]} of {steps[-1][1]} files" if steps else ""


def _size(folder: Path) -> str:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except OSError:  # the client has tidied it away
                continue
    return f"{total / 1e6:.1f} MB"


def _no_such_version(build: Published, said: str) -> str | None:
    """That a version does not exist, with the nearest that do; None when that was not the trouble."""
    listed = re.search(r"\(from versions: (.*?)\)", said)
    if build.source.registry == "pypi" and listed and listed[1] != "none":
        versions = sorted(listed[1].split(", "), key=Version)
    elif "code ETARGET" in said:
        versions = list(published_versions(build.source))
    else:
        return None
    place = bisect.bisect_left(versions, Version(build.version), key=Version)
    nearest = versions[max(place - _NEIGHBOURS, 0) : place + _NEIGHBOURS]
    return f"build '{build}': {build.source} has no version {build.version} for this machine; the nearest are {', '.join(nearest)}"


def _not_compiled(build: Published, said: str) -> str | None:
    """That pip had the source and could not build it; None when that was not the trouble."""
    if "Failed to build" not in said and "metadata-generation-failed" not in said:
        return None
    return (
        f"build '{build}': pip could not compile it; it needs a C and a C++ compiler and cmake, and "
        f"`pip wheel --no-deps {build.source.package}=={build.version}` shows what it says"
    )


def _refusal(what: str, said: str) -> str:
    if _UNREACHABLE.search(said):
        return f"build '{what}': its registry cannot be reached; check the connection, or name a build that `python -m tools.builds list --kept` shows"
    lines = [
        line.strip() for line in said.splitlines() if re.match(r"\s*(error|npm (error|ERR!))", line, re.IGNORECASE)
    ]
    reason = (lines or said.strip().splitlines()[-1:] or ["its client gave no reason"])[:2]
    return f"build '{what}': could not be fetched ({'; '.join(reason)}); see `python -m tools.builds list` for what there is"
