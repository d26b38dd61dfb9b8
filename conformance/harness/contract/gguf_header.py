"""The head of a GGUF file: key-values and tensor table, read in place and checked against the file's size.

Only what the census needs is unpacked: tokenizer arrays (a vocabulary of 250,000 tokens and its merges) are stepped
over, their length is kept; no tensor data is touched. Source of the format: ggml/docs/gguf.md, version 3.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]

_SCALARS: Final = {
    type_id: struct.Struct("<" + code)
    for type_id, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4


class GGUFError(ValueError):
    """The file is no GGUF, is damaged or ends too early; one line that says what, where and what was expected."""


@dataclass(frozen=True)
class GGUFHeader:
    """Key-values of one file.

    Attributes:
        values: scalars, strings and arrays by key; tokenizer arrays are left out.
        lengths: number of elements of every array, tokenizer arrays too.
        n_tensors: entries of the tensor table.

    """

    values: dict[str, Value]
    lengths: dict[str, int]
    n_tensors: int


class _Cursor:
    """A position in the mapped file that cannot leave it."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.size = data, 0, len(data)

    def need(self, n_bytes: int, what: str) -> int:
        start = self.at
        if n_bytes > self.size - start:
            left = self.size - start
            raise GGUFError(f"ends inside {what}: {n_bytes} bytes needed at offset {start}, {left} left")
        self.at = start + n_bytes
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.need(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.need(8, what))[0])

    def string(self, what: str) -> str:
        n_bytes = self.u64(what)
        start = self.need(n_bytes, what)
        try:
            return self.data[start : start + n_bytes].decode("utf-8")
        except UnicodeDecodeError:
            raise GGUFError(f"{what} at offset {start} is not UTF-8") from None

    def name(self, what: str) -> str:
        """A string that may stand in an error line."""
        start, name = self.at, self.string(what)
        if not name.isprintable():
            raise GGUFError(f"{what} at offset {start} is {name!r}, not printable")
        return name

    def skip_strings(self, n: int, what: str) -> None:
        """Steps over ``n`` strings; a loop of its own because vocabularies are long."""
        at, last, unpack, data = self.at, self.size - 8, _U64.unpack_from, self.data
        for _ in range(n):
            if at > last:
                break
            at += 8 + unpack(data, at)[0]
        else:
            if at <= self.size:
                self.at = at
                return
        raise GGUFError(f"ends inside {what}: the array's strings reach beyond byte {self.size}")


def read_header(path: Path) -> GGUFHeader:
    """Reads the head of the GGUF at ``path``.

    Raises:
        GGUFError: no GGUF, an unknown version, damaged, or shorter than its own tensor table says.
        OSError: the file cannot be opened.

    """
    with path.open("rb") as file:
        try:
            if path.stat().st_size == 0:
                raise GGUFError("the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _header(_Cursor(data))
        except GGUFError as error:
            raise GGUFError(f"{path}: {error}") from None


def _header(cursor: _Cursor) -> GGUFHeader:
    magic = cursor.data[: min(4, cursor.size)]
    if magic != b"GGUF":
        raise GGUFError(f"not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    cursor.at = 4
    version = cursor.u32("the version")
    if version not in (2, 3):
        raise GGUFError(f"GGUF version {version} is not supported, only little-endian 2 and 3")
    n_tensors, n_values = cursor.u64("the tensor count"), cursor.u64("the key-value count")

    values: dict[str, Value] = {}
    lengths: dict[str, int] = {}
    for i in range(n_values):
        key = cursor.name(f"the key of key-value {i + 1} of {n_values}")
        type_id = cursor.u32(f"the type of {key}")
        if type_id == _ARRAY:
            _array(cursor, key, values, lengths)
        else:
            values[key] = _scalar(cursor, type_id, key)
    alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise GGUFError(f"general.alignment is {alignment!r}, not a power of two")
    _check_tensors(cursor, n_tensors, alignment)
    return GGUFHeader(values, lengths, n_tensors)


def _scalar(cursor: _Cursor, type_id: int, key: str) -> Scalar:
    if type_id == _STRING:
        return cursor.string(key)
    if type_id not in _SCALARS:
        raise GGUFError(f"{key} has the unknown value type {type_id}")
    layout = _SCALARS[type_id]
    value: Scalar = layout.unpack_from(cursor.data, cursor.need(layout.size, key))[0]
    return value


def _array(cursor: _Cursor, key: str, values: dict[str, Value], lengths: dict[str, int]) -> None:
    type_id, n = cursor.u32(f"the element type of {key}"), cursor.u64(f"the length of {key}")
    lengths[key] = n
    if type_id == _STRING and key.startswith("tokenizer."):
        cursor.skip_strings(n, key)
    elif type_id == _STRING:
        values[key] = tuple(cursor.string(key) for _ in range(n))
    elif type_id in _SCALARS:
        layout = _SCALARS[type_id]
        start = cursor.need(n * layout.size, key)
        if not key.startswith("tokenizer."):
            values[key] = struct.unpack_from(f"<{n}{layout.format[-1]}", cursor.data, start)
    else:
        raise GGUFError(f"{key} is an array of the unsupported element type {type_id}")


def _check_tensors(cursor: _Cursor, n_tensors: int, alignment: int) -> None:
    """Refuses a file that ends before the data its tensor table names. A type gguf does not know counts as 0 bytes."""
    last_name, last_end = "", 0
    for i in range(n_tensors):
        name = cursor.name(f"the name of tensor {i + 1} of {n_tensors}")
        n_dims = cursor.u32(f"the shape of tensor {name}")
        if n_dims > _MAX_DIMENSIONS:
            raise GGUFError(f"tensor {name} has {n_dims} dimensions, at most {_MAX_DIMENSIONS} are allowed")
        n_elements = 1
        for _ in range(n_dims):
            n_elements *= cursor.u64(f"the shape of tensor {name}")
        type_id, offset = cursor.u32(f"the type of tensor {name}"), cursor.u64(f"the offset of tensor {name}")
        end = offset + _n_bytes(type_id, n_elements)
        if end >= last_end:
            last_name, last_end = name, end
    expected = -(-cursor.at // alignment) * alignment + last_end if n_tensors else cursor.at
    if cursor.size < expected:
        raise GGUFError(f"truncated: tensor {last_name} ends at byte {expected}, the file has {cursor.size} bytes")


def _n_bytes(type_id: int, n_elements: int) -> int:
    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    except ValueError:
        return 0
    return n_elements // block * block_bytes
