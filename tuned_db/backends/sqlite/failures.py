"""Errors of SQLite as ours: each names the file and a way out, and carries foreign text only as one clean line."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashtune.errors import DatabaseDamaged, StoreError
from flashtune.files import shown_path
from flashtune.values import printable

from .disks import not_writable
from .files import WAY_OUT, shown_database


class _Ended(threading.local):
    by: BaseException | None = None


ended = _Ended()
"""What made this thread give up a statement (`connections.py`), until the error arrives with which SQLite says that."""


@contextmanager
def sqlite_failures(path: Path, *, writing: bool, timeout: float) -> Iterator[None]:
    """Turns SQLite's errors into ours, each with the path; takes those that SQLAlchemy wraps, too. Ctrl-C while SQLite
    was at work is raised as such."""
    try:
        yield
    except sqlite3.Error as error:
        raise _translated(path, error, writing, timeout) from error
    except UnicodeDecodeError as error:  # Python's module reads SQLite's messages, which quote what is damaged
        raise DatabaseDamaged(f"{shown_database(path)} is damaged: a name in it is no text. {WAY_OUT}") from error
    except MemoryError as error:
        raise StoreError(
            f"{shown_database(path)} can't be used: there is not enough memory for what is in it"
        ) from error
    except Exception as error:
        inner = getattr(error, "orig", None)
        if isinstance(inner, StoreError):
            raise inner from error
        if not isinstance(inner, sqlite3.Error):
            raise
        raise _translated(path, inner, writing, timeout) from error


def _translated(path: Path, error: sqlite3.Error, writing: bool, timeout: float) -> BaseException:
    code = code_of(error)
    primary = code & 0xFF
    why = printable(str(error))
    if primary == sqlite3.SQLITE_INTERRUPT:
        by, ended.by = ended.by, None
        return KeyboardInterrupt() if by is None else by
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_FORMAT):
        return DatabaseDamaged(f"{shown_database(path)} is damaged: {why}. {WAY_OUT}")
    if primary == sqlite3.SQLITE_TOOBIG:
        return DatabaseDamaged(
            f"{shown_database(path)} is damaged: it holds a value longer than any of flashtune. {WAY_OUT}"
        )
    if code == sqlite3.SQLITE_IOERR_SHORT_READ:
        return DatabaseDamaged(f"{shown_database(path)} is damaged: it is shorter than it says. {WAY_OUT}")
    if code == sqlite3.SQLITE_READONLY_ROLLBACK:
        return left_by_a_crash(path)
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return locked(path, timeout)
    shared_memory = (sqlite3.SQLITE_IOERR_SHMOPEN, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_SHMMAP)
    refused = (
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
    )
    if code in shared_memory or (writing and primary in refused):  # in WAL mode readers need a side file, too
        full = primary == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE
        return not_writable(path, why, full=full)
    return StoreError(f"{shown_database(path)} can't be used: {why}")


def code_of(error: sqlite3.Error) -> int:
    """SQLite's extended code; 0 for an error that Python's module raised by itself."""
    return int(getattr(error, "sqlite_errorcode", None) or 0)


def locked(path: Path, timeout: float) -> StoreError:
    """The error for a database that others kept busy for as long as is allowed."""
    return StoreError(f"{shown_database(path)} has been locked by another process for {timeout:g} s")


def left_by_a_crash(path: Path) -> StoreError:
    """The error for a reader of a database of which a transaction was begun and not ended."""
    return StoreError(
        f"{shown_database(path)} has a rollback journal beside it: a process writes it, or was killed as it did. "
        f"If none does, this brings it back to before that: flashtune db upgrade --db {shown_path(path)}"
    )
