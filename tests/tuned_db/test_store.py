"""A store keeps what it was given, for ever, whoever else writes."""

from __future__ import annotations

import dataclasses
import json
import math
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from postgres_server import on_both

from flashtune.errors import DatabaseNotWritable, InvalidInput, StoreError
from flashtune.tuned_db.records import STATUSES
from flashtune.tuned_db.store import Store

Make = Callable[..., Any]
Start = Callable[[str, Path], "subprocess.Popen[str]"]


@on_both
def test_a_measurement_comes_back_as_it_was(store: Store, measurement: Make) -> None:
    record = measurement(message="a note")
    assert store.record(record) == record
    assert store.measurements() == [record]


@on_both
@pytest.mark.parametrize("status", STATUSES)
def test_every_outcome_is_kept(store: Store, measurement: Make, status: str) -> None:
    bare = dict.fromkeys(("q20_us", "q80_us", "baseline_us", "registers", "clock_mhz", "seed"))
    record = measurement(status=status, median_us=80.0 if status == "ok" else None, unit="", **bare)
    store.record(record)
    assert store.measurements() == [record]


@on_both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0, None], ids=str)
def test_a_time_that_is_no_time_is_stored_as_failed(store: Store, measurement: Make, problem: Make, bad: Any) -> None:
    """D67, whoever stores it."""
    record = measurement(median_us=bad)
    assert store.record(record).status == "failed"
    assert store.measurements(status="ok") == []
    assert store.winner(problem(), record.gpu_key) is None


@on_both
def test_storing_again_changes_nothing(store: Store, measurement: Make) -> None:
    record = measurement()
    store.record_all([record, record])
    store.record(record)
    assert store.measurements() == [record]


@on_both
def test_a_failed_time_may_be_stored_again_too(store: Store, measurement: Make) -> None:
    record = measurement(median_us=math.nan)
    assert store.record(record) == store.record(record)


@on_both
def test_a_measurement_is_never_changed(store: Store, measurement: Make) -> None:
    record = measurement()
    store.record(record)
    with pytest.raises(InvalidInput, match=record.id):
        store.record_all([measurement(), dataclasses.replace(record, median_us=1.0)])
    assert store.measurements() == [record]


@on_both
def test_a_device_model_has_one_name(store: Store, measurement: Make, prediction: Make) -> None:
    record, other = measurement(), measurement(gpu_name="another name")
    for pair in ([record, other], [other, record]):
        with pytest.raises(InvalidInput, match=r"gpu_name='.*' must be '.*', as in other rows of the model 9.0a/"):
            store.record_all(pair)
    assert store.measurements() == []
    store.record(record)
    for refused in (lambda: store.record(other), lambda: store.record_prediction(prediction(gpu_name="another name"))):
        with pytest.raises(InvalidInput, match="gpu_name='another name' must be 'h200'"):
            refused()
    assert store.measurements() == [record]


@on_both
def test_bad_values_are_refused_before_anything_is_written(store: Store, measurement: Make) -> None:
    with pytest.raises(InvalidInput, match="stage='warm'"):
        store.record_all([measurement(), measurement(stage="warm")])
    assert store.measurements() == []


@on_both
def test_measurements_are_picked_by_what_is_given(store: Store, measurement: Make, problem: Make, solo: Make) -> None:
    base = measurement()
    others = {
        "problem": measurement(problem=problem(causal=True)),
        "gpu": measurement(gpu_key=base.gpu_key.replace("132sm", "114sm")),
        "family": measurement(config=solo(block=32)),
        "session": measurement(session="another"),
        "status": measurement(status="timeout"),
        "stage": measurement(stage="screen"),
    }
    store.record_all([base, *others.values()])
    everything = {base.id, *(each.id for each in others.values())}

    def found(**wanted: Any) -> set[str]:
        return {each.id for each in store.measurements(**wanted)}

    assert found() == everything
    assert found(problem=problem()) == everything - {others["problem"].id}
    assert found(spec=problem(batch=9).spec) == everything - {others["problem"].id}
    assert found(gpu_key=base.gpu_key) == everything - {others["gpu"].id}
    assert found(family="solo") == {others["family"].id}
    assert found(session="another") == {others["session"].id}
    assert found(status="timeout") == {others["status"].id}
    assert found(stage="screen", status="ok") == {others["stage"].id}


@on_both
def test_measurements_come_oldest_first(store: Store, measurement: Make) -> None:
    late, early = measurement(created="2026-12-01T00:00:00Z"), measurement(created="2026-11-01T00:00:00Z")
    store.record_all([late, early])
    assert store.measurements() == [early, late]


