"""The pytest plugin: options, the pairs to run, results as they come, the verdict as exit code.

With pytest-xdist the controller prepares the session once and hands it to the workers; only the controller writes.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import time
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from conformance.harness.bench import Case
from conformance.harness.builds import BUILD_HELP
from conformance.harness.contract.known import Known
from conformance.harness.contract.load import Contract, SpecError
from conformance.harness.contract.schema import Kind
from conformance.harness.contract.ties import untied
from conformance.harness.contract.waivers import Waiver, load_waivers, waive
from conformance.harness.contract.waivers import notes as waiver_notes
from conformance.harness.engine.child import Child
from conformance.harness.faults import FAULTS
from conformance.harness.report.forms import write_report
from conformance.harness.report.results import Check, Results, Verdict
from conformance.harness.report.store import ReportError, ResultsWriter
from conformance.harness.report.terminal import print_results

from .check import REGISTRY, BoundCheck, every_check, every_test
from .examination import Examination, contract, known_failures
from .progress import Progress
from .session import GIB, Options, Session, Shard, UsageError, child_for, file_digest, prepare

CASES_NAME = "cases.jsonl"
_THREADS_PER_CORE = 4
_PROPERTY, _POSTPONED = "conformance", "conformance, postponed"
_CONTRACT = pytest.StashKey[Contract]()
_SESSION = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The suite's options."""
    group = parser.getgroup("conformance", "llama.cpp conformance")
    group.addoption("--build", default="bundled", metavar="BUILD", help=f"default: bundled; {BUILD_HELP}")
    group.addoption(
        "--model",
        action="append",
        default=[],
        metavar="GGUF",
        help="examine this GGUF, or the fixture model of this name, instead of all fixture models; may be repeated",
    )
    group.addoption(
        "--arch",
        action="append",
        default=[],
        metavar="NAME",
        help="examine a tiny model of this architecture, made on the spot, instead of all fixture models; 'all' for every "
        "recurrent, hybrid and sliding-window architecture of the build; may be repeated",
    )
    group.addoption(
        "--profile", default=None, metavar="NAME", help="how long to look: smoke, standard (default) or deep"
    )
    group.addoption(
        "--report", default="report", metavar="DIR", help="folder for results.json, junit.xml and cases.jsonl"
    )
    group.addoption(
        "--budget", type=float, metavar="MINUTES", help="size the search so that the whole run takes this long at most"
    )
    group.addoption(
        "--waivers",
        metavar="FILE",
        help="YAML file of failures that you accept for now, each with a reason and a last day",
    )
    group.addoption("--seed", type=int, default=0, metavar="N", help="seed of all draws (default 0)")
    group.addoption("--threads", type=int, default=1, metavar="N", help="threads for each context (default 1)")
    group.addoption(
        "--cases", default=None, metavar="FILE", help="run the cases recorded in this cases.jsonl instead of drawing"
    )
    group.addoption(
        "--no-timing",
        action="store_true",
        help="leave out what measures time and only informs, as smoke does",
    )
    group.addoption(
        "--strict-timing",
        action="store_true",
        help="let checks that measure time decide the verdict; without it they are shown and only inform",
    )
    group.addoption(
        "--shard", metavar="I/N", help="run the I-th of N parts of the checks; join them with tools.report merge"
    )
    group.addoption(
        "--inject-fault", default=None, metavar="NAME", help=f"run on an engine that lies: {', '.join(FAULTS)}"
    )


def _examines(config: pytest.Config) -> bool:
    """Whether this run examines a build; the self-tests alone do not."""
    selftests = config.rootpath / "conformance" / "selftests"
    places = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    return not places or not all(place.is_relative_to(selftests) for place in places)


