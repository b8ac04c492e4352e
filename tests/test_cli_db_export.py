"""Where `flashtune db export` writes: whole files, streams as they are, and never through links of somebody else."""

from __future__ import annotations

import errno
import functools
import gzip
import os
import shlex
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import run

import flashtune
from flashtune import files
from flashtune.tuned_db.exchange.export_file import read_export, write_export
from flashtune.tuned_db.store.store import Store

call = functools.partial(run, "db")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, sound: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which exports go; the database is elsewhere."""
    monkeypatch.setenv("FLASHTUNE_DB", str(sound))
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    return tmp_path / "folder"


@pytest.fixture(scope="module")
def wanted(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of the export."""
    path = tmp_path_factory.mktemp("wanted") / "x.jsonl"
    call("export", path, "--db", sound)
    return path.read_bytes()


def shell(script: str, *words: str | Path) -> subprocess.CompletedProcess[bytes]:
    """A shell script in which ``ft`` is `flashtune db`."""
    ft = f'ft() {{ {shlex.quote(sys.executable)} -m flashtune db "$@"; }}; '
    command = ["sh", "-c", ft + script, "sh", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(Path(flashtune.__file__).parents[1])}
    return subprocess.run(command, capture_output=True, env=environment, timeout=600, check=False)


@pytest.mark.parametrize("name", ["h200.jsonl", "h200.jsonl.gz"])
def test_links_under_names_that_can_be_foreseen_lead_nowhere(
    folder: Path, tmp_path: Path, key: Callable[[str], Path], name: str
) -> None:
    """C3: links travel in repositories; the unfinished file was always called ``.NAME.tmp``."""
    mine = tmp_path / ".bashrc"
    mine.write_text("mine\n")
    links = [f".{name}.tmp", f".{name}.sig.tmp", f"{name}.tmp", f"{name}.sig.tmp"]
    for each in links:
        (folder / each).symlink_to(mine)
    call("export", name, "--sign", key("mine"))
    assert mine.read_text() == "mine\n"
    assert sorted(each.name for each in folder.iterdir() if not each.is_symlink()) == [name, f"{name}.sig"]
    assert len(read_export(folder / name).measurements) > 0


def test_a_link_at_the_name_itself_is_never_written_through(folder: Path, tmp_path: Path, wanted: bytes) -> None:
    """C3."""
    for name, content in (("text", b"mine\n"), ("other.jsonl", wanted)):
        (tmp_path / name).write_bytes(content)
    for name in ("text", "other.jsonl", "none"):
        (folder / f"to-{name}").symlink_to(tmp_path / name)
    for name in ("text", "none"):
        assert f"to-{name} exists and is no flashtune export" in call("export", f"to-{name}", code=1).output
        assert (folder / f"to-{name}").is_symlink()
    before = (tmp_path / "other.jsonl").stat()
    call("export", "to-other.jsonl")  # as any export that is there it is replaced, and what it led to stays
    assert not (folder / "to-other.jsonl").is_symlink()
    assert os.path.samestat((tmp_path / "other.jsonl").stat(), before)
    assert (tmp_path / "text").read_bytes() == b"mine\n"
    assert not (tmp_path / "none").exists()


def test_what_is_no_export_is_left_as_it_is(folder: Path) -> None:
    (folder / "notes").write_text("mine")
    (folder / "sub").mkdir()
    assert "notes exists and is no flashtune export" in call("export", "notes", code=1).output
    assert "is a directory" in call("export", "sub", code=2).output
    assert (folder / "notes").read_text() == "mine"
    assert sorted(each.name for each in folder.iterdir()) == ["notes", "sub"]


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_an_export_is_for_others_as_the_umask_says(folder: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        call("export", "x.jsonl")
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "x.jsonl").stat().st_mode) == 0o666 & ~mask


def _export_often(database: Path, path: Path, start: threading.Event) -> None:
    with Store.open(database, readonly=True) as store:
        rows = store.measurements()
    start.wait()
    for count in range(1, 40):
        write_export(rows[:count], path, origin="x")


