"""What only reads reads a copy of its own: of one moment, whatever others do, and gone when it is no longer needed."""

from __future__ import annotations

import errno
import fcntl
import gc
import math
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from folders import names, snapshot

from flashtune.errors import DatabaseDamaged, StoreError
from flashtune.tuned_db.backends.sqlite import copying, locks, private_copy
from flashtune.tuned_db.backends.sqlite.files import is_database, read_header
from flashtune.tuned_db.backends.sqlite.private_copy import PrivateCopy
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
Start = Callable[[str, Path], "subprocess.Popen[str]"]


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies are made."""
    folder = tmp_path / "private"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def pieces(file: BinaryIO) -> list[tuple[int, int]]:
    """Where data begins and ends."""
    size, found, end = os.fstat(file.fileno()).st_size, [], 0
    while end < size and (piece := copying._data(file, end, size))[0] < size:
        found.append(piece)
        end = piece[1]
    return found


class TestCopies:
    def test_it_is_for_this_user_alone_and_ends_with_the_store(self, store: Store, path: Path, private: Path) -> None:
        with Store.open(path, readonly=True) as reader:
            (folder,) = private.iterdir()
            assert folder.stat().st_mode & 0o777 == 0o700
            (copy,) = folder.iterdir()
            assert copy.stat().st_mode & 0o777 == 0o600
            assert reader.path == path
        assert names(private) == []
        assert reader.count() == 0, "it is made again where it is needed"
        assert len(names(private)) == 1
        del reader
        gc.collect()
        assert names(private) == []

    def test_what_fails_leaves_none(self, store: Store, path: Path, private: Path) -> None:
        data = bytearray(path.read_bytes())
        data[4096:8192] = bytes(4096)
        path.write_bytes(data)
        with pytest.raises(DatabaseDamaged, match="is damaged"):
            Store.open(path, readonly=True)
        assert names(private) == []

    def test_a_child_does_not_remove_that_of_its_parent(self, store: Store, path: Path, private: Path) -> None:
        with Store.open(path, readonly=True) as reader:
            pid = os.fork()
            if not pid:
                reader.backend.close()  # type: ignore[attr-defined]
                os._exit(0)
            os.waitpid(pid, 0)
            assert reader.count() == 0

    def test_a_process_that_ends_removes_its_own(self, store: Store, path: Path, private: Path, start: Start) -> None:
        code = (
            f"import tempfile; tempfile.tempdir = {str(private)!r}\n"
            "reader = Store.open(path, readonly=True); print(reader.count())"
        )
        output, _ = start(code, path).communicate(timeout=120)
        assert output == "0\n"
        assert names(private) == []

    def test_without_room_for_it_the_error_names_the_variable(
        self, store: Store, path: Path, private: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(copying, "_pour", full)
            with pytest.raises(
                StoreError, match=rf"tuned\.db is read from a private copy.*{private}: No space.* TMPDIR"
            ):
                Store.open(path, readonly=True)
        assert names(private) == []
        private.rmdir()
        with pytest.raises(StoreError, match=f"can't be made in {private}: No such file or directory.* TMPDIR"):
            Store.open(path, readonly=True)

    @pytest.mark.skipif(not hasattr(os, "SEEK_DATA"), reason="the system knows no holes")
    def test_a_file_that_says_it_has_terabytes_takes_no_room(self, store: Store, path: Path, private: Path) -> None:
        """M2, the disk: SQLite does not look behind the pages that its header counts."""
        os.truncate(path, 2**41)
        Path(f"{path}-wal").touch()
        os.truncate(f"{path}-wal", 2**41)
        copy = PrivateCopy(path, 1.0, check=False)
        assert copy.path.stat().st_size == 2**41
        assert copy.path.stat().st_blocks * 512 < 2**21
        copy.close()

    @pytest.mark.skipif(not hasattr(os, "SEEK_DATA"), reason="the system knows no holes")
    @pytest.mark.parametrize("data", [[(0, 1), (9, 1)], [(3, 2)], [(2, 1), (5, 1), (7, 4)], [(0, 12)], []], ids=str)
    def test_holes_are_holes_in_the_copy(self, tmp_path: Path, data: list[tuple[int, int]]) -> None:
        """A hole in the tests: what follows data was read and written with it. Data in pieces of half a MB each."""
        source, target = tmp_path / "source", tmp_path / "target"
        with open(source, "wb") as made:
            for place, count in data:
                made.seek(place * 2**19)
                made.write(os.urandom(count * 2**19))
            made.truncate(13 * 2**19 + 7)
        with open(source, "rb") as file:
            copying._pour(source, file, target, math.inf)
        assert target.read_bytes() == source.read_bytes()
        with open(source, "rb") as file, open(target, "rb") as copy:
            assert pieces(copy) == pieces(file)

    def test_those_of_killed_processes_are_removed(
        self, store: Store, path: Path, private: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A process that is killed can't. They are removed an hour later, by whoever makes the next one."""
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        folders = {
            "of one that was killed": f"flashtune-{gone.pid}-abcdefgh",
            "of one that was killed just now": f"flashtune-{gone.pid}-ijklmnop",
            "of one that lives": f"flashtune-{os.getpid()}-abcdefgh",
            "of something else": "flashtune-emulator-abcdefgh",
        }
        for what, name in folders.items():
            (private / name).mkdir()
            (private / name / "copy.db").touch()
            if "just now" not in what:
                os.utime(private / name, (0, 0))
        (private / "mine").mkdir()
        (private / f"flashtune-{gone.pid}-aslink").symlink_to(private / "mine")
        private_copy._remove_abandoned.cache_clear()
        copy = PrivateCopy(path, 5.0)
        assert set(names(private)) == {
            *list(folders.values())[1:], "mine", f"flashtune-{gone.pid}-aslink", copy.path.parent.name
        }  # fmt: skip
        copy.close()

    def test_one_that_takes_too_long_is_given_up(self, store: Store, path: Path, private: Path) -> None:
        """A look-up has two seconds."""
        with pytest.raises(StoreError, match="takes too long to be read"):
            PrivateCopy(path, 1.0, within=0.0)
        assert names(private) == []


