"""A fault as it is kept: told apart from others, counted, and written down as a script."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conformance.harness.engine import CACHE_TYPES, ContextSettings

from .findings import Finding
from .script import write_script
from .walk import Step, Walk


@dataclass
class Found:
    """A fault as it is saved; `known` is the id of the known failure that explains it.

    Attributes:
        cluster: one fault is one cluster: kind, last call, kind of settings, kind of model.
        steps: the shrunk walk.
        count: how often it was met.
        replays: whether its script shows it in a process of its own.
        is_fixed: whether a later run could not show it any more.

    """

    cluster: str
    model: str
    build: str
    settings: dict[str, Any]
    steps: list[Step]
    calls: list[str]
    what: str
    expected: str
    seen: str
    deviation: float | None
    limit: float
    known: str | None = None
    count: int = 1
    replays: bool = False
    is_fixed: bool = False

    @property
    def slug(self) -> str:
        """A file name."""
        return "".join(c if c.isalnum() else "-" for c in self.cluster.lower()).strip("-")[:100]

    def keep(self, folder: Path) -> None:
        """Write it down."""
        (folder / f"{self.slug}-{Path(self.model).stem}.json").write_text(json.dumps(asdict(self), indent=1))


@dataclass
class Fault:
    """What several findings have in common: one line of the table.

    Attributes:
        models: on which it was met.
        first: the finding with the fewest calls.

    """

    cluster: str
    known: str | None
    models: list[str]
    count: int
    first: Found
    is_fixed: bool
    replays: bool


def kept_in(folder: Path, model: str, build: str) -> dict[str, Found]:
    """What earlier runs found on this model and build, by cluster."""
    found = [Found(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    return {each.cluster: each for each in found if (each.model, each.build) == (model, build)}


def cluster_of(finding: Finding, walk: Walk, settings: ContextSettings) -> str:
    """Same kind of finding, same last call or assertion, same kind of settings, same kind of model: the same fault."""
    place = finding.seen if finding.kind == "death" else walk.last
    memory = walk.memory.kind if hasattr(walk, "memory") else "before anything"
    kinds = ["unified" if settings.kv_unified else "streams"]
    if settings.type_k not in ("f16", "f32"):
        kinds.append(f"{settings.type_k} keys" if settings.type_k == "bf16" else "quantized keys")
    return f"{finding.kind}, {place}, {' '.join(kinds)}, {memory}"


def faults(found: Iterable[Found]) -> list[Fault]:
    """One fault for each cluster, over all models; what is not known comes first."""
    together: dict[str, list[Found]] = {}
    for each in found:
        together.setdefault(each.cluster, []).append(each)
    listed = [
        Fault(
            cluster,
            alike[0].known,
            sorted({Path(each.model).stem for each in alike}),
            sum(each.count for each in alike),
            min(alike, key=lambda each: len(each.calls)),
            all(each.is_fixed for each in alike),
            any(each.replays for each in alike),
        )
        for cluster, alike in together.items()
    ]
    return sorted(listed, key=lambda fault: (fault.known is not None, fault.cluster))


def script_of(found: Found, name: str, walk: Walk) -> str:
    """The finding as a script."""
    settings = ContextSettings(**found.settings)
    named = {
        "n_ctx": settings.n_ctx, "n_batch": settings.n_batch, "n_ubatch": settings.n_ubatch,
        "n_seq_max": settings.n_seq_max, "n_rs_seq": settings.n_rs_seq, "kv_unified": settings.kv_unified,
        "swa_full": settings.swa_full, "flash_attn_type": int(settings.flash_attn == "on"),
        "type_k": CACHE_TYPES[settings.type_k], "type_v": CACHE_TYPES[settings.type_v],
    }  # fmt: skip
    made = ", ".join(f"{key}={value!r}" for key, value in named.items())
    body = [
        f"S = dict({made})",
        "c0, c1, seen = context(**S), context(**S), None",
        "for c in (c0, c1):  # memory that was used, not zeros",
        '    [dec(c, T[-24:], 0, s) for s in range(S["n_seq_max"])]',
        '    [memory(c, "seq_rm", s, -1, -1) for s in range(S["n_seq_max"])]',
        *found.calls,
    ]
    if walk.expected_script is not None:
        body += _replay(walk)
    elif place := re.search(r"positions of sequence (\d+) of context (\d)", found.what):
        low, high = ("-1", "-1") if found.expected == "none" else found.expected.split(" to ")
        body.append(f"verdict(({low}, {high}), ends(c{place[2]}, {place[1]}))")
    elif place := re.search(r"state of sequence (\d+) of context (\d)", found.what):
        state = f"save(c{place[2]}, {place[1]})"
        body[-1:] = [f"was = {state}", body[-1], f"verdict(True, was == {state}, 'the bytes are as before:')"]
    else:
        body.append(f"print('expected {found.expected}, seen', seen)")
        body.append(
            f"sys.exit(str(seen) == {found.seen!r} or (isinstance(seen, int) and {found.seen!r} == str(bool(seen))))"
        )
    return write_script(name, f"{found.cluster}: {found.what}", body)


def _replay(walk: Walk) -> list[str]:
    assert walk.expected_script is not None
    script, op = walk.expected_script
    lines = []
    if walk.probed is not None:
        lines = [f"seen = dec(c{walk.probed[0]}, {list(op[2])}, {op[1]}, {walk.probed[1]})"]
    lines += ["k = context(**{**S, 'n_ctx': 1536, 'n_batch': 1536, 'n_seq_max': 1, 'n_rs_seq': 0, 'swa_full': True})"]
    for each in script:
        lines.append(
            _decode("k", each)
            if each[0] in ("dec", "emb")
            else f'memory(k, "seq_{each[0]}", 0, {", ".join(map(str, each[1:]))})'
        )
    return [*lines, f"expected = {_decode('k', op)}", f"verdict(expected, seen[{walk.rows}])"]


def _decode(context: str, op: tuple[Any, ...]) -> str:
    if op[0] == "dec":
        return f"dec({context}, {list(op[2])}, {op[1]})"
    _, start, first, n, width = op
    return f"emb({context}, {first}, {n}, {start}, 0, {width})"


def shows(script: Path, model: Path) -> bool:
    """Whether a script fails in a process of its own."""
    done = subprocess.run([sys.executable, str(script), str(model)], capture_output=True, timeout=120, check=False)
    return done.returncode != 0 and b"Traceback" not in done.stderr
