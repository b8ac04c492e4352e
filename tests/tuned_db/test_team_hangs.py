"""Servers that are there and say nothing, statements that don't end, pushes that stop in the middle; and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from postgres_server import Cluster

from flashtune.errors import StoreError
from flashtune.tuned_db.backends.postgres import connecting
from flashtune.tuned_db.backends.postgres.connecting import unlimited
from flashtune.tuned_db.sharing.team import team_summary
from flashtune.tuned_db.sharing.transfer import carry
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
Start = Callable[[str, Path], "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.Popen[str]"]

SLEEPING = """
    ALTER TABLE measurement RENAME TO measured;
    CREATE VIEW measurement AS SELECT m.* FROM measured AS m, LATERAL (SELECT pg_sleep(600), m.id) AS slept
"""
"""As whoever owns the tables can leave them."""


def name_of(url: str) -> str:
    return url.rpartition("/")[2]


def backends(cluster: Cluster, url: str, what: str = "%") -> list[int]:
    """Processes of the server that work for the database at ``url``, on a statement like ``what``."""
    found = cluster.execute(
        f"SELECT pid FROM pg_stat_activity WHERE datname = '{name_of(url)}' AND query LIKE '{what}' AND state <> 'idle'"
    )
    return [pid for (pid,) in found]


def wait_until(happened: Callable[[], object]) -> None:
    """For what another process does; it does it at last, however busy the machine is."""
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def flashtune(start: Start) -> Callable[..., subprocess.Popen[str]]:
    """Starts the command line in a process that knows the fake families."""

    def run(*words: str | Path) -> subprocess.Popen[str]:
        return start(f"from flashtune.cli.main import main; main({[str(each) for each in words]})", Path())

    return run


def interrupted(process: subprocess.Popen[str]) -> bool:
    """Presses Ctrl-C; whether the command ends by it, and says so."""
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=100)
    assert output.endswith("Interrupted.\n")
    return process.returncode == 130


@contextlib.contextmanager
def frozen(pids: list[int]) -> Iterator[None]:
    """Stops processes of the server. It goes on answering TCP, as its kernel does that."""
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_a_statement_that_does_not_end_is_ended(
    cluster: Cluster, team_url: str, tmp_path: Path, measurement: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M6: readers of a view that sleeps hung until Ctrl-C."""
    Store.on_server(team_url).record(measurement())
    monkeypatch.setattr(connecting, "STATEMENT_SECONDS", 0.5)
    cluster.script(SLEEPING, team_url)
    with pytest.raises(StoreError, match=r"can't be used: canceling statement due to statement timeout$"):
        team_summary(team_url)
    with pytest.raises(StoreError, match=r"statement timeout$"):
        carry(Store.on_server(team_url), Store.open(tmp_path / "local.db"))


def test_a_server_that_says_nothing_is_given_up(
    cluster: Cluster, team_url: str, tmp_path: Path, measurement: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push to a server that was stopped waited for ever: TCP is answered all the same."""
    monkeypatch.setattr("flashtune.tuned_db.sharing.transfer.CHUNK", 1)
    local, team = Store.open(tmp_path / "local.db"), Store.on_server(team_url)
    local.record_all([measurement() for _ in range(3)])
    with contextlib.ExitStack() as stack, monkeypatch.context() as patch:
        patch.setattr(connecting, "SILENCE_SECONDS", 1.0)

        def freeze(text: str) -> None:
            if text == "1 of 3 sent":
                stack.enter_context(frozen(backends(cluster, team_url)))

        with pytest.raises(StoreError, match=r"can't be reached: the server has said nothing for 1 s$"):
            carry(local, team, freeze)
    wait_until(lambda: not backends(cluster, team_url))
    assert team.measurements() == []
    assert carry(local, team).new == 3


def test_while_it_is_another_s_turn_the_server_may_be_silent(
    team_url: str, measurement: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "SILENCE_SECONDS", 1.5)
    team, patient = Store.on_server(team_url), Store.on_server(team_url, timeout=3)
    with team.backend.writing(), pytest.raises(StoreError, match=r"locked by another process for 3 s"):
        patient.record(measurement())


def test_who_stops_in_the_middle_of_a_push_keeps_nobody_waiting(
    team_url: str, measurement: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a laptop does that is closed: the server would learn of it after two hours."""
    stopped = Store.on_server(team_url)

    def stop_for_long() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(connecting, "IDLE_SECONDS", 0.5)
            writing = stopped.backend.writing()
            connection = writing.__enter__()
        with contextlib.ExitStack() as stack:
            stack.push(writing)
            Store.on_server(team_url, timeout=120).record(measurement())
            connection.exec_driver_sql("SELECT 1")

    with pytest.raises(StoreError, match=r"can't be (used|reached): .*idle-in-transaction timeout"):
        stop_for_long()
    assert len(stopped.measurements()) == 1


def test_a_change_of_tables_takes_the_time_that_it_takes(team_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "STATEMENT_SECONDS", 1.0)
    monkeypatch.setattr(connecting, "SILENCE_SECONDS", 1.5)
    with Store.on_server(team_url).backend.writing() as connection:
        unlimited(connection)
        connection.exec_driver_sql("SELECT pg_sleep(2.5)")


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_ctrl_c_ends_a_wait_for_the_server(
    flashtune: Run, cluster: Cluster, team_url: str, tmp_path: Path, measurement: Make, direction: str
) -> None:
    """M6: the statement is taken back, and nothing is left of it on the server."""
    local = Store.open(tmp_path / "local.db")
    local.record(measurement())
    carry(local, Store.on_server(team_url))
    cluster.script(SLEEPING, team_url)
    process = flashtune("db", direction, "--team", team_url, "--db", local.path)
    wait_until(lambda: backends(cluster, team_url, "%measurement%"))
    assert interrupted(process)
    wait_until(lambda: not backends(cluster, team_url))


def test_ctrl_c_ends_a_wait_for_a_server_that_is_frozen(
    flashtune: Run, cluster: Cluster, team_url: str, tmp_path: Path, measurement: Make
) -> None:
    """The server does not even hear that the statement is taken back."""
    Store.on_server(team_url).record(measurement())
    cluster.script(SLEEPING, team_url)
    process = flashtune("db", "pull", "--team", team_url, "--db", tmp_path / "local.db")
    wait_until(lambda: backends(cluster, team_url, "%measurement%"))
    with frozen([*backends(cluster, team_url), cluster.pid]):
        assert interrupted(process)
    cluster.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name_of(team_url)}'")
    wait_until(lambda: not backends(cluster, team_url))


def test_ctrl_c_while_others_write(
    flashtune: Run, cluster: Cluster, team_url: str, tmp_path: Path, measurement: Make
) -> None:
    local = Store.open(tmp_path / "local.db")
    local.record(measurement())
    with Store.on_server(team_url).backend.writing():
        process = flashtune("db", "push", "--team", team_url, "--db", local.path)
        wait_until(lambda: backends(cluster, team_url, "%pg_advisory_xact_lock%"))
        assert interrupted(process)
    assert carry(local, Store.on_server(team_url)).new == 1
