"""The log of what came from elsewhere: one row for each import, merge, pull or push that added measurements.

It says how rows got into this database, and stays there: rows that travel on leave it behind, and databases with the
same measurements are the same whatever their logs say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sqlalchemy import Connection, insert, select

from flashtune import settings
from flashtune.codegen.value import plain

from .models import ArrivalRow
from .records import new_id, now

Kind = Literal["import", "merge", "pull", "push"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SCHEMA = 3
"""The schema version that the log came with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What one command added. ``id`` and ``created`` are given when it is logged."""

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
    own = {name: getattr(arrival, name) for name in ("kind", "source", "digest", "signer")}
    connection.execute(insert(ArrivalRow).values(**own, id=new_id(), created=now(), author=settings.author(), new=new))


def logged(connection: Connection) -> list[Arrival]:
    """All rows, oldest first, as they are stored, which is of any type in a file that was tampered with: whoever prints
    them takes them for text of others."""
    names = ("id", "created", "kind", "source", "digest", "signer", "author", "new")
    rows: Iterable[Any] = connection.execute(select(*(getattr(ArrivalRow, name) for name in names)))
    found = (Arrival(**dict(zip(names, row, strict=True))) for row in rows)
    return sorted(found, key=lambda each: (plain(each.created), plain(each.id)))
