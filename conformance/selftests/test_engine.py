"""The engine drives the bundled build, and refuses what it cannot drive with one clear line."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.harness.engine import (
    BuildError,
    Context,
    ContextSettings,
    DecodeError,
    Library,
    Model,
    ModelError,
    StateFlags,
    TokenBatch,
    abi,
)
from conformance.harness.engine import (
    library as library_module,
)
from fixtures import models

TEXT = np.arange(3, 43, dtype=np.int32)


@pytest.fixture(scope="module")
def bundled() -> Library:
    return Library("bundled")


@pytest.fixture(scope="module")
def dense(bundled: Library) -> Iterator[Model]:
    with Model(bundled, models.path("qwen3-mini")) as model:
        yield model


@pytest.fixture(scope="module")
def hybrid(bundled: Library) -> Iterator[Model]:
    with Model(bundled, models.path("qwen35-mini")) as model:
        yield model


def test_the_probe_recognises_each_known_layout_and_no_other() -> None:
    for struct in ("context_params", "model_params"):
        layouts = abi.known_layouts(struct)
        for layout in layouts:
            filled = layout.structure()
            for name, values in layout.defaults.items():
                setattr(filled, name, type(getattr(filled, name) or 0)(values[0]) if values[0] else values[0])
            content = bytes(filled) + b"\xa5" * 64
            written = [False] * len(content)
            for name, *_ in layout.structure._fields_:
                place = getattr(layout.structure, name)
                written[place.offset : place.offset + place.size] = [True] * place.size
            seen = abi.Probe(tuple(written), content)
            assert [each.id for each in layouts if seen.shows(each)] == [layout.id]


def test_a_tail_and_kvarn_go_into_the_fields_of_a_build_that_has_them(
    bundled: Library, dense: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    (layout,) = (each for each in abi.known_layouts("context_params") if each.has("kv_tail_tokens"))
    assert ctypes.sizeof(layout.structure) == 224
    params = layout.structure()
    with Context(dense, ContextSettings(n_ctx=256)) as context:
        monkeypatch.setattr(bundled, "context_layout", layout)
        monkeypatch.setattr(bundled, "_optional", bundled._optional | {"llama_kvarn_type_from_name"})
        monkeypatch.setitem(vars(bundled), "llama_kvarn_type_from_name", {b"kvarn_k5v4_g128": 27}.__getitem__)
        context.settings = ContextSettings(type_k="kvarn5", type_v="kvarn4", kv_tail=96)
        context._choose_cache(params)
    seen = [getattr(params, name) for name in ("kvarn_type", "kvarn_key_bits", "kvarn_value_bits", "kv_tail_tokens")]
    assert seen == [27, 5, 4, 96]


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"kv_tail": 8}, "no precision tail"), ({"type_k": "kvarn4", "type_v": "kvarn4"}, "no KVarN")],
)
def test_a_build_without_tail_or_kvarn_refuses_them_in_one_line(
    dense: Model, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        Context(dense, ContextSettings(n_ctx=256, **settings))


def test_kvarn_on_one_side_only_is_refused() -> None:
    with pytest.raises(ModelError, match="name it for both"):
        ContextSettings(type_k="kvarn4")


def test_an_unknown_layout_is_refused_with_its_bytes() -> None:
    seen = abi.Probe((True,) * 90, bytes(range(90)))
    with pytest.raises(
        BuildError,
        match=r"no known layout fits \(90 bytes written by llama_context_default_params\).*layouts.yaml.*00 01 02",
    ):
        abi.recognise("context_params", seen, Path("libllama.so"))


def test_an_unknown_cpu_is_refused() -> None:
    with pytest.raises(BuildError, match="riscv64"):
        abi.refuse_unknown_cpu("riscv64")


def test_a_layout_that_puts_values_into_the_wrong_fields_fails_its_read_back(
    bundled: Library, dense: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = bundled.context_layout
    fields = list(right.structure._fields_)
    place = [name for name, *_ in fields].index("n_ubatch")
    fields[place], fields[place + 1] = fields[place + 1], fields[place]
    wrong = type("swapped", (ctypes.Structure,), {"_fields_": fields})
    monkeypatch.setattr(bundled, "context_layout", abi.Layout("swapped", wrong, {}))
    call = bundled._handle.llama_init_from_model
    monkeypatch.setattr(call, "argtypes", [ctypes.c_void_p, wrong])
    with pytest.raises(BuildError, match="swapped failed its read-back"):
        Context(dense, ContextSettings(n_ubatch=64))


def test_every_setting_that_can_be_read_back_arrives(hybrid: Model) -> None:
    settings = ContextSettings(n_ctx=768, n_batch=256, n_ubatch=96, n_seq_max=3, n_rs_seq=2, kv_unified=True)
    with Context(hybrid, settings) as context:
        assert (context.n_ctx, context.n_batch, context.n_rs_seq) == (768, 256, 2)


@pytest.mark.parametrize(("cache_type", "bits"), [("f16", 16), ("f32", 32), ("q8_0", 8.5), ("q4_0", 4.5)])
def test_the_cache_type_that_was_asked_for_is_in_the_saved_state(dense: Model, cache_type: str, bits: float) -> None:
    def saved_bytes(n_tokens: int) -> int:
        with Context(dense, ContextSettings(type_k=cache_type, type_v="f16")) as context:
            context.decode(TEXT[:n_tokens])
            return len(context.save())

    values = dense.n_layer * 2 * 64
    least, most = 12, 24  # a cell: position, count, one sequence id, and what some formats add
    per_token = saved_bytes(30) - saved_bytes(29)
    assert per_token - values * (bits + 16) / 8 in range(least, most + 1)


def test_outputs_are_the_rows_that_were_asked_for(dense: Model) -> None:
    with Context(dense) as context:
        every = context.decode(TEXT, outputs="all")
    with Context(dense) as context:
        last = context.decode(TEXT, outputs="last")
    with Context(dense) as context:
        assert context.decode(TEXT, outputs="none").shape == (0, dense.n_vocab)
    assert every.shape == (len(TEXT), dense.n_vocab)
    assert last.shape == (1, dense.n_vocab)
    np.testing.assert_allclose(last[0], every[-1], rtol=1e-4, atol=1e-5)


def test_a_text_longer_than_a_batch_is_decoded_in_several_calls(dense: Model) -> None:
    with Context(dense, ContextSettings(n_batch=16, n_ubatch=16)) as context:
        logits = context.decode(TEXT, outputs="all")
        assert logits.shape == (len(TEXT), dense.n_vocab)
        assert context.pos_max() == len(TEXT) - 1


def test_embeddings_take_positions_of_four_components(hybrid: Model) -> None:
    n = 6
    assert hybrid.positions_per_embedding == 4
    embeddings = np.random.default_rng(0).standard_normal((n, hybrid.n_embd)).astype(np.float32)
    positions = np.zeros((4, n), np.int32)
    positions[1], positions[2] = np.divmod(np.arange(n), 3)
    swapped = positions[[0, 2, 1, 3]]
    rows = []
    for each in (positions, positions, swapped):
        with Context(hybrid) as context:
            rows.append(context.decode_embeddings(embeddings, each))
            assert context.pos_max() == 0
    assert np.array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])


def test_a_batch_can_hold_several_sequences(dense: Model) -> None:
    n = 5
    settings = ContextSettings(n_seq_max=2, kv_unified=True)
    with Context(dense, settings) as context:
        batch = TokenBatch(
            tokens=np.tile(TEXT[:n], 2),
            positions=np.tile(np.arange(n, dtype=np.int32), 2),
            outputs=np.array([0, 0, 0, 0, 1] * 2, np.int8),
            sequences=[[0]] * n + [[1]] * n,
        )
        assert context.process(batch) == 0
        both = context.logits(2)
        assert (context.pos_max(0), context.pos_max(1)) == (n - 1, n - 1)
        np.testing.assert_allclose(both[0], both[1], atol=1e-4)


def test_a_coupled_token_is_in_both_sequences(dense: Model) -> None:
    with Context(dense, ContextSettings(n_seq_max=2, kv_unified=True)) as context:
        batch = TokenBatch(TEXT[:4], np.arange(4, dtype=np.int32), np.zeros(4, np.int8), [[0, 1]] * 4)
        assert context.process(batch) == 0
        assert (context.pos_max(0), context.pos_max(1)) == (3, 3)


def test_a_full_cache_raises_the_code_of_the_build(dense: Model) -> None:
    with Context(dense, ContextSettings(n_ctx=256)) as context:
        context.decode(np.resize(TEXT, 256))
        with pytest.raises(DecodeError) as caught:
            context.decode(TEXT[:1])
    assert caught.value.code == 1


def test_an_abort_callback_stops_a_decode(dense: Model) -> None:
    with Context(dense) as context:
        context.on_abort(lambda: True)
        with pytest.raises(DecodeError) as caught:
            context.decode(TEXT)
        assert caught.value.code == 2
        context.on_abort(None)
        context.clear()
        context.decode(TEXT)


def test_sequence_memory_is_reached(dense: Model) -> None:
    with Context(dense, ContextSettings(n_seq_max=2, kv_unified=True)) as context:
        context.decode(TEXT)
        context.seq_cp(0, 1)
        assert context.seq_rm(0, 30)
        assert (context.pos_max(0), context.pos_max(1)) == (29, 39)
        assert context.can_shift
        context.seq_rm(0, 0, 5)
        context.seq_add(0, 5, -1, -5)
        assert (context.pos_min(0), context.pos_max(0)) == (0, 24)
        context.seq_div(0, 0, -1, 2)
        assert context.pos_max(0) == 12
        context.seq_keep(1)
        assert (context.pos_max(0), context.pos_max(1)) == (-1, 39)
        context.clear()
        assert context.pos_min(1) == -1


def test_states_travel_through_memory_and_files(hybrid: Model, tmp_path: Path) -> None:
    more = TEXT[:3]
    with Context(hybrid) as context:
        context.decode(TEXT)
        one, whole = context.save(), context.save_context()
        partial = context.save(flags=StateFlags.PARTIAL_ONLY)
        assert len(partial) < len(one) == context.announced_bytes()
        assert context.save_file(tmp_path / "one", TEXT) > len(one)
        assert context.save_context_file(tmp_path / "whole", TEXT)
        expected = context.decode(more)
    for load in ("memory", "context", "file", "context file"):
        with Context(hybrid) as context:
            if load == "memory":
                assert context.load(one) == len(one)
            elif load == "context":
                assert context.load_context(whole) == len(whole)
            else:
                read = context.load_file if load == "file" else context.load_context_file
                consumed, tokens = read(tmp_path / ("one" if load == "file" else "whole"))
                assert consumed
                assert tokens.tolist() == TEXT.tolist()
            assert np.array_equal(context.decode(more), expected), load


def test_a_refused_state_says_zero(hybrid: Model) -> None:
    with Context(hybrid) as context:
        context.decode(TEXT)
        blob = context.save()
    with Context(hybrid) as context:
        assert context.load(blob[: len(blob) // 2]) == 0


def test_counters_and_log_come_from_the_build(bundled: Library, dense: Model) -> None:
    with Context(dense) as context:
        context.decode(TEXT)
        counts = context.perf_counts()
        assert counts["n_p_eval"] == len(TEXT)
        assert counts["p_eval_ms"] > 0
        context.reset_perf_counts()
        assert context.perf_counts()["n_p_eval"] < len(TEXT)
    assert bundled.log
    assert bundled.seconds > 0


def test_text_and_markers_survive_the_vocabulary(dense: Model) -> None:
    tokens = dense.tokenize("<|im_start|>grüße 🦙<|vision_start|>")
    assert len(tokens) == 2 + len("grüße 🦙".encode())
    assert b"".join(dense.piece(int(token)) for token in tokens).decode() == "<|im_start|>grüße 🦙<|vision_start|>"


def test_a_model_that_is_none_is_refused_in_one_line(bundled: Library, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(models.path("qwen3-mini").read_bytes()[:200_000])
    for path, what in ((broken, "refused to load"), (tmp_path / "nothing.gguf", "no such file")):
        with pytest.raises(ModelError, match=what) as caught:
            Model(bundled, path)
        assert "\n" not in str(caught.value)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ModelError, match=r"q7_0.*choose from"):
        ContextSettings(type_k="q7_0")


compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to make a foreign library with")


def _compiled(folder: Path, source: str) -> Path:
    (folder / "source.c").write_text(source)
    library = folder / "libllama.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "source.c"], check=True)
    return library


def _stand_in(params: str) -> str:
    """C source of a library with every function the suite needs, whose context params are as given."""
    names = {*library_module._REQUIRED, "llama_perf_context", "llama_model_default_params"}
    functions = "\n".join(f"void {name}(void) {{}}" for name in sorted(names))
    return f"{functions}\nstruct p {{ {params} }};\nstruct p llama_context_default_params(void) {{ struct p p = {{0}}; return p; }}"


@compiler
def test_a_library_without_the_functions_is_refused(tmp_path: Path) -> None:
    _compiled(tmp_path, "int x;")
    with pytest.raises(BuildError, match=r"lacks \d+ function\(s\).*llama_backend_init"):
        Library(str(tmp_path))


@compiler
def test_a_library_whose_structs_are_unknown_is_refused(tmp_path: Path) -> None:
    _compiled(tmp_path, _stand_in("int n[40]; double d[8];"))
    with pytest.raises(BuildError, match="llama_context_params: no known layout fits"):
        Library(str(tmp_path))


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "libllama.so").write_text("no library")
    with pytest.raises(BuildError, match="cannot load it"):
        Library(str(tmp_path))
    with pytest.raises(BuildError, match=re.escape("no such folder")):
        Library(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(BuildError, match="no libllama in"):
        Library(str(tmp_path / "empty"))
