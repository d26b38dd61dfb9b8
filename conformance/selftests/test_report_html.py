"""report.html and summary.md show what the results hold, and text from the results stays text."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.harness.report.forms import FORMS, write_report
from conformance.harness.report.html import render_html
from conformance.harness.report.plot import WIDTH, Scale
from conformance.harness.report.results import NOT_RUN, VERDICTS, Check, NotApplicable, Results, Verdict
from conformance.harness.report.store import ReportError
from conformance.harness.report.summary import render_summary
from conformance.harness.report.verdict import summarise
from conformance.harness.report.wording import is_link, printable

BREAKOUT = (
    "</pre></code></title></style></script><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'>"
)
LINK = "https://github.com/ggml-org/llama.cpp/issues/26695"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "br", "link", "img", "input", "hr"}


def check(verdict: Verdict = "PASS", id: str = "RP-01", model: str = "holo3-mini", **more: Any) -> Check:
    fields = {"required": True, "title": "A title", **more}
    if verdict != "PASS":
        fields.setdefault("reason", "because")
    return Check(id=id, model=model, verdict=verdict, **fields)


def results_of(*checks: Check, pairs: tuple[NotApplicable, ...] = (), **more: Any) -> Results:
    frame: dict[str, Any] = {"build": {"version": "1.2", "digest": "abc"}, "suite": {}, "settings": {}, **more}
    return Results(**frame, checks=checks, not_applicable=pairs, summary=summarise(checks, pairs))


def layer_rows(count: int, first_unequal: int) -> list[dict[str, Any]]:
    return [
        {
            "layer": number,
            "kind": "attention" if number % 4 == 3 else "recurrent",
            "equal": number < first_unequal,
            "deviation": 0.0 if number < first_unequal else 1e-3,
            "first": None if number < first_unequal else f"s, cell 0 (position 311), value {number}: 0.125 against 0.0",
        }
        for number in range(count)
    ]


def failure(text: str, verdict: Verdict = "FAIL") -> Check:
    """A check that has everything to show, with ``text`` wherever a text may stand."""
    detail = {
        "expected": text,
        "seen": text,
        "stderr": text,
        "seed": 7,
        "layers": [{**layer_rows(1, 0)[0], "first": text}],
    }
    return check(
        *(verdict, text, text),
        title=text,
        reason=text,
        quantity=text,
        deviation=0.5,
        floor=1e-9,
        limit=1e-8,
        replay=text,
        case={text: text},
        detail=detail,
    )


def everything(text: str) -> Results:
    """Results with ``text`` wherever a text may stand."""
    known = failure(text).excuse(text, text, text).model_copy(update={"id": f"{text}/known"})
    planned = Check.planned(f"{text}/planned", text, text, True)
    return results_of(
        failure(text),
        known,
        planned,
        pairs=(NotApplicable(id=f"{text}/pair", model=text, reason=text),),
        build={"version": text, text: text},
        settings={"fault": text, "profile": text, "models": {text: {text: text, "measured": {"floors": {text: text}}}}},
        notes=(text,),
    )


def full_run(n_failing: int) -> Results:
    """As large as a full standard run gets: 60 statements on 10 models, 4 of them layer by layer."""
    checks = []
    for number in range(60):
        for model in range(10):
            failing = model < n_failing
            detail: dict[str, Any] = {"seed": 0, "refused_cases": []}
            if number < 4:
                detail["layers"] = layer_rows(40, 7 if failing else 40)
            if failing:
                detail["stderr"] = "GGML_ASSERT(false) failed\n" * 2000
            checks.append(
                check(
                    *("CRASH" if failing else "PASS", f"RP-{number:02}", f"model-{model}-mini"),
                    title="A restored checkpoint leaves every layer in the state of an uninterrupted run",
                    reason="logits row 0 of 1, vocabulary entry 104: expected -0.57, got -1.18" if failing else None,
                    quantity="NMSE of logits",
                    deviation=0.1 if failing else 1e-9,
                    floor=1e-9,
                    limit=2e-8,
                    replay="python -c '" + "x" * 400 + "'" if failing else None,
                    case={f"parameter_{n}": n for n in range(8)} if failing else None,
                    detail=detail,
                )
            )
    return results_of(*checks)


class Page(HTMLParser):
    """A page as a list of elements, with the text inside each."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, "elements are nested"

    def handle_data(self, data: str) -> None:
        self.texts.append((tuple(self._open), data))

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        return [
            found
            for name, found in self.elements
            if name == tag
            and all(found.get(key.strip("_").replace("_", "-")) == value for key, value in attributes.items())
        ]

    def text(self, tag: str | None = None) -> str:
        return "".join(text for path, text in self.texts if tag is None or tag in path)


