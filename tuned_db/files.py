"""The database as a file: told apart by its first 100 bytes, before SQLite touches it; errors that name a way out."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from flashtune.errors import DatabaseDamaged, DatabaseForeign, DatabaseNotWritable, DatabaseTooNew, StoreError
from flashtune.settings import APPLICATION, DATABASE_NAME

SCHEMA_VERSION = 4
"""Counts the migrations. It is the file's ``user_version``, so a database from the future is known by its header."""
APPLICATION_ID = 0x464C5455
"""'FLTU' in the header of an SQLite file says that flashtune wrote it."""

MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_NETWORK = ("nfs", "cifs", "smb", "afs", "9p", "ceph", "gluster", "lustre", "gpfs", "beegfs", "fuse.")
_OCTAL = re.compile(r"\\([0-7]{3})")
_LOCAL_FUSE = ("fuse.overlayfs", "fuse.fuse-overlayfs", "fuseblk")


@dataclass(frozen=True, slots=True)
class Header:
    """Facts of a database that flashtune wrote."""

    schema: int
    wal: bool


def read_header(path: Path) -> Header:
    """The header of ``path``. Reads 100 bytes and changes nothing.

    Raises :class:`DatabaseDamaged` for a directory, a device, an empty file (SQLite would take it for a new
    database; we never leave one, so it is what is left of a failed copy) and whatever is not SQLite,
    :class:`DatabaseForeign` for another program's database, :class:`DatabaseTooNew`, and :class:`StoreError` where it
    is missing or unreadable.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its other end
            raise DatabaseDamaged(f"tuning database {path} is a directory or a device, not a file")
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
    except FileNotFoundError as error:
        raise StoreError(f"tuning database {path} does not exist") from error
    except OSError as error:
        raise StoreError(f"tuning database {path} can't be read: {error.strerror}") from error
    if not head:
        raise DatabaseDamaged(f"tuning database {path} is empty (0 bytes). {WAY_OUT}")
    if not head.startswith(MAGIC) or len(head) < _HEADER_BYTES:
        raise DatabaseDamaged(f"tuning database {path} is not an SQLite database. {WAY_OUT}")
    (application,) = struct.unpack_from(">i", head, 68)
    if application != APPLICATION_ID:
        raise DatabaseForeign(
            f"{path} is an SQLite database that another program wrote (application id {application}). "
            "It is left as it is; choose another path for the tuning database"
        )
    (schema,) = struct.unpack_from(">i", head, 60)
    check_schema(path, schema)
    return Header(schema=schema, wal=head[18] == 2)


WAY_OUT = "It is left as it is: restore a copy, or move it away and a new one is made"


def check_schema(path: Path, schema: int) -> None:
    """Raises :class:`DatabaseTooNew` for a schema later than ours."""
    if schema > SCHEMA_VERSION:
        raise DatabaseTooNew(
            f"tuning database {path} has schema version {schema}, this flashtune knows up to {SCHEMA_VERSION}. "
            "Upgrade: pip install -U flashtune"
        )


def check_writable(path: Path) -> None:
    """Raises :class:`DatabaseNotWritable` unless ``path`` and its folder can be written (SQLite needs both)."""
    for place in (path, path.parent):
        if os.path.exists(place) and not os.access(place, os.W_OK):
            raise not_writable(path, f"{place} is read-only")


def not_writable(path: Path, why: str, *, full: bool = False) -> DatabaseNotWritable:
    """The error for ``path``, which names a place that would do. ``full``: its disk is, so that room would do, too."""
    advice = "Make room there, or pass" if full else "Pass"
    for folder in (_user_folder(), Path(tempfile.gettempdir())):
        existing = next(each for each in (folder, *folder.parents) if os.path.exists(each))
        if os.access(existing, os.W_OK) and folder != path.parent:
            place = folder / DATABASE_NAME
            return DatabaseNotWritable(
                f"tuning database {path} can't be written: {why}. {advice} another path, e.g. --db {place}"
            )
    return DatabaseNotWritable(f"tuning database {path} can't be written: {why}. {advice} a writable path with --db")


def _user_folder() -> Path:
    return platformdirs.user_data_path(APPLICATION, appauthor=False)


def on_network(path: Path) -> bool:
    """Whether ``path`` is on a network mount, where SQLite's WAL mode must not be used. Known on Linux only."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mounts = Path("/proc/self/mounts").read_text("utf-8", errors="replace")
    except OSError:
        return False
    return is_network(filesystem_type(path, mounts))


def filesystem_type(path: Path, mounts: str) -> str:
    """Type of the file system that holds ``path``, from the text of ``/proc/self/mounts``."""
    best, kind = Path("/"), ""
    for line in mounts.splitlines():
        _, place, found, *_ = [*line.split(" "), "", "", ""]
        folder = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), place))  # a space is \040
        if path.is_relative_to(folder) and folder.is_relative_to(best):
            best, kind = folder, found
    return kind


def is_network(kind: str) -> bool:
    """Whether a file system of this type is shared between machines (unknown FUSE types count as shared)."""
    return kind.startswith(_NETWORK) and kind not in _LOCAL_FUSE


def publish(finished: Path, path: Path) -> None:
    """Moves ``finished`` to ``path`` unless something is there: of several processes the first wins, and no reader
    ever sees a part of a file. ``finished`` is gone afterwards."""
    claim(finished, path)
    finished.unlink(missing_ok=True)


def claim(finished: Path, path: Path) -> bool:
    """Gives ``finished`` the name ``path`` unless something is there, and returns whether it did; the old name may
    stay."""
    try:
        os.link(finished, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        return _claim_without_links(finished, path)
    return True


def _claim_without_links(finished: Path, path: Path) -> bool:
    """For file systems without hard links: whoever creates ``path`` owns it and replaces it at once."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    finished.replace(path)
    return True


@contextmanager
def sqlite_failures(path: Path, *, writing: bool, timeout: float) -> Iterator[None]:
    """Turns SQLite's errors into ours, each with the path. Takes those that SQLAlchemy wraps, too."""
    try:
        yield
    except sqlite3.Error as error:
        raise _translated(path, error, writing, timeout) from error
    except UnicodeDecodeError as error:  # Python's module reads SQLite's messages, which quote what is damaged
        raise DatabaseDamaged(f"tuning database {path} is damaged: a name in it is no text. {WAY_OUT}") from error
    except Exception as error:
        inner = getattr(error, "orig", None)
        if not isinstance(inner, sqlite3.Error):
            raise
        raise _translated(path, inner, writing, timeout) from error


def _translated(path: Path, error: sqlite3.Error, writing: bool, timeout: float) -> StoreError:
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF
    short_read = code == sqlite3.SQLITE_IOERR_SHORT_READ
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_FORMAT):
        return DatabaseDamaged(f"tuning database {path} is damaged: {error}. {WAY_OUT}")
    if short_read:
        return DatabaseDamaged(f"tuning database {path} is damaged: it is shorter than it says. {WAY_OUT}")
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreError(f"tuning database {path} has been locked by another process for {timeout:g} s")
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
        return not_writable(path, str(error), full=full)
    return StoreError(f"tuning database {path} can't be used: {error}")