def _asked(config: pytest.Config) -> Contract:
    return contract(strict_timing=config.option.strict_timing, timing=not config.option.no_timing)


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the session, or take the one that the controller prepared."""
    if not _examines(config) or config.option.collectonly or config.option.help:
        return
    if hasattr(config, "workerinput"):
        config.stash[_SESSION] = pickle.loads(config.workerinput[_PROPERTY])
        config.stash[_CONTRACT] = _asked(config)
        return
    if config.option.tbstyle == "auto":
        config.option.tbstyle = "no"  # the report below says it better
        config.option.reportchars = ""
    try:
        config.stash[_CONTRACT] = _asked(config)
        _refuse_loose_ends(config.stash[_CONTRACT])
        known = known_failures()
        waivers = (
            load_waivers(Path(config.option.waivers), config.stash[_CONTRACT].invariants)
            if config.option.waivers
            else ()
        )
        options = _options(config, config.stash[_CONTRACT])
        print(f"build {options.build}: meeting the models ...", flush=True)
        session = config.stash[_SESSION] = prepare(options, config.stash[_CONTRACT]).expecting(known)
        config.pluginmanager.register(
            _Controller(config, session, config.stash[_CONTRACT], known, waivers), "conformance-controller"
        )
    except (UsageError, SpecError, ReportError) as error:
        pytest.exit(str(error), returncode=2)


def _options(config: pytest.Config, specs: Contract) -> Options:
    profile = config.option.profile or specs.default_profile
    if profile not in specs.profiles:
        raise UsageError(f"--profile {profile!r}: no such profile; choose from {', '.join(specs.profiles)}")
    if config.option.threads < 1:
        raise UsageError(f"--threads {config.option.threads}: give a number of threads, 1 or more")
    n_workers = getattr(config.option, "numprocesses", None) or 1
    if n_workers < 1:
        raise UsageError(f"-n {n_workers}: give a number of processes, 1 or more, or auto")
    if config.option.threads * n_workers > _THREADS_PER_CORE * (os.cpu_count() or 1):
        raise UsageError(
            f"--threads {config.option.threads} in {n_workers} process(es): more than {_THREADS_PER_CORE} threads for each "
            f"of {os.cpu_count()} cores; they would wait for each other"
        )
    if not config.option.report:
        raise UsageError("--report: no folder named; name one that can be written")
    cases = _recorded(Path(config.option.cases)) if config.option.cases else None
    if config.option.budget is not None and not config.option.budget > 0:
        raise UsageError(f"--budget {config.option.budget:g}: give a number of minutes above 0")
    report = config.invocation_params.dir / config.option.report
    try:
        report.mkdir(parents=True, exist_ok=True)
        (report / CASES_NAME).touch()
    except OSError as error:
        raise UsageError(f"--report {report}: {error.strerror}; name a folder that can be written") from None
    shard = None
    if config.option.shard is not None:
        try:
            shard = Shard.named(config.option.shard)
        except ValueError as error:
            raise UsageError(f"--shard {config.option.shard}: {error}") from None
    build = config.option.build
    return Options(
        build=str(Path(build).expanduser().resolve()) if Path(build).expanduser().exists() else build,
        models=tuple(config.option.model),
        architectures=tuple(config.option.arch),
        profile=profile,
        report=report,
        seed=config.option.seed,
        fault=config.option.inject_fault,
        n_threads=config.option.threads,
        cases=cases,
        budget_minutes=config.option.budget,
        n_workers=n_workers,
        shard=shard,
    )


def _recorded(path: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The cases in a recording, by (id, model) in the order they were drawn."""
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    advice = f"give the {CASES_NAME} of an earlier report"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"--cases {path}: {error.strerror}; {advice}") from None
    checks = every_check()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            checks[entry["id"]].case(**entry["case"])
            cases.setdefault((entry["id"], str(entry["model"])), []).append(entry["case"])
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"--cases {path}:{number}: not a case of a check of this suite; {advice}") from None
    if not cases:
        raise UsageError(f"--cases {path}: holds no case; {advice}")
    return cases


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """As many workers as there are cores, and as the largest model fits into free memory."""
    if not _examines(config):
        return None
    sizes = [path.stat().st_size for name in config.option.model if (path := Path(name).expanduser()).is_file()]
    by_memory = int(psutil.virtual_memory().available // (GIB + 2 * max(sizes, default=0)))
    threads: int = config.option.threads
    return max(1, min((os.cpu_count() or 1) // max(threads, 1), by_memory))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the prepared session to a worker."""
    if _SESSION in node.config.stash:
        node.workerinput[_PROPERTY] = pickle.dumps(node.config.stash[_SESSION])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item for each pair of invariant and model that applies."""
    if "exam" not in metafunc.fixturenames:
        return
    session = metafunc.config.stash.get(_SESSION, None)
    check = metafunc.function.check
    models = [model for id, model in session.pairs() if id == check.id] if session else []
    metafunc.parametrize("exam", models, indirect=True, ids=[_bracket(check.id, model) for model in models])


def _refuse_loose_ends(specs: Contract) -> None:
    """Raise SpecError while specs and tests do not match, whichever of them this run selects."""
    tests = every_test()
    problems = untied(specs, REGISTRY, tests)
    for test in tests:
        if hasattr(test, "check") and test.check.id in specs.invariants:
            mismatch = test.check.case.mismatch(specs[test.check.id])
            problems += [f"{specs.origins[test.check.id].where}: {mismatch}"] if mismatch else []
    if problems:
        raise SpecError(problems)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the slowest models first; a check that is left for no model is no item."""
    if _SESSION in config.stash:
        order = {_bracket(*pair): place for place, pair in enumerate(config.stash[_SESSION].pairs())}
        applicable = [item for item in items if _in_brackets(item.nodeid) in order]
        items[:] = sorted(applicable, key=lambda item: order[_in_brackets(item.nodeid)])


def _bracket(id: str, model: str) -> str:
    """What an item has in its brackets: letters that pytest leaves as they are."""
    return re.sub(r"[^A-Za-z0-9/._-]", lambda match: f"~{ord(match[0]):x}", f"{id}-{model}")


def _in_brackets(nodeid: str) -> str:
    return nodeid.partition("[")[2].removesuffix("]")


@pytest.fixture(scope="session")
def engine_child(pytestconfig: pytest.Config) -> Iterator[Child]:
    """The process in which the build runs, kept warm between checks."""
    with child_for([look.subject.path for look in pytestconfig.stash[_SESSION].looks]) as child:
        yield child


@pytest.fixture
def exam(request: pytest.FixtureRequest, engine_child: Child) -> Any:
    """Takes a check on one model and turns its outcome into pytest's."""
    return _Exam(request, engine_child)


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )


def _examined(config: pytest.Config, child: Child, check: BoundCheck, model: str) -> Check:
    """Run one check on one model."""
    session, specs = config.stash[_SESSION], config.stash[_CONTRACT]
    options = session.options
    look, sizing = session.look(model), session.sizings[check.id, model]
    assert look.acquaintance is not None
    assert sizing is not None
    recording = options.report / CASES_NAME
    profile = specs.profiles[options.profile]
    if (check.id, model) in session.expected_failures:
        profile = profile.model_copy(update={"shrink_seconds": 0.0})

    def note_case(case: Case) -> None:
        line = json.dumps({"id": check.id, "model": model, "case": case.model_dump()})
        try:
            with recording.open("a") as stream:
                stream.write(line + "\n")
        except OSError:
            pass  # the controller meets the same disk and says so

    return Examination(
        setup=session.setup(model),
        model=model,
        invariant=sizing.invariant,
        profile=profile,
        examples=sizing.examples,
        seed=options.seed,
        acquaintance=look.acquaintance,
        ceiling=specs.ceilings[look.acquaintance.weights],
        child=child,
        recorded=None if options.cases is None else options.cases.get((check.id, model), []),
        database=None if options.fault else config.rootpath / ".hypothesis" / "conformance" / check.id / model,
        deadline=options.deadline,
        note_case=note_case,
    ).take(check)


class _Exam:
    def __init__(self, request: pytest.FixtureRequest, child: Child) -> None:
        self._request, self._child = request, child

    def take(self, check: BoundCheck) -> None:
        """Run the check, hand its result to the controller, fail the item unless it passed.

        Other workers may be at work beside this one: what must be measured alone is then left to the controller.
        """
        config, model = self._request.config, self._request.param
        session = config.stash[_SESSION]
        if hasattr(config, "workerinput") and config.stash[_CONTRACT][check.id].alone:
            self._request.node.user_properties.append((_POSTPONED, json.dumps([check.id, model])))
            return
        result = _examined(config, self._child, check, model)
        self._request.node.user_properties.append((_PROPERTY, result.model_dump_json()))
        if result.verdict != "PASS":
            expected = (check.id, model) in session.expected_failures and result.verdict != "UNKNOWN"
            (pytest.xfail if expected else pytest.fail)(f"{result.verdict}: {result.reason}")


class _Controller:
    """Writes results as reports arrive, shows them, and decides the exit code."""

    def __init__(
        self,
        config: pytest.Config,
        session: Session,
        specs: Contract,
        known: tuple[Known, ...],
        waivers: tuple[Waiver, ...],
    ) -> None:
        self._config, self._session, self._known, self._waivers = config, session, known, waivers
        self._kinds: dict[str, Collection[Kind]] = {
            look.subject.name: look.subject.kinds or () for look in session.looks
        }
        self._begin = time.perf_counter()
        self._notes: list[str] = []
        self._postponed: list[tuple[str, str]] = []
        self._results: Results | None = None
        self._checks: list[Check] = []
        self._progress = Progress(session.options.report / CASES_NAME, session.sizings, self._say)
        self._today = datetime.now(UTC).date()
        planned, others = session.plan(specs)
        # What the first look found is no known failure of a check, but a user may waive it.
        checks = [waive(self._waivers, check, self._kinds, self._today) for check in planned]
        self._total = sum(not check.has_run for check in checks)
        self._planned = {_bracket(check.id, check.model): check for check in checks}
        options = session.options
        self._writer = ResultsWriter(
            options.report,
            checks,
            build=session.identity,
            suite={"name": "llama-conformance", "version": metadata.version("llama-conformance")},
            settings={
                "profile": options.profile,
                "seed": options.seed,
                "threads": options.n_threads,
                "strict_timing": config.option.strict_timing,
                "timing": not config.option.no_timing,
                "fault": options.fault,
                **({"shard": str(options.shard)} if options.shard else {}),
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "models": {
                    look.subject.name: {
                        "path": str(look.subject.path),
                        "digest": file_digest(look.subject.path),
                        "kinds": sorted(look.subject.kinds or ()),
                        "capabilities": sorted(look.subject.capabilities),
                        "measured": None if look.acquaintance is None else look.acquaintance.as_record(),
                    }
                    for look in session.looks
                },
            },
            not_applicable=others,
        )
        (options.report / CASES_NAME).write_text("")

    def pytest_sessionstart(self) -> None:
        self._progress.start()

    def _budget_notes(self) -> list[str]:
        """What the budget left out, in one line."""
        minutes = self._session.options.budget_minutes
        if minutes is None:
            return []
        sizings = self._session.sizings
        reduced = {pair: sizing.note for pair, sizing in sizings.items() if sizing and sizing.note}
        cut = [check for check in self._checks if getattr(check.detail, "left_out", None)]
        gone = sum(sizing is None for sizing in sizings.values()) + sum(
            check.verdict == "SKIPPED" for check in self._checks
        )
        line = f"--budget {minutes:g}: {len(reduced)} of {len(sizings)} searches made smaller, {gone} left out, {len(cut)} cut short"
        if reduced:
            (id, model), note = next(iter(reduced.items()))
            line += f" (for example {id} on {model}: {note})"
        return [line]

    def _sweep_notes(self) -> list[str]:
        """Which architectures were not swept, in one line."""
        unmade = self._session.unmade
        if not unmade:
            return []
        reasons = "; ".join(f"{arch} ({reason})" for arch, reason in unmade.items())
        return [f"{len(unmade)} architectures were not swept, since no model of them could be made: {reasons}"]

    def pytest_report_header(self) -> list[str]:
        identity, options = self._session.identity, self._session.options
        return [
            f"build: {identity['version']} ({identity['library']}, digest {identity['digest']}, layout {identity['context_layout']})",
            f"profile: {options.profile}, seed {options.seed}, {self._total} checks on {len(self._session.looks)} models"
            + (f"; PLANTED FAULT {options.fault}" if options.fault else ""),
            f"expected (computed from the measured speeds): {_duration(self._session.expected_seconds)} on {options.n_workers} process(es)",
        ]

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No dots: each check gets a line of its own."""
        names = [name for name, _ in report.user_properties] if report.when == "call" else []
        if _POSTPONED in names:
            return "", "", ""
        if _PROPERTY in names:
            return "xfailed" if hasattr(report, "wasxfail") else report.outcome, "", ""
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store a check's result; where a worker died or the suite failed, say so on that check's line."""
        found = [value for name, value in report.user_properties if name == _PROPERTY]
        if report.when == "call":
            for name, value in report.user_properties:
                if name == _POSTPONED:
                    id, model = json.loads(str(value))
                    self._postponed.append((id, model))
        if report.when == "call" and found:
            self._record(Check.model_validate_json(str(found[0])))
        elif report.failed and (planned := self._planned.get(_in_brackets(report.nodeid))):
            verdict: Verdict = "UNKNOWN" if report.when in ("setup", "call", "teardown") else "CRASH"  # a dead worker's
            reason = f"the suite's own process failed: {report.longreprtext.strip()[-2000:]}"
            self._record(planned.settled(verdict, reason=reason))

    def _take_postponed(self) -> None:
        """Measure one by one what must run alone; the workers have ended."""
        if not self._postponed:
            return
        checks = every_check()
        with child_for([look.subject.path for look in self._session.looks]) as child:
            for id, model in sorted(self._postponed, key=self._session.pairs().index):
                self._record(_examined(self._config, child, checks[id], model))

    def _record(self, check: Check) -> None:
        check = self._excused(check)
        self._checks.append(check)
        self._writer.record(check)
        self._progress.heard()
        line = f"[{len(self._checks)}/{self._total}] {check.verdict:7} {check.id} {check.model}: {check.examples} cases"
        self._say(f"{line}, {check.seconds:.1f} s", red=check.verdict in ("FAIL", "CRASH", "TIMEOUT"))

    def _say(self, line: str, *, red: bool = False) -> None:
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            reporter.showfspath = False
            reporter.ensure_newline()
            reporter.write_line(line, red=red)

    def _excused(self, check: Check) -> Check:
        """The check, as KNOWN where a known failure or a waiver explains it."""
        return waive(self._waivers, self._recognised(check), self._kinds, self._today)

    def _recognised(self, check: Check) -> Check:
        """The check, as KNOWN where an entry explains its failure; an entry whose failure is gone is noted."""
        entry = self._session.known(self._known, check.id, check.model)
        if entry is None:
            return check
        if check.verdict == "PASS":
            if not self._session.look(check.model).subject.is_made:  # what a kind shows, not every architecture must
                self._notes.append(entry.cured(check.model))
        elif entry.explains(check.verdict):
            return check.excuse(f"{entry.reason}: {entry.entry.note}", entry.where, entry.entry.upstream)
        return check

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Take what was postponed, finish the report and let its verdict be the exit code."""
        judged = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        interrupted = session.exitstatus not in judged and not session.shouldfail
        if not interrupted and not session.shouldfail:
            try:
                self._take_postponed()
            except KeyboardInterrupt:
                interrupted = True
        self._progress.stop()
        if interrupted:
            self._writer.problems.append("the run was interrupted; run it again")
        self._notes += waiver_notes(self._waivers, self._checks, self._kinds, self._today)
        self._notes += self._budget_notes()
        self._notes += self._sweep_notes()
        try:
            write_report(self._writer.results(self._notes), self._session.options.report)
        except ReportError as error:
            self._writer.problems.append(str(error))
        self._results = self._writer.finish(self._notes)
        session.exitstatus = self._results.summary.exit_code

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The table, what failed and how to replay it, the verdict."""
        if self._results is None:
            return
        terminalreporter.section("conformance")
        print_results(
            self._results,
            Console(file=terminalreporter._tw._file, width=terminalreporter._tw.fullwidth, highlight=False),
        )
        terminalreporter.write_line(
            f"report: {self._session.options.report}  ({time.perf_counter() - self._begin:.1f} s)"
        )
