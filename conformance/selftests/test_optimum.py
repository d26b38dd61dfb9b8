import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from conformance.harness.arms.document import PATH, load_document, rederive
from conformance.harness.arms.optimum import DISCLAIMER, OptimumError, optimum
from conformance.harness.arms.profile import ProfileError, Profiles, read_profiles, write_profiles
from conformance.harness.measure.interval import Interval
from conformance.harness.measure.rederivation import Formula, rederived
from conformance.harness.report.optimum import bound_of, lines, write_forms
from conformance.test_optimum import Tasks, _run, _step

from .test_tools import tool

TASKS = Tasks(seed=1, tasks=4, most_steps=8, new_over_evict_percent=40)
DISAGREE = {
    "optimum-wall",
    "model-time-share",
    "evict-energy",
    "optimum-energy",
    "energy-by-wall",
    "context-at-10-steps",
    "new-tokens-flat",
    "decode-fit-shallow",
    "decode-fit-deep",
    "terminal-slot-on-short-tasks",
    "evict-hit-at-step-2",
}


def test_the_documents_arithmetic_disagrees_where_means_were_mixed_and_nowhere_else() -> None:
    found = {line.id: line for line in rederive(load_document())}
    assert {id for id, line in found.items() if line.verdict == "disagrees"} == DISAGREE
    assert {id for id, line in found.items() if line.verdict == "unknown"} == {"no-evict-hit"}
    low, _, high = found["optimum-wall"].derived.partition(" .. ")
    assert float(low) < 1174.06 < float(high)
    assert found["optimum-wall"].how.startswith("1818.9 - (131.5 - 62.9) * 9.4; ")
    assert found["energy-ratio"].derived == "1.93122 .. 1.96257"


@pytest.mark.parametrize(
    ("change", "id"),
    [
        (("reused: 5229", "reused: 5228"), "trace-3-prompt"),
        (('reuse: "0.57"', 'reuse: "0.58"'), "trace-2-reuse"),
        (('stated: "2.12"', 'stated: "2.13"'), "wall-ratio"),
        (('stated: "82.4"', 'stated: "82.7"'), "optimum-step"),
    ],
)
def test_a_digit_that_is_changed_disagrees(change: tuple[str, str], id: str, tmp_path: Path) -> None:
    text = PATH.read_text(encoding="utf-8")
    assert change[0] in text
    changed = tmp_path / "holo3.yaml"
    changed.write_text(text.replace(*change), encoding="utf-8")
    wrong = {line.id for line in rederive(load_document(changed)) if line.verdict == "disagrees"}
    assert wrong == DISAGREE | {id}


FIGURES: dict[str, str | int | None] = {
    "a.b": "2.0",
    "a.c": "0.5",
    "a.n": 3,
    "a.lost": None,
    "a.12.x": "7",
    "a.near": "2.1",
}


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("a.b + 1", "2.95", "3.05"),
        ("a.b * a.n", "5.85", "6.15"),
        ("(a.12.x - 2) / a.b", "90/41", "110/39"),
        ("0.1 * a.n", "0.3", "0.3"),
    ],
)
def test_a_formula_gives_what_everything_that_prints_so_gives(text: str, low: str, high: str) -> None:
    assert Formula(text, FIGURES).value() == Interval(Fraction(low), Fraction(high))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a.b + a.z", "there is no figure a.z"),
        ("a.b +", "is no formula"),
        ("a.b ** 2", "holds more than figures"),
        ("max(a.b, 1)", "holds more than figures"),
    ],
)
def test_what_is_no_formula_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Formula(text, FIGURES).value()


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("a.c < a.b", "agrees"),
        ("a.b < a.near", "agrees"),  # 2.0 and 2.1: their ends meet
        ("a.b < a.c", "disagrees"),
        ("a.b < a.b", "unknown"),
        ("a.n < 3", "disagrees"),
    ],
)
def test_a_comparison_holds_for_all_for_none_or_for_some(text: str, verdict: str) -> None:
    assert rederived("id", "says", Formula(text, FIGURES), None).verdict == verdict


def test_a_figure_that_nobody_knows_makes_its_claim_unknown() -> None:
    line = rederived("id", "says", Formula("a.lost + 1", FIGURES), "3")
    assert (line.verdict, line.derived) == ("unknown", "a.lost is unknown")


