"""Migrations make what the models say, in one transaction."""

from __future__ import annotations

import re
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
from postgres_server import on_both
from sqlalchemy import Connection, create_engine, event, insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.pool import NullPool

from flashtune.errors import StoreError
from flashtune.tuned_db.backends.sqlite import upgrade as upgrade_module
from flashtune.tuned_db.backends.sqlite.connections import connect
from flashtune.tuned_db.backends.sqlite.upgrade import upgrade
from flashtune.tuned_db.schema.migrate import migrate
from flashtune.tuned_db.schema.models import Base, OriginRow
from flashtune.tuned_db.schema.version import APPLICATION_ID, MIGRATIONS, SCHEMA_VERSION
from flashtune.tuned_db.store.store import Store

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
        return {name: set(re.sub('[,"]', " ", sql).split()) for name, sql in tables if name != "alembic_version"}

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
    """D76, from nothing."""
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


def test_an_upgrade_from_the_first_schema_is_all_or_nothing(tmp_path: Path) -> None:
    """D76, from rows. What a process that is killed leaves is in test_upgrade.py and below."""
    path = tmp_path / "tuned.db"
    shutil.copy(ASSETS / "v0001.db", path)
    total = statements(path)
    assert total > 8
    for stop in range(total):
        shutil.copy(ASSETS / "v0001.db", path)
        with pytest.raises(InterruptedError):
            statements(path, stop)
        with closing(sqlite3.connect(path)) as plain:
            assert plain.execute("PRAGMA user_version").fetchone() == (1,)
            names = [row[1] for row in plain.execute("PRAGMA table_info(measurement)")]
            assert names[-1] == "message"
            assert plain.execute("SELECT count(*) FROM measurement").fetchone() == (4,)
    assert len(Store.open(path).measurements()) == 4


ROWS = 200_000


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of the first schema with `ROWS` measurements: those of the saved one, over and over."""
    path = tmp_path_factory.mktemp("large") / "tuned.db"
    shutil.copy(ASSETS / "v0001.db", path)
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("PRAGMA synchronous = OFF")
        names = [row[1] for row in plain.execute("PRAGMA table_info(measurement)") if row[1] != "id"]
        numbers = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n)"
        number = f"SELECT i FROM n LIMIT {ROWS // 4}"
        new_id = "substr(id, 1, 24) || printf('%012x', i + 4096)"
        (few,) = plain.execute("SELECT count(*) FROM measurement").fetchone()
        assert few == 4
        plain.execute(
            f"INSERT INTO measurement (id, {', '.join(names)}) "
            f"{numbers} SELECT {new_id}, {', '.join(names)} FROM measurement, ({number})"
        )
        (before,) = plain.execute("SELECT count(*) FROM measurement").fetchone()
        assert before == ROWS + few
    return path


KILLED = """
import os
import re
from sqlalchemy import event
from sqlalchemy.engine import Engine
from flashtune.tuned_db.backends.sqlite import upgrade
left = {left}

@event.listens_for(Engine, "before_cursor_execute")
def count(*_):
    global left
    left -= 1
    if left < 0:
        os._exit(9)

upgrade.upgrade(__import__("pathlib").Path(path), 1.0)
"""


@pytest.mark.slow
def test_an_upgrade_of_many_rows_may_be_killed_after_any_statement(tmp_path: Path, large: Path, start: Make) -> None:
    """D76, with 200,000 rows: by _exit(), which like SIGKILL leaves SQLite's journal behind."""
    path = tmp_path / "tuned.db"
    shutil.copy(large, path)
    total = statements(path)
    for left in range(total):
        shutil.copy(large, path)
        process = start(KILLED.format(left=left), path)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 9, output
        assert_all_rows(path, schema=1)
    with Store.open(path):
        assert_all_rows(path, schema=SCHEMA_VERSION)


def test_many_rows_are_upgraded_at_once(tmp_path: Path, large: Path) -> None:
    """D76: the row count makes no difference."""
    path = tmp_path / "tuned.db"
    shutil.copy(large, path)
    with Store.open(path):
        assert_all_rows(path, schema=SCHEMA_VERSION)
    backup = path.with_name("tuned.db.schema-1.backup")
    assert_all_rows(backup, schema=1)