@on_both
def test_the_winner_is_derived(store: Store, measurement: Make, problem: Make, pair: Make) -> None:
    best = measurement(config=pair(block=32, stages=1), median_us=70.0)
    wrong = measurement(config=pair(block=16, stages=1), median_us=10.0)
    late_verdict = measurement(config=wrong.config, status="wrong", median_us=None, problem=problem(batch=7))
    store.record_all([measurement(), best, wrong, late_verdict])
    winner = store.winner(problem(), best.gpu_key)
    assert winner is not None
    assert winner.measurement == best
    current = store.winner(problem(), best.gpu_key, lambda config: measurement(config=config).source_digest)
    assert current == winner
    assert store.winner(problem(), best.gpu_key, lambda config: "0" * 64) is None


@on_both
def test_problems_and_devices_are_those_with_measurements(store: Store, measurement: Make, problem: Make) -> None:
    base = measurement()
    store.record_all(
        [
            base,
            measurement(problem=problem(batch=5), status="failed"),
            measurement(problem=problem(causal=True), gpu_key="8.0/a100/108sm"),
        ]
    )
    assert store.problems(spec=problem().spec, gpu_key=base.gpu_key) == [problem()]
    assert store.problems() == [problem(), problem(causal=True)]
    assert store.gpu_keys(capability="9.0a") == [base.gpu_key]
    assert store.gpu_keys() == ["8.0/a100/108sm", base.gpu_key]


@on_both
def test_predictions_live_apart(store: Store, measurement: Make, prediction: Make, problem: Make) -> None:
    guess = prediction()
    store.record_prediction(guess)
    assert store.predictions() == [guess]
    assert store.predictions(problem=problem(batch=3)) == []
    assert store.measurements() == []
    assert store.problems() == []
    assert store.gpu_keys() == []
    assert store.winner(problem(), guess.gpu_key) is None


@on_both
def test_a_prediction_gives_way_to_the_next(store: Store, prediction: Make, pair: Make, problem: Make) -> None:
    first, other = prediction(), prediction(config=pair(block=16, stages=1), rank=2, predicted_us=90.0)
    store.record_prediction(first)
    store.record_prediction(other)
    again = dataclasses.replace(first, predicted_us=70.0)
    store.record_prediction(again)
    assert store.predictions() == [again, other]
    elsewhere = prediction(problem=problem(batch=3))
    store.replace_predictions([dataclasses.replace(other, rank=1), elsewhere])
    assert store.predictions(problem=problem()) == [dataclasses.replace(other, rank=1)]
    assert store.predictions(problem=problem(batch=3)) == [elsewhere]


@on_both
def test_a_prediction_without_a_time_is_refused(store: Store, prediction: Make) -> None:
    with pytest.raises(InvalidInput, match="predicted_us"):
        store.record_prediction(prediction(predicted_us=math.nan))


def test_a_store_opened_read_only_does_not_write(store: Store, path: Path, measurement: Make, prediction: Make) -> None:
    store.record(measurement())
    reader = Store.open(path, readonly=True)
    assert len(reader.measurements()) == 1
    with pytest.raises(DatabaseNotWritable, match="read-only"):
        reader.record(measurement())
    with pytest.raises(DatabaseNotWritable, match="read-only"):
        reader.record_prediction(prediction())


def test_each_database_has_an_identity(store: Store, tmp_path: Path, path: Path) -> None:
    assert store.origin == Store.open(path).origin
    assert Store.open(tmp_path / "one.db").origin != Store.open(tmp_path / "two.db").origin


def test_no_side_files_stay_behind(store: Store, path: Path, measurement: Make) -> None:
    store.record(measurement())
    Store.open(path, readonly=True).measurements()
    assert [each.name for each in path.parent.iterdir()] == ["tuned.db"]


def test_sqlite_is_run_as_it_should_be(store: Store, path: Path) -> None:
    for connect in (store.place.reading, store.place.writing):
        with connect() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one() == 30000
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2
    with closing(sqlite3.connect(path)) as plain:
        assert plain.execute("PRAGMA application_id").fetchone() == (0x464C5455,)


