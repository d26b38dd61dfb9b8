"""`python -m conformance [options]`: examine a build. The options are those of the pytest plugin, and pytest's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def main(arguments: list[str]) -> int:
    """Run the suite; 0 the build conforms, 1 it does not, 2 usage or environment."""
    topics = [] if any(a.split("::")[0].endswith(".py") for a in arguments) else [str(ROOT / "conformance")]
    fixed = [
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(ROOT),
        "--ignore",
        str(ROOT / "conformance/selftests"),
        "-p",
        "no:cacheprovider",
        "-W",  # the project's own tests take warnings for errors; a user's run does not end on one
        "default",
        "-W",
        "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning",
    ]
    code = pytest.main([*fixed, *arguments, *topics], plugins=["conformance.harness.exam.plugin"])
    return int(code) if code in (0, 1) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
