"""The file of a database: made, upgraded and prepared, so that it can be opened, and `File`, the backend that it is."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection

from flashtune.errors import DatabaseDamaged, DatabaseNotWritable, InvalidInput, StoreError
from flashtune.files import shown_path
from flashtune.settings import may_hold_password
from flashtune.tuned_db.backends.backend import Backend
from flashtune.tuned_db.records.measurement import new_id
from flashtune.tuned_db.schema.version import SCHEMA_VERSION

from .connections import Mode, connect, connection_to, raw
from .copying import copied, name_copy, same_pages
from .disks import check_writable, not_writable, on_network, publish
from .failures import sqlite_failures
from .files import SIDE_FILES, WAY_OUT, check_schema, look_beside, read_header, shown_database
from .private_copy import PrivateCopy

_log = logging.getLogger("flashtune")


class File(Backend):
    """An SQLite file that is there; see :func:`open_file`.

    One that is only read is read as it was when it was first asked, from a private copy, and never touched by SQLite.
    """

    def __init__(self, path: Path, *, readonly: bool, timeout: float) -> None:
        self.path = path
        self.readonly = readonly
        self._timeout = timeout
        self._copying = threading.Lock()
        self._copy: PrivateCopy | None = None

    def __str__(self) -> str:
        return shown_database(self.path)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        path, mode = self._path_and_mode()
        with (
            sqlite_failures(self.path, writing=False, timeout=self._timeout),
            connection_to(path, mode, self._timeout, self.path) as connection,
            connection.begin(),
        ):
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        if self.readonly:
            raise DatabaseNotWritable(f"{self} was opened read-only")
        with (
            sqlite_failures(self.path, writing=True, timeout=self._timeout),
            connection_to(self.path, "write", self._timeout) as connection,
            connection.begin(),
        ):
            yield connection

    def _path_and_mode(self) -> tuple[Path, Mode]:
        """What is read, and how."""
        if not self.readonly:
            return self.path, "read"
        with self._copying:
            if self._copy is None:
                self._copy = PrivateCopy(self.path, self._timeout)
            return self._copy.path, "immutable"

    def close(self) -> None:
        """Removes the private copy; another is made where it is read again."""
        with self._copying:
            if self._copy is not None:
                self._copy.close()
                self._copy = None

    def schema(self, connection: Connection) -> int:
        """Read through SQLite, which sees what a header alone does not: damage, a log not yet merged."""
        return raw(connection).check()

    def damaged(self, why: str) -> DatabaseDamaged:
        return DatabaseDamaged(f"{self} is damaged: {why}. {WAY_OUT}")

    def outdated(self, schema: int) -> StoreError:
        return StoreError(
            f"{self} has schema version {schema}, older than {SCHEMA_VERSION}. "
            "It is upgraded when it is next opened for writing, e.g. by flashtune tune"
        )


def path_of_file(path: str | Path) -> Path:
    """``path`` as an absolute one. Raises `InvalidInput` for an address."""
    if may_hold_password(str(path)):
        raise InvalidInput(
            "a tuning database is a path of a file system, not an address. "
            "What a team shares on a server is fetched by flashtune db pull"
        )
    return Path(os.path.abspath(path))


def open_file(path: Path, *, create: bool, readonly: bool, timeout: float) -> File:
    """The backend at ``path``, made or upgraded where that is asked for; see `Store.open`."""
    if not readonly and create and not os.path.lexists(path):
        make_database(path, timeout)
    header = read_header(path)
    if not readonly:
        check_writable(path)
        if recover(path, timeout):
            header = read_header(path)
        if header.schema < SCHEMA_VERSION:
            upgrade_database(path, timeout)
    return File(path, readonly=readonly, timeout=timeout)


def recover(path: Path, timeout: float) -> bool:
    """Ends what a process began that was killed while it wrote, and returns whether there was such a thing. Raises what
    `files.look_beside` does, before SQLite opens anything."""
    if not look_beside(Path(os.path.realpath(path))).journal:
        return False
    with sqlite_failures(path, writing=True, timeout=timeout), closing(connect(path, "write", timeout)) as connection:
        connection.begin()  # SQLite rolls back what it finds
    return True


def make_database(path: Path, timeout: float) -> None:
    """Makes a whole database beside ``path`` and moves it there, so that nobody ever opens half of one."""
    from .upgrade import upgrade

    made = path.parent / f".{path.name}-{new_id()}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
        with sqlite_failures(path, writing=True, timeout=timeout):
            made.touch(exist_ok=False)
            upgrade(made, timeout)
            _set_journal(made, "DELETE" if on_network(path) else "WAL", timeout)
        publish(made, path)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise not_writable(path, error.strerror or str(error), full=full) from error
    finally:
        with suppress(OSError):
            for suffix in ("", *SIDE_FILES):
                Path(f"{made}{suffix}").unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Upgraded:
    """What an upgrade did."""

    old: int
    new: int
    """Schema versions."""
    backup: Path
    """The database as it was."""


def upgrade_database(path: Path, timeout: float) -> Upgraded | None:
    """Brings an existing file to the current schema, once a copy of it lies beside it; None where there was nothing to
    do.

    The copy is named ``NAME.schema-N.backup``. It is whole before it has that name and has it before the upgrade
    begins, which is one transaction: a run that is killed leaves the old database or the new one, and a next run goes
    on.
    """
    from .upgrade import upgrade

    with copied(path, path, timeout) as (copy, schema):
        if schema >= SCHEMA_VERSION:  # it was in the log, or another process was first
            check_schema(path, schema)
            return None
        backup = _kept(copy, path, schema)
    with sqlite_failures(path, writing=True, timeout=timeout):
        upgrade(path, timeout)
    _log.info(
        "%s has schema %d now; as it was with %d: %s",
        shown_database(path), SCHEMA_VERSION, schema, shown_path(backup),
    )  # fmt: skip
    return Upgraded(schema, SCHEMA_VERSION, backup)


def _kept(copy: Path, path: Path, schema: int) -> Path:
    """Where the copy is kept: under the first name that is free. A backup that is there is never replaced: the same
    one (of a run that was killed, or of a process that upgrades too) serves again, and another one stays."""
    for number in itertools.count(1):
        target = path.with_name(f"{path.name}.schema-{schema}.backup{'' if number == 1 else f'-{number}'}")
        if name_copy(copy, target) or _is_same(copy, target):
            return target
    raise AssertionError("names do not end")


def _is_same(copy: Path, target: Path) -> bool:
    return target.is_file() and os.access(target, os.R_OK) and same_pages(copy, target)


def fit_journal(path: Path, timeout: float) -> None:
    """WAL on local disks, a rollback journal and a warning where several machines may write."""
    network = on_network(path)
    if network:
        _log.warning(
            "%s is on a network mount, where SQLite's locks are unreliable: tune into a local file and merge it later",
            shown_database(path),
        )
    if read_header(path).wal == network:
        with sqlite_failures(path, writing=True, timeout=timeout):
            _set_journal(path, "DELETE" if network else "WAL", timeout)


def _set_journal(path: Path, mode: str, timeout: float) -> None:
    with closing(connect(path, "write", timeout)) as connection:
        connection.patiently(f"PRAGMA journal_mode = {mode}")
