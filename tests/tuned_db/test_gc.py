"""What gc removes, what it must leave, and that what it removed stays away."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from postgres_server import Cluster, on_both

from flashtune.cli.main import main
from flashtune.errors import DatabaseNotWritable, InvalidInput
from flashtune.tuned_db.exchange.export_file import write_export
from flashtune.tuned_db.records.measurement import STATUSES, Measurement, new_id, stamp
from flashtune.tuned_db.sharing.merge import Added, add_database, add_file
from flashtune.tuned_db.sharing.transfer import carry
from flashtune.tuned_db.store.removed import bury
from flashtune.tuned_db.store.store import Store, Stored
from flashtune.tuned_db.upkeep.gc import collect, in_sample

Make = Callable[..., Any]


def ids(rows: Sequence[Measurement]) -> set[str]:
    return {each.id for each in rows}


@on_both
def test_times_of_finished_searches_go_and_all_else_stays(
    store: Store, searched: Callable[..., list[Measurement]], problem: Make, measurement: Make
) -> None:
    finished = searched()
    kept = [
        *searched("never came to a final", final=False),
        *searched("s", final=False, problem=problem(seqlen_q=7)),  # the same session, which had no time for this one
        *(measurement(session="s", stage="measure", status=each, median_us=None) for each in STATUSES if each != "ok"),
    ]
    store.record_all([*finished, *kept])
    before = store.winner(problem(), finished[0].gpu_key)
    found = collect(store, days=0)
    assert (found.removed, found.left) == (6, len(kept) + 2)
    assert ids(store.measurements()) == ids([*kept, *finished[6:]])
    assert store.winner(problem(), finished[0].gpu_key) == before is not None
    assert store.removed([each.id for each in finished]) == ids(finished[:6])
    assert (collect(store, days=0).removed, store.count()) == (0, found.left)


@on_both
def test_another_gpu_of_the_same_session_is_another_search(
    store: Store, searched: Callable[..., list[Measurement]]
) -> None:
    store.record_all([*searched(), *searched(final=False, gpu_key="9.0a/h100/x", gpu_name="h100")])
    assert collect(store, days=0).removed == 6
    assert {each.gpu_name for each in store.measurements(stage="measure")} == {"h100"}


@on_both
def test_only_what_is_old_goes(store: Store, searched: Callable[..., list[Measurement]]) -> None:
    now = datetime.now(UTC)
    for days in (1, 10):
        store.record_all(searched(f"{days} days", created=stamp(now - timedelta(days=days))))
    assert collect(store, days=11).removed == 0
    assert collect(store, days=9).removed == 6
    assert {each.session for each in store.measurements(stage="measure")} == {"1 days"}


@pytest.mark.parametrize(
    ("statement", "removed"),
    [
        ("UPDATE measurement SET stage = 'semifinal' WHERE stage = 'measure'", 0),
        ("UPDATE measurement SET created = 'today' WHERE stage = 'final'", 0),
        ("UPDATE measurement SET created = x'ff'", 0),
        ("UPDATE problem SET json = '{}'", 0),
        ("UPDATE problem SET json = x'ff'", 0),
        ("UPDATE device SET key = 'toaster'", 0),
        ("UPDATE device SET key = x'ff'", 0),
        ("UPDATE measurement SET id = CAST(id AS BLOB) WHERE stage = 'measure'", 0),
        ("INSERT INTO tombstone SELECT id, 'then' FROM measurement", 6),  # somebody has put back what was removed
    ],
)
def test_a_file_that_was_tampered_with_keeps_what_can_not_be_read(
    store: Store, path: Path, searched: Callable[..., list[Measurement]], statement: str, removed: int
) -> None:
    store.record_all(searched())
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute(statement)
    assert collect(store, days=0).removed == removed
    assert store.count() == 8 - removed


@on_both
def test_what_was_put_back_by_hand_is_there(
    store: Store, tmp_path: Path, searched: Callable[..., list[Measurement]]
) -> None:
    rows = searched()
    store.record_all(rows)
    with store.backend.writing() as connection:
        bury(connection, [each.id for each in rows])
    with Store.open(tmp_path / "other.db") as other:
        other.record_all(rows)
        for added in (carry(other, store), add_database(store, other.path)):
            assert added == Added(new=0, known=8)
    assert store.add(rows) == Stored(new=0, removed=0)
    assert (collect(store, days=0).removed, store.count()) == (6, 2)


@pytest.mark.parametrize("days", [-1, True, 1.5, 36501, "30"])
def test_days_out_of_range_change_nothing(store: Store, searched: Callable[..., list[Measurement]], days: Any) -> None:
    store.record_all(searched())
    with pytest.raises(InvalidInput, match="must be a whole number from 0 to 36500"):
        collect(store, days=days)
    assert store.count() == 8


def test_a_dry_run_says_the_same_and_changes_nothing(
    store: Store, path: Path, searched: Callable[..., list[Measurement]]
) -> None:
    store.record_all(searched())
    before = path.read_bytes()
    with Store.open(path, readonly=True) as reader:
        would = collect(reader, days=0, dry_run=True)
        with pytest.raises(DatabaseNotWritable, match="read-only"):
            collect(reader, days=0)
    assert path.read_bytes() == before
    assert (would.removed, would.left, would.bytes_before) == (6, 2, would.bytes_after)
    assert collect(store, days=0).removed == would.removed


def test_a_sample_stays(store: Store, searched: Callable[..., list[Measurement]]) -> None:
    names = [new_id() for _ in range(5000)]
    assert 20 < sum(map(in_sample, names)) < 100, "one in a hundred, and the same everywhere"
    lucky = next(name for name in iter(new_id, "") if in_sample(name))
    rows = searched()
    rows[0] = dataclasses.replace(rows[0], id=lucky)
    store.record_all(rows)
    assert collect(store, days=0).removed == 5
    assert store.by_id([lucky])


@on_both
@pytest.mark.parametrize("way", ["merge", "import", "carry", "record"])
def test_what_was_removed_does_not_return(
    store: Store, other: tuple[Path, list[Measurement]], tmp_path: Path, way: str, measurement: Make
) -> None:
    source, rows = other
    add_database(store, source)
    collect(store, days=0)
    left = store.measurements()
    late = measurement(session="later")
    with Store.open(source) as adding:
        adding.record(late)
        write_export(adding.measurements(), tmp_path / "other.jsonl", origin=adding.origin)
        known = Added(new=1, known=2, removed=6)
        if way == "merge":
            assert add_database(store, source) == known
        elif way == "import":
            assert add_file(store, tmp_path / "other.jsonl") == known
        elif way == "carry":
            assert carry(adding, store) == known
        else:
            assert store.record_all([*rows, late]) == [*rows, late]
    assert ids(store.measurements()) == ids([*left, late])
    with Store.open(source) as untouched:
        assert ids(untouched.measurements()) == ids([*rows, late]), "what others keep is theirs"


def test_a_server_and_a_file_collect_on_their_own(
    tmp_path: Path, cluster: Cluster, team_url: str, other: tuple[Path, list[Measurement]]
) -> None:
    team, (path, rows) = Store.on_server(team_url), other
    with Store.open(path) as local:
        carry(local, team)
        collect(local, days=0)
        assert carry(local, team) == Added(new=0, known=2)
        assert team.count() == len(rows), "the team keeps what one of it has removed"
        assert carry(team, local) == Added(new=0, known=2, removed=6)
        said = CliRunner().invoke(main, ["db", "team", "gc", "--older-than", "0", "--team", team_url])
        assert (said.exit_code, said.output.split(":")[0]) == (0, "Removed 6 of 8 measurements")
    assert team.count() == 2
