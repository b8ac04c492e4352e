"""Standard output that is closed, that nobody reads, or that is full: no traceback, and a run stores what it found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashtune
from flashtune.tuned_db.store import Store

SOURCES = Path(flashtune.__file__).parents[1]
PROBLEM = ["--seqlen", "256", "--heads", "4", "--head-dim", "64", "--dtype", "float16"]
PRINTING = {
    "help": ["--help"],
    "version": ["--version"],
    "info": ["info"],
    "list": ["list", "--db", str(Path(__file__).parent / "upgrade_assets" / "v0001.db")],
    "explain": ["explain", "--gpu", "h100", *PROBLEM],
    "source": ["source", "--gpu", "h100", *PROBLEM],
    "tune": ["tune", "--gpu", "h100", "--mode", "predict", *PROBLEM, "--budget", "2", "--family", "sm80_fwd"],
}
PRINTING["json"] = [*PRINTING["tune"], "--json"]
UNCOMPILED = """
from tuner_fakes import FakeBuilder
from flashtune.cli import main
from flashtune.tuner import session

session.ProcessBuilder = lambda arch, workers: FakeBuilder()
main()
"""
"""The command line with a compiler that is none: a prediction needs no processes then, and takes no time."""


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "tuned.db"))
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "cache"))


def _printing(which: str, output: int | None) -> subprocess.CompletedProcess[str]:
    """Runs a command of `PRINTING` with this standard output, or a closed one, buffered as it is for users."""
    program = ["-c", UNCOMPILED] if "tune" in PRINTING[which] else ["-m", "flashtune"]
    paths = [SOURCES, Path(__file__).parent / "tuner"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment.pop("PYTHONUNBUFFERED", None)
    start = ["sh", "-c", 'exec "$@" >&-', "sh"] if output is None else []
    return subprocess.run(
        [*start, sys.executable, *program, *PRINTING[which]], stdout=output, stderr=subprocess.PIPE, text=True,
        check=False, env=environment,
    )  # fmt: skip


def _assert_quiet(which: str, done: subprocess.CompletedProcess[str]) -> None:
    """Nothing is said of the output, and what a run is told to store is stored."""
    if "tune" not in PRINTING[which]:
        assert done.stderr == ""
        return
    assert "compiled 2 of" in done.stderr.splitlines()[-1], done.stderr
    with Store.open(Path(os.environ["FLASHTUNE_DB"]), readonly=True) as store:
        assert len(store.predictions()) == 2


@pytest.mark.parametrize("which", PRINTING)
def test_a_reader_that_has_gone_is_no_traceback(which: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = _printing(which, writer)
    finally:
        os.close(writer)
    _assert_quiet(which, done)
    assert done.returncode == 1, "it has written to the pipe"


@pytest.mark.parametrize("which", PRINTING)
def test_closed_output_is_no_traceback(which: str) -> None:
    done = _printing(which, None)
    _assert_quiet(which, done)
    assert done.returncode == 0


def test_a_reader_that_leaves_after_a_line_gets_that_line() -> None:
    script = '("$PY" -m flashtune source --gpu h100 "$@"; echo $? >&2) | head -1'
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "PY": sys.executable}
    done = subprocess.run(
        ["sh", "-c", script, "sh", *PROBLEM], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout.count("\n") == 1
    assert done.stderr in ("0\n", "1\n"), "0 where all of it went into the pipe before the reader left"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("command", ["explain", "source"])
def test_output_that_can_not_be_written_is_one_line(command: str) -> None:
    script = f"from flashtune.cli import main; main({[command, '--gpu', 'h100', *PROBLEM]!r})"
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    environment.pop("PYTHONUNBUFFERED", None)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr
