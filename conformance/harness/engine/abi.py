"""Struct layouts of a libllama without its header.

Builds differ in the structs that are passed by value, and a wrong layout is silent: a field lands in its neighbour.
The layouts seen so far are data (`layouts.yaml`). Which one a build has is found by calling its default-params function
over a buffer filled with three canary bytes in turn: bytes that come out equal were written by the build. The written
extent and the default values pick one row; every context then reads its settings back (see `context.py`).
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .errors import BuildError

_CANARIES = (0xA5, 0x5A, 0x3C)
_PROBE_BYTES = 1024
_C_TYPES: dict[str, Any] = {
    "u32": ctypes.c_uint32,
    "i32": ctypes.c_int32,
    "f32": ctypes.c_float,
    "ptr": ctypes.c_void_p,
    "size": ctypes.c_size_t,
    "bool": ctypes.c_bool,
}
_LAYOUTS = Path(__file__).with_name("layouts.yaml")


@dataclass(frozen=True)
class Layout:
    """One known layout of one struct.

    Attributes:
        id: name of the row in `layouts.yaml`.
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
        size = ctypes.sizeof(layout.structure)
        last = getattr(layout.structure, _fields(layout.structure)[-1][0])
        if self.extent not in (last.offset + last.size, size):  # a compiler may fill the padding at the end
            return False
        values = layout.structure.from_buffer_copy(self.content[:size])
        for name, _ in _fields(layout.structure):
            place = getattr(layout.structure, name)
            if not all(self.written[place.offset : place.offset + place.size]):
                return False
            accepted = layout.defaults.get(name)
            if accepted is not None and (getattr(values, name) or 0) not in accepted:
                return False
        return True


def _fields(structure: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    return list(structure._fields_)  # type: ignore[arg-type]


@cache
def known_layouts(struct: str) -> tuple[Layout, ...]:
    """All rows of `layouts.yaml` for `context_params`, `model_params` or `mtmd_context_params`."""
    table = yaml.safe_load(_LAYOUTS.read_text())[struct]
    layouts = []
    for row in table["rows"]:
        present = [f for f in table["fields"] if not f.get("optional") or f["name"] in row["with"]]
        structure = type(
            f"{struct}_{row['id'].replace('-', '_')}",
            (ctypes.Structure,),
            {"_fields_": [(f["name"], _C_TYPES[f["type"]]) for f in present]},
        )
        if ctypes.sizeof(structure) != row["size"]:
            raise AssertionError(
                f"{_LAYOUTS.name}: row {row['id']} is {ctypes.sizeof(structure)} bytes, not {row['size']}"
            )
        defaults = {
            f["name"]: tuple(f["default"]) if isinstance(f["default"], list) else (f["default"],)
            for f in present
            if "default" in f
        }
        layouts.append(Layout(row["id"], structure, defaults))
    return tuple(layouts)


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
    """The one known layout that the probe shows.

    Raises:
        BuildError: no row fits, or more than one; the message holds the written bytes, so that a row can be added.

    """
    fits = [layout for layout in known_layouts(struct) if seen.shows(layout)]
    if len(fits) == 1:
        return fits[0]
    written = " ".join(
        f"{byte:02x}" if flag else "--" for byte, flag in zip(seen.content[: seen.extent], seen.written, strict=False)
    )
    found = "no known layout fits" if not fits else "several layouts fit: " + ", ".join(f.id for f in fits)
    raise BuildError(
        f"{library}: {struct if struct.startswith('mtmd_') else f'llama_{struct}'}: {found} ({seen.extent} bytes written); the run would be wrong, so it stops here; "
        f"add a row to {_LAYOUTS.name} that fits these bytes: {written}"
    )
