"""The precision tail: which rows of a cache are exact for a query, and for how long that can be kept up.

For each query the newest N rows that it can see are read exactly and all older ones from the body, every row once and
all under one softmax. Nothing is hidden: a tail changes how rows are represented, not which are visible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conformance.harness.precision.kvarn import GROUP

STANDARD_TAIL_TYPE = "bf16"
KVARN_TAIL_TYPE = "f16"


class TailError(ValueError):
    """A tail length, a window or a step that makes no sense."""


def resolve_tail(requested: int, *, kvarn: bool = False, window: int | None = None) -> int:
    """The rows a tail of `requested` rows really has on a layer that sees at most `window` rows (None: all).

    Over a standard body the request is taken as it is. Over KVarN it is rounded up to whole groups of 128 and never
    falls below one group, which the staging of the filling group needs anyway. The window caps both.
    """
    if requested < 0:
        raise TailError(f"a tail of {requested} rows does not exist; ask for 0 or more")
    if window is not None and window < 1:
        raise TailError(f"a window of {window} rows does not exist; ask for 1 or more")
    rows = max(-(-requested // GROUP), 1) * GROUP if kvarn else requested
    return rows if window is None else min(rows, window)


@dataclass(frozen=True)
class Selection:
    """Which rows each query sees, and which of those it reads exactly; bool [queries, rows]."""

    visible: NDArray[np.bool_]
    exact: NDArray[np.bool_]


def select_rows(
    positions: NDArray[np.int64],
    queries: NDArray[np.int64],
    tail: int,
    *,
    window: int | None = None,
    sink: int = 0,
) -> Selection:
    """Select per query among rows at `positions` [rows], listed in the order of insertion, for `queries` [queries].

    A query at position p sees positions p - window + 1 .. p. Rows are ordered by position, equal positions by
    insertion. The newest `tail` of the visible rows are exact, and so are the `sink` first rows of the sequence.
    """
    rank = np.empty(len(positions), dtype=np.int64)
    order = np.argsort(positions, kind="stable")
    rank[order] = np.arange(len(positions))
    ordered = positions[order]
    end = np.searchsorted(ordered, queries, side="right")[:, None]
    start = np.zeros_like(end) if window is None else np.searchsorted(ordered, queries - window, side="right")[:, None]
    visible = (rank >= start) & (rank < end)
    return Selection(visible, visible & ((rank >= end - tail) | (rank < sink)))


@dataclass
class TailLedger:
    """The bookkeeping of one sequence whose rows pass from an exact tail into a body and cannot come back.

    Of `rows` committed rows the oldest `demoted` have lost their exact values; `tail` is how many should be exact.
    """

    tail: int
    rows: int = 0
    demoted: int = 0

    def commit(self, count: int) -> range:
        """Commit `count` new rows and return the rows that leave the tail by it, which are to be quantized now.

        A query counts its own row among its newest. So the last query of a step reads exactly `tail` exact rows when
        the rows returned for that step are quantized before it runs, and the first query of the next step reads one
        more than `tail` when they are quantized after it.
        """
        if count < 0:
            raise TailError(f"cannot commit {count} rows; use roll_back to take rows away")
        self.rows += count
        leaving = range(self.demoted, max(self.demoted, self.rows - self.tail))
        self.demoted = leaving.stop
        return leaving

    def roll_back(self, rows: int) -> None:
        """Keep the first `rows` rows only."""
        if not 0 <= rows <= self.rows:
            raise TailError(f"cannot roll back to {rows} rows; {self.rows} are committed")
        self.rows = rows
        self.demoted = min(self.demoted, rows)

    @property
    def missing(self) -> int:
        """How many of the newest `tail` rows are no longer exact: 0 is full coverage, more is PARTIAL.

        Only a roll back raises it, and `tail` further rows bring it back to 0 at the latest.
        """
        return self.demoted - max(0, self.rows - self.tail)
