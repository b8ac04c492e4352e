"""`Store`: a tuning database that is open. Adds measurements, never changes one; reads them back.

Every call is a transaction of its own on a connection of its own, so a `Store` may be used from several threads, and
a call that returned is on the disk (``synchronous=FULL``). Where the rows are, in a file or on a server, is the matter
of its `Backend`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from flashtune.errors import InvalidInput, StoreError
from flashtune.tuned_db.backends.sqlite.opening import File, fit_journal, open_file, path_of_file
from flashtune.tuned_db.records.dates import check_ahead, latest
from flashtune.tuned_db.records.limits import check, settled
from flashtune.tuned_db.records.measurement import Measurement, Prediction

from .arrivals import Arrival, log, next_number
from .reader import Reader
from .removed import dig_up, tombstones
from .writer import Writer

LOCK_TIMEOUT = 30.0
"""Seconds that a call waits while another process writes."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What came of measurements that were to be stored."""

    new: int
    """How many were."""
    removed: int
    """How many were passed over, as they had been removed here."""


class Store(Reader):
    """An open tuning database; see :meth:`open` for a file and :meth:`on_server` for a team's."""

    @classmethod
    def open(
        cls, path: str | Path, *, create: bool = True, readonly: bool = False, timeout: float = LOCK_TIMEOUT
    ) -> Self:
        """Opens the database at ``path``, and makes it where it is missing, unless ``create`` is False.

        For writing, an older schema is upgraded in place. ``readonly`` makes, upgrades and changes nothing, neither the
        file nor what lies beside it, reads older schemas too, and works in a folder that can't be written: it reads a
        private copy of the file as it is now, until the store is closed. Raises `DatabaseDamaged`, `DatabaseForeign`,
        `DatabaseTooNew`, `DatabaseNotWritable` or another `StoreError`, each with the path; the file is then as it was.
        """
        path = path_of_file(path)
        store = cls(open_file(path, create=create, readonly=readonly, timeout=timeout))
        if not readonly:
            fit_journal(path, timeout)
        return store

    @classmethod
    def on_server(cls, url: str, *, readonly: bool = False, timeout: float = LOCK_TIMEOUT) -> Self:
        """Opens a team's PostgreSQL database at an address such as ``postgresql://me@host/tuned``.

        It is never made or upgraded here; `team.py` does that. Its schema must be ours: raises `StoreError` for an
        older one, `DatabaseTooNew`, `DatabaseForeign` for one that flashtune did not make, `MissingDependency`, or
        another `StoreError`, each with the address but for its password. ``timeout`` is how many seconds a writer waits
        for another. Look-ups of ``attention()`` never come here.
        """
        from flashtune.tuned_db.backends.postgres.address import read_address
        from flashtune.tuned_db.backends.postgres.server import Server

        return cls(Server(read_address(url), readonly=readonly, timeout=timeout))

    @property
    def path(self) -> Path:
        """Path of the file; `StoreError` for a database on a server, which has none."""
        if isinstance(self.backend, File):
            return self.backend.path
        raise StoreError(f"{self.backend} is not a file. What needs one works on a local copy: flashtune db pull")

    @property
    def readonly(self) -> bool:
        return self.backend.readonly

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Removes the private copy of what was only read; nothing else is held between calls."""
        if isinstance(self.backend, File):
            self.backend.close()

    def record(self, measurement: Measurement) -> Measurement:
        """Stores a measurement and returns it as stored; see :meth:`record_all`."""
        return self.record_all([measurement])[0]

    def record_all(self, measurements: Iterable[Measurement]) -> list[Measurement]:
        """Stores all or none, and returns them as stored: an ``ok`` without a real time becomes ``failed``.

        Storing the same measurement again changes nothing, so an uncertain call may be repeated. Another one under the
        same id, or a value out of range, raises `InvalidInput` before anything is written.
        """
        records = [check(settled(each)) for each in measurements]
        self.add_parts([records])
        return records

    def add(
        self, measurements: Iterable[Measurement], arrival: Arrival | None = None, *, take_back: bool = False
    ) -> Stored:
        """As :meth:`record_all`; returns what came of them. ``arrival`` is logged if any were new."""
        return self.add_parts([[check(settled(each)) for each in measurements]], arrival, take_back=take_back)

    def add_parts(
        self, parts: Iterable[Sequence[Measurement]], arrival: Arrival | None = None, *, take_back: bool = False
    ) -> Stored:
        """:meth:`add` for checked and settled measurements in parts, of which one is held at a time: all or none.

        Those that were removed here (`gc.py`, `forgetting.py`) are passed over, or with ``take_back`` let in again. A
        new one of a later date than `dates.latest` raises `InvalidInput`.
        """
        count = removed = 0
        last = latest()
        with self.backend.writing() as connection:
            number = None if arrival is None else next_number(connection)
            writer = Writer(connection, number)
            for records in parts:
                ids = [each.id for each in records]
                known = self._by_id(connection, ids)
                gone = tombstones(connection, self._schema, ids) - known.keys()  # put back by hand, it is there
                if take_back:
                    dig_up(connection, [*gone])
                    gone = set()
                new: dict[str, Measurement] = {}
                for each in records:
                    if known.get(each.id, each) != each or new.get(each.id, each) != each:
                        raise InvalidInput(f"measurement {each.id} is already in {self.backend} with other values")
                    if each.id not in known and each.id not in gone:
                        check_ahead(each.created, last)
                        new[each.id] = each
                writer.measurements(new.values())
                count += len(new)
                removed += len(gone)
            if arrival is not None and number is not None and count:
                log(connection, arrival, number, count)
        return Stored(count, removed)

    def record_prediction(self, prediction: Prediction) -> None:
        """Stores a prediction in place of the last one of the same variant, problem and device model."""
        check(prediction)
        with self.backend.writing() as connection:
            Writer(connection).prediction(prediction)

    def replace_predictions(self, predictions: Iterable[Prediction]) -> None:
        """Stores a new ranking: every earlier prediction of the same problems and device models goes."""
        records = [check(each) for each in predictions]
        with self.backend.writing() as connection:
            Writer(connection).predictions(records)
