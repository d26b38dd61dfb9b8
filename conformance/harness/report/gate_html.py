"""``report.html`` of a comparison: both builds side by side on one page that needs nothing but itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from conformance.harness.report.comparison import MEANINGS, OUTCOMES, Comparison, Pair, by_id, shown, speed_cells
from conformance.harness.report.html import longest, page_parts, template
from conformance.harness.report.plot import Ratios, Scale
from conformance.harness.report.results import Check


@dataclass(frozen=True)
class _Line:
    """A pair on the page: ``number`` makes the ids of its elements."""

    number: int
    pair: Pair

    @property
    def sides(self) -> list[tuple[str, Check]]:
        """The builds' checks that there are, by the name of the side."""
        both = (("baseline", self.pair.baseline), ("candidate", self.pair.candidate))
        return [(name, check) for name, check in both if check is not None]

    @property
    def verdicts(self) -> list[str]:
        """What each side showed, baseline first; a dash where it does not apply."""
        return [shown(check) if check else "–" for check in (self.pair.baseline, self.pair.candidate)]

    @property
    def told(self) -> bool:
        """Whether it has an account of its own above the table."""
        return self.pair.outcome != "pass" or self.pair.confirmed is not None


def render_comparison(comparison: Comparison) -> str:
    """The page: the answer, what changed and how to replay it, every check on both builds, speed, states, circumstances.

    It loads nothing from anywhere, and shows text from the results as text.
    """
    lines = {(pair.id, pair.model): _Line(number, pair) for number, pair in enumerate(comparison.pairs)}
    groups = [(id, {pair.model: lines[id, pair.model] for pair in pairs}) for id, pairs in by_id(comparison.pairs)]
    told = sorted((line for line in lines.values() if line.told), key=lambda line: -OUTCOMES.index(line.pair.outcome))
    checks = [check for line in lines.values() for _, check in line.sides]
    opening, colon, rest = comparison.answer.line.partition(": ")
    counts = Counter(line.pair.outcome for line in lines.values())
    return template("gate.html.j2").render(
        comparison=comparison,
        opening=opening if colon else comparison.answer.line,
        rest=rest,
        groups=groups,
        told=told,
        models=list(dict.fromkeys(pair.model for pair in comparison.pairs)),
        outcomes=[outcome for outcome in reversed(OUTCOMES) if counts[outcome]],
        counts=counts,
        meanings=MEANINGS,
        scale=Scale.of(checks),
        longest=longest(sum(len(line.sides) for line in told)),
        facts=_facts(comparison),
        ratios=Ratios.of(comparison.speeds),
        speeds=[(speed, speed_cells(speed)) for speed in comparison.speeds],
        **page_parts(),
    )


def _facts(comparison: Comparison) -> list[tuple[str, Any, Any]]:
    """What is known of the builds: name, the baseline's, the candidate's."""
    names = dict.fromkeys((*comparison.baseline, *comparison.candidate))
    return [(name.replace("_", " "), comparison.baseline.get(name), comparison.candidate.get(name)) for name in names]
