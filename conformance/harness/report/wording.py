"""A check in words, the same in every form of the report."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from conformance.harness.report.results import Check, LayerRow, NotApplicable

_CONTROLS = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """Without control characters, which neither XML nor a terminal takes well."""
    return _CONTROLS.sub("", text)


def figure(value: float | None) -> str:
    """A deviation or a floor in a few characters: 0, 3.1e-2, nan, or a dash where there is none."""
    if value is None:
        return "-"
    return "0" if value == 0 else re.sub(r"e([+-])0?", r"e\1", f"{value:.1e}")


def worst(checks: Iterable[Check]) -> str:
    """The deviation that comes closest to failing, with the floor of the same check: "3.1e-2 / 2.0e-13"."""
    measured = [(check.deviation, check) for check in checks if check.deviation is not None]
    if not measured:
        return "-"

    def closeness(pair: tuple[float, Check]) -> float:
        deviation, check = pair
        return math.inf if math.isnan(deviation) else -deviation if check.wants_more else deviation

    deviation, check = max(measured, key=closeness)
    return f"{figure(deviation)} / {figure(check.floor)}"


def accepted(check: Check) -> str:
    """Which deviations pass: "up to 3.1e-2", "from 1.0e+3 up", "exact only", or a dash where nothing says."""
    if check.limit is None:
        return "-"
    if check.wants_more:
        return f"from {figure(check.limit)} up"
    return "exact only" if check.limit == 0 else f"up to {figure(check.limit)}"


def estimated(check: Check) -> str | None:
    """A figure with its interval and what was measured for it, on one line; None where nothing was estimated.

    A check that does not decide is there for what it measured, so that stands here without an interval too.
    """
    if check.deviation is None:
        return None
    if check.detail.interval is None:
        told = check.detail.seen if not check.required and check.verdict == "PASS" else None
        return _against(told, check.detail.expected) if told else None
    low, high = check.detail.interval
    figures = f"{check.deviation:.3g} ({low:.3g} to {high:.3g})"
    return _against(f"{figures}, {check.detail.where}: {check.detail.seen}", check.detail.expected)


def _against(seen: str, expected: str | None) -> str:
    return f"{seen}, against {expected}" if expected else seen


def is_link(text: str) -> bool:
    """Whether a text is an address of the web and nothing else, and no longer than any address has to be."""
    return re.fullmatch(r"https?://\S{1,500}", text) is not None


def clipped(text: str, length: int) -> str:
    """``text``, or its two ends around a note on how much is left out, about ``length`` characters long."""
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"


def place(row: LayerRow) -> str:
    """A row of a layer-by-layer comparison by name: "layer 7 (recurrent)"."""
    return row.kind if row.layer is None else f"layer {row.layer} ({row.kind})"


def tally_of_layers(check: Check) -> str | None:
    """How many rows of a layer-by-layer comparison differ and where the first is; None where nothing was compared."""
    layers = check.detail.layers
    if not layers:
        return None
    unequal = [row for row in layers if not row.equal]
    if not unequal:
        return f"all {len(layers)} rows equal"
    within = f" by no more than the accepted {figure(check.limit)}" if check.verdict == "PASS" else ""
    seen = f": {unequal[0].first}" if unequal[0].first else ""
    return f"{len(unequal)} of {len(layers)} rows differ{within}, first {place(unequal[0])}{seen}"


def models_not_run(checks: Iterable[Check]) -> Mapping[str, list[str]]:
    """The models on which a check was planned and did not run, by the check's id."""
    models: dict[str, list[str]] = {}
    for check in checks:
        if not check.has_run:
            models.setdefault(check.id, []).append(check.model)
    return models


def models_not_concerned(pairs: Iterable[NotApplicable]) -> Mapping[tuple[str, str], list[str]]:
    """The models to which a check does not apply, by the check's id and the reason without the model's name."""
    models: dict[tuple[str, str], list[str]] = {}
    for pair in pairs:
        models.setdefault((pair.id, pair.reason.replace(pair.model, "it")), []).append(pair.model)
    return models


def describe(check: Check) -> Iterator[str]:
    """Why the check ended as it did: reason, deviation against floor, layer, drawn case, replay."""
    if check.reason:
        yield printable(check.reason).rstrip()
    if excused := check.detail.excused:
        reason = f": {printable(excused.reason).rstrip()}" if excused.reason else ""
        yield f"it ended in {excused.verdict}{reason}"
    if check.deviation is not None:
        quantity = f" ({check.quantity})" if check.quantity else ""
        limit = "" if check.limit is None else f"; accepted: {accepted(check)}"
        noise = f" against a noise floor of {figure(check.floor)}"
        if interval := check.detail.interval:
            noise = f", which noise leaves between {figure(interval[0])} and {figure(interval[1])}"
        yield f"deviation {figure(check.deviation)}{quantity}{noise}{limit}"
    if layers := tally_of_layers(check):
        yield printable(layers)
    if check.case is not None:
        yield f"case: {json.dumps(check.case)}"
    if check.replay:
        yield f"replay: {printable(check.replay)}"
