"""The way into the cache: what is in it runs, so only what this user alone can have written is used."""

from __future__ import annotations

import logging
import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flashtune.codegen.cache.cache_folder import (
    CUBINS,
    EMULATOR,
    FAILED,
    TEMPLATES,
    open_entry,
    read_entry,
    save_entry,
    write_entry,
)
from flashtune.errors import InvalidInput

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions of POSIX"),
    pytest.mark.usefixtures("root"),
]

KINDS = (CUBINS, TEMPLATES, EMULATOR, FAILED)
MASKS = (0o022, 0o002, 0o000, 0o077)
NOBODY = 65534

GiveAway = Callable[[Path], None]


@pytest.fixture
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache where none is named."""
    monkeypatch.delenv("FLASHTUNE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user" / "cache"))
    return tmp_path / "user" / "cache" / "flashtune"


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> GiveAway:
    """Makes a file somebody else's; only root really can, others are told so of it."""
    if os.geteuid() == 0:
        return lambda path: os.chown(path, NOBODY, NOBODY)
    given: set[tuple[int, int]] = set()
    right = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        found = right(descriptor)
        if (found.st_ino, found.st_mtime_ns) not in given:  # the number alone may be that of a new file by then
            return found
        return os.stat_result((*found[:4], os.geteuid() + 1, *found[5:]))

    def give(path: Path) -> None:
        found = path.stat()
        given.add((found.st_ino, found.st_mtime_ns))

    monkeypatch.setattr(os, "fstat", fstat)
    return give


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


# Whoever makes a cache


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_and_is_for_this_user_alone(root: Path, kind: str, mask: int) -> None:
    """C2, M12: with umask 002 the cache was open to the group, and templates were never found in it."""
    root = root / "in" / "new" / "folders"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHTUNE_CACHE_DIR", str(root))
        with umask(mask):
            write_entry(kind, "a", b"1")
            assert read_entry(kind, "a") == b"1"
            write_entry(kind, "a", b"2")
            assert read_entry(kind, "a") == b"2"
    assert [mode(each) for each in (root / kind, root, root.parent, root.parents[1])] == [0o700] * 4
    assert mode(root / kind / "a") == 0o600
    assert [each.name for each in (root / kind).iterdir()] == ["a"]


def test_an_umask_that_takes_from_the_owner_takes_nothing_from_folders(root: Path) -> None:
    with umask(0o277):
        write_entry(CUBINS, "a", b"1")
        assert read_entry(CUBINS, "a") == b"1"
    assert (mode(root), mode(root / CUBINS)) == (0o700, 0o700)


@pytest.mark.parametrize("kind", KINDS)
def test_a_default_cache_of_an_earlier_version_is_closed_to_others(
    default: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """M12: flashtune made it, so flashtune mends it. An entry that the group could write is none, once."""
    (default / kind).mkdir(parents=True)
    (default / kind / "a").write_bytes(b"old")
    for each in (default, default / kind):
        each.chmod(0o775)
    (default / kind / "a").chmod(0o664)
    assert read_entry(kind, "a") is None
    write_entry(kind, "a", b"new")
    assert read_entry(kind, "a") == b"new"
    assert [mode(each) for each in (default, default / kind, default / kind / "a")] == [0o700, 0o700, 0o600]
    assert not warnings(caplog)


@pytest.mark.parametrize("given", [0o755, 0o750, 0o711, 0o700, 0o555, 0o500])
@pytest.mark.parametrize("named", [True, False])
def test_a_cache_that_others_may_not_write_stays_as_it_is(
    default: Path, root: Path, monkeypatch: pytest.MonkeyPatch, named: bool, given: int
) -> None:
    """A hole in the tests: one that its user has closed against writing could be opened for it again."""
    if named:
        monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(root))
    place = root if named else default
    place.mkdir(parents=True)
    place.chmod(given)
    try:
        write_entry(CUBINS, "a", b"1")
        assert read_entry(CUBINS, "a") == b"1", "where it can't be written another folder serves"
        assert mode(place) == given
    finally:
        place.chmod(0o700)


def test_a_root_may_be_a_link_of_its_user(root: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "disk")
    write_entry(CUBINS, "a", b"1")
    assert read_entry(CUBINS, "a") == (tmp_path / "disk" / CUBINS / "a").read_bytes() == b"1"


def test_reading_makes_nothing(root: Path) -> None:
    assert read_entry(CUBINS, "a") is None
    assert open_entry(EMULATOR, "a") is None
    assert not root.exists()


