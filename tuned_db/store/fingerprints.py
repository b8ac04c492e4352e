"""Fingerprints of stored measurements, so that two databases find what differs without sending every row.

A server computes those of its own rows, in SQL, and `of_row` does the same in Python: 64 digits stand for some 700
bytes. Equal ones mean equal rows. Different ones mean nothing yet: another version may spell a problem in another way.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sqlalchemy import Boolean, Connection, Double, Integer, Select, String, case, cast, func, literal_column, select
from sqlalchemy.sql.elements import ColumnElement

from flashtune.tuned_db.schema.models import MeasurementRow

from .queries import AnyRow, in_parts, select_measurements

Fingerprints = dict[object, str | None]
"""By id, which is of any type in a file that was tampered with; None for a row that no version can read: one with a
value of no known type, or on a server with more text than a record may have, which is not to be fetched."""

LONGEST = 65536
"""Bytes of the texts of one row. No record that `limits.py` takes comes near, nor does what a server takes today."""


def fingerprints(connection: Connection, schema: int, ids: Sequence[str] | None = None) -> Iterator[Fingerprints]:
    """Those of all measurements, or of those that are among ``ids``, some at a time and in no order."""
    in_sql = connection.dialect.name == "postgresql"
    query = _select_in_sql(schema) if in_sql else select_measurements(schema)
    for rows in in_parts(connection, query, ids):
        yield {row.id: row[1] if in_sql else of_row(row) for row in rows}


def of_row(row: AnyRow) -> str | None:
    """The fingerprint of a row of :func:`rows.select_measurements`."""
    try:
        parts = [_SPELLED[type(value)](value) for value in _ordered(row._fields)(row)]
    except KeyError:
        return None
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


@functools.cache
def _ordered(fields: tuple[str, ...]) -> Callable[[AnyRow], tuple[Any, ...]]:
    """Gives the values of a row with these fields in the order of a fingerprint."""
    return operator.itemgetter(*(fields.index(name) for name in sorted(fields) if name != "id"))


_SPELLED: dict[type, Callable[[Any], str]] = {
    type(None): lambda value: "-",
    bool: lambda value: "1" if value else "0",
    int: str,
    float: lambda value: struct.pack(">d", value).hex(),
    str: lambda value: value.encode(errors="surrogatepass").hex(),
}
"""By type; `_spelled_in_sql` is the same for a column."""


def _select_in_sql(schema: int) -> Select[*tuple[Any, ...]]:
    rows = select_measurements(schema)
    columns: dict[str, Any] = {str(name): each for name, each in rows.selected_columns.items()}
    parts = [_spelled_in_sql(columns[name]) for name in sorted(columns) if name != "id"]
    digest = func.sha256(func.convert_to(func.concat_ws("|", *parts), "UTF8"))
    texts = [func.coalesce(func.octet_length(each), 0) for each in columns.values() if isinstance(each.type, String)]
    short = functools.reduce(operator.add, texts) <= LONGEST
    name = func.substr(columns["id"], 1, 100).label("id")
    return rows.with_only_columns(name, case((short, func.encode(digest, "hex"))), maintain_column_froms=True)


def _spelled_in_sql(column: ColumnElement[Any]) -> ColumnElement[str]:
    match column.type:
        case Boolean():
            text: ColumnElement[Any] = cast(cast(column, Integer), String)
        case Double():
            text = func.encode(func.float8send(column), "hex")
        case Integer():
            text = cast(column, String)
        case String():
            text = func.encode(func.convert_to(column, "UTF8"), "hex")
        case other:
            raise AssertionError(f"a column of type {other} has no spelling")
    return func.coalesce(text, literal_column("'-'"))


def count(connection: Connection) -> int:
    """How many measurements there are."""
    return connection.execute(select(func.count()).select_from(MeasurementRow)).scalar_one()
