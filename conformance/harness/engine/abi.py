"""Struct layouts of a libllama without its header.

Builds differ in the structs that are passed by value, and a wrong layout is silent: a field lands in its neighbour.
The layouts seen so far are data (`layouts.yaml`); a header beside the library serves where they do not. Which one a build
has is found by calling its default-params function over a buffer filled with three canary bytes in turn: bytes that come
out equal were written by the build. The written extent and the default values pick one row; every context then reads its
settings back (see `context.py`).
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .errors import BuildError
from .header import fields_of, find_header

_CANARIES = (0xA5, 0x5A, 0x3C)
_PROBE_BYTES = 1024
_END = "the end"
_C_TYPES: dict[str, Any] = {
    "u32": ctypes.c_uint32,
    "i32": ctypes.c_int32,
    "f32": ctypes.c_float,
    "ptr": ctypes.c_void_p,
    "f64": ctypes.c_double,
    "i8": ctypes.c_int8,
    "u8": ctypes.c_uint8,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "size": ctypes.c_size_t,
    "bool": ctypes.c_bool,
}
_LAYOUTS = Path(__file__).with_name("layouts.yaml")


@dataclass(frozen=True)
class Layout:
    """One known layout of one struct.

    Attributes:
        id: name of the row in `layouts.yaml`, or of the header that declares it.
        structure: a `ctypes.Structure` class with the row's fields.
        defaults: accepted default values by field name.

    """

    id: str
    structure: type[ctypes.Structure]
    defaults: dict[str, tuple[float, ...]]

    def has(self, field: str) -> bool:
        """Whether this layout has the named field."""
        return hasattr(self.structure, field)


@dataclass(frozen=True)
class Probe:
    """What a default-params function wrote.

    Attributes:
        written: one flag per byte of the buffer.
        content: the buffer after the first call.

    """

    written: tuple[bool, ...]
    content: bytes

    @property
    def extent(self) -> int:
        """Bytes from the start of the struct to the last byte written."""
        return max((i + 1 for i, flag in enumerate(self.written) if flag), default=0)

    def shows(self, layout: Layout) -> bool:
        """Whether the written bytes and their values are those of the layout."""
        return self.misfit(layout) == (self.extent, _END)

    def misfit(self, layout: Layout) -> tuple[int, str]:
        """Offset and name of the first field that the written bytes do not show; behind the last field, "the end"."""
        size = ctypes.sizeof(layout.structure)
        values = layout.structure.from_buffer_copy(self.content[:size].ljust(size, b"\0"))
        end = 0
        for name, _ in _fields(layout.structure):
            place = getattr(layout.structure, name)
            end = place.offset + place.size
            accepted = layout.defaults.get(name)
            written = all(self.written[place.offset : end]) and end <= self.extent
            if not written or (accepted is not None and (getattr(values, name) or 0) not in accepted):
                return place.offset, name
        return size if self.extent == size else end, _END  # a compiler may fill the padding at the end


def _fields(structure: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    return list(structure._fields_)  # type: ignore[arg-type]


@cache
def known_layouts(struct: str) -> tuple[Layout, ...]:
    """All rows of `layouts.yaml` for `context_params`, `model_params` or `mtmd_context_params`."""
    table = _table(struct)
    layouts = []
    for row in table["rows"]:
        present = [f for f in table["fields"] if not f.get("optional") or f["name"] in row["with"]]
        layout = _layout(struct, row["id"], present)
        size = ctypes.sizeof(layout.structure)
        if size != row["size"]:
            raise AssertionError(f"{_LAYOUTS.name}: row {row['id']} is {size} bytes, not {row['size']}")
        layouts.append(layout)
    return tuple(layouts)


@cache
def _table(struct: str) -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(_LAYOUTS.read_text())[struct]
    return table


def _layout(struct: str, id: str, fields: Sequence[Mapping[str, Any]]) -> Layout:
    structure = type(
        f"{struct}_{re.sub(r'[^0-9A-Za-z]', '_', id)}",
        (ctypes.Structure,),
        {"_fields_": [(f["name"], _C_TYPES[f["type"]]) for f in fields]},
    )
    defaults = {
        f["name"]: tuple(f["default"]) if isinstance(f["default"], list) else (f["default"],)
        for f in fields
        if "default" in f
    }
    return Layout(id, structure, defaults)


def refuse_unknown_cpu(machine: str | None = None) -> None:
    """Raise `BuildError` unless the probe is known to work on this CPU architecture."""
    machine = machine or platform.machine()
    if machine.lower() not in {"x86_64", "amd64"}:
        raise BuildError(
            f"CPU architecture {machine!r}: struct layouts are only known for x86-64; "
            "run the suite there, or add a probe for this architecture to conformance/harness/engine/abi.py"
        )


def probe(function: Any) -> Probe:
    """Call a function that returns a struct larger than 16 bytes and see which bytes it writes.

    On x86-64 the caller passes a hidden pointer to the result as the first argument, so the call is made as
    `void f(void *)` over a buffer of this process's own.
    """
    refuse_unknown_cpu()
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.cast(function, ctypes.c_void_p).value or 0)
    fills = []
    for canary in _CANARIES:
        buffer = (ctypes.c_ubyte * _PROBE_BYTES)(*([canary] * _PROBE_BYTES))
        call(ctypes.addressof(buffer))
        fills.append(bytes(buffer))
    return Probe(tuple(a == b == c for a, b, c in zip(*fills, strict=True)), fills[0])


def recognise(struct: str, seen: Probe, library: Path) -> Layout:
    """The one layout that the probe shows: a known one, else the one declared by a header beside the library.

    Raises:
        BuildError: no row fits or more than one, and no header helps; the message holds the written bytes and says how a
            row is added.

    """
    known = known_layouts(struct)
    fits = [layout for layout in known if seen.shows(layout)]
    if len(fits) == 1:
        return fits[0]
    function = _table(struct)["function"]
    name = c_name(struct)
    header = find_header(library, f"{name.partition('_')[0]}.h")
    if header is not None:
        return _declared(struct, header, seen)
    written = " ".join(
        f"{byte:02x}" if flag else "--" for byte, flag in zip(seen.content[: seen.extent], seen.written, strict=False)
    )
    found = "no known layout fits" if not fits else "several layouts fit: " + ", ".join(f.id for f in fits)
    nearest = max(known, key=lambda layout: seen.misfit(layout)[0])
    offset, field = seen.misfit(nearest)
    raise BuildError(
        f"{library}: {name}: {found} ({seen.extent} bytes written by {function}); the run would be wrong, so it stops here; "
        f"row {nearest.id} of {_LAYOUTS.name} fits up to {field} (byte {offset}); put the build's own header beside the "
        f"library, or add a row that fits these bytes (docs/builds.md says how): {written}"
    )


def c_name(struct: str) -> str:
    """What C calls a struct of the table."""
    return struct if struct.startswith("mtmd_") else f"llama_{struct}"


def _declared(struct: str, header: Path, seen: Probe) -> Layout:
    """The layout that a header declares, if the probe shows it."""
    name = c_name(struct)
    fields = fields_of(header, name)
    if fields is None:
        raise BuildError(f"{header}: does not define {name}; put the header of this very build beside the library")
    table = _table(struct)
    absent = {f["name"] for f in table["fields"] if not f.get("optional")} - {field for field, _ in fields}
    if absent:
        raise BuildError(
            f"{header}: {name} has no {', '.join(sorted(absent))}, which the suite sets; it must learn this build first"
        )
    usual = {f["name"]: f for f in table["fields"]}
    layout = _layout(
        struct, header.name, [usual.get(field, {}) | {"name": field, "type": kind} for field, kind in fields]
    )
    if not seen.shows(layout):
        offset, field = seen.misfit(layout)
        raise BuildError(
            f"{header}: {name}: the library writes {seen.extent} bytes that part from the header's "
            f"{ctypes.sizeof(layout.structure)} at {field} (byte {offset}); put the header of this very build there, or, where "
            f"that it is, add the new default of {field} to {_LAYOUTS.name}"
        )
    return layout
