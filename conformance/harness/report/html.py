"""``report.html``: one page that needs nothing but itself, from results alone."""

from __future__ import annotations

import base64
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from conformance.harness.report.plot import Scale, strip
from conformance.harness.report.results import VERDICTS, Check, Results, Verdict
from conformance.harness.report.store import replace_file
from conformance.harness.report.verdict import badness, has_failed
from conformance.harness.report.wording import (
    accepted,
    clipped,
    estimated,
    figure,
    is_link,
    models_not_concerned,
    models_not_run,
    place,
    printable,
    tally_of_layers,
)

_FOLDER = Path(__file__).parent
_LONGEST, _LONGEST_TOGETHER = 20_000, 500_000
_MEANINGS: dict[Verdict, str] = {
    "PASS": "what was measured is within what the statement accepts, in every case that was drawn",
    "KNOWN": "it fails, and an entry with a reason excuses it: a fault reported upstream, or a waiver with an end date",
    "SKIPPED": "it could not be measured here, for the reason given; a required check that is skipped is not passed",
    "UNKNOWN": "it was not run, or what was measured shows neither a fault nor its absence",
    "TIMEOUT": "the build did not return in time",
    "FAIL": "a case was found in which the statement does not hold",
    "CRASH": "the build ended the process",
}


@dataclass(frozen=True)
class _Line:
    """A check on the page: ``number`` makes the ids of its elements."""

    number: int
    check: Check

    @property
    def failed(self) -> bool:
        """Whether it has run and stands among what did not pass."""
        return has_failed(self.check)

    @property
    def anchor(self) -> str:
        """The id of the element that says most about it."""
        return f"{'failure' if self.failed else 'check'}-{self.number}"


@dataclass(frozen=True)
class _Group:
    """The checks of one id, in the order of the results."""

    id: str
    lines: list[_Line]

    @property
    def title(self) -> str:
        return self.lines[0].check.title

    @property
    def required(self) -> bool:
        return self.lines[0].check.required

    @property
    def quantities(self) -> list[str]:
        """What was measured: words for the deviations."""
        found = (line.check.quantity for line in self.lines if line.check.deviation is not None)
        return list(dict.fromkeys(quantity for quantity in found if quantity))

    @property
    def failures(self) -> list[_Line]:
        return [line for line in self.lines if line.failed]

    @property
    def worst(self) -> int:
        """How bad the worst of its failures is; a required one is worse than any that only informs."""
        return max((badness(line.check) for line in self.failures), default=-1)

    def on(self, model: str) -> _Line | None:
        return next((line for line in self.lines if line.check.model == model), None)


def write_html(results: Results, path: Path) -> None:
    """Writes the page; raises OSError when the file cannot be written."""
    replace_file(path, render_html(results).encode())


def render_html(results: Results) -> str:
    """The page: verdict and counts, what failed and how to replay it, every measurement, the circumstances.

    It loads nothing from anywhere. Long texts are cut so that the page stays small; results.json has them whole. Text from the results is shown as text, and a content security policy lets no script
    but the page's own run.
    """
    lines = [_Line(number, check) for number, check in enumerate(results.checks)]
    groups = _groups(lines)
    pairs = {(pair.id, pair.model): None for pair in results.not_applicable}
    opening, colon, rest = results.summary.line.partition(": ")
    return template("report.html.j2").render(
        results=results,
        summary=results.summary,
        opening=opening if colon else results.summary.line,
        rest=rest,
        lines=lines,
        groups=groups,
        failures=sorted((group for group in groups if group.failures), key=lambda group: -group.worst),
        known=[line for line in lines if line.check.verdict == "KNOWN"],
        layered=[line for line in lines if line.check.detail.layers and not line.failed],
        not_run=models_not_run(results.checks),
        not_concerned=models_not_concerned(results.not_applicable),
        pairs=pairs,
        models=list(dict.fromkeys([*(check.model for check in results.checks), *(model for _, model in pairs)])),
        facts=list(_facts(results)),
        subjects=_table(results.settings.get("models")),
        scale=Scale.of(results.checks),
        longest=longest(sum(check.verdict != "PASS" for check in results.checks)),
        **page_parts(),
        meanings=_MEANINGS,
        verdicts=VERDICTS[::-1],
    )


def page_parts() -> dict[str, Any]:
    """Style and script of a page, and the digest by which its security policy lets the script run."""
    script = (_FOLDER / "report.js").read_text(encoding="utf-8")
    return {
        "style": Markup((_FOLDER / "report.css").read_text(encoding="utf-8")),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }


def longest(n_accounts: int) -> int:
    """To how many characters each long text is cut on a page with so many accounts of failures."""
    return min(_LONGEST, _LONGEST_TOGETHER // (1 + n_accounts))


def _groups(lines: Iterable[_Line]) -> list[_Group]:
    groups: dict[str, list[_Line]] = {}
    for line in lines:
        groups.setdefault(line.check.id, []).append(line)
    return [_Group(id, group) for id, group in groups.items()]


def _facts(results: Results) -> Iterator[tuple[str, Any]]:
    """What was run and how: everything on build, suite and settings but the models."""
    for room, mapping in (("", results.build), ("suite ", results.suite), ("", results.settings)):
        yield from ((f"{room}{key}".replace("_", " "), value) for key, value in mapping.items() if key != "models")


def _table(models: Any) -> tuple[list[str], list[tuple[str, list[Any]]]]:
    """Columns and rows, one for each model; nested mappings are columns too, as far as they hold mappings."""
    if not isinstance(models, dict):
        return [], []
    flat = {name: _flat(facts) if isinstance(facts, dict) else {"": facts} for name, facts in models.items()}
    columns = list(dict.fromkeys(column for facts in flat.values() for column in facts))
    return columns, [(name, [facts.get(column) for column in columns]) for name, facts in flat.items()]


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in facts.items():
        if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
            flat.update(_flat(value))
        else:
            flat[key.replace("_", " ")] = value
    return flat


def _words(value: Any) -> str:
    """Any JSON value in words: figures short, lists and mappings on one line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}" if value == 0 or 1e-3 <= abs(value) < 1e6 else figure(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return str(value)


def _deviation(value: float | None) -> str:
    if value is None:
        return "–"
    if value == 0:
        return "exact"
    return "bits differ" if 0 < value < sys.float_info.min else figure(value)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _tally(group: _Group) -> list[tuple[Verdict, int]]:
    counts = Counter(line.check.verdict for line in group.lines)
    return [(verdict, counts[verdict]) for verdict in VERDICTS[::-1] if counts[verdict]]


@cache
def template(name: str) -> Template:
    """A page's template, with the filters that pages share."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters.update(
        words=_words,
        figure=figure,
        deviation=_deviation,
        accepted=accepted,
        estimated=estimated,
        duration=_duration,
        tally=_tally,
        strip=strip,
        place=place,
        layers=tally_of_layers,
        clipped=clipped,
    )
    environment.tests["link"] = is_link
    return environment.get_template(name)
