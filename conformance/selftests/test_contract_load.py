"""Spec files: what is right loads, and every mistake is named by file, line and key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness.contract.load import SpecError, load_file, load_specs
from conformance.harness.contract.schema import Accept, Space, Topic

SPECS = Path(__file__).parents[2] / "specs"
DOCUMENTS = "documents:\n  holo3: {title: Holo3}\n"
NOISE = """\
ceilings:
  float32: {logits: 1.0e-6, state: 1.0e-5, because: rounding}
  narrower: {logits: 1.0e-3, state: 1.0e-2, because: other kernels}
"""
PROFILES = """\
default: smoke
profiles:
  smoke:
    {purpose: quick, shrink_seconds: 0, example_timeout_seconds: 5, check_timeout_seconds: 10,
     decoded_tokens: {most: 100, because: it is small}}
"""
TOPIC = """\
topic: things
document: holo3
invariants:
  - id: RP-01
    title: A title
    statement: A statement.
    source: {section: "1."}
    needs:
      kinds: [hybrid]
      capabilities: [partial_state]
    models: [holo3-mini]
    search:
      tokens: {range: [1, 600]}
      ubatch: {choices: [8, 512]}
    examples: {smoke: 3}
    accept:
      quantity: logits
      rule: bitwise
      because: the same kernels run
    required: true
    timeout_seconds: 2.5
    figures:
      layers: {value: 40, label: stated, source: section 4}
"""


def write_specs(folder: Path, topic: str = TOPIC, documents: str = DOCUMENTS, profiles: str = PROFILES) -> Path:
    (folder / "documents.yaml").write_text(documents)
    (folder / "profiles.yaml").write_text(profiles)
    (folder / "noise.yaml").write_text(NOISE)
    (folder / "things.yaml").write_text(topic)
    return folder


def problems_of(folder: Path) -> list[str]:
    """The problems without the folder in front."""
    with pytest.raises(SpecError) as caught:
        load_specs(folder, ["holo3-mini", "qwen3-mini"])
    assert str(caught.value).splitlines() == list(caught.value.problems), "a problem takes more than a line"
    return [problem.replace(f"{folder}/", "") for problem in caught.value.problems]


def test_the_specs_of_this_project_load_and_look_longer_in_longer_profiles() -> None:
    contract = load_specs(SPECS)
    assert {"AR-01", "AR-02", "AR-03", "RP-01", "RP-02", "RP-03", "RP-04", "RP-09"} <= set(contract.invariants)
    for invariant in contract:
        counts = [invariant.examples[name] for name in ("smoke", "standard", "deep")]
        assert counts == sorted(counts), invariant.id


FAMILIES = """\
    families:
      - id: whole-batch
        title: The whole batch
        needs: {kinds: [recurrent]}
        search:
          depth: {range: [1, 4]}
      - id: single-tokens
        title: Tokens one by one
        models: [qwen3-mini]
        examples: {smoke: 1}
