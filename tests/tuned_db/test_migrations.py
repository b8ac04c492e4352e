"""Migrations make what the models say, in one transaction, and old databases open."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, event

from flashtune.tuned_db import upgrade as upgrade_module
from flashtune.tuned_db.files import APPLICATION_ID, SCHEMA_VERSION
from flashtune.tuned_db.models import Base
from flashtune.tuned_db.store import Store
from flashtune.tuned_db.upgrade import MIGRATIONS, upgrade

Make = Callable[..., Any]
ASSETS = Path(__file__).parents[1] / "upgrade_assets"


def test_migrations_make_exactly_the_models(store: Store, path: Path) -> None:
    with create_engine(f"sqlite:///{path}").connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []


def test_constraints_are_those_of_the_models(store: Store, path: Path, tmp_path: Path) -> None:
    direct = create_engine(f"sqlite:///{tmp_path / 'direct.db'}")
    Base.metadata.create_all(direct)

    def names(connection: sqlite3.Connection) -> dict[str, set[str]]:
        tables = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        return {name: set(sql.replace(",", " ").split()) for name, sql in tables if name != "alembic_version"}

    with closing(sqlite3.connect(path)) as made, closing(sqlite3.connect(tmp_path / "direct.db")) as wanted:
        assert names(made) == names(wanted)


def test_there_is_one_line_of_revisions_and_the_schema_version_counts_it() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    script = ScriptDirectory.from_config(config)
    revisions = [each.revision for each in script.walk_revisions()]
    assert script.get_heads() == [f"{SCHEMA_VERSION:04d}"]
    assert revisions == [f"{number:04d}" for number in range(SCHEMA_VERSION, 0, -1)]


def statements(path: Path, stop: int | None = None) -> int:
    """Upgrades ``path``; fails in front of statement number ``stop``. Returns how many statements there were."""
    count = 0

    def counting(*arguments: Any, **options: Any) -> Any:
        made = create_engine(*arguments, **options)

        @event.listens_for(made, "before_cursor_execute")
        def count_one(connection: Connection, *_: Any) -> None:
            nonlocal count
            if count == stop:
                raise InterruptedError
            count += 1

        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upgrade_module, "create_engine", counting)
        upgrade(path, 1.0)
    return count


def test_an_upgrade_that_stops_anywhere_leaves_the_old_file(tmp_path: Path) -> None:
    old = tmp_path / "old.db"
    with closing(sqlite3.connect(old)) as plain:
        plain.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    path = tmp_path / "tuned.db"
    shutil.copy(old, path)
    total = statements(path)
    assert total > 15
    shutil.copy(old, path)
    for stop in range(total):
        with pytest.raises(InterruptedError):
            statements(path, stop)
        with closing(sqlite3.connect(path)) as plain:
            assert plain.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
            assert plain.execute("PRAGMA user_version").fetchone() == (0,)
    assert Store.open(path).measurements() == []


def test_an_older_schema_is_upgraded_when_opened_for_writing(tmp_path: Path, measurement: Make) -> None:
    path = tmp_path / "tuned.db"
    with closing(sqlite3.connect(path)) as plain:
        plain.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    store = Store.open(path)
    store.record(measurement())
    assert len(Store.open(path, readonly=True).measurements()) == 1


def test_upgrading_twice_changes_nothing(store: Store, path: Path) -> None:
    before = path.read_bytes()
    upgrade(path, 1.0)
    assert path.read_bytes() == before


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
    new = store.record(measurement(created="2030-01-01T00:00:00Z"))
    assert store.measurements()[-1] == new
