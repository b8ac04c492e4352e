"""Backups, and upgrades behind one: whole or not there, while others write, and whenever a run is killed."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flashtune.errors import (
    DatabaseDamaged,
    DatabaseForeign,
    DatabaseNotWritable,
    DatabaseTooNew,
    InvalidInput,
    StoreError,
)
from flashtune.tuned_db import copying, keeping, opening
from flashtune.tuned_db.files import SCHEMA_VERSION, read_header
from flashtune.tuned_db.keeping import back_up, inspect_file, upgrade_file
from flashtune.tuned_db.opening import Upgraded
from flashtune.tuned_db.store import Store

Make = Callable[..., Any]
Start = Callable[[str, Path], "subprocess.Popen[str]"]
FIRST = Path(__file__).parents[1] / "upgrade_assets" / "v0001.db"


def rows(path: Path) -> list[Any]:
    with closing(sqlite3.connect(path)) as plain:
        return plain.execute("SELECT id, message, median_us FROM measurement ORDER BY id").fetchall()


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A database of the first schema."""
    path = tmp_path / "old" / "tuned.db"
    path.parent.mkdir()
    shutil.copy(FIRST, path)
    return path


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
        stop, done = threading.Event(), []

        def write() -> None:
            while not stop.is_set():
                session = f"batch {len(done)}"
                store.record_all([measurement(session=session, message="x" * 1000) for _ in range(20)])
                done.append(session)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for number in range(6):
                before = set(done)
                back_up(path, tmp_path / f"{number}.db")
                found = [each.session for each in Store.open(tmp_path / f"{number}.db", readonly=True).measurements()]
                assert before <= set(found)
                assert {found.count(session) for session in found} <= {20}
        finally:
            stop.set()
            writer.join()
        assert len(done) > 1

    def test_a_writer_in_the_middle_of_a_transaction_is_not_waited_for(
        self, store: Store, path: Path, tmp_path: Path
    ) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            other.execute("DELETE FROM origin")
            back_up(path, tmp_path / "copy.db", timeout=0.1)
        assert Store.open(tmp_path / "copy.db", readonly=True).origin == store.origin

    def test_a_lock_that_is_never_released_is_named(self, store: Store, path: Path, tmp_path: Path) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("PRAGMA journal_mode = DELETE")
            other.execute("BEGIN EXCLUSIVE")
            with pytest.raises(StoreError, match=r"locked by another process for 0\.1 s"):
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
        finish = copying._copy

        def slow(*arguments: Any) -> int:
            target.write_bytes(b"faster")
            return finish(*arguments)

        monkeypatch.setattr(copying, "_copy", slow)
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
        store.record_all([measurement(message="x" * 2000) for _ in range(100)])
        connect = copying.connect

        def limited(where: Path, *arguments: Any) -> sqlite3.Connection:
            connection = connect(where, *arguments)
            if where != path:
                connection.execute("PRAGMA max_page_count = 5")
            return connection

        monkeypatch.setattr(copying, "connect", limited)
        with pytest.raises(DatabaseNotWritable, match=r"copy\.db can't be written: database or disk is full"):
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


