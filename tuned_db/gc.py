"""`flashtune db gc`: a database without the times by which finished searches found their finalists.

Most rows of a database are such times: one for each config that was tried. Once a session has had its final for a
problem, no winner, no trust and no look-up depends on them (`winners.py`, rule 2): a variant counts at its best stage,
and finals come first. So these go, when they are old enough; a sample of them stays, by which the time model can be
judged later. Finals stay, and failures: a config that was wrong must not be tried again as if it were new. So do the
rows of problems that no session has finished, whatever their age.

What is removed leaves its id behind (`tombstones.py`), so that a merge, an import or a pull does not bring it back.
That holds here alone: what others keep is theirs, and removing it here removes nothing there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, and_, delete, select

from flashtune.errors import InvalidInput, StoreError

from .files import sqlite_failures
from .fingerprints import count
from .models import MeasurementRow
from .opening import File
from .rows import IDS_AT_ONCE
from .sqlite import connect
from .store import LOCK_TIMEOUT, Store
from .tombstones import bury

SAMPLE = 100
"""One in so many stays, of each search about one or two."""
MOST_DAYS = 36500


@dataclass(frozen=True, slots=True)
class Collected:
    """What was removed, or would be."""

    removed: int
    left: int
    bytes_before: int
    bytes_after: int
    """Size of the file, where there is one; as before for a dry run."""
    note: str = ""
    """Why the file did not shrink, if it did not."""


def collect(store: Store, *, days: int, dry_run: bool = False, timeout: float = LOCK_TIMEOUT) -> Collected:
    """Removes what is described above from ``store``, all of it or nothing, if it is ``days`` old.

    A file shrinks afterwards, which needs as much room again and nobody else who uses it; where that is not so it stays
    as large, and what is stored later fills it. With ``dry_run`` nothing is changed. Raises `InvalidInput` for a number
    of days out of range, and what `Store` raises.
    """
    if isinstance(days, bool) or not isinstance(days, int) or not 0 <= days <= MOST_DAYS:
        raise InvalidInput(f"days={days!r} must be a whole number from 0 to {MOST_DAYS}")
    before = _bytes(store)
    oldest_kept = (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if dry_run:
        with store.place.reading() as connection:
            going, all_of_them = _going(connection, oldest_kept), count(connection)
        return Collected(len(going), all_of_them - len(going), before, before)
    with store.place.writing() as connection:
        going, all_of_them = _going(connection, oldest_kept), count(connection)
        bury(connection, going)
        _delete(connection, going)
        if going and isinstance(store.place, File):
            _forget_variants(connection)
    note = _shrink(store, timeout) if going else ""
    return Collected(len(going), all_of_them - len(going), before, _bytes(store), note)


def _going(connection: Connection, oldest_kept: str) -> list[str]:
    """Ids of the rows that go."""
    row, final = MeasurementRow, MeasurementRow.__table__.alias("final")
    finished = (
        select(final.c.session, final.c.problem_id, final.c.device_id)
        .where(final.c.stage == "final", final.c.status == "ok")
        .distinct()
        .subquery()
    )
    same = and_(
        finished.c.session == row.session,
        finished.c.problem_id == row.problem_id,
        finished.c.device_id == row.device_id,
    )
    found = select(row.id).join(finished, same)
    found = found.where(row.status == "ok", row.stage != "final", row.created < oldest_kept)
    ids = connection.execute(found).scalars()  # of any type in a file that was tampered with
    return [each for each in ids if isinstance(each, str) and not in_sample(each)]


def in_sample(name: str) -> bool:
    """The same rows on every machine, whatever made their ids."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:8], "big") % SAMPLE == 0


def _delete(connection: Connection, ids: Sequence[str]) -> None:
    for start in range(0, len(ids), IDS_AT_ONCE):
        connection.execute(delete(MeasurementRow).where(MeasurementRow.id.in_(ids[start : start + IDS_AT_ONCE])))


def _forget_variants(connection: Connection) -> None:
    """Removes configs that no row is about any more: half of what is left of finished searches.

    For each SQLite looks for rows that point at it, which takes an index that nothing else needs.
    """
    children = ("measurement", "prediction")
    for child in children:
        connection.exec_driver_sql(f"CREATE INDEX gc_{child} ON {child} (variant_id)")
    unused = " AND ".join(f"NOT EXISTS (SELECT 1 FROM {child} WHERE variant_id = variant.id)" for child in children)
    connection.exec_driver_sql(f"DELETE FROM variant WHERE {unused}")
    for child in children:
        connection.exec_driver_sql(f"DROP INDEX gc_{child}")


def _bytes(store: Store) -> int:
    return store.path.stat().st_size if isinstance(store.place, File) else 0


def _shrink(store: Store, timeout: float) -> str:
    """Gives the room of removed rows back to the disk; a server does that in its own time. Why not, or ``""``."""
    if not isinstance(store.place, File):
        return ""
    path = store.path
    try:
        with (
            sqlite_failures(path, writing=True, timeout=timeout),
            closing(connect(path, "write", timeout)) as connection,
        ):
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except StoreError as error:
        return str(error)
    return ""
