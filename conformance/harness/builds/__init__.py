"""Published builds of llama.cpp by reference: what a reference means, and how it comes onto this machine."""

from .description import Description, describe, identify
from .references import BUILD_HELP, SOURCES, Published, Source, parse, parse_source
from .registries import published_versions
from .store import Receipt, builds_folder, fetch, kept, load, resolve

__all__ = [
    "BUILD_HELP",
    "SOURCES",
    "Description",
    "Published",
    "Receipt",
    "Source",
    "builds_folder",
    "describe",
    "fetch",
    "identify",
    "kept",
    "load",
    "parse",
    "parse_source",
    "published_versions",
    "resolve",
]
