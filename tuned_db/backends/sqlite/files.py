"""The file of a database and the files beside it: what they are is found out before SQLite touches any of them."""

from __future__ import annotations

import os
import stat
import struct
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from flashtune.errors import DatabaseDamaged, DatabaseForeign, DatabaseTooNew, InvalidInput, StoreError
from flashtune.files import open_regular, shown_path
from flashtune.tuned_db.schema.version import APPLICATION_ID, SCHEMA_VERSION

MAGIC = b"SQLite format 3\0"
SIDE_FILES = ("-journal", "-wal", "-shm")
WAY_OUT = "It is left as it is: flashtune db restore puts a backup in its place; if it is moved away a new one is made"
_HEADER_BYTES = 100
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")


@dataclass(frozen=True, slots=True)
class FileHeader:
    """Facts of a database that flashtune wrote."""

    schema: int
    wal: bool


def shown_database(path: Path) -> str:
    """The database at ``path`` for a message."""
    return f"tuning database {shown_path(path)}"


def replaceable(real: Path) -> bool:
    """Whether a stranger may put something else at ``real``, which is no link and has none in it.

    SQLite opens a file by its name, and waits for ever where a pipe has it by then. Strangers own a folder above it, or
    everybody may write there. A group that this user or root lets write is none: with umask 002 every folder is so.
    """
    if not hasattr(os, "geteuid"):
        return False
    trusted = (0, os.geteuid())
    try:
        entry = os.lstat(real)
        for folder in map(os.lstat, real.parents):
            kept = folder.st_mode & stat.S_ISVTX and entry.st_uid in trusted
            if folder.st_uid not in trusted or (folder.st_mode & stat.S_IWOTH and not kept):
                return True
            entry = folder
    except OSError:  # who opens it says why
        return True
    return False


def read_header(path: Path) -> FileHeader:
    """The header of ``path``. Reads 100 bytes and changes nothing.

    Raises :class:`DatabaseDamaged` for a directory, a device, an empty file (SQLite would take it for a new
    database; we never leave one, so it is what is left of a failed copy) and whatever is not SQLite,
    :class:`DatabaseForeign` for another program's database, :class:`DatabaseTooNew`, and :class:`StoreError` where it
    is missing or unreadable.
    """
    with opened(path) as file:
        return header_of(path, file)


