"""Where a library comes from, told by the files around it: nothing is loaded or imported."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_PACKAGES = {
    "llama_cpp": "llama-cpp-python",
    "xllamacpp": "xllamacpp",
    "llama_cpp_py_sync": "llama-cpp-py-sync",
}
_IN_VERSION = {
    "xllamacpp": re.compile(r"20\d\d\.\d+\.(\d+)(?:\.\d+)?"),
    "llama-cpp-py-sync": re.compile(r"0\.(\d+)(?:\.\d+)?"),
}
_IN_FILE_NAME = re.compile(r"libllama\.(?:b|so\.0\.0\.)(\d+)(?:\.so)?")
_NPM_LEVELS = 2


@dataclass(frozen=True)
class Origin:
    """Where a library comes from; None for what is unknown.

    Attributes:
        package: in which it came.
        version: of the package.
        build_number: llama.cpp's own.
        release: llama.cpp's tag: "b" and the build number, or a version such as "v0.4.0".

    """

    package: str | None = None
    version: str | None = None
    build_number: int | None = None
    release: str | None = None


def origin_of(library: Path) -> Origin:
    """What the files around a library say of it.

    Sources of the build number: the versions of xllamacpp (from 2026 on) and llama-cpp-py-sync contain it; node-llama-cpp
    and upstream's CMake write it into the library's name (`libllama.b10068.so`, `libllama.so.0.0.10068`). node-llama-cpp
    names the tag in a file beside the library.
    """
    package, version = _python_package(library) or _npm_package(library) or (None, None)
    in_version = _IN_VERSION[package].fullmatch(version or "") if package in _IN_VERSION else None
    number = in_version or _IN_FILE_NAME.fullmatch(library.name)
    release = f"b{number[1]}" if number else _npm_release(library)
    return Origin(package, version, int(number[1]) if number else None, release)


def _python_package(library: Path) -> tuple[str, str] | None:
    for folder in library.parents:
        if name := _PACKAGES.get(folder.name):
            for found in metadata.distributions(name=name, path=[str(folder.parent)]):
                return name, found.version
    return None


def _npm_package(library: Path) -> tuple[str, str] | None:
    for folder in library.parents[: _NPM_LEVELS + 1]:
        path = folder / "package.json"
        if path.is_file():
            declared = json.loads(path.read_text())
            return str(declared["name"]), str(declared["version"])
    return None


def _npm_release(library: Path) -> str | None:
    path = library.with_name("_nlcBuildMetadata.json")
    return str(json.loads(path.read_text())["buildOptions"]["llamaCpp"]["release"]) if path.is_file() else None
