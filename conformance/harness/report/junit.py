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
        name = printable(f"{check.id} {check.title}")
        case = ET.SubElement(
            suite, "testcase", classname=printable(check.model), name=name, time=f"{check.seconds:.3f}"
        )
        tag = _outcome(check)
        if tag:
            text = "\n".join(describe(check))
            message = f"{check.verdict}: {text.partition(chr(10))[0]}"
            ET.SubElement(case, tag, type=check.verdict, message=message).text = text
    counts = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for attribute, tag in counts.items():
        suite.set(attribute, str(len(suite.findall(f".//{tag}"))))
    ET.indent(suite)
    replace_file(path, ET.tostring(suite, encoding="utf-8", xml_declaration=True))


def _outcome(check: Check) -> str | None:
    if check.verdict == "PASS":
        return None
    if check.verdict == "KNOWN" or not check.required:
        return "skipped"
    return "failure" if check.verdict == "FAIL" else "error"