def tags(source: str) -> list[tuple[str, list[str]]]:
    return [(tag, sorted(attributes)) for tag, attributes in Page(source).elements]


def texts(marks: str) -> st.SearchStrategy[str]:
    """Any text but those that mean something to the report, many of them made of marks."""
    any_text = st.text(min_size=1) | st.text(st.sampled_from(marks), min_size=1)
    return any_text.filter(lambda text: text != NOT_RUN and not is_link(text))


@given(text=texts("<>&\"'`/=!-\\\x00\x1b\u2028]{}%#"))
def test_no_text_changes_the_elements_of_the_page(text: str) -> None:
    page = render_html(everything(text))
    assert tags(page) == tags(render_html(everything("x")))
    assert not {"\x00", "\x1b"} & set(page)


def test_hostile_text_is_shown_as_it_is() -> None:
    page = Page(render_html(everything(BREAKOUT)))
    assert [attributes for tag, attributes in page.elements if tag in ("script", "img")] == [{}]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert page.text("pre").count(BREAKOUT) == 4, "replay and stderr, of the failure and of the known one"
    assert BREAKOUT in page.text("title")


@pytest.mark.parametrize(
    ("upstream", "linked"),
    [(LINK, True), ("javascript:alert(1)", False), ("none found (searched 2026-10-01)", False), (f"x {LINK}", False)],
)
def test_only_addresses_of_the_web_become_links(upstream: str, linked: bool) -> None:
    results = results_of(check("FAIL").excuse("upstream #26695: a note", "rollback.yaml:2", upstream))
    page = Page(render_html(results))
    assert bool(page.all("a", href=upstream)) == linked
    assert upstream in page.text("dd")
    assert (f"[upstream]({upstream})" in render_summary(results)) == linked


def test_the_page_loads_nothing_from_anywhere() -> None:
    source = render_html(everything("x"))
    page = Page(source)
    assert not [attributes for _, attributes in page.elements if {"src", "srcset", "data", "action"} & set(attributes)]
    assert not page.all("link")
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", source)
    (policy,) = (meta["content"] for meta in page.all("meta", http_equiv="Content-Security-Policy"))
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "script-src 'sha256-" in policy


def test_every_reference_inside_the_page_leads_somewhere_and_ids_are_unique() -> None:
    checks = [check(verdict, f"RP-0{number}", model) for number, verdict in enumerate(VERDICTS) for model in ("a", "b")]
    page = Page(render_html(results_of(*checks, Check.planned("RP-09", "a", "t", True))))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {str(link["href"])[1:] for link in page.all("a") if str(link["href"]).startswith("#")}
    assert len(targets) > len(checks)
    assert targets <= set(ids)


def test_every_check_has_a_line_and_every_failure_an_account() -> None:
    checks = [check(verdict, model=f"m-{verdict}") for verdict in VERDICTS]
    page = Page(render_html(results_of(*checks, Check.planned("RP-02", "late", "t", True))))
    assert [row["data-v"] for row in page.all("tr") if "data-v" in row] == [*VERDICTS, "UNKNOWN"]
    accounts = {str(details["data-m"]) for details in page.all("details") if "failure" in str(details.get("class"))}
    assert accounts == {"m-SKIPPED", "m-UNKNOWN", "m-TIMEOUT", "m-FAIL", "m-CRASH"}
    assert page.all("details", data_m="m-KNOWN")


def test_required_failures_come_first_and_the_worst_of_them_before_all() -> None:
    checks = [
        check("PASS", "RP-01"),
        check("CRASH", "RP-02", required=False),
        check("UNKNOWN", "RP-03"),
        check("FAIL", "RP-04"),
    ]
    for shown in (
        Page(render_html(results_of(*checks))).text("h3"),
        render_summary(results_of(*checks)).partition("###")[2],
    ):
        places = [shown.index(id) for id in ("RP-04", "RP-03", "RP-02")]
        assert places == sorted(places)


