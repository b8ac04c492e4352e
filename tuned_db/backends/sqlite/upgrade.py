"""Brings the file of a database to the current schema, in one transaction: fully old or fully new."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, create_engine, event, insert
from sqlalchemy.pool import NullPool

from flashtune.errors import DatabaseDamaged
from flashtune.tuned_db.records.measurement import new_id, now
from flashtune.tuned_db.schema.migrate import migrate
from flashtune.tuned_db.schema.models import OriginRow
from flashtune.tuned_db.schema.version import APPLICATION_ID, SCHEMA_VERSION

from .connections import connect
from .files import check_schema, shown_database


def upgrade(path: Path, timeout: float) -> None:
    """Runs the missing migrations on an SQLite file; ``path`` may be a new, empty one."""
    below = connect(path, "write", timeout)
    try:
        below.execute("PRAGMA foreign_keys = OFF")  # copying a table must not follow its keys; can't be set inside
        made = create_engine("sqlite://", creator=lambda: below, poolclass=NullPool)

        @event.listens_for(made, "begin")
        def begin(connection: Connection) -> None:
            below.begin("EXCLUSIVE")

        with made.begin() as connection:
            schema = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
            check_schema(path, schema)
            if schema < SCHEMA_VERSION:  # else another process was first
                _migrate(path, connection, schema)
    finally:
        below.close()


def _migrate(path: Path, connection: Connection, schema: int) -> None:
    migrate(connection, "head")
    if schema == 0:
        connection.execute(insert(OriginRow).values(id=1, uuid=new_id(), created=now()))
    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
    if broken:
        raise DatabaseDamaged(f"{shown_database(path)} is damaged: {len(broken)} rows point nowhere. It is as it was")
    connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")
