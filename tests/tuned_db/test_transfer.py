"""Push and pull between a file and a team's server: a union of sets, and what is wrong or cut off adds nothing."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from postgres_server import Cluster
from sqlalchemy import text

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.errors import InvalidInput
from flashtune.tuned_db.backends.postgres import server
from flashtune.tuned_db.exchange.export_file import write_export
from flashtune.tuned_db.lookup import lookup
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.sharing import transfer
from flashtune.tuned_db.sharing.merge import Added, add_file, export_database
from flashtune.tuned_db.sharing.transfer import carry
from flashtune.tuned_db.store import queries as stored
from flashtune.tuned_db.store.store import Store, Stored
from flashtune.tuned_db.upkeep.forgetting import Which, forget

Make = Callable[..., Any]
ASSETS = Path(__file__).parents[1] / "upgrade_assets"
SECOND = {
    "paired_ratio": 0.8, "ratio_low": 0.79, "ratio_high": 0.815, "rounds": 25,
    "power_w": 612.5, "temperature_c": -3.0, "throttle": "power_cap,hw_thermal", "contended": True,
}  # fmt: skip


@pytest.fixture
def rows(measurement: Make, pair: Make, problem: Make) -> list[Measurement]:
    return [
        measurement(config=pair(block=block, stages=stages), problem=problem(batch=batch), median_us=50.0 + block)
        for block, stages, batch in itertools.product((16, 32, 64), (1, 2), (1, 8))
    ]


@pytest.fixture
def odd(measurement: Make, solo: Make, problem: Make) -> list[Measurement]:
    """Values at the ends of what may be stored."""
    return [
        measurement(**SECOND),
        measurement(max_error=5e-324, rms_error=1.7e308, median_us=1e-3, q20_us=0.1 + 0.2, q80_us=1e12, seed=2**63 - 1),
        measurement(status="failed", median_us=None, q20_us=None, message="tab\tline\nquote'\"|-é数据 %s :x"),
        measurement(
            config=solo(block=32),
            gpu_key="9.0a/carte é/1sm",
            contended=False,
            throttle="",
            max_error=0.0,
            seed=0,
        ),
        measurement(median_us=80, problem=problem(causal=True, seqlen_q=1, seqlen_k=8191), unit="", driver=""),
    ]


@pytest.fixture
def team(team_url: str) -> Store:
    return Store.on_server(team_url)


def database(path: Path, rows: Sequence[Measurement]) -> Store:
    store = Store.open(path)
    store.record_all(rows)
    return store


def content(store: Store, scratch: Path) -> bytes:
    """The canonical export, which two databases with the same rows share."""
    write_export(store.measurements(), scratch, origin="anywhere")
    return scratch.read_bytes()


def digests(store: Store) -> dict[object, str | None]:
    return {name: digest for part in store.fingerprints() for name, digest in part.items()}


def test_rows_go_to_the_team_and_come_back_the_same(
    tmp_path: Path, team: Store, rows: list[Measurement], odd: list[Measurement]
) -> None:
    everything = [*rows, *odd]
    local = database(tmp_path / "local.db", everything)
    assert carry(local, team) == Added(new=len(everything), known=0)
    assert carry(local, team) == Added(new=0, known=len(everything))
    other = Store.open(tmp_path / "other.db")
    assert carry(team, other) == Added(new=len(everything), known=0)
    assert carry(team, other) == Added(new=0, known=len(everything))
    assert {each.id: each for each in team.measurements()} == {each.id: each for each in everything}
    assert other.measurements() == local.measurements() == team.measurements()


def test_python_and_the_server_compute_the_same_fingerprints(
    tmp_path: Path, team: Store, rows: list[Measurement], odd: list[Measurement]
) -> None:
    local = database(tmp_path / "local.db", [*rows, *odd])
    team.record_all(local.measurements())
    ours = digests(local)
    assert None not in ours.values()
    assert ours == digests(team)
    assert len(set(ours.values())) == len(ours)  # created and the rest may agree, the times don't


@pytest.mark.parametrize(
    "change",
    [
        {"median_us": 81.0}, {"seed": 8}, {"message": "x"}, {"status": "timeout"}, {"unit": "GPU-2"},
        {"contended": True}, {"contended": False}, {"registers": None}, {"created": "2026-11-29T12:00:00.001Z"},
        {"source_digest": "0" * 64},
    ],
    ids=lambda change: "-".join(map(str, change)) + "=" + "".join(map(str, change.values()))[:12],
)  # fmt: skip
def test_any_other_value_is_another_fingerprint_and_refused(
    tmp_path: Path, team: Store, rows: list[Measurement], change: dict[str, Any]
) -> None:
    altered = dataclasses.replace(rows[0], **change)
    local = database(tmp_path / "local.db", [altered, *rows[1:]])
    team.record(rows[0])
    for source, target in ((local, team), (team, local)):
        before = target.measurements()
        with pytest.raises(
            InvalidInput, match=f"{rows[0].id}' is in .* with other values than in .*: nothing was added"
        ):
            carry(source, target)
        assert target.measurements() == before


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.sets(st.integers(0, 11)), min_size=2, max_size=3), data=st.data())
def test_order_and_repetition_make_no_difference(
    tmp_path_factory: pytest.TempPathFactory,
    cluster: Cluster,
    rows: list[Measurement],
    parts: list[set[int]],
    data: st.DataObject,
) -> None:
    """D77 and D78 on a server."""
    folder = tmp_path_factory.mktemp("push")
    sources = [database(folder / f"{n}.db", [rows[i] for i in sorted(part)]) for n, part in enumerate(parts)]
    team = Store.on_server(cluster.create(template="made"))
    for each in data.draw(st.permutations([*sources, *sources[:2]])):
        carry(each, team)
    pulled = Store.open(folder / "pulled.db")
    carry(team, pulled)
    wanted = database(folder / "wanted.db", [rows[i] for i in sorted(set().union(*parts))])
    assert content(pulled, folder / "a") == content(wanted, folder / "b") == content(team, folder / "c")


def test_exports_and_the_server_go_together(tmp_path: Path, team: Store, rows: list[Measurement]) -> None:
    with pytest.raises(InvalidInput, match="no measurements in team database"):
        export_database(team, tmp_path / "none.jsonl")
    local, file = database(tmp_path / "local.db", rows), tmp_path / "rows.jsonl"
    export_database(local, file)
    assert add_file(team, file) == Added(new=len(rows), known=0)
    assert add_file(team, file) == Added(new=0, known=len(rows))
    export_database(team, tmp_path / "team.jsonl")
    assert (tmp_path / "team.jsonl").read_bytes().split(b"\n")[1:] == file.read_bytes().split(b"\n")[1:]


def test_a_row_that_is_spelled_in_another_way_is_the_same_row(
    tmp_path: Path, team: Store, team_url: str, cluster: Cluster, rows: list[Measurement]
) -> None:
    """As another version of flashtune may spell a problem."""
    local = database(tmp_path / "local.db", rows)
    carry(local, team)
    cluster.execute("UPDATE problem SET json = replace(json, ',', ', ')", team_url)
    assert digests(local) != digests(team)
    assert carry(local, team) == Added(new=0, known=len(rows))
    assert carry(team, local) == Added(new=0, known=len(rows))


def test_a_device_has_one_name(tmp_path: Path, team: Store, rows: list[Measurement]) -> None:
    """Rows under another, which an earlier version let in, stay where they are and keep no others out."""
    team.record(rows[0])
    local = database(tmp_path / "local.db", rows[1:])
    with local.backend.writing() as connection:
        connection.execute(text("UPDATE device SET name = 'another name'"))
    assert carry(local, team).refused.rows == len(rows) - 1
    assert team.measurements() == rows[:1]
    with pytest.raises(InvalidInput, match="gpu_name='h200' must be 'another name'"):
        carry(team, local)
    forget(local, Which(session=rows[1].session), copy=tmp_path / "copy.jsonl")
    assert carry(team, local).new == 1


def test_predictions_stay_where_they_were_made(
    tmp_path: Path, team: Store, rows: list[Measurement], prediction: Make
) -> None:
    local = database(tmp_path / "local.db", rows[:1])
    local.record_prediction(prediction())
    carry(local, team)
    assert team.predictions() == []


def test_only_what_is_missing_is_read_and_a_part_at_a_time(
    tmp_path: Path, team: Store, rows: list[Measurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "CHUNK", 2)
    monkeypatch.setattr(stored, "CHUNK", 3)
    read: list[list[str]] = []
    sent: list[int] = []
    by_id, add_parts = Store.by_id, Store.add_parts

    def reading(self: Store, ids: Sequence[str]) -> dict[str, Measurement | None]:
        read.append(list(ids))
        return by_id(self, ids)

    def sending(self: Store, parts: Any, arrival: Any, **options: Any) -> Stored:
        return add_parts(self, (sent.append(len(part)) or part for part in parts), arrival, **options)

    local = database(tmp_path / "local.db", rows)
    team.record_all(rows[:7])
    heard: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Store, "by_id", reading)
        patch.setattr(Store, "add_parts", sending)
        assert carry(local, team, heard.append) == Added(new=5, known=7)
    assert sorted(itertools.chain(*read)) == sorted(each.id for each in rows[7:])
    assert max(map(len, read)) <= 3
    assert sent == [2, 2, 1]
    assert heard[3] == f"12 of 12 compared, 5 are missing in {team.backend}"
    assert heard[5:] == ["2 of 5 sent", "4 of 5 sent"]
    assert len(team.measurements()) == len(rows)


def test_rows_that_cannot_be_read_are_passed_over_and_counted(
    tmp_path: Path, team: Store, team_url: str, cluster: Cluster, rows: list[Measurement]
) -> None:
    """D82 on a server."""
    local = database(tmp_path / "local.db", rows)
    with closing(sqlite3.connect(tmp_path / "local.db")) as plain, plain:
        plain.execute("UPDATE measurement SET stage = 'burn-in' WHERE id = ?", [rows[0].id])
        plain.execute("UPDATE measurement SET median_us = ? WHERE id = ?", [b"\x80\x04.", rows[1].id])
        plain.execute("UPDATE measurement SET id = ? WHERE id = ?", [b"\x80\x04.", rows[2].id])
        plain.execute("UPDATE measurement SET id = ? WHERE id = ?", ["a\0b\x1b[2J", rows[3].id])
    added = carry(local, team)
    assert (added.new, added.known) == (len(rows) - 4, 0)
    assert str(added.refused) == "4 rows can't be read by this version"
    cluster.execute('UPDATE variant SET config = \'{"block": "{{7*7}}"}\' WHERE id = 1', team_url)
    other = Store.open(tmp_path / "other.db")
    pulled = carry(team, other)
    assert pulled.new + pulled.refused.rows == len(rows) - 4
    assert carry(team, other).new == 0


def test_a_row_that_the_team_cannot_read_is_not_taken_for_the_same(
    tmp_path: Path, team: Store, team_url: str, cluster: Cluster, rows: list[Measurement]
) -> None:
    local = database(tmp_path / "local.db", rows)
    carry(local, team)
    cluster.execute("UPDATE measurement SET stage = 'burn-in'", team_url)
    with pytest.raises(InvalidInput, match="other values"):
        carry(local, team)


@pytest.mark.parametrize("name", ["v0001.db", "v0002.db"])
def test_a_file_of_an_older_schema_is_pushed_and_left_as_it_is(tmp_path: Path, team: Store, name: str) -> None:
    shutil.copy(ASSETS / name, tmp_path / name)
    local = Store.open(tmp_path / name, readonly=True)
    assert carry(local, team) == Added(new=4, known=0)
    assert carry(local, team) == Added(new=0, known=4)
    assert team.measurements() == local.measurements()
    assert (tmp_path / name).read_bytes() == (ASSETS / name).read_bytes()


def test_a_push_with_nothing_new_needs_no_turn_and_no_right_to_write(
    tmp_path: Path, team: Store, team_url: str, rows: list[Measurement]
) -> None:
    local = database(tmp_path / "local.db", rows)
    carry(local, team)
    with team.backend.writing():
        assert carry(local, Store.on_server(team_url, readonly=True)) == Added(new=0, known=len(rows))


def test_a_look_up_never_asks_the_server(
    team: Store, team_url: str, measurement: Make, problem: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    team.record(measurement())
    monkeypatch.setenv("FLASHTUNE_TEAM_DB", team_url)

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("a look-up went to the network")

    monkeypatch.setattr(server, "driver", never)
    monkeypatch.setattr(server, "engine", never)
    assert lookup.find(problem(), gpu_by_alias("h200")).level == "default"
    with pytest.raises(AssertionError, match="network"):
        team.measurements()


def test_a_full_disk_is_told_of_by_the_folder_of_what_is_missing(
    tmp_path: Path, rows: list[Measurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    """m5: an error of writing has no name of its own, and was said to be that of the output."""
    monkeypatch.setattr(transfer.tempfile, "TemporaryFile", lambda **_: open("/dev/full", "w+b"))  # noqa: SIM115
    with Store.open(tmp_path / "one.db") as one, Store.open(tmp_path / "other.db") as other:
        one.add(rows)
        with pytest.raises(OSError, match="No space left") as caught:
            carry(one, other)
        assert other.measurements() == []
    assert caught.value.filename == tempfile.gettempdir()
