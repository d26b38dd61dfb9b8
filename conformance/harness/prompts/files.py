"""Transcripts in files."""

from __future__ import annotations

from pathlib import Path

from conformance.harness.contract.load import dump_yaml, load_file

from .transcript import Transcript


def read_transcript(path: Path) -> Transcript:
    """A transcript from a YAML or JSON file.

    Raises:
        SpecError: a line for each mistake: file, line, key, what is wrong, what to do.

    """
    return load_file(path, Transcript).content


def write_transcript(path: Path, transcript: Transcript) -> None:
    """Write a transcript as YAML; raises OSError when the file cannot be written."""
    path.write_text(dump_yaml(transcript.model_dump()), encoding="utf-8")
