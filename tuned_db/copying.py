"""A copy of a database that others may write meanwhile: whole, checked, on the disk, and then under its name."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from flashtune.errors import DatabaseDamaged, DatabaseNotWritable

from .files import WAY_OUT, claim, sqlite_failures
from .records import new_id
from .sqlite import Mode, connect

SIDE_FILES = ("-journal", "-wal", "-shm")
ABANDONED = 3600
"""Seconds after which an unfinished file is nobody's any more."""
_HEADER, _PIECE = 100, 2**20
_TARGET_CODES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
_TARGET_FAULTS = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_TRUNCATE)


@contextmanager
def copied(path: Path, target: Path, mode: Mode, timeout: float) -> Iterator[tuple[Path, int]]:
    """A finished copy of the database at ``path`` in the folder of ``target`` under a name of its own, and its schema.

    What was committed when the copy began is in it, and nothing later; writers wait only where there is no WAL. The
    copy needs no side files. It is removed at the end of the block if it still has that name; one that a killed run
    left behind is in nobody's way. Raises `DatabaseDamaged` where what was copied is not sound, `DatabaseNotWritable`
    where there is no room for it.
    """
    copy = target.parent / f".{target.name}-{new_id()}.tmp"
    try:
        try:
            os.close(os.open(copy, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            schema = _copy(path, copy, target, mode, timeout)
            with copy.open("r+b") as file:
                os.fsync(file.fileno())
            copy.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IWUSR)
        except OSError as error:
            raise _no_room(target, error.strerror or str(error)) from error
        yield copy, schema
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
        if not claim(copy, target):
            return False
        if hasattr(os, "O_DIRECTORY"):  # elsewhere a folder can't be opened, and names are safe without
            folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        raise _no_room(target, error.strerror or str(error)) from error
    return True


def same_pages(one: Path, other: Path) -> bool:
    """Whether two finished copies hold the same, byte for byte, whatever their counts of changes say."""
    with one.open("rb") as first, other.open("rb") as second:
        if _uncounted(first.read(_HEADER)) != _uncounted(second.read(_HEADER)):
            return False
        while piece := first.read(_PIECE):
            if piece != second.read(_PIECE):
                return False
        return not second.read(1)


def _uncounted(header: bytes) -> bytes:
    """Without the count of changes (twice) and the version of SQLite that made the last: the file format, 1.3."""
    return header[:24] + header[28:92]


def _copy(path: Path, copy: Path, target: Path, mode: Mode, timeout: float) -> int:
    with sqlite_failures(path, writing=False, timeout=timeout), closing(connect(path, mode, timeout)) as source:
        # A read transaction first: it waits for a lock as long as is allowed, where backup() would wait for ever.
        source.execute("BEGIN")
        source.execute("SELECT count(*) FROM sqlite_master").fetchone()
        with closing(connect(copy, "write", timeout)) as made:
            try:
                source.backup(made)
                made.execute("PRAGMA journal_mode = DELETE")
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", None) or 0
                if code & 0xFF in _TARGET_CODES or code in _TARGET_FAULTS:
                    raise _no_room(target, str(error)) from error
                raise
            (verdict,) = made.execute("PRAGMA quick_check(1)").fetchone()
            (schema,) = made.execute("PRAGMA user_version").fetchone()
    if verdict != "ok":
        raise DatabaseDamaged(f"tuning database {path} is damaged: {verdict}. {WAY_OUT}")
    return int(schema)


def _no_room(target: Path, why: str) -> DatabaseNotWritable:
    return DatabaseNotWritable(
        f"the copy {target} can't be written: {why}. Nothing was changed; make room there, or choose another folder"
    )
