"""Build references: one string names a build wherever one can be named.

bundled                             the libraries inside the llama-cpp-python of this environment
pypi:llama-cpp-python==V            source, compiled by pip
pypi:xllamacpp==V                   wheels; V ends in llama.cpp's build number
pypi:llama-cpp-py-sync==V           wheels; 0.N is build N
npm:@node-llama-cpp/linux-x64@V     prebuilt libraries, without mtmd
a folder, or a library file         a build of one's own
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from conformance.harness.engine import BuildError

BUILD_HELP: Final = (
    "'bundled', a published build such as pypi:xllamacpp==2026.10.11549 or npm:@node-llama-cpp/linux-x64@3.22.1, a folder, "
    "or a libllama file."
)
_SCHEME = re.compile(r"(pypi|npm):")
_NPM_VERSION = re.compile(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?")


@dataclass(frozen=True)
class Source:
    """A package in which builds of llama.cpp are published.

    Attributes:
        registry: where it is published, which is also the client that fetches it.
        package: its name there.
        folder: where the unpacked package holds its libraries.
        oldest: the oldest version whose structs are known here; None where that was not tried.
        compiled: whether pip compiles it here.

    """

    registry: Literal["pypi", "npm"]
    package: str
    folder: str
    oldest: str | None = None
    compiled: bool = False

    @property
    def separator(self) -> str:
        """What stands between package and version in a reference."""
        return "==" if self.registry == "pypi" else "@"

    def __str__(self) -> str:
        return f"{self.registry}:{self.package}"


SOURCES: Final = (
    Source("pypi", "llama-cpp-python", "llama_cpp", compiled=True),
    Source("pypi", "xllamacpp", "xllamacpp", oldest="0.2.13"),
    Source("pypi", "llama-cpp-py-sync", "llama_cpp_py_sync", oldest="0.8123"),
    Source("npm", "@node-llama-cpp/linux-x64", "package/bins/linux-x64", oldest="3.16.2"),
)
"""Every package that a reference can name."""


@dataclass(frozen=True)
class Published:
    """One published version of a source; its text is the reference."""

    source: Source
    version: str

    def __str__(self) -> str:
        return f"{self.source}{self.source.separator}{self.version}"


def parse(reference: str) -> Published | None:
    """The published build that a reference names; None for `bundled`, a folder or a file.

    Raises:
        BuildError: the package is none of `SOURCES`, or its version is missing or none.

    """
    if not _SCHEME.match(reference):
        return None
    for separator in ("==", "@"):
        package, found, version = reference.rpartition(separator)
        if found and not package.endswith(":"):  # the @ of a scope is no version's
            break
    else:
        package, version = reference, ""
    source = parse_source(package)
    if separator != source.separator or not version:
        raise BuildError(
            f"build {reference!r}: names no version; write {source}{source.separator}VERSION "
            f"(`python -m tools.builds list {source}` shows which there are)"
        )
    try:
        if source.registry == "pypi":
            return Published(source, str(Version(version)))
        if _NPM_VERSION.fullmatch(version):
            return Published(source, version)
    except InvalidVersion:
        pass
    raise BuildError(f"build {reference!r}: {version!r} is no version; write one such as {_EXAMPLES[source]}")


def parse_source(text: str) -> Source:
    """The source that a text such as "pypi:xllamacpp" names; BuildError when it names none."""
    registry, _, package = text.partition(":")
    name = canonicalize_name(package) if registry == "pypi" else package
    for source in SOURCES:
        if (source.registry, source.package) == (registry, name):
            return source
    raise BuildError(f"{text!r}: builds are not taken from there; choose from {', '.join(map(str, SOURCES))}")


_EXAMPLES: Final = dict(zip(SOURCES, ("0.3.36", "2026.10.11549", "0.10069", "3.22.1"), strict=True))
