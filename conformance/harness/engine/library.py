"""One llama.cpp build: where its library is, which functions it has, how its structs are laid out."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import abi
from .errors import BuildError
from .origin import origin_of

BUNDLED = "bundled"
_NAMES = ("libllama.so", "libllama.so.*", "libllama.*.so", "libllama.dylib", "xllamacpp*.so")
_ELF_X86_64 = 62
_ELF_MACHINES = {3: "x86 (32 bits)", 21: "PowerPC64", 22: "S390", 40: "Arm (32 bits)", 183: "AArch64", 243: "RISC-V"}
_PLACES = ("", "lib", "bin", "build/bin", "build/lib", "lib64")

_p, _i, _u, _b, _z = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_bool, ctypes.c_size_t
_u64, _s = ctypes.c_uint64, ctypes.c_char_p


class Batch(ctypes.Structure):
    """`llama_batch`, the same in every build so far."""

    _fields_ = (
        ("n_tokens", _i),
        ("token", _p),
        ("embd", _p),
        ("pos", _p),
        ("n_seq_id", _p),
        ("seq_id", _p),
        ("logits", _p),
    )


LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
AbortCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
ProgressCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)
EvalCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)

# name -> (result type, argument types). `None` as an argument type stands for a struct chosen by the probe.
_REQUIRED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (LogCallback, _p)),
    "llama_model_load_from_file": (_p, (_s, None)),
    "llama_model_free": (None, (_p,)),
    "llama_model_get_vocab": (_p, (_p,)),
    "llama_model_n_ctx_train": (_i, (_p,)),
    "llama_model_n_embd": (_i, (_p,)),
    "llama_model_n_layer": (_i, (_p,)),
    "llama_model_n_head_kv": (_i, (_p,)),
    "llama_model_n_swa": (_i, (_p,)),
    "llama_model_rope_type": (_i, (_p,)),
    "llama_model_size": (_u64, (_p,)),
    "llama_model_n_params": (_u64, (_p,)),
    "llama_model_is_recurrent": (_b, (_p,)),
    "llama_model_is_hybrid": (_b, (_p,)),
    "llama_model_desc": (_i, (_p, _p, _z)),
    "llama_model_meta_val_str": (_i, (_p, _s, _p, _z)),
    "llama_vocab_n_tokens": (_i, (_p,)),
    "llama_tokenize": (_i, (_p, _p, _i, _p, _i, _b, _b)),
    "llama_token_to_piece": (_i, (_p, _i, _p, _i, _i, _b)),
    "llama_init_from_model": (_p, (_p, None)),
    "llama_free": (None, (_p,)),
    "llama_n_ctx": (_u, (_p,)),
    "llama_n_batch": (_u, (_p,)),
    "llama_n_ubatch": (_u, (_p,)),
    "llama_n_seq_max": (_u, (_p,)),
    "llama_n_threads": (_i, (_p,)),
    "llama_n_threads_batch": (_i, (_p,)),
    "llama_set_n_threads": (None, (_p, _i, _i)),
    "llama_get_memory": (_p, (_p,)),
    "llama_decode": (_i, (_p, Batch)),
    "llama_get_logits": (_p, (_p,)),
    "llama_get_logits_ith": (_p, (_p, _i)),
    "llama_synchronize": (None, (_p,)),
    "llama_set_abort_callback": (None, (_p, AbortCallback, _p)),
    "llama_memory_clear": (None, (_p, _b)),
    "llama_memory_seq_rm": (_b, (_p, _i, _i, _i)),
    "llama_memory_seq_cp": (None, (_p, _i, _i, _i, _i)),
    "llama_memory_seq_keep": (None, (_p, _i)),
    "llama_memory_seq_add": (None, (_p, _i, _i, _i, _i)),
    "llama_memory_seq_div": (None, (_p, _i, _i, _i, _i)),
    "llama_memory_seq_pos_min": (_i, (_p, _i)),
    "llama_memory_seq_pos_max": (_i, (_p, _i)),
    "llama_memory_can_shift": (_b, (_p,)),
    "llama_state_get_size": (_z, (_p,)),
    "llama_state_get_data": (_z, (_p, _p, _z)),
    "llama_state_set_data": (_z, (_p, _p, _z)),
    "llama_state_load_file": (_b, (_p, _s, _p, _z, _p)),
    "llama_state_save_file": (_b, (_p, _s, _p, _z)),
    "llama_state_seq_get_size": (_z, (_p, _i)),
    "llama_state_seq_get_data": (_z, (_p, _p, _z, _i)),
    "llama_state_seq_set_data": (_z, (_p, _p, _z, _i)),
    "llama_state_seq_save_file": (_z, (_p, _s, _i, _p, _z)),
    "llama_state_seq_load_file": (_z, (_p, _s, _i, _p, _z, _p)),
    "llama_perf_context_reset": (None, (_p,)),
}
_OPTIONAL: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_version": (_s, ()),
    "llama_n_ctx_seq": (_u, (_p,)),
    "llama_n_rs_seq": (_u, (_p,)),
    "llama_model_n_embd_inp": (_i, (_p,)),
    "llama_state_seq_get_size_ext": (_z, (_p, _i, _u)),
    "llama_state_seq_get_data_ext": (_z, (_p, _p, _z, _i, _u)),
    "llama_state_seq_set_data_ext": (_z, (_p, _p, _z, _i, _u)),
    "ggml_backend_load_all_from_path": (None, (_s,)),
    "ggml_backend_reg_count": (_z, ()),
    "ggml_commit": (_s, ()),
    "ggml_get_name": (_s, (_p,)),
    "ggml_get_data": (_p, (_p,)),
    "ggml_nbytes": (_z, (_p,)),
    "llama_kvarn_type_from_name": (_i, (_s,)),
}
_STRUCT_RESULTS = ("llama_context_default_params", "llama_model_default_params", "llama_perf_context")


@dataclass(frozen=True)
class BuildIdentity:
    """What names a build in every result.

    Attributes:
        reference: how the user named it.
        library: absolute path of the library that was loaded.
        version: package and its version where the build came in one, else what `llama_version` says, else "unknown".
        package, package_version: the same apart, None where the build came in no package.
        build_number: llama.cpp's own, None where neither the package's version nor the library's name tells it.
        release: llama.cpp's tag, else what `llama_version` says; None where neither is known.
        commit: what `ggml_commit` says, or "unknown".
        digest: SHA-256 over the names and bytes of the build's libraries, first 16 hex digits.
        context_layout, model_layout: rows of `layouts.yaml` that the probe recognised, or the header that was read.
        vision_layout: the same of libmtmd's parameters; None where the build has no libmtmd, "unknown" where nothing fits.
        symbols: the optional functions that this build has.

    """

    reference: str
    library: str
    version: str
    package: str | None
    package_version: str | None
    build_number: int | None
    release: str | None
    commit: str
    digest: str
    context_layout: str
    model_layout: str
    vision_layout: str | None
    symbols: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The identity as JSON-able values."""
        return asdict(self)


