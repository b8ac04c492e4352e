"""Disks that are full, without hard links, or on a network: nothing is lost, and an error names another place."""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folders import snapshot

from flashtune.errors import DatabaseNotWritable
from flashtune.tuned_db.backends.sqlite import connections as sqlite_module
from flashtune.tuned_db.backends.sqlite import disks, files, opening
from flashtune.tuned_db.backends.sqlite import upgrade as upgrade_module
from flashtune.tuned_db.backends.sqlite.failures import sqlite_failures
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]


def test_a_full_disk_is_named_and_nothing_is_lost(
    store: Store, path: Path, measurement: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = store.record(measurement())
    pages = path.stat().st_size // 4096

    connect = sqlite_module.connect

    def limited(*arguments: Any) -> sqlite3.Connection:
        connection = connect(*arguments)
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(sqlite_module, "connect", limited)
        with pytest.raises(
            DatabaseNotWritable, match=r"disk is full\. Make room there, or pass another path, e\.g\. --db .*tuned\.db"
        ):
            store.record_all([measurement(message="x" * 2000) for _ in range(50)])
        assert store.measurements() == [stored]
    store.record_all([measurement(message="x" * 2000) for _ in range(50)])
    assert len(store.measurements()) == 51


def test_a_full_disk_leaves_no_half_made_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, timeout: float) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(upgrade_module, "upgrade", full)
    with pytest.raises(DatabaseNotWritable, match=r"No space left on device\. Make room there, or pass"):
        Store.open(tmp_path / "tuned.db")
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize(
    ("home", "will_do"),
    [("there", True), ("new", True), ("new/and/deep", True), ("file", False), ("file/below", False)],
)
def test_the_place_that_an_error_names_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, will_do: bool
) -> None:
    """A hole in the tests: a folder of the user's that has yet to be made could be passed over. And one that can't be
    made was named, as with HOME=/dev/null."""
    (tmp_path / "there").mkdir()
    (tmp_path / "temporary").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(disks, "_user_folder", lambda: tmp_path / home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    said = str(disks.not_writable(Path("/proc/tuned.db"), "it is read-only"))
    place = Path(said.partition(" e.g. --db ")[2])
    assert place == (tmp_path / home if will_do else tmp_path / "temporary") / "tuned.db"
    with Store.open(place) as store:
        assert store.count() == 0


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
def test_a_disk_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    first = Store.open(tmp_path / "tuned.db")
    assert [each.name for each in tmp_path.iterdir()] == ["tuned.db"]
    late = tmp_path / "late"
    late.write_bytes(b"made by a slower process")
    disks.publish(late, first.path)
    assert Store.open(first.path).origin == first.origin
    assert not late.exists()


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb1 /home/local ext4 rw 0 0
//box/share /mnt/my\\040share cifs rw 0 0
overlay /containers fuse.overlayfs rw 0 0
me@host: /mnt/数据 fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/var/tuned.db", "ext4", False),
        ("/home/me/tuned.db", "nfs4", True),
        ("/home/local/tuned.db", "ext4", False),
        ("/homeless/tuned.db", "ext4", False),
        ("/mnt/my share/tuned.db", "cifs", True),
        ("/containers/tuned.db", "fuse.overlayfs", False),
        ("/mnt/数据/tuned.db", "fuse.sshfs", True),
    ],
)
def test_network_mounts_are_known(path: str, kind: str, network: bool) -> None:
    assert disks.filesystem_type(Path(path), MOUNTS) == kind
    assert disks.is_network(kind) == network


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_this_machine_has_mounts(tmp_path: Path) -> None:
    assert disks.filesystem_type(tmp_path.resolve(), Path("/proc/self/mounts").read_text()) != ""


def test_no_wal_on_a_network_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, measurement: Make
) -> None:
    """D72."""
    monkeypatch.setattr(opening, "on_network", lambda path: True)
    path = tmp_path / "tuned.db"
    Store.open(path).record(measurement())
    assert files.read_header(path).wal is False
    assert "tune into a local file and merge it later" in caplog.text
    monkeypatch.setattr(opening, "on_network", lambda path: False)
    assert len(Store.open(path).measurements()) == 1
    assert files.read_header(path).wal is True
    monkeypatch.setattr(opening, "on_network", lambda path: True)
    assert len(Store.open(path).measurements()) == 1
    assert files.read_header(path).wal is False


def test_a_disk_too_full_to_read_beside_writers_is_named(path: Path) -> None:
    """In WAL mode SQLite makes a side file even for readers."""
    failure = sqlite3.OperationalError("disk I/O error")
    failure.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    with pytest.raises(DatabaseNotWritable, match="Make room there"), sqlite_failures(path, writing=False, timeout=1):
        raise failure