def test_a_failure_is_told_in_full() -> None:
    told = check(
        "CRASH",
        reason="the build aborted",
        deviation=3.1e-2,
        floor=2e-13,
        limit=0.0,
        replay="python -c 'replay()'",
        case={"prefix_tokens": 311},
        detail={"expected": "0.125", "seen": "0.0", "stderr": "GGML_ASSERT", "seed": 41, "layers": layer_rows(40, 7)},
    )
    page = Page(render_html(results_of(told)))
    account = page.text("dl")
    for part in ("the build aborted", "0.125", "3.1e-2", "2.0e-13", "exact only", "prefix_tokens 311", "seed 41"):
        assert part in account
    assert "33 of 40 rows differ, first layer 7 (attention)" in account
    assert page.text("pre") == "python -c 'replay()'GGML_ASSERT"
    assert sum(table.get("class") == "layers" for table in page.all("table")) == 1
    assert page.text("table").count("against 0.0") == 33


def test_what_an_entry_excuses_is_still_told() -> None:
    excused = check("CRASH", reason="the build aborted").excuse("waived until 2026-12-31: we know", "waivers.yaml:2")
    account = Page(render_html(results_of(excused))).text("details")
    assert "waived until 2026-12-31: we know" in account
    assert "CRASH the build aborted" in account
    assert "waivers.yaml:2" in account
    assert "a CRASH: waived until 2026-12-31: we know" in render_summary(results_of(excused))


@given(
    low=st.integers(-24, -1),
    high=st.integers(0, 6),
    values=st.lists(st.floats(min_value=0), min_size=2, max_size=2).map(sorted),
)
def test_the_scale_keeps_the_order_of_values_and_sets_zero_and_infinity_apart(
    low: int, high: int, values: list[float]
) -> None:
    scale = Scale(low, high)
    smaller, larger = map(scale.x, values)
    assert 0 < smaller <= larger < WIDTH
    if values[0] > 0 and values[1] < math.inf:
        assert scale.x(0) + 20 < smaller
        assert larger + 20 < scale.x(math.inf) == scale.x(math.nan)


@given(
    figures=st.lists(st.floats(min_value=1e-12, max_value=1e3), min_size=3, max_size=3),
    layer=st.floats(min_value=1e-12, max_value=1e3),
)
def test_everything_that_is_drawn_is_within_the_scale(figures: list[float], layer: float) -> None:
    deviation, floor, limit = figures
    row = {"layer": 0, "kind": "attention", "equal": False, "deviation": layer}
    scale = Scale.of([check("FAIL", deviation=deviation, floor=floor, limit=limit, detail={"layers": [row]})])
    assert all(10.0**scale.low <= value <= 10.0**scale.high for value in (*figures, layer))


@pytest.mark.parametrize(
    ("deviation", "limit", "mark"),
    [
        (0.0, 0.0, "within"),
        (5e-324, 0.0, "beyond"),
        (1e-8, 1e-8, "within"),
        (2e-8, 1e-8, "beyond"),
        (math.inf, 1.0, "beyond"),
        (math.nan, 1.0, "beyond"),
        (math.nan, math.nan, "beyond"),
        (0.0, math.nan, "beyond"),
    ],
)
def test_a_deviation_is_drawn_on_its_side_of_the_limit(deviation: float, limit: float, mark: str) -> None:
    drawn = Scale(-10, 0).check(check("FAIL", deviation=deviation, limit=limit))
    assert f'class="{mark}"' in drawn
    edge = re.search(r'class="limit" d="M([\d.]+)', drawn)
    place = re.search(rf'class="{mark}" d="M([\d.]+)', drawn)
    assert place
    if edge:
        assert (float(place[1]) + 4 <= float(edge[1])) == (mark == "within")


