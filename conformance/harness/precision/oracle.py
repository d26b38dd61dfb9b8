"""Attention over a body and a tail, computed in the plainest way that can be right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conformance.harness.precision.tail import Selection

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """Keys [..., rows, d_k] and values [..., rows, d_v] of one kv head, in one representation."""

    keys: NDArray[np.floating]
    values: NDArray[np.floating]


def attend(queries: NDArray[np.floating], body: Rows, exact: Rows, selection: Selection) -> Doubles:
    """Attention of queries [..., q, d_k], float64 [..., q, d_v], scaled by 1 / sqrt(d_k).

    Where `selection.exact` holds, a row's key and value come from `exact`, else from `body`; one softmax runs over all
    visible rows. Every query must see at least one row.
    """
    scores = np.where(selection.exact, _scores(queries, exact.keys), _scores(queries, body.keys))
    weights = softmax(np.where(selection.visible, scores, -np.inf))
    newest, older = np.where(selection.exact, weights, 0), np.where(selection.exact, 0, weights)
    mixed: Doubles = newest @ exact.values.astype(np.float64) + older @ body.values.astype(np.float64)
    return mixed


def _scores(queries: NDArray[np.floating], keys: NDArray[np.floating]) -> Doubles:
    scores: Doubles = queries.astype(np.float64) @ keys.astype(np.float64).swapaxes(-1, -2) / np.sqrt(keys.shape[-1])
    return scores


def softmax(scores: Doubles) -> Doubles:
    """Weights over the last axis that sum to 1; minus infinity gets weight 0."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    normalised: Doubles = weights / weights.sum(axis=-1, keepdims=True)
    return normalised
