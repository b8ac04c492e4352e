"""A team's server: its tables, their upgrade, and one clear error for whatever is wrong with it."""

from __future__ import annotations

import itertools
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from postgres_server import GUARDED, PASSWORD, Cluster
from sqlalchemy import Connection, Engine, String, Table, event, insert, select, text
from sqlalchemy.exc import IntegrityError

from flashtune.errors import DatabaseDamaged, DatabaseForeign, DatabaseTooNew, MissingDependency, StoreError
from flashtune.tuned_db.backends.postgres.address import read_address
from flashtune.tuned_db.backends.postgres.server import VERSION_TABLE, Server
from flashtune.tuned_db.records.measurement import THROTTLES
from flashtune.tuned_db.schema.migrate import migrate
from flashtune.tuned_db.schema.models import Base
from flashtune.tuned_db.schema.version import SCHEMA_VERSION
from flashtune.tuned_db.sharing.team import create_team, team_summary, upgrade_team
from flashtune.tuned_db.sharing.transfer import carry
from flashtune.tuned_db.store.arrivals import Arrival
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
Start = Callable[[str, Path], "subprocess.Popen[str]"]


def server(url: str) -> Server:
    return Server(read_address(url), readonly=False, timeout=5.0)


def columns(connection: Connection) -> list[tuple[object, ...]]:
    query = (
        "SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns "
        "WHERE table_schema = 'public' ORDER BY table_name, ordinal_position"
    )
    return [tuple(row) for row in connection.execute(text(query))]


def test_migrations_make_exactly_the_models(url: str) -> None:
    with server(url).reading() as connection:
        options = {"compare_type": True, "compare_server_default": True, "version_table": VERSION_TABLE}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []


def test_constraints_are_those_of_the_models(url: str, empty_url: str) -> None:
    def names(connection: Connection) -> set[str]:
        constraints = text("SELECT conname FROM pg_constraint WHERE connamespace = 'public'::regnamespace")
        indices = text("SELECT indexname FROM pg_indexes WHERE schemaname = 'public'")
        found = {*connection.execute(constraints).scalars(), *connection.execute(indices).scalars()}
        return {each for each in found if VERSION_TABLE not in each}

    with server(empty_url).writing() as connection:
        Base.metadata.create_all(connection)
    with server(url).reading() as made, server(empty_url).reading() as wanted:
        assert names(made) == names(wanted)


def texts(table: Table) -> list[str]:
    return [each.name for each in table.columns if isinstance(each.type, String)]


@pytest.mark.parametrize("table", Base.metadata.sorted_tables, ids=str)
def test_no_text_is_longer_than_a_record_may_have(url: str, table: Table, measurement: Make) -> None:
    """M6: who may insert could make each pull of everybody carry gigabytes. What `limits.py` takes fits."""
    store = Store.on_server(url)
    longest = dict.fromkeys(("session", "unit", "driver", "author"), "x" * 200)
    versions = dict.fromkeys(("nvrtc", "cupy", "flashtune"), "1" * 60)
    throttle = ",".join(THROTTLES)
    arrival = Arrival(kind="import", source="s" * 200, digest="d" * 64, signer="k" * 200)
    store.add(
        [measurement(**longest, **versions, gpu_key=f"9.0a/{'x' * 195}", message="é" * 2000, throttle=throttle)],
        arrival,
    )

    def insert_with(connection: Connection, **changes: str) -> None:
        there = connection.execute(select(table)).mappings().first()
        fits = there or {each.name: "x" if each.name in texts(table) else 1 for each in table.columns}
        connection.execute(insert(table).values({**fits, **changes}))

    for name in texts(table):
        with store.backend.writing() as connection, pytest.raises(IntegrityError, match=f"ck_{table.name}_bounded"):
            insert_with(connection, **{name: "y" * 50_000})


