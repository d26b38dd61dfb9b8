"""Results for people: a table with a line for each invariant, what did not pass, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.harness.report.results import VERDICTS, Check, NotApplicable, Results, Verdict
from conformance.harness.report.wording import (
    describe,
    estimated,
    models_not_concerned,
    models_not_run,
    printable,
    worst,
)

_STYLES: dict[Verdict, str] = {
    "PASS": "green",
    "KNOWN": "yellow",
    "SKIPPED": "yellow",
    "UNKNOWN": "yellow",
    "TIMEOUT": "red",
    "FAIL": "red",
    "CRASH": "bold red",
}
_TITLE, _VERDICTS = 1, 2
_GAP, _WIDEST_VERDICTS, _NARROWEST_TITLE = 2, 18, 12


def print_results(results: Results, console: Console) -> None:
    """Prints the table, why each check that did not pass did not, the pairs that do not apply, and the verdict.

    Readable at 80 columns and without colour; a wider terminal shows more of the titles. The last line is the verdict.
    """
    console.print(_table(results, console.width))
    for check in results.checks:
        if check.verdict == "PASS" and (figures := estimated(check)):
            console.print(_text(f"measured: {check.id} on {check.model}: {figures}"))
    for (id, reason), models in _known(results.checks).items():
        console.print(_text(f"KNOWN {id} on {', '.join(models)}: {reason}"))
    for check in results.checks:
        if check.verdict not in ("PASS", "KNOWN") and check.has_run:
            _print_check(check, console)
    for id, models in models_not_run(results.checks).items():
        console.print(_text(f"UNKNOWN {id} was not run on {', '.join(models)}"))
    for (names, reason), ids in _not_concerned(results.not_applicable).items():
        verb = "does" if len(ids) == 1 else "do"
        console.print(_text(f"{', '.join(ids)} {verb} not apply to {', '.join(names)}: {reason}"))
    for note in results.notes:
        console.print(_text(f"note: {note}"))
    style = "bold green" if results.summary.exit_code == 0 else "bold red"
    console.print(_text(results.summary.line, style), soft_wrap=True)


def _known(checks: Sequence[Check]) -> Mapping[tuple[str, str], list[str]]:
    """The models on which a check failed as expected, by the check's id and what excuses it; the report has the rest."""
    models: dict[tuple[str, str], list[str]] = {}
    for check in checks:
        if check.verdict == "KNOWN":
            models.setdefault((check.id, check.reason or ""), []).append(check.model)
    return models


def _not_concerned(pairs: Iterable[NotApplicable]) -> Mapping[tuple[tuple[str, ...], str], list[str]]:
    """The checks that do not apply to some models for one reason, by these models and the reason."""
    ids: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (id, reason), models in models_not_concerned(pairs).items():
        ids.setdefault((tuple(models), reason.replace(id, "the spec")), []).append(id)
    return ids


def _table(results: Results, width: int) -> Table:
    checks: dict[str, list[Check]] = {}
    for check in results.checks:
        checks.setdefault(check.id, []).append(check)
    rows = [_row(id, group) for id, group in checks.items()]
    return fitting_table(("id", "title", "models", "worst / floor", "s"), rows, width)


def fitting_table(headings: Sequence[str], rows: Sequence[Sequence[Text]], width: int) -> Table:
    """A table of ids, titles, verdicts, and figures if any: the titles give way where ``width`` is short, many verdicts
    wrap, and nothing else does.
    """
    widths = [max([len(heading), *(len(row[column]) for row in rows)]) for column, heading in enumerate(headings)]
    widths[_VERDICTS] = min(widths[_VERDICTS], max(_WIDEST_VERDICTS, len(headings[_VERDICTS])))
    others = sum(widths) - widths[_TITLE] + _GAP * (len(headings) - 1)
    widths[_TITLE] = min(widths[_TITLE], max(width - others, _NARROWEST_TITLE))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column, (heading, wide) in enumerate(zip(headings, widths, strict=True)):
        right = column > _VERDICTS
        table.add_column(heading, width=wide, no_wrap=column != _VERDICTS, justify="right" if right else "left")
    for row in rows:
        table.add_row(*row)
    return table


def id_and_title(id: str, title: str) -> tuple[Text, Text]:
    """An invariant's id, and its title behind the words of the case family, if it is one."""
    invariant, _, family = id.partition("/")
    return _text(invariant), _text(f"{family.replace('-', ' ')}: {title}" if family else title)


def _row(id: str, checks: list[Check]) -> tuple[Text, ...]:
    informative = "" if checks[0].required else " (informative)"
    seconds = f"{sum(check.seconds for check in checks):.1f}"
    named = id_and_title(id, checks[0].title + informative)
    return *named, _verdicts(checks), Text(worst(checks)), Text(seconds)


def _verdicts(checks: list[Check]) -> Text:
    counts = Counter(check.verdict for check in checks)
    found = [verdict for verdict in reversed(VERDICTS) if counts[verdict]]
    return Text(" ").join(Text(f"{counts[verdict]} {verdict}", _STYLES[verdict]) for verdict in found)


def _print_check(check: Check, console: Console) -> None:
    informative = "" if check.required else " (informative)"
    heading = _text(f" {check.id} on {check.model}{informative}")
    console.print(Text(check.verdict, _STYLES[check.verdict]) + heading)
    for line in (check.title, *describe(check)):
        # Not wrapped here, so that a replay can be copied whole.
        console.print(_text(f"  {line}"), soft_wrap=True)
    console.print()


def _text(words: str, style: str = "") -> Text:
    """Text that is shown as it is: no markup, no control characters."""
    return Text(printable(words), style)
