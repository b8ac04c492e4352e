"""Copies of a database that others may write meanwhile: of one moment, whole, and made by reading alone.

The database and its log are read by their descriptors. Copies for others are whole, checked and on the disk before they
have their names; those that one process makes for itself are in `private_copy.py`.
"""

from __future__ import annotations

import errno
import math
import os
import re
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from flashtune.errors import DatabaseDamaged, DatabaseNotWritable, InvalidInput, StoreError
from flashtune.files import claim, open_regular, shown_path, sync_folder
from flashtune.tuned_db.records.measurement import new_id
from flashtune.values import printable

from .connections import connect
from .failures import code_of, left_by_a_crash, locked, sqlite_failures
from .files import (
    SIDE_FILES,
    WAY_OUT,
    header_of,
    look_beside,
    opened,
    read_header,
    shown_database,
    unreadable,
)
from .locks import KNOWN, ReaderLock

ABANDONED = 3600
"""Seconds after which an unfinished file is nobody's any more."""
_HEADER, _LOG_HEADER, _PIECE = 100, 32, 2**20
_NO_ROOM = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_TRUNCATE)
_PAUSE, _MOMENT = 0.02, 0.5
"""Seconds between two attempts, and those in which a journal may go whose writer has just ended."""


@contextmanager
def copied(path: Path, target: Path, timeout: float) -> Iterator[tuple[Path, int]]:
    """A finished copy of the database at ``path`` in the folder of ``target`` under a name of its own, and its schema.

    What was committed when the copy began is in it, and nothing later. The copy needs no side files. It is removed at
    the end of the block if it still has that name; one that a killed run left behind is in nobody's way. Raises
    `DatabaseDamaged` where what was copied is not sound, `DatabaseNotWritable` where there is no room for it.
    """
    copy = target.parent / f".{target.name}-{new_id()}.tmp"
    try:
        try:
            copy_database(path, copy, timeout)
            with copy.open("r+b") as file:
                os.fsync(file.fileno())
            copy.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IWUSR)
        except OSError as error:
            raise _no_room(target, error.strerror or str(error)) from error
        yield copy, read_header(copy).schema
    finally:
        with suppress(OSError):
            for suffix in ("", *SIDE_FILES):
                Path(f"{copy}{suffix}").unlink(missing_ok=True)


def leftovers(path: Path) -> list[Path]:
    """Unfinished files beside the database at ``path`` that runs left behind when they were killed: not touched for
    `ABANDONED` seconds. Nothing reads them."""
    pattern = re.compile(rf"\.{re.escape(path.name)}-[0-9a-f]{{8}}(-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}\.tmp(-\w+)?")
    named = (each for each in path.parent.iterdir() if pattern.fullmatch(each.name))
    return sorted(each for each in named if time.time() - each.lstat().st_mtime > ABANDONED)