def test_a_team_that_holds_longer_texts_is_upgraded_all_the_same(empty_url: str, measurement: Make) -> None:
    create_team(empty_url)
    record = measurement()
    Store.on_server(empty_url).record(record)
    with server(empty_url).writing() as connection:
        migrate(connection, "0003", down=True, version_table=VERSION_TABLE)
        connection.execute(text("UPDATE measurement SET message = repeat('x', 100000)"))
        connection.execute(text("INSERT INTO tombstone VALUES (repeat('x', 1000), 'y')"))
    assert upgrade_team(empty_url) == (3, SCHEMA_VERSION)
    assert Store.on_server(empty_url).by_id([record.id]) == {record.id: None}


def test_each_migration_goes_up_and_down_and_an_old_team_is_upgraded(empty_url: str, measurement: Make) -> None:
    create_team(empty_url)
    record = measurement()
    Store.on_server(empty_url).record(record)
    with server(empty_url).writing() as connection:
        new = columns(connection)
        migrate(connection, "0001", down=True, version_table=VERSION_TABLE)
        assert len(columns(connection)) == len(new) - 8 - 11 - 2
    for opening in (Store.on_server, team_summary):
        with pytest.raises(
            StoreError, match=rf"schema version 1, older than {SCHEMA_VERSION}\. Upgrade it: flashtune db team upgrade"
        ):
            opening(empty_url)
    assert upgrade_team(empty_url) == (1, SCHEMA_VERSION)
    assert upgrade_team(empty_url) == (SCHEMA_VERSION, SCHEMA_VERSION)
    assert Store.on_server(empty_url).measurements() == [record]
    with server(empty_url).writing() as connection:
        assert columns(connection) == new
        migrate(connection, "base", down=True, version_table=VERSION_TABLE)
        assert {row[0] for row in columns(connection)} == {VERSION_TABLE}


