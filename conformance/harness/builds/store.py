"""Fetched builds on disk, beside the fixture models and outside the checkout.

A build is fetched and unpacked in a folder of its own and then renamed into place, under a lock that the system drops
with the process. So a folder that is there is whole, two processes fetch once, and what a killed fetch left is removed
by the next.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from rich.console import Console

from conformance.harness.engine import BuildError, Library, digest_of, find_library
from fixtures.models import cache_folder

from .references import Published, parse
from .registries import Tell, obtain

_RECEIPT = "receipt.json"
_COMPILING = "pip compiles it: 10 to 15 minutes on two cores, unless its wheel cache has it"


@dataclass(frozen=True)
class Receipt:
    """What was fetched.

    Attributes:
        reference: of the build.
        archive: name of the file that came from the registry, and
        sha256: of its content.
        digest: of the libraries in it, as in results.
        fetched: the day.

    """

    reference: str
    archive: str
    sha256: str
    digest: str
    fetched: str


def builds_folder() -> Path:
    """Where fetched builds are kept; the folder may not exist yet."""
    return cache_folder() / "builds"


def place_of(build: Published) -> Path:
    """The folder that a fetched build has or will have."""
    package = build.source.package.lstrip("@").replace("/", "-")
    return builds_folder() / f"{build.source.registry}-{package}" / build.version


def kept() -> tuple[Receipt, ...]:
    """The receipts of all builds in the cache, by reference."""
    found = (_receipt(path.parent) for path in builds_folder().glob(f"*/*/{_RECEIPT}"))
    return tuple(sorted(found, key=lambda receipt: receipt.reference))


def _receipt(place: Path) -> Receipt:
    try:
        return Receipt(**json.loads((place / _RECEIPT).read_bytes()))
    except (OSError, ValueError, TypeError):
        raise BuildError(
            f"{place / _RECEIPT}: cannot be read; delete that folder, the build is then fetched again"
        ) from None


def resolve(reference: str) -> Path:
    """The libllama file that a reference names; fetched first when it is a published build that is not here.

    Raises:
        BuildError: the reference means nothing, nothing is there, or it cannot be fetched.

    """
    build = parse(reference)
    return find_library(reference) if build is None else fetch(build)


@cache
def load(reference: str) -> Library:
    """The build that a reference names, loaded into this process. Raises as `resolve` and `Library`."""
    return Library(str(resolve(reference)), reference=reference)


def refuse_changed(reference: str, digest: str) -> None:
    """Raise BuildError where a build in the cache is no longer what was fetched."""
    build = parse(reference)
    if build is None:
        return
    place = place_of(build)
    if _receipt(place).digest != digest:
        raise BuildError(f"build '{build}': its files in {place} have changed since it was fetched; delete that folder")


def fetch(build: Published) -> Path:
    """The library of a published build, from the cache or the registry. Raises BuildError when it cannot be had."""
    place = place_of(build)
    if not place.is_dir():
        try:
            _fetch_into(place, build)
        except OSError as error:
            raise BuildError(
                f"build '{build}': {error.filename or place}: {error.strerror or error}; make room there, or set "
                "LLAMA_CONFORMANCE_CACHE to a folder that can be written"
            ) from None
    return find_library(str(place / build.source.folder))


def _fetch_into(place: Path, build: Published) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with _telling(build) as tell, place.with_name(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another process is fetching from there")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if place.is_dir():
            return
        for left in place.parent.glob(".partial-*"):
            shutil.rmtree(left, ignore_errors=True)
        partial = place.with_name(f".partial-{secrets.token_hex(4)}")
        try:
            (partial / "client").mkdir(parents=True)
            archive = obtain(build, partial / "client", tell)
            tell("unpacking")
            _unpack(archive, partial / "build")
            library = find_library(str(partial / "build" / build.source.folder))
            with archive.open("rb") as stream:
                sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            day = datetime.now(UTC).date().isoformat()
            receipt = Receipt(str(build), archive.name, sha256, digest_of(library), day)
            (partial / "build" / _RECEIPT).write_text(json.dumps(asdict(receipt), indent=1))
            os.rename(partial / "build", place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _unpack(archive: Path, folder: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder)
    else:
        with tarfile.open(archive) as tarball:
            tarball.extractall(folder, filter="data")


@contextmanager
def _telling(build: Published) -> Iterator[Tell]:
    """Shows on a terminal how far a fetch is, and one line at its start elsewhere."""
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    what = f"fetching {build}" + (f" ({_COMPILING})" if build.source.compiled else "")
    if not console.is_terminal:
        console.print(f"{what} ...")
    with console.status(what) as status:
        yield lambda how_far: status.update(f"{what}: {how_far}")