"""


def test_a_family_is_a_check_of_its_own_and_takes_from_its_invariant_what_it_does_not_say(tmp_path: Path) -> None:
    contract = load_specs(write_specs(tmp_path, TOPIC + FAMILIES))
    assert list(contract.invariants) == ["RP-01", "RP-01/whole-batch", "RP-01/single-tokens"]
    whole, single = contract["RP-01/whole-batch"], contract["RP-01/single-tokens"]
    assert set(whole.search) == {"depth"}
    assert (whole.needs.kinds, whole.models, whole.examples) == (("recurrent",), ("holo3-mini",), {"smoke": 3})
    assert (single.needs.kinds, single.models, single.examples) == (("hybrid",), ("qwen3-mini",), {"smoke": 1})
    assert whole.accept == single.accept == contract["RP-01"].accept


def test_an_invariant_that_searches_nothing_itself_leaves_the_verdicts_to_its_families(tmp_path: Path) -> None:
    bare = TOPIC.replace("    search:\n      tokens: {range: [1, 600]}\n      ubatch: {choices: [8, 512]}\n", "")
    assert list(load_specs(write_specs(tmp_path, bare + FAMILIES)).invariants) == [
        "RP-01/whole-batch",
        "RP-01/single-tokens",
    ]


def test_families_are_checked_as_invariants_are(tmp_path: Path) -> None:
    wrong = FAMILIES.replace("qwen3-mini", "qwen3-mimi").replace("examples: {smoke: 1}", "examples: {quick: 1}")
    assert problems_of(write_specs(tmp_path, TOPIC + wrong)) == [
        "things.yaml:32: invariants[0].families[1].models[0]: no fixture model 'qwen3-mimi'; did you mean 'qwen3-mini'?",
        "things.yaml:33: invariants[0].families[1].examples.quick: no profile 'quick'; known: smoke",
        "things.yaml:33: invariants[0].families[1].examples: no count for the profile smoke; add it",
    ]
    (line,) = problems_of(write_specs(tmp_path, TOPIC + FAMILIES.replace("single-tokens", "whole-batch")))
    assert "'whole-batch' stands there twice" in line


def test_values_keep_their_types_and_origins_their_lines(tmp_path: Path) -> None:
    contract = load_specs(write_specs(tmp_path, TOPIC.replace("[8, 512]", "[8, on, true, 1:30, 2026-10-01]")))
    invariant = contract["RP-01"]
    assert invariant.search["ubatch"].choices == (8, "on", True, "1:30", "2026-10-01")
    assert contract.origins["RP-01"].where == f"{tmp_path}/things.yaml:4"
    assert contract.origins["RP-01"].source == "Holo3; 1."


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("required: true", "requird: true", "20: invariants[0].requird: unknown key; did you mean 'required'?"),
        ("required: true", "color: red", "20: invariants[0].color: unknown key; known: id, title, statement"),
        ("    required: true\n", "", "4: invariants[0].required: is missing; add it"),
        ("required: true", "required: yes", "20: invariants[0].required: found 'yes'; write true or false"),
        ("rule: bitwise", "rule: bitwsie", "18: invariants[0].accept.rule: found 'bitwsie'; did you mean 'bitwise'?"),
        ("rule: bitwise", "rule: within_floor", "16: invariants[0].accept: the rule within_floor needs factor; add it"),
        (
            "rule: bitwise",
            "rule: exact\n      floor: repeat",
            "16: invariants[0].accept: the rule exact takes no floor",
        ),
        ("because", "becuse", "16: invariants[0].accept.because: is missing; write some text"),
        ("[1, 600]", "[600, 1]", "13: invariants[0].search.tokens.range: the range runs backwards, 600 is more than 1"),
        ("[1, 600]", "[1]", "13: invariants[0].search.tokens.range[1]: is missing; write two whole numbers"),
        ("[1, 600]", "[1, 2, 3]", "13: invariants[0].search.tokens.range: found a list; write two whole numbers"),
        ("[1, 600]", "[1, 6.5]", "13: invariants[0].search.tokens.range[1]: found 6.5; write two whole numbers"),
        (
            "{range: [1, 600]}",
            "{rang: [1, 600]}",
            "13: invariants[0].search.tokens.rang: unknown key; did you mean 'range'?",
        ),
        (
            "{range: [1, 600]}",
            "{}",
            "13: invariants[0].search.tokens: holds none or several of range, choices and transcript",
        ),
        ("[8, 512]", "[]", "14: invariants[0].search.ubatch.choices: found an empty list; write a list"),
        ("[8, 512]", "[8, 8]", "14: invariants[0].search.ubatch.choices: 8 stands there twice"),
        ("[8, 512]", "[8, [1]]", "14: invariants[0].search.ubatch.choices[1]: found a list; write a list of numbers"),
        ("ubatch:", "U-batch:", "14: invariants[0].search.U-batch: found 'U-batch'; write lower-case words"),
        ("smoke: 3}", "smok: 3}", "15: invariants[0].examples.smok: no profile 'smok'; did you mean 'smoke'?"),
        ("smoke: 3}", "smok: 3}", "15: invariants[0].examples: no count for the profile smoke; add it"),
        ("smoke: 3}", "smoke: '3'}", "15: invariants[0].examples.smoke: found '3'; write a whole number from 1 up"),
        ("smoke: 3}", "smoke: 0}", "15: invariants[0].examples.smoke: found 0; write a whole number from 1 up"),
        ("[holo3-mini]", "[holo3-mni]", "11: invariants[0].models[0]: no fixture model 'holo3-mni'; did you mean"),
        ("[holo3-mini]", "every", "11: invariants[0].models: found 'every'; write a list of fixture model names"),
        ("[holo3-mini]", "[all, qwen3-mini]", "11: invariants[0].models: found a list that is empty or names all"),
        ("[hybrid]", "[hybird]", "9: invariants[0].needs.kinds[0]: found 'hybird'; did you mean 'hybrid'?"),
        ("[partial_state]", "[partial]", "10: invariants[0].needs.capabilities[0]: found 'partial'; did you mean"),
        ("[partial_state]", "can_shift", "10: invariants[0].needs.capabilities: found 'can_shift'; write a list"),
        ("id: RP-01", "id: RP-1", "4: invariants[0].id: found 'RP-1'; write an id such as RP-01"),
        ("title: A title", "title:", "5: invariants[0].title: found nothing; write one line of text"),
        ("title: A title", "title: !x A title", "5: invariants[0].title: cannot read 'A title' as !x; drop the tag"),
        ("2.5", "-1", "21: invariants[0].timeout_seconds: found -1; write seconds, more than 0"),
        ("2.5", ".nan", "21: invariants[0].timeout_seconds: found NaN; write seconds, more than 0"),
        ("value: 40", "value: [40]", "23: invariants[0].figures.layers.value: found a list; write a number, a word"),
        ("label: stated", "label: sure", "23: invariants[0].figures.layers.label: found 'sure'; known: stated"),
        ("document: holo3", "document: holo", "2: document: no document 'holo'; did you mean 'holo3'?"),
        ("{section:", "{document: x, section:", "7: invariants[0].source.document: no document 'x'; known: holo3"),
        ('source: {section: "1."}', "source: somewhere", "7: invariants[0].source: found 'somewhere'; write a mapping"),
        (
            "    required: true",
            "    required: true\n    required: false",
            "21: invariants[0].required: stands in line 20",
        ),
        ("{choices: [8, 512]}", "&a {choices: [8]}\n      more: *a", "15: not YAML, aliases are not read"),
        ("topic: things", "topic: [things", "2: not YAML, expected ',' or ']'"),
        ("topic: things", "topic: \x07", " not YAML, unacceptable character"),
        (TOPIC, "", "1: empty; write topic, document, invariants"),
        (TOPIC, "- 1", "1: top level: found a list; write a mapping"),
        (
            "    required: true",
            "    ? [a]\n    : b\n    required: true",
            "20: invariants[0]: a key that is a list or a mapping",
        ),
    ],
)
def test_a_mistake_is_named_by_file_line_and_key(tmp_path: Path, right: str, wrong: str, problem: str) -> None:
    assert right in TOPIC
    found = problems_of(write_specs(tmp_path, TOPIC.replace(right, wrong, 1)))
    assert any(line.startswith(f"things.yaml:{problem}") for line in found), found
    assert len({line.partition(";")[0] for line in found}) == len(found), "a mistake is named once"


KEY_LINES = [number for number, line in enumerate(TOPIC.splitlines(), 1) if re.match(r"[ -]*[a-z_]+:", line)]
FREE_KEYS = {"tokens", "ubatch", "layers"}


@given(number=st.sampled_from(KEY_LINES), junk=st.sampled_from(["x", "_of", "s2"]))
def test_any_misspelt_key_is_named(tmp_path_factory: pytest.TempPathFactory, number: int, junk: str) -> None:
    lines = TOPIC.splitlines()
    key = re.sub(r"[ -]*([a-z_]+):.*", r"\1", lines[number - 1])
    lines[number - 1] = lines[number - 1].replace(f"{key}:", f"{key}{junk}:", 1)
    folder = write_specs(tmp_path_factory.mktemp("specs"), "\n".join(lines))
    if key in FREE_KEYS:
        load_specs(folder)
    else:
        found = problems_of(folder)
        assert any(line.startswith(f"things.yaml:{number}: ") and f"{key}{junk}: unknown key" in line for line in found)


def test_all_mistakes_of_all_files_are_named_at_once_and_in_order(tmp_path: Path) -> None:
    topic = (
        TOPIC.replace("title:", "titel:").replace("value: 40", "value: [40]").replace("required: true", "required: 1")
    )
    folder = write_specs(tmp_path, topic, profiles=PROFILES.replace("default: smoke", "default: big"))
    assert problems_of(folder) == [
        "profiles.yaml:1: top level: no profile 'big'; choose the default from smoke",
        "things.yaml:4: invariants[0].title: is missing; write one line of text",
        "things.yaml:5: invariants[0].titel: unknown key; did you mean 'title'?",
        "things.yaml:20: invariants[0].required: found 1; write true or false",
        "things.yaml:23: invariants[0].figures.layers.value: found a list; write a number, a word, true or false",
    ]


def test_an_id_can_stand_once_in_all_files(tmp_path: Path) -> None:
    folder = write_specs(tmp_path)
    (folder / "zebra.yaml").write_text(TOPIC)
    assert problems_of(folder) == [
        "zebra.yaml:4: invariants[0].id: RP-01 is taken by things.yaml:4; give it another id"
    ]


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == [
        "documents.yaml: cannot be read (No such file or directory); check the path and its permissions",
        "profiles.yaml: cannot be read (No such file or directory); check the path and its permissions",
        "noise.yaml: cannot be read (No such file or directory); check the path and its permissions",
        f"{tmp_path}: no invariants here; name a folder that has a file for each topic",
    ]
    (write_specs(tmp_path) / "things.yaml").write_bytes(b"topic: \xff")
    assert problems_of(tmp_path) == ["things.yaml: byte 7 is not UTF-8; save the file as UTF-8"]


def test_a_ceiling_of_noise_is_needed_for_all_weights(tmp_path: Path) -> None:
    folder = write_specs(tmp_path)
    assert load_specs(folder).ceilings["narrower"].of("state") == 1e-2
    (folder / "noise.yaml").write_text(NOISE.partition("  narrower")[0])
    assert problems_of(tmp_path) == ["noise.yaml:1: top level: no ceiling for narrower weights; add it"]


def test_a_profile_that_sweeps_names_the_profile_that_counts(tmp_path: Path) -> None:
    def sweeping(counts: str) -> Path:
        return write_specs(tmp_path, profiles=PROFILES.replace("}\n", f", architectures: {counts}}}\n"))

    assert load_specs(sweeping("smoke")).profile("smoke").architectures == "smoke"
    assert problems_of(sweeping("tiny")) == ["profiles.yaml:1: top level: no profile 'tiny'; choose from smoke"]


def test_unknown_names_are_answered_with_the_nearest(tmp_path: Path) -> None:
    contract = load_specs(write_specs(tmp_path))
    with pytest.raises(SpecError, match=r"no profile 'smok'; did you mean 'smoke'\?"):
        contract.profile("smok")
    with pytest.raises(SpecError, match=r"no invariant 'RP-10'; did you mean 'RP-01'\?"):
        contract["RP-10"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_no_content_escapes_as_another_error(tmp_path_factory: pytest.TempPathFactory, content: object) -> None:
    path = tmp_path_factory.mktemp("specs") / "any.yaml"
    path.write_text(yaml.safe_dump({"topic": content, "document": content, "invariants": [content]}), encoding="utf-8")
    with pytest.raises(SpecError):
        load_file(path, Topic)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 1e3))
def test_acceptance_follows_its_rule(deviation: float, floor: float, factor: float) -> None:
    close = Accept(quantity="logits", rule="within_floor", factor=factor, floor="ubatch", because="x")
    assert close.holds(deviation, floor) == (deviation <= factor * floor)
    exact = Accept(quantity="logits", rule="bitwise", because="x")
    assert exact.holds(deviation, floor) == (deviation == 0)
    far = Accept(quantity="logits", rule="beyond_floor", factor=factor, floor="ubatch", because="x")
    assert far.holds(deviation, floor) == (deviation >= factor * floor)
    some = Accept(quantity="time", rule="at_least", bound=factor, because="x")
    assert some.holds(deviation, floor) == (deviation >= factor)
    few = Accept(quantity="share", rule="at_most", bound=factor, because="x")
    assert few.holds(deviation, floor) == (deviation <= factor)
    for accept in (close, exact, far, some, few):
        low, high = accept.bounds(floor)
        assert accept.holds(deviation, floor) == (low <= deviation <= high)


@pytest.mark.parametrize("rule", get_args(Accept.model_fields["rule"].annotation))
def test_what_is_not_a_finite_number_never_passes(rule: str) -> None:
    floor = {"factor": 10.0, "floor": "repeat"} if rule.endswith("_floor") else {}
    bound = {"bound": 0.0} if rule.startswith("at_") else {}
    accept = Accept.model_validate({"quantity": "logits", "rule": rule, "because": "x", **floor, **bound})
    assert accept.holds(0.0, 0.0)
    assert not accept.holds(float("nan"), 1.0)
    assert not accept.holds(float("inf"), 1.0)
    assert not accept.holds(0.0, float("nan"))


@given(st.data(), st.integers(-5, 5), st.integers(0, 10))
def test_a_range_is_closed_at_both_ends(data: st.DataObject, low: int, more: int) -> None:
    assert low <= data.draw(Space(range=(low, low + more)).strategy()) <= low + more
    assert data.draw(Space(range=(low, low + more), longest=True).strategy()) == low + more
