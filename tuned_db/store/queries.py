"""From rows to records: the statements that read them, and strict readers. `writer.py` goes the other way."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Select, String, bindparam, exists, func, literal_column, null, select

from flashtune import values
from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.errors import InvalidInput
from flashtune.tuned_db.policy.blocklist import TELLING, Failure
from flashtune.tuned_db.records.limits import check, check_text
from flashtune.tuned_db.records.measurement import Measurement, Prediction
from flashtune.tuned_db.records.parse import Unreadable, config_from_text, problem_from_text
from flashtune.tuned_db.schema.models import (
    DeviceRow,
    EnvironmentRow,
    MeasurementRow,
    PredictionRow,
    ProblemRow,
    VariantRow,
)
from flashtune.tuned_db.schema.version import SCHEMA_VERSION

from .columns import check_columns, made

_log = logging.getLogger("flashtune")

_OWN = ("created", "registers", "spill_bytes", "shared_bytes")
MEASURED = (
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
SECOND = (
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
ENVIRONMENT = ("unit", "driver", "nvrtc", "cupy", "flashtune", "author")
PREDICTED = ("predicted_us", "rank", "nvrtc", "flashtune", *_OWN)
MOST = 2048
"""Characters that are read of a text that rows share: a long one in a small file would be in memory once for each. No
check takes as many."""


def _bounded(column: Any, name: str) -> Any:
    return func.substr(column, literal_column("1"), literal_column(str(MOST)), type_=String()).label(name)


_SHARED = (
    _bounded(ProblemRow.json, "problem_json"),
    _bounded(DeviceRow.key, "gpu_key"),
    _bounded(DeviceRow.name, "gpu_name"),
    _bounded(VariantRow.family, "family"),
    _bounded(VariantRow.config, "config_json"),
    _bounded(VariantRow.source_digest, "source_digest"),
)

_PLACES = ("problem", "gpu_key", "gpu_name", "family", "config", "source_digest")
"""Where the texts of :data:`_SHARED` go."""
_NAMES: dict[type, tuple[str, ...]] = {
    Measurement: (*MEASURED, *SECOND, *ENVIRONMENT, *_PLACES),
    Prediction: (*PREDICTED, *_PLACES),
}
"""What the statements below give, in their order."""
CHUNK = 1000
"""Rows that are read, compared, sent or inserted at once."""
TOGETHER = 100
"""Rows that are checked at once: more than a final has, and few enough to be read again where one of them is bad."""
IDS_AT_ONCE = 500
"""Values of one IN (...): SQLite takes 999 parameters at least."""

T = TypeVar("T", Measurement, Prediction)
AnyRow = Row[*tuple[Any, ...]]


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


def pass_over(name: object, error: InvalidInput) -> None:
    """Counts a row that is passed over: ``name`` is the id of a measurement, None for a prediction."""
    if (count := _counting.get()) is not None:
        count.add("prediction" if name is None else values.shown(name).strip("'"), error)
    _log.debug("row %s of the tuning database is passed over: %s", name, error)


def select_measurements(schema: int = SCHEMA_VERSION) -> Select[*tuple[Any, ...]]:
    """All that a `Measurement` holds, to be narrowed by the caller; what ``schema`` has no column for is as unknown."""
    own: list[Any] = [getattr(MeasurementRow, name) for name in MEASURED]
    own += [getattr(MeasurementRow, name) if schema >= 2 else null().label(name) for name in SECOND]
    unknown = literal_column("''", String).label("author")  # the third schema has it
    environment: list[Any] = [
        unknown if name == "author" and schema < 3 else _bounded(getattr(EnvironmentRow, name), name)
        for name in ENVIRONMENT
    ]
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
        select(*[getattr(PredictionRow, name) for name in PREDICTED], *_SHARED)
        .join(ProblemRow, ProblemRow.id == PredictionRow.problem_id)
        .join(DeviceRow, DeviceRow.id == PredictionRow.device_id)
        .join(VariantRow, VariantRow.id == PredictionRow.variant_id)
    )


@functools.cache
def select_failures() -> Select[*tuple[Any, ...]]:
    """What a `Failure` holds, of those that may bar a variant for the spec with the key ``:spec``."""
    row = MeasurementRow
    return (
        select(
            VariantRow.family,
            VariantRow.config,
            VariantRow.source_digest,
            row.status,
            DeviceRow.key,
            row.session,
            EnvironmentRow.unit,
            func.max(row.created),
            func.count(),
        )
        .join(row, row.variant_id == VariantRow.id)
        .join(ProblemRow, ProblemRow.id == row.problem_id)
        .join(DeviceRow, DeviceRow.id == row.device_id)
        .join(EnvironmentRow, EnvironmentRow.id == row.environment_id)
        .where(ProblemRow.spec_key == bindparam("spec"), row.status.in_(sorted(TELLING)))
        .group_by(VariantRow.id, row.status, DeviceRow.id, row.session, EnvironmentRow.unit)
    )


def select_problems(spec: Spec | None, gpu_key: str | None) -> Select[*tuple[Any, ...]]:
    """The JSON of problems with at least one ``ok`` measurement, of that spec and on that device model if given."""
    ok = exists().where(MeasurementRow.problem_id == ProblemRow.id, MeasurementRow.status == "ok")
    if gpu_key is not None:
        device = select(DeviceRow.id).where(DeviceRow.key == gpu_key).scalar_subquery()
        ok = ok.where(MeasurementRow.device_id == device)
    query = select(ProblemRow.json).where(ok)
    return query if spec is None else query.where(ProblemRow.spec_key == spec.key)


def select_gpu_keys(capability: str | None) -> Select[*tuple[Any, ...]]:
    """Keys of the device models with measurements, of that compute capability if given."""
    query = select(DeviceRow.key).where(exists().where(MeasurementRow.device_id == DeviceRow.id))
    return query if capability is None else query.where(DeviceRow.capability == capability)


def in_parts(
    connection: Connection, query: Select[*tuple[Any, ...]], ids: Sequence[str] | None = None
) -> Iterator[Sequence[AnyRow]]:
    """Rows of a statement on measurements, unchecked, some at a time and in no order: all, or those with ``ids``."""
    if ids is None:
        yield from connection.execute(query, execution_options={"yield_per": CHUNK}).partitions()
        return
    for start in range(0, len(ids), IDS_AT_ONCE):
        yield connection.execute(query.where(MeasurementRow.id.in_(ids[start : start + IDS_AT_ONCE]))).all()


def read_measurements(rows: Iterable[AnyRow]) -> list[Measurement]:
    """Rows as records. One that this version can't read (a family or value it doesn't know, or tampering) is left
    out; it stays in the database."""
    return _read_all(rows, Measurement)


def read_predictions(rows: Iterable[AnyRow]) -> list[Prediction]:
    """The same for predictions."""
    return _read_all(rows, Prediction)


def read_problems(texts: Iterable[object]) -> list[Problem]:
    """The same for the JSON of problems."""
    found = []
    for text in texts:
        try:
            found.append(problem_from_text(text))
        except InvalidInput as error:
            _log.debug("a problem of the tuning database is passed over: %s", error)
    return found


def read_gpu_keys(keys: Iterable[object]) -> list[str]:
    """The same for keys of device models."""
    found = []
    for key in keys:
        try:
            check_text("gpu_key", key)
            found.append(str(key))
        except InvalidInput as error:
            _log.debug("a device of the tuning database is passed over: %s", error)
    return found


def read_failures(rows: Iterable[AnyRow]) -> list[Failure]:
    """The same for what :func:`select_failures` gives."""
    found = []
    for family, config, *texts, count in rows:
        digest, status, gpu_key, session, unit, created = map(str, texts)
        try:
            variant = str(family), config_from_text(family, config).key, digest
            found.append(Failure(variant, status, gpu_key, session, unit, created, int(count)))
        except InvalidInput as error:
            _log.debug("a failure in the tuning database is passed over: %s", error)
    return found


def read_measurement(row: AnyRow) -> Measurement:
    """A row of :func:`select_measurements` as a record; :class:`InvalidInput` says why this version can't read it."""
    return _checked(row, Measurement)


