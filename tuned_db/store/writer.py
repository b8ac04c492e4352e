"""From records to rows: `Writer` inserts them, and what they share only once. `queries.py` goes the other way."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite

from flashtune import values
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import InvalidInput
from flashtune.tuned_db.records.measurement import Measurement, Prediction, canonical, capability
from flashtune.tuned_db.records.parse import problem_from_text
from flashtune.tuned_db.schema.models import (
    Base,
    DeviceRow,
    EnvironmentRow,
    MeasurementRow,
    PredictionRow,
    ProblemRow,
    VariantRow,
)

from .queries import CHUNK, ENVIRONMENT, MEASURED, PREDICTED, SECOND

_INSERTS: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}
_TOGETHER = 100
"""Records whose shared rows are looked up in one statement: each costs a journey to a server."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """A row that records share: its unique values, and the others as they are where it is new."""

    model: type[Base]
    memory: tuple[object, ...]
    """What it is remembered by; cheaper than the unique values."""
    unique: Callable[[], dict[str, Any]]
    others: Callable[[], dict[str, Any]] = dict


class Writer:
    """Inserts checked records in one transaction, which began as a write: nobody intervenes.

    Remembers the ids of what records share, so that many records cost little more than their own rows.
    """

    def __init__(self, connection: Connection, arrival: int | None = None) -> None:
        """``arrival`` is the number of what brings the measurements, if they come from elsewhere."""
        self._connection = connection
        self._arrival = arrival
        self._ids: dict[tuple[object, ...], int] = {}

    def measurements(self, records: Iterable[Measurement]) -> None:
        """Records whose ids are new."""
        left = iter(records)
        while chunk := list(itertools.islice(left, CHUNK)):
            rows = []
            for start in range(0, len(chunk), _TOGETHER):
                part = [(each, _shared(each) | _environment(each)) for each in chunk[start : start + _TOGETHER]]
                self._know(each for _, shared in part for each in shared.values())
                for each, shared in part:
                    own = {name: getattr(each, name) for name in (*MEASURED, *SECOND)} | {"arrival": self._arrival}
                    rows.append(own | {name: self._id(wanted) for name, wanted in shared.items()})
            self._connection.execute(insert(MeasurementRow), rows)

    def prediction(self, record: Prediction) -> None:
        """In place of an earlier one of the same variant, problem and device."""
        keys = self._shared_ids(record)
        self._connection.execute(delete(PredictionRow).filter_by(**keys))
        own = {name: getattr(record, name) for name in PREDICTED}
        self._connection.execute(insert(PredictionRow).values(**own, **keys))

    def predictions(self, records: Iterable[Prediction]) -> None:
        """In place of all earlier ones of the same problems and devices."""
        cleared = set()
        for each in records:
            shared = self._shared_ids(each)
            place = shared["problem_id"], shared["device_id"]
            if place not in cleared:
                cleared.add(place)
                self._connection.execute(
                    delete(PredictionRow).where(
                        PredictionRow.problem_id == place[0], PredictionRow.device_id == place[1]
                    )
                )
            self.prediction(each)

    def _shared_ids(self, record: Measurement | Prediction) -> dict[str, int]:
        """Ids of the problem, device and variant of ``record``, made where they are new."""
        return {name: self._id(each) for name, each in _shared(record).items()}

    def _id(self, wanted: _Shared) -> int:
        if (wanted.model, *wanted.memory) not in self._ids:
            self._know([wanted])
        return self._ids[wanted.model, *wanted.memory]

    def _know(self, wanted: Iterable[_Shared]) -> None:
        """Finds the rows, and makes those that are new."""
        unknown: dict[type[Base], dict[tuple[object, ...], _Shared]] = defaultdict(dict)
        for each in wanted:
            if (each.model, *each.memory) not in self._ids:
                unknown[each.model][each.memory] = each
        for model, found in unknown.items():
            self._find_or_make(model, list(found.values()))

    def _find_or_make(self, model: type[Base], wanted: list[_Shared]) -> None:
        unique = [each.unique() for each in wanted]
        names = list(unique[0])
        places = [tuple(each.values()) for each in unique]
        ids = self._find(model, names, places)
        new = {
            place: own | each.others()
            for each, own, place in zip(wanted, unique, places, strict=True)
            if place not in ids
        }
        if new:
            made = _INSERTS[self._connection.dialect.name](model).on_conflict_do_nothing()
            self._connection.execute(made, list(new.values()))
            ids |= self._find(model, names, list(new))
        if model is ProblemRow:
            self._check_problems([each for each, place in zip(wanted, places, strict=True) if place not in new], ids)
        if model is DeviceRow:
            self._check_names([each.others()["name"] for each in wanted], [ids[place] for place in places])
        for each, place in zip(wanted, places, strict=True):
            self._ids[model, *each.memory] = ids[place]

    def _check_problems(self, wanted: list[_Shared], ids: dict[tuple[object, ...], int]) -> None:
        """Rows that are there are the problems that their keys say: else what is measured would be lost in them."""
        rows = {ids[tuple(each.unique().values())]: each.memory[0] for each in wanted}
        query = select(ProblemRow.id, ProblemRow.json).where(ProblemRow.id.in_(rows))
        for number, text in self._connection.execute(query):
            try:
                found: object = problem_from_text(text)
            except InvalidInput:
                found = None
            if found != rows[number]:
                raise InvalidInput(
                    f"row {number} of the table problem has the key of {rows[number]} and other values: somebody made "
                    f"it by hand, and nothing was added. Remove it: DELETE FROM problem WHERE id = {number}"
                )

    def _check_names(self, names: list[str], ids: list[int]) -> None:
        """One name per model: to drop the second would change what was measured."""
        rows = self._connection.execute(
            select(DeviceRow.id, DeviceRow.key, DeviceRow.name).where(DeviceRow.id.in_(ids))
        )
        stored = {row.id: (row.key, row.name) for row in rows}
        for name, number in zip(names, ids, strict=True):
            key, known = stored[number]
            if name != known:
                raise InvalidInput(
                    f"gpu_name={values.shown(name)} must be {values.shown(known)}, as in other rows of the model {key} "
                    f"(row {number} of the table device)"
                )

    def _find(self, model: type[Base], names: list[str], places: list[tuple[Any, ...]]) -> dict[tuple[Any, ...], int]:
        table = model.__table__
        columns = [table.c[name] for name in names]
        which = columns[0].in_([each[0] for each in places]) if len(names) == 1 else tuple_(*columns).in_(places)
        rows = self._connection.execute(select(table.c.id, *columns).where(which))
        return {tuple(row[1:]): int(row[0]) for row in rows}


def _shared(record: Measurement | Prediction) -> dict[str, _Shared]:
    """What ``record`` points at, by the column that does."""
    problem, key, name = record.problem, record.gpu_key, record.gpu_name
    return {
        "problem_id": _Shared(ProblemRow, (problem,), lambda: {"key": problem.key}, lambda: _problem_values(problem)),
        "device_id": _Shared(
            DeviceRow, (key, name), lambda: {"key": key}, lambda: {"name": name, "capability": capability(key)}
        ),
        "variant_id": _Shared(VariantRow, (record.config, record.source_digest), lambda: _variant_values(record)),
    }


def _environment(record: Measurement) -> dict[str, _Shared]:
    unique = {name: getattr(record, name) for name in ENVIRONMENT}
    return {"environment_id": _Shared(EnvironmentRow, tuple(unique.values()), lambda: unique)}


def _problem_values(problem: Problem) -> dict[str, Any]:
    core = ("op", "dtype", "head_dim", "batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv", "causal")
    data: dict[str, Any] = {name: getattr(problem, name) for name in core}
    return data | {"spec_key": problem.spec.key, "json": canonical(values.to_json(problem))}


def _variant_values(record: Measurement | Prediction) -> dict[str, Any]:
    config = canonical(record.config.to_json())
    return {"family": record.config.family, "config": config, "source_digest": record.source_digest}
