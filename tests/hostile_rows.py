"""Databases that somebody made to do harm, by values in their rows; see `hostile_databases.py`."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from hostile_databases import BIDI, ESCAPES, MARKS, hostile, run
from mutations import stored

TABLES = ("problem", "device", "environment", "variant", "measurement", "measurement", "prediction", "arrival")


def multiplied(path: Path, times: int) -> None:
    """Many more rows, which share all their texts."""
    with closing(sqlite3.connect(path)) as plain, plain:
        names = [f'"{row[1]}"' for row in plain.execute("PRAGMA table_info(measurement)") if row[1] != "id"]
        numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {times})"
        new = "printf('%08x', n.i) || substr(id, 9)"
        columns = ", ".join(names)
        plain.execute(f"INSERT INTO measurement (id, {columns}) {numbers} SELECT {new}, {columns} FROM measurement, n")


@hostile("long texts")
def name_that_many_rows_share(path: Path, draw: random.Random) -> None:
    multiplied(path, 300)
    run(path, "UPDATE device SET name = replace(hex(zeroblob(500000)), '00', 'ab')")


@hostile("long texts")
def texts_below_the_limit_that_many_rows_share(path: Path, draw: random.Random) -> None:
    multiplied(path, 300)
    long = "substr(replace(hex(zeroblob(62500)), '00', 'ab'), 1, 125000)"
    run(path, *(f"UPDATE {table} SET {column} = {long} || rowid" for table, column in SHARED))


SHARED = (
    ("device", "name"),
    ("device", "key"),
    ("problem", "json"),
    ("variant", "config"),
    ("variant", "source_digest"),
    ("environment", "unit"),
    ("environment", "driver"),
    ("environment", "cupy"),
)


@hostile("long texts")
def problem_that_is_mostly_spaces(path: Path, draw: random.Random) -> None:
    """Its rows are sound, so there are few: Optuna takes a while for each."""
    multiplied(path, 10)
    run(path, "UPDATE problem SET json = json || replace(hex(zeroblob(50000)), '00', '  ')")


@hostile("long texts")
def wide_characters(path: Path, draw: random.Random) -> None:
    """One of them makes each character of a text take four bytes."""
    multiplied(path, 300)
    run(path, "UPDATE device SET name = ?", "UPDATE environment SET driver = ?", values=("\U0001f984" + "x" * 120_000,))


@hostile("long texts")
def messages_of_megabytes(path: Path, draw: random.Random) -> None:
    run(path, "UPDATE measurement SET message = hex(zeroblob(500000))")


@hostile("long texts")
def blobs_of_megabytes(path: Path, draw: random.Random) -> None:
    run(path, "UPDATE variant SET config = zeroblob(3000000 + id)")


@hostile("deep JSON")
def deep_configs(path: Path, draw: random.Random) -> None:
    run(path, "UPDATE variant SET config = ? || id", values=("[" * 50_000,))


@hostile("deep JSON")
def deep_problems(path: Path, draw: random.Random) -> None:
    run(path, "UPDATE problem SET json = ? || id", values=('{"dtype":' * 10_000,))


@hostile("huge numbers")
def numbers_at_their_ends(path: Path, draw: random.Random) -> None:
    run(
        path, "UPDATE measurement SET seed = 9223372036854775807, median_us = 1e308, baseline_us = 5e-324, samples = -1"
    )


@hostile("huge numbers")
def numbers_of_five_thousand_digits(path: Path, draw: random.Random) -> None:
    run(path, "UPDATE problem SET json = replace(json, ':1', ?)", values=(":1" + "9" * 5000,))
    run(path, "UPDATE variant SET config = replace(config, ':1', ?)", values=(":1" + "9" * 5000,))


@hostile("huge numbers")
def device_of_five_thousand_digits(path: Path, draw: random.Random) -> None:
    """Looked up for an untuned problem, its distance is computed."""
    run(path, "UPDATE device SET key = ?", values=(f"9.0a/h100/{'9' * 5000}sm/smem1/l2-1/1gb",))


@hostile("huge numbers")
def counted_to_the_end(path: Path, draw: random.Random) -> None:
    run(path, "INSERT INTO arrival SELECT 'a', '', 'merge', ?, '', '', '', 9223372036854775807, 9223372036854775807",
        "UPDATE measurement SET arrival = 9223372036854775807", values=(ESCAPES,))  # fmt: skip


@hostile("forged names and dates")
def dates_that_are_none(path: Path, draw: random.Random) -> None:
    run(path, "UPDATE measurement SET created = '9999-19-39T29:59:69.9Z'", "UPDATE prediction SET created = 'now'")


@hostile("forged names and dates")
def ids_of_escapes(path: Path, draw: random.Random) -> None:
    run(path, "UPDATE measurement SET id = ? || id", values=(ESCAPES,))


@hostile("forged names and dates")
def ids_that_are_null(path: Path, draw: random.Random) -> None:
    run(
        path,
        "UPDATE sqlite_master SET sql = replace(sql, 'id VARCHAR NOT NULL', 'id VARCHAR') WHERE name = 'measurement'",
    )
    run(path, "UPDATE measurement SET id = NULL")
    run(
        path,
        "UPDATE sqlite_master SET sql = replace(sql, 'id VARCHAR', 'id VARCHAR NOT NULL') WHERE name = 'measurement'",
    )


@hostile("forged names and dates")
def configs_of_code(path: Path, draw: random.Random) -> None:
    code = json.dumps({"block_m": "64\n__device__ int evil = 1;", "num_warps": "{{ 7 * 7 }}"})
    run(path, "UPDATE variant SET config = ? || substr('     ', 1, id)", values=(code,))


@hostile("foreign text")
def escapes_in_all_texts(path: Path, draw: random.Random) -> None:
    every_text(path, ESCAPES)


@hostile("foreign text")
def text_that_turns(path: Path, draw: random.Random) -> None:
    every_text(path, BIDI)


@hostile("foreign text")
def two_hundred_marks(path: Path, draw: random.Random) -> None:
    every_text(path, MARKS)


@hostile("foreign text")
def markup(path: Path, draw: random.Random) -> None:
    every_text(path, "[/][red]x[link=file:///etc/passwd]")


@hostile("foreign text")
def bytes_that_are_no_text(path: Path, draw: random.Random) -> None:
    run(path, *(f"UPDATE {table} SET {column} = CAST(x'ff1b5b324a' || rowid AS TEXT)" for table, column in SHARED))


def every_text(path: Path, text: str) -> None:
    """Shown and not only refused: names of a device, of who did it and of what came, and messages."""
    changes = (
        "UPDATE device SET name = name || ?",
        "UPDATE environment SET author = ?, unit = ?",
        "UPDATE measurement SET message = ?, session = ?",
        "INSERT INTO arrival SELECT 'a', ?, ?, ?, ?, ?, ?, 3, 99",
    )
    for each in changes:
        run(path, each, values=(text,) * each.count("?"))


@hostile("wrong types")
def blobs_for_texts(path: Path, draw: random.Random) -> None:
    run(path, *(f"UPDATE {table} SET {column} = CAST({column} AS BLOB)" for table, column in SHARED))


@hostile("wrong types")
def texts_for_numbers(path: Path, draw: random.Random) -> None:
    run(
        path,
        "UPDATE measurement SET median_us = 'fast', samples = 'many', seed = 'x', problem_id = 'one', arrival = 'y'",
    )


def mixed(number: int) -> None:
    """Odd values anywhere, and ``number`` is the seed."""

    def make(path: Path, draw: random.Random) -> None:
        with closing(sqlite3.connect(path)) as plain, plain:
            plain.execute("PRAGMA ignore_check_constraints = ON")
            columns = {each: [row[1] for row in plain.execute(f"PRAGMA table_info({each})")] for each in TABLES}
            for _ in range(60):
                table = draw.choice(TABLES)
                change = f'UPDATE OR IGNORE {table} SET "{draw.choice(columns[table])}" = ?'
                with suppress(sqlite3.IntegrityError):  # an id is a number
                    plain.execute(f"{change} WHERE rowid % 3 = {number % 2}", [stored(draw)])

    make.__name__ = f"mixed_{number}"
    hostile("wrong types")(make)


for _number in range(6):
    mixed(_number)
