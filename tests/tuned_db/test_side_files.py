"""What lies beside a database is input, too: SQLite opens it by its name, and may delete by a name that is in it."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from folders import snapshot
from test_permissions import AS_NOBODY, read_only_folder  # noqa: F401

from flashtune.errors import DatabaseDamaged, StoreError
from flashtune.tuned_db.backends.sqlite.files import SIDE_FILES, look_beside
from flashtune.tuned_db.lookup.kept_connection import look_up
from flashtune.tuned_db.sharing.diff import read_side
from flashtune.tuned_db.sharing.merge import add_database
from flashtune.tuned_db.store.store import Store
from flashtune.tuned_db.upkeep.gc import collect
from flashtune.tuned_db.upkeep.health import back_up, inspect_file, upgrade_file

Make = Callable[..., Any]
Start = Callable[[str, Path], "subprocess.Popen[str]"]
MAGIC = bytes.fromhex("d9d505f920a163d7")
OLD = Path(__file__).parents[1] / "upgrade_assets" / "v0001.db"


def forged(path: Path, victim: Path, hot: bool = True) -> bytes:
    """A journal that makes SQLite delete ``victim`` when it rolls ``path`` back."""
    data, name = path.read_bytes(), os.fsencode(victim)
    (page,) = struct.unpack(">H", data[16:18])
    head = (MAGIC + struct.pack(">IIIII", 0, 1, len(data) // page, 512, page)).ljust(512, b"\0")
    end = struct.pack(">I", 0x40000000 // page + 1) + name + struct.pack(">II", len(name), sum(name)) + MAGIC
    return (head if hot else bytes(512)) + end


@pytest.fixture
def plain(store: Store, path: Path, measurement: Make) -> Path:
    """A database with one row and without a log, as one that travels."""
    store.record(measurement())
    with closing(sqlite3.connect(path)) as plain:
        assert plain.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    return path


def ways(path: Path, folder: Path) -> dict[str, Callable[[], object]]:
    """What opens the database at ``path``."""
    own = Store.open(folder / "own.db")
    return {
        "read": lambda: Store.open(path, readonly=True),
        "write": lambda: Store.open(path),
        "look up": lambda: look_up(path, 2.0, lambda store: store.count()),
        "merge": lambda: add_database(own, path),
        "diff": lambda: read_side(path),
        "back up": lambda: back_up(path, folder / "copy.db"),
        "check": lambda: inspect_file(path),
        "upgrade": lambda: upgrade_file(path),
    }


class TestForgedJournals:
    @pytest.mark.parametrize("hot", [True, False], ids=["hot", "ended"])
    @pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
    def test_a_journal_deletes_nothing(
        self, plain: Path, tmp_path: Path, relative: bool, hot: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """C1: all commands and attention() deleted the file that the journal names."""
        victim = tmp_path / "thesis.tex"
        victim.write_text("years of work")
        monkeypatch.chdir(tmp_path)
        found = ways(plain, tmp_path)
        Path(f"{plain}-journal").write_bytes(forged(plain, Path(victim.name) if relative else victim, hot))
        before = snapshot(plain.parent)
        for name, way in found.items():
            with pytest.raises(
                DatabaseDamaged, match=r"journal names a file for SQLite to delete.* not to|do not trust"
            ):
                way()
            assert victim.read_text() == "years of work", name
            assert snapshot(plain.parent) == before, name

    def test_the_forgery_is_real(self, plain: Path, tmp_path: Path) -> None:
        """Else the test above would pass whatever flashtune did."""
        victim = tmp_path / "thesis.tex"
        victim.write_text("years of work")
        Path(f"{plain}-journal").write_bytes(forged(plain, victim))
        with closing(sqlite3.connect(plain)) as other:
            other.execute("SELECT count(*) FROM origin").fetchone()
        assert not victim.exists()

    def test_a_reader_of_sqlite_rolls_nothing_back(self, plain: Path, tmp_path: Path) -> None:
        """What a look-up relies on where it reads a file in its place: one that is forged while it is opened, too."""
        victim = tmp_path / "thesis.tex"
        victim.write_text("years of work")
        Path(f"{plain}-journal").write_bytes(forged(plain, victim))
        before = snapshot(plain.parent)
        with closing(sqlite3.connect(f"{plain.as_uri()}?mode=ro", uri=True)) as other:
            with pytest.raises(sqlite3.OperationalError) as caught:
                other.execute("SELECT count(*) FROM origin").fetchone()
            assert caught.value.sqlite_errorcode == sqlite3.SQLITE_READONLY_ROLLBACK
        assert snapshot(plain.parent) == before
        assert victim.exists()

    def test_a_look_up_goes_on_without_the_database(
        self, plain: Path, tmp_path: Path, look: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        """C1, attention()."""
        victim = tmp_path / "thesis.tex"
        victim.write_text("years of work")
        assert look().level == "exact"
        Path(f"{plain}-journal").write_bytes(forged(plain, victim))
        assert [look().level for _ in range(2)] == ["default"] * 2
        assert victim.exists()
        assert len(caplog.records) == 1
        assert "journal names a file" in caplog.text

    def test_the_journal_of_a_database_behind_a_link_counts(self, plain: Path, tmp_path: Path) -> None:
        victim, link = tmp_path / "thesis.tex", tmp_path / "link.db"
        victim.write_text("years of work")
        link.symlink_to(plain)
        found = ways(link, tmp_path)
        Path(f"{plain}-journal").write_bytes(forged(plain, victim))
        for way in found.values():
            with pytest.raises(
                DatabaseDamaged, match=r"-journal names a file for SQLite to delete.* do not trust where"
            ):
                way()
        assert victim.exists()


def a_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "thesis.tex")


def a_link_to_nowhere(path: Path) -> None:
    path.symlink_to(path.parent.parent / "new.tex")


@pytest.mark.parametrize("make", [a_link, a_link_to_nowhere, os.mkfifo, Path.mkdir], ids=lambda each: each.__name__)
@pytest.mark.parametrize("suffix", SIDE_FILES)
def test_a_side_file_that_sqlite_would_not_make_is_refused(
    plain: Path, tmp_path: Path, suffix: str, make: Callable[[Path], None]
) -> None:
    """C1: a pipe would be waited for, a link followed."""
    (tmp_path / "thesis.tex").write_text("years of work")
    found = ways(plain, tmp_path)
    make(Path(f"{plain}{suffix}"))
    before = [*snapshot(tmp_path)]
    for way in found.values():
        with pytest.raises(DatabaseDamaged, match=f"{suffix} is not a file, as SQLite makes it"):
            way()
    assert [*snapshot(tmp_path)] == before
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


WRITER = """
import os, sqlite3, sys
other = sqlite3.connect(sys.argv[1], isolation_level=None)
other.execute("PRAGMA journal_mode = " + sys.argv[2])
other.execute("PRAGMA wal_autocheckpoint = 0")
other.execute("BEGIN IMMEDIATE")
other.execute("UPDATE measurement SET message = 'changed'")
if sys.argv[3] == "killed":
    other.execute("PRAGMA cache_size = 1")
    other.execute("INSERT INTO tombstone SELECT hex(randomblob(18)), 'x' FROM measurement AS a, measurement AS b")
    os._exit(9)
