"""The log of what came from elsewhere: one row for each import, merge, pull or push that added measurements.

It says how rows got into this database, and stays there: rows that travel on leave it behind, and databases with the
same measurements are the same whatever their logs say. Each has a number here, which the rows that it brought keep, so
that they can be told from the others again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import BigInteger, Connection, cast, exists, func, insert, null, select

from flashtune import settings
from flashtune.tuned_db.records.measurement import new_id, now
from flashtune.tuned_db.schema.models import ArrivalRow, MeasurementRow
from flashtune.values import plain

from .queries import IDS_AT_ONCE

Kind = Literal["import", "merge", "pull", "push"]
SINCE = 3
"""The schema version that the log came with."""
NUMBERED = 4
"""The one that the numbers came with: rows that arrived before have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What one command added. What has a default is given when it is logged, but for ``digest`` and ``signer``."""

    kind: Kind
    """What it was. A push is logged where it arrived."""
    source: str
    """UUID of the database that the rows came from, as it says."""
    digest: str = ""
    """Of an export: the SHA-256 of its rows."""
    signer: str = ""
    """Of an export with a signature by a trusted key: the name of the key."""
    new: int = 0
    """Measurements that were added."""
    author: str = ""
    """Who did it: ``FLASHTUNE_AUTHOR`` there."""
    id: str = ""
    number: int | None = None
    """By which it is called in this database; None in a schema that has no numbers."""
    created: str = ""


def next_number(connection: Connection) -> int:
    """The number of the arrival that is logged next, in the transaction that logs it: no other writes meanwhile.

    The first that is free, and not the one after the last: who may push may have taken the last that there is.
    """
    own, other = ArrivalRow, ArrivalRow.__table__.alias("other")
    after = cast(own.number, BigInteger) + 1
    ends = select(func.min(after)).where(own.number >= 1, ~exists().where(other.c.number == after))
    first_is_free = connection.execute(select(own.number).where(own.number == 1)).first() is None
    return 1 if first_is_free else int(connection.execute(ends).scalar_one())


def log(connection: Connection, arrival: Arrival, number: int, new: int) -> None:
    """Adds a row, in the transaction that adds the measurements."""
    row = insert(ArrivalRow).values(
        id=new_id(),
        number=number,
        created=now(),
        kind=arrival.kind,
        source=arrival.source,
        digest=arrival.digest,
        signer=arrival.signer,
        author=settings.author(),
        new=new,
    )
    connection.execute(row)


def logged(connection: Connection, schema: int) -> list[Arrival]:
    """All rows, oldest first, unchecked: in a file that was tampered with a value may have any type, so `plain` prints
    them."""
    if schema < SINCE:
        return []
    names = ("id", "number", "created", "kind", "source", "digest", "signer", "author", "new")
    known = {"number": null()} if schema < NUMBERED else {}
    columns = [known.get(name, getattr(ArrivalRow, name)) for name in names]
    rows: Iterable[Any] = connection.execute(select(*columns))
    found = (Arrival(**dict(zip(names, row, strict=True))) for row in rows)
    return sorted(found, key=lambda each: (plain(each.created), plain(each.id)))


def still_here(connection: Connection, schema: int) -> dict[int, int]:
    """How many measurements are here that an arrival brought, by its number; 0 is left out."""
    if schema < NUMBERED:
        return {}
    query = select(MeasurementRow.arrival, func.count()).where(MeasurementRow.arrival.is_not(None))
    rows: Any = connection.execute(query.group_by(MeasurementRow.arrival)).all()
    return dict(rows)


def brought_by(connection: Connection, schema: int, ids: Sequence[str]) -> dict[str, int]:
    """The number of the arrival of each of ``ids`` that has one."""
    if schema < NUMBERED:
        return {}
    found: dict[str, int] = {}
    for start in range(0, len(ids), IDS_AT_ONCE):
        asked = MeasurementRow.id.in_(ids[start : start + IDS_AT_ONCE]), MeasurementRow.arrival.is_not(None)
        rows: Any = connection.execute(select(MeasurementRow.id, MeasurementRow.arrival).where(*asked)).all()
        found |= dict(rows)
    return found
