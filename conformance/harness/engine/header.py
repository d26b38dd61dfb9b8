"""The fields of a C struct, read from a header that lies beside a library.

Not a C parser: it knows declarations of the kinds that llama.h and mtmd.h put into their parameter structs, and refuses
anything else.
"""

from __future__ import annotations

import re
from pathlib import Path

from .errors import BuildError

_PLACES = ("", "include", "../include", "../../include", "../../tools/mtmd", "../include/llama.cpp")
_TYPES = {
    "bool": "bool",
    "int8_t": "i8",
    "uint8_t": "u8",
    "int": "i32",
    "int32_t": "i32",
    "uint32_t": "u32",
    "int64_t": "i64",
    "uint64_t": "u64",
    "size_t": "size",
    "float": "f32",
    "double": "f64",
}
_POINTER_TYPES = re.compile(r"\w+_callback|ggml_backend_(?:dev|buffer_type|buffer|sched)_t|ggml_\w+_fn")
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_FUNCTION = re.compile(r".*\(\s*\*\s*(?P<name>\w+)\s*\)\s*\(.*\)", re.DOTALL)
_FIELD = re.compile(
    r"(?:const\s+)?(?P<enum>enum\s+)?(?:struct\s+)?(?P<type>\w+)\s*(?:const\s*)?(?P<pointer>\*[\s*]*)?(?:const\s+)?(?P<name>\w+)"
)


def find_header(library: Path, name: str) -> Path | None:
    """The header of that name that belongs to a library, None where there is none near it."""
    return next((path for place in _PLACES if (path := (library.parent / place / name).resolve()).is_file()), None)


def fields_of(header: Path, struct: str) -> list[tuple[str, str]] | None:
    """Name and type of each field of a struct, in order; None when the header does not define it.

    Types are those of `layouts.yaml`.

    Raises:
        BuildError: a declaration in the struct is of a kind that is not understood here.

    """
    text = re.sub(r"^[ \t]*#[^\n]*", "", _COMMENT.sub(" ", header.read_text(errors="replace")), flags=re.MULTILINE)
    begin = re.search(rf"\bstruct\s+{struct}\s*\{{", text)
    if begin is None:
        return None
    body, _, _ = text[begin.end() :].partition("}")
    return [_field(" ".join(each.split()), header, struct) for each in body.split(";") if each.strip()]


def _field(declaration: str, header: Path, struct: str) -> tuple[str, str]:
    if function := _FUNCTION.fullmatch(declaration):
        return function["name"], "ptr"
    if found := _FIELD.fullmatch(declaration):
        if found["pointer"] or _POINTER_TYPES.fullmatch(found["type"]):
            return found["name"], "ptr"
        kind = "i32" if found["enum"] else _TYPES.get(found["type"])
        if kind is not None:
            return found["name"], kind
    raise BuildError(
        f"{header}: struct {struct}: the declaration {declaration!r} is of a kind that is not understood here; add a row to "
        "conformance/harness/engine/layouts.yaml instead (docs/builds.md says how)"
    )