def header_of(path: Path, file: BinaryIO) -> FileHeader:
    """:func:`read_header` of a file that is open."""
    try:
        head = file.read(_HEADER_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    if not head:
        raise DatabaseDamaged(f"{shown_database(path)} is empty (0 bytes). {WAY_OUT}")
    if not head.startswith(MAGIC) or len(head) < _HEADER_BYTES:
        raise DatabaseDamaged(f"{shown_database(path)} is not an SQLite database. {WAY_OUT}")
    (application,) = struct.unpack_from(">i", head, 68)
    if application != APPLICATION_ID:
        raise DatabaseForeign(
            f"{shown_path(path)} is an SQLite database that another program wrote (application id {application}). "
            "It is left as it is; choose another path for the tuning database"
        )
    (schema,) = struct.unpack_from(">i", head, 60)
    check_schema(path, schema)
    return FileHeader(schema=schema, wal=head[18] == 2)


def check_schema(path: Path, schema: int) -> None:
    """Raises :class:`DatabaseTooNew` for a schema later than ours, :class:`DatabaseDamaged` for one that never was."""
    if schema > SCHEMA_VERSION:
        raise DatabaseTooNew(
            f"{shown_database(path)} has schema version {schema}, this flashtune knows up to {SCHEMA_VERSION}. "
            "Upgrade: pip install -U flashtune"
        )
    if schema < 0:
        raise DatabaseDamaged(f"{shown_database(path)} is damaged: its schema version is {schema}. {WAY_OUT}")


def is_database(path: Path) -> bool:
    """Whether ``path`` is an SQLite file by its first bytes. Raises `InvalidInput` for what is no file, ``OSError``."""
    file = open_regular(path)
    try:
        return file.read(len(MAGIC)) == MAGIC
    finally:
        _close(file)


def unreadable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{shown_database(path)} can't be read: {error.strerror}")


@dataclass(frozen=True, slots=True)
class Beside:
    """What lies beside a database and has a part of it."""

    journal: bool
    """Pages of before a transaction, which SQLite would write back unless one is at it."""
    log: bool
    """Pages that were committed."""


def look_beside(path: Path) -> Beside:
    """What lies beside the database at ``path``, which is no link: SQLite opens these files by their names, so they are
    as much input as the database is.

    Raises `DatabaseDamaged` for a side file that is a link, a pipe or a folder, and for a journal that names another
    file: SQLite would delete that when it rolls back. Only transactions on several databases make such journals, and
    flashtune has none.
    """
    found = {suffix: _bytes_beside(path, suffix) for suffix in SIDE_FILES}
    return Beside(bool(found["-journal"]) and _is_hot(path, Path(f"{path}-journal")), bool(found["-wal"]))


def _is_hot(path: Path, journal: Path) -> bool:
    """Whether SQLite may write pages of ``journal`` back."""
    try:
        with open_regular(journal, links=False) as file:
            first = file.read(1)
            file.seek(max(0, os.fstat(file.fileno()).st_size - len(_JOURNAL_MAGIC)))
            last = file.read(len(_JOURNAL_MAGIC))
    except FileNotFoundError:  # its transaction has ended
        return False
    except (OSError, InvalidInput) as error:
        raise StoreError(
            f"{shown_database(path)} can't be used: {shown_path(journal)} can't be read: {error}"
        ) from error
    if last == _JOURNAL_MAGIC:
        raise DatabaseDamaged(
            f"{shown_database(path)} is not used: {shown_path(journal)} names a file for SQLite to delete, as no "
            "journal of flashtune does. Nothing was read or changed; do not trust where it came from"
        )
    return first not in (b"", b"\0")  # SQLite ends a transaction by a zero where it keeps the file


def _bytes_beside(path: Path, suffix: str) -> int:
    """Size of a side file, 0 where there is none."""
    try:
        found = os.lstat(f"{path}{suffix}")
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise DatabaseDamaged(
            f"{shown_database(path)} is not used: {shown_path(path)}{suffix} is not a file, as SQLite makes it, but a "
            "link, a pipe or a folder. Nothing was read or changed; remove it, or copy the database without it"
        )
    return found.st_size


_of_sqlite: Counter[tuple[int, int]] = Counter()
"""How many connections of SQLite this process has to a file, by device and inode."""
_waiting: defaultdict[tuple[int, int], list[BinaryIO]] = defaultdict(list)
_counting = threading.Lock()


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file of a database, open for reading; raises what :func:`read_header` does of what is no file.

    Of a file that this process has open in SQLite it stays open until that is closed: on POSIX whoever closes any
    descriptor of a file gives up all locks of the process on it, and a writer would go on without its own.
    """
    try:
        file = open_regular(path, "tuning database")
    except InvalidInput as error:
        raise DatabaseDamaged(f"{error}. {WAY_OUT}") from error
    except FileNotFoundError as error:
        raise StoreError(f"{shown_database(path)} does not exist") from error
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        yield file
    finally:
        _close(file)


def _close(file: BinaryIO) -> None:
    found = os.fstat(file.fileno())
    with _counting:
        name = found.st_dev, found.st_ino
        if _of_sqlite[name] > 0:
            _waiting[name].append(file)
            return
        del _of_sqlite[name]
    file.close()


def of_sqlite(path: Path) -> tuple[int, int]:
    """Says that SQLite is about to open ``path``. What is returned is for :func:`no_longer_of_sqlite`."""
    found = os.stat(path)
    name = found.st_dev, found.st_ino
    with _counting:
        _of_sqlite[name] += 1
    return name


def no_longer_of_sqlite(name: tuple[int, int]) -> None:
    """Says that SQLite has closed what :func:`of_sqlite` named."""
    left: list[BinaryIO] = []
    with _counting:
        _of_sqlite[name] -= 1
        if _of_sqlite[name] <= 0:
            del _of_sqlite[name]
            left = _waiting.pop(name, [])
    for each in left:
        each.close()
