"""The one way into a file of somebody else, and the one way to write a file whole: src/flashtune/files.py."""

from __future__ import annotations

import errno
import multiprocessing
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune import files
from flashtune.errors import InvalidInput
from flashtune.files import SHARED, open_regular, read_given, read_regular, shown_path, write_whole


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=["folder", "pipe", "socket", "device"])
def special(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A path that is no regular file, and what it is."""
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    match request.param:
        case "folder":
            Path("it").mkdir()
        case "pipe":
            os.mkfifo("it")
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind("it")
        case "device":
            return "/dev/zero", "a device"
    return "it", f"a {request.param}"


def test_only_a_regular_file_is_opened(special: tuple[str, str]) -> None:
    path, kind = special
    with pytest.raises(InvalidInput, match=f"^export {path} is {kind}, not a file$"):
        open_regular(path, "export")


def test_what_is_missing_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


def test_a_link_is_followed_unless_that_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 4) == b"text"
    with pytest.raises(OSError, match="symbolic links") as caught:
        open_regular(tmp_path / "link", links=False)
    assert caught.value.errno == errno.ELOOP


def test_a_limit_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", 5) == b"12345"
    with pytest.raises(InvalidInput, match=r"key .*file has more than 4 bytes"):
        read_regular(tmp_path / "file", 4, "key")


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_a_new_file_has_the_mode_that_was_asked_for(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        write_whole(tmp_path / "own", b"1")
        write_whole(tmp_path / "given", b"1", mode=SHARED)
    assert mode(tmp_path / "own") == 0o600
    assert mode(tmp_path / "given") == 0o666 & ~mask


@pytest.mark.parametrize("given", [0o640, 0o777, *(0o600 | 1 << bit for bit in range(9))], ids=oct)
def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path, given: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(given)
    write_whole(path, b"new", mode=SHARED)
    assert (path.read_bytes(), mode(path)) == (b"new", given)


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    """C3, F7: links travel in repositories."""
    (tmp_path / "mine").write_bytes(b"mine")
    for name in ("export", ".export.tmp"):
        (tmp_path / name).symlink_to("mine")
    write_whole(tmp_path / "export", b"new")
    assert (tmp_path / "mine").read_bytes() == b"mine"
    assert not (tmp_path / "export").is_symlink()
    assert (tmp_path / "export").read_bytes() == b"new"


def test_a_temporary_name_that_is_taken_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        hex = "known"

    monkeypatch.setattr(files.uuid, "uuid4", Known)
    (tmp_path / ".x.known.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "x", b"new")
    assert not (tmp_path / "victim").exists()
    assert (tmp_path / ".x.known.tmp").is_symlink()  # not ours, so not removed either


def test_what_fails_leaves_nothing_and_names_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(tmp_path / "x.jsonl", b"new")
    assert caught.value.filename == str(tmp_path / "x.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named_by_the_path_that_was_given(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(tmp_path / "none" / "x.jsonl", b"new")
    assert caught.value.filename == str(tmp_path / "none" / "x.jsonl")


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    got: list[bytes] = []
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    other_writer = os.open(tmp_path / "pipe", os.O_WRONLY)  # without one a pipe is at its end
    os.set_blocking(reader, True)

    def read() -> None:
        with open(reader, "rb") as file:
            got.append(file.read())

    thread = threading.Thread(target=read)
    thread.start()
    write_whole(tmp_path / "pipe", b"x" * 200_000)  # more than a pipe holds
    os.close(other_writer)
    thread.join()
    assert got == [b"x" * 200_000]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_pipe_that_nobody_reads_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="nobody reads this pipe") as caught:
        write_whole(tmp_path / "pipe", b"new")
    assert caught.value.errno == errno.ENXIO


def inherited(file: IO[bytes], name: str = "/dev/fd/") -> str:
    """The path of a descriptor that a child would have, as it has those that it was started with."""
    os.set_inheritable(file.fileno(), True)
    return f"{name}{file.fileno()}"


@pytest.mark.parametrize("name", ["/dev/fd/", "/proc/self/fd/"])
def test_a_descriptor_of_the_process_is_written_to_even_where_a_file_is_behind_it(tmp_path: Path, name: str) -> None:
    """F10: as with ``flashtune db export /dev/stdout > file``: it is no new file, and what is there stays."""
    with (tmp_path / "out").open("wb") as file:
        file.write(b"what was ")
        file.flush()
        write_whole(inherited(file, name), b"there, ")
        write_whole(inherited(file, name), b"and more")
    assert (tmp_path / "out").read_bytes() == b"what was there, and more"


def test_a_link_to_a_descriptor_of_the_process_is_a_link(tmp_path: Path) -> None:
    """C3: in somebody's folder it would lead into what this process has open, such as the tuning database."""
    with (tmp_path / "mine").open("wb") as file:
        (tmp_path / "link").symlink_to(inherited(file))
        write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "mine").read_bytes() == b""
    assert not (tmp_path / "link").is_symlink()


