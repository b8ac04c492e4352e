"""A store keeps what it was given, for ever."""

from __future__ import annotations

import dataclasses
import math
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from postgres_server import on_both

from flashtune.errors import DatabaseNotWritable, InvalidInput
from flashtune.tuned_db.records.measurement import STATUSES
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]


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
    for rows in ([record, other], [other, record], [other]):
        with pytest.raises(InvalidInput, match=r"gpu_name='another name' must be 'h200', as the key says"):
            store.record_all(rows)
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
    late, early = measurement(created="2026-11-20T00:00:00.000Z"), measurement(created="2026-11-01T00:00:00.000Z")
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
    for connect in (store.backend.reading, store.backend.writing):
        with connect() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == (connect == store.backend.writing)
            assert connection.exec_driver_sql("PRAGMA trusted_schema").scalar_one() == 0
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2
    with closing(sqlite3.connect(path)) as plain:
        assert plain.execute("PRAGMA application_id").fetchone() == (0x464C5455,)
