"""`llama_cpp.Llama`, the high-level interface that is built on the bundled build."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from .library import BUNDLED, Library, find_library


def has_high_level(library: Library) -> bool:
    """Whether `llama_cpp.Llama` runs on this very library."""
    try:
        return find_library(BUNDLED) == library.path
    except Exception:
        return False


class HighLevel:
    """One `llama_cpp.Llama`. Use as a context manager.

    Args:
        library: the loaded build; it must be the one that `llama_cpp` loads.
        path: a GGUF.
        n_ctx, n_ubatch: as for a context; the window of a sliding layer is not widened.

    """

    def __init__(self, library: Library, path: Path, *, n_ctx: int = 1024, n_ubatch: int = 32) -> None:
        llama_cpp: Any = importlib.import_module("llama_cpp")
        self.llama: Any = llama_cpp.Llama(
            str(path), n_ctx=n_ctx, n_batch=n_ctx, n_ubatch=n_ubatch, n_threads=1, n_threads_batch=1,
            logits_all=True, swa_full=False, seed=0, verbose=False,
        )  # fmt: skip
        library.keep_log()  # importing llama_cpp has put its own in place

    @property
    def n_tokens(self) -> int:
        """Tokens that the instance says it holds."""
        return int(self.llama.n_tokens)

    def eval(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Decode tokens after those that are held; float32 [n, n_vocab], their logits."""
        self.llama.eval(tokens.tolist())
        return self._rows(len(tokens))

    def generate(self, prompt: npt.NDArray[np.int32], n: int) -> tuple[list[int], npt.NDArray[np.float32]]:
        """The n likeliest next tokens, one after the other, and the logits that the first was chosen from, [1, n_vocab]."""
        tokens: list[int] = []
        for token in self.llama.generate(prompt.tolist(), temp=0.0, top_k=1, repeat_penalty=1.0):
            if not tokens:
                first = self._rows(1)
            tokens.append(int(token))
            if len(tokens) == n:
                break
        return tokens, first

    def sample(self) -> int:
        """A next token."""
        return int(self.llama.sample(temp=0.0))

    def reset(self) -> None:
        """Forget what is held."""
        self.llama.reset()

    def save(self) -> Any:
        """The instance's state, a `llama_cpp.LlamaState`."""
        return self.llama.save_state()

    def load(self, state: Any) -> None:
        """Take a state; raises RuntimeError where the build refuses it."""
        self.llama.load_state(state)

    def _rows(self, n: int) -> npt.NDArray[np.float32]:
        end = self.n_tokens
        return np.array(self.llama.scores[end - n : end], np.float32)

    def __enter__(self) -> HighLevel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.llama.close()
