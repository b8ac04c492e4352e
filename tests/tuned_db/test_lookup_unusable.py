"""Look-ups where the database can't be used: one warning, and an answer."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.tuned_db.lookup import lookup
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]

H200 = gpu_by_alias("h200")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def scramble(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 100)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def newer(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[60:64] = (9).to_bytes(4, "big")
    path.write_bytes(data)


def foreign(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as plain:
        plain.execute("CREATE TABLE songs (title)")


def damaged_inside(path: Path) -> None:
    """Opens well; the tables that a look-up reads are gone."""
    with closing(sqlite3.connect(path)) as plain:
        page, size = plain.execute("SELECT rootpage FROM sqlite_master WHERE name = 'problem'").fetchone()[0], 4096
    data = bytearray(path.read_bytes())
    data[(page - 1) * size : page * size] = b"\xa5" * size
    path.write_bytes(data)


@pytest.mark.parametrize("breaks", [cut, empty, scramble, directory, newer, foreign, damaged_inside])
def test_a_database_that_cannot_be_used_costs_one_warning(
    look: Make,
    store: Store,
    path: Path,
    measurement: Make,
    pair: Make,
    ship: Make,
    caplog: pytest.LogCaptureFixture,
    breaks: Callable[[Path], None],
) -> None:
    """D73 and D75, the look-up."""
    store.record(measurement(config=pair(block=16, stages=1)))
    ship(measurement())
    breaks(path)
    before = path.read_bytes() if path.is_file() else b""
    for _ in range(3):
        assert look().origin == "bundled"
    assert len(caplog.records) == 1
    assert caplog.records[0].name == "flashtune"
    assert str(path) in caplog.text
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_a_bad_setting_costs_one_warning(
    problem: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", "postgresql://secret@host/db")
    assert find(problem(), H200).level == "default"
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text


def test_a_locked_database_costs_one_warning_and_little_time(
    look: Make,
    store: Store,
    path: Path,
    measurement: Make,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup, "LOCK_TIMEOUT", 0.1)
    store.record(measurement())
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        assert look().level == "default"
    assert "locked by another process for 0.1 s" in caplog.text
    assert look().level == "exact"


def test_tampered_rows_are_passed_over(look: Make, store: Store, path: Path, measurement: Make) -> None:
    """D82."""
    store.record(measurement())
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("UPDATE variant SET config = ?", ['{"block":"64\\n__device__ int x=1;","stages":2}'])
    assert look().level == "default"
