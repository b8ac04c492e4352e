"""Roles with exactly the rights that `flashtune db team grants` prints: what they can do, and that they stop nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from command_line import run
from fakes import plain_id
from postgres_server import Cluster
from sqlalchemy import text

from flashtune.cli.main import main
from flashtune.errors import DatabaseNotWritable, InvalidInput
from flashtune.tuned_db.backends.postgres.address import read_address
from flashtune.tuned_db.backends.postgres.rights import grants
from flashtune.tuned_db.backends.postgres.server import VERSION_TABLE, Server
from flashtune.tuned_db.schema.models import Base
from flashtune.tuned_db.sharing.team import team_summary
from flashtune.tuned_db.sharing.transfer import carry
from flashtune.tuned_db.store.arrivals import Arrival
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
Login = Callable[[str], str]

TABLES = {*Base.metadata.tables, VERSION_TABLE}
PUSHED = {"problem", "device", "environment", "variant", "arrival", "measurement"}
COUNTED = {"problem", "device", "environment", "variant"}
ALLOWED = {
    "pull": {("SELECT", each) for each in TABLES},
    "push": {("SELECT", each) for each in TABLES} | {("INSERT", each) for each in PUSHED},
    "gc": {("SELECT", each) for each in TABLES}
    | {("INSERT", each) for each in PUSHED | {"tombstone"}}
    | {("DELETE", each) for each in ("measurement", "device")},
}


@pytest.fixture
def login(cluster: Cluster, team_url: str) -> Login:
    """Address of the team's database for a role that may pull, push or gc; it had all rights before, as was advised."""

    def login(may: str) -> str:
        role = f"may {may}"
        if not cluster.execute(f"SELECT 1 FROM pg_roles WHERE rolname = '{role}'"):
            cluster.execute(f'CREATE ROLE "{role}" LOGIN')
        for what in ("TABLES", "SEQUENCES"):
            cluster.execute(f'GRANT ALL ON ALL {what} IN SCHEMA public TO "{role}"', team_url)
        cluster.execute("GRANT CREATE ON SCHEMA public TO PUBLIC", team_url)  # as before PostgreSQL 15
        cluster.execute(run("db", "team", "grants", role, "--may", may).output, team_url)
        return cluster.url(team_url.rpartition("/")[2], role.replace(" ", "%20"))

    return login


@pytest.mark.parametrize("may", ALLOWED)
def test_the_statements_give_exactly_these_rights(cluster: Cluster, team_url: str, login: Login, may: str) -> None:
    """M6: also to a role that had more."""
    url = login(may)
    verbs = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")
    on_columns = {"SELECT", "INSERT", "UPDATE", "REFERENCES"}

    def has(verb: str, table: str) -> bool:
        kind = "any_column" if verb in on_columns else "table"
        return bool(cluster.execute(f"SELECT has_{kind}_privilege('{table}', '{verb}')", url)[0][0])

    assert {(verb, table) for verb in verbs for table in TABLES if has(verb, table)} == ALLOWED[may]
    for table in COUNTED:
        assert not cluster.execute(f"SELECT has_column_privilege('{table}', 'id', 'INSERT')", url)[0][0]
    sequences = [name for (name,) in cluster.execute("SELECT relname FROM pg_class WHERE relkind = 'S'", url)]
    assert len(sequences) > len(COUNTED)
    for name in sequences:
        rights = [f"has_sequence_privilege('{name}', '{each}')" for each in ("USAGE", "UPDATE", "SELECT")]
        used = may != "pull" and name.removesuffix("_id_seq") in COUNTED
        assert cluster.execute(f"SELECT {', '.join(rights)}", url) == [(used, False, False)]
    assert not cluster.execute("SELECT has_schema_privilege('public', 'CREATE')", url)[0][0]


