"""Databases that older versions wrote open, and hold what they held."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import SECOND

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.records.measurement import now
from flashtune.tuned_db.schema.version import SCHEMA_VERSION
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
ASSETS = Path(__file__).parents[1] / "upgrade_assets"
GONE = "01935f6e-0000-7000-8000-00000000dead"
"""A row that was removed, where that is known."""


def test_every_saved_version_has_a_test() -> None:
    saved = sorted(each.name for each in ASSETS.glob("*.db"))
    assert saved == [f"v{number:04d}.db" for number in range(1, SCHEMA_VERSION + 1)]


def test_a_second_version_database_opens(tmp_path: Path, measurement: Make, solo: Make) -> None:
    path = tmp_path / "tuned.db"
    shutil.copy(ASSETS / "v0002.db", path)
    rows = Store.open(path, readonly=True).measurements()
    assert [each.status for each in rows] == ["ok", "ok", "wrong", "failed"]
    assert rows[1] == measurement(id=rows[1].id, config=solo(block=32), created=rows[1].created, **SECOND)
    assert rows[0] == measurement(id=rows[0].id)
    store = Store.open(path)
    assert store.measurements() == rows


def test_a_third_version_database_opens(tmp_path: Path, measurement: Make, solo: Make) -> None:
    """With something in each table that this version added."""
    path = tmp_path / "tuned.db"
    shutil.copy(ASSETS / "v0003.db", path)
    with Store.open(path) as store:
        rows = store.measurements()
        assert [each.status for each in rows] == ["ok", "ok", "wrong", "failed"]
        hers = {"id": rows[1].id, "created": rows[1].created, "author": "Ada"}
        assert rows[1] == measurement(config=solo(block=32), **hers, **SECOND)
        assert [each.author for each in rows] == ["", "Ada", "", ""]
        assert [(each.kind, each.source, each.new) for each in store.arrivals()] == [
            ("merge", "01935f6e-0000-7000-8000-00000000cafe", 4)
        ]
        assert store.removed([GONE]) == {GONE}


def test_a_fourth_version_database_opens(tmp_path: Path) -> None:
    """All of its rows came by one merge."""
    path = tmp_path / "tuned.db"
    shutil.copy(ASSETS / "v0004.db", path)
    with Store.open(path) as store:
        assert [each.status for each in store.measurements()] == ["ok", "ok", "wrong", "failed"]
        assert [(each.kind, each.number) for each in store.arrivals()] == [("merge", 1)]
        assert store.arrived() == {1: 4}
        assert set(store.arrivals_of([each.id for each in store.measurements()]).values()) == {1}


def test_the_first_schema_is_read_where_it_may_not_be_upgraded(tmp_path: Path, measurement: Make) -> None:
    """A look-up of attention() opens databases like this; it must not lose what was tuned before an update."""
    path = tmp_path / "tuned.db"
    shutil.copy(ASSETS / "v0001.db", path)
    before = path.read_bytes()
    reader = Store.open(path, readonly=True)
    rows = reader.measurements()
    assert [each.status for each in rows] == ["ok", "ok", "wrong", "failed"]
    assert rows[0] == measurement(id=rows[0].id)
    assert rows[0].ratio == 0.8
    winner = reader.winner(rows[0].problem, rows[0].gpu_key)
    assert winner is not None
    assert (winner.ratio, winner.low, winner.high) == (0.8, None, None)
    assert find(rows[0].problem, gpu_by_alias("h200"), store_path=path).level == "exact"
    assert path.read_bytes() == before
    Store.open(path)
    assert reader.measurements() == rows
    assert Store.open(path).winner(rows[0].problem, rows[0].gpu_key) == winner


def test_a_first_version_database_opens(tmp_path: Path, measurement: Make, prediction: Make, pair: Make) -> None:
    path = tmp_path / "tuned.db"
    shutil.copy(ASSETS / "v0001.db", path)
    before = path.read_bytes()
    reader = Store.open(path, readonly=True)
    assert reader.origin == "01935f6e-0000-7000-8000-00000000f00d"
    assert path.read_bytes() == before
    store = Store.open(path)
    assert [each.status for each in store.measurements()] == ["ok", "ok", "wrong", "failed"]
    first = store.measurements()[0]
    assert first == measurement(id=first.id)
    assert store.predictions() == [prediction()]
    new = store.record(measurement(created=now()))
    assert store.measurements()[-1] == new


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_an_old_database_that_is_only_read_holds_what_its_upgrade_holds(tmp_path: Path, version: int) -> None:
    """A hole in the tests: what a version added could be passed over in a file of that very version."""
    path = tmp_path / "tuned.db"
    shutil.copy(ASSETS / f"v{version:04d}.db", path)
    before = path.read_bytes()

    def held(store: Store) -> dict[str, Any]:
        rows = store.measurements()
        return {
            "measurements": rows,
            "predictions": store.predictions(),
            "arrivals": [dataclasses.replace(each, number=None) for each in store.arrivals()],
            "removed": (store.count_removed(), store.removed([GONE])),
            "winners": [store.winner(each.problem, each.gpu_key) for each in rows],
            "rejected": [store.rejected(each.problem.spec, each.gpu_key) for each in rows],
        }

    with Store.open(path, readonly=True) as reader:
        as_it_is = held(reader)
    assert path.read_bytes() == before
    with Store.open(path) as upgraded:
        assert held(upgraded) == as_it_is
    assert path.read_bytes() != before or version == SCHEMA_VERSION