class _Timed:
    """A C function that adds the time spent in it to its library's `seconds`."""

    __slots__ = ("_call", "_clock")

    def __init__(self, call: Any, clock: list[float]) -> None:
        self._call, self._clock = call, clock

    def __call__(self, *arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self._call(*arguments)
        finally:
            self._clock[0] += time.perf_counter() - begin


def find_library(reference: str) -> Path:
    """The libllama file of a build reference: `bundled`, a folder, or the library itself.

    Raises:
        BuildError: nothing there.

    """
    if reference == BUNDLED:
        package = importlib.util.find_spec("llama_cpp")
        if package is None or not package.submodule_search_locations:
            raise BuildError(
                "build 'bundled': llama-cpp-python is not installed here; run `pip install -e .[bundled]`, "
                "or name a folder with `--build FOLDER`"
            )
        folder = Path(package.submodule_search_locations[0])
    else:
        folder = Path(reference).expanduser()
        if folder.is_file():
            return folder.resolve()
        if not folder.is_dir():
            raise BuildError(
                f"build {reference!r}: no such folder; name 'bundled', a folder that holds libllama.so, or a published build "
                "(`python -m tools.builds list` shows them)"
            )
    for place in _PLACES:
        for pattern in _NAMES:
            found = sorted((folder / place).glob(pattern))
            if found:
                return found[0].resolve()
    raise BuildError(
        f"build {reference!r}: no libllama in {folder} (looked in {', '.join(p or '.' for p in _PLACES)} for "
        f"{', '.join(_NAMES)}); build llama.cpp with BUILD_SHARED_LIBS=ON, or name another folder"
    )


def digest_of(library: Path) -> str:
    """SHA-256 over the names and bytes of a build's libraries, first 16 hex digits."""
    names = {library, *library.parent.glob("lib*llama*"), *library.parent.glob("libggml*")}
    total = hashlib.sha256()
    for path in sorted(p for p in names if p.is_file()):
        total.update(path.name.encode())
        with path.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()[:16]


def _refuse_other_machine(library: Path) -> None:
    """The system's own words for this are misleading: it says that there is no such file."""
    with library.open("rb") as stream:
        header = stream.read(20)
    machine = int.from_bytes(header[18:20], "little")
    if header.startswith(b"\x7fELF") and machine != _ELF_X86_64:
        name = _ELF_MACHINES.get(machine, f"ELF machine {machine}")
        raise BuildError(f"{library}: is built for {name}, this machine is x86-64; name a build for x86-64")


def _why_not_loaded(error: str, library: Path) -> str:
    if needed := re.search(r"version `GLIBC_([\d.]+)' not found", error):
        return (
            f"needs glibc {needed[1]}, this system has {platform.libc_ver()[1]}; run it on a newer system, or name a build "
            "made for an older one"
        )
    reason = error.removeprefix(f"{library}: ")
    return (
        f"the system cannot load it ({reason}); use a build made for this machine, with its libggml libraries beside it"
    )


class Library:
    """A loaded build. Functions are attributes under their C names and take and return what C does.

    One process can hold one build: libllama keeps global state, and two builds would share symbols.

    Args:
        place: `bundled`, a folder, or the library itself.
        reference: how the user named the build; default: `place`.

    Attributes:
        context_layout, model_layout: struct layouts that the probe recognised.
        log: the last lines the build logged, oldest first, as (ggml log level, text).

    """

    log_lines = 200

    def __init__(self, place: str = BUNDLED, *, reference: str | None = None) -> None:
        self.reference = reference or place
        self.path = find_library(place)
        abi.refuse_unknown_cpu()
        _refuse_other_machine(self.path)
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # else an abort starts a debugger
        try:
            self._handle = ctypes.CDLL(str(self.path), mode=ctypes.RTLD_LOCAL)
        except OSError as error:
            raise BuildError(f"{self.path}: {_why_not_loaded(str(error), self.path)}") from None
        self._clock = [0.0]
        self._bind()
        self.log: list[tuple[int, str]] = []
        self._log_callback = LogCallback(self._keep_log)
        self.keep_log()
        self.llama_backend_init()
        if self.has("ggml_backend_reg_count") and self.has("ggml_backend_load_all_from_path"):
            if self.ggml_backend_reg_count() == 0:
                self.ggml_backend_load_all_from_path(str(self.path.parent).encode())
            if self.ggml_backend_reg_count() == 0:
                raise BuildError(
                    f"{self.path}: no CPU back end found beside it; keep the libggml-cpu files in that folder"
                )

    @property
    def seconds(self) -> float:
        """Wall time spent inside the build's functions so far, in seconds."""
        return self._clock[0]

    def _bind(self) -> None:
        missing = [name for name in (*_REQUIRED, *_STRUCT_RESULTS) if not hasattr(self._handle, name)]
        if missing:
            raise BuildError(
                f"{self.path}: lacks {len(missing)} function(s) that the suite needs: {', '.join(missing[:6])}"
                f"{', ...' if len(missing) > 6 else ''}; name a libllama of b8121 or newer"
            )
        self.context_layout = self._recognise("context_params")
        self.model_layout = self._recognise("model_params")
        structures = {
            "llama_model_load_from_file": self.model_layout.structure,
            "llama_init_from_model": self.context_layout.structure,
        }
        self._optional = frozenset(name for name in _OPTIONAL if hasattr(self._handle, name))
        for name, (result, arguments) in {**_REQUIRED, **{n: _OPTIONAL[n] for n in self._optional}}.items():
            types = [structures[name] if argument is None else argument for argument in arguments]
            setattr(self, name, self.timed(getattr(self._handle, name), result, types))

    def _recognise(self, struct: str) -> abi.Layout:
        function = getattr(self._handle, f"llama_{struct.removesuffix('_params')}_default_params")
        return abi.recognise(struct, abi.probe(function), self.path)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise BuildError(f"{self.path}: has no function {name}; this build is too old for what was asked of it")

    def has(self, name: str) -> bool:
        """Whether the build has an optional function."""
        return name in self._optional

    def companion(self, name: str, function: str) -> ctypes.CDLL | None:
        """The library lib`name` that belongs to this build, by one of its functions: in this file, or beside it."""
        if hasattr(self._handle, function):
            return self._handle
        found = [path for pattern in (f"lib{name}.so", f"lib{name}.so.*") for path in self.path.parent.glob(pattern)]
        return ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_LOCAL) if found else None

    def vision_layout(self) -> abi.Layout | None:
        """The layout of libmtmd's parameters, None where the build has no libmtmd; BuildError where none is known."""
        library = self.companion("mtmd", "mtmd_init_from_file")
        if library is None:
            return None
        return abi.recognise("mtmd_context_params", abi.probe(library.mtmd_context_params_default), self.path)

    def timed(self, function: Any, result: Any, arguments: Sequence[Any]) -> Callable[..., Any]:
        """A C function with its types, whose time counts towards `seconds`."""
        function.restype, function.argtypes = result, list(arguments)
        return _Timed(function, self._clock)

    def log_here(self, library: ctypes.CDLL, *setters: str) -> None:
        """Have a companion log here too, where it has such setters."""
        for name in setters:
            if hasattr(library, name):
                getattr(library, name)(self._log_callback, None)

    @property
    def has_tail(self) -> bool:
        """Whether contexts of this build take a precision tail, in fields as the fork BeeLlama has them."""
        return self.context_layout.has("kv_tail_tokens")

    @property
    def has_kvarn(self) -> bool:
        """Whether contexts of this build take KVarN types, in fields as the fork BeeLlama has them."""
        return self.context_layout.has("kvarn_type") and self.has("llama_kvarn_type_from_name")

    def default_params(self, layout: abi.Layout, function: str) -> Any:
        """A params struct of the given layout, filled with the build's own defaults."""
        seen = abi.probe(getattr(self._handle, function))
        return layout.structure.from_buffer_copy(seen.content[: ctypes.sizeof(layout.structure)])

    def perf_counts(self, context: int) -> dict[str, float]:
        """`llama_perf_context` of a context: milliseconds in prompt and generation, and token counts."""
        function = ctypes.CFUNCTYPE(None, _p, _p)(ctypes.cast(self._handle.llama_perf_context, _p).value or 0)
        result = (ctypes.c_ubyte * 256)()
        function(ctypes.addressof(result), context)
        times = (ctypes.c_double * 4).from_buffer(result)
        counts = (ctypes.c_int32 * 2).from_buffer(result, 32)
        return {"p_eval_ms": times[2], "eval_ms": times[3], "n_p_eval": counts[0], "n_eval": counts[1]}

    def keep_log(self) -> None:
        """Have the build log here; whoever sets a callback last gets the lines."""
        self.llama_log_set(self._log_callback, None)

    def _keep_log(self, level: int, text: bytes | None, _: int | None) -> None:
        self.log.append((level, (text or b"").decode(errors="replace").rstrip("\n")))
        if len(self.log) > 2 * self.log_lines:
            del self.log[: -self.log_lines]

    def last_error(self) -> str:
        """The newest error lines that the build logged, joined; empty when it logged none."""
        return "; ".join(text for level, text in self.log[-40:] if level == 4 and text)[-400:]

    def identity(self) -> BuildIdentity:
        """What names this build in results."""

        def text(name: str) -> str:
            return (getattr(self, name)() or b"").decode() if self.has(name) else ""

        try:
            found = self.vision_layout()
            vision = found.id if found else None
        except BuildError:
            vision = "unknown"
        origin = origin_of(self.path)
        packaged = f"{origin.package} {origin.version}" if origin.package else ""
        return BuildIdentity(
            reference=self.reference,
            library=str(self.path),
            version=packaged or text("llama_version") or "unknown",
            package=origin.package,
            package_version=origin.version,
            build_number=origin.build_number,
            release=origin.release or text("llama_version") or None,
            commit=text("ggml_commit") or "unknown",
            digest=digest_of(self.path),
            context_layout=self.context_layout.id,
            model_layout=self.model_layout.id,
            vision_layout=vision,
            symbols=tuple(sorted(self._optional)),
        )
