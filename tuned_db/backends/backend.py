"""`Backend`: where the rows of a store are. A file has one, a team's server another; see `opening.py` and `server.py`.

Both hold the same tables, made by the same migrations. What differs is how a connection is got, how writers wait for
each other, where the schema version stands, and how a failure is named.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from sqlalchemy import Connection

from flashtune.errors import DatabaseDamaged, StoreError
from flashtune.tuned_db.schema.version import SCHEMA_VERSION


class Backend(ABC):
    """A database that can be reached. Holds no connection between uses, so threads may share it."""

    readonly: bool

    @abstractmethod
    def __str__(self) -> str:
        """As messages name it, never with a password: ``tuning database /home/me/tuned.db``."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[Connection]:
        """A connection in a transaction that sees one moment and can't write. Failures raise a `StoreError`."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[Connection]:
        """A connection in a transaction that no other writer of this database overlaps: it is committed at the end of
        the block, and undone by an exception. Raises `DatabaseNotWritable` if it was opened read-only."""

    @abstractmethod
    def schema(self, connection: Connection) -> int:
        """The schema version that the database says it has. Raises `DatabaseTooNew` for one later than ours."""

    @abstractmethod
    def damaged(self, why: str) -> DatabaseDamaged:
        """The error for a database of which something is not as it must be: ``its id is gone``."""

    @abstractmethod
    def outdated(self, schema: int) -> StoreError:
        """The error for a schema that is too old to be used, with the command that upgrades it."""

    @property
    def oldest(self) -> int:
        """The oldest schema that can be used as it is."""
        return 1 if self.readonly else SCHEMA_VERSION
