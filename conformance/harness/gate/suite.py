"""The suite on one build, in processes of its own, from one list of cases; and what it found last time."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.harness.contract.load import Contract
from conformance.harness.engine import BuildError
from conformance.harness.exam.check import every_check
from conformance.harness.exam.digest import suite_digest
from conformance.harness.exam.drawing import drawn_ahead
from conformance.harness.exam.plugin import CASES_NAME
from conformance.harness.exam.session import Shard, file_digest, subject_of
from conformance.harness.report.results import Results
from conformance.harness.report.store import FILE_NAME, ReportError, read_results
from fixtures.models import cache_folder

ROOT = Path(__file__).parents[3]
_WORD, _LOGIC = re.compile(r"[^\s()]+"), ("and", "or", "not")
_QUIET_SECONDS = 10.0
_LAST_LINES = 5
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Ask:
    """What both builds are asked.

    Attributes:
        models: names of fixture models, or paths of GGUFs.
        selected: an expression as pytest's -k, None for every check.
        jobs: processes, or "auto".

    """

    profile: str
    models: tuple[str, ...]
    seed: int = 0
    selected: str | None = None
    shard: Shard | None = None
    threads: int = 1
    jobs: str = "auto"

    def options(self, cases: Path) -> list[str]:
        """The same as options of `python -m conformance`; times are not for one build after the other to compare."""
        options = ["--profile", self.profile, "--seed", str(self.seed), "--threads", str(self.threads)]
        options += [part for name in self.models for part in ("--model", name)]
        options += ["-k", self.selected] if self.selected else []
        options += ["--shard", str(self.shard)] if self.shard else []
        options += ["-n", self.jobs, "--dist", "worksteal"] if self.jobs != "1" else []
        return [*options, "--no-timing", "--cases", str(cases)]

    def takes(self, id: str, model: str) -> bool:
        """Whether this gate makes a check on a model where it applies."""
        return (self.shard is None or self.shard.holds(id, model)) and self.selects(id, model)

    @property
    def choice(self) -> str:
        """The options that leave checks out, for people."""
        parts = [f"-k {self.selected}"] if self.selected is not None else []
        return " ".join([*parts, *([f"--shard {self.shard}"] if self.shard else [])]) or "--model"

    def selects(self, id: str, model: str) -> bool:
        """Whether `selected` chooses a check that pytest does not run; words are looked for as in pytest's -k."""
        if self.selected is None:
            return True
        text = f"{id} {model}".lower()
        truths = _WORD.sub(lambda word: word[0] if word[0] in _LOGIC else str(word[0].lower() in text), self.selected)
        return bool(eval(truths))  # of True, False, and, or, not and brackets alone

    def key(self) -> dict[str, Any]:
        """What of it shapes the results."""
        return {
            "profile": self.profile,
            "seed": self.seed,
            "selected": self.selected,
            "shard": str(self.shard) if self.shard else None,
            "threads": self.threads,
            "models": {name: file_digest(subject_of(name).path) for name in self.models},
        }


def write_cases(path: Path, contract: Contract, ask: Ask) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Draw every check's cases, whatever a build can do, into a file that runs replay; returns them by (id, model)."""
    names = [subject_of(name).name for name in ask.models]
    checks = every_check()
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    most = contract.profile(ask.profile).decoded_tokens.most
    with path.open("w") as stream:
        for invariant in contract:
            drawn = drawn_ahead(
                checks[invariant.id], invariant.decoding_at_most(most), invariant.examples[ask.profile], ask.seed
            )
            content = [case.model_dump() for case in drawn]
            lines = [json.dumps(case) for case in content]
            for name in names:
                cases[invariant.id, name] = content
                opening = json.dumps({"id": invariant.id, "model": name})[:-1]
                stream.writelines(f'{opening}, "case": {line}}}\n' for line in lines)
    return cases


def run(
    side: str, identity: Mapping[str, Any], ask: Ask, folder: Path, *, fault: str | None, fresh: bool, tell: Tell
) -> tuple[Results, bool]:
    """The suite's results on a build, and whether they are from an earlier run.

    The report of the run is in `folder`/`side`. Results of a build, a suite and settings that have not changed are
    taken from the cache unless `fresh`.

    Raises:
        BuildError: the run could not be made; the last lines it printed.

    """
    place, cases = folder / side, folder / CASES_NAME
    shutil.rmtree(place, ignore_errors=True)  # nothing of an earlier run may be taken for this one's
    reference = str(identity["reference"])
    shapes = [identity["digest"], reference, suite_digest(), fault, ask.key(), file_digest(cases)]
    kept = cache_folder() / "gate" / hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:24]
    if not fresh and (kept / FILE_NAME).is_file():
        try:
            results = read_results(kept / FILE_NAME)
        except ReportError:
            shutil.rmtree(kept)
        else:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(kept / FILE_NAME, place / FILE_NAME)
            tell(f"{side}: {reference}: as in an earlier run of the same build, suite and settings")
            return results, True
    command = [sys.executable, "-m", "conformance", "--build", reference, "--report", str(place), *ask.options(cases)]
    code, last = _watched([*command, *(["--inject-fault", fault] if fault else [])], place, side, tell)
    try:
        results = read_results(place)
    except ReportError as error:
        raise BuildError(f"{side} {reference}: the suite left no results: {last} ({error})") from None
    if code not in (0, 1) and any(check.has_run for check in results.checks):
        raise BuildError(f"{side} {reference}: the suite could not run to its end: {last}")
    if results.build["digest"] != identity["digest"]:
        raise BuildError(f"{side} {reference}: the build changed while the gate ran; run it again")
    if _is_worth_keeping(results, ask):
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copy(place / FILE_NAME, kept / f"{FILE_NAME}.new")
        (kept / f"{FILE_NAME}.new").replace(kept / FILE_NAME)
    return results, False


def _is_worth_keeping(results: Results, ask: Ask) -> bool:
    """Whether every required check that was asked for came to a conclusion that a busy machine does not explain."""
    asked = [check for check in results.checks if check.required and (check.has_run or not ask.selected)]
    return all(check.verdict not in ("UNKNOWN", "SKIPPED", "TIMEOUT") for check in asked)


def _watched(command: Sequence[str], place: Path, side: str, tell: Tell) -> tuple[int, str]:
    """Run the suite, keep what it prints in `log.txt`, and say now and then how far it is; the exit code and last words."""
    place.mkdir(parents=True, exist_ok=True)
    said, last = time.monotonic(), [""]
    with (place / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                if line.strip():
                    last = [*last, line.strip()][-_LAST_LINES:]
                if time.monotonic() - said > _QUIET_SECONDS and line.startswith("["):
                    tell(f"{side}: {line.partition(']')[0]}]")
                    said = time.monotonic()
            code = process.wait()
        finally:
            process.kill()
            process.wait()
    return code, next((line.removeprefix("Exit: ") for line in last if line.startswith("Exit: ")), last[-1])
