"""Writes results while a run goes on, and reads them back.

Two files in the report folder: ``results.jsonl`` grows by a line for each check (its first line is the plan), and
``results.json`` is replaced as a whole, after each check or at least often. However the run ends, ``results.json`` is complete in form,
with UNKNOWN on every check that was not reached.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from conformance.harness.report.outcomes import Outcomes
from conformance.harness.report.results import SCHEMA, Check, NotApplicable, Results

LOG_NAME = "results.jsonl"
FILE_NAME = "results.json"
_WRITE_PAUSE = 20  # how many times as long as it took the file is then left alone


class ReportError(Exception):
    """A report that cannot be written or read; one line: what, where, what to do."""


class ResultsWriter:
    """Keeps the results of a run on disk from its first moment.

    ``planned`` holds every check that the run intends to make. Raises ReportError when ``folder`` cannot be written. A
    disk that fills up later stops nothing: what was written stays, the rest follows when there is room again, and
    ``problems`` says that the report may be incomplete.
    """

    def __init__(
        self,
        folder: Path,
        planned: Sequence[Check],
        build: Mapping[str, Any],
        suite: Mapping[str, Any],
        settings: Mapping[str, Any],
        not_applicable: Sequence[NotApplicable] = (),
    ) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self._run = Outcomes(planned, build, suite, settings, not_applicable)
        self._pending = b""
        self._next_write = 0.0
        plan = self._run.results()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._log = os.open(folder / LOG_NAME, os.O_WRONLY | os.O_CREAT, 0o666)
            _lock(self._log, folder)
            os.ftruncate(self._log, 0)
            self._append({"plan": plan.as_json()})
            _write(plan, folder)
        except OSError as error:
            raise ReportError(_no_room(folder, error)) from None

    def record(self, check: Check) -> None:
        """Stores the outcome of a check. A second outcome of the same check can only make it worse."""
        self._run.put(check)
        self._attempt(lambda: self._append({"check": check.model_dump(mode="json")}))
        begin = time.monotonic()
        if begin >= self._next_write:  # on a long run the whole file costs more than the line
            self._attempt(lambda: _write(self._run.results(problems=self.problems), self.folder))
            end = time.monotonic()
            self._next_write = end + _WRITE_PAUSE * (end - begin)

    def results(self, notes: Sequence[str] = ()) -> Results:
        """The results so far."""
        return self._run.results(notes, self.problems)

    def finish(self, notes: Sequence[str] = ()) -> Results:
        """Writes the last state, ends the report and returns the results."""
        self._attempt(lambda: self._append({"notes": list(notes)}))
        self._attempt(lambda: _write(self._run.results(notes, self.problems), self.folder))
        os.close(self._log)
        return self.results(notes)

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            problem = f"the report in {self.folder} may be incomplete ({error.strerror}); make room and run again"
            if problem not in self.problems:
                self.problems.append(problem)

    def _append(self, line: Mapping[str, Any]) -> None:
        """Adds a line to the log, behind what an earlier attempt left unwritten; never a part of a line twice."""
        self._pending += json.dumps(line, allow_nan=False).encode() + b"\n"
        while self._pending:
            self._pending = self._pending[os.write(self._log, self._pending) :]


def _lock(log: int, folder: Path) -> None:
    """Takes the report folder for this process. Raises ReportError when another run has it."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ReportError(f"another run is writing its report into {folder}; name another folder") from None


def replace_file(target: Path, content: bytes) -> None:
    """Writes a file as a whole: whoever reads it finds the old content or the new. Raises OSError."""
    draft = target.with_name(f"{target.name}.new")
    try:
        draft.write_bytes(content)
        os.replace(draft, target)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def write_results(results: Results, folder: Path) -> None:
    """Writes ``results.json`` into a folder that holds no run of its own. Raises ReportError."""
    log = folder / LOG_NAME
    if log.exists():
        raise ReportError(f"{folder} holds the {LOG_NAME} of another run; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(results, folder)
    except OSError as error:
        raise ReportError(_no_room(folder, error)) from None


def _write(results: Results, folder: Path) -> None:
    content = json.dumps(results.as_json(), allow_nan=False, indent=1).encode() + b"\n"
    replace_file(folder / FILE_NAME, content)


def _no_room(folder: Path, error: OSError) -> str:
    return f"cannot write the report folder {folder} ({error.strerror}); make room there or choose another folder"


def read_results(path: Path) -> Results:
    """The results in a report folder, or in one of its two files.

    In a folder, ``results.json`` counts unless it is missing, damaged or behind ``results.jsonl``. Raises ReportError
    when there is nothing to read.
    """
    if path.suffix == ".jsonl":
        return _from_log(path)
    if not path.is_dir():
        return _from_file(path)
    found: list[Results] = []
    errors: list[ReportError] = []
    for name, read in ((FILE_NAME, _from_file), (LOG_NAME, _from_log)):
        try:
            found.append(read(path / name))
        except ReportError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return max(found, key=lambda results: sum(check.has_run for check in results.checks))


def _from_file(path: Path) -> Results:
    try:
        content = json.loads(_read(path))
    except ValueError as error:
        raise ReportError(f"{path}: not JSON ({error}); read {LOG_NAME} beside it or run again") from None
    return _validated(path, content)


def _from_log(path: Path) -> Results:
    """Replays the log; a last line that was cut off by the end of the run is left out."""
    first, *lines = _read(path).split(b"\n")
    try:
        plan = _validated(path, json.loads(first)["plan"])
    except (ValueError, KeyError, TypeError):
        raise ReportError(f"{path}:1: not the plan of a run; run again") from None
    run = Outcomes(plan.checks, plan.build, plan.suite, plan.settings, plan.not_applicable)
    notes: Sequence[str] = ()
    for number, text in enumerate(lines[:-1], start=2):
        try:
            line = json.loads(text)
            if "check" in line:
                run.put(Check.model_validate(line["check"]))
            else:
                notes = line["notes"]
        except (ValueError, KeyError, TypeError):
            raise ReportError(f"{path}:{number}: neither a check nor notes; remove the line or run again") from None
    return run.results(notes)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror}); name the report folder of a run") from None


def _validated(path: Path, content: Any) -> Results:
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ReportError(f"{path}: schema is {schema!r}, not {SCHEMA!r}; read it with the suite that wrote it")
    try:
        return Results.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise ReportError(f"{path}: {where}: {first['msg']}; run again") from None