@pytest.mark.parametrize(("deviation", "mark"), [(2e-3, "within"), (1e-3, "within"), (9e-4, "beyond")])
def test_what_must_deviate_is_drawn_beyond_its_limit(deviation: float, mark: str) -> None:
    checked = check("FAIL", deviation=deviation, limit=1e-3, wants_more=True)
    drawn = Scale(-10, 0).check(checked)
    zone = re.search(r'class="zone" d="M([\d.]+) 0H([\d.]+)', drawn)
    place = re.search(rf'class="{mark}" d="M([\d.]+)', drawn)
    assert zone
    assert place
    assert (float(zone[1]) <= float(place[1]) + 4 <= float(zone[2])) == (mark == "within")
    assert "from 1.0e-3 up" in Page(render_html(results_of(checked))).text("td")


def test_a_deviation_of_zero_is_called_exact_and_the_least_is_not() -> None:
    cells = [
        Page(render_html(results_of(check("FAIL", deviation=value, floor=0.0, limit=0.0)))).text("td")
        for value in (0.0, 5e-324)
    ]
    assert "exact0exact only" in cells[0]
    assert "bits differ0exact only" in cells[1]


def test_a_planted_fault_is_not_mistaken_for_the_build() -> None:
    assert "Planted fault: layer-missing" in render_html(results_of(check(), settings={"fault": "layer-missing"}))
    assert "Planted fault" not in render_html(results_of(check(), settings={"fault": None}))


@pytest.mark.parametrize(
    "models", [None, [], {}, 3, {"a": None}, {"a": {"measured": None}, "b": {"kinds": ["x", "y"]}}]
)
def test_settings_of_any_shape_make_a_page(models: Any) -> None:
    text = Page(render_html(results_of(check(), settings={"models": models, "seed": [0, 1]}))).text()
    assert "seed 0, 1" in text
    assert ("x, y" in text) == (isinstance(models, dict) and "b" in models)


@pytest.mark.parametrize("n_failing", [0, 2, 10])
def test_a_full_run_fits(n_failing: int) -> None:
    results = full_run(n_failing)
    page = render_html(results)
    assert len(page.encode()) <= 3_000_000
    assert page.count("characters left out") == 60 * n_failing
    assert len(render_summary(results).encode()) < 100_000


@pytest.mark.parametrize("filling", ["<", "\U0001f600", "`", "&"])
def test_no_results_make_a_summary_too_large_for_github(filling: str) -> None:
    text = filling * 20_000
    checks = [failure(text).model_copy(update={"id": f"RP-{number}{text}"}) for number in range(300)]
    checks += [each.excuse(text, text, LINK + text).model_copy(update={"model": "known"}) for each in checks]
    size = len(render_summary(results_of(*checks, notes=(text,) * 300)).encode())
    assert 100_000 < size < 1024 * 1024


def parted(summary: str) -> tuple[list[str], list[str]]:
    """The lines outside of fenced blocks that are not empty, and those inside."""
    outside, inside, fence = [], [], ""
    for line in summary.split("\n"):
        opening = re.fullmatch(r"(`{3,})text", line)
        if fence:
            if line == fence:
                fence = ""
            else:
                inside.append(line)
        elif opening:
            fence = opening[1]
        elif line:
            outside.append(line)
    assert fence == "", "every fence is closed"
    return outside, inside


@given(text=texts("`|<>&\\*_[]()\n~# \x00"))
@example("\n```\n")
@example("\n````\n```")
def test_no_text_changes_the_lines_of_the_summary(text: str) -> None:
    outside, inside = parted(render_summary(everything(text)))
    assert len(outside) == len(parted(render_summary(everything("x")))[0])
    assert f"replay: {printable(text)}" in "\n".join(inside)
    assert all(len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) == 5 for row in outside if row.startswith("|"))
    assert not re.search(r"<|(?<!\\)(?:\\\\)*[*_][^ *]", "\n".join(outside).replace("**", ""))


