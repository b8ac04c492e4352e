"""Options and fixtures for all tests, and the one line that says why emulate tests are left out."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden generated sources")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


def no_compiler() -> str:
    """Why kernels can't be emulated here; empty where they can."""
    from flashtune.codegen.emulator.build import find_compiler
    from flashtune.errors import MissingDependency

    try:
        find_compiler()
    except MissingDependency as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    emulated = [item for item in items if item.get_closest_marker("emulate")]
    if emulated and no_compiler():
        items[:] = [item for item in items if item not in emulated]
        config.hook.pytest_deselected(items=emulated)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if reason := no_compiler():
        terminalreporter.write_line(f"Tests marked emulate are left out: {reason}")
