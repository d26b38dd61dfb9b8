"""Deviations against their floors and limits on one log scale, as SVG."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from conformance.harness.report.comparison import Speed
from conformance.harness.report.results import Check, LayerRow

WIDTH, HEIGHT = 290, 18
_EXACT, _END, _PAD = 40, 46, 14
_LOWEST, _HIGHEST = -24, 6
_TICKS = 4


@dataclass(frozen=True)
class Scale:
    """Where a value stands between 10**low and 10**high; 0 has a zone of its own on the left, NaN and infinity on the
    right. Values beyond an end stand at that end.
    """

    low: int
    high: int

    @classmethod
    def of(cls, checks: Iterable[Check]) -> Scale:
        """The whole decades that hold every deviation, floor, limit and layer of the checks, and 1."""
        logs = [
            math.log10(value)
            for check in checks
            for value in (
                *(check.deviation, check.floor, check.limit),
                *(row.deviation for row in check.detail.layers or ()),
            )
            if value is not None and math.isfinite(value) and value >= sys.float_info.min
        ]
        low = max(math.floor(min(logs, default=-1)), _LOWEST)
        high = min(math.ceil(max(logs, default=0)), _HIGHEST)
        return cls(min(low, -1), max(high, 0))

    def x(self, value: float) -> float:
        """The place of a value from 0 up, in the units of the drawing."""
        if not math.isfinite(value):
            return WIDTH - _END / 2
        if value <= 0:
            return _EXACT / 2
        share = (math.log10(value) - self.low) / (self.high - self.low)
        left, right = _EXACT + _PAD, WIDTH - _END - _PAD
        return round(left + min(max(share, 0), 1) * (right - left), 1)

    def axis(self) -> Markup:
        """The scale itself, with words for its two zones."""
        step = max(1, math.ceil((self.high - self.low) / _TICKS))
        ticks = [
            (self.x(10.0**power), f"1e{power}" if power else "1") for power in range(self.high, self.low - 1, -step)
        ]
        labels = [(_EXACT / 2, "exact"), *ticks, (WIDTH - _END / 2, "∞, NaN")]
        return _svg("".join(f'<text x="{x:g}" y="13">{label}</text>' for x, label in labels), "axis")

    def check(self, check: Check) -> Markup:
        """A check's deviation (a disc when it is accepted, a cross when not), limit and any floor above 0."""
        accepted = check.verdict == "PASS" if check.limit is None else check.accepts(check.deviation)
        return self._marks(check.deviation, accepted, check.limit, check.floor, check.wants_more)

    def layer(self, row: LayerRow, limit: float | None) -> Markup:
        """A layer's deviation, accepted when its bits are equal or it is within the limit of its check."""
        accepted = row.equal or bool(limit and row.deviation is not None and row.deviation <= limit)
        return self._marks(row.deviation, accepted, limit)

    def _marks(
        self,
        deviation: float | None,
        accepted: bool,
        limit: float | None,
        floor: float | None = None,
        wants_more: bool = False,
    ) -> Markup:
        marks = []
        if limit is not None and not math.isnan(limit):
            edge = _EXACT if limit == 0 else self.x(limit)
            begin, end = (edge, WIDTH - _END) if wants_more else (0, edge)
            marks.append(f'<path class="zone" d="M{begin:g} 0H{end:g}v{HEIGHT}H{begin:g}z"/>')
            marks.append(f'<path class="limit" d="M{edge:g} 0v{HEIGHT}"/>')
        if floor:
            marks.append(f'<path class="floor" d="M{self.x(floor):g} {HEIGHT}l-4 -6h8z"/>')
        if deviation is not None:
            x = self.x(deviation)
            shape = f"M{x - 4:g} 9a4 4 0 1 0 8 0a4 4 0 1 0-8 0" if accepted else f"M{x - 4:g} 5l8 8m0-8l-8 8"
            marks.append(f'<path class="{"within" if accepted else "beyond"}" d="{shape}"/>')
        return _svg("".join(marks), "plot")


@dataclass(frozen=True)
class Ratios:
    """Ratios with their intervals on one log scale, from 1 / `most` to `most`, 1 in the middle."""

    most: float

    @classmethod
    def of(cls, speeds: Iterable[Speed]) -> Ratios:
        """The smallest scale that holds every ratio, interval and limit, within a factor of ten."""
        ends = [
            abs(math.log(value))
            for speed in speeds
            for value in (speed.ratio, speed.low, speed.high, speed.limit)
            if value and math.isfinite(value)
        ]
        return cls(math.exp(min(max(ends, default=0.0), math.log(10)) or 1.0))

    def _x(self, ratio: float) -> float:
        share = math.log(ratio) / math.log(self.most) if ratio > 0 else -1.0
        return round(WIDTH / 2 + min(max(share, -1), 1) * (WIDTH / 2 - _PAD), 1)

    def axis(self) -> Markup:
        """The scale itself."""
        labels = [(self._x(value), f"{value:.2g}") for value in (1 / self.most, 1.0, self.most)]
        return _svg("".join(f'<text x="{x:g}" y="13">{label}</text>' for x, label in labels), "axis")

    def bar(self, speed: Speed) -> Markup:
        """The ratio with its interval, and what is accepted."""
        edge = self._x(speed.limit)
        marks = [
            f'<path class="zone" d="M0 0h{edge:g}v{HEIGHT}h-{edge:g}z"/><path class="limit" d="M{edge:g} 0v{HEIGHT}"/>'
        ]
        if speed.ratio is not None:
            low, high = (self._x(end if end is not None else speed.ratio) for end in (speed.low, speed.high))
            x, kind = self._x(speed.ratio), "beyond" if speed.blocks else "within"
            marks.append(f'<path class="interval" d="M{low:g} 9H{high:g}"/>')
            marks.append(f'<path class="{kind}" d="M{x - 3:g} 9a3 3 0 1 0 6 0a3 3 0 1 0-6 0"/>')
        return _svg("".join(marks), "plot")


def strip(rows: Sequence[LayerRow]) -> Markup:
    """One cell for each row of a layer-by-layer comparison in order: low when equal, tall when not."""
    pitch, width = 10, 8
    cells = [
        f'<path class="{"same" if row.equal else "other"}" d="M{pitch * n} {13 if row.equal else 3}h{width}V18h-{width}z"/>'
        for n, row in enumerate(rows)
    ]
    return _svg("".join(cells), "strip", pitch * len(rows))


def _svg(content: str, name: str, width: int = WIDTH) -> Markup:
    """Drawn for the eye only: the same figures stand beside it in text."""
    return Markup(
        f'<svg class="{name}" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" aria-hidden="true">'
        f"{content}</svg>"
    )
