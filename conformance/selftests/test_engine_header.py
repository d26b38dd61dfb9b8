"""Where no known layout fits, the header beside the library does, if it is the right one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.harness.engine import BuildError, Context, Library, Model, abi, find_library
from conformance.harness.engine import library as library_module
from conformance.harness.engine.header import fields_of, find_header
from fixtures import models

STRUCTS = ("context_params", "model_params", "mtmd_context_params")
_C = {
    ctypes.c_uint32: "uint32_t",
    ctypes.c_int32: "int32_t",
    ctypes.c_float: "float",
    ctypes.c_void_p: "void *",
    ctypes.c_size_t: "size_t",
    ctypes.c_bool: "bool",
}
NOVEL = "    uint64_t n_novel; // in no known build\n"


def declaration(struct: str, layout: abi.Layout, novel: str = "") -> str:
    """The struct as a header declares it; what is novel comes behind n_seq_max."""
    lines = [f"    {_C[kind]} {name};\n" for name, kind in fields(layout)]
    place = next((i for i, line in enumerate(lines) if " n_seq_max;" in line), 0) + 1
    return f"struct {abi.c_name(struct)} {{\n{''.join(lines[:place])}{novel}{''.join(lines[place:])}}};\n"


def fields(layout: abi.Layout) -> list[tuple[str, Any]]:
    return [(name, kind) for name, kind, *_ in layout.structure._fields_]


def same(a: abi.Layout, b: abi.Layout) -> bool:
    return fields(a) == fields(b)


@pytest.mark.parametrize("struct", STRUCTS)
def test_every_known_row_is_read_back_from_its_own_declaration(struct: str, tmp_path: Path) -> None:
    header = tmp_path / "llama.h"
    for row in abi.known_layouts(struct):
        header.write_text(declaration(struct, row))
        read = fields_of(header, abi.c_name(struct))
        assert read is not None
        assert [(name, abi._C_TYPES[kind]) for name, kind in read] == fields(row)


def test_a_struct_is_read_through_comments_directives_and_callbacks(tmp_path: Path) -> None:
    header = tmp_path / "llama.h"
    header.write_text(
        """
        struct llama_other { int x; };
        struct llama_context_params; /* struct llama_context_params { int no; }; */
        #define FIELD int y;
        struct llama_context_params { // a comment; with a semicolon
            uint32_t n_ctx;  /* int hidden; */
        #ifdef SOMETHING
            enum ggml_type   type_k; // [EXPERIMENTAL]
        #endif
            const struct llama_model_kv_override * kv;
            const char*name;
            bool (*call)(int a, void * b);
            ggml_backend_sched_eval_callback cb_eval;
            ggml_backend_dev_t * devices;
            double  d;
        };
        struct llama_late { int z; };
        """
    )
    assert fields_of(header, "llama_context_params") == [
        ("n_ctx", "u32"),
        ("type_k", "i32"),
        ("kv", "ptr"),
        ("name", "ptr"),
        ("call", "ptr"),
        ("cb_eval", "ptr"),
        ("devices", "ptr"),
        ("d", "f64"),
    ]
    assert fields_of(header, "llama_model_params") is None


@pytest.mark.parametrize("line", ["int a[4];", "int a, b;", "struct inner i;", "some_t x;", "unsigned flag : 1;"])
def test_a_declaration_of_another_kind_is_refused(line: str, tmp_path: Path) -> None:
    header = tmp_path / "llama.h"
    header.write_text(f"struct llama_context_params {{ int n; {line} }};")
    with pytest.raises(
        BuildError, match=r"is of a kind that is not understood here; add a row to .*layouts.yaml"
    ) as caught:
        fields_of(header, "llama_context_params")
    assert repr(line.removesuffix(";")) in str(caught.value)


def test_the_real_header_declares_what_the_probe_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    library = find_library("bundled")
    if find_header(library, "llama.h") is None:
        pytest.skip("llama-cpp-python came without headers")
    known = Library("bundled")
    with monkeypatch.context() as patched:
        patched.setattr(abi, "known_layouts", lambda struct: ())
        read = Library("bundled")
        assert same(read.context_layout, known.context_layout)
        assert same(read.model_layout, known.model_layout)
        assert read.context_layout.id == read.model_layout.id == "llama.h"
        vision = read.vision_layout()
        assert vision is not None
        assert vision.id == "mtmd.h"
        with Model(read, models.path("qwen3-mini")) as model, Context(model) as context:
            assert np.isfinite(context.decode(np.arange(3, 9, dtype=np.int32))).all()
    known_vision = known.vision_layout()
    assert known_vision is not None
    assert same(vision, known_vision)


def newest_row(struct: str) -> abi.Layout:
    """The row of upstream's newest known build."""
    return next(row for row in abi.known_layouts(struct) if row.id in ("c168", "m80"))