def name_copy(copy: Path, target: Path) -> bool:
    """Gives a finished copy its name for good; False where something has that name already, which is left alone."""
    try:
        claim(copy, target)
        sync_folder(target.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise _no_room(target, error.strerror or str(error)) from error
    return True


def same_pages(one: Path, other: Path) -> bool:
    """Whether two finished copies hold the same, byte for byte, whatever their counts of changes say."""
    with open_regular(one) as first, open_regular(other) as second:
        if _uncounted(first.read(_HEADER)) != _uncounted(second.read(_HEADER)):
            return False
        while piece := first.read(_PIECE):
            if piece != second.read(_PIECE):
                return False
        return not second.read(1)


def _uncounted(header: bytes) -> bytes:
    """Without the count of changes (twice) and the version of SQLite that made the last: the file format, 1.3."""
    return header[:24] + header[28:92]


def copy_database(
    path: Path, copy: Path, timeout: float, *, fold: bool = True, check: bool = True, within: float = math.inf
) -> None:
    """Writes what is committed in the database at ``path`` to the new file ``copy``, which is without a log.

    The database and its log are read by their descriptors, and nothing is written there. ``fold`` makes it a file that
    SQLite writes with a rollback journal; ``check`` looks at its tables and at each page. Raises what
    `files.read_header` and `schema.check_tables` do, `DatabaseDamaged`, `StoreError` where it is never at rest for
    ``timeout`` seconds, and ``OSError`` where ``copy`` can't be written.
    """
    start = time.monotonic()
    while why := _attempt(path, copy, start + within):
        # Who rolls back or ends a transaction takes a moment; a journal that nobody has is there for good.
        allowed = min(_MOMENT, timeout) if why == _JOURNAL and KNOWN else timeout
        if time.monotonic() - start >= min(allowed, within):
            raise left_by_a_crash(path) if why == _JOURNAL else locked(path, timeout)
        time.sleep(_PAUSE)
    with sqlite_failures(path, writing=False, timeout=timeout):
        _settle(path, copy, timeout, fold or Path(f"{copy}-wal").exists(), check)


def _settle(path: Path, copy: Path, timeout: float, fold: bool, check: bool) -> None:
    with closing(connect(copy, "write", timeout, path)) as made:
        try:
            if fold:
                made.patiently("PRAGMA journal_mode = DELETE")
        except sqlite3.OperationalError as error:
            if code_of(error) & 0xFF == sqlite3.SQLITE_FULL or code_of(error) in _NO_ROOM:
                raise OSError(errno.ENOSPC, str(error)) from error
            raise
        if check:
            made.check()
            made.execute("PRAGMA ignore_check_constraints = ON")  # rows are judged one by one when they are read
            (verdict,) = made.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise DatabaseDamaged(f"{shown_database(path)} is damaged: {printable(str(verdict))}. {WAY_OUT}")
    if Path(f"{copy}-wal").exists():
        raise DatabaseDamaged(f"{shown_database(path)} is damaged: its log can't be read. {WAY_OUT}")


_LOCKED, _JOURNAL, _CHANGED = "locked", "journal", "changed"


def _attempt(path: Path, copy: Path, until: float) -> str:
    """Copies the file and then its log; returns why that has to be done again, if it has.

    What is moved from the log into the file meanwhile does no harm: as long as the log is not begun anew, it is in the
    copy of the log, too, which counts more. The lock keeps others from writing to the file by themselves, and from
    removing the log.
    """
    real = Path(os.path.realpath(path))  # where SQLite looks for side files
    for suffix in ("", *SIDE_FILES):
        Path(f"{copy}{suffix}").unlink(missing_ok=True)
    with opened(path) as file, ReaderLock(file.fileno()) as lock:
        header_of(path, file)
        if not lock.free:
            return _LOCKED
        before = _moment(path, real, file)
        if before.journal and not lock.writer():
            return _JOURNAL
        _pour(path, file, copy, until)
        with _log(path, real) as log:
            if log is not None and os.fstat(log.fileno()).st_size:
                _pour(path, log, Path(f"{copy}-wal"), until)
        after = _moment(path, real, file)
        began = after.journal and not lock.writer()
    unchanged = before.log == after.log and (bool(before.log) or before.size_and_times == after.size_and_times)
    return "" if unchanged and after.named and not began else _CHANGED


class _Moment(NamedTuple):
    """By what it shows that nobody wrote meanwhile."""

    named: bool
    """Whether the file still has its name."""
    journal: bool
    size_and_times: tuple[int, int, int]
    log: bytes
    """The header of the log, which has other salts when it is begun anew."""


def _moment(path: Path, real: Path, file: BinaryIO) -> _Moment:
    journal = look_beside(real).journal
    found = os.fstat(file.fileno())
    named = os.path.exists(real) and os.path.samestat(found, os.stat(real))
    with _log(path, real) as log:
        header = b"" if log is None else log.read(_LOG_HEADER)
    return _Moment(named, journal, (found.st_size, found.st_mtime_ns, found.st_ctime_ns), header)


@contextmanager
def _log(path: Path, real: Path) -> Iterator[BinaryIO | None]:
    try:
        log = open_regular(f"{real}-wal", links=False)
    except FileNotFoundError:
        yield None
        return
    except (OSError, InvalidInput) as error:
        raise StoreError(f"{shown_database(path)} can't be read: {shown_path(real)}-wal can't be: {error}") from error
    with log:
        yield log


def _pour(path: Path, source: BinaryIO, target: Path, until: float) -> None:
    """Writes what ``source`` holds to the new file ``target``, without its holes."""
    size = os.fstat(source.fileno()).st_size
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as made:
        place = 0
        while place < size:
            try:
                place, end = _data(source, place, size)
                source.seek(place)
                piece = source.read(min(_PIECE, end - place))
            except OSError as error:
                raise unreadable(path, error) from error
            if not piece:
                break
            made.seek(place)
            made.write(piece)
            place += len(piece)
            if time.monotonic() > until:
                raise StoreError(f"{shown_database(path)} takes too long to be read: it has {size / 1e6:.0f} MB")
        made.truncate(size)


def _data(file: BinaryIO, place: int, size: int) -> tuple[int, int]:
    """Where the next data at or after ``place`` begins and ends: a few bytes may pass for terabytes."""
    if not hasattr(os, "SEEK_DATA"):
        return place, size
    try:
        start = file.seek(place, os.SEEK_DATA)
        return start, file.seek(start, os.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole
            return size, size
        if error.errno == errno.EINVAL:  # a disk that knows no holes
            return place, size
        raise


def _no_room(target: Path, why: str) -> DatabaseNotWritable:
    return DatabaseNotWritable(
        f"the copy {shown_path(target)} can't be written: {why}. "
        "Nothing was changed; make room there, or choose another folder"
    )
