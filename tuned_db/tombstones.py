"""What was removed from a database on purpose stays out of it: its ids are kept."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, func, insert, select

from .models import TombstoneRow
from .records import now
from .rows import CHUNK, IDS_AT_ONCE

SINCE = 3
"""The schema version that they came with."""


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


def bury(connection: Connection, ids: Sequence[str]) -> None:
    """Keeps ``ids`` out from now on. Some may be there already: of rows that somebody has put back by hand."""
    when, buried = now(), tombstones(connection, SINCE, ids)
    new = [each for each in ids if each not in buried]
    for start in range(0, len(new), CHUNK):
        connection.execute(insert(TombstoneRow), [{"id": each, "removed": when} for each in new[start : start + CHUNK]])
