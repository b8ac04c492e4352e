"""Files that are no tuning database: one clear error each, and nothing is touched."""

from __future__ import annotations

import os
import random
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from broken_files import a_directory, cut_in_half, emptied, random_bytes
from folders import snapshot

from flashtune.errors import DatabaseDamaged, DatabaseForeign, DatabaseTooNew, StoreError
from flashtune.tuned_db.backends.sqlite import files
from flashtune.tuned_db.schema import version
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]

MODES = [pytest.param(True, id="read"), pytest.param(False, id="write")]


def set_header(path: Path, offset: int, number: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(">i", data, offset, number)
    path.write_bytes(data)


def cut_in_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


def text(path: Path) -> None:
    path.write_text("block_m,block_n\n64,64\n")


needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")


def a_pipe(path: Path) -> None:
    """Opening it would wait for a writer for ever."""
    path.unlink()
    os.mkfifo(path)


def scrambled_schema(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100:4096] = random.Random(2).randbytes(3996)
    path.write_bytes(data)


def without_tables(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as plain:
        plain.execute("PRAGMA foreign_keys = OFF")
        for table in ("prediction", "measurement", "origin"):
            plain.execute(f"DROP TABLE {table}")


def without_its_id(path: Path) -> None:
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("DELETE FROM origin")


def another_programs(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("CREATE TABLE songs (title TEXT)")
        plain.execute("INSERT INTO songs VALUES ('Ode')")


def from_the_future(path: Path) -> None:
    set_header(path, 60, 7)


BROKEN = [
    (random_bytes, DatabaseDamaged, "not an SQLite database"),
    (cut_in_half, DatabaseDamaged, "damaged"),
    (cut_in_the_header, DatabaseDamaged, "not an SQLite database"),
    (emptied, DatabaseDamaged, r"empty \(0 bytes\)"),
    (text, DatabaseDamaged, "not an SQLite database"),
    (a_directory, DatabaseDamaged, "is a folder, not a file"),
    pytest.param(a_pipe, DatabaseDamaged, "is a pipe, not a file", marks=needs_pipes),
    (scrambled_schema, DatabaseDamaged, "damaged"),
    (without_tables, DatabaseDamaged, "damaged: there is no table measurement in it"),
    (without_its_id, DatabaseDamaged, "its id is gone"),
    (another_programs, DatabaseForeign, "another program"),
    (from_the_future, DatabaseTooNew, f"schema version 7, this flashtune knows up to {version.SCHEMA_VERSION}"),
]


@pytest.mark.parametrize("readonly", MODES)
@pytest.mark.parametrize(("breaks", "error", "reason"), BROKEN, ids=lambda each: getattr(each, "__name__", ""))
def test_what_is_no_tuning_database_is_refused_and_left_alone(
    store: Store,
    path: Path,
    measurement: Make,
    readonly: bool,
    breaks: Callable[[Path], None],
    error: type[StoreError],
    reason: str,
) -> None:
    """D73, and D75 for a newer schema."""
    store.record_all([measurement() for _ in range(20)])
    breaks(path)
    before = snapshot(path.parent)
    with pytest.raises(error, match=reason) as caught:
        Store.open(path, readonly=readonly)
    assert str(path) in str(caught.value)
    assert snapshot(path.parent) == before


def test_a_schema_that_is_still_in_the_log_is_too_new(store: Store, path: Path) -> None:
    """D75, where the file alone does not show it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as plain:
        plain.execute("PRAGMA wal_autocheckpoint = 0")
        plain.execute("PRAGMA user_version = 9")
        assert files.read_header(path).schema == version.SCHEMA_VERSION
        for readonly in (True, False):
            with pytest.raises(DatabaseTooNew, match="schema version 9"):
                Store.open(path, readonly=readonly)


def test_damage_that_shows_later_has_the_path_too(store: Store, path: Path, measurement: Make) -> None:
    """D72, what a network mount may do to a file."""
    store.record_all([measurement(message="x" * 500) for _ in range(100)])
    data = bytearray(path.read_bytes())
    data[-20_000:] = random.Random(3).randbytes(20_000)
    path.write_bytes(data)
    with pytest.raises(DatabaseDamaged, match=r"tuned\.db is damaged"):
        store.measurements()


@pytest.mark.parametrize("readonly", MODES)
def test_a_missing_database_is_not_made_unasked(tmp_path: Path, readonly: bool) -> None:
    with pytest.raises(StoreError, match=r"tuned\.db does not exist"):
        Store.open(tmp_path / "tuned.db", create=False, readonly=readonly)
    with pytest.raises(StoreError, match="does not exist"):
        Store.open(tmp_path / "tuned.db", readonly=True)
    assert snapshot(tmp_path) == {}


def test_a_link_to_nowhere_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "tuned.db").symlink_to(tmp_path / "gone.db")
    with pytest.raises(StoreError, match="does not exist"):
        Store.open(tmp_path / "tuned.db")
