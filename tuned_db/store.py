"""`Store`: a tuning database that is open. Adds measurements, never changes one; reads them back.

Every call is a transaction of its own on a connection of its own, so a `Store` may be used from several threads, and
a call that returned is on the disk (``synchronous=FULL``). Where the rows are, in a file or on a server, is the matter
of its `Place`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sqlalchemy import Connection, select

from flashtune.codegen.config import Config
from flashtune.codegen.problem import Problem, Spec
from flashtune.codegen.value import plain
from flashtune.errors import InvalidInput, StoreError

from .arrivals import SCHEMA as LOG_SCHEMA
from .arrivals import Arrival, log, logged
from .blocklist import barred, blocklisted
from .filters import keys, matching
from .fingerprints import Fingerprints, count, fingerprints
from .limits import check, settled
from .models import OriginRow
from .opening import File, fit_journal, open_file, path_of_file
from .place import Place
from .records import Measurement, Prediction, Variant
from .rows import (
    AnyRow,
    in_parts,
    read_deaths,
    read_measurements,
    read_predictions,
    read_problems,
    select_deaths,
    select_gpu_keys,
    select_measurements,
    select_predictions,
    select_problems,
)
from .tombstones import count_tombstones, tombstones
from .winners import Ranked, best_first, with_source
from .writing import Writer

LOCK_TIMEOUT = 30.0
"""Seconds that a call waits while another process writes."""


@dataclass(frozen=True, slots=True)
class Stored:
    """How many measurements were new, and how many were passed over as they had been removed."""

    new: int
    removed: int


class Store:
    """An open tuning database; see :meth:`open` for a file and :meth:`on_server` for a team's."""

    label = "user"

    def __init__(self, place: Place, snapshot: Connection | None = None) -> None:
        """The database at ``place``, whose schema and id are looked at; raises what `Place` raises.

        All reads go through ``snapshot``, a connection of that place, where it is given.
        """
        self.place = place
        self._snapshot = snapshot
        self._barred: dict[Spec, frozenset[Variant]] = {}
        with self._read() as connection:
            self._schema = place.schema(connection)
            if connection.execute(_ORIGIN).scalar_one_or_none() is None:
                raise place.damaged()
        if self._schema < place.oldest:
            raise place.outdated(self._schema)

    @classmethod
    def open(
        cls, path: str | Path, *, create: bool = True, readonly: bool = False, timeout: float = LOCK_TIMEOUT
    ) -> Self:
        """Opens the database at ``path``, and makes it where it is missing, unless ``create`` is False.

        For writing, an older schema is upgraded in place. ``readonly`` never makes, upgrades or changes the file, reads
        older schemas too, and works in a folder that can't be written. Raises `DatabaseDamaged`, `DatabaseForeign`,
        `DatabaseTooNew`, `DatabaseNotWritable` or another `StoreError`, each with the path; the file is then as it was.
        """
        path = path_of_file(path)
        place, header = open_file(path, create=create, readonly=readonly, timeout=timeout)
        store = cls(place)
        if not readonly:
            fit_journal(path, header, timeout)
        return store

    @classmethod
    @contextmanager
    def look_into(cls, path: str | Path, *, timeout: float = LOCK_TIMEOUT) -> Iterator[Self]:
        """:meth:`open` with ``readonly`` and its :meth:`snapshot` in one, on one connection: for a quick look-up."""
        place, _ = open_file(path_of_file(path), create=False, readonly=True, timeout=timeout)
        with place.reading() as connection:
            yield cls(place, connection)

    @classmethod
    def on_server(cls, url: str, *, readonly: bool = False, timeout: float = LOCK_TIMEOUT) -> Self:
        """Opens a team's PostgreSQL database at an address such as ``postgresql://me@host/tuned``.

        It is never made or upgraded here; `team.py` does that. Its schema must be ours: raises `StoreError` for an
        older one, `DatabaseTooNew`, `DatabaseForeign` for one that flashtune did not make, `MissingDependency`, or
        another `StoreError`, each with the address but for its password. ``timeout`` is how many seconds a writer waits
        for another. Look-ups of ``attention()`` never come here.
        """
        from .postgres import Server, team_url

        return cls(Server(team_url(url), readonly=readonly, timeout=timeout))

    @property
    def path(self) -> Path:
        """Path of the file; `StoreError` for a database on a server, which has none."""
        if isinstance(self.place, File):
            return self.place.path
        raise StoreError(f"{self.place} is not a file. What needs one works on a local copy: flashtune db pull")

    @property
    def readonly(self) -> bool:
        return self.place.readonly

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing is held between calls."""

    @property
    def origin(self) -> str:
        """UUID of this database; what is no printable text in its place is shown, as others store and print it."""
        with self._read() as connection:
            return plain(connection.execute(_ORIGIN).scalar_one())

    # Writing

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

    def add(self, measurements: Iterable[Measurement], arrival: Arrival | None = None) -> Stored:
        """As :meth:`record_all`; returns what came of them. ``arrival`` is logged if any were new."""
        return self.add_parts([[check(settled(each)) for each in measurements]], arrival)

    def add_parts(self, parts: Iterable[Sequence[Measurement]], arrival: Arrival | None = None) -> Stored:
        """:meth:`add` for checked and settled measurements in parts, of which one is held at a time: all or none.

        Those that were removed here (`gc.py`) are passed over.
        """
        count = removed = 0
        with self._write() as connection:
            writer = Writer(connection)
            for records in parts:
                ids = [each.id for each in records]
                known = self._by_id(connection, ids)
                gone = tombstones(connection, self._schema, ids) - known.keys()  # put back by hand, it is there
                new: dict[str, Measurement] = {}
                for each in records:
                    if known.get(each.id, each) != each or new.get(each.id, each) != each:
                        raise InvalidInput(f"measurement {each.id} is already in {self.place} with other values")
                    if each.id not in known and each.id not in gone:
                        new[each.id] = each
                writer.measurements(new.values())
                count += len(new)
                removed += len(gone)
            if arrival is not None and count:
                log(connection, arrival, count)
        return Stored(count, removed)

    def record_prediction(self, prediction: Prediction) -> None:
        """Stores a prediction in place of the last one of the same variant, problem and device model."""
        check(prediction)
        with self._write() as connection:
            Writer(connection).prediction(prediction)

    def replace_predictions(self, predictions: Iterable[Prediction]) -> None:
        """Stores a new ranking: every earlier prediction of the same problems and device models goes."""
        records = [check(each) for each in predictions]
        with self._write() as connection:
            Writer(connection).predictions(records)

    # Reading

    def measurements(
        self,
        *,
        problem: Problem | None = None,
        spec: Spec | None = None,
        gpu_key: str | None = None,
        family: str | None = None,
        session: str | None = None,
        status: str | None = None,
        stage: str | None = None,
    ) -> list[Measurement]:
        """Measurements that match all that is given, oldest first. Rows that this version can't read are left out."""
        wanted = {**keys(problem, spec), "gpu_key": gpu_key, "family": family}
        wanted |= {"session": session, "status": status, "stage": stage}
        with self._read() as connection:
            found = read_measurements(matching(connection, select_measurements, self._schema, wanted).all())
        return sorted(found, key=lambda each: (each.created, each.id))

    def by_id(self, ids: Sequence[str]) -> dict[str, Measurement | None]:
        """The measurements with these ids; None for one that this version can't read."""
        with self._read() as connection:
            return self._by_id(connection, ids)

    def _by_id(self, connection: Connection, ids: Sequence[str]) -> dict[str, Measurement | None]:
        rows = self._rows_with_ids(connection, ids)
        return dict.fromkeys(rows) | {each.id: each for each in read_measurements(rows.values())}

    def rows(self) -> Iterator[Sequence[AnyRow]]:
        """All measurements as they are stored, unchecked, a part at a time; for `rows.read_measurement`."""
        with self._read() as connection:
            yield from in_parts(connection, select_measurements(self._schema))

    def rows_with_ids(self, ids: Iterable[object]) -> dict[str, AnyRow]:
        """Those of :meth:`rows` that have one of these ids."""
        with self._read() as connection:
            return self._rows_with_ids(connection, [each for each in ids if isinstance(each, str)])

    def _rows_with_ids(self, connection: Connection, ids: Sequence[str]) -> dict[str, AnyRow]:
        parts = in_parts(connection, select_measurements(self._schema), ids)
        return {str(row._mapping["id"]): row for rows in parts for row in rows}

    def removed(self, ids: Sequence[str]) -> set[str]:
        """Those of ``ids`` that were removed here and don't return."""
        with self._read() as connection:
            return tombstones(connection, self._schema, ids)

    def count_removed(self) -> int:
        """How many measurements were removed here."""
        with self._read() as connection:
            return count_tombstones(connection, self._schema)

    def arrivals(self) -> list[Arrival]:
        """What came from elsewhere, oldest first; not checked. Empty for a schema that had no log yet."""
        with self._read() as connection:
            return logged(connection) if self._schema >= LOG_SCHEMA else []

    def count(self) -> int:
        """How many measurements there are, with those that this version can't read."""
        with self._read() as connection:
            return count(connection)

    def fingerprints(self, ids: Sequence[str] | None = None) -> Iterator[Fingerprints]:
        """Of all measurements or of those among ``ids``, a part at a time; see `fingerprints.py`."""
        with self._read() as connection:
            yield from fingerprints(connection, self._schema, ids)

    def predictions(
        self,
        *,
        problem: Problem | None = None,
        spec: Spec | None = None,
        gpu_key: str | None = None,
        family: str | None = None,
    ) -> list[Prediction]:
        """Predictions that match all that is given, best first."""
        wanted = {**keys(problem, spec), "gpu_key": gpu_key, "family": family}
        with self._read() as connection:
            found = read_predictions(matching(connection, select_predictions, self._schema, wanted))
        return sorted(found, key=lambda each: (each.rank, each.predicted_us, each.family, each.config.key))

    def winner(
        self, problem: Problem, gpu_key: str, current_digest: Callable[[Config], str] | None = None
    ) -> Ranked | None:
        """The winner for ``problem`` on a device model by the policy of `winners.py`, or None.

        With ``current_digest``, which renders a config as it is today, only variants whose source is still that.
        """
        ranked = best_first(
            lambda stage: self.measurements(problem=problem, gpu_key=gpu_key, status="ok", stage=stage),
            self.rejected(problem.spec),
        )
        if current_digest is None:
            return next(ranked, None)
        return with_source(ranked, current_digest)[0]

    def problems(self, *, spec: Spec | None = None, gpu_key: str | None = None) -> list[Problem]:
        """Problems with at least one ``ok`` measurement (on that device model), in the order of their keys."""
        with self._read() as connection:
            found = read_problems(connection.execute(select_problems(spec, gpu_key)).scalars())
        return sorted(found, key=lambda each: each.key)  # servers sort text in their own ways

    def gpu_keys(self, *, capability: str | None = None) -> list[str]:
        """Keys of the device models with measurements, sorted; of one compute capability such as ``9.0a``."""
        with self._read() as connection:
            return sorted(str(key) for key in connection.execute(select_gpu_keys(capability)).scalars())

    def rejected(self, spec: Spec) -> frozenset[Variant]:
        """Variants that no look-up gives for ``spec``: wrong, crashed or blocklisted, on any GPU."""
        if self._snapshot is None:
            return barred(self._deaths(spec))
        if spec not in self._barred:  # a snapshot never changes
            self._barred[spec] = barred(self._deaths(spec))
        return self._barred[spec]

    def blocklisted(self, spec: Spec) -> frozenset[Variant]:
        """Variants that cost two workers for ``spec``, on any GPU; see `blocklist.py`."""
        return blocklisted(self._deaths(spec))

    @contextmanager
    def snapshot(self) -> Iterator[Self]:
        """A view whose reads share one transaction: all of one moment, and cheaper. For one thread; don't keep it."""
        with self._read() as connection:
            view = copy.copy(self)
            view._snapshot, view._barred = connection, {}
            yield view

    def _deaths(self, spec: Spec) -> list[tuple[Variant, str, int]]:
        with self._read() as connection:
            return read_deaths(connection.execute(select_deaths(), {"spec": spec.key}))

    # Connections

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        if self._snapshot is not None:
            yield self._snapshot
            return
        with self.place.reading() as connection:
            yield connection

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with self.place.writing() as connection:
            yield connection


_ORIGIN = select(OriginRow.uuid)
