"""Between records and rows: the statements that read them, strictly, and the values that are written."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Select, bindparam, delete, func, insert, null, select

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

_NAMES: dict[type, tuple[str, ...]] = {Measurement: (*_MEASURED, *_SECOND, *_ENVIRONMENT), Prediction: _PREDICTED}
"""What the statements below give in front of :data:`_SHARED`."""
CHUNK = 2000
"""Rows that are read, compared or inserted at once."""
MANY = 100
"""Records from which on their variants are looked up together."""
IDS_AT_ONCE = 500
"""Values of one IN (...): SQLite takes 999 parameters at least."""

T = TypeVar("T", Measurement, Prediction)
AnyRow = Row[*tuple[Any, ...]]


class Unreadable:
    """How many rows were passed over."""

    def __init__(self) -> None:
        self.rows = 0

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


@functools.cache
def select_deaths() -> Select[*tuple[Any, ...]]:
    """Variants with a status that may bar them for the spec with the key ``:spec``, on any device, and how many rows
    have it."""
    return (
        select(VariantRow.family, VariantRow.config, VariantRow.source_digest, MeasurementRow.status, func.count())
        .join(MeasurementRow, MeasurementRow.variant_id == VariantRow.id)
        .join(ProblemRow, ProblemRow.id == MeasurementRow.problem_id)
        .where(ProblemRow.spec_key == bindparam("spec"), MeasurementRow.status.in_((*REJECTING, *KILLS)))
        .group_by(VariantRow.id, MeasurementRow.status)
    )


def read_measurements(rows: Iterable[AnyRow]) -> list[Measurement]:
    """Rows as records. One that this version can't read (a family or value it doesn't know, or tampering) is left
    out; it stays in the database."""
    return [each for each in (_read(row, Measurement) for row in rows) if each is not None]


def read_predictions(rows: Iterable[AnyRow]) -> list[Prediction]:
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


def read_deaths(rows: Iterable[AnyRow]) -> list[tuple[Variant, str, int]]:
    """The same for what :func:`select_deaths` gives."""
    found = []
    for family, config, digest, status, count in rows:
        try:
            variant = str(family), config_from_text(family, config).key, str(digest)
            found.append((variant, str(status), int(count)))
        except InvalidInput as error:
            _log.debug("a variant of the tuning database is passed over: %s", error)
    return found


def read_measurement(row: AnyRow) -> Measurement:
    """A row of :func:`select_measurements` as a record; :class:`InvalidInput` says why this version can't read it."""
    return _checked(row, Measurement)


def _checked(row: AnyRow, kind: type[T]) -> T:
    *own, problem, gpu_key, gpu_name, family, config, digest = row
    data = dict(zip(_NAMES[kind], own, strict=True))
    shared: dict[str, Any] = {"problem": problem_from_text(problem), "config": config_from_text(family, config)}
    return check(kind(gpu_key=gpu_key, gpu_name=gpu_name, source_digest=digest, **shared, **data))


def _read(row: AnyRow, kind: type[T]) -> T | None:
    try:
        return _checked(row, kind)
    except InvalidInput as error:
        if (count := _counting.get()) is not None:
            count.rows += 1
        _log.debug("row %s of the tuning database is passed over: %s", row._mapping.get("id", ""), error)
        return None