class TestUpgrade:
    def test_a_copy_is_kept_first(self, old: Path) -> None:
        before = rows(old)
        backup = old.with_name("tuned.db.schema-1.backup")
        assert upgrade_file(old) == Upgraded(1, SCHEMA_VERSION, backup)
        assert names(old.parent) == ["tuned.db", "tuned.db.schema-1.backup"]
        assert read_header(backup).schema == 1
        assert rows(backup) == before == rows(old)
        assert len(Store.open(backup, readonly=True).measurements()) == 4
        assert upgrade_file(old) is None
        assert names(old.parent) == ["tuned.db", "tuned.db.schema-1.backup"]

    def test_opening_for_writing_keeps_one_too_and_reading_does_not(self, old: Path) -> None:
        Store.open(old, readonly=True)
        assert names(old.parent) == ["tuned.db"]
        Store.open(old)
        Store.open(old)
        assert names(old.parent) == ["tuned.db", "tuned.db.schema-1.backup"]

    def test_a_new_database_has_no_backup(self, tmp_path: Path) -> None:
        Store.open(tmp_path / "tuned.db")
        assert names(tmp_path) == ["tuned.db"]

    def test_a_backup_that_is_there_is_never_replaced(self, old: Path) -> None:
        taken = old.with_name("tuned.db.schema-1.backup")
        taken.write_bytes(b"part of a copy")
        done = upgrade_file(old)
        assert done is not None
        assert done.backup == old.with_name("tuned.db.schema-1.backup-2")
        assert taken.read_bytes() == b"part of a copy"
        assert rows(done.backup) == rows(old)

    def test_going_back_to_a_backup_and_on_again_loses_nothing(self, old: Path) -> None:
        first = upgrade_file(old)
        assert first is not None
        shutil.copy(first.backup, old)
        again = upgrade_file(old)
        assert again == first  # the same rows: no second copy of them
        shutil.copy(first.backup, old)
        with closing(sqlite3.connect(old)) as plain, plain:
            plain.execute("UPDATE measurement SET message = 'newer' WHERE rowid = 1")
        third = upgrade_file(old)
        assert third is not None
        assert third.backup.name == "tuned.db.schema-1.backup-2"
        assert [row[1] for row in rows(third.backup)].count("newer") == 1
        assert [row[1] for row in rows(first.backup)].count("newer") == 0

    def test_without_room_for_a_copy_nothing_is_upgraded(self, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*arguments: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        before = old.read_bytes()
        monkeypatch.setattr(copying, "_copy", full)
        for attempt in (upgrade_file, Store.open):
            with pytest.raises(DatabaseNotWritable, match=r"tuned\.db can't be written: No space left on device"):
                attempt(old)
        assert old.read_bytes() == before
        assert names(old.parent) == ["tuned.db"]

    def test_a_failed_upgrade_leaves_the_old_one_and_the_next_succeeds(
        self, old: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = rows(old)
        with monkeypatch.context() as patch:
            patch.setattr("flashtune.tuned_db.upgrade.migrate", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                Store.open(old)
        assert read_header(old).schema == 1
        assert rows(old) == before
        Store.open(old)
        assert names(old.parent) == ["tuned.db", "tuned.db.schema-1.backup"]

    def test_another_process_may_be_first(self, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its header was old when it was looked at; the copy is of the new schema then, and is no backup."""
        Store.open(old)
        assert opening.upgrade_database(old, 1.0) is None
        assert names(old.parent) == ["tuned.db", "tuned.db.schema-1.backup"]

    def test_eight_processes_upgrade_together(self, start: Start, old: Path) -> None:
        before = rows(old)
        code = """
            import multiprocessing, os, pathlib
            import flashtune.tuned_db.upgrade, alembic.command
            def work(path, barrier):
                barrier.wait()
                assert len(Store.open(path).measurements()) == 4
            context = multiprocessing.get_context("fork")
            barrier = context.Barrier(8)
            workers = [context.Process(target=work, args=(path, barrier)) for _ in range(8)]
            [each.start() for each in workers]
            [each.join() for each in workers]
            print([each.exitcode for each in workers], sorted(os.listdir(os.path.dirname(path))))
        """
        output, _ = start(code, old).communicate(timeout=120)
        assert output == f"{[0] * 8} ['tuned.db', 'tuned.db.schema-1.backup']\n"
        assert rows(old) == rows(old.with_name("tuned.db.schema-1.backup")) == before


DEATHS = {
    "a copy was begun": "patch(copying, '_copy', lambda *_: os._exit(9))",
    "half of it was there": (
        "patch(copying, '_copy', lambda path, copy, *_: (copy.write_bytes(path.read_bytes()[:5000]), os._exit(9)))"
    ),
    "it had no name yet": "patch(opening, 'name_copy', lambda *_: os._exit(9))",
    "it had its name": "name = copying.name_copy; patch(opening, 'name_copy', lambda *a: (name(*a), os._exit(9)))",
    "the upgrade was begun": "patch(upgrade, 'migrate', lambda *_: os._exit(9))",
    "the upgrade was not committed": (
        "move = upgrade.migrate; patch(upgrade, 'migrate', lambda *a: (move(*a), os._exit(9)))"
    ),
    "all was done": "patch(opening, 'fit_journal', None); run = opening.upgrade_database;"
    "patch(opening, 'upgrade_database', lambda *a: (run(*a), os._exit(9)))",
}


@pytest.mark.parametrize("moment", DEATHS)
def test_a_run_may_be_killed_when(start: Start, old: Path, moment: str) -> None:
    """D76, of a process."""
    code = f"""
        import os
        from flashtune.tuned_db import copying, opening, store, upgrade
        patch = setattr
        {DEATHS[moment]}
        Store.open(path)
    """
    before = rows(old)
    process = start(code, old)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 9, output
    with closing(sqlite3.connect(old)) as plain:
        (schema,) = plain.execute("PRAGMA user_version").fetchone()
    assert schema == (SCHEMA_VERSION if moment == "all was done" else 1)
    assert rows(old) == before
    assert len(Store.open(old).measurements()) == 4
    backups = [each for each in names(old.parent) if "backup" in each and not each.startswith(".")]
    assert backups == ["tuned.db.schema-1.backup"]
    assert rows(old.with_name(backups[0])) == before == rows(old)
    unfinished = [each for each in old.parent.iterdir() if each.name.startswith(".")]
    assert inspect_file(old).leftovers == ()  # it may still be at work
    for each in unfinished:
        os.utime(each, (1e9, 1e9))
    os.utime(old.with_name(backups[0]), (1e9, 1e9))
    assert inspect_file(old).leftovers == tuple(sorted(unfinished))
    assert bool(unfinished) == (
        moment not in ("the upgrade was begun", "the upgrade was not committed", "all was done")
    )


def test_the_backup_of_a_relative_path_is_where_it_was_asked_for(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    keeping.back_up(Path("tuned.db"), Path("copy.db"))
    assert (path.parent / "copy.db").is_file()
