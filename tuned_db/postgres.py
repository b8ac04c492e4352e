"""`Server`: a team's PostgreSQL database as a `Place`, with errors that name it, and never its password."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import NullPool

from flashtune.codegen.value import printable, shown
from flashtune.errors import (
    DatabaseDamaged,
    DatabaseForeign,
    DatabaseNotWritable,
    DatabaseTooNew,
    InvalidInput,
    MissingDependency,
    StoreError,
)

from .files import SCHEMA_VERSION
from .place import Place

VERSION_TABLE = "flashtune_schema"
"""Where Alembic keeps the revision. The name says whose tables these are."""
EXAMPLE = "postgresql://me@host/tuned"

_SCHEMES = ("postgresql+psycopg", "postgresql", "postgres")
_SCHEME = re.compile(r"[a-z0-9+]{1,20}", re.ASCII)
"""Of an address; what is no scheme may be a password."""
_PATIENCE = {"connect_timeout": "10", "keepalives_idle": "30", "tcp_user_timeout": "30000", "client_encoding": "utf8"}
"""What libpq is told where the address doesn't say: a server that went away is noticed after half a minute."""
_LOCK = int.from_bytes(b"flashtun", "big", signed=True)
"""Key of the advisory lock that writers of one database take in turn."""
_REVISION = re.compile(r"\d{4}", re.ASCII)
_COUNT_RELATIONS = """
    SELECT count(*) FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
"""


def team_url(given: str) -> URL:
    """The address ``given``, such as ``postgresql://me@host/tuned``.

    Raises `InvalidInput`, which does not repeat what may hold a password.
    """
    wanted = f"needs an address such as {EXAMPLE}"
    scheme, separator, _ = given.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        raise InvalidInput(f"a team database {wanted}")
    if scheme not in _SCHEMES:
        raise InvalidInput(f"a team database {wanted}, not one that begins with {shown(scheme)}")
    try:
        url = make_url(given)
        readable = "\0" not in given and (url.port is None or 0 < url.port < 65536)
    except (ArgumentError, ValueError):
        readable = False
    if not readable:
        raise InvalidInput(
            f"the address of the team database can't be read: it {wanted}. "
            "Characters such as @ : / in a password are written as %40 %3A %2F"
        )
    if not url.database:
        raise InvalidInput(f"the address of the team database names no database: it {wanted}")
    return url.set(drivername=_SCHEMES[0])


