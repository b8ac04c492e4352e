"""What others measured, added to a database: of export files and of databases.

Measurements are facts that are never changed, and winners are derived from all of them, so this is a union of sets: in
any order, any number of times, it comes to the same rows. Predictions stay where they were made: each machine can make
its own. A row under an id that the database has with other values is refused, and nothing of its source is added.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from flashtune import settings
from flashtune.errors import InvalidInput, StoreError
from flashtune.files import is_stream, shown_path
from flashtune.tuned_db.backends.sqlite.files import is_database
from flashtune.tuned_db.backends.sqlite.opening import File
from flashtune.tuned_db.exchange.export_file import Export, ExportHeader, read_export, read_header, write_export
from flashtune.tuned_db.records.dates import check_ahead, latest
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.records.parse import Unreadable
from flashtune.tuned_db.store.arrivals import Arrival
from flashtune.tuned_db.store.queries import pass_over, read_measurement
from flashtune.tuned_db.store.store import Store
from flashtune.values import shown


@dataclass(frozen=True, slots=True)
class Added:
    """What one source brought."""

    new: int
    """Rows that the database did not have."""
    known: int
    """Rows that it had."""
    removed: int = 0
    """Rows that were removed from it before (`gc.py`, `forgetting.py`), and stay so."""
    refused: Unreadable = field(default_factory=Unreadable)
    """Rows that were passed over, with their places and the reasons as far as they are known."""

    @property
    def summary(self) -> str:
        """For people."""
        text = f"{self.new} new measurements, {self.known} that were there"
        return text + (f", {self.removed} that were removed here and stay so" if self.removed else "")


def add_file(
    store: Store,
    path: Path,
    *,
    skip_invalid: bool = False,
    take_back: bool = False,
    check: Callable[[ExportHeader], str] = lambda header: "",
) -> Added:
    """Adds all rows of an export to ``store``, or none.

    The first row that is not valid raises `InvalidInput` with path, line and reason; with ``skip_invalid`` such rows
    are passed over and counted. With ``take_back`` rows that were removed here come in again. ``check`` is called with
    the header before any row is added, and may raise; it returns the name of the trusted key that signed the file, or
    ``""``.
    """
    settings.author()  # a name that can't be stored would fail at the very end
    export = read_export(path, skip_invalid=skip_invalid)
    signer = check(export.header)
    wanted = _dated(store, path, export, skip_invalid)
    arrival = Arrival(kind="import", source=export.header.origin, digest=export.header.digest, signer=signer)
    stored = store.add(wanted, arrival, take_back=take_back)
    known = len(wanted) - stored.new - stored.removed
    return Added(stored.new, known, stored.removed, export.refused)


def _dated(store: Store, path: Path, export: Export, skip_invalid: bool) -> list[Measurement]:
    """The rows of ``export`` without those that are new here and of a date that is yet to come."""
    last, wanted = latest(), []
    there = store.by_id([each.id for each in export.measurements if each.created > last])
    for each in export.measurements:
        try:
            if each.id not in there:
                check_ahead(each.created, last)
            wanted.append(each)
        except InvalidInput as error:
            if not skip_invalid:
                raise InvalidInput(f"{shown_path(path)}, measurement {each.id}: {error}") from error
            export.refused.add(f"{shown_path(path)}, measurement {each.id}", error)
    return wanted


def add_database(store: Store, path: Path, *, take_back: bool = False) -> Added:
    """Adds all measurements of the database at ``path``, which is only read and may be of an older schema; with
    ``take_back`` those that were removed here, too."""
    if not path.is_file():
        raise StoreError(f"there is no tuning database at {shown_path(path)}")
    if not is_database(path) and _is_export(path):
        raise InvalidInput(f"{shown_path(path)} is an export, not a database: flashtune db import {shown_path(path)}")
    if isinstance(store.backend, File) and path.resolve() == store.path.resolve():
        raise InvalidInput(f"{shown_path(path)} is the database that it would be merged into")
    settings.author()
    with Store.open(path, create=False, readonly=True) as other:
        new, found = _compared(store, other, take_back)
        arrival = Arrival(kind="merge", source=other.origin)
    stored = store.add(new, arrival, take_back=take_back)
    late = len(new) - stored.new - stored.removed  # another process added them meanwhile
    return Added(stored.new, found.known + late, found.removed + stored.removed, found.refused)


def _compared(store: Store, other: Store, take_back: bool) -> tuple[list[Measurement], Added]:
    """Of ``other``: the checked rows that ``store`` lacks, and what is to be said of the rest.

    Piece by piece, so that only what is new is held in memory. ``store`` may still be written meanwhile: `Store.add`
    compares again. A row that is stored here in the same spelling is the same, whatever this version makes of it.
    """
    new, known, removed, refused = [], 0, 0, Unreadable()
    last = latest()
    for rows in other.rows():
        ids = [row._mapping["id"] for row in rows]
        own, gone = store.rows_with_ids(ids), set() if take_back else store.removed(ids)
        for row in rows:
            there = own.get(row._mapping["id"])
            if there is not None and tuple(there) == tuple(row):
                known += 1
                continue
            if row._mapping["id"] in gone:
                removed += 1
                continue
            try:
                record = read_measurement(row)
                check_ahead(record.created, last)
                new.append(record)
            except InvalidInput as error:
                refused.add(f"{shown_path(other.path)}, table measurement, id {shown(row._mapping['id'])}", error)
    return new, Added(0, known, removed, refused)


def export_database(
    store: Store,
    path: Path,
    *,
    gpu_key: str | None = None,
    sign: Callable[[ExportHeader], object] = lambda header: None,
) -> int:
    """Writes the measurements of ``store``, of one GPU model if ``gpu_key`` is given, and returns how many.

    Rows that can't be read, or are of a date that is yet to come, are passed over; `rows.count_unreadable` counts them.
    ``sign`` is called with the header of what was written. Replaces an export at ``path``, and writes to a pipe or to
    standard output without a look at it; any other file there raises `InvalidInput`.
    """
    if not is_stream(path) and os.path.lexists(path) and not _is_export(path):
        raise InvalidInput(
            f"{shown_path(path)} exists and is no flashtune export: it is left as it is, choose another name"
        )
    last, rows = latest(), []
    for each in store.measurements(gpu_key=gpu_key):
        try:
            check_ahead(each.created, last)  # whoever imports it would refuse all of the file
            rows.append(each)
        except InvalidInput as error:
            pass_over(each.id, error)
    if not rows:
        of = " of that GPU" if gpu_key else ""
        raise InvalidInput(f"there are no measurements{of} in {store.backend} that can be written. flashtune db check")
    sign(write_export(rows, path, origin=store.origin))
    return len(rows)


def _is_export(path: Path) -> bool:
    """Whether an export is at ``path``, or a link to one."""
    try:
        read_header(path)
    except (InvalidInput, FileNotFoundError):
        return False
    return True