def test_one_task_by_hand() -> None:
    evict = Profiles(
        run=_run("evict"),
        steps=(
            _step("evict", 0, 1, 100, 10.0, 2.0, 13.0, None),
            _step("evict", 0, 2, 300, 30.0, 4.0, 36.0, None),
        ),
    )
    new = Profiles(run=_run("append_only"), steps=(_step("append_only", 0, 1, 90, 8.0, 1.0, None, None),))
    [task] = optimum(evict, new, power=36.0).tasks
    assert (task.wall_evict, task.wall_optimum, task.decode, task.residual_optimum) == (49.0, 25.0, 6.0, 3.0)
    assert (task.gain, task.energy_evict, task.energy_optimum) == (2.5, 0.49, 0.25)


def test_the_bound_of_each_step_is_new_content_and_evicts_decoding_and_cells() -> None:
    evict = [_step("evict", 0, number, 100 * number, 10.0, 2.0, 13.0, None) for number in (1, 2)]
    new = [_step("append_only", 0, number, 40, 4.0, 9.0, None, None) for number in (1, 2, 3)]
    bound = bound_of(evict, new)
    assert (bound.new_tokens, bound.seconds, bound.cells) == ((40, 40, 40), (6.0, 6.0), (200, 300))


def test_wall_that_was_not_recorded_is_assumed_and_said_so() -> None:
    evict, new = TASKS.profiles()
    bare = evict.model_copy(
        update={"steps": tuple(step.model_copy(update={"wall_seconds": None}) for step in evict.steps)}
    )
    found = optimum(bare, new)
    assert {figure.name: figure.label for figure in found.figures()}["evict: wall"] == "assumed"
    assert lines(found)[-1].startswith("wall: not recorded")
    assert all(abs(task.residual_evict) < 1e-9 for task in found.tasks)


@pytest.mark.parametrize(
    ("change", "gains", "excluded", "negative"),
    [
        (("document: holo3", "document: holo3"), ["<=3 steps", "4-10 steps"], 0, 1),
        (("steps: [1, 3]", "steps: [1, 2]"), ["<=2 steps", "4-10 steps"], 0, 1),
        (("most_steps: 20", "most_steps: 3"), ["<=3 steps"], 2, 0),
        (("share_of_wall: 1.0e-9", "share_of_wall: 0.5"), ["<=3 steps", "4-10 steps"], 0, 0),
    ],
)
def test_what_decides_stands_in_the_documents_file(
    change: tuple[str, str],
    gains: list[str],
    excluded: int,
    negative: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = PATH.read_text(encoding="utf-8")
    assert change[0] in text
    changed = tmp_path / "holo3.yaml"
    changed.write_text(text.replace(*change), encoding="utf-8")
    document = load_document(changed)
    monkeypatch.setattr("conformance.harness.arms.optimum.load_document", lambda: document)
    lengths = (2, 3, 5, 5)  # the model time of the last task is longer than its wall by a tenth
    evict = [
        _step("evict", task, step, 100, 10.0, 2.0, 11.0 if task == 3 else 13.0, None)
        for task, length in enumerate(lengths)
        for step in range(1, length + 1)
    ]
    new = [
        _step("append_only", task, step, 40, 4.0, 2.0, None, None)
        for task, length in enumerate(lengths)
        for step in range(1, length + 1)
    ]
    found = optimum(
        Profiles(run=_run("evict"), steps=tuple(evict)), Profiles(run=_run("append_only"), steps=tuple(new))
    )
    assert list(found.gains()) == gains
    assert (len(found.excluded), len(found.negative_residuals)) == (excluded, negative)


def renamed(profiles: Profiles) -> Profiles:
    steps = tuple(
        step.model_copy(update={"task": "other"}) if step.task == "task 1" else step for step in profiles.steps
    )
    return profiles.model_copy(update={"steps": steps})


def of_model(profiles: Profiles) -> Profiles:
    return profiles.model_copy(update={"run": profiles.run.model_copy(update={"model": {"file": "other"}})})


def of_window(profiles: Profiles) -> Profiles:
    settings = {**profiles.run.settings, "window": 99}
    return profiles.model_copy(update={"run": profiles.run.model_copy(update={"settings": settings})})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda evict, new: (new, evict),
            "the profiles of append_only stand where those of evict or evict_ideal belong",
        ),
        (lambda evict, new: (evict, evict), "the profiles of evict stand where those of append_only belong"),
        (lambda evict, new: (evict, renamed(new)), "task 'other' is in one of the two profiles only, and 1 more are"),
        (lambda evict, new: (evict, of_model(new)), "the two profiles differ in model"),
        (lambda evict, new: (evict, of_window(new)), "the two profiles differ in settings"),
    ],
)
def test_profiles_that_do_not_belong_together_are_refused(
    spoil: Callable[[Profiles, Profiles], tuple[Profiles, Profiles]], says: str
) -> None:
    with pytest.raises(OptimumError, match=says):
        optimum(*spoil(*TASKS.profiles()))


