"""Measurements are taken out of a database: their ids stay behind, and keep them out."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, func, insert, select

from flashtune.tuned_db.records.limits import EXACT
from flashtune.tuned_db.records.measurement import now
from flashtune.tuned_db.schema.models import MeasurementRow, TombstoneRow

from .queries import CHUNK, IDS_AT_ONCE

SINCE = 3
"""The schema version that they came with."""
_SHARED = {"variant": ("measurement", "prediction"), "environment": ("measurement",), "problem": (), "device": ()}
"""Tables of what measurements share, and those that point at them without an index."""


def tombstones(connection: Connection, schema: int, ids: Sequence[str]) -> set[str]:
    """Those of ``ids`` that were removed."""
    if schema < SINCE:
        return set()
    found: set[str] = set()
    for start in range(0, len(ids), IDS_AT_ONCE):
        asked = TombstoneRow.id.in_(ids[start : start + IDS_AT_ONCE])
        found.update(connection.execute(select(TombstoneRow.id).where(asked)).scalars())
    return found


def count_tombstones(connection: Connection, schema: int) -> int:
    """How many there are."""
    if schema < SINCE:
        return 0
    return connection.execute(select(func.count()).select_from(TombstoneRow)).scalar_one()


def remove(connection: Connection, ids: Sequence[object]) -> int:
    """Removes the measurements with these ids, and keeps them out from now on; how many there were."""
    bury(connection, ids)
    count = 0
    for kind in {type(each) for each in ids}:  # SQLAlchemy passes on a list of one type
        alike = [each for each in ids if type(each) is kind]
        for start in range(0, len(alike), IDS_AT_ONCE):
            gone = delete(MeasurementRow).where(MeasurementRow.id.in_(alike[start : start + IDS_AT_ONCE]))
            count += connection.execute(gone).rowcount
    return count


def bury(connection: Connection, ids: Sequence[object]) -> None:
    """Keeps ``ids`` out from now on. Some may be there already: of rows that somebody has put back by hand. What is no
    id, in a file that was tampered with, no door lets in."""
    sound = [each for each in ids if isinstance(each, str) and EXACT["id"](each)]
    when, buried = now(), tombstones(connection, SINCE, sound)
    new = [each for each in sound if each not in buried]
    for start in range(0, len(new), CHUNK):
        connection.execute(insert(TombstoneRow), [{"id": each, "removed": when} for each in new[start : start + CHUNK]])


def dig_up(connection: Connection, ids: Sequence[str]) -> None:
    """Lets ``ids`` in again."""
    for start in range(0, len(ids), IDS_AT_ONCE):
        connection.execute(delete(TombstoneRow).where(TombstoneRow.id.in_(ids[start : start + IDS_AT_ONCE])))


def remove_unused(connection: Connection) -> None:
    """Removes what measurements share where none is about it any more: configs would be half of the file, and the name
    of a device model would be held against all that come.

    On a server the device models alone: to remove more takes rights on more tables, and the rest is in nobody's way.
    """
    if connection.dialect.name != "sqlite":
        _remove_unused(connection, "device")
        return
    for table, children in _SHARED.items():
        for child in children:  # for each row that goes SQLite looks for those that point at it
            connection.exec_driver_sql(f"CREATE INDEX gc_{child} ON {child} ({table}_id)")
        _remove_unused(connection, table)
        for child in children:
            connection.exec_driver_sql(f"DROP INDEX gc_{child}")


def _remove_unused(connection: Connection, table: str) -> None:
    children = ("measurement",) if table == "environment" else ("measurement", "prediction")
    used = (f"NOT EXISTS (SELECT 1 FROM {child} WHERE {table}_id = {table}.id)" for child in children)
    connection.exec_driver_sql(f"DELETE FROM {table} WHERE {' AND '.join(used)}")
