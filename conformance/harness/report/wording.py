"""A check in words, the same in every form of the report."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from conformance.harness.report.results import Check

_CONTROLS = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """Without control characters, which neither XML nor a terminal takes well."""
    return _CONTROLS.sub("", text)


def figure(value: float | None) -> str:
    """A deviation or a floor in a few characters: 0, 3.1e-2, nan, or a dash where there is none."""
    if value is None:
        return "-"
    return "0" if value == 0 else re.sub(r"e([+-])0?", r"e\1", f"{value:.1e}")


def describe(check: Check) -> Iterator[str]:
    """Why the check ended as it did: reason, deviation against floor, layer, drawn case, replay."""
    if check.reason:
        yield printable(check.reason).rstrip()
    if check.deviation is not None:
        quantity = f" ({check.quantity})" if check.quantity else ""
        limit = "" if check.limit is None else f"; accepted up to {figure(check.limit)}"
        yield f"deviation {figure(check.deviation)}{quantity} against a noise floor of {figure(check.floor)}{limit}"
    layers = check.detail.layers or ()
    unequal = [row for row in layers if not row.equal]
    if unequal:
        first = unequal[0]
        place = first.kind if first.layer is None else f"layer {first.layer} ({first.kind})"
        seen = f": {printable(first.first)}" if first.first else ""
        yield f"{len(unequal)} of {len(layers)} rows differ, first {place}{seen}"
    if check.case is not None:
        yield f"case: {json.dumps(check.case)}"
    if check.replay:
        yield f"replay: {printable(check.replay)}"
