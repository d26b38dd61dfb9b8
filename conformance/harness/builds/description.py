"""What a build is and whether it runs here, found out in a process of its own."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from conformance.harness.engine import BuildError, Context, ContextSettings, EngineError, Model
from conformance.harness.engine.child import Child, ChildDeath
from conformance.harness.state import BlobError, parse

from .store import load, refuse_changed, resolve

Runs = Literal["DECODES", "REFUSED", "CRASH", "TIMEOUT"]
_SECONDS = 60.0
_MEMORY = 8 << 30
_TOKENS = 32
_CACHE_TYPES = ("f32", "f16")
_SEED = 1


@dataclass(frozen=True)
class Description:
    """One build.

    Attributes:
        reference: as it was named.
        runs: DECODES when a tiny model gave finite logits that differ from token to token; REFUSED when the build refused
            the model or a call; CRASH and TIMEOUT as everywhere.
        reason: why it does not decode, in a line; empty when it does.
        identity: as in results; None when loading the library already ended the process.
        state_format: formats of the sequence state that it saves, for example "F3"; None when it does not decode.

    """

    reference: str
    runs: Runs
    reason: str
    identity: dict[str, Any] | None
    state_format: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The description as JSON-able values."""
        return asdict(self)


def describe(reference: str, model: Path) -> Description:
    """Load a build and decode a few tokens of a model with it.

    Raises:
        BuildError: there is no such build, or it cannot be loaded here at all.

    """
    resolve(reference)
    identity: dict[str, Any] | None = None
    with Child(memory_limit=_MEMORY) as child:
        try:
            identity = child.call(identify, reference, timeout=_SECONDS)
            written: str = child.call(decode, reference, model, timeout=_SECONDS)
        except ChildDeath as death:
            when = "on load" if identity is None else "at the first tokens"
            return Description(reference, death.verdict, f"{when}: {' '.join(str(death).split())}", identity)
        except BuildError:
            raise
        except EngineError as error:
            return Description(reference, "REFUSED", str(error), identity)
    return Description(reference, "DECODES", "", identity, written)


def identify(reference: str) -> dict[str, Any]:
    """Load a build into this process and say what it is; BuildError where it is no longer what was fetched."""
    identity = load(reference).identity()
    refuse_changed(reference, identity.digest)
    return identity.as_dict()


def decode(reference: str, path: Path) -> str:
    """Decode a few tokens, save, and name the format of what was saved; may end the process.

    Asks for each of two cache types and sees it in what was saved: the read-back that no function of the library gives.
    """
    with Model(load(reference), path) as model:
        tokens = np.random.default_rng(_SEED).integers(0, model.n_vocab, _TOKENS, dtype=np.int32)
        for cache_type in _CACHE_TYPES:
            with Context(model, ContextSettings(n_ctx=256, type_k=cache_type)) as context:
                logits = context.decode(tokens, outputs="all")
                blob = context.save()
            if not np.isfinite(logits).all() or not np.ptp(logits, axis=0).any():
                raise EngineError(f"{reference}: logits of {path.name} are not finite, or the same for every token")
            try:
                state = parse(blob)
            except BlobError:
                return "unknown"
            seen = {layer.k.type for cache in state.attention for layer in cache.layers}
            if seen - {cache_type}:
                raise EngineError(f"{reference}: asked for {cache_type} keys, the saved state holds {', '.join(seen)}")
    return state.layout.name
