"""Upgrades of large databases, also when killed: each row is there, and as it was."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flashtune.tuned_db.schema.version import SCHEMA_VERSION
from flashtune.tuned_db.store.store import Store

ASSETS = Path(__file__).parents[1] / "upgrade_assets"
OLDER = tuple(f"v{number:04d}.db" for number in range(1, SCHEMA_VERSION))
ROWS = 200_000
UPGRADE = (
    "import alembic.command, flashtune.tuned_db.backends.sqlite.upgrade; print('go', flush=True); Store.open(path)"
)
SECONDS = 60
"""Of an upgrade, on a slow machine."""


def enlarged(name: str, folder: Path, count: int) -> Path:
    """A saved database with ``count`` more rows, all of them copies of its own under other ids and times."""
    path = folder / name
    shutil.copy(ASSETS / name, path)
    with closing(sqlite3.connect(path)) as plain, plain:
        columns = [row[1] for row in plain.execute("PRAGMA table_info(measurement)")]
        copied = {"id": "printf('%08x-0000-7000-8000-%012x', n.i, n.i)", "samples": "n.i"}
        plain.execute(
            f"""WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count}),
            old AS (SELECT *, row_number() OVER (ORDER BY id) - 1 AS place FROM measurement)
            INSERT INTO measurement ({", ".join(columns)})
            SELECT {", ".join(copied.get(each, each) for each in columns)}
            FROM n JOIN old ON old.place = n.i % (SELECT count(*) FROM old)"""
        )
    return path


def rows_of(path: Path) -> tuple[int, object]:
    """How many rows there are, and a sum over all that the first schema held of them."""
    names = ("samples", "median_us", "q20_us", "q80_us", "registers", "length(message)", "problem_id", "variant_id")
    weighed = "+".join(f"coalesce({name}, 0) * {weight}" for weight, name in enumerate(names, start=1))
    with closing(sqlite3.connect(path)) as plain:
        found: tuple[int, object] = plain.execute(
            f"SELECT count(DISTINCT id), sum(CAST({weighed} AS INTEGER)) FROM measurement"
        ).fetchone()
    return found


def schema_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as plain:
        assert plain.execute("PRAGMA quick_check").fetchall() == [("ok",)]
        return int(plain.execute("PRAGMA user_version").fetchone()[0])


@pytest.mark.parametrize("count", [20_000, pytest.param(ROWS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OLDER)
def test_a_large_database_is_upgraded_and_survives_kills_meanwhile(
    tmp_path: Path, start: Callable[[str, Path], subprocess.Popen[str]], name: str, count: int
) -> None:
    path = enlarged(name, tmp_path, count)
    whole, before = tmp_path / "whole.db", rows_of(path)
    assert before[0] > count
    shutil.copy(path, whole)
    began = time.monotonic()
    Store.open(path)
    seconds = time.monotonic() - began
    assert seconds < SECONDS
    assert (schema_of(path), rows_of(path)) == (SCHEMA_VERSION, before)
    interrupted = 0
    for number, part in enumerate((0.1, 0.4, 0.7, 0.01, 0.001)):
        if number >= 3 and interrupted:
            break  # the last two are for a machine that was busier while the time was taken
        path.unlink()
        shutil.copy(whole, path)
        process = start(UPGRADE, path)
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "go\n"
            time.sleep(part * seconds)
            process.kill()
        interrupted += schema_of(path) < SCHEMA_VERSION
        assert rows_of(path) == before
        assert rows_of_reader(path) >= count
        Store.open(path)
        assert (schema_of(path), rows_of(path)) == (SCHEMA_VERSION, before)
    assert interrupted


def rows_of_reader(path: Path) -> int:
    """Rows that are seen without an upgrade, as a look-up does."""
    with Store.open(path, readonly=True) as store:
        return sum(map(len, store.rows()))
