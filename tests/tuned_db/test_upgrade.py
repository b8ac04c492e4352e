"""Upgrades behind a backup: whole or not there, and whenever a run is killed."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from folders import names

from flashtune.errors import DatabaseNotWritable
from flashtune.tuned_db.backends.sqlite import copying, opening
from flashtune.tuned_db.backends.sqlite.files import read_header
from flashtune.tuned_db.backends.sqlite.opening import Upgraded
from flashtune.tuned_db.schema.version import SCHEMA_VERSION
from flashtune.tuned_db.store.store import Store
from flashtune.tuned_db.upkeep.health import inspect_file, upgrade_file

Start = Callable[[str, Path], "subprocess.Popen[str]"]
FIRST = Path(__file__).parents[1] / "upgrade_assets" / "v0001.db"


def rows(path: Path) -> list[Any]:
    with closing(sqlite3.connect(path)) as plain:
        return plain.execute("SELECT id, message, median_us FROM measurement ORDER BY id").fetchall()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A database of the first schema."""
    path = tmp_path / "old" / "tuned.db"
    path.parent.mkdir()
    shutil.copy(FIRST, path)
    return path


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
        monkeypatch.setattr(copying, "_pour", full)
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
            patch.setattr("flashtune.tuned_db.backends.sqlite.upgrade.migrate", lambda *_: 1 / 0)
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
            import flashtune.tuned_db.backends.sqlite.upgrade, alembic.command
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
    "a copy was begun": "patch(copying, '_settle', lambda *_: os._exit(9))",
    "half of it was there": (
        "patch(copying, '_pour', lambda _, file, copy, *__: (copy.write_bytes(file.read()[:5000]), os._exit(9)))"
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
        from flashtune.tuned_db.backends.sqlite import copying, opening, upgrade
        from flashtune.tuned_db.store import store
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
        moment not in ("it had its name", "the upgrade was begun", "the upgrade was not committed", "all was done")
    )