WRITER = """
import sqlite3, sys
path = sys.argv[1]
for turn in range(1, 100_000):
    other = sqlite3.connect(path, isolation_level=None, timeout=60)
    other.execute("PRAGMA wal_autocheckpoint = 3")
    for _ in range(4):
        other.execute("BEGIN IMMEDIATE")
        other.execute(f"UPDATE measurement SET seed = {turn}, message = hex(randomblob(400))")
        other.execute("COMMIT")
    other.close()
    print(turn, flush=True)
"""


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_a_copy_is_of_one_moment_while_another_process_writes(
    store: Store, path: Path, measurement: Make, journal: str
) -> None:
    """It moves its log into the file, begins it anew and removes it all the time."""
    store.record_all([measurement(message="x" * 800) for _ in range(200)])
    with closing(sqlite3.connect(path)) as plain:
        plain.execute(f"PRAGMA journal_mode = {journal}")
    other = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout is not None
        last = 0
        for _ in range(12):
            done = int(other.stdout.readline())
            with Store.open(path, readonly=True) as reader:
                seeds = {each.seed for each in reader.measurements()}
                assert reader.count() == 200
            assert len(seeds) == 1, "a part of one transaction"
            (seed,) = seeds
            assert seed is not None
            assert seed >= max(last, done)
            last = seed
        other.kill()


HOLDS = """
import sqlite3, sys
other = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=0)
try:
    other.execute("BEGIN EXCLUSIVE")
    print("free")
except sqlite3.OperationalError as error:
    print(error)
"""


@pytest.mark.parametrize("way", ["header", "kind", "copy"])
def test_who_reads_a_file_takes_no_lock_from_who_writes_it_in_this_process(
    store: Store, path: Path, measurement: Make, way: str
) -> None:
    """On POSIX, to close any descriptor of a file gives up all locks of the process on it."""
    with closing(sqlite3.connect(path)) as plain:
        plain.execute("PRAGMA journal_mode = DELETE")

    def others() -> str:
        command = [sys.executable, "-c", HOLDS, str(path)]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    with store.backend.writing():
        assert others() == "database is locked"
        match way:
            case "header":
                read_header(path)
            case "kind":
                assert is_database(path)
            case _:
                PrivateCopy(path, 1.0).close()
        assert others() == "database is locked"
    assert others() == "free"


def test_a_reader_keeps_its_moment(store: Store, path: Path, measurement: Make) -> None:
    first = store.record(measurement())
    with Store.open(path, readonly=True) as reader:
        store.record(measurement())
        assert reader.measurements() == [first]
    before = snapshot(path.parent)
    with Store.open(path, readonly=True) as reader:
        assert reader.count() == 2
    assert snapshot(path.parent) == before


@pytest.mark.skipif(not locks.KNOWN, reason="the system has no locks that belong to a descriptor")
def test_our_locks_are_on_the_very_bytes_that_sqlite_locks(tmp_path: Path) -> None:
    """A hole in the tests: the places were our word alone. One byte beside them, and a writer does not see a reader."""
    path = tmp_path / "plain.db"
    with (
        closing(sqlite3.connect(path, 0, isolation_level=None)) as sqlite,
        open(path, "rb") as seen,
        open(path, "rb") as ours,
    ):
        sqlite.execute("CREATE TABLE t (x)")
        asking = locks.ReaderLock(seen.fileno())

        def held() -> dict[int, int]:
            """What others have locked, by byte."""
            kinds = {at: asking.asked(fcntl.F_WRLCK, (at, 1)) for at in range(0x40000000 - 8, 0x40000000 + 600)}
            return {at: kind for at, kind in kinds.items() if kind not in (fcntl.F_UNLCK, None)}

        def places(kind: int, *given: tuple[int, int]) -> dict[int, int]:
            return {first + each: kind for first, count in given for each in range(count)}

        assert held() == {}
        with locks.ReaderLock(ours.fileno()) as lock:
            of_ours = held()
            assert lock.free
        assert held() == {}
        sqlite.execute("BEGIN")
        sqlite.execute("SELECT count(*) FROM t").fetchone()
        assert held() == of_ours == places(fcntl.F_RDLCK, locks._SHARED)
        assert not asking.writer()
        sqlite.execute("INSERT INTO t VALUES (1)")
        assert held() == of_ours | places(fcntl.F_WRLCK, locks._RESERVED)
        assert asking.writer()
        begun = held()
        with locks.ReaderLock(ours.fileno()) as lock:
            assert lock.free, "who has begun to write keeps no reader off"
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                sqlite.execute("COMMIT")
            assert held() == begun | places(fcntl.F_WRLCK, locks._PENDING)
            with locks.ReaderLock(seen.fileno()) as late:
                assert not late.free, "who waits to write does"
        sqlite.execute("COMMIT")
        sqlite.execute("BEGIN EXCLUSIVE")
        assert held() == places(fcntl.F_WRLCK, locks._PENDING, locks._RESERVED, locks._SHARED)
