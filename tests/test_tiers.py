"""What is left out where it can't run, and ``--all-tiers``: no test, but on a GPU, is left out without a failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CONFTEST = f"""
import os, sys
sys.path.extend({[str(HERE), str(HERE / "tuned_db"), str(HERE.parent / "src")]})
import tiers
from tiers import *

tiers.TIERS = {{"Tests marked emulate": (is_emulated, lambda: os.environ.get("MISSING", ""))}}

def pytest_addoption(parser):
    add_option(parser)
"""
TESTS = """
import pytest

def test_runs():
    pass

@pytest.mark.skipif(True, reason="for a reason")
def test_skipped():
    pass

def test_skips_itself():
    pytest.importorskip("no_such_module", reason="needs what is not there")

@pytest.mark.gpu
def test_on_a_gpu():
    pytest.skip("no GPU")

@pytest.mark.xfail
def test_expected_to_fail():
    raise ValueError

@pytest.mark.emulate
def test_emulated():
    pass
"""
MODULE = "import pytest; pytest.importorskip('no_such_module', reason='needs what is not there')"
Start = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n gpu: of a GPU\n emulate: of a compiler\n", encoding="utf-8"
    )

    def start(test: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "part").mkdir()
        (tmp_path / "part" / "test_it.py").write_text(test, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *options, "part"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | variables
        return subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, check=False)

    return start


@pytest.mark.parametrize("workers", ["0", "1"])
def test_what_is_skipped_fails_in_ci(start: Start, workers: str) -> None:
    done = start(TESTS, "--all-tiers", f"-n{workers}")
    assert done.returncode == 1, done.stdout
    assert re.search("=== 1 failed, 2 passed, 1 skipped, 1 xfailed, 1 error in", done.stdout), done.stdout
    assert "with --all-tiers nothing is skipped. Skipped: for a reason" in done.stdout
    assert "with --all-tiers nothing is skipped. Skipped: needs what is not there" in done.stdout
    assert re.search(r"seconds by folder.*\n +\d+\.\d  part\n", done.stdout)


def test_a_module_that_is_skipped_fails_in_ci(start: Start) -> None:
    done = start(MODULE, "--all-tiers")
    assert done.returncode == 2, done.stdout
    assert "with --all-tiers nothing is skipped. Skipped: needs what is not there" in done.stdout


def test_a_tier_that_is_missing_stops_ci_at_once(start: Start) -> None:
    done = start(TESTS, "--all-tiers", MISSING="there is no compiler")
    assert done.returncode == 4, done.stdout
    assert "--all-tiers: Tests marked emulate can't run: there is no compiler" in done.stderr


def test_elsewhere_it_is_left_out_and_told(start: Start) -> None:
    done = start(TESTS, MISSING="there is no compiler")
    assert done.returncode == 0, done.stdout
    assert re.search("=== 1 passed, 3 skipped, 1 deselected, 1 xfailed in", done.stdout), done.stdout
    assert "\nTests marked emulate are left out: there is no compiler\n" in done.stdout
