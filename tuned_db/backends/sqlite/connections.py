"""SQLite as it should be run on a file that somebody else may have written.

Each connection has limits, looks at the tables before anything else (`expected_tables.py`), and gives up a statement
that takes more steps than the file can need. Ctrl-C ends it at any moment. Errors are ours and name the file.
"""

from __future__ import annotations

import functools
import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, TypeVar

import sqlalchemy
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import NullPool

from flashtune.errors import DatabaseDamaged, StoreError
from flashtune.tuned_db.backends.sqlite.expected_tables import check_tables

from .failures import code_of, ended
from .files import WAY_OUT, no_longer_of_sqlite, of_sqlite, shown_database

Mode = Literal["write", "read", "readonly", "immutable"]
"""``write``: transactions begin with BEGIN IMMEDIATE, so that two writers wait for each other instead of failing.
``read``: a file that was opened for writing, read; SQLite may recover it after a crash and tidies up its side files.
``readonly``: a file without a log, which SQLite then neither changes nor makes anything beside. ``immutable``: one that
nobody writes: no side files, no locks."""

_URI = {"write": "rw", "read": "rw", "readonly": "ro", "immutable": "ro&immutable=1"}
LONGEST = 2**17
"""Bytes of a value, a row or a statement. No value that `limits.py` takes has a tenth of that."""
STEPS, STEPS_PER_BYTE = 5_000_000, 10
"""Steps of SQLite's machine that a statement may take, and how many more for each byte of the file: a whole
``integrity_check``, which takes most, needs 0.2."""
_TABLE_STEPS = 100_000
"""Those for reading which tables there are, of which ours takes a few hundred."""
_TICK = 20_000
"""Steps between two looks at what else there is to do: less than a millisecond."""
_SLICE, _PAUSE = 0.1, 0.005
"""Seconds that SQLite itself waits for a lock, in which it hears of nothing, and between two such waits."""

T = TypeVar("T")


class _Watch:
    """Looks at the clock, the steps taken and the signals that came while SQLite runs a statement."""

    def __init__(self, name: Path, steps: int) -> None:
        self._name = name
        self.most = self._left = steps
        """Steps of each statement."""
        self.deadline = math.inf
        """When all of them must have ended."""

    def restart(self) -> None:
        """For another statement. Raises `StoreError` where the time is over."""
        self._left = self.most
        self._check_time()

    def ticks(self) -> Iterator[bool]:
        """Whether to give up, again and again.

        What a signal handler raises while SQLite runs, as Ctrl-C does, it raises where Python goes on in here, and the
        module sqlite3 would drop it. A generator goes on inside its ``try``; a function would begin outside of it.
        """
        stop = False
        while True:
            try:
                while True:
                    yield stop
                    stop = self._count()
            except GeneratorExit:
                raise
            except BaseException as raised:
                ended.by, stop = raised, True

    def _count(self) -> bool:
        self._left -= _TICK
        if self._left < 0:
            raise DatabaseDamaged(
                f"{shown_database(self._name)} can't be used: a query took more steps than a file of this size can "
                f"need. {WAY_OUT}"
            )
        self._check_time()
        return False

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise StoreError(f"{shown_database(self._name)} is not used: it took too long to look into it")


