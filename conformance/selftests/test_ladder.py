"""The ladder tool: what it writes, that it goes on where it stopped, and what it refuses in one line."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conformance.harness.measure.kld_base import read_base

SMALL = ("--model", "qwen3-mini", "--context", "64", "--ubatch", "16", "--threads", "1")


def ladder(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.ladder", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_ladder_is_written_in_every_form_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = ladder(*SMALL, "--types", "q4_0", "--tails", "0,64", "--out", str(tmp_path))
    assert first.returncode == 0, first.stderr
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "scores").glob("*.npz")}
    again = ladder(*SMALL, "--types", "q4_0,q5_0/q4_0,kvarn3", "--tails", "0,64", "--out", str(tmp_path))
    assert again.returncode == 0, again.stderr
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())
    rows = json.loads((tmp_path / "ladder.json").read_text())["rows"]
    assert [(row["name"], row["tail"]) for row in rows] == [
        *((name, tail) for name in ("q4_0", "q5_0/q4_0", "kvarn3") for tail in (0, 64)),
        ("q4_0 native", 0),
    ]
    assert rows[0]["median"] > 0 == rows[1]["median"] == rows[1]["maximum"]
    with (tmp_path / "ladder.csv").open() as file:
        assert [float(row["median"]) for row in csv.DictReader(file)] == [row["median"] for row in rows]
    page = (tmp_path / "ladder.html").read_text()
    assert page.count("<tr>") == 2 + len(rows)
    assert "<svg" in page
    assert "http" not in page.split("<svg")[0]


def test_an_asymmetric_pair_is_reported_against_its_reverse(tmp_path: Path) -> None:
    types = "q4_0/q5_0,q5_0/q4_0,kvarn4/kvarn3"
    done = ladder(*SMALL, "--types", types, "--tails", "0,8", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "ladder.json").read_text())
    medians = {(row["name"], row["tail"]): row["median"] for row in kept["rows"]}
    told = [note for note in kept["notes"] if note.startswith("K above V")]
    assert len(told) == 2
    for note, tail in zip(told, (0, 8), strict=True):
        mine, reverse = medians["q5_0/q4_0", tail], medians["q4_0/q5_0", tail]
        assert f"q5_0/q4_0 at tail {tail} has a median of {mine:.6f}, the reverse q4_0/q5_0 {reverse:.6f}" in note
        assert f"difference {mine - reverse:+.6f}" in note


def test_a_base_file_is_written_once_and_then_scored_against(tmp_path: Path) -> None:
    base = tmp_path / "base.kld"
    arguments = (*SMALL, "--types", "q4_0", "--tails", "0", "--no-native", "--base", str(base))
    medians = []
    for out in ("first", "second"):
        done = ladder(*arguments, "--out", str(tmp_path / out))
        assert done.returncode == 0, done.stderr
        medians.append(json.loads((tmp_path / out / "ladder.json").read_text())["rows"][0]["median"])
    assert medians[0] == medians[1] > 0
    assert read_base(base).verified
    other = ladder(*arguments, "--corpus", "agent", "--out", str(tmp_path / "third"))
    assert (other.returncode, len(other.stderr.splitlines())) == (2, 1)
    assert "other text" in other.stderr
    digest = base.with_name("base.kld.digest.json")
    digest.write_text(digest.read_text().replace(json.loads(digest.read_text())["model_sha256"], "0" * 64))
    stranger = ladder(*arguments, "--out", str(tmp_path / "fourth"))
    assert stranger.returncode == 2
    assert "another model" in stranger.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--types", "q4_0,q9_0"), "there is no cache type 'q9_0'; choose from q2_0"),
        (("--types", "q4_0/kvarn7"), "kvarn8"),
        (("--types", "kvarn4", "--model", "qwen3-mini-32"), "qwen3-mini-32"),
        (("--types", "kvarn4", "--model", "qwen3-mini-32"), "head dimension of 32"),
        (("--model", "holo9.gguf"), "holo9.gguf"),
        (("--model", "mamba2-mini"), "attention"),
        (("--corpus", "nowhere.txt"), "nowhere.txt"),
        (("--corpus", "agent", "--context", "20000"), "corpus agent has"),
        (("--tails", "0,many"), "many"),
        (("--tails", "-1"), "-1"),
    ],
)
def test_what_cannot_be_used_ends_in_one_line_and_exit_code_2(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = ladder(*SMALL, "--out", str(tmp_path), *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    arguments = ("--types", "q8_0", "--tails", "0", "--no-native", "--out", str(tmp_path))
    assert ladder(*SMALL, *arguments).returncode == 0
    done = ladder(*SMALL, *arguments, "--context", "32")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "context" in done.stderr


def test_the_documents_figures_are_derived_again() -> None:
    done = ladder("--document")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "34 agrees, 0 disagrees, 2 unknown"


def test_scores_of_an_arm_are_kept_position_by_position(tmp_path: Path) -> None:
    assert ladder(*SMALL, "--types", "q4_0", "--tails", "0", "--no-native", "--out", str(tmp_path)).returncode == 0
    with np.load(tmp_path / "scores" / "q4_0-0-0.npz") as kept:
        assert kept["kld"].shape == (64 - 1 - 32,)
        assert np.isfinite(kept["kld"]).all()