def test_who_may_push_pushes_pulls_and_looks(
    login: Login, team_url: str, tmp_path: Path, measurement: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M6"""
    monkeypatch.setenv("FLASHTUNE_TEAM_DB", login("push"))
    local = Store.open(tmp_path / "local.db")
    local.record_all([measurement(), measurement(gpu_key="9.0a/other/1sm", gpu_name="other")])
    assert run("db", "push", "--db", local.path).output.startswith("2 new measurements")
    assert run("db", "pull", "--db", tmp_path / "other.db").output.startswith("2 new measurements")
    assert "2 of 1 session" in run("db", "team", "info").output
    assert "2 new from" in run("db", "team", "log").output
    for command in (["create"], ["upgrade"], ["gc", "--dry-run", "--older-than", "0"]):
        run("db", "team", *command)
    carry(local, Store.on_server(team_url))
    assert len(Store.on_server(team_url).arrivals()) == 1


def test_who_may_pull_pulls(login: Login, team_url: str, tmp_path: Path, measurement: Make) -> None:
    """M6"""
    Store.on_server(team_url).record(measurement())
    reader, local = Store.on_server(login("pull")), Store.open(tmp_path / "local.db")
    assert carry(reader, local).new == 1
    local.record(measurement())
    with pytest.raises(DatabaseNotWritable, match="can't be written: permission denied for table"):
        carry(local, reader)


def test_who_may_collect_collects(login: Login, team_url: str, measurement: Make) -> None:
    """M6"""
    team = Store.on_server(team_url)
    stages = ("screen", "screen", "screen", "final")
    rows = [measurement(id=plain_id(), session="one", stage=each) for each in stages]
    team.add(rows, Arrival(kind="push", source="there"))
    old = ["--older-than", "0", "--team"]
    refused = run("db", "team", "gc", *old, login("push"), code=1).output
    assert "can't be written: permission denied for table" in refused
    assert len(team.measurements()) == 4
    assert run("db", "team", "gc", *old, login("gc")).output.startswith("Removed 3 of 4")


def test_who_may_collect_forgets(
    login: Login, team_url: str, tmp_path: Path, measurement: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M6 and M11: a GPU model that only such rows were of goes with its name."""
    monkeypatch.chdir(tmp_path)
    team = Store.on_server(team_url)
    team.add([measurement()], Arrival(kind="push", source="there"))
    with team.backend.writing() as connection:
        connection.execute(text("UPDATE device SET name = 'potato'"))
    words = ["db", "team", "forget", "--arrival", "1", "--team"]
    assert "permission denied for table" in run(*words, login("push"), code=1).output
    assert team.count() == 1
    assert run(*words, login("gc")).output.startswith("Removed 1 of 1")
    assert team.add([measurement()]).new == 1


FORBIDDEN = [
    "INSERT INTO origin VALUES (2, 'x', 'y')",
    "UPDATE origin SET uuid = 'x'",
    "DELETE FROM origin",
    f"INSERT INTO {VERSION_TABLE} VALUES ('9999')",
    f"UPDATE {VERSION_TABLE} SET version_num = '9999'",
    f"DELETE FROM {VERSION_TABLE}",
    "INSERT INTO tombstone SELECT id, 'now' FROM measurement",
    "INSERT INTO prediction (created, problem_id, device_id, variant_id, predicted_us, rank, nvrtc, flashtune)"
    " SELECT '', 1, 1, 1, 1, 1, '', ''",
    "INSERT INTO problem SELECT 1000, 'k', spec_key, op, dtype, 1, 1, 1, 1, 1, 1, true, '{}' FROM problem",
    "INSERT INTO variant (id, family, config, source_digest) VALUES (1000, 'f', 'c', 'd')",
    "SELECT setval('variant_id_seq', 2147483647)",
    "ALTER SEQUENCE variant_id_seq RESTART WITH 2147483647",
    "DROP TABLE measurement",
    "TRUNCATE measurement",
    "ALTER TABLE measurement DROP COLUMN message",
    "LOCK TABLE measurement IN ACCESS EXCLUSIVE MODE",
    "LOCK TABLE origin IN EXCLUSIVE MODE",
    "CREATE TABLE public.notes (text text)",
    "CREATE FUNCTION public.min(varchar) RETURNS text LANGUAGE sql AS 'SELECT pg_sleep(600)::text'",
    "CREATE INDEX slow ON measurement (message)",
    "CREATE TRIGGER t BEFORE INSERT ON measurement EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    "INSERT INTO variant (family, config, source_digest) VALUES ('f', repeat('x', 50000000), 'd')",
    *(f"{verb} FROM {each}" for verb in ("DELETE",) for each in sorted(TABLES)),
]  # fmt: skip


def problem_row(key: str, content: str) -> str:
    """A statement that adds one by hand."""
    names = "spec_key, op, dtype, head_dim, batch, seqlen_q, seqlen_k, num_heads, num_heads_kv, causal"
    values = "'', '', '', 0, 0, 0, 0, 0, 0, true"
    return f"INSERT INTO problem (key, json, {names}) VALUES ('{key}', '{content}', {values})"


def test_who_may_push_stops_nobody(
    cluster: Cluster, login: Login, team_url: str, tmp_path: Path, measurement: Make, problem: Make
) -> None:
    """M6: a second origin or schema version was a traceback for all, and rows of 50 MB cost each pull 2 GB."""
    team, pusher = Store.on_server(team_url), login("push")
    record = measurement()
    team.add([record], Arrival(kind="push", source="there"))
    for statement in FORBIDDEN:
        with pytest.raises((psycopg.errors.InsufficientPrivilege, psycopg.errors.CheckViolation)):
            cluster.script(statement, pusher)
    names = ", ".join(
        each.name for each in Base.metadata.tables["measurement"].columns if each.name not in ("id", "message")
    )
    row = f"INSERT INTO measurement (id, message, {names}) SELECT '{{}}', {{}}, {names} FROM measurement LIMIT 1"
    with pytest.raises(psycopg.errors.CheckViolation):
        cluster.execute(row.format("long", "repeat('x', 50000000)"), pusher)
    for allowed in (
        row.format("\x1b[2J", "''"),
        row.format("not an id", "E'\\x1b[2J'"),
        problem_row("k", "[" * 1000),
        "INSERT INTO device (key, name, capability) VALUES (repeat('9', 200), E'\\x1b[2J', '')",
        "INSERT INTO arrival (id, number, created, kind, source, digest, signer, author, new)"
        " SELECT n, 2147483647 - n, 'x', 'x', E'\\x1b[2J', '', '', '', -1 FROM generate_series(0, 50) AS n",
        "INSERT INTO arrival (id, number, created, kind, source, digest, signer, author, new)"
        " SELECT n, n, '', '', '', '', '', '', 0 FROM generate_series(-2147483648, -2147483640) AS n",
    ):
        cluster.execute(allowed, pusher)
    other = Store.open(tmp_path / "other.db")
    added = carry(Store.on_server(login("pull")), other)
    assert (added.new, added.refused.rows) == (1, 2)
    new = measurement(problem=problem(batch=7))
    other.record(new)
    assert carry(other, Store.on_server(login("push"))).new == 1
    assert team.measurements() == sorted([record, new], key=lambda each: (each.created, each.id))
    for command in ("info", "log", "upgrade", "gc --dry-run"):
        result = CliRunner().invoke(main, ["db", "team", *command.split(), "--team", team_url])
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.output
    assert {each.number for each in team.arrivals() if each.kind == "push"} == {1, 2}


def test_a_problem_under_the_key_of_another_is_told(
    cluster: Cluster, login: Login, team_url: str, tmp_path: Path, measurement: Make, problem: Make
) -> None:
    """M6: what was measured would be lost in it, for all, and nobody would hear of it."""
    local = Store.open(tmp_path / "local.db")
    local.record_all([measurement(), measurement(problem=problem(batch=7))])
    for content in ("{}", "[", '{"dtype": "float16"}'):
        cluster.execute(problem_row(problem(batch=7).key, content), login("push"))
        with pytest.raises(
            InvalidInput, match=r"row (\d+) of the table problem .*: DELETE FROM problem WHERE id = \1$"
        ) as it:
            carry(local, Store.on_server(login("push")))
        cluster.execute(str(it.value).rpartition(": ")[2], team_url)
    assert carry(local, Store.on_server(login("push"))).new == 2


def test_long_rows_that_were_there_are_left_where_they_are(
    cluster: Cluster, team_url: str, tmp_path: Path, measurement: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M6: a server takes none any more, but one that is upgraded may hold some; they are not fetched."""
    team, local = Store.on_server(team_url), Store.open(tmp_path / "local.db")
    long, short = [measurement() for _ in range(3)], measurement()
    team.record_all([*long, short])
    local.record(long[0])
    for table in ("measurement", "device"):
        cluster.execute(f"ALTER TABLE {table} DROP CONSTRAINT ck_{table}_bounded", team_url)
    ids = ", ".join(f"'{each.id}'" for each in long)
    cluster.execute(f"UPDATE measurement SET message = repeat('x', 1000000) WHERE id IN ({ids})", team_url)
    fetched: list[str] = []
    whole = Store.by_id

    def by_id(self: Store, ids: Any) -> Any:
        fetched.extend(ids)
        return whole(self, ids)

    monkeypatch.setattr(Store, "by_id", by_id)
    added = carry(team, local)
    assert (added.new, added.refused.rows) == (1, 3)
    assert set(fetched) == {short.id}
    with pytest.raises(InvalidInput, match=f"measurement '{long[0].id}' is in .* with other values"):
        carry(local, team)
    cluster.execute("UPDATE device SET name = repeat('y', 1000000)", team_url)
    assert len(team_summary(team_url).shares[0].gpu_name) == 1000


ODD = {
    "two origins": ("ALTER TABLE origin DROP CONSTRAINT ck_origin_only", "INSERT INTO origin VALUES (2, 'x', 'y')"),
    "no origin": ("DELETE FROM origin",),
    "a later version": (f"UPDATE {VERSION_TABLE} SET version_num = '9999'",),
    "two versions": (f"INSERT INTO {VERSION_TABLE} VALUES ('9999')",),
    "no version": (f"DELETE FROM {VERSION_TABLE}",),
    "many versions": (
        f"INSERT INTO {VERSION_TABLE} SELECT n::text FROM generate_series(1, 100000) AS n",
    ),
    "a table that is gone": ("DROP TABLE variant CASCADE",),
    "a column that is gone": ("ALTER TABLE arrival DROP COLUMN number",),
    "a column of another type": ("ALTER TABLE measurement ALTER created TYPE bytea USING ''",),
    "a table that is a function's": (
        "ALTER TABLE measurement RENAME TO measured",
        "CREATE VIEW measurement AS SELECT m.* FROM measured AS m WHERE 1 / length(left(id, 0)) = 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_whatever_is_wrong_with_a_team_is_one_line(
    cluster: Cluster, team_url: str, tmp_path: Path, measurement: Make, what: str
) -> None:
    """M3 and M6: two origins were a traceback for push, pull and team info."""
    team, local = Store.on_server(team_url), Store.open(tmp_path / "local.db")
    team.record(measurement())
    local.record(measurement())
    for statement in ODD[what]:
        cluster.execute(statement, team_url)
    failed = 0
    for command in ("push", "pull", "team info", "team log", "team upgrade", "team create", "team gc --dry-run"):
        database = ["--db", str(local.path)] if "team" not in command else []
        result = CliRunner().invoke(main, ["db", *command.split(), "--team", team_url, *database])
        assert isinstance(result.exception, SystemExit | None), repr(result.exception)
        if result.exit_code:
            failed += 1
            assert result.exit_code == 1
            (line,) = [each for each in result.stderr.splitlines() if each.startswith("Error: ")]
            assert line.startswith(f"Error: team database {read_address(team_url)} ")
            assert len(line) < 600
    assert failed >= 1


def test_what_runs_between_is_told_as_what_it_is(team_url: str) -> None:
    """Errors of the program's own are not those of the server."""
    server = Server(read_address(team_url), readonly=False, timeout=5.0)
    for error in (ZeroDivisionError(), OSError(28, "No space left on device"), InvalidInput("mine")):
        with pytest.raises(type(error)) as caught:
            failing(server, error)
        assert caught.value is error


def failing(server: Server, error: Exception) -> None:
    with server.writing() as connection:
        connection.execute(text("SELECT 1"))
        raise error


@pytest.mark.parametrize("role", ["", "x" * 64, "é" * 32, "a\nb", "a\0b", "\x1b[2J"])
def test_a_role_that_can_be_none_is_refused(role: str) -> None:
    with pytest.raises(InvalidInput, match=r"^role=.* must be 1 to 63 bytes of printable text$"):
        grants(role)
    with pytest.raises(InvalidInput, match=r"^may='all' must be one of pull, push, gc$"):
        grants("ada", "all")


def test_a_role_is_a_name_and_nothing_else() -> None:
    assert grants('a"; DROP TABLE measurement; --').count('"a""; DROP TABLE measurement; --"') == len(
        [each for each in grants("ada").splitlines() if '"ada"' in each]
    )
