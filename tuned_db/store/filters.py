"""Statements of `queries.py`, narrowed to what a caller asks for."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, bindparam

from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.tuned_db.schema.models import DeviceRow, MeasurementRow, ProblemRow, VariantRow

from .queries import TOGETHER, AnyRow

_COLUMNS: dict[str, ColumnElement[Any]] = {
    "problem": ProblemRow.key.expression,
    "spec": ProblemRow.spec_key.expression,
    "gpu_key": DeviceRow.key.expression,
    "family": VariantRow.family.expression,
    "session": MeasurementRow.session.expression,
    "status": MeasurementRow.status.expression,
    "stage": MeasurementRow.stage.expression,
}


def keys(problem: Problem | None, spec: Spec | None) -> dict[str, str | None]:
    """What a problem and a spec are found by."""
    return {"problem": problem.key if problem else None, "spec": spec.key if spec else None}


def matching(
    connection: Connection,
    select_all: Callable[[int], Select[*tuple[Any, ...]]],
    schema: int,
    wanted: Mapping[str, str | None],
) -> Iterator[AnyRow]:
    """The rows of a statement of `queries.py` in which each text that is given stands. Few are in memory at once."""
    given = {name: text for name, text in wanted.items() if text is not None}
    found = connection.execute(_narrowed(select_all, schema, tuple(given)), given)
    return itertools.chain.from_iterable(found.partitions(TOGETHER))


@functools.cache
def _narrowed(
    select_all: Callable[[int], Select[*tuple[Any, ...]]], schema: int, names: tuple[str, ...]
) -> Select[*tuple[Any, ...]]:
    """Kept, since SQLAlchemy takes longer to make a statement anew than SQLite to answer it."""
    return select_all(schema).where(*(_COLUMNS[name] == bindparam(name) for name in names))
