from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis

# hypothesis would load its own profile under CI and tox; a busy machine must not decide a test either.
hypothesis.settings.register_profile(
    "selftests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("selftests")

ROOT = Path(__file__).parents[2]
FAULT_ROW = "planted fault"


def replayed(line: str) -> subprocess.CompletedProcess[str]:
    """Run a replay line as it is printed, with this interpreter for `python`."""
    program, *arguments = shlex.split(line)
    assert program == "python"
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = [
        row
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        for name, row in report.user_properties
        if name == FAULT_ROW
    ]
    if rows:
        terminalreporter.section("planted faults")
        terminalreporter.write_line(
            f"{'fault':26} {'check':6} {'model':12} {'verdict':8} {'deviation':>10} {'floor':>9}  where"
        )
        for row in sorted(rows):
            terminalreporter.write_line(row)
