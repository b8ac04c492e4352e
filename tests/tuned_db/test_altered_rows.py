"""Rows that another program or another version wrote: passed over and kept, or refused by the file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]

TAMPERED = {
    "code in a config": ("variant", "config", '{"block":"64\\n__device__ int x=1;","stages":2}'),
    "template in a config": ("variant", "config", '{"block":"{{ 7*7 }}","stages":2}'),
    "pickle in a config": ("variant", "config", b"\x80\x04\x95\x0c\x00\x00\x00."),
    "half a config": ("variant", "config", '{"block":64,'),
    "deep config": ("variant", "config", "[" * 100_000),
    "unknown family": ("variant", "family", "from_the_future"),
    "unknown problem": ("problem", "json", '{"dtype":"float4"}'),
    "pickle in a problem": ("problem", "json", b"\x80\x04."),
    "unknown stage": ("measurement", "stage", "burn-in"),
    "text for a time": ("measurement", "median_us", "fast"),
    "blob for a message": ("measurement", "message", b"\x80\x04."),
    "short digest": ("variant", "source_digest", "abc"),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_a_row_that_cannot_be_read_is_passed_over_and_kept(
    store: Store, path: Path, measurement: Make, pair: Make, problem: Make, how: str
) -> None:
    """D82, in a database."""
    table, column, bad = TAMPERED[how]
    good = measurement(config=pair(block=16, stages=1), problem=problem(batch=9), created="2026-11-30T00:00:00.000Z")
    store.record(measurement())
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute(f"UPDATE {table} SET {column} = ?", [bad])
    store.record(good)
    assert store.measurements() == [good]
    assert store.winner(problem(), good.gpu_key) is None
    with closing(sqlite3.connect(path)) as plain:
        assert plain.execute("SELECT count(*) FROM measurement").fetchone() == (2,)


def test_ok_without_a_time_cannot_even_be_written_by_hand(store: Store, path: Path, measurement: Make) -> None:
    """D67, by other programs."""
    store.record(measurement())
    with closing(sqlite3.connect(path)) as plain:
        for bad in ("NULL", "0", "-1"):
            with pytest.raises(sqlite3.IntegrityError, match="ok_has_time"):
                plain.execute(f"UPDATE measurement SET median_us = {bad}")


def test_new_choices_and_dropped_ones_do_not_disturb(store: Store, measurement: Make, pair: Make, path: Path) -> None:
    """D69, the rows. Whole runs are in tuner/test_next_version.py."""
    store.record_all([measurement(config=pair(block=16, stages=1)), measurement(config=pair(block=32, stages=1))])
    with closing(sqlite3.connect(path)) as plain, plain:
        older = json.dumps({"block": 48, "stages": 1})  # a choice that this version dropped
        plain.execute("UPDATE variant SET config = ? WHERE config LIKE '%16%'", [older])
    store.record(measurement(config=pair(block=256, stages=1)))
    assert {each.config.to_json()["block"] for each in store.measurements()} == {32, 256}