def test_an_upgrade_that_breaks_off_at_any_statement_changes_nothing(empty_url: str, measurement: Make) -> None:
    """D76 on a server."""
    create_team(empty_url)
    record = measurement()
    Store.on_server(empty_url).record(record)
    with server(empty_url).writing() as connection:
        migrate(connection, "0001", down=True, version_table=VERSION_TABLE)
        old = columns(connection)
    seen = 0
    last = 10**6

    def count(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen > last:
            raise KeyboardInterrupt

    for last in itertools.count(1):  # noqa: B007 - count reads it
        seen = 0
        event.listen(Engine, "before_cursor_execute", count)
        try:
            if upgrade_team(empty_url) == (1, SCHEMA_VERSION):
                break
        except KeyboardInterrupt:
            pass
        finally:
            event.remove(Engine, "before_cursor_execute", count)
        with server(empty_url).reading() as connection:
            assert columns(connection) == old
    assert last > 10, "else little was interrupted"
    assert Store.on_server(empty_url).measurements() == [record]


def test_tables_are_made_once_and_only_where_nothing_is(cluster: Cluster, empty_url: str) -> None:
    made: list[bool] = []
    threads = [threading.Thread(target=lambda: made.append(create_team(empty_url))) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(made) == [False, False, False, True]
    origin = Store.on_server(empty_url).origin
    assert not create_team(empty_url)
    assert Store.on_server(empty_url).origin == origin
    foreign = cluster.create()
    cluster.execute("CREATE TABLE notes (text text)", foreign)
    with pytest.raises(DatabaseForeign, match="tables of another program: nothing was made"):
        create_team(foreign)
    assert cluster.execute("SELECT relname FROM pg_class WHERE relname IN ('notes', 'problem')", foreign) == [
        ("notes",)
    ]


def test_half_made_tables_are_undone(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr("flashtune.tuned_db.sharing.team.new_id", fail)
        with pytest.raises(InterruptedError):
            create_team(empty_url)
    with server(empty_url).reading() as connection:
        assert columns(connection) == []
    assert create_team(empty_url)


def test_names_of_gpus_need_an_encoding_that_has_them(cluster: Cluster) -> None:
    latin = cluster.create(options="ENCODING 'LATIN1' LOCALE 'C'")
    with pytest.raises(StoreError, match=r"encoding LATIN1, .* createdb -E UTF8"):
        create_team(latin)


def test_a_summary_counts(url: str, measurement: Make, problem: Make, prediction: Make) -> None:
    team = Store.on_server(url)
    team.record_all([measurement(), measurement(problem=problem(batch=3), unit="GPU-2", session="another")])
    team.record_prediction(prediction())
    found = team_summary(url)
    assert (found.origin, found.schema, found.measurements, found.sessions) == (team.origin, SCHEMA_VERSION, 2, 2)
    assert found.predictions == 1
    (share,) = found.shares
    assert (share.measurements, share.problems, share.cards, share.first) == (2, 2, 2, "2026-11-29T12:00:00.000Z")


# What may be wrong with a server


def test_a_password_is_shown_nowhere(cluster: Cluster, tmp_path: Path) -> None:
    url = f"postgresql://{GUARDED}:{PASSWORD}@127.0.0.1:{cluster.port}/made?password={PASSWORD}"
    team = Store.on_server(url)
    with pytest.raises(StoreError, match="is not a file") as caught:
        _ = team.path
    for shown in (str(team.backend), team_summary(url).address, repr(team), str(caught.value)):
        assert PASSWORD not in shown
    assert str(team.backend) == f"team database postgresql://127.0.0.1:{cluster.port}/made"


def failures(cluster: Cluster) -> dict[str, tuple[str, type[StoreError], str]]:
    at = f"127.0.0.1:{cluster.port}"
    foreign, damaged, newer, odd = (cluster.create(template=each) for each in ("template0", "made", "made", "made"))
    cluster.execute("CREATE TABLE alembic_version (version_num text)", foreign)
    cluster.execute("DROP TABLE variant CASCADE", damaged)
    cluster.execute(f"UPDATE {VERSION_TABLE} SET version_num = '0099'", newer)
    cluster.execute(f"UPDATE {VERSION_TABLE} SET version_num = 'x\x1b[2J'", odd)
    gone = cluster.create(template="made")
    cluster.execute("DELETE FROM origin", gone)
    return {
        "wrong password": (f"postgresql://{GUARDED}:sesame@{at}/made", StoreError, "password authentication failed"),
        "no password": (f"postgresql://{GUARDED}@{at}/made", StoreError, "no password supplied"),
        "no such user": (f"postgresql://nobody:sesame@{at}/made", StoreError, r'role "\*\*\*" does not exist'),
        "no such database": (f"postgresql://tuner:sesame@{at}/none", StoreError, 'database "none" does not exist'),
        "no server": ("postgresql://tuner:sesame@127.0.0.1:1/made", StoreError, "can't be reached.*refused"),
        "no such host": ("postgresql://tuner:sesame@host.invalid/made", StoreError, "can't be reached"),
        "empty": (cluster.create(), StoreError, "is empty. Make its tables: flashtune db push --create"),
        "of another program": (foreign, DatabaseForeign, "tables of another program and none of flashtune's"),
        "newer": (
            newer,
            DatabaseTooNew,
            f"schema version 99, this flashtune knows up to {SCHEMA_VERSION}. Upgrade: pip install",
        ),
        "version that is none": (odd, DatabaseDamaged, r"its schema version is \['x\\x1b\[2J'\]"),
        "id gone": (gone, DatabaseDamaged, "its id is gone"),
        "table gone": (damaged, DatabaseDamaged, 'relation "variant" does not exist'),
    }


def test_what_is_wrong_is_one_error_that_names_the_server(cluster: Cluster, tmp_path: Path, measurement: Make) -> None:
    local = Store.open(tmp_path / "local.db")
    local.record(measurement())
    for what, (url, error, message) in failures(cluster).items():
        with pytest.raises(error, match=message) as caught:
            carry(Store.on_server(url), local)
        shown = str(caught.value)
        assert type(caught.value) is error, what
        assert shown.startswith("team database postgresql://"), what
        assert "\n" not in shown, what
        assert "sesame" not in shown, what
    assert len(local.measurements()) == 1


def test_a_server_that_does_not_answer_is_given_up(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://tuner:sesame@127.0.0.1:{silent.getsockname()[1]}/tuned?connect_timeout=2"
        with pytest.raises(StoreError, match=r"can't be reached: .*timeout") as caught:
            Store.on_server(url)
    assert "sesame" not in str(caught.value)


def test_without_psycopg_there_is_a_hint(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingDependency, match=re.escape('pip install "flashtune[postgres]"')):
        Store.on_server(url)
