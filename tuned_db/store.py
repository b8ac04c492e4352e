"""`Store`: a tuning database that is open. Adds measurements, never changes one; reads them back.

Every call is a transaction of its own on a connection of its own, so a `Store` may be used from several threads, and
a call that returned is on the disk (``synchronous=FULL``).
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from sqlalchemy import ColumnElement, Connection, CursorResult, Select, bindparam, delete, exists, select

from flashtune.codegen.config import Config
from flashtune.codegen.problem import Problem, Spec
from flashtune.errors import DatabaseDamaged, DatabaseNotWritable, InvalidInput, StoreError

from .blocklist import barred, blocklisted
from .files import (
    SCHEMA_VERSION,
    WAY_OUT,
    check_schema,
    check_writable,
    read_header,
    sqlite_failures,
)
from .gate import check, settled
from .models import DeviceRow, MeasurementRow, OriginRow, PredictionRow, ProblemRow, VariantRow
from .opening import fit_journal, make_database, reading_mode, upgrade_database
from .records import Measurement, Prediction, Variant
from .rows import (
    CHUNK,
    IDS_AT_ONCE,
    AnyRow,
    Writer,
    read_deaths,
    read_measurements,
    read_predictions,
    read_problems,
    select_deaths,
    select_measurements,
    select_predictions,
)
from .sqlite import Mode, engine
from .winners import Ranked, best_first, with_source

LOCK_TIMEOUT = 30.0
"""Seconds that a call waits while another process writes."""


class Store:
    """An open tuning database; see :meth:`open`."""

    label = "user"

    def __init__(self, path: Path, reading: Mode, *, readonly: bool, timeout: float) -> None:
        self.path = path
        self.readonly = readonly
        self._reading = reading
        self._timeout = timeout
        self._snapshot: Connection | None = None
        self._schema = SCHEMA_VERSION

    @classmethod
    def open(
        cls, path: str | Path, *, create: bool = True, readonly: bool = False, timeout: float = LOCK_TIMEOUT
    ) -> Self:
        """Opens the database at ``path``, and makes it where it is missing, unless ``create`` is False.

        For writing, an older schema is upgraded in place. ``readonly`` never makes, upgrades or changes the file, reads
        older schemas too, and works in a folder that can't be written. Raises `DatabaseDamaged`, `DatabaseForeign`,
        `DatabaseTooNew`, `DatabaseNotWritable` or another `StoreError`, each with the path; the file is then as it was.
        """
        path = Path(os.path.abspath(path))
        if not readonly and create and not os.path.lexists(path):
            make_database(path, timeout)
        header = read_header(path)
        if readonly:
            store = cls(path, reading_mode(path, header), readonly=True, timeout=timeout)
        else:
            check_writable(path)
            if header.schema < SCHEMA_VERSION:
                upgrade_database(path, timeout)
            store = cls(path, "read", readonly=False, timeout=timeout)
        store._check_schema()
        if not readonly:
            fit_journal(path, header, timeout)
        return store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Nothing is held between calls."""

    @property
    def origin(self) -> str:
        """UUID of this database."""
        with self._read() as connection:
            return str(connection.execute(select(OriginRow.uuid)).scalar_one())

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
        self._insert(records)
        return records

    def add(self, measurements: Iterable[Measurement]) -> int:
        """As :meth:`record_all`; returns how many were new."""
        return self._insert([check(settled(each)) for each in measurements])

    def _insert(self, records: Sequence[Measurement]) -> int:
        new: dict[str, Measurement] = {}
        with self._write() as connection:
            known = _known(connection, [each.id for each in records])
            for each in records:
                if known.get(each.id, each) != each or new.get(each.id, each) != each:
                    raise InvalidInput(f"measurement {each.id} is already in {self.path} with other values")
                if each.id not in known:
                    new[each.id] = each
            Writer(connection).measurements(new.values())
        return len(new)

    def record_prediction(self, prediction: Prediction) -> None:
        """Stores a prediction in place of the last one of the same variant, problem and device model."""
        check(prediction)
        with self._write() as connection:
            Writer(connection).prediction(prediction)

    def replace_predictions(self, predictions: Iterable[Prediction]) -> None:
        """Stores a new ranking: every earlier prediction of the same problems and device models goes."""
        records = [check(each) for each in predictions]
        with self._write() as connection:
            writer = Writer(connection)
            cleared = set()
            for each in records:
                keys = writer.shared(each)
                place = keys["problem_id"], keys["device_id"]
                if place not in cleared:
                    cleared.add(place)
                    connection.execute(
                        delete(PredictionRow).where(
                            PredictionRow.problem_id == place[0], PredictionRow.device_id == place[1]
                        )
                    )
                writer.prediction(each)

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
        wanted = {**_keys(problem, spec), "gpu_key": gpu_key, "family": family}
        wanted |= {"session": session, "status": status, "stage": stage}
        with self._read() as connection:
            found = read_measurements(_matching(connection, select_measurements, self._schema, wanted))
        return sorted(found, key=lambda each: (each.created, each.id))

    def rows(self) -> Iterator[list[AnyRow]]:
        """All measurements as they are stored, unchecked, in pieces; for `rows.read_measurement`."""
        with self._read() as connection:
            found = connection.execution_options(yield_per=CHUNK).execute(select_measurements(self._schema))
            yield from map(list, found.partitions())

    def rows_with_ids(self, ids: Iterable[object]) -> dict[str, AnyRow]:
        """Those of :meth:`rows` that have one of these ids."""
        with self._read() as connection:
            return _rows_with_ids(connection, [each for each in ids if isinstance(each, str)], self._schema)

    def predictions(
        self,
        *,
        problem: Problem | None = None,
        spec: Spec | None = None,
        gpu_key: str | None = None,
        family: str | None = None,
    ) -> list[Prediction]:
        """Predictions that match all that is given, best first."""
        wanted = {**_keys(problem, spec), "gpu_key": gpu_key, "family": family}
        with self._read() as connection:
            found = read_predictions(_matching(connection, select_predictions, self._schema, wanted))
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
        ok = exists().where(MeasurementRow.problem_id == ProblemRow.id, MeasurementRow.status == "ok")
        if gpu_key is not None:
            device = select(DeviceRow.id).where(DeviceRow.key == gpu_key).scalar_subquery()
            ok = ok.where(MeasurementRow.device_id == device)
        query = select(ProblemRow.json).where(ok).order_by(ProblemRow.key)
        if spec is not None:
            query = query.where(ProblemRow.spec_key == spec.key)
        with self._read() as connection:
            return read_problems(connection.execute(query).scalars())

    def gpu_keys(self, *, capability: str | None = None) -> list[str]:
        """Keys of the device models with measurements, sorted; of one compute capability such as ``9.0a``."""
        query = select(DeviceRow.key).where(exists().where(MeasurementRow.device_id == DeviceRow.id))
        if capability is not None:
            query = query.where(DeviceRow.capability == capability)
        with self._read() as connection:
            return sorted(str(key) for key in connection.execute(query).scalars())

    def rejected(self, spec: Spec) -> frozenset[Variant]:
        """Variants that no look-up gives for ``spec``: wrong, crashed or blocklisted, on any GPU."""
        return barred(self._deaths(spec))

    def blocklisted(self, spec: Spec) -> frozenset[Variant]:
        """Variants that cost two workers for ``spec``, on any GPU; see `blocklist.py`."""
        return blocklisted(self._deaths(spec))

    @contextmanager
    def snapshot(self) -> Iterator[Self]:
        """A view whose reads share one transaction: all of one moment, and cheaper. For one thread; don't keep it."""
        with self._read() as connection:
            view = copy.copy(self)
            view._snapshot = connection
            yield view

    @classmethod
    @contextmanager
    def look_into(cls, path: str | Path, *, timeout: float = LOCK_TIMEOUT) -> Iterator[Self]:
        """:meth:`open` with ``readonly`` and its :meth:`snapshot` in one, on one connection: for a quick look-up."""
        path = Path(os.path.abspath(path))
        store = cls(path, reading_mode(path, read_header(path)), readonly=True, timeout=timeout)
        with store.snapshot() as view:
            view._check_schema()
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
        with (
            sqlite_failures(self.path, writing=False, timeout=self._timeout),
            engine(self.path, self._reading, self._timeout).begin() as connection,
        ):
            yield connection

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        if self.readonly:
            raise DatabaseNotWritable(f"tuning database {self.path} was opened read-only")
        with (
            sqlite_failures(self.path, writing=True, timeout=self._timeout),
            engine(self.path, "write", self._timeout).begin() as connection,
        ):
            yield connection

    def _check_schema(self) -> None:
        """Reads the schema through SQLite, which sees what a header alone does not: damage, a log not yet merged."""
        with self._read() as connection:
            schema = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
            origin = connection.execute(_ORIGIN).scalar_one_or_none()
        if origin is None:
            raise DatabaseDamaged(f"tuning database {self.path} is damaged: its id is gone. {WAY_OUT}")
        check_schema(self.path, schema)
        self._schema = schema
        if schema < (1 if self.readonly else SCHEMA_VERSION):
            raise StoreError(
                f"tuning database {self.path} has schema version {schema}, older than {SCHEMA_VERSION}. "
                "It is upgraded when it is next opened for writing, e.g. by flashtune tune"
            )


