"""Tiers of tests that need more than Python: which can't run here and why; and ``--all-tiers``, as CI runs them.

Where a tier is missing its tests are left out, with one line that says why. With the option nothing is left out but
what needs a GPU: a missing tier stops the run, and a test that is skipped fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from postgres_server import missing as no_server

ON_GPU = Path(__file__).parent / "gpu"
OPTION = "--all-tiers"


def no_compiler() -> str:
    """Why kernels can't be emulated here; empty where they can."""
    from flashtune.emulator.build import find_compiler
    from flashtune.errors import MissingDependency

    try:
        find_compiler()
    except MissingDependency as error:
        return str(error)
    return ""


def is_emulated(item: pytest.Item) -> bool:
    return item.get_closest_marker("emulate") is not None


def _needs_server(item: pytest.Item) -> bool:
    """Whether a test runs on PostgreSQL; see tests/tuned_db/postgres_server.py."""
    call = getattr(item, "callspec", None)
    return "cluster" in getattr(item, "fixturenames", ()) or (call is not None and call.params.get("store") == "server")


TIERS: dict[str, tuple[Callable[[pytest.Item], bool], Callable[[], str]]] = {
    "Tests marked emulate": (is_emulated, no_compiler),
    "Tests on PostgreSQL": (_needs_server, no_server),
}
"""Which tests they are, and why they can't run here. Other tiers skip their own tests: see `pytest.importorskip`."""


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION,
        action="store_true",
        help="leave out nothing but what needs a GPU: a tier that is missing stops the run, a test that is skipped "
        "fails. At the end, seconds by folder",
    )


def pytest_configure(config: pytest.Config) -> None:
    absent = [f"{name} can't run: {reason}" for name, (_, missing) in TIERS.items() if (reason := missing())]
    if absent and config.getoption(OPTION):
        raise pytest.UsageError(f"{OPTION}: {'; '.join(absent)}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for belongs, missing in TIERS.values():
        out = [item for item in items if belongs(item)]
        if out and missing():
            items[:] = [item for item in items if item not in out]
            config.hook.pytest_deselected(items=out)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("gpu") is None:
        _fail(item.config, report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and not collector.path.is_relative_to(ON_GPU):
        _fail(collector.config, report)
    return report


def _fail(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    if config.getoption(OPTION):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"with {OPTION} nothing is skipped. {why}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for name, (_, missing) in TIERS.items():
        if reason := missing():
            terminalreporter.write_line(f"{name} are left out: {reason}")
    if config.getoption(OPTION):
        terminalreporter.section("seconds by folder, of all workers together")
        for folder, seconds in _seconds(terminalreporter).most_common():
            terminalreporter.write_line(f"{seconds:8.1f}  {folder}")


def _seconds(terminalreporter: pytest.TerminalReporter) -> Counter[str]:
    found: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for each in reports:
            if isinstance(each, pytest.TestReport):
                found[Path(each.nodeid.partition("::")[0]).parent.as_posix()] += each.duration
    return found