class Writer:
    """Inserts checked records in one transaction, which began as a write: nobody intervenes.

    Remembers the ids of what records share, so that many records cost little more than their own rows.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ids: dict[tuple[object, ...], int] = {}

    def measurements(self, records: Iterable[Measurement]) -> None:
        """Records whose ids are new."""
        left = iter(records)
        while chunk := list(itertools.islice(left, CHUNK)):
            if len(chunk) >= MANY:
                self._variants(chunk)
            rows = []
            for each in chunk:
                own = {name: getattr(each, name) for name in (*_MEASURED, *_SECOND)}
                rows.append(own | self.shared(each) | {"environment_id": self._environment(each)})
            self._connection.execute(insert(MeasurementRow), rows)

    def prediction(self, record: Prediction) -> None:
        """In place of an earlier one of the same variant, problem and device."""
        keys = self.shared(record)
        self._connection.execute(delete(PredictionRow).filter_by(**keys))
        own = {name: getattr(record, name) for name in _PREDICTED}
        self._connection.execute(insert(PredictionRow).values(**own, **keys))

    def shared(self, record: Measurement | Prediction) -> dict[str, int]:
        """Ids of the problem, device and variant of ``record``, made where they are new."""
        return {
            "problem_id": self._problem(record.problem),
            "device_id": self._device(record.gpu_key, record.gpu_name),
            "variant_id": self._variant(record),
        }

    def _problem(self, problem: Problem) -> int:
        def others() -> dict[str, Any]:
            core = ("op", "dtype", "head_dim", "batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv", "causal")
            data: dict[str, Any] = {name: getattr(problem, name) for name in core}
            return data | {"spec_key": problem.spec.key, "json": canonical(value.to_json(problem))}

        return self._id((ProblemRow, problem), lambda: {"key": problem.key}, others)

    def _device(self, key: str, name: str) -> int:
        memory = (DeviceRow, key, name)
        if memory not in self._ids:
            found = self._find_or_make(DeviceRow, {"key": key}, lambda: {"name": name, "capability": capability(key)})
            known = self._connection.execute(select(DeviceRow.name).where(DeviceRow.id == found)).scalar_one()
            if known != name:  # one name per model: to drop the second would change what was measured
                raise InvalidInput(
                    f"gpu_name={value.shown(name)} must be {value.shown(known)}, as in other rows of the model {key}"
                )
            self._ids[memory] = found
        return self._ids[memory]

    def _variant(self, record: Measurement | Prediction) -> int:
        unique = functools.partial(_variant_columns, record)
        return self._id((VariantRow, record.config, record.source_digest), unique)

    def _variants(self, records: Sequence[Measurement]) -> None:
        """Remembers the ids of all variants of ``records``, with few statements: most rows have one of their own."""
        wanted = {(VariantRow, each.config, each.source_digest): each for each in records}
        columns = {memory: _variant_columns(each) for memory, each in wanted.items() if memory not in self._ids}
        by_text = {tuple(each.values()): memory for memory, each in columns.items()}
        self._remember(by_text)
        missing = [each for memory, each in columns.items() if memory not in self._ids]
        if missing:
            self._connection.execute(insert(VariantRow), missing)
            self._remember(by_text)

    def _remember(self, by_text: Mapping[tuple[Any, ...], tuple[object, ...]]) -> None:
        digests = sorted({digest for _, _, digest in by_text})
        for start in range(0, len(digests), IDS_AT_ONCE):
            some = VariantRow.source_digest.in_(digests[start : start + IDS_AT_ONCE])
            query = select(VariantRow.id, VariantRow.family, VariantRow.config, VariantRow.source_digest).where(some)
            for found, *text in self._connection.execute(query):
                if memory := by_text.get(tuple(text)):
                    self._ids[memory] = found

    def _environment(self, record: Measurement) -> int:
        unique = {name: getattr(record, name) for name in _ENVIRONMENT}
        return self._id((EnvironmentRow, *unique.values()), lambda: unique)

    def _id(
        self,
        memory: tuple[type[Base], *tuple[object, ...]],
        unique: Callable[[], dict[str, Any]],
        others: Callable[[], dict[str, Any]] = dict,
    ) -> int:
        """Id of the row of table ``memory[0]`` with these unique values, made if new."""
        known = self._ids.get(memory)
        if known is None:
            known = self._ids[memory] = self._find_or_make(memory[0], unique(), others)
        return known

    def _find_or_make(self, model: type[Base], unique: dict[str, Any], others: Callable[[], dict[str, Any]]) -> int:
        table = model.__table__
        query = select(table.c.id).where(*[table.c[name] == wanted for name, wanted in unique.items()])
        found = self._connection.execute(query).scalar_one_or_none()
        if found is not None:
            return int(found)
        made = self._connection.execute(insert(model).values(**unique, **others())).inserted_primary_key
        assert made is not None
        return int(made[0])


def _variant_columns(record: Measurement | Prediction) -> dict[str, Any]:
    """In the order of :meth:`Writer._remember`."""
    config = canonical(record.config.to_json())
    return {"family": record.config.family, "config": config, "source_digest": record.source_digest}