def test_tasks_that_are_all_too_long_are_refused() -> None:
    steps = tuple(_step("evict", 0, number, 10, 1.0, 1.0, 2.0, None) for number in range(1, 22))
    evict, new = (
        Profiles(run=_run(arm), steps=tuple(step.model_copy(update={"arm": arm}) for step in steps))
        for arm in ("evict", "append_only")
    )
    with pytest.raises(OptimumError, match="every task has more than 20 steps"):
        optimum(evict, new)


def saved(folder: Path) -> tuple[Path, Path]:
    paths = folder / "evict.jsonl", folder / "new.jsonl"
    for path, profiles in zip(paths, TASKS.profiles(power=True), strict=True):
        write_profiles(path, profiles.run, profiles.steps)
        assert read_profiles(path) == profiles
    return paths


def test_the_tool_prints_and_writes_the_bound_with_its_disclaimer(tmp_path: Path) -> None:
    done = tool("optimum", *map(str, saved(tmp_path)), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    [headline] = [line for line in done.stdout.splitlines() if line.startswith("optimum: wall:")]
    assert DISCLAIMER in headline
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "optimum.html",
        "optimum.json",
        "optimum.png",
        "optimum.svg",
    ]
    result = json.loads((tmp_path / "out" / "optimum.json").read_text())
    assert all(figure["disclaimer"] for figure in result["figures"] if figure["is_bound"])
    assert "stroke-dasharray" in (tmp_path / "out" / "optimum.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name two files of step profiles, EVICT.jsonl and NOEVICT.jsonl, or --document"),
        (["lost.jsonl", "new.jsonl"], "lost.jsonl: No such file or directory; give the profiles that an arm wrote"),
        (["evict.jsonl", "new.jsonl", "--power", "-1"], "--power -1: give watts, more than 0"),
        (["new.jsonl", "evict.jsonl"], "the profiles of append_only stand where those of evict"),
        (["broken.jsonl", "new.jsonl"], "broken.jsonl:3: the line: Invalid JSON"),
        (["gap.jsonl", "new.jsonl"], "gap.jsonl:2: step 2 of task 'task 0' where step 1 belongs"),
        (["sum.jsonl", "new.jsonl"], "sum.jsonl:2: the line: reused and prefilled tokens do not add up to the prompt"),
        (["empty.jsonl", "new.jsonl"], "empty.jsonl: holds no step"),
    ],
)
def test_the_tool_refuses_in_one_line(arguments: list[str], says: str, tmp_path: Path) -> None:
    evict, _ = saved(tmp_path)
    head, *steps = evict.read_text().splitlines()
    (tmp_path / "broken.jsonl").write_text("\n".join([head, steps[0], "{", *steps[1:]]))
    (tmp_path / "gap.jsonl").write_text("\n".join([head, *steps[1:]]))
    (tmp_path / "sum.jsonl").write_text("\n".join([head, steps[0].replace('"reused_tokens":0', '"reused_tokens":1')]))
    (tmp_path / "empty.jsonl").write_text(head)
    done = tool("optimum", *[str(tmp_path / each) if each.endswith("jsonl") else each for each in arguments])
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert says in done.stderr


def test_a_profile_that_is_no_profile_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"arm": "evict"}\n{}\n')
    with pytest.raises(ProfileError, match=r"p\.jsonl:1: build: Field required"):
        read_profiles(path)


def test_forms_are_the_same_bytes_for_the_same_profiles(tmp_path: Path) -> None:
    evict, new = TASKS.profiles()
    for name in ("a", "b"):
        write_forms(tmp_path / name, optimum(evict, new), evict, new)
    assert (tmp_path / "a" / "optimum.html").read_bytes() == (tmp_path / "b" / "optimum.html").read_bytes()


def test_document_is_derived_again_by_the_tool() -> None:
    done = tool("optimum", "--document")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "30 agrees, 11 disagrees, 1 unknown"