TAMPERED = {
    "code in a config": ("variant", "config", '{"block":"64\\n__device__ int x=1;","stages":2}'),
    "template in a config": ("variant", "config", '{"block":"{{ 7*7 }}","stages":2}'),
    "pickle in a config": ("variant", "config", b"\x80\x04\x95\x0c\x00\x00\x00."),
    "half a config": ("variant", "config", '{"block":64,'),
    "deep config": ("variant", "config", "[" * 100_000),
    "unknown family": ("variant", "family", "from_the_future"),
    "unknown problem": ("problem", "json", '{"dtype":"float4"}'),
    "pickle in a problem": ("problem", "json", b"\x80\x04."),
    "unknown stage": ("measurement", "stage", "burn-in"),
    "text for a time": ("measurement", "median_us", "fast"),
    "blob for a message": ("measurement", "message", b"\x80\x04."),
    "short digest": ("variant", "source_digest", "abc"),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_a_row_that_cannot_be_read_is_passed_over_and_kept(
    store: Store, path: Path, measurement: Make, pair: Make, problem: Make, how: str
) -> None:
    """D82, in a database."""
    table, column, bad = TAMPERED[how]
    good = measurement(config=pair(block=16, stages=1), problem=problem(batch=9), created="2026-11-30T00:00:00Z")
    store.record(measurement())
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute(f"UPDATE {table} SET {column} = ?", [bad])
    store.record(good)
    assert store.measurements() == [good]
    assert store.winner(problem(), good.gpu_key) is None
    with closing(sqlite3.connect(path)) as plain:
        assert plain.execute("SELECT count(*) FROM measurement").fetchone() == (2,)


def test_ok_without_a_time_cannot_even_be_written_by_hand(store: Store, path: Path, measurement: Make) -> None:
    """D67, by other programs."""
    store.record(measurement())
    with closing(sqlite3.connect(path)) as plain:
        for bad in ("NULL", "0", "-1"):
            with pytest.raises(sqlite3.IntegrityError, match="ok_has_time"):
                plain.execute(f"UPDATE measurement SET median_us = {bad}")


def test_new_choices_and_dropped_ones_do_not_disturb(store: Store, measurement: Make, pair: Make, path: Path) -> None:
    """D69, the rows. Whole runs are in tuner/test_next_version.py."""
    store.record_all([measurement(config=pair(block=16, stages=1)), measurement(config=pair(block=32, stages=1))])
    with closing(sqlite3.connect(path)) as plain, plain:
        older = json.dumps({"block": 48, "stages": 1})  # a choice that this version dropped
        plain.execute("UPDATE variant SET config = ? WHERE config LIKE '%16%'", [older])
    store.record(measurement(config=pair(block=256, stages=1)))
    assert {each.config.to_json()["block"] for each in store.measurements()} == {32, 256}


def test_writers_wait_for_a_lock(store: Store, path: Path, measurement: Make) -> None:
    """D71. Another process is in test_locks.py."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.5, lambda: other.execute("COMMIT"))
        release.start()
        before = time.monotonic()
        store.record(measurement())
        assert time.monotonic() - before > 0.4
        release.join()
    assert len(store.measurements()) == 1


def test_readers_do_not_wait_for_a_writer(store: Store, path: Path, measurement: Make) -> None:
    store.record(measurement())
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert len(Store.open(path, readonly=True, timeout=0.0).measurements()) == 1


def test_a_lock_that_is_never_released_is_named(path: Path, store: Store, measurement: Make) -> None:
    impatient = Store.open(path, timeout=0.1)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"tuned\.db has been locked by another process for 0\.1 s"):
            impatient.record(measurement())
    record = measurement()
    impatient.record(record)
    assert impatient.measurements() == [record]


@on_both
def test_threads_may_share_a_store(store: Store, measurement: Make) -> None:
    records = [measurement(session=f"session {number}") for number in range(24)]
    threads = [threading.Thread(target=store.record_all, args=(records[start::4],)) for start in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert {each.id for each in store.measurements()} == {each.id for each in records}


def test_eight_processes_make_one_database_together(start: Start, tmp_path: Path) -> None:
    """D70, the file. Whole runs are in tuner/test_many_at_once.py."""
    code = """
        import multiprocessing, os, pathlib
        def work(path, number, barrier):
            barrier.wait()
            store = Store.open(path)
            for _ in range(3):
                store.record(fakes.make_measurement(session=f"worker {number}"))
        context = multiprocessing.get_context("fork")
        import flashtune.tuned_db.upgrade, alembic.command
        for turn in range(2):
            barrier = context.Barrier(8)
            here = os.path.join(path, "deep", str(turn), "tuned.db")
            workers = [context.Process(target=work, args=(here, number, barrier)) for number in range(8)]
            [each.start() for each in workers]
            [each.join() for each in workers]
            found = Store.open(here).measurements()
            print([each.exitcode for each in workers], len(found), len({each.session for each in found}))
            print(os.listdir(os.path.dirname(here)))
    """
    output, _ = start(code, tmp_path).communicate(timeout=120)
    assert output.splitlines() == [f"{[0] * 8} 24 8", "['tuned.db']"] * 2


def test_what_was_recorded_survives_a_kill(start: Start, path: Path, measurement: Make) -> None:
    code = """
        store = Store.open(path)
        while True:
            print(store.record(fakes.make_measurement()).id, flush=True)
    """
    process = start(code, path)
    assert process.stdout is not None
    finished = [process.stdout.readline().strip() for _ in range(15)]
    process.kill()
    finished += process.stdout.read().split("\n")[:-1]
    process.communicate()
    store = Store.open(path)
    assert set(finished) <= {each.id for each in store.measurements()}
    store.record(measurement())