def assert_all_rows(path: Path, schema: int) -> None:
    with closing(sqlite3.connect(path)) as plain:
        assert plain.execute("PRAGMA user_version").fetchone() == (schema,)
        assert plain.execute("PRAGMA quick_check").fetchall() == [("ok",)]
        assert plain.execute("SELECT count(*), count(DISTINCT id) FROM measurement").fetchone() == (ROWS + 4, ROWS + 4)


def test_what_the_second_schema_added_can_be_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    shutil.copy(ASSETS / "v0001.db", path)
    made = create_engine(f"sqlite:///{path}")

    def shape() -> tuple[object, ...]:
        with closing(sqlite3.connect(path)) as plain:
            columns = plain.execute("PRAGMA table_info(measurement)").fetchall()
            indices = sorted(row[1] for row in plain.execute("PRAGMA index_list(measurement)"))
            return columns, indices, plain.execute("SELECT * FROM measurement ORDER BY id").fetchall()

    first = shape()
    upgrade(path, 1.0)
    assert len(shape()[0]) == len(first[0]) + 8 + 1
    with made.begin() as connection:
        migrate(connection, "0001", down=True)
    assert shape() == first


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


def content(path: Path) -> list[str]:
    """All tables and rows, as statements."""
    with closing(sqlite3.connect(path)) as plain:
        return sorted(each.replace(chr(34), "") for each in plain.iterdump() if "alembic_version" not in each)


def down(path: Path, target: str) -> None:
    raw = connect(path, "write", 1.0)
    raw.execute("PRAGMA foreign_keys = OFF")
    made = create_engine("sqlite://", creator=lambda: raw, poolclass=NullPool)
    event.listen(made, "begin", lambda connection: connection.exec_driver_sql("BEGIN EXCLUSIVE"))
    with made.begin() as connection:
        migrate(connection, target, down=True)


def test_what_the_third_schema_added_can_be_taken_away(tmp_path: Path, measurement: Make) -> None:
    path = tmp_path / "tuned.db"
    shutil.copy(ASSETS / "v0002.db", path)
    before = content(path)
    with Store.open(path) as store:
        store.record(measurement(author="Ada"))
        here = content(path)
        with pytest.raises(IntegrityError):  # two environments that differ in their author alone
            down(path, "0002")
    assert content(path) == here, "nothing was changed"
    shutil.copy(ASSETS / "v0002.db", path)
    upgrade(path, 1.0)
    down(path, "0002")
    assert content(path) == before


def test_what_the_fourth_schema_added_can_be_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    shutil.copy(ASSETS / "v0003.db", path)
    before = content(path)
    upgrade(path, 1.0)
    assert content(path) != before
    down(path, "0003")
    assert content(path) == before


def test_the_fourth_schema_numbers_the_arrivals_that_are_there_by_age(tmp_path: Path) -> None:
    """Which rows they brought is not known."""
    path = tmp_path / "tuned.db"
    shutil.copy(ASSETS / "v0003.db", path)
    with closing(sqlite3.connect(path)) as plain, plain:
        for letter in "cab":
            plain.execute(
                "INSERT INTO arrival (id, created, kind, source, digest, signer, author, new) "
                "VALUES (?, ?, 'merge', 's', '', '', '', 1)",
                (letter, f"2026-11-2{ord(letter) - ord('a')}T12:00:00.000Z"),
            )
    with Store.open(path) as store:
        found = store.arrivals()
        assert [(each.id, each.number) for each in found[:3]] == [("a", 1), ("b", 2), ("c", 3)]
        assert found[3].number == 4
        assert store.arrived() == {}


@on_both
def test_a_database_has_one_origin(store: Store) -> None:
    """M6: with a second one, which any who may insert could add, nobody could use a team's database any more."""
    for number in (2, 0, None):
        with pytest.raises((IntegrityError, StoreError)), store.backend.writing() as connection:
            connection.execute(insert(OriginRow).values(id=number, uuid="x", created="y"))
    assert store.origin
