"""Dates that are yet to come: refused where they come in, left out where they go out, and harmless where they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes import H200
from postgres_server import on_both
from sqlalchemy import text

from flashtune.cli.main import main
from flashtune.errors import InvalidInput
from flashtune.tuned_db.exchange.export_file import read_export, write_export
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.records import dates
from flashtune.tuned_db.records.measurement import Measurement, stamp
from flashtune.tuned_db.sharing.merge import Added, add_database, add_file, export_database
from flashtune.tuned_db.sharing.transfer import carry
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
REASON = r"created=2026-12-01T12:00:00\.001Z is later than it is \(2026-11-30T12:00:00\.000Z\): the clock is wrong"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[datetime], None]:
    """It is `NOW`, until a test says otherwise."""

    def set_to(when: datetime) -> None:
        class Clock(datetime):
            @classmethod
            def now(cls, tz: object = None) -> Any:
                return when

        monkeypatch.setattr(dates, "datetime", Clock)

    set_to(NOW)
    return set_to


@pytest.fixture
def sound(measurement: Make) -> Measurement:
    return measurement()


@pytest.fixture
def ahead(measurement: Make) -> Measurement:
    return measurement(created=stamp(NOW + timedelta(days=1, milliseconds=1)))


def moved(store: Store, row: Measurement, created: str) -> None:
    """Gives a stored row another date, as an earlier version would have let it in."""
    with store.backend.writing() as connection:
        connection.execute(text("UPDATE measurement SET created = :to WHERE id = :id"), {"to": created, "id": row.id})


@pytest.fixture
def from_there(tmp_path: Path, sound: Measurement, ahead: Measurement) -> Store:
    """A database with one row of a date that is yet to come here."""
    with Store.open(tmp_path / "there.db") as store:
        store.add([sound, dataclasses.replace(ahead, created=sound.created)])
        moved(store, ahead, ahead.created)
        return store


@on_both
def test_what_is_stored_at_once_is_refused_by_value(store: Store, sound: Measurement, ahead: Measurement) -> None:
    """M9"""
    for put in (store.record, lambda row: store.record_all([sound, row]), lambda row: store.add([sound, row])):
        with pytest.raises(InvalidInput, match=REASON):
            put(ahead)
    assert store.count() == 0
    store.record(dataclasses.replace(ahead, created=stamp(NOW + dates.AHEAD)))


def test_an_import_names_it_or_passes_over_it(
    store: Store, tmp_path: Path, sound: Measurement, ahead: Measurement
) -> None:
    """M9"""
    file = tmp_path / "rows.jsonl"
    write_export([sound, ahead], file, origin="x")
    with pytest.raises(InvalidInput, match=rf"rows\.jsonl, measurement {ahead.id}: {REASON}"):
        add_file(store, file)
    assert store.count() == 0
    added = add_file(store, file, skip_invalid=True)
    assert (added.new, added.refused.rows, len(added.refused.reasons)) == (1, 1, 1)
    assert store.measurements() == [sound]


@on_both
def test_a_merge_a_pull_and_a_push_pass_over_it(
    store: Store, from_there: Store, sound: Measurement, ahead: Measurement
) -> None:
    """M9"""
    added = add_database(store, from_there.path)
    assert (added.new, added.refused.rows) == (1, 1)
    assert ahead.id in added.refused.reasons[0]
    assert carry(from_there, store).refused.rows == 1
    assert store.measurements() == [sound]


def test_what_can_not_get_in_elsewhere_does_not_get_out(
    store: Store, from_there: Store, tmp_path: Path, sound: Measurement, ahead: Measurement
) -> None:
    """Or one such row would keep all others from whoever imports the file."""
    file = tmp_path / "rows.jsonl"
    assert export_database(from_there, file) == 1
    assert add_file(store, file) == Added(new=1, known=0)
    said = CliRunner().invoke(main, ["db", "export", str(file), "--db", str(from_there.path)])
    assert said.exit_code == 0
    assert "1 row passed over, which nobody could read: flashtune db check" in said.stderr
    moved(from_there, sound, ahead.created)
    with pytest.raises(InvalidInput, match=r"no measurements in .* that can be written"):
        export_database(from_there, file)
    assert [each.id for each in read_export(file).measurements] == [sound.id]


def test_what_is_there_already_is_known(
    store: Store, from_there: Store, tmp_path: Path, clock: Make, ahead: Measurement
) -> None:
    """Its clock was right when it came, or an earlier version let it in."""
    clock(NOW + timedelta(days=9))
    file = tmp_path / "rows.jsonl"
    assert export_database(from_there, file) == add_database(store, from_there.path).new == 2
    clock(NOW)
    again = Added(new=0, known=2)
    assert add_file(store, file) == add_database(store, from_there.path) == carry(from_there, store) == again
    assert store.record(ahead) == ahead


@pytest.mark.parametrize("when", [datetime(1970, 1, 1, tzinfo=UTC), NOW, datetime(2099, 1, 1, tzinfo=UTC)])
def test_no_look_up_reads_the_clock(
    store: Store, from_there: Store, ship: Make, clock: Make, when: datetime, sound: Measurement
) -> None:
    """A machine without a battery begins in 1970, and runs the kernels of all others with the same rows."""
    store.add([sound])
    moved(store, sound, "9998-12-31T00:00:00.000Z")
    clock(when)
    assert find(sound.problem, H200, store_path=store.path).level == "exact"
    assert len(store.measurements()) == 1
