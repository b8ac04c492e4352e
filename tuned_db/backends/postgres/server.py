"""`Server`: a team's PostgreSQL database as a `Backend`, with errors that name it, and never its password."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from flashtune.errors import (
    DatabaseDamaged,
    DatabaseForeign,
    DatabaseNotWritable,
    DatabaseTooNew,
    StoreError,
)
from flashtune.tuned_db.backends.backend import Backend
from flashtune.tuned_db.schema.version import SCHEMA_VERSION
from flashtune.values import shown

from .address import Address
from .connecting import driver, engine

VERSION_TABLE = "flashtune_schema"
"""Where Alembic keeps the revision. The name says whose tables these are."""

_REVISION = re.compile(r"\d{4}", re.ASCII)
_COUNT_RELATIONS = """
    SELECT count(*) FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
"""


class Server(Backend):
    """A PostgreSQL database at an address; whether it can be reached shows when it is used.

    Writers take turns by an advisory lock, for which they wait ``timeout`` seconds. So they can't deadlock on the rows
    that measurements share, and what one has looked up another can't change before it commits. Readers wait for nobody.
    """

    def __init__(self, address: Address, *, readonly: bool, timeout: float) -> None:
        self.address = address
        self.readonly = readonly
        self._timeout = timeout

    def __str__(self) -> str:
        return f"team database {self.address}"

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with self._failures(), engine(self.address, writing=False, timeout=self._timeout).begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        if self.readonly:
            raise DatabaseNotWritable(f"{self} was opened read-only")
        with self._failures(), engine(self.address, writing=True, timeout=self._timeout).begin() as connection:
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
        found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE} LIMIT 2")).scalars().all()
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

    def damaged(self, why: str) -> DatabaseDamaged:
        return DatabaseDamaged(f"{self} is damaged: {why}. Restore a backup")

    def outdated(self, schema: int) -> StoreError:
        return StoreError(
            f"{self} has schema version {schema}, older than {SCHEMA_VERSION}. Upgrade it: flashtune db team upgrade"
        )

    @property
    def oldest(self) -> int:
        return SCHEMA_VERSION

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turns whatever the driver, SQLAlchemy or text of the server fails with into one of our errors.

        A block that fails has changed nothing. What else it raises is not of the server and goes on as it is. Their
        errors are not kept behind ours: where a program prints both, theirs may show a password.
        """
        kinds = (driver().Error, SQLAlchemyError, UnicodeError)
        try:
            yield
        except kinds as error:
            raise self._translated(error) from None

    def _translated(self, error: Exception) -> StoreError:
        psycopg = driver()
        if isinstance(error, DBAPIError) and error.orig is not None:
            error = error.orig
        if not isinstance(error, psycopg.Error):
            # Of SQLAlchemy's own only what comes first: SQL and a link to its documentation follow.
            why = str(error.args[0] if isinstance(error, SQLAlchemyError) and error.args else error)
            return StoreError(f"{self} can't be used: {self.address.cleaned(why)}")
        errors, state, why = psycopg.errors, error.sqlstate, self.address.cleaned(str(error))
        if isinstance(error, errors.LockNotAvailable):
            return StoreError(f"{self} has been locked by another process for {self._timeout:g} s. Try again")
        if isinstance(error, (errors.InsufficientPrivilege, errors.ReadOnlySqlTransaction, errors.DiskFull)):
            return DatabaseNotWritable(f"{self} can't be written: {why}")
        if isinstance(error, (errors.UndefinedTable, errors.UndefinedColumn)):
            return DatabaseDamaged(f"{self} is damaged: {why}. Restore a backup")
        if state is None or state.startswith(("08", "57P", "28", "3D", "53")):
            return StoreError(f"{self} can't be reached: {why}")
        return StoreError(f"{self} can't be used: {why}")