class Connection(sqlite3.Connection):
    """An autocommit connection that waits for locks where Python hears of signals; see :func:`connect`."""

    mode: Mode
    name: Path
    """Of the file, for messages."""
    timeout: float
    watch: _Watch
    _file: tuple[int, int]

    def cursor(self, *arguments: Any, **options: Any) -> Any:
        """A new one, as each statement of SQLAlchemy has."""
        self.watch.restart()
        return super().cursor(*arguments, **options)

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        self.watch.restart()
        return super().execute(*arguments)

    def begin(self, how: str = "") -> None:
        """Begins a transaction and looks at the tables. Raises `StoreError` where they are not flashtune's."""
        how = how or ("IMMEDIATE" if self.mode == "write" else "DEFERRED")
        self.patiently(f"BEGIN {how}")
        self.check()

    def check(self) -> int:
        """The schema version, if the tables are those that it has, else raises `StoreError`."""
        most, self.watch.most = self.watch.most, min(self.watch.most, _TABLE_STEPS)
        try:
            return self._waiting(lambda: check_tables(self, self.name))
        finally:
            self.watch.most = most

    def commit(self) -> None:
        self._waiting(super().commit)

    def patiently(self, statement: str) -> sqlite3.Cursor:
        """Executes what may have to wait for a lock."""
        return self._waiting(lambda: self.execute(statement))

    def checkpoint(self) -> bool:
        """Moves the log into the file and cuts it off; True where a reader kept that from being done in time."""
        until = time.monotonic() + self.timeout
        while self.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            if time.monotonic() >= until:
                return True
            time.sleep(_PAUSE)
        return False

    def _waiting(self, action: Callable[[], T]) -> T:
        until = time.monotonic() + self.timeout
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                if code_of(error) & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= until:
                    raise
            time.sleep(_PAUSE)

    def close(self) -> None:
        super().close()
        if self._file != (0, 0):
            no_longer_of_sqlite(self._file)
            self._file = 0, 0


def connect(path: Path, mode: Mode, timeout: float, name: Path | None = None) -> Connection:
    """An autocommit connection to an existing file; ``timeout`` in seconds is how long it waits for a lock, ``name`` is
    what messages call the file."""
    uri = f"{path.as_uri()}?mode={_URI[mode]}"
    file = of_sqlite(path)
    try:
        connection = sqlite3.connect(
            uri,
            uri=True,
            timeout=min(timeout, _SLICE),
            isolation_level=None,
            check_same_thread=False,
            factory=Connection,
        )
    except BaseException:
        no_longer_of_sqlite(file)
        raise
    connection._file, connection.mode, connection.name, connection.timeout = file, mode, name or path, timeout
    try:
        _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _bytes_at(path: Path) -> int:
    """Size of a file, 0 where there is none: the last of other processes to close a database removes its log."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _prepare(connection: Connection, path: Path) -> None:
    size = _bytes_at(path) + _bytes_at(Path(f"{path}-wal"))
    connection.watch = watch = _Watch(connection.name, STEPS + STEPS_PER_BYTE * size)
    ticks = watch.ticks()
    next(ticks)
    connection.set_progress_handler(ticks.__next__, _TICK)
    connection.text_factory = _text
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, LONGEST)
    connection.setlimit(sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100)
    connection.setlimit(sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 1)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    if connection.mode == "write":
        connection.execute("PRAGMA foreign_keys = ON")
        # Without a log, pages that leave the cache early wait for readers, each as long as is allowed; so a large
        # transaction beside one reader would take hours to fail. They all leave together, and wait once.
        connection.execute("PRAGMA cache_spill = OFF")
    else:
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.execute("PRAGMA query_only = ON")


def _text(stored: bytes) -> str | bytes:
    """What is not UTF-8 stays bytes, which no check takes: one such row must not make all others unreadable."""
    try:
        return stored.decode()
    except UnicodeDecodeError:
        return stored


_wanted: ContextVar[tuple[Path, Mode, float, Path | None]] = ContextVar("wanted")


@functools.cache
def _engine() -> Engine:
    """One for all files, since it keeps compiled statements; it holds no connection between uses, so it survives fork
    and a replaced file."""
    made = create_engine("sqlite://", creator=lambda: connect(*_wanted.get()), poolclass=NullPool)

    @event.listens_for(made, "begin")
    def begin(connection: sqlalchemy.Connection) -> None:
        raw(connection).begin()

    return made


def connection_to(path: Path, mode: Mode, timeout: float, name: Path | None = None) -> sqlalchemy.Connection:
    """What :func:`connect` gives, for SQLAlchemy. Its transactions begin with a look at the tables."""
    token = _wanted.set((path, mode, timeout, name))
    try:
        return _engine().connect()
    finally:
        _wanted.reset(token)


def raw(connection: sqlalchemy.Connection) -> Connection:
    """What is below a connection of :func:`connection_to`."""
    below = connection.connection.dbapi_connection
    assert isinstance(below, Connection)
    return below
