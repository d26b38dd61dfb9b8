"""``junit.xml`` from results, for continuous integration that shows such files."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

from conformance.harness.report.results import Check, Results
from conformance.harness.report.store import replace_file
from conformance.harness.report.wording import describe, printable


def write_junit(results: Results, path: Path) -> None:
    """Writes a test case for each check; raises OSError when the file cannot be written.

    Only required checks are failures (FAIL) or errors (CRASH, TIMEOUT, UNKNOWN, SKIPPED). Known failures, and
    informative checks that do not pass, are skipped with their reason, since they decide nothing. Pairs that do not
    apply are left out.
    """
    suite = ET.Element("testsuite", name="llama-conformance", time=f"{results.summary.seconds:.3f}")
    properties = ET.SubElement(suite, "properties")
    for name, value in (("verdict", results.summary.line), *results.build.items()):
        ET.SubElement(properties, "property", name=printable(name), value=printable(str(value)))
    for check in results.checks:
        text = "\n".join(describe(check))
        test_case(suite, check.model, f"{check.id} {check.title}", check.seconds, _outcome(check), check.verdict, text)
    replace_file(path, counted(suite))


def test_case(
    suite: ET.Element, model: str, name: str, seconds: float, tag: str | None, verdict: str, text: str
) -> None:
    """Add a test case to a suite; `tag` is failure, error, skipped, or None for one that passed."""
    case = ET.SubElement(suite, "testcase", classname=printable(model), name=printable(name), time=f"{seconds:.3f}")
    if tag:
        message = f"{verdict}: {printable(text).partition(chr(10))[0]}"
        ET.SubElement(case, tag, type=verdict, message=message).text = printable(text)


def counted(suite: ET.Element) -> bytes:
    """A suite whose test cases are complete, as the content of a file."""
    counts = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for attribute, tag in counts.items():
        suite.set(attribute, str(len(suite.findall(f".//{tag}"))))
    ET.indent(suite)
    content: bytes = ET.tostring(suite, encoding="utf-8", xml_declaration=True)
    return content


def _outcome(check: Check) -> str | None:
    if check.verdict == "PASS":
        return None
    if check.verdict == "KNOWN" or not check.required:
        return "skipped"
    return "failure" if check.verdict == "FAIL" else "error"
