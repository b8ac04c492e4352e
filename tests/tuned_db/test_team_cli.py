"""`flashtune db push`, `pull` and `team` on a real server: what they print, and one line where something is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from command_line import run
from postgres_server import GUARDED, PASSWORD, Cluster

from flashtune import settings
from flashtune.cli.db import team
from flashtune.cli.main import main
from flashtune.errors import InvalidInput
from flashtune.tuned_db.backends.postgres.address import read_address
from flashtune.tuned_db.schema.version import SCHEMA_VERSION
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]


def call(*arguments: str, code: int = 0, group: str = "db") -> str:
    return run(*filter(None, [group]), *arguments, code=code).output


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: what is printed besides is compared."""
    monkeypatch.setattr(team, "PAUSE", math.inf)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measurement: Make) -> Path:
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "own.db"))
    Store.open(tmp_path / "own.db").record_all([measurement(), measurement(session="another")])
    return tmp_path / "own.db"


def test_a_team_shares(own: Path, empty_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_TEAM_DB", empty_url)
    assert "is empty. Make its tables: flashtune db push --create" in call("push", code=1)
    made = call("push", "--create")
    assert "Made the tables of the team's database\n2 new measurements, 0 that were there\n" in made
    shown_url = str(read_address(empty_url))
    assert f"Stored in team database {shown_url}" in made
    assert call("push", "--create") == f"0 new measurements, 2 that were there\nStored in team database {shown_url}\n"
    other = tmp_path / "other.db"
    assert call("pull", "--db", str(other)) == f"2 new measurements, 0 that were there\nStored in {other}\n"
    assert "0 new measurements, 2 that were there" in call("pull", "--db", str(other), "--team", empty_url)
    assert Store.open(other).measurements() == Store.open(own).measurements()
    shown = call("team", "info")
    assert shown_url in shown
    assert "measurements  2 of 2 sessions\n" in shown
    assert "h200: 2 for 1 problem on 1 card, 2026-11-29 to 2026-11-29\n" in shown


def test_tables_are_made_and_upgraded_by_hand_too(empty_url: str) -> None:
    assert "Made the tables" in call("team", "create", "--team", empty_url)
    assert "nothing was changed" in call("team", "create", "--team", empty_url)
    assert call("team", "upgrade", "--team", empty_url) == f"Schema version {SCHEMA_VERSION}, as it was\n"


def test_names_of_strangers_are_shown_as_text(cluster: Cluster, team_url: str, measurement: Make) -> None:
    Store.on_server(team_url).record(measurement())
    cluster.execute("UPDATE device SET name = E'h200\\x1b[2J'", team_url)
    assert "'h200\\x1b[2J': 1 for" in call("team", "info", "--team", team_url)


def test_a_long_push_says_how_far_it_is(own: Path, team_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "PAUSE", 0.0)
    result = CliRunner().invoke(main, ["db", "push", "--team", team_url])
    assert "2 of 2 compared, 2 are missing in team database" in result.stderr
    assert "adding 2 to team database" in result.stderr
    assert "compared" not in result.stdout


def test_a_pull_from_a_server_that_is_not_there_makes_no_file(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    new = tmp_path / "new.db"
    assert "can't be reached" in call("pull", "--db", str(new), "--team", "postgresql://127.0.0.1:1/tuned", code=1)
    assert not new.exists()


def test_misuse_is_one_line_with_a_way_out(monkeypatch: pytest.MonkeyPatch, own: Path, tmp_path: Path) -> None:
    for command in (["push"], ["pull"], ["team", "info"], ["team", "create"], ["team", "upgrade"]):
        monkeypatch.delenv("FLASHTUNE_TEAM_DB", raising=False)
        assert "set FLASHTUNE_TEAM_DB to its address, such as postgresql://me@host/tuned" in call(*command, code=1)
        monkeypatch.setenv("FLASHTUNE_TEAM_DB", "mysql://me:sesame@host/tuned")
        shown = call(*command, code=1)
        assert "which begins with postgresql://" in shown
        assert "sesame" not in shown
    assert "there is no tuning database at" in call("push", "--db", str(tmp_path / "none.db"), code=1)
    with pytest.raises(InvalidInput, match="not an address") as caught:
        Store.open("postgresql://me:sesame@host/tuned")
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("command", ["push", "pull", "team create", "team info", "team upgrade", "team grants"])
def test_every_command_teaches_by_example(command: str) -> None:
    assert f"flashtune db {command}" in call(*command.split(), "--help")


def test_settings_are_shown_without_a_password(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_TEAM_DB", f"postgresql://{GUARDED}:{PASSWORD}@127.0.0.1:{cluster.port}/made")
    assert settings.presentable("FLASHTUNE_TEAM_DB") == "postgresql://..."
    shown = call("info", group="")
    assert PASSWORD not in shown
    assert "FLASHTUNE_TEAM_DB" in shown
    assert f"address       postgresql://127.0.0.1:{cluster.port}/made (" in call("team", "info")
