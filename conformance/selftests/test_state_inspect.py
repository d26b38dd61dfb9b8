"""`tools.inspect` prints and compares what is on disk, and refuses the rest with one line and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from conformance.selftests.blob_writer import hybrid_40
from tools.inspect import app

BLOB = hybrid_40(np.random.default_rng(0)).write()


def inspect(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    path = tmp_path / "saved [0].bin"
    path.write_bytes(BLOB)
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "other.bin"
    path.write_bytes(BLOB[:-1] + bytes([BLOB[-1] ^ 0x80]))
    return path


def test_the_census_of_a_blob_is_printed(blob: Path) -> None:
    result = inspect(blob)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == str(blob)
    assert "layout F4; saved from sequence 0" in lines
    assert "attention: 3 cells at positions 0 to 2" in lines
    assert "│ attention │ k │ 10 │ q8_0 │ 68 │ 2,040 │" in lines
    assert f"│ │ all │ │ │ │ {len(BLOB):,} │" in lines
    assert "1,960 bytes of K and V per token" in lines


def test_a_sequence_file_is_read_like_the_blob_in_it(blob: Path) -> None:
    blob.write_bytes(b"qsgg" + np.array([3, 2, 5, 6], "<u4").tobytes() + BLOB[8:])
    shown = json.loads(inspect(blob, "--json").stdout)
    assert (shown["tokens"], shown["sequence"], shown["layout"]) == (2, None, "F4, no head")
    assert shown["census"]["n_bytes"] == len(BLOB) - 8
    assert shown["positions"] == {"attention": [0, 2], "recurrent": [2, 2]}
    assert [it["bytes"] for it in shown["parts"]] == [2040, 3840, 1440, 3840]


def test_two_states_are_compared_and_the_first_difference_named(blob: Path, other: Path) -> None:
    result = inspect(blob, "--against", other)
    assert result.exit_code == 1
    assert "39 of 40 rows equal" in result.stdout
    *_, last = result.stdout.splitlines()
    assert last.startswith("layer 29 (recurrent), s, cell 0 (position 2), value 31: ")
    assert inspect(blob, "--against", blob).exit_code == 0

    compared = json.loads(inspect(blob, "--against", other, "--json").stdout)
    assert compared["first_difference"] == last
    assert [row["equal"] for row in compared["comparison"]] == [True] * 39 + [False]


@pytest.mark.parametrize("content", [b"", b"qsgg", BLOB[:-1], b"qsgg" + np.array([3, 9], "<u4").tobytes() + BLOB[8:30]])
def test_what_is_no_state_is_refused_in_one_line(blob: Path, content: bytes) -> None:
    good = blob.with_name("good.bin")
    good.write_bytes(BLOB)
    blob.write_bytes(content)
    for result in (inspect(blob), inspect(good, "--against", blob)):
        assert result.exit_code == 2
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"{blob}: no sequence state of {len(content)} bytes: byte ")


def test_the_place_of_an_error_counts_from_the_start_of_a_file(blob: Path) -> None:
    head = b"qsgg" + np.array([3, 1, 5], "<u4").tobytes()
    blob.write_bytes(head + BLOB[8:96] + (99).to_bytes(4, "little") + BLOB[100:])
    assert f"byte {len(head) + 88}: K of layer 0: 99 is no ggml type" in inspect(blob).stderr


def test_a_missing_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    result = inspect(tmp_path / "none.bin")
    assert result.exit_code == 2
    assert result.stderr == f"{tmp_path / 'none.bin'}: No such file or directory: give a file that can be read\n"
