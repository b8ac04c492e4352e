"""Standard output that is closed, that nobody reads, or that is full: no traceback, and a run stores what it found."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run

import flashtune
from flashtune.tuned_db.store.store import Store

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
from flashtune.cli.main import main
from flashtune.tuner.tune import session

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


EAGER = {
    "-h": ["-h"],
    "help of a command": ["tune", "--help"],
    "help of a group": ["db", "--help"],
    "help of its command": ["db", "merge", "-h"],
    "completion": ["info"],
}
full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")


def _to_full(
    words: list[str], *, stderr: bool = False, unbuffered: bool = False, program: list[str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command whose standard output, or standard error, is a device that is full."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCES), str(Path(__file__).parent / "tuner")])}
    environment.pop("PYTHONUNBUFFERED", None)
    if unbuffered:
        environment["PYTHONUNBUFFERED"] = "1"
    with Path("/dev/full").open("w") as device:
        return subprocess.run(
            [sys.executable, *(program or ["-m", "flashtune"]), *words], text=True, check=False, env=environment,
            stdout=subprocess.PIPE if stderr else device, stderr=device if stderr else subprocess.PIPE,
        )  # fmt: skip


@full
@pytest.mark.parametrize("which", [*PRINTING, *EAGER])
def test_output_that_can_not_be_written_is_one_line(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """m4: whatever prints, an option that ends the command at once too, and a variable that does."""
    words = {**PRINTING, **EAGER}[which]
    if which == "completion":
        monkeypatch.setenv("_FLASHTUNE_COMPLETE", "bash_source")
    done = _to_full(words, program=["-c", UNCOMPILED] if "tune" in words and "--help" not in words else None)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "Error: No space left on device: standard output"
    assert "Traceback" not in done.stderr
    if "tune" not in words:
        assert done.stderr.count("\n") == 1


@full
@pytest.mark.parametrize("which", ["help", "explain", "source"])
def test_output_without_a_buffer_is_told_of_likewise(which: str) -> None:
    """m4: nothing is left in a buffer then, by which the output could be known."""
    done = _to_full(PRINTING[which], unbuffered=True)
    assert (done.returncode, done.stderr) == (1, "Error: No space left on device: standard output\n")


@full
@pytest.mark.parametrize(
    ("words", "code"),
    [(["list", "--db", "/nowhere.db"], 1), (["explain"], 2), (PRINTING["tune"], 0), (PRINTING["json"], 0)],
    ids=["error", "misuse", "tune", "json"],
)
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "full"])
def test_what_can_not_be_told_on_standard_error_changes_nothing(words: list[str], code: int, closed: bool) -> None:
    program = ["-c", UNCOMPILED]
    if closed:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SOURCES), str(Path(__file__).parent / "tuner")]),
        }
        start = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable]
        done = subprocess.run(
            [*start, *program, *words], stdout=subprocess.PIPE, text=True, check=False, env=environment
        )
    else:
        done = _to_full(words, stderr=True, program=program)
    assert done.returncode == code
    assert bool(done.stdout) == (code == 0)


def test_a_pipe_of_the_system_is_not_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """m5 and F13: an error without the name of a file is about the output only where it was written to."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("flashtune.cli.show.show_info", fail)
    for number in (errno.EPIPE, errno.ENOSPC, errno.EROFS, errno.ENOMEM):
        assert run("info", code=1).output == f"Error: {os.strerror(number)}\n"


@pytest.mark.parametrize("name", ["a b.db", b"\xe9.db", "line\nline", 7], ids=repr)
def test_a_file_of_an_error_is_named(name: str | bytes | int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EACCES, "Permission denied", name)

    shown = {b"\xe9.db": "\\xe9.db", "line\nline": "line\\nline"}.get(name, str(name))  # type: ignore[arg-type]
    monkeypatch.setattr("flashtune.cli.show.show_info", fail)
    assert run("info", code=1).output == f"Error: Permission denied: {shown}\n"


def test_the_end_of_a_file_is_no_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise EOFError("Compressed file ended")

    monkeypatch.setattr("flashtune.cli.show.show_info", fail)
    assert run("info", code=1).output == "Error: Compressed file ended\n"


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("flashtune.cli.show.show_info", fail)
    assert run("info", code=1).output == "Error: there is not enough memory\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_text_can_be_written_in_any_encoding(tmp_path: Path, encoding: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONIOENCODING": encoding}
    name = "\xe4\u65e5\udce9.db"
    environment["FLASHTUNE_DB"] = str(tmp_path / name)
    for words, code in ((["info"], 0), (["list"], 1)):
        done = subprocess.run(
            [sys.executable, "-m", "flashtune", *words], capture_output=True, check=False, env=environment
        )
        assert done.returncode == code
        assert b"Traceback" not in done.stderr
        shown = (done.stdout + done.stderr).decode(encoding)
        assert ".db" in shown
        assert ("\u65e5" in shown) == (encoding == "utf-8")
