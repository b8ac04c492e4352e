"""Between records and rows: the statements that read them, strictly, and the values that are written."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Select, delete, func, insert, null, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite

from flashtune.codegen import value
from flashtune.codegen.problem import Problem
from flashtune.errors import InvalidInput

from .blocklist import KILLS
from .files import SCHEMA_VERSION
from .gate import check, config_from_text, problem_from_text
from .models import Base, DeviceRow, EnvironmentRow, MeasurementRow, PredictionRow, ProblemRow, VariantRow
from .records import REJECTING, Measurement, Prediction, Variant, canonical, capability

_log = logging.getLogger("flashtune")

_OWN = ("created", "registers", "spill_bytes", "shared_bytes")
_MEASURED = (
    "id",
    "session",
    "status",
    "stage",
    "median_us",
    "q20_us",
    "q80_us",
    "samples",
    "baseline_us",
    "max_error",
    "rms_error",
    "clock_mhz",
    "seed",
    "message",
    *_OWN,
)
_SECOND = (
    "paired_ratio",
    "ratio_low",
    "ratio_high",
    "rounds",
    "power_w",
    "temperature_c",
    "throttle",
    "contended",
)
"""Since schema version 2."""
_ENVIRONMENT = ("unit", "driver", "nvrtc", "cupy", "flashtune")
_PREDICTED = ("predicted_us", "rank", "nvrtc", "flashtune", *_OWN)
_SHARED = (
    ProblemRow.json.label("problem_json"),
    DeviceRow.key.label("gpu_key"),
    DeviceRow.name.label("gpu_name"),
    VariantRow.family.label("family"),
    VariantRow.config.label("config_json"),
    VariantRow.source_digest.label("source_digest"),
)

T = TypeVar("T", Measurement, Prediction)


REASONS = 100
"""Rows whose reason is kept; all of them may be unreadable."""


class Unreadable:
    """How many rows were passed over, and why the first `REASONS` of them were."""

    def __init__(self) -> None:
        self.rows = 0
        self.reasons: list[str] = []

    def add(self, row: str, error: InvalidInput) -> None:
        self.rows += 1
        if len(self.reasons) < REASONS:
            self.reasons.append(f"{row}: {error}")

    def __str__(self) -> str:
        return f"{self.rows} row{'' if self.rows == 1 else 's'} can't be read by this version"


_counting: ContextVar[Unreadable | None] = ContextVar("counting", default=None)


@contextmanager
def count_unreadable() -> Iterator[Unreadable]:
    """Counts the measurements and predictions that reads in this block pass over; one read twice counts twice."""
    count = Unreadable()
    token = _counting.set(count)
    try:
        yield count
    finally:
        _counting.reset(token)


def select_measurements(schema: int = SCHEMA_VERSION) -> Select[*tuple[Any, ...]]:
    """All that a `Measurement` holds, to be narrowed by the caller; what ``schema`` has no column for is None."""
    own: list[Any] = [getattr(MeasurementRow, name) for name in _MEASURED]
    own += [getattr(MeasurementRow, name) if schema >= 2 else null().label(name) for name in _SECOND]
    environment = [getattr(EnvironmentRow, name) for name in _ENVIRONMENT]
    return (
        select(*own, *environment, *_SHARED)
        .join(ProblemRow, ProblemRow.id == MeasurementRow.problem_id)
        .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
        .join(EnvironmentRow, EnvironmentRow.id == MeasurementRow.environment_id)
        .join(VariantRow, VariantRow.id == MeasurementRow.variant_id)
    )


def select_predictions(schema: int = SCHEMA_VERSION) -> Select[*tuple[Any, ...]]:
    """All that a `Prediction` holds; the same in every schema."""
    return (
        select(*[getattr(PredictionRow, name) for name in _PREDICTED], *_SHARED)
        .join(ProblemRow, ProblemRow.id == PredictionRow.problem_id)
        .join(DeviceRow, DeviceRow.id == PredictionRow.device_id)
        .join(VariantRow, VariantRow.id == PredictionRow.variant_id)
    )


def select_deaths(spec_key: str) -> Select[*tuple[Any, ...]]:
    """Variants with a status that may bar them for a spec, on any device, and how many rows have it."""
    return (
        select(VariantRow.family, VariantRow.config, VariantRow.source_digest, MeasurementRow.status, func.count())
        .join(MeasurementRow, MeasurementRow.variant_id == VariantRow.id)
        .join(ProblemRow, ProblemRow.id == MeasurementRow.problem_id)
        .where(ProblemRow.spec_key == spec_key, MeasurementRow.status.in_((*REJECTING, *KILLS)))
        .group_by(VariantRow.id, MeasurementRow.status)
    )


def read_measurements(rows: Iterable[Row[*tuple[Any, ...]]]) -> list[Measurement]:
    """Rows as records. One that this version can't read (a family or value it doesn't know, or tampering) is left
    out; it stays in the database."""
    return [each for each in (_read(row, Measurement) for row in rows) if each is not None]


def read_predictions(rows: Iterable[Row[*tuple[Any, ...]]]) -> list[Prediction]:
    """The same for predictions."""
    return [each for each in (_read(row, Prediction) for row in rows) if each is not None]


def read_problems(texts: Iterable[object]) -> list[Problem]:
    """The same for the JSON of problems."""
    found = []
    for text in texts:
        try:
            found.append(problem_from_text(text))
        except InvalidInput as error:
            _log.debug("a problem of the tuning database is passed over: %s", error)
    return found


def read_deaths(rows: Iterable[Row[*tuple[Any, ...]]]) -> list[tuple[Variant, str, int]]:
    """The same for what :func:`select_deaths` gives."""
    found = []
    for family, config, digest, status, count in rows:
        try:
            variant = str(family), config_from_text(family, config).key, str(digest)
            found.append((variant, str(status), int(count)))
        except InvalidInput as error:
            _log.debug("a variant of the tuning database is passed over: %s", error)
    return found


def _read(row: Row[*tuple[Any, ...]], kind: type[T]) -> T | None:
    data = dict(row._mapping)
    try:
        problem = problem_from_text(data.pop("problem_json"))
        config = config_from_text(data.pop("family"), data.pop("config_json"))
        return check(kind(problem=problem, config=config, **data))
    except InvalidInput as error:
        if (count := _counting.get()) is not None:
            count.add(value.shown(data["id"]).strip("'") if "id" in data else "prediction", error)
        _log.debug("row %s of the tuning database is passed over: %s", data.get("id", ""), error)
        return None


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

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ids: dict[tuple[object, ...], int] = {}

    def measurements(self, records: Iterable[Measurement]) -> None:
        """Records whose ids are new."""
        records = list(records)
        rows = []
        for start in range(0, len(records), _TOGETHER):
            part = [(each, _shared(each) | _environment(each)) for each in records[start : start + _TOGETHER]]
            self._know(each for _, shared in part for each in shared.values())
            for each, shared in part:
                own = {name: getattr(each, name) for name in (*_MEASURED, *_SECOND)}
                rows.append(own | {name: self._id(wanted) for name, wanted in shared.items()})
        if rows:
            self._connection.execute(insert(MeasurementRow), rows)

    def prediction(self, record: Prediction) -> None:
        """In place of an earlier one of the same variant, problem and device."""
        keys = self.shared(record)
        self._connection.execute(delete(PredictionRow).filter_by(**keys))
        own = {name: getattr(record, name) for name in _PREDICTED}
        self._connection.execute(insert(PredictionRow).values(**own, **keys))

    def shared(self, record: Measurement | Prediction) -> dict[str, int]:
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
        if model is DeviceRow:
            self._check_names([each.others()["name"] for each in wanted], [ids[place] for place in places])
        for each, place in zip(wanted, places, strict=True):
            self._ids[model, *each.memory] = ids[place]

    def _check_names(self, names: list[str], ids: list[int]) -> None:
        """One name per model: to drop the second would change what was measured."""
        rows = self._connection.execute(
            select(DeviceRow.id, DeviceRow.key, DeviceRow.name).where(DeviceRow.id.in_(ids))
        )
        stored = {row.id: (row.key, row.name) for row in rows}
        for name, (key, known) in zip(names, (stored[each] for each in ids), strict=True):
            if name != known:
                raise InvalidInput(
                    f"gpu_name={value.shown(name)} must be {value.shown(known)}, as in other rows of the model {key}"
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
    unique = {name: getattr(record, name) for name in _ENVIRONMENT}
    return {"environment_id": _Shared(EnvironmentRow, tuple(unique.values()), lambda: unique)}


def _problem_values(problem: Problem) -> dict[str, Any]:
    core = ("op", "dtype", "head_dim", "batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv", "causal")
    data: dict[str, Any] = {name: getattr(problem, name) for name in core}
    return data | {"spec_key": problem.spec.key, "json": canonical(value.to_json(problem))}


def _variant_values(record: Measurement | Prediction) -> dict[str, Any]:
    config = canonical(record.config.to_json())
    return {"family": record.config.family, "config": config, "source_digest": record.source_digest}