def test_a_form_that_cannot_be_written_is_named_and_the_others_are_written(tmp_path: Path) -> None:
    (tmp_path / "summary.md").mkdir()
    with pytest.raises(ReportError, match=rf"^{tmp_path}: cannot write summary.md \(Is a directory\); make room there"):
        write_report(everything("x"), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(FORMS)


Browse = Callable[[str], tuple[Page, list[str]]]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Opens a page in a real browser and returns what it then holds and what its console says."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium to open the page in; on Debian: apt-get install chromium")

    def open_page(source: str) -> tuple[Page, list[str]]:
        path = tmp_path / "report.html"
        path.write_text(source, encoding="utf-8")
        switches = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]
        run = subprocess.run(
            [CHROMIUM, *switches, f"--user-data-dir={tmp_path}/profile", "--dump-dom", path.as_uri()],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        return Page(run.stdout), [line for line in run.stderr.splitlines() if ":CONSOLE" in line]

    return open_page


def with_script(source: str, script: str) -> str:
    """The page with a script at its end that its policy lets run."""
    open_to_all = re.sub(r"script-src '[^']+'", "script-src 'unsafe-inline'", source)
    return open_to_all.replace("</body>", f"<script>{script}</script></body>")


def test_a_browser_shows_the_page_and_runs_its_script_and_no_other(browse: Browse) -> None:
    page, console = browse(render_html(everything(BREAKOUT)))
    assert console == []
    assert page.text("title") != "owned"
    assert "3 of 3 checks" in page.text("output")
    assert "hidden" not in page.all("div", id="bar")[0]
    assert len(page.all("button", _class="copy")) == 4
    page, console = browse(
        render_html(everything("x")).replace("<h1>", "<script>document.title = 'owned'</script><h1>")
    )
    assert page.text("title") == "DOES NOT CONFORM: x"
    assert len(console) == 1, "the console is heard"
    assert "Content Security Policy" in console[0]


def test_the_filters_leave_what_they_say(browse: Browse) -> None:
    results = results_of(
        check("PASS", model="a"),
        check("FAIL", model="a", id="RP-02"),
        check("FAIL", model="b"),
        check("FAIL", model="b", id="RP-02").excuse("known", "w:1"),
    )
    script = """
        for (const verdict of ["PASS", "KNOWN"]) document.querySelector(`[data-verdict=${verdict}]`).click();
        model.value = "b"; model.dispatchEvent(new Event("change"));
    """
    page, console = browse(with_script(render_html(results), script))
    assert console == []
    items = [attributes for _, attributes in page.elements if "data-v" in attributes]
    left = {(item["data-v"], item["data-m"]) for item in items if "hidden" not in item}
    assert left == {("FAIL", "b")}
    assert "1 of 4 checks" in page.text("output")
    pressed = {
        button["data-verdict"]: button["aria-pressed"] for button in page.all("button") if "data-verdict" in button
    }
    assert pressed == {"PASS": "false", "KNOWN": "false", "FAIL": "true"}
    assert len([group for group in page.all("tbody", _class="group") if "hidden" in group]) == 1


def test_copying_a_replay_takes_it_whole(browse: Browse) -> None:
    replay = "python -c 'replay(\"<a>\",  1)'"
    script = """
        navigator.clipboard.writeText = async (text) => { document.title = text; };
        document.querySelector(".copy").click();
    """
    page, console = browse(with_script(render_html(results_of(check("FAIL", replay=replay))), script))
    assert console == []
    assert page.text("title") == replay


def test_what_matters_is_open_in_print_and_closed_again(browse: Browse) -> None:
    checks = [check("FAIL", model=model, detail={"layers": layer_rows(2, 1)}) for model in ("a", "b")]
    source = render_html(results_of(*checks, check("PASS", model="c", detail={"layers": layer_rows(2, 2)})))

    def opened(script: str) -> list[bool]:
        page, console = browse(with_script(source, script))
        assert console == []
        return ["open" in details for details in page.all("details")]

    before = opened("")
    printing = opened("dispatchEvent(new Event('beforeprint'))")
    assert printing == [False, True, True, True, True, False], "the guide, two failures with their layers, the rest"
    assert (
        opened("dispatchEvent(new Event('beforeprint')); dispatchEvent(new Event('afterprint'))") == before != printing
    )


def test_a_link_to_a_closed_failure_opens_it(browse: Browse) -> None:
    source = render_html(results_of(check("FAIL", model="a"), check("FAIL", model="b")))
    page, _ = browse(with_script(source, "document.querySelector('.glance a[href=\"#failure-1\"]').click()"))
    assert "open" in page.all("details", id="failure-1")[0]
