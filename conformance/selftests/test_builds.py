"""A build reference means one thing everywhere, is fetched once and whole, and is refused in one line."""

from __future__ import annotations

import fcntl
import http.server
import io
import json
import os
import shutil
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from conformance.harness import builds
from conformance.harness.builds import description, registries, store
from conformance.harness.engine import BuildError, Context, ContextSettings, EngineError, Library, digest_of
from conformance.harness.engine.child import Child, Crashed
from conformance.harness.engine.origin import Origin, origin_of
from fixtures import models
from tools import builds as tool

NPM = "@node-llama-cpp/linux-x64"


def write_wheel(folder: Path, version: str) -> None:
    """A wheel of xllamacpp that holds a library which is none."""
    record = f"xllamacpp-{version}.dist-info"
    with zipfile.ZipFile(folder / f"xllamacpp-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("xllamacpp/xllamacpp.abi3.so", f"library of {version}")
        wheel.writestr(f"{record}/METADATA", f"Metadata-Version: 2.1\nName: xllamacpp\nVersion: {version}\n")
        wheel.writestr(f"{record}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{record}/RECORD", "")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLAMA_CONFORMANCE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for all there is."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version in ("2026.4.8929", "2026.7.9873", "2026.7.10068", "2026.8.10229"):
        write_wheel(folder, version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def npm_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """A registry on this machine; tarballs by version."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    tarballs: dict[str, bytes] = {}

    class Registry(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith(".tgz"):
                answer = tarballs[self.path.rpartition("/")[2].removesuffix(".tgz")]
            else:
                base = f"http://127.0.0.1:{self.server.server_port}"  # type: ignore[attr-defined]
                listed = {
                    version: {"name": NPM, "version": version, "dist": {"tarball": f"{base}/{version}.tgz"}}
                    for version in tarballs
                }
                answer = json.dumps({"name": NPM, "versions": listed, "dist-tags": {"latest": max(tarballs)}}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{server.server_port}/")
        yield tarballs
        server.shutdown()


def npm_tarball(version: str) -> bytes:
    content = {
        "package/package.json": json.dumps({"name": NPM, "version": version}),
        "package/bins/linux-x64/libllama.so": "library",
        "package/bins/linux-x64/_nlcBuildMetadata.json": '{"buildOptions": {"llamaCpp": {"release": "v0.4.0"}}}',
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tarball:
        for name, text in content.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tarball.addfile(entry, io.BytesIO(text.encode()))
    return packed.getvalue()


@given(source=st.sampled_from(builds.SOURCES), numbers=st.tuples(*[st.integers(0, 99999)] * 3))
def test_a_reference_is_its_own_text(source: builds.Source, numbers: tuple[int, int, int]) -> None:
    build = builds.Published(source, ".".join(map(str, numbers)))
    assert builds.parse(str(build)) == build


def test_a_package_is_named_as_its_registry_names_it() -> None:
    assert str(builds.parse("pypi:Llama_CPP.Python==0.3.036")) == "pypi:llama-cpp-python==0.3.36"
    assert builds.parse("bundled") is None
    assert builds.parse("some/folder") is None


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("pypi:xllamacpp", "names no version; write pypi:xllamacpp==VERSION"),
        ("pypi:xllamacpp==", "names no version"),
        ("pypi:xllamacpp@2026.7.10068", "names no version; write pypi:xllamacpp==VERSION"),
        (f"npm:{NPM}", f"names no version; write npm:{NPM}@VERSION"),
        (f"npm:{NPM}==3.19.1", "names no version"),
        (f"npm:{NPM}@latest", "'latest' is no version; write one such as 3.22.1"),
        ("pypi:xllamacpp==newest", "'newest' is no version; write one such as 2026.10.11549"),
        ("pypi:torch==2.0", "'pypi:torch': builds are not taken from there; choose from pypi:llama-cpp-python, "),
        ("npm:xllamacpp@1.0.0", "builds are not taken from there"),
        ("pypi:", "builds are not taken from there"),
    ],
)
def test_a_reference_that_means_nothing_is_refused(reference: str, problem: str) -> None:
    with pytest.raises(BuildError) as caught:
        builds.resolve(reference)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wheel_is_fetched_once_and_then_needs_no_index(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    library = builds.resolve("pypi:xllamacpp==2026.7.10068")
    assert library.read_text() == "library of 2026.7.10068"
    assert library.is_relative_to(cache)
    assert capfd.readouterr().err == "fetching pypi:xllamacpp==2026.7.10068 ...\n"
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert builds.resolve("pypi:xllamacpp==2026.07.10068") == library
    assert capfd.readouterr().err == ""
    (receipt,) = builds.kept()
    assert receipt.reference == "pypi:xllamacpp==2026.7.10068"
    archive = index / receipt.archive
    assert subprocess.check_output(["sha256sum", archive], text=True).split()[0] == receipt.sha256
    assert origin_of(library) == Origin("xllamacpp", "2026.7.10068", 10068, "b10068")


def test_a_version_that_does_not_exist_names_the_nearest(index: Path) -> None:
    with pytest.raises(BuildError, match=r"no version 2026\.7\.9900") as caught:
        builds.resolve("pypi:xllamacpp==2026.7.9900")
    assert str(caught.value).endswith("the nearest are 2026.4.8929, 2026.7.9873, 2026.7.10068, 2026.8.10229")


def test_versions_are_listed_oldest_first(index: Path) -> None:
    assert builds.published_versions(builds.parse_source("pypi:xllamacpp")) == (
        "2026.4.8929",
        "2026.7.9873",
        "2026.7.10068",
        "2026.8.10229",
    )


def test_without_a_network_the_connection_is_named(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/")
    references = ["pypi:xllamacpp==2026.7.10068", *([f"npm:{NPM}@3.19.1"] if shutil.which("npm") else [])]
    for reference in references:
        with pytest.raises(BuildError, match="its registry cannot be reached; check the connection"):
            builds.resolve(reference)
    with pytest.raises(BuildError, match="cannot be reached"):
        builds.published_versions(builds.parse_source("pypi:xllamacpp"))
    assert {path.name for path in cache.glob("builds/*/*")} == {".lock"}


def test_a_tarball_of_npm_is_fetched_and_listed(npm_registry: dict[str, bytes]) -> None:
    npm_registry.update({version: npm_tarball(version) for version in ("3.18.1", "3.19.1")})
    library = builds.resolve(f"npm:{NPM}@3.19.1")
    assert origin_of(library) == Origin(NPM, "3.19.1", None, "v0.4.0")
    npm_registry.pop("3.19.1")
    assert builds.resolve(f"npm:{NPM}@3.19.1") == library
    with pytest.raises(BuildError, match=r"has no version 3.19.7 .*the nearest are 3.18.1$"):
        builds.resolve(f"npm:{NPM}@3.19.7")


def test_a_missing_npm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match="npm is not installed"):
        builds.resolve(f"npm:{NPM}@3.19.1")


def test_a_fetch_that_ends_early_leaves_nothing(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = cache / "builds" / "pypi-xllamacpp" / ".partial-0badc0de"
    left.mkdir(parents=True)  # by a process that was killed
    (left / "half").touch()

    def interrupted(archive: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store, "_unpack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            builds.resolve("pypi:xllamacpp==2026.7.10068")
    assert [path.name for path in left.parent.iterdir()] == [".lock"]
    assert builds.kept() == ()
    assert builds.resolve("pypi:xllamacpp==2026.7.10068").is_file()


def test_a_build_whose_files_have_changed_is_refused(index: Path, cache: Path) -> None:
    reference = "pypi:xllamacpp==2026.7.10068"
    library = builds.resolve(reference)
    store.refuse_changed(reference, digest_of(library))
    library.write_text("other bytes")
    with pytest.raises(BuildError, match=r"its files in .* have changed since it was fetched; delete that folder"):
        store.refuse_changed(reference, digest_of(library))
    store.refuse_changed("bundled", "anything")
    (receipt,) = cache.glob("builds/*/*/receipt.json")
    receipt.write_text('{"reference": "half')
    for ask in (builds.kept, lambda: store.refuse_changed(reference, digest_of(library))):
        with pytest.raises(BuildError, match=r"receipt\.json: cannot be read; delete that folder"):
            ask()


BACKEND = """
import zipfile
def build_wheel(folder, settings=None, metadata=None):
    print("[7/99] Building CXX object", flush=True)
    {act}
    with zipfile.ZipFile(folder + "/llama_cpp_python-0.3.35-py3-none-any.whl", "w") as wheel:
        record = "llama_cpp_python-0.3.35.dist-info/"
        wheel.writestr("llama_cpp/lib/libllama.so", "library")
        wheel.writestr(record + "METADATA", "Metadata-Version: 2.1\\nName: llama-cpp-python\\nVersion: 0.3.35\\n")
        wheel.writestr(record + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(record + "RECORD", "")
    return "llama_cpp_python-0.3.35-py3-none-any.whl"
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "llama-cpp-python"
version = "0.3.35"
"""


def write_source(folder: Path, act: str) -> None:
    """A source archive that pip builds without compiling anything."""
    content = {"PKG-INFO": "Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 0.3.35\n"}
    content |= {"pyproject.toml": PROJECT, "backend.py": BACKEND.format(act=act)}
    with tarfile.open(folder / "llama_cpp_python-0.3.35.tar.gz", "w:gz") as archive:
        for name, text in content.items():
            entry = tarfile.TarInfo(f"llama_cpp_python-0.3.35/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


def test_a_source_is_compiled_and_says_how_far_it_is(
    index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    go = tmp_path / "go"
    write_source(
        index, f"import pathlib, time\n    for _ in range(2000): pathlib.Path({str(go)!r}).exists() or time.sleep(0.01)"
    )
    build = builds.parse("pypi:llama-cpp-python==0.3.35")
    assert build
    said: list[str] = []

    def tell(how_far: str) -> None:
        said.append(how_far)
        if how_far.startswith("compiled 7 of 99 files, "):
            go.touch()  # the build ends when its progress was seen

    (tmp_path / "client").mkdir()
    assert registries.obtain(build, tmp_path / "client", tell).name == "llama_cpp_python-0.3.35-py3-none-any.whl"
    assert go.exists()
    assert builds.resolve(str(build)).read_text() == "library"
    assert "pip compiles it: 10 to 15 minutes on two cores" in capfd.readouterr().err


def test_a_compiler_ends_with_the_fetch_that_started_it(index: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    act = f"import os, pathlib, signal; pathlib.Path({str(started)!r}).write_text(str(os.getpid())); signal.pause()"
    write_source(index, act)
    build = builds.parse("pypi:llama-cpp-python==0.3.35")
    assert build
    (tmp_path / "client").mkdir()

    def tell(how_far: str) -> None:
        if started.exists() and started.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        registries.obtain(build, tmp_path / "client", tell)
    compiler = int(started.read_text())
    with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        psutil.Process(compiler).wait(30)
    assert not psutil.pid_exists(compiler) or psutil.Process(compiler).status() == psutil.STATUS_ZOMBIE


def test_a_source_that_does_not_compile_is_refused_in_one_line(index: Path) -> None:
    write_source(index, "raise SystemExit('no compiler')")
    with pytest.raises(BuildError, match=r"pip could not compile it; it needs a C and a C\+\+ compiler") as caught:
        builds.resolve("pypi:llama-cpp-python==0.3.35")
    assert "\n" not in str(caught.value)


def test_an_archive_without_a_library_is_not_kept(index: Path, cache: Path) -> None:
    with zipfile.ZipFile(index / "xllamacpp-2026.9.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("xllamacpp/__init__.py", "")
        record = "xllamacpp-2026.9.1.dist-info"
        wheel.writestr(f"{record}/METADATA", "Metadata-Version: 2.1\nName: xllamacpp\nVersion: 2026.9.1\n")
        wheel.writestr(f"{record}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{record}/RECORD", "")
    with pytest.raises(BuildError, match="no libllama in"):
        builds.resolve("pypi:xllamacpp==2026.9.1")
    assert builds.kept() == ()


def test_two_processes_fetch_one_after_the_other(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def locked(build: builds.Published, folder: Path, tell: registries.Tell) -> Path:
        with (cache / "builds" / "pypi-xllamacpp" / ".lock").open("w") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fetched.append(build)
        return registries.obtain(build, folder, tell)

    monkeypatch.setattr(store, "obtain", locked)
    build = builds.parse("pypi:xllamacpp==2026.7.10068")
    assert build
    place = store.place_of(build)
    builds.fetch(build)
    shutil.copytree(place, cache / "other")
    shutil.rmtree(place)

    def taken(lock: object, how: int) -> None:
        if how & fcntl.LOCK_NB:
            raise BlockingIOError
        os.rename(cache / "other", place)  # the other process ends

    monkeypatch.setattr(fcntl, "flock", taken)
    builds.fetch(build)
    assert fetched == [build]


def test_a_cache_that_cannot_be_written_is_named(index: Path, cache: Path) -> None:
    cache.write_text("no folder")
    with pytest.raises(BuildError, match=r"Not a directory; make room there, or set LLAMA_CONFORMANCE_CACHE"):
        builds.resolve("pypi:xllamacpp==2026.7.10068")


@pytest.mark.parametrize(
    ("name", "number"),
    [("libllama.b10068.so", 10068), ("libllama.so.0.0.9872", 9872), ("libllama.so", None), ("libllama.so.0.5.0", None)],
)
def test_a_library_may_carry_its_build_number_in_its_name(tmp_path: Path, name: str, number: int | None) -> None:
    assert origin_of(tmp_path / name) == Origin(None, None, number, f"b{number}" if number else None)


@pytest.mark.parametrize(
    ("package", "version", "number"),
    [
        ("xllamacpp", "2026.7.10068", 10068),
        ("xllamacpp", "2026.4.8672.1", 8672),
        ("xllamacpp", "0.2.14", None),
        ("llama_cpp_py_sync", "0.10330.2", 10330),
        ("llama_cpp", "0.3.36", None),
    ],
)
def test_a_package_may_carry_its_build_number_in_its_version(
    tmp_path: Path, package: str, version: str, number: int | None
) -> None:
    name = {"llama_cpp": "llama-cpp-python"}.get(package, package)
    record = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    found = origin_of(tmp_path / package / "lib" / "libllama.so")
    assert (found.package, found.version) == (name.replace("_", "-"), version)
    assert found.build_number == number


def compiled(folder: Path, source: str, *options: str) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to make a library with")
    (folder / "source.c").write_text(source)
    library = folder / "libllama.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "source.c", *options], check=True)
    return library


def test_a_library_of_another_machine_is_refused(tmp_path: Path) -> None:
    library = compiled(tmp_path, "int x;")
    content = bytearray(library.read_bytes())
    content[18:20] = (183).to_bytes(2, "little")
    library.write_bytes(content)
    with pytest.raises(BuildError, match="is built for AArch64, this machine is x86-64; name a build for x86-64"):
        Library(str(tmp_path))


def test_a_library_for_a_newer_system_is_refused(tmp_path: Path) -> None:
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "versions").write_text("GLIBC_9.99 { global: from_the_future; };")
    libm = compiled(
        newer, "int from_the_future(void) { return 1; }", f"-Wl,--version-script={newer / 'versions'},-soname,libm.so.6"
    )
    compiled(tmp_path, "int from_the_future(void); int f(void) { return from_the_future(); }", str(libm))
    with pytest.raises(BuildError, match=r"needs glibc 9\.99, this system has \d+\.\d+; run it on a newer system"):
        Library(str(tmp_path))


@pytest.mark.parametrize(("body", "how"), [("__builtin_trap();", "SIGILL"), ("abort();", "SIGABRT")])
def test_a_library_that_ends_the_process_on_load_is_a_crash_with_its_signal(
    tmp_path: Path, body: str, how: str
) -> None:
    compiled(tmp_path, f"#include <stdlib.h>\n__attribute__((constructor)) static void on_load(void) {{ {body} }}")
    with Child() as child, pytest.raises(Crashed, match=how):
        child.call(builds.identify, str(tmp_path), timeout=60)


def command(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(tool.app, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_the_tool_lists_what_is_published_and_what_is_kept(index: Path, cache: Path) -> None:
    assert command("fetch", "pypi:xllamacpp==2026.7.10068")[1].startswith(str(cache))
    code, out, _ = command("list", "pypi:xllamacpp")
    assert code == 0
    assert out.splitlines()[1] == "    2026.8.10229, 2026.7.10068*, 2026.7.9873, 2026.4.8929"
    rows = json.loads(command("list", "pypi:xllamacpp", "--json")[1])
    assert rows[1] == {"build": "pypi:xllamacpp==2026.7.10068", "kept": True}
    assert [row["kept"] for row in rows] == [False, True, False, False]
    assert json.loads(command("list", "--kept", "--json")[1]) == [rows[1]]


def test_the_tool_describes_the_bundled_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CONFORMANCE_CACHE")
    code, out, _ = command("describe", "--json")
    (found,) = json.loads(out)
    assert (code, found["runs"], found["reason"]) == (0, "DECODES", "")
    assert found["identity"]["package"] == "llama-cpp-python"
    assert found["identity"]["vision_layout"]
    assert found["state_format"].startswith("F")


def test_a_build_that_dies_or_refuses_is_described_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CONFORMANCE_CACHE")
    compiled(tmp_path, "__attribute__((constructor)) static void on_load(void) { __builtin_trap(); }")
    code, out, _ = command("describe", str(tmp_path), "--json")
    (found,) = json.loads(out)
    assert (code, found["runs"], found["identity"]) == (1, "CRASH", None)
    assert found["reason"] == "on load: was killed (SIGILL)"
    code, out, err = command("describe", str(tmp_path), "/nowhere")
    assert code == 2
    assert "CRASH on load: was killed" in out
    assert err.startswith("build '/nowhere': no such folder")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    refused = builds.describe("bundled", broken)
    assert refused.runs == "REFUSED"
    assert "refused to load" in refused.reason
    assert refused.identity


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("describe", "/nowhere"), "no such folder"),
        (("describe", "--model", "nothing"), "nothing"),
        (("fetch", "pypi:xllamacpp==1.0"), "has no version 1.0 for this machine; the nearest are 2026.4.8929"),
        (("list", "pypi:torch"), "builds are not taken from there"),
    ],
)
def test_the_tool_refuses_in_one_line(index: Path, arguments: tuple[str, ...], problem: str) -> None:
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert problem in err.splitlines()[-1]


def test_logits_that_tell_nothing_and_keys_of_another_type_are_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CONFORMANCE_CACHE")
    path, usual = models.path("qwen3-mini"), Context.decode
    with monkeypatch.context() as patched:
        patched.setattr(Context, "decode", lambda *a, **k: np.zeros_like(usual(*a, **k)))
        with pytest.raises(EngineError, match="not finite, or the same for every token"):
            description.decode("bundled", path)
    monkeypatch.setattr(
        description, "ContextSettings", lambda n_ctx, type_k: ContextSettings(n_ctx=n_ctx, type_k="f16")
    )
    with pytest.raises(EngineError, match="asked for f32 keys, the saved state holds f16"):
        description.decode("bundled", path)
