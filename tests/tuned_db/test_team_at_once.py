"""Who may be at a team's server at once: readers and writers, and those that are stopped in the middle."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from postgres_server import Cluster
from sqlalchemy import text

from flashtune.errors import DatabaseNotWritable, StoreError
from flashtune.tuned_db.backends.postgres.address import read_address
from flashtune.tuned_db.backends.postgres.server import Server
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.sharing.team import create_team
from flashtune.tuned_db.sharing.transfer import carry
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
Start = Callable[[str, Path], "subprocess.Popen[str]"]


def test_who_may_only_read_can_pull_and_not_push(cluster: Cluster, url: str, tmp_path: Path, measurement: Make) -> None:
    Store.on_server(url).record(measurement())
    if not cluster.execute("SELECT 1 FROM pg_roles WHERE rolname = 'reader'"):
        cluster.execute("CREATE ROLE reader LOGIN")
    cluster.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader", url)
    local = Store.open(tmp_path / "local.db")
    as_reader = cluster.url(url.rpartition("/")[2], "reader")
    assert carry(Store.on_server(as_reader, readonly=True), local).new == 1
    local.record(measurement())
    with pytest.raises(DatabaseNotWritable, match="can't be written: permission denied for table"):
        carry(local, Store.on_server(as_reader))
    with pytest.raises(DatabaseNotWritable, match="read-only"):
        Store.on_server(as_reader, readonly=True).record(measurement())
    with pytest.raises(DatabaseNotWritable, match="can't be written: permission denied for schema public"):
        create_team(cluster.url("postgres", "reader"))


def test_a_reader_can_not_write_even_by_mistake(url: str) -> None:
    server = Server(read_address(url), readonly=False, timeout=5.0)
    with pytest.raises(DatabaseNotWritable, match="read-only transaction"), server.reading() as connection:
        connection.execute(text("DELETE FROM origin"))


def test_writers_wait_for_their_turn_and_readers_do_not(url: str, measurement: Make) -> None:
    """D71 on a server."""
    team, impatient = Store.on_server(url), Store.on_server(url, timeout=0.2)
    with team.backend.writing():
        assert impatient.measurements() == []
        with pytest.raises(StoreError, match=r"has been locked by another process for 0\.2 s"):
            impatient.record(measurement())
    impatient.record(measurement())
    assert len(team.measurements()) == 1


def test_a_snapshot_is_of_one_moment(url: str, measurement: Make) -> None:
    team = Store.on_server(url)
    with team.snapshot() as view:
        assert view.measurements() == []
        team.record(measurement())
        assert view.measurements() == []
    assert len(team.measurements()) == 1


# Many at once, and those that are cut off


def pushed(rows: list[Measurement], tmp_path: Path) -> Store:
    local = Store.open(tmp_path / "local.db")
    local.record_all(rows)
    return local


def test_a_server_that_stops_in_the_middle_has_nothing_of_a_push(
    cluster: Cluster, url: str, tmp_path: Path, measurement: Make, pair: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashtune.tuned_db.sharing.transfer.CHUNK", 5)
    rows = [measurement(session=f"session {number}") for number in range(20)]
    local, team = pushed(rows, tmp_path), Store.on_server(url)

    def stop(text: str) -> None:
        if text == "10 of 20 sent":
            cluster.stop()

    try:
        with pytest.raises(StoreError, match=r"^team database .* can't be reached: "):
            carry(local, team, stop)
        with pytest.raises(StoreError, match=r"can't be reached: .*refused"):
            Store.on_server(url)
    finally:
        cluster.start()
    assert team.measurements() == []
    assert carry(local, team).new == 20
    assert len(team.measurements()) == 20


def test_a_push_that_was_killed_is_repeated(start: Start, url: str, tmp_path: Path, measurement: Make) -> None:
    rows = [measurement(session=f"session {number}") for number in range(400)]
    local, team = pushed(rows, tmp_path), Store.on_server(url)
    code = f"""
        import time
        from flashtune.tuned_db.sharing import transfer
        transfer.CHUNK = 50
        def tell(text):
            print(text, flush=True)
            if text == "200 of 400 sent":
                time.sleep(60)
        transfer.carry(Store.open(path), Store.on_server({url!r}), tell)
    """
    process = start(code, tmp_path / "local.db")
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    seen = next((line for line in lines if line == "200 of 400 sent\n"), None)
    process.kill()
    process.communicate()
    assert seen is not None
    assert team.measurements() == []
    assert carry(local, team).new == 400
    assert sorted(each.id for each in team.measurements()) == sorted(each.id for each in rows)


@pytest.mark.slow
def test_eight_processes_push_and_pull_at_once(start: Start, url: str, tmp_path: Path, measurement: Make) -> None:
    """For ten seconds: some rows are everybody's, most are one's own, and all share problems, variants and devices."""
    common = Store.open(tmp_path / "common.db")
    common.record_all([measurement(session="common") for _ in range(30)])
    code = f"""
        import os, time
        from flashtune.tuned_db.sharing.transfer import carry
        from flashtune.tuned_db.sharing.merge import add_database
        import pathlib
        folder = pathlib.Path(path)
        number = int(sys.stdin.readline())
        local = Store.open(folder / f"{{number}}.db")
        add_database(local, folder / "common.db")
        team = Store.on_server({url!r}, timeout=60)
        end, turns = time.monotonic() + 10, 0
        while time.monotonic() < end:
            turns += 1
            local.record_all([
                fakes.make_measurement(
                    session=f"worker {{number}}", unit=f"GPU-{{turns}}", problem=fakes.make_problem(batch=turns),
                    config=fakes.PairConfig(block=block, stages=1 + (turns + number) % 3),
                )
                for block in (16, 32, 64, 128, 256)
            ])
            carry(local, team)
            if turns % 4 == number % 4:
                carry(team, local)
        carry(local, team)
        print(turns)
    """
    workers = [start(code, tmp_path) for _ in range(8)]
    for number, each in enumerate(workers):
        assert each.stdin is not None
        each.stdin.write(f"{number}\n")
        each.stdin.flush()
    turns = [int(each.communicate(timeout=120)[0]) for each in workers]
    assert min(turns) >= 1
    found = Store.on_server(url).measurements()
    assert len(found) == len({each.id for each in found}) == 30 + 5 * sum(turns)
    for number in range(8):
        local = Store.open(tmp_path / f"{number}.db")
        assert {each.id for each in local.measurements()} <= {each.id for each in found}
        carry(Store.on_server(url), local)
        assert local.measurements() == found