class Server(Place):
    """A PostgreSQL database at an address; whether it can be reached shows when it is used.

    Writers take turns by an advisory lock, for which they wait ``timeout`` seconds. So they can't deadlock on the rows
    that measurements share, and what one has looked up another can't change before it commits. Readers wait for nobody.
    """

    def __init__(self, url: URL, *, readonly: bool, timeout: float) -> None:
        self.url = url
        self.readonly = readonly
        self._timeout = timeout

    def __str__(self) -> str:
        return f"team database {self.address}"

    @property
    def address(self) -> str:
        """The address without its password, and without what follows ``?``: libpq takes passwords there, too."""
        return self.url.set(query={}, drivername="postgresql").render_as_string(hide_password=True)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with self._failures(), _engine(self.url, writing=False, timeout=self._timeout).begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        if self.readonly:
            raise DatabaseNotWritable(f"{self} was opened read-only")
        with self._failures(), _engine(self.url, writing=True, timeout=self._timeout).begin() as connection:
            yield connection

    def schema(self, connection: Connection) -> int:
        """Raises also `DatabaseForeign` or `StoreError` where the tables are not there."""
        found = self.revision(connection)
        if found:
            return found
        if self.holds_tables(connection):
            raise DatabaseForeign(
                f"{self} holds tables of another program and none of flashtune's. "
                "It is left as it is; create a database of its own: createdb tuned"
            )
        raise StoreError(f"{self} is empty. Make its tables: flashtune db push --create, or flashtune db team create")

    def revision(self, connection: Connection) -> int:
        """The schema version, 0 if flashtune has no tables there. Raises `DatabaseTooNew` and `DatabaseDamaged`."""
        if connection.execute(text("SELECT to_regclass(:name)"), {"name": VERSION_TABLE}).scalar_one() is None:
            return 0
        found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().all()
        if len(found) != 1 or not _REVISION.fullmatch(str(found[0])) or int(found[0]) < 1:
            raise DatabaseDamaged(f"{self} is damaged: its schema version is {shown(list(found))}. Restore a backup")
        schema = int(found[0])
        if schema > SCHEMA_VERSION:
            raise DatabaseTooNew(
                f"{self} has schema version {schema}, this flashtune knows up to {SCHEMA_VERSION}. "
                "Upgrade: pip install -U flashtune"
            )
        return schema

    def holds_tables(self, connection: Connection) -> bool:
        """Whether anything is in the schema of PostgreSQL in which our tables are or would be."""
        return bool(connection.execute(text(_COUNT_RELATIONS)).scalar_one())

    def damaged(self) -> DatabaseDamaged:
        return DatabaseDamaged(f"{self} is damaged: its id is gone. Restore a backup")

    def outdated(self, schema: int) -> StoreError:
        return StoreError(
            f"{self} has schema version {schema}, older than {SCHEMA_VERSION}. Upgrade it: flashtune db team upgrade"
        )

    @property
    def oldest(self) -> int:
        return SCHEMA_VERSION

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turns errors of psycopg into ours. A block that fails has changed nothing."""
        psycopg = driver()
        try:
            yield
        except psycopg.Error as error:
            raise self._translated(error) from error
        except DBAPIError as error:
            if not isinstance(error.orig, psycopg.Error):
                raise
            raise self._translated(error.orig) from error

    def _translated(self, error: Any) -> StoreError:
        errors = driver().errors
        why = printable(str(error))
        if isinstance(error, errors.LockNotAvailable):
            return StoreError(f"{self} has been locked by another process for {self._timeout:g} s. Try again")
        if isinstance(error, (errors.InsufficientPrivilege, errors.ReadOnlySqlTransaction, errors.DiskFull)):
            return DatabaseNotWritable(f"{self} can't be written: {why}")
        if isinstance(error, (errors.UndefinedTable, errors.UndefinedColumn)):
            return DatabaseDamaged(f"{self} is damaged: {why}. Restore a backup")
        if error.sqlstate is None or error.sqlstate.startswith(("08", "57P", "28", "3D", "53")):
            return StoreError(f"{self} can't be reached: {why}")
        return StoreError(f"{self} can't be used: {why}")


def driver() -> ModuleType:
    """The module psycopg. Raises `MissingDependency` where it or libpq is not there."""
    try:
        return importlib.import_module("psycopg")
    except ImportError as error:
        raise MissingDependency(
            'a team database needs psycopg with libpq, which is not installed: pip install "flashtune[postgres]"'
        ) from error


@functools.lru_cache(maxsize=16)
def _engine(url: URL, *, writing: bool, timeout: float) -> Engine:
    """Kept, since it keeps compiled statements; it holds no connection between uses, so it survives fork."""
    made = create_engine(
        url.set(query={**_PATIENCE, **url.query}),
        poolclass=NullPool,
        # A writer is to see what the one before it has committed; a reader all of one moment.
        isolation_level="READ COMMITTED" if writing else "REPEATABLE READ",
        hide_parameters=True,
    )

    @event.listens_for(made, "begin")
    def begin(connection: Connection) -> None:
        if writing:
            take_turn(connection, timeout)
        else:
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")

    return made


def take_turn(connection: Connection, timeout: float) -> None:
    """Waits until no other writer is in a transaction, at most ``timeout`` seconds; until the end of this one."""
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {max(1, round(timeout * 1000))}")
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