def _known(connection: Connection, ids: list[str]) -> dict[str, Measurement | None]:
    """The stored rows with these ids; None for one that this version can't read."""
    rows = _rows_with_ids(connection, ids, SCHEMA_VERSION)
    return dict.fromkeys(rows) | {each.id: each for each in read_measurements(rows.values())}


def _rows_with_ids(connection: Connection, ids: Sequence[str], schema: int) -> dict[str, AnyRow]:
    rows: dict[str, AnyRow] = {}
    for start in range(0, len(ids), IDS_AT_ONCE):
        wanted = MeasurementRow.id.in_(ids[start : start + IDS_AT_ONCE])
        rows |= {str(row._mapping["id"]): row for row in connection.execute(select_measurements(schema).where(wanted))}
    return rows


_ORIGIN = select(OriginRow.uuid)
_COLUMNS: dict[str, ColumnElement[Any]] = {
    "problem": ProblemRow.key.expression,
    "spec": ProblemRow.spec_key.expression,
    "gpu_key": DeviceRow.key.expression,
    "family": VariantRow.family.expression,
    "session": MeasurementRow.session.expression,
    "status": MeasurementRow.status.expression,
    "stage": MeasurementRow.stage.expression,
}


def _keys(problem: Problem | None, spec: Spec | None) -> dict[str, str | None]:
    return {"problem": problem.key if problem else None, "spec": spec.key if spec else None}


def _matching(
    connection: Connection,
    select_all: Callable[[int], Select[*tuple[Any, ...]]],
    schema: int,
    wanted: Mapping[str, str | None],
) -> CursorResult[*tuple[Any, ...]]:
    given = {name: text for name, text in wanted.items() if text is not None}
    return connection.execute(_narrowed(select_all, schema, tuple(given)), given)


@functools.cache
def _narrowed(
    select_all: Callable[[int], Select[*tuple[Any, ...]]], schema: int, names: tuple[str, ...]
) -> Select[*tuple[Any, ...]]:
    """Kept, since SQLAlchemy takes longer to make a statement anew than SQLite to answer it."""
    return select_all(schema).where(*(_COLUMNS[name] == bindparam(name) for name in names))