def _read_all(rows: Iterable[AnyRow], kind: type[T]) -> list[T]:
    found: list[T] = []
    left = iter(rows)
    while part := list(itertools.islice(left, TOGETHER)):
        try:
            found += _checked_together(part, kind)
        except InvalidInput:  # which of them, and why?
            found += [each for each in (_read(row, kind) for row in part) if each is not None]
    return found


def _checked_together(rows: Sequence[AnyRow], kind: type[T]) -> list[T]:
    """:func:`_checked` of each row; raises if it does for one."""
    columns: dict[str, Sequence[Any]] = dict(zip(_NAMES[kind], zip(*rows, strict=True), strict=True))
    columns["problem"] = [problem_from_text(text) for text in columns["problem"]]
    columns["config"] = list(map(config_from_text, columns.pop("family"), columns["config"]))
    check_columns(kind, columns)
    return made(kind, columns)


def _checked(row: AnyRow, kind: type[T]) -> T:
    data = dict(zip(_NAMES[kind], row, strict=True))
    data["problem"] = problem_from_text(data["problem"])
    data["config"] = config_from_text(data.pop("family"), data["config"])
    return check(kind(**data))


def _read(row: AnyRow, kind: type[T]) -> T | None:
    try:
        return _checked(row, kind)
    except InvalidInput as error:
        pass_over(row._mapping.get("id"), error)
        return None
