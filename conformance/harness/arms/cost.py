"""What a prefill costs by its length and its depth: an affine model, fitted on the build at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from conformance.harness.prompts.layouts import Prompt

from .replay import calls


@dataclass(frozen=True)
class Call:
    """Tokens prefilled in one call behind `depth` tokens of context."""

    tokens: int
    depth: int


def calls_behind(prompt: Prompt, reused: int) -> list[Call]:
    """The calls in which an arm prefills what it does not reuse of a prompt."""
    made, depth = [], reused
    for together in calls(prompt.after(reused)):
        n = sum(piece.n_tokens for piece in together)
        made.append(Call(n, depth))
        depth += n
    return made


@dataclass(frozen=True)
class PrefillCost:
    """Seconds of a call: a constant (another one for a single token, which other kernels compute), a share for every
    token, and a share for every pair of a token and one in front of it.
    """

    coefficients: npt.NDArray[np.float64]

    @classmethod
    def fit(cls, made: Sequence[Call], seconds: Sequence[float]) -> PrefillCost:
        """Least squares over the relative error; four calls at least, of several lengths and depths."""
        taken = np.asarray(seconds, np.float64)
        rows = np.stack([_features(call) for call in made]) / taken[:, np.newaxis]
        return cls(np.asarray(np.linalg.lstsq(rows, np.ones(len(taken)), rcond=None)[0], np.float64))

    def seconds(self, made: Sequence[Call]) -> float:
        """What calls take, one after the other."""
        return float(sum(_features(call) @ self.coefficients for call in made))


def _features(call: Call) -> npt.NDArray[np.float64]:
    pairs = call.tokens * (call.depth + (call.tokens - 1) / 2)
    if call.tokens == 1:
        return np.array([1, 0, 0, pairs], np.float64)
    return np.array([0, 1, call.tokens, pairs], np.float64)
