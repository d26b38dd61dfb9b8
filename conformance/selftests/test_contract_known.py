"""Known failures excuse exactly what they name, and only with proof."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.harness.contract.known import BuildName, Known, load_known_failures, match
from conformance.harness.contract.load import SpecError
from conformance.harness.contract.needs import Subject

ENTRY = """\
failures:
  - id: SM-01/rollback-whole-last-batch
    models: [holo3-mini]
    kinds: [sliding_window]
    builds:
      build_number: ">=9294,<9982"
      packages:
        llama-cpp-python: ">=0.3.36"
      digests: ["sha256:abc"]
    upstream: https://github.com/ggml-org/llama.cpp/issues/26695
    replay: rollback.py
    measured: {deviation: 1.7e-1, floor: 2e-13, build: b9535}
    note: The logits differ after a rollback of the whole last batch.
"""
ID = "SM-01/rollback-whole-last-batch"
LINK = "https://github.com/ggml-org/llama.cpp/issues/26695"


def write_entry(folder: Path, text: str = ENTRY) -> Path:
    (folder / "rollback.yaml").write_text(text)
    (folder / "rollback.py").write_text("")
    return folder


@pytest.fixture
def entries(tmp_path: Path) -> tuple[Known, ...]:
    return load_known_failures(write_entry(tmp_path))


def model(name: str = "holo3-mini", *kinds: str) -> Subject:
    return Subject(name, Path("m.gguf"), frozenset(kinds))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("upstream: https", "upstream: htp", "10: failures[0].upstream: 'htp://github.com"),
        (LINK, "none found", "10: failures[0].upstream: 'none found' is neither"),
        (
            LINK,
            "none found (searched 2026-13-01)",
            "10: failures[0].upstream: 2026-13-01 is not a date; write a link, or",
        ),
        ("rollback.py", "gone.py", "11: failures[0].replay: "),
        ("rollback.py", "../rollback.py", "11: failures[0].replay: '../rollback.py' leaves the folder"),
        (
            ">=9294,<9982",
            "9294 and up",
            "6: failures[0].builds.build_number: '9294 and up' is not a version range; write a range",
        ),
        (
            ">=0.3.36",
            "newest",
            "8: failures[0].builds.packages.llama-cpp-python: 'newest' is not a version range; write a range",
        ),
        (
            "id: SM-01/rollback-whole-last-batch",
            "id: SM-01/Rollback",
            "2: failures[0].id: found 'SM-01/Rollback'; write an id such as",
        ),
        (
            "    models: [holo3-mini]\n    kinds: [sliding_window]\n",
            "",
            "2: failures[0]: concerns no model; write models or kinds",
        ),
        (
            "deviation: 1.7e-1",
            "deviation: large",
            "12: failures[0].measured.deviation: found 'large'; write a number from 0 up",
        ),
        ("    note:", "    nota:", "13: failures[0].nota: unknown key; did you mean 'note'?"),
        (
            "    note:",
            "    verdict: BAD\n    note:",
            "13: failures[0].verdict: found 'BAD'; known: FAIL, CRASH, TIMEOUT",
        ),
    ],
)
def test_an_entry_without_proof_is_refused(tmp_path: Path, right: str, wrong: str, problem: str) -> None:
    assert right in ENTRY
    with pytest.raises(SpecError) as caught:
        load_known_failures(write_entry(tmp_path, ENTRY.replace(right, wrong, 1)))
    assert any(line.startswith(f"{tmp_path}/rollback.yaml:{problem}") for line in caught.value.problems), str(
        caught.value
    )


def test_an_entry_without_any_build_is_refused(tmp_path: Path) -> None:
    head, _, tail = ENTRY.partition("    builds:")
    text = f"{head}    builds: {{}}\n    upstream{tail.partition('    upstream')[2]}"
    with pytest.raises(SpecError, match=r"builds: names no build; write build_number, packages, or digests"):
        load_known_failures(write_entry(tmp_path, text))


@pytest.mark.parametrize(
    ("build", "covered"),
    [
        (BuildName(number=9294), True),
        (BuildName(number=9981), True),
        (BuildName(number=9982), False),
        (BuildName(number=9293), False),
        (BuildName(package="llama-cpp-python", version="0.3.36"), True),
        (BuildName(package="llama-cpp-python", version="0.4.0rc1"), True),
        (BuildName(package="llama-cpp-python", version="0.3.35"), False),
        (BuildName(package="llama-cpp-python", version="unversioned"), False),
        (BuildName(package="xllamacpp", version="0.3.36"), False),
        (BuildName(digest="sha256:abc"), True),
        (BuildName(digest="sha256:abd"), False),
        (BuildName(), False),
    ],
)
def test_an_entry_covers_the_builds_it_names(entries: tuple[Known, ...], build: BuildName, covered: bool) -> None:
    assert (match(entries, ID, model(), build) is not None) == covered


@pytest.mark.parametrize(
    ("id", "subject", "concerned"),
    [
        (ID, model("holo3-mini"), True),
        (ID, model("anything", "sliding_window"), True),
        (ID, model("anything", "attention"), False),
        (ID, Subject("anything", Path("m"), None), False),
        ("SM-01", model(), False),
        (f"{ID}-twice", model(), False),
        ("SM-01/rollback-after-single-tokens", model(), False),
    ],
)
def test_an_entry_concerns_only_its_own_id_and_models(
    entries: tuple[Known, ...], id: str, subject: Subject, concerned: bool
) -> None:
    assert (match(entries, id, subject, BuildName(number=9500)) is not None) == concerned


def test_a_matched_entry_names_its_report_and_excuses_its_own_verdict_only(
    entries: tuple[Known, ...], tmp_path: Path
) -> None:
    (known,) = entries
    assert known.reason == "upstream #26695"
    assert known.explains("FAIL")
    assert not known.explains("CRASH")
    assert known.replay.is_file()
    assert known.cured("holo3-mini").startswith(f"{tmp_path}/rollback.yaml:2: {ID} passes on holo3-mini; fixed?")


def test_no_files_are_no_known_failures(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about")
    assert load_known_failures(tmp_path) == ()


def test_the_known_failures_of_this_project_load() -> None:
    load_known_failures(Path(__file__).parents[2] / "specs" / "known_failures")