def test_a_descriptor_that_this_process_opened_is_not_written_to(tmp_path: Path) -> None:
    """With standard output closed its number goes to the next file that is opened."""
    with (tmp_path / "mine").open("wb") as file:
        for use in (lambda path: write_whole(path, b"new"), lambda path: read_given(path, 100)):
            with pytest.raises(OSError, match="Bad file descriptor") as caught:
                use(f"/dev/fd/{file.fileno()}")
            assert caught.value.filename == f"/dev/fd/{file.fileno()}"
    assert (tmp_path / "mine").read_bytes() == b""


def test_a_link_to_a_pipe_or_a_device_is_replaced(tmp_path: Path) -> None:
    """C3: a link of somebody else to ``/dev/sda`` would be worse than one to a file."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    assert not files.is_stream(tmp_path / "link")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").read_bytes() == b"new"
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_streams_are_what_can_not_be_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"")
    streams = ["/dev/stdout", "/dev/fd/1", "/dev/null", tmp_path / "pipe"]
    assert [each for each in (*streams, tmp_path, tmp_path / "file", tmp_path / "none") if files.is_stream(each)] == (
        streams
    )


def test_a_folder_is_no_place_to_write_to(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        write_whole(tmp_path, b"new")
    assert caught.value.filename == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_left_alone_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no hard links on this file system")

    (tmp_path / "dangling").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    for link in (os.link, no_links):
        monkeypatch.setattr(files.os, "link", link)
        (tmp_path / "new").unlink(missing_ok=True)
        write_whole(tmp_path / "new", b"first", mode=SHARED, replace=False)
        for name in ("new", "dangling", "pipe"):
            with pytest.raises(FileExistsError) as caught:
                write_whole(tmp_path / name, b"second", replace=False)
            assert caught.value.filename == str(tmp_path / name)
        assert (tmp_path / "new").read_bytes() == b"first"
        assert sorted(each.name for each in tmp_path.iterdir()) == ["dangling", "new", "pipe"]


def test_what_a_user_gives_may_be_a_pipe_of_their_own(tmp_path: Path) -> None:
    """m3: as with ``--problems <(...)``; a pipe with a name might wait for ever."""
    reader, writer = os.pipe()
    with open(writer, "wb") as file:
        file.write(b"12345")
    with open(reader, "rb") as file:
        assert read_given(inherited(file), 5) == b"12345"
    reader, writer = os.pipe()
    with open(writer, "wb") as end, open(reader, "rb") as file:
        end.write(b"123456")
        end.flush()  # and is not closed: a limit ends what never ends
        with pytest.raises(InvalidInput, match=f"^key /dev/fd/{reader} has more than 5 bytes$"):
            read_given(inherited(file), 5, "key")
    (tmp_path / "file").write_bytes(b"12345")
    assert read_given(tmp_path / "file", 5) == b"12345"


def test_no_other_pipe_is_read(special: tuple[str, str]) -> None:
    """m3."""
    path, kind = special
    with pytest.raises(InvalidInput, match=f"^key {path} is {kind}, not a file$"):
        read_given(path, 5, "key")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (b"plain \xc3\xa9\xe6\x95\xb0.db", "plain \u00e9\u6570.db"),
        (b"caf\xe9", r"caf\xe9"),
        (b"a\nError: b", r"a\nError: b"),
        (b"\x1b]0;owned\x07\x1b[2J", r"\x1b]0;owned\x07\x1b[2J"),
        ("\u202egnp.exe \U000e0041".encode(), r"\u202egnp.exe \U000e0041"),
        (b"/" + b"x" * 6000, "/" + "x" * 6000),
    ],
)
def test_a_path_is_shown_so_that_it_can_be_printed(name: bytes, wanted: str) -> None:
    """m2."""
    for path in (name, os.fsdecode(name), Path(os.fsdecode(name))):
        assert shown_path(path) == wanted
    assert shown_path(name).isprintable()


@given(st.binary(max_size=50))
def test_any_path_is_one_line_of_any_output(name: bytes) -> None:
    """m2."""
    shown = shown_path(name)
    assert shown.isprintable()
    assert shown.encode("utf-8").decode("utf-8") == shown_path(shown) == shown


def test_a_relative_path_may_count_from_a_folder_that_is_open(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        write_whole("x", b"new", dir_fd=folder)
        with open_regular("x", dir_fd=folder, links=False) as file:
            assert file.read() == b"new"
    finally:
        os.close(folder)
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def _write_often(path: Path, letter: bytes) -> None:
    for _ in range(50):
        write_whole(path, letter * 100_000, durable=False)


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    """F7, M5: three processes shared one temporary name, and mixed their files."""
    context = multiprocessing.get_context("spawn")
    path = tmp_path / "x"
    writers = [context.Process(target=_write_often, args=(path, letter)) for letter in (b"a", b"b", b"c")]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            content = path.read_bytes()
            assert len(content) == 100_000
            assert content == content[:1] * 100_000
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert [each.name for each in tmp_path.iterdir()] == ["x"]
