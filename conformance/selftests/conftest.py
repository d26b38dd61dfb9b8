from __future__ import annotations

from typing import Any

import hypothesis

# hypothesis would load its own profile under CI and tox; a busy machine must not decide a test either.
hypothesis.settings.register_profile(
    "selftests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("selftests")

FAULT_ROW = "planted fault"


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
