"""The tables of each schema version, with which those of a file are compared before the first query.

The schema of a file is code: a view or a trigger, a generated column, a CHECK or an index of an expression runs when a
query touches it. So a file has the tables and indexes that the migrations make, word for word, or it is not used.

``migrations/vNNNN.sql`` is what a new database of that version has. `tests/upgrade_assets/make_database.py` writes it
for the newest one.
"""

from __future__ import annotations

import functools
import re
import sqlite3
from contextlib import closing
from pathlib import Path

from flashtune.errors import DatabaseDamaged, DatabaseForeign
from flashtune.tuned_db.schema.version import MIGRATIONS
from flashtune.values import shown

from .files import check_schema, shown_database

Entry = tuple[str, str, str, str | None]
"""Type, name, table and text of a row of ``sqlite_master``. What SQLite makes by itself has no text."""

_PIECE = re.compile(r"""'(?:[^']|'')*'|"(\w+)"|(\w+)|\S""", re.ASCII)
_LISTED = "SELECT type, name, tbl_name, sql FROM sqlite_master"


def check_tables(connection: sqlite3.Connection, path: Path) -> int:
    """The schema version of a database, which has exactly the tables and indexes of that.

    Raises `DatabaseTooNew`, `DatabaseForeign` for what flashtune did not make, `DatabaseDamaged` for what is missing.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    check_schema(path, version)
    found = tuple(connection.execute(_LISTED).fetchall())
    other, missing = _compared(version, found)
    if other:
        raise DatabaseForeign(
            f"{shown_database(path)} is not used: {other} in it is not as flashtune makes it, and what somebody else "
            "made may do anything. It is left as it is; remove what was added, or ask for an export of it instead "
            "(flashtune db export)"
        )
    if missing:
        raise DatabaseDamaged(f"{shown_database(path)} is damaged: there is no {missing} in it. It is left as it is")
    return int(version)


@functools.lru_cache(maxsize=4)
def _compared(version: int, found: tuple[Entry, ...]) -> tuple[str, str]:
    """What is there and should not be, and what is not there and should; the first of each, or empty."""
    wanted = entries_of(version)
    other = next((each for each in found if _plain(each) not in wanted), None)
    if other is not None:
        kind = other[0] if other[0] in ("table", "index", "view", "trigger") else "entry"
        return f"the {kind} {shown(other[1])}", ""
    missing = sorted((each[0] != "table", *each[:2]) for each in wanted - set(map(_plain, found)))
    return "", " ".join(missing[0][1:]) if missing else ""


@functools.cache
def entries_of(version: int) -> frozenset[Entry]:
    """Those of a schema version, each with its text in one spelling; version 0 has none."""
    if not version:
        return frozenset()
    with closing(sqlite3.connect(":memory:")) as made:
        made.executescript((MIGRATIONS / f"v{version:04d}.sql").read_text("utf-8"))
        return frozenset(map(_plain, made.execute(_LISTED).fetchall()))


def script_of(connection: sqlite3.Connection) -> str:
    """The statements that make the tables of a database, for ``vNNNN.sql``: tables first, one a line."""
    texts = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type DESC, name")
    return "".join(" ".join(text.split()) + ";\n" for (text,) in texts)


def _plain(entry: Entry) -> Entry:
    """With a text in which spaces, quotes around plain names and the case of words make no difference: they are of the
    version of SQLite and SQLAlchemy that made it."""
    kind, name, table, text = entry
    if isinstance(text, str):
        pieces = ((each[1] or each[2] or "").lower() or each[0] for each in _PIECE.finditer(text))
        text = " ".join(pieces)
    return kind, name, table, text