# What is no cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["root", "kind"])
@pytest.mark.parametrize("how", ["group", "all", "sticky", "given away"])
def test_a_folder_that_others_can_write_is_not_used_and_not_changed(
    root: Path, kind: str, where: str, how: str, give_away: GiveAway, caplog: pytest.LogCaptureFixture
) -> None:
    """C2: cubins and emulator programs in such a folder were loaded and run."""
    write_entry(kind, "a", b"evil")
    path = root if where == "root" else root / kind
    if how == "given away":
        give_away(path)
    else:
        path.chmod({"group": 0o775, "all": 0o777, "sticky": 0o1777}[how])
    before = path.stat()
    for _ in range(2):
        assert read_entry(kind, "a") is None
    write_entry(kind, "b", b"mine")
    assert read_entry(kind, "b") == b"mine"  # from the folder that stands in
    assert sorted(each.name for each in (root / kind).iterdir()) == ["a"]
    assert (path.stat().st_mode, path.stat().st_uid) == (before.st_mode, before.st_uid)
    (said,) = warnings(caplog)
    assert str(path) in said
    assert "name a folder of your own in FLASHTUNE_CACHE_DIR" in said
    assert (f"run `chmod go-w {path}`" in said) == (how in ("group", "all"))
    with pytest.raises(InvalidInput, match=re.escape(str(path))):
        save_entry(kind, "c", b"mine")


def test_advice_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "my caches; and more"
    folder.mkdir()
    folder.chmod(0o775)
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(folder))
    write_entry(CUBINS, "a", b"1")
    (said,) = warnings(caplog)
    advice = re.search("`(.*)`", said)
    assert advice
    subprocess.run(advice[1], shell=True, check=True)
    save_entry(CUBINS, "a", b"1")
    assert read_entry(CUBINS, "a") == b"1"
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("where", ["/dev/null/cache", "/dev/null", "/proc/none/cache", "https://example.org/cache"])
def test_a_place_that_can_be_no_cache_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", where)
    for number in range(3):
        write_entry(CUBINS, f"{number}", b"1")
        assert read_entry(CUBINS, f"{number}") == b"1"
    (said,) = warnings(caplog)
    assert "FLASHTUNE_CACHE_DIR" in said
    assert ("/dev" in said or "/proc" in said) == where.startswith("/")
    with pytest.raises((OSError, InvalidInput)):
        save_entry(CUBINS, "a", b"1")


# What is no entry


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    path.with_name("target").write_bytes(b"evil")
    path.symlink_to("target")


def link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("target"))
    path.symlink_to("target")


def dangling(path: Path) -> None:
    path.symlink_to("nothing")


def loose(path: Path) -> None:
    path.write_bytes(b"evil")
    path.chmod(0o620)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [fifo, link, link_to_fifo, dangling, loose], ids=lambda make: make.__name__)
def test_what_is_no_file_of_this_user_alone_is_replaced(
    root: Path, kind: str, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """m3: a FIFO as cubin hung. C2: what others could write, or a link led to, was taken."""
    write_entry(kind, "first", b"1")
    make(root / kind / "a")
    assert read_entry(kind, "a") is None
    write_entry(kind, "a", b"mine")
    assert read_entry(kind, "a") == b"mine"
    assert mode(root / kind / "a") == 0o600
    assert not warnings(caplog)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_somebody_else_is_replaced(root: Path, kind: str, give_away: GiveAway) -> None:
    """C2."""
    write_entry(kind, "a", b"evil")
    give_away(root / kind / "a")
    assert read_entry(kind, "a") is None
    assert not (root / kind / "a").exists()
    write_entry(kind, "a", b"mine")
    assert read_entry(kind, "a") == b"mine"


def test_a_folder_in_the_place_of_an_entry_stays_and_another_folder_serves(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / CUBINS / "a").mkdir(parents=True)
    root.chmod(0o700)
    (root / CUBINS).chmod(0o700)
    for _ in range(2):
        assert read_entry(CUBINS, "b") is None
        write_entry(CUBINS, "a", b"mine")
        assert read_entry(CUBINS, "a") == b"mine"
    (said,) = warnings(caplog)
    assert str(root / CUBINS / "a") in said


def test_what_the_superuser_made_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container image."""
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", "/")
    assert read_entry("etc", "passwd") == Path("/etc/passwd").read_bytes()