other.execute("COMMIT")
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def writer(path: Path, journal: str, how: str = "stays") -> Iterator[None]:
    command = [sys.executable, "-c", WRITER, str(path), journal, how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            yield
        finally:
            other.communicate()


def digests(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in snapshot(folder).items()}


class TestLogs:
    def test_what_is_only_read_is_not_written(self, plain: Path, tmp_path: Path) -> None:
        """C1, the lesser effect: a merge moved the log into the other file and removed it."""
        with writer(plain, "WAL"):
            shutil.copytree(plain.parent, tmp_path / "travels")
        there = tmp_path / "travels" / plain.name
        assert look_beside(there).log
        before = digests(there.parent)
        for name, way in ways(there, tmp_path).items():
            if name not in ("write", "upgrade"):
                way()
                assert digests(there.parent) == before, name
        with Store.open(there, readonly=True) as copy:
            assert [each.message for each in copy.measurements()] == ["changed"]
        assert digests(there.parent) == before

    def test_of_a_process_that_is_connected(self, plain: Path, tmp_path: Path, look: Make) -> None:
        with writer(plain, "WAL"):
            before = [each for each in digests(plain.parent) if not each.endswith("-shm")]
            for name, way in ways(plain, tmp_path).items():
                if name not in ("write", "upgrade"):
                    way()
            assert look().measurement.message == "changed"
            assert [each for each in digests(plain.parent) if not each.endswith("-shm")] == before

    def test_of_a_process_that_was_killed(self, plain: Path, tmp_path: Path) -> None:
        """Its log ends in the middle."""
        with writer(plain, "WAL", "killed"):
            pass
        before = digests(plain.parent)
        with Store.open(plain, readonly=True) as store:
            assert [each.message for each in store.measurements()] == [""]
        assert digests(plain.parent) == before

    @pytest.mark.parametrize(
        "damage", [b"", b"junk" * 1000, MAGIC * 8, bytes(5000)], ids=["none", "text", "magic", "zero"]
    )
    def test_that_is_none(self, plain: Path, damage: bytes) -> None:
        Path(f"{plain}-wal").write_bytes(damage)
        before = digests(plain.parent)
        with Store.open(plain, readonly=True) as store:
            assert store.count() == 1
        assert look_up(plain, 2.0, lambda store: store.count()) == 1
        assert digests(plain.parent) == before

    def test_an_empty_one_in_a_folder_that_nobody_may_write(self, read_only_folder: Path, start: Start) -> None:  # noqa: F811
        """Part C: it is no reason not to read, also where SQLite could make no other file."""
        read_only_folder.chmod(0o755)
        (read_only_folder / "tuned.db-wal").touch()
        read_only_folder.chmod(0o555)
        before = snapshot(read_only_folder)
        code = AS_NOBODY + "print(len(Store.open(path, readonly=True).measurements()))"
        output, _ = start(code, read_only_folder / "tuned.db").communicate(timeout=120)
        assert output == "1\n"
        assert snapshot(read_only_folder) == before


class TestAfterACrash:
    """A transaction without a log that ended in the middle: what was there is in the journal alone."""

    @pytest.fixture
    def crashed(self, plain: Path, measurement: Make) -> Path:
        with Store.open(plain) as store:
            store.record_all([measurement(message="x" * 500) for _ in range(60)])
        with writer(plain, "DELETE", "killed"):
            pass
        assert look_beside(plain).journal
        return plain

    def test_readers_say_how_to_go_on(self, crashed: Path, tmp_path: Path) -> None:
        before = digests(crashed.parent)
        own = Store.open(tmp_path / "own.db")
        for way in (
            lambda: Store.open(crashed, readonly=True, timeout=0.1),
            lambda: look_up(crashed, 0.1, lambda store: store.count()),
            lambda: back_up(crashed, tmp_path / "copy.db", timeout=0.1),
            lambda: inspect_file(crashed, timeout=0.1),
        ):
            with pytest.raises(StoreError, match=rf"rollback journal beside it.*flashtune db upgrade --db {crashed}"):
                way()
            assert digests(crashed.parent) == before
        assert own.count() == 0

    def test_an_upgrade_goes_back_to_before_it(self, crashed: Path, look: Make) -> None:
        assert upgrade_file(crashed) is None
        assert not look_beside(crashed).journal
        with Store.open(crashed, readonly=True) as store:
            assert store.count() == 61
            assert "changed" not in {each.message for each in store.measurements()}

    @pytest.mark.parametrize("way", [Store.open, upgrade_file], ids=["write", "upgrade"])
    def test_a_writer_of_an_older_schema_does_so_first(self, tmp_path: Path, way: Callable[[Path], object]) -> None:
        """The header may be of the transaction that was not ended."""
        path = tmp_path / "old.db"
        shutil.copy(OLD, path)
        rows = lambda: sqlite3.connect(path).execute("SELECT id, message FROM measurement ORDER BY id").fetchall()  # noqa: E731
        before = rows()
        with writer(path, "DELETE", "killed"):
            pass
        way(path)
        assert rows() == before

    def test_a_search_ends_it(self, crashed: Path) -> None:
        with Store.open(crashed) as store:
            assert collect(store, days=0, dry_run=True).left == 61
