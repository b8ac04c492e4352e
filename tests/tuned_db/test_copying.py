"""Backups: whole or not there, while others write."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest
from folders import names

from flashtune.errors import (
    DatabaseDamaged,
    DatabaseForeign,
    DatabaseNotWritable,
    DatabaseTooNew,
    InvalidInput,
    StoreError,
)
from flashtune.tuned_db.backends.sqlite import copying
from flashtune.tuned_db.backends.sqlite.files import read_header
from flashtune.tuned_db.store.store import Store
from flashtune.tuned_db.upkeep import health
from flashtune.tuned_db.upkeep.health import back_up

Make = Callable[..., Any]


class TestBackup:
    def test_it_holds_the_same_and_needs_no_side_files(self, store: Store, path: Path, measurement: Make) -> None:
        stored = store.record_all([measurement() for _ in range(5)])
        target = path.parent / "copy é.db"
        back_up(path, target)
        assert names(path.parent) == ["copy é.db", "tuned.db"]
        assert read_header(target).wal is False
        copy = Store.open(target, readonly=True)
        assert copy.measurements() == stored
        assert copy.origin == store.origin

    def test_what_is_still_in_the_log_is_in_it(
        self, store: Store, path: Path, tmp_path: Path, measurement: Make
    ) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as plain:
            plain.execute("PRAGMA wal_autocheckpoint = 0")
            plain.execute("SELECT * FROM origin").fetchall()
            stored = store.record(measurement())
            assert stored.id.encode() not in path.read_bytes()
            back_up(path, tmp_path / "copy.db")
        assert Store.open(tmp_path / "copy.db", readonly=True).measurements() == [stored]

    def test_others_write_meanwhile(self, store: Store, path: Path, tmp_path: Path, measurement: Make) -> None:
        """Each copy is a moment: all of what was stored before it began, each batch wholly or not at all."""
        stop, done, wrote = threading.Event(), [], threading.Semaphore(0)

        def write() -> None:
            while not stop.is_set():
                session = f"batch {len(done)}"
                store.record_all([measurement(session=session, message="x" * 1000) for _ in range(20)])
                done.append(session)
                wrote.release()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for number in range(6):
                wrote.acquire()
                before = set(done)
                back_up(path, tmp_path / f"{number}.db")
                found = [each.session for each in Store.open(tmp_path / f"{number}.db", readonly=True).measurements()]
                assert before <= set(found)
                assert {found.count(session) for session in found} <= {20}
        finally:
            stop.set()
            writer.join()

    def test_a_writer_in_the_middle_of_a_transaction_is_not_waited_for(
        self, store: Store, path: Path, tmp_path: Path
    ) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            other.execute("DELETE FROM origin")
            back_up(path, tmp_path / "copy.db", timeout=0.1)
        assert Store.open(tmp_path / "copy.db", readonly=True).origin == store.origin

    def test_a_lock_that_is_never_released_is_named(
        self, store: Store, path: Path, tmp_path: Path, locked: Callable[[Path], AbstractContextManager[None]]
    ) -> None:
        with locked(path), pytest.raises(StoreError, match=r"locked by another process for 0\.1 s"):
            back_up(path, tmp_path / "copy.db", timeout=0.1)
        assert names(tmp_path) == [path.parent.name]

    def test_what_exists_is_never_replaced(self, store: Store, path: Path, tmp_path: Path) -> None:
        target = tmp_path / "copy.db"
        target.write_bytes(b"precious")
        with pytest.raises(InvalidInput, match=r"copy\.db exists and is left as it is"):
            back_up(path, target)
        assert target.read_bytes() == b"precious"
        link = tmp_path / "link.db"
        link.symlink_to(tmp_path / "nowhere.db")
        with pytest.raises(InvalidInput, match="exists"):
            back_up(path, link)
        with pytest.raises(InvalidInput, match="exists"):
            back_up(path, path)
        assert not (tmp_path / "nowhere.db").exists()

    def test_one_that_appears_meanwhile_is_not_replaced(
        self, store: Store, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = tmp_path / "copy.db"
        finish = copying._settle

        def slow(*arguments: Any) -> None:
            target.write_bytes(b"faster")
            finish(*arguments)

        monkeypatch.setattr(copying, "_settle", slow)
        with pytest.raises(InvalidInput, match="exists"):
            back_up(path, target)
        assert target.read_bytes() == b"faster"
        assert names(tmp_path) == sorted(["copy.db", path.parent.name])

    def test_there_is_no_half_of_one(
        self, store: Store, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(number: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(DatabaseNotWritable, match=r"copy\.db can't be written: No space left .* choose another"):
            back_up(path, tmp_path / "copy.db")
        assert names(tmp_path) == [path.parent.name]

    def test_a_disk_that_is_full_for_sqlite_is_named(
        self, store: Store, path: Path, tmp_path: Path, measurement: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("PRAGMA wal_autocheckpoint = 0")
            other.execute("SELECT * FROM origin").fetchall()
            store.record_all([measurement(message="x" * 2000) for _ in range(100)])  # in the log, as it is in the copy
            settle = copying._settle
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

            def limited(*arguments: Any) -> None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
                try:
                    settle(*arguments)
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

            monkeypatch.setattr(copying, "_settle", limited)
            with pytest.raises(DatabaseNotWritable, match=r"copy\.db can't be written: disk I/O error.* make room"):
                back_up(path, tmp_path / "copy.db")
        assert names(tmp_path) == [path.parent.name]

    def test_a_folder_that_is_not_there_is_named(self, store: Store, path: Path, tmp_path: Path) -> None:
        with pytest.raises(DatabaseNotWritable, match=r"there is no folder .*none"):
            back_up(path, tmp_path / "none" / "copy.db")

    def test_only_a_sound_tuning_database_is_copied(self, store: Store, path: Path, tmp_path: Path) -> None:
        foreign = tmp_path / "songs.db"
        with closing(sqlite3.connect(foreign)) as plain, plain:
            plain.execute("CREATE TABLE songs (title TEXT)")
        future = tmp_path / "future.db"
        with closing(sqlite3.connect(path)) as plain, plain:
            plain.execute("PRAGMA user_version = 9")
        shutil.copy(path, future)
        for source, error in ((foreign, DatabaseForeign), (future, DatabaseTooNew), (tmp_path / "none", StoreError)):
            with pytest.raises(error, match=source.stem):
                back_up(source, tmp_path / "copy.db")
        assert not (tmp_path / "copy.db").exists()

    def test_a_damaged_one_is_not_taken_for_a_backup(
        self, store: Store, path: Path, tmp_path: Path, measurement: Make
    ) -> None:
        store.record_all([measurement(message="x" * 500) for _ in range(100)])
        data = bytearray(path.read_bytes())
        data[-20_000:] = bytes(range(250)) * 80
        path.write_bytes(data)
        with pytest.raises(DatabaseDamaged, match=r"tuned\.db is damaged"):
            back_up(path, tmp_path / "copy.db")
        assert names(tmp_path) == [path.parent.name]

    @pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")
    def test_who_may_read_it_is_as_before(self, store: Store, path: Path, tmp_path: Path) -> None:
        path.chmod(0o600)
        back_up(path, tmp_path / "copy.db")
        assert (tmp_path / "copy.db").stat().st_mode & 0o777 == 0o600
        path.chmod(0o440)
        back_up(path, tmp_path / "second.db")
        assert (tmp_path / "second.db").stat().st_mode & 0o777 == 0o640


def test_the_backup_of_a_relative_path_is_where_it_was_asked_for(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    health.back_up(Path("tuned.db"), Path("copy.db"))
    assert (path.parent / "copy.db").is_file()