def compiled(folder: Path, *structs: str) -> None:
    """A library that has every function the suite needs and these structs, each with its usual defaults."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to make a library with")
    layouts = {struct: newest_row(struct) for struct in ("context_params", "model_params")}
    functions = {f"llama_{struct.removesuffix('_params')}_default_params": struct for struct in layouts}
    stubs = [f"void {name}(void) {{}}" for name in {*library_module._REQUIRED, "llama_perf_context"} - set(functions)]
    source = ["#include <stdbool.h>", "#include <stddef.h>", "#include <stdint.h>", *structs, *stubs]
    for function, struct in functions.items():
        name = abi.c_name(struct)
        values = {field: accepted[0] for field, accepted in layouts[struct].defaults.items() if accepted[0]}
        given = ", ".join(f".{field} = {value}" for field, value in values.items())
        source.append(f"struct {name} {function}(void) {{ struct {name} p = {{ {given} }}; return p; }}")
    (folder / "source.c").write_text("\n".join(source))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libllama.so", folder / "source.c"], check=True)


def newest(struct: str, novel: str = "") -> str:
    return declaration(struct, newest_row(struct), novel)


def test_a_field_in_no_known_build_is_found_through_the_header(tmp_path: Path) -> None:
    structs = newest("context_params", NOVEL), newest("model_params")
    compiled(tmp_path, *structs)
    with pytest.raises(BuildError) as caught:
        Library(str(tmp_path))
    said = str(caught.value)
    assert "llama_context_params: no known layout fits (176 bytes written by llama_context_default_params)" in said
    assert "row c160-per-seq of layouts.yaml fits up to n_threads (byte 28)" in said
    assert (
        "put the build's own header beside the library, or add a row that fits these bytes (docs/builds.md says how)"
        in said
    )
    assert said.rpartition(": ")[2].startswith("00 02 00 00 00 08 00 00 00 02 00 00 01 00 00 00 00 ")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "llama.h").write_text("\n".join(structs))
    layout = Library(str(tmp_path)).context_layout
    assert layout.id == "llama.h"
    assert (layout.structure.n_novel.offset, layout.structure.n_rs_seq.offset) == (16, 24)


def test_the_header_of_another_build_is_refused(tmp_path: Path) -> None:
    compiled(tmp_path, newest("context_params", NOVEL), newest("model_params"))
    header = tmp_path / "llama.h"
    for text, problem in (
        (
            newest("context_params"),
            r"writes 176 bytes that part from the header's 168 at .*put the header of this very build",
        ),
        (
            newest("context_params", NOVEL + NOVEL.replace("novel", "more")),
            "writes 176 bytes that part from the header's 184",
        ),
        (newest("model_params"), "does not define llama_context_params"),
        (newest("context_params", NOVEL).replace("n_ubatch", "n_micro"), "has no n_ubatch, which the suite sets"),
    ):
        header.write_text(text)
        with pytest.raises(BuildError, match=problem) as caught:
            Library(str(tmp_path))
        assert "\n" not in str(caught.value)
