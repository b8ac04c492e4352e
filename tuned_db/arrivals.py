"""The log of what came from elsewhere: one row for each import, merge, pull or push that added measurements.

It says how rows got into this database, and stays there: rows that travel on leave it behind, and databases with the
same measurements are the same whatever their logs say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, insert, select

from flashtune import settings
from flashtune.codegen.value import plain

from .models import ArrivalRow
from .records import new_id, now

Kind = Literal["import", "merge", "pull", "push"]
SINCE = 3
"""The schema version that the log came with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What one command added. ``new``, ``author``, ``id`` and ``created`` are given when it is logged."""

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
    created: str = ""


def log(connection: Connection, arrival: Arrival, new: int) -> None:
    """Adds a row, in the transaction that adds the measurements."""
    row = insert(ArrivalRow).values(
        id=new_id(),
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
    names = ("id", "created", "kind", "source", "digest", "signer", "author", "new")
    rows: Iterable[Any] = connection.execute(select(*(getattr(ArrivalRow, name) for name in names)))
    found = (Arrival(**dict(zip(names, row, strict=True))) for row in rows)
    return sorted(found, key=lambda each: (plain(each.created), plain(each.id)))