def test_exports_to_one_name_at_once_are_each_whole(folder: Path, sound: Path) -> None:
    """F7, M5: three processes shared one temporary name, so one failed now and then and files were mixed."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    start, path = context.Event(), folder / "team.jsonl"
    writers = [context.Process(target=_export_often, args=(sound, path, start)) for _ in range(3)]
    for writer in writers:
        writer.start()
    start.set()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            read_export(path)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert len(read_export(path).measurements) == 39
    assert [each.name for each in folder.iterdir()] == ["team.jsonl"]


def test_standard_output_gets_the_export_and_nothing_else(folder: Path, wanted: bytes) -> None:
    """F10."""
    rows = wanted.count(b"\n") - 1
    done = shell("ft export -; ft export /dev/stdout")
    assert done.returncode == 0, done.stderr
    assert done.stdout == 2 * wanted
    assert done.stderr.decode().splitlines() == [f"{rows} measurements written to /dev/stdout"] * 2
    done = shell('{ echo first; ft export -; ft export /dev/stdout; echo last; } > "$1"', "out.txt")
    assert done.returncode == 0, done.stderr
    assert (folder / "out.txt").read_bytes() == b"first\n" + 2 * wanted + b"last\n"
    assert [each.name for each in folder.iterdir()] == ["out.txt"]


def test_an_export_goes_from_machine_to_machine_without_a_file(tmp_path: Path, wanted: bytes) -> None:
    """F10."""
    rows = wanted.count(b"\n") - 1
    done = shell('ft export - | ft import - --db "$1"; ft export - --db "$1"', tmp_path / "new.db")
    assert f"/dev/stdin: {rows} new measurements" in done.stdout.decode(), done.stderr
    assert "/dev/stdin: not signed" in done.stderr.decode()
    assert done.stdout.endswith(wanted[wanted.index(b"\n") :])


def test_a_reader_that_has_seen_enough_ends_it(wanted: bytes) -> None:
    """F10: it waited for ever."""
    for place in ("-", "/dev/stdout"):
        done = shell('ft export "$1" | head -c 50', place)
        assert (done.stdout, done.stderr) == (wanted[:50], b"")


@pytest.mark.parametrize("name", ["pipe", "pipe.gz"])
def test_a_pipe_gets_the_export(folder: Path, wanted: bytes, name: str) -> None:
    """F10."""
    os.mkfifo(folder / name)
    got: list[bytes] = []
    reader = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK)
    other_writer = os.open(folder / name, os.O_WRONLY)  # without one a pipe is at its end
    os.set_blocking(reader, True)

    def read() -> None:
        with open(reader, "rb") as file:
            got.append(file.read())

    thread = threading.Thread(target=read)
    thread.start()
    said = call("export", name)
    os.close(other_writer)
    thread.join()
    assert gzip.decompress(got[0]) == wanted if name.endswith(".gz") else got[0] == wanted
    assert (said.stdout, name in said.stderr) == ("", True)
    assert stat.S_ISFIFO((folder / name).stat().st_mode)


def test_what_nobody_reads_and_what_is_closed_is_one_line(folder: Path, sound: Path) -> None:
    """F10, m3: nothing waits. With standard output closed its number is that of the next file to be opened."""
    os.mkfifo(folder / "pipe")
    before = sound.read_bytes()
    for script, message in (
        ("ft export pipe", "Error: nobody reads this pipe: pipe\n"),
        ("ft export - >&-", "Error: Bad file descriptor: /dev/stdout\n"),
        ("ft export /dev/stdout >&-", "Error: Bad file descriptor: /dev/stdout\n"),
        ("ft export /dev/full", f"Error: {os.strerror(errno.ENOSPC)}: /dev/full\n"),
        (
            "ft export - --sign mine.pem > /dev/null",
            "Error: --sign writes its signature beside a file, and /dev/stdout is none\n",
        ),
    ):
        (folder / "mine.pem").touch()
        done = shell(script)
        assert (done.returncode, done.stdout, done.stderr.decode()) == (1, b"", message)
    assert sound.read_bytes() == before


@pytest.mark.parametrize(
    "words",
    [["export", ""], ["export", " "], ["import", ""], ["backup", ""], ["diff", "", "x"], ["merge", ""]],
    ids=str,
)
def test_an_empty_path_is_named_as_one(words: list[str]) -> None:
    """m2: ``db export ''`` was a traceback."""
    output = call(*words, code=2).output
    assert "must be the path of a file, and is empty" in output


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the disk full for the file that is written whole after so many others."""

    def fill(after: int) -> None:
        left = [after]

        def fsync(descriptor: int, real: Callable[[int], None] = os.fsync) -> None:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        monkeypatch.setattr(files.os, "fsync", fsync)

    return fill


@pytest.mark.parametrize("after", [0, 1])
def test_a_full_disk_leaves_nothing_behind_and_is_named_with_the_file(
    folder: Path, key: Callable[[str], Path], full: Callable[[int], None], after: int
) -> None:
    """m5: all that fitted was left, and the message named "the output"."""
    full(after)
    output = call("export", "x.jsonl", "--sign", key("mine"), code=1).output
    assert output == f"Error: {os.strerror(errno.ENOSPC)}: {['x.jsonl', 'x.jsonl.sig'][after]}\n"
    assert [each.name for each in folder.iterdir()] == ["x.jsonl"][:after]


def test_a_missing_folder_is_named_by_the_path_that_was_given() -> None:
    """F7: it was called ``nodir/.x.jsonl.tmp``."""
    assert call("export", "nodir/x.jsonl", code=1).output == f"Error: {os.strerror(errno.ENOENT)}: nodir/x.jsonl\n"
