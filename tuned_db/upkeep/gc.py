"""`flashtune db gc`: a database without the times by which finished searches found their finalists.

Most rows of a database are such times: one for each config that was tried. Once a session has had its final for a
problem, no trust depends on them, and no winner (`winners.py`, rule 2): a variant counts at its best stage, and finals
come first. Nor does a look-up of another problem or chip, which is lent what won a final. A look-up of the problem
itself may, where all finalists are barred or of a kernel whose source has changed since and other configs' has not; so
each problem is looked up before, and its rows stay where a time from a search would be the answer.

What goes must be old enough, and a sample stays, by which the time model can be judged later. Finals stay, and
failures: a config that was wrong must not be tried again as if it were new. So do the rows of problems that no session
has finished, whatever their age, and those of stages that this version does not know.

What is removed leaves its id behind (`removed.py`), so that a merge, an import or a pull does not bring it back.
That holds here alone: what others keep is theirs, and removing it here removes nothing there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, and_, select

from flashtune.errors import InvalidInput, StoreError, UnsupportedProblem
from flashtune.files import shown_path
from flashtune.tuned_db.backends.sqlite.connections import connect
from flashtune.tuned_db.backends.sqlite.failures import sqlite_failures
from flashtune.tuned_db.backends.sqlite.opening import File
from flashtune.tuned_db.lookup.lookup import find_in
from flashtune.tuned_db.records.measurement import STAGES
from flashtune.tuned_db.records.parse import problem_from_text
from flashtune.tuned_db.schema.models import DeviceRow, MeasurementRow, ProblemRow
from flashtune.tuned_db.store.fingerprints import count
from flashtune.tuned_db.store.removed import remove, remove_unused
from flashtune.tuned_db.store.store import LOCK_TIMEOUT, Store

from .health import typical

SEARCHED = [each for each in STAGES if each != "final"]
SAMPLE = 100
"""One in so many stays, of each search about one or two."""
MOST_DAYS = 36500
"""A hundred years: earlier dates may not exist."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What was removed, or would be."""

    removed: int
    """Measurements."""
    left: int
    """Measurements that stay."""
    bytes_before: int
    bytes_after: int
    """Size of the file, as before for a dry run; 0 on a server."""
    note: str = ""
    """Why the file did not shrink, and what becomes of it, if it did not."""


def collect(store: Store, *, days: int, dry_run: bool = False, timeout: float = LOCK_TIMEOUT) -> Collected:
    """Removes what is described above from ``store``, all of it or nothing, if it is ``days`` old.

    A file needs about as much room again meanwhile. It shrinks afterwards, unless there is no room for that or another
    process reads it; then it stays as large, for now or until what is stored later has filled it. With ``dry_run``
    nothing is changed. Raises `InvalidInput` for a number of days out of range, and what `Store` raises.
    """
    if isinstance(days, bool) or not isinstance(days, int) or not 0 <= days <= MOST_DAYS:
        raise InvalidInput(f"days={days!r} must be a whole number from 0 to {MOST_DAYS}")
    before = _bytes(store)
    oldest_kept = (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    with store.backend.reading() as connection:
        decided = _decided(Store(store.backend, connection), connection)
        if dry_run:
            going, all_of_them = _going(connection, oldest_kept, decided), count(connection)
            return Collected(len(going), all_of_them - len(going), before, before)
    with store.backend.writing() as connection:
        going, all_of_them = _going(connection, oldest_kept, decided), count(connection)
        remove(connection, going)
        if going and isinstance(store.backend, File):  # on a server they stay: to remove them takes another right
            remove_unused(connection)
    note = _shrink(store, timeout) if going else ""
    return Collected(len(going), all_of_them - len(going), before, _bytes(store), note)


def _decided(view: Store, connection: Connection) -> set[tuple[int, int]]:
    """Ids of the problems and device models whose look-up is decided by a final, whatever else there is.

    A few milliseconds each, so not in the transaction that removes: nobody is kept from writing meanwhile. A failure
    that is stored in between may bar a finalist, as one that is stored a moment later would.
    """
    row = MeasurementRow
    query = (
        select(row.problem_id, row.device_id, ProblemRow.json, DeviceRow.key)
        .join(ProblemRow, ProblemRow.id == row.problem_id)
        .join(DeviceRow, DeviceRow.id == row.device_id)
        .where(row.stage == "final", row.status == "ok")
        .distinct()
    )
    found = connection.execute(query).all()
    return {(problem, device) for problem, device, text, key in found if _final_decides(view, text, key)}


def _final_decides(view: Store, problem: object, gpu_key: object) -> bool:
    try:
        choice = find_in(problem_from_text(problem), typical(str(gpu_key)), [view])
    except (InvalidInput, UnsupportedProblem):  # not of this version
        return False
    row = choice.measurement
    return choice.level in ("exact", "older_source") and row is not None and row.stage == "final"


def _going(connection: Connection, oldest_kept: str, decided: Collection[tuple[int, int]]) -> list[str]:
    """Ids of the rows that go, of problems and device models in ``decided``."""
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
    query = select(row.id, row.problem_id, row.device_id).join(finished, same)
    query = query.where(row.status == "ok", row.stage.in_(SEARCHED), row.created < oldest_kept)
    found = (name for name, *place in connection.execute(query) if tuple(place) in decided)
    return [each for each in found if isinstance(each, str) and not in_sample(each)]  # any type where tampered with


def in_sample(name: str) -> bool:
    """The same rows on every machine, whatever made their ids."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:8], "big") % SAMPLE == 0


def _bytes(store: Store) -> int:
    return store.path.stat().st_size if isinstance(store.backend, File) else 0


def _shrink(store: Store, timeout: float) -> str:
    """Gives the room of removed rows back to the disk; a server does that in its own time. Why not, or ``""``."""
    if not isinstance(store.backend, File):
        return ""
    path = store.path
    try:
        with (
            sqlite_failures(path, writing=True, timeout=timeout),
            closing(connect(path, "write", timeout)) as connection,
        ):
            connection.patiently("VACUUM")
            busy = connection.checkpoint()
    except StoreError as error:
        return f"{error}. What is stored later fills it"
    except KeyboardInterrupt:  # what was removed is gone, and that has yet to be said
        return "it was interrupted. What is stored later fills what is left"
    return (
        f"{shown_path(path)} is being read by another process. It is made smaller when that has ended" if busy else ""
    )
