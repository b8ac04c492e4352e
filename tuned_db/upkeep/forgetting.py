"""`flashtune db forget`: what should not have come is taken out again, by what brought it or by who measured it.

Which rows an arrival brought is known here (`arrivals.py`). What goes is written to an export first, so that it can be
taken back, and its ids stay behind, so that nothing else brings it back (`removed.py`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import ColumnElement, select

from flashtune.errors import InvalidInput
from flashtune.files import shown_path
from flashtune.tuned_db.backends.sqlite.opening import File
from flashtune.tuned_db.exchange.export_file import write_export
from flashtune.tuned_db.records.measurement import Measurement, now
from flashtune.tuned_db.schema.models import ArrivalRow, MeasurementRow
from flashtune.tuned_db.store.fingerprints import count
from flashtune.tuned_db.store.removed import remove, remove_unused
from flashtune.tuned_db.store.store import Store
from flashtune.values import plain, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """The rows that are meant. One field is given."""

    arrival: int | None = None
    """Number of what brought them."""
    session: str | None = None
    """Id of the tuning session that measured them, wherever that was."""
    source: str | None = None
    """UUID of the database that they came from, by any arrival."""

    def __str__(self) -> str:
        if self.arrival is not None:
            return f"of arrival {self.arrival}"
        return f"of session {shown(self.session)}" if self.session is not None else f"from {shown(self.source)}"

    @property
    def condition(self) -> ColumnElement[bool]:
        """That a row of `MeasurementRow` is one of them."""
        if self.arrival is not None:
            return MeasurementRow.arrival == self.arrival
        if self.session is not None:
            return MeasurementRow.session == self.session
        return MeasurementRow.arrival.in_(select(ArrivalRow.number).where(ArrivalRow.source == self.source))


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was removed, or would be."""

    removed: int
    left: int
    copy: Path | None
    """The export that has what was removed; None for a dry run, and where no export can hold any of it."""
    lost: int
    """Measurements that no export can hold: this version can't read them."""


def forget(store: Store, which: Which, *, copy: Path | None = None, dry_run: bool = False) -> Forgotten:
    """Removes the measurements that are meant from ``store``, all or none, once a copy of them is at ``copy``.

    By default that is a new file beside the database, or for a server in the working directory. With ``dry_run``
    nothing is changed. What comes while the copy is written stays. Raises `InvalidInput` where there are none, or
    something is at ``copy``, and what `write_export` and `Store` raise.
    """
    for text in filter(None, (which.session, which.source)):
        if plain(text) is not text:
            raise InvalidInput(f"{shown(text)} must be at most 200 printable characters")
    with store.snapshot() as view:
        known = which.session is not None or view.numbers_arrivals
        ids, everything = view.ids(which.condition) if known else [], view.count()
        if not ids:
            raise InvalidInput(f"there is no measurement {which} in {store.backend}{_hint(view, which)}")
        found = view.by_id([each for each in ids if isinstance(each, str)])
        records = [each for each in found.values() if each is not None]
        lost = len(ids) - len(records)
    if dry_run:
        return Forgotten(len(ids), everything - len(ids), None, lost)
    target = _kept(store, records, copy) if records else None
    with store.backend.writing() as connection:
        removed = remove(connection, ids)
        remove_unused(connection)
        left = count(connection)
    return Forgotten(removed, left, target, lost)


def _hint(store: Store, which: Which) -> str:
    """What there would be."""
    if which.session is not None:
        return ". flashtune db history lists the sessions of a problem, flashtune db check those of odd rows"
    here = store.arrived()
    known = [each for each in store.arrivals() if isinstance(each.number, int)]
    if any(which.arrival == each.number or which.source == each.source for each in known):
        return ", any more, or it came before they were told apart. --session removes those of a session"
    named = ", ".join(str(each.number) for each in known if each.number in here)
    return f". flashtune db log lists what came, of which these are here: {named or 'none'}"


def _kept(store: Store, records: list[Measurement], copy: Path | None) -> Path:
    """The new file that has the records now, whatever else is written at the same time."""
    for path in _new_files(store) if copy is None else [copy]:
        if not os.path.lexists(path):
            with suppress(FileExistsError):
                write_export(records, path, origin=store.origin, replace=False)
                return path
    raise InvalidInput(f"{shown_path(path)} exists and is left as it is: name a new file for the copy")


def _new_files(store: Store) -> Iterator[Path]:
    """Names beside a file, or in the working directory, without an end."""
    base = store.path if isinstance(store.backend, File) else Path("team")
    when = now()[:19].replace(":", "").replace("-", "")
    for number in itertools.count(1):
        yield base.with_name(f"{base.name}.forgotten-{when}{'' if number == 1 else f'-{number}'}.jsonl.gz")
