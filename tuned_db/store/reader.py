"""What is read of a tuning database, wherever it is: measurements, predictions, and what follows from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from sqlalchemy import ColumnElement, Connection, select

from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.tuned_db.backends.backend import Backend
from flashtune.tuned_db.policy.blocklist import Failure, barred, blocklisted
from flashtune.tuned_db.policy.ranked import Ranked
from flashtune.tuned_db.policy.winners import best_first, with_source
from flashtune.tuned_db.records.measurement import Measurement, Prediction, Variant
from flashtune.tuned_db.schema.models import MeasurementRow, OriginRow
from flashtune.values import plain, shown

from .arrivals import NUMBERED, Arrival, brought_by, logged, still_here
from .filters import keys, matching
from .fingerprints import Fingerprints, count, fingerprints
from .queries import (
    AnyRow,
    in_parts,
    read_failures,
    read_gpu_keys,
    read_measurements,
    read_predictions,
    read_problems,
    select_failures,
    select_gpu_keys,
    select_measurements,
    select_predictions,
    select_problems,
)
from .removed import count_tombstones, tombstones


class Reader:
    """An open tuning database; `store.Store` opens it. Every call is a transaction, unless it is a :meth:`snapshot`."""

    label = "user"
    """Origin of a choice from it; see `Choice.origin`."""

    def __init__(self, backend: Backend, snapshot: Connection | None = None) -> None:
        """The database behind ``backend``, whose schema and id are looked at; raises what `Backend` raises.

        All reads go through ``snapshot``, a connection of that place, where it is given.
        """
        self.backend = backend
        self._snapshot = snapshot
        self._barred: dict[tuple[Spec, str], frozenset[Variant]] = {}
        with self._read() as connection:
            self._schema = backend.schema(connection)
            if self._schema < backend.oldest:
                raise backend.outdated(self._schema)
            self._check_origin(connection)

    def _check_origin(self, connection: Connection) -> None:
        """Others store and print the id of this database, so it is text that can be."""
        found = connection.execute(_ORIGIN).scalars().all()
        if not found:
            raise self.backend.damaged("its id is gone")
        if len(found) > 1:
            raise self.backend.damaged("it has more than one id")
        if plain(found[0]) != found[0]:
            raise self.backend.damaged(f"its id is {shown(found[0])}")

    @property
    def origin(self) -> str:
        """UUID of this database."""
        with self._read() as connection:
            return str(connection.execute(_ORIGIN).scalars().first())

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
            found = read_measurements(matching(connection, select_measurements, self._schema, wanted))
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

    def removed(self, ids: Iterable[object]) -> set[str]:
        """Those of ``ids`` that were removed here and don't return."""
        with self._read() as connection:
            return tombstones(connection, self._schema, [each for each in ids if isinstance(each, str)])

    def count_removed(self) -> int:
        """How many measurements were removed here."""
        with self._read() as connection:
            return count_tombstones(connection, self._schema)

    def arrivals(self) -> list[Arrival]:
        """What came from elsewhere, oldest first; not checked. Empty for a schema that had no log yet."""
        with self._read() as connection:
            return logged(connection, self._schema)

    def arrived(self) -> dict[int, int]:
        """How many measurements are here of each arrival, by its number, as far as that is known."""
        with self._read() as connection:
            return still_here(connection, self._schema)

    @property
    def numbers_arrivals(self) -> bool:
        """Whether rows know what brought them: not in a schema that had no numbers yet."""
        return self._schema >= NUMBERED

    def arrivals_of(self, ids: Sequence[str]) -> dict[str, int]:
        """Numbers of the arrivals that brought those of ``ids`` that came from elsewhere, as far as that is known."""
        with self._read() as connection:
            return brought_by(connection, self._schema, ids)

    def ids(self, condition: ColumnElement[bool]) -> list[object]:
        """Ids of the measurements that meet a condition on `MeasurementRow`, of any type in a file that was tampered
        with."""
        with self._read() as connection:
            return list(connection.execute(select(MeasurementRow.id).where(condition)).scalars())

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
            self.rejected(problem.spec, gpu_key),
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
            return sorted(read_gpu_keys(connection.execute(select_gpu_keys(capability)).scalars()))

    def rejected(self, spec: Spec, gpu_key: str) -> frozenset[Variant]:
        """Variants that no look-up gives for ``spec`` on a device model: wrong, crashed or blocklisted."""
        if self._snapshot is None:
            return barred(self._failures(spec), gpu_key)
        if (spec, gpu_key) not in self._barred:  # a snapshot never changes
            self._barred[spec, gpu_key] = barred(self._failures(spec), gpu_key)
        return self._barred[spec, gpu_key]

    def blocklisted(self, spec: Spec, gpu_key: str) -> frozenset[Variant]:
        """Variants that cost two workers for ``spec``, as far as that counts on a device model; see `blocklist.py`."""
        return blocklisted(self._failures(spec), gpu_key)

    @contextmanager
    def snapshot(self) -> Iterator[Self]:
        """A view whose reads share one transaction: all of one moment, and cheaper. For one thread; don't keep it."""
        with self._read() as connection:
            view = copy.copy(self)
            view._snapshot, view._barred = connection, {}
            yield view

    def _failures(self, spec: Spec) -> list[Failure]:
        with self._read() as connection:
            return read_failures(connection.execute(select_failures(), {"spec": spec.key}))

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        if self._snapshot is not None:
            yield self._snapshot
            return
        with self.backend.reading() as connection:
            yield connection


_ORIGIN = select(OriginRow.uuid).limit(2)
