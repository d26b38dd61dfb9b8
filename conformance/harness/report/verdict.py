"""From checks to one verdict: exit code and sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from conformance.harness.report.results import VERDICTS, Check, NotApplicable, Summary, Verdict

_SAYS: dict[Verdict, str] = {
    "FAIL": "fails on",
    "CRASH": "crashes on",
    "TIMEOUT": "times out on",
    "UNKNOWN": "is unknown on",
    "SKIPPED": "was skipped on",
}
_NAMED = 4


def summarise(
    checks: Sequence[Check], not_applicable: Sequence[NotApplicable] = (), problems: Sequence[str] = ()
) -> Summary:
    """The verdict on a run.

    Exit code 0: every required check passes or is a known failure. 1: a required check does anything else. 2: nothing
    can be said, because no required check was planned or because of ``problems`` in the surroundings (one line each).
    """
    counts = Counter(check.verdict for check in checks)
    required = [check for check in checks if check.required]
    bad = [check for check in required if check.verdict not in ("PASS", "KNOWN")]
    code: Literal[0, 1, 2]
    if problems:
        code, opening = 2, f"NO VERDICT: {'; '.join(problems)}"
    elif not required:
        code, opening = 2, "NO VERDICT: no required check applies; choose other checks or models"
    elif bad:
        code, opening = 1, f"DOES NOT CONFORM: {_named(bad)}"
    else:
        code, opening = 0, "CONFORMS"
    tally = ", ".join(_tally(checks, not_applicable))
    return Summary(
        exit_code=code,
        line=f"{opening}{': ' if code == 0 else '; '}{tally}" if tally else opening,
        counts={verdict: counts[verdict] for verdict in VERDICTS},
        not_applicable=len(not_applicable),
        seconds=sum(check.seconds for check in checks),
        seconds_in_library=sum(check.seconds_in_library for check in checks),
    )


def has_failed(check: Check) -> bool:
    """Whether the check has run and neither passed nor is a known failure."""
    return check.has_run and check.verdict not in ("PASS", "KNOWN")


def badness(check: Check) -> int:
    """Orders checks by how bad their verdicts are; a required one is worse than any that only informs."""
    return VERDICTS.index(check.verdict) + (len(VERDICTS) if check.required else 0)


def _tally(checks: Sequence[Check], not_applicable: Sequence[NotApplicable]) -> Iterable[str]:
    passed = sum(check.verdict == "PASS" for check in checks)
    if checks:
        yield f"{passed} passed"
    known = [check for check in checks if check.verdict == "KNOWN"]
    if known:
        reasons = dict.fromkeys(f"{check.id}, {(check.reason or '').partition(': ')[0]}" for check in known)
        yield f"{len(known)} known failure{'s' * (len(known) > 1)} ({in_short(list(reasons))})"
    informative = [check for check in checks if not check.required and check.verdict not in ("PASS", "KNOWN")]
    if informative:
        yield f"{len(informative)} informative not passing ({_named(informative)})"
    if not_applicable:
        yield f"{len(not_applicable)} {'does' if len(not_applicable) == 1 else 'do'} not apply"


def _named(checks: Sequence[Check]) -> str:
    """The checks by verdict, the worst first, then by id: "RP-04 fails on holo3-mini, qwen35-mini"."""
    models: dict[tuple[Verdict, str, bool], list[str]] = {}
    for check in sorted(checks, key=lambda check: -VERDICTS.index(check.verdict)):
        models.setdefault((check.verdict, check.id, check.has_run), []).append(check.model)
    return in_short(
        [
            f"{id_} {_SAYS[verdict] if has_run else 'was not run on'} {', '.join(names)}"
            for (verdict, id_, has_run), names in models.items()
        ]
    )


def in_short(sentences: Sequence[str]) -> str:
    """The first few of some sentences, and how many more there are."""
    more = len(sentences) - _NAMED
    return "; ".join([*sentences[:_NAMED], *([f"and {more} more"] if more > 0 else [])])
