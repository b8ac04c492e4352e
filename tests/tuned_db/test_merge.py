"""Databases and exports added to a database: a union of sets, and what is wrong leaves it as it was."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashtune.errors import DatabaseDamaged, DatabaseForeign, InvalidInput, StoreError
from flashtune.tuned_db.exchange.export_file import read_export, write_export
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.sharing.merge import Added, add_database, add_file, export_database
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
OLD = Path(__file__).parents[1] / "upgrade_assets"


@pytest.fixture
def rows(measurement: Make, pair: Make, problem: Make) -> list[Measurement]:
    return [
        measurement(config=pair(block=block, stages=stages), problem=problem(batch=batch), median_us=50.0 + block)
        for block, stages, batch in itertools.product((16, 32, 64), (1, 2), (1, 8))
    ]


def database(path: Path, rows: Sequence[Measurement]) -> Path:
    with Store.open(path) as store:
        store.record_all(rows)
    return path


def content(path: Path, scratch: Path) -> bytes:
    """The canonical export, which two databases with the same rows share but for its header."""
    with Store.open(path, readonly=True) as store:
        write_export(store.measurements(), scratch, origin="anywhere")
    return scratch.read_bytes()


def test_what_is_new_is_added_once(tmp_path: Path, rows: list[Measurement]) -> None:
    other = database(tmp_path / "other.db", rows[3:9])
    with Store.open(database(tmp_path / "own.db", rows[:5])) as store:
        assert add_database(store, other) == Added(new=4, known=2)
        assert add_database(store, other) == Added(new=0, known=6)
        assert {each.id for each in store.measurements()} == {each.id for each in rows[:9]}


def test_an_export_added_is_the_database_it_came_from(tmp_path: Path, rows: list[Measurement]) -> None:
    source, file = database(tmp_path / "source.db", rows), tmp_path / "rows.jsonl"
    with Store.open(source, readonly=True) as store:
        assert export_database(store, file) == len(rows)
    with Store.open(tmp_path / "own.db") as store:
        assert add_file(store, file) == Added(new=len(rows), known=0)
        assert add_file(store, file) == Added(new=0, known=len(rows))
    assert content(source, tmp_path / "a") == content(tmp_path / "own.db", tmp_path / "b")


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.sets(st.integers(0, 11)), min_size=2, max_size=4), data=st.data())
def test_order_and_repetition_make_no_difference(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Measurement], parts: list[set[int]], data: st.DataObject
) -> None:
    """D77 and D78, for any databases."""
    folder = tmp_path_factory.mktemp("merge")
    sources = [
        database(folder / f"{number}.db", [rows[index] for index in sorted(part)]) for number, part in enumerate(parts)
    ]
    order = data.draw(st.permutations([*sources, *sources[:2]]))
    for name, wanted in (("one.db", sources), ("two.db", order)):
        with Store.open(folder / name) as store:
            for source in wanted:
                add_database(store, source)
    assert content(folder / "one.db", folder / "a") == content(folder / "two.db", folder / "b")


def test_a_row_that_contradicts_another_leaves_all_of_its_source_out(tmp_path: Path, rows: list[Measurement]) -> None:
    changed = dataclasses.replace(rows[0], median_us=1.0, q20_us=1.0, q80_us=1.0)
    other = database(tmp_path / "other.db", [changed, *rows[1:]])
    own = database(tmp_path / "own.db", rows[:1])
    before = content(own, tmp_path / "a")
    with Store.open(own) as store, pytest.raises(InvalidInput, match=f"{rows[0].id} is already in .* other values"):
        add_database(store, other)
    assert content(own, tmp_path / "b") == before


def test_a_config_that_was_wrong_elsewhere_does_not_win_here(
    tmp_path: Path, measurement: Make, problem: Make, pair: Make
) -> None:
    best = measurement(config=pair(block=128, stages=2))
    next_best = measurement(config=pair(block=64, stages=2), median_us=90.0)
    bad = measurement(config=best.config, status="wrong", stage="screen", median_us=None, q20_us=None, q80_us=None)
    other = database(tmp_path / "other.db", [bad])
    with Store.open(database(tmp_path / "own.db", [best, next_best])) as store:
        before = store.winner(problem(), best.gpu_key)
        add_database(store, other)
        after = store.winner(problem(), best.gpu_key)
    assert before is not None
    assert after is not None
    assert (before.config, after.config) == (best.config, next_best.config)


@pytest.mark.parametrize("name", ["v0001.db", "v0002.db"])
def test_a_database_of_an_older_schema_is_read_and_left_as_it_is(tmp_path: Path, name: str) -> None:
    old = tmp_path / name
    shutil.copy(OLD / name, old)
    before = old.read_bytes()
    with Store.open(tmp_path / "own.db") as store:
        added = add_database(store, old)
        assert added.new == len(store.measurements())
    assert added.new + added.refused.rows > 0
    assert old.read_bytes() == before


def test_predictions_stay_where_they_were_made(tmp_path: Path, rows: list[Measurement], prediction: Make) -> None:
    other = database(tmp_path / "other.db", rows[:1])
    with Store.open(other) as store:
        store.record_prediction(prediction())
    with Store.open(tmp_path / "own.db") as store:
        add_database(store, other)
        assert store.predictions() == []


def test_rows_that_are_not_valid_are_named_or_passed_over(tmp_path: Path, rows: list[Measurement]) -> None:
    file = tmp_path / "rows.jsonl"
    write_export(rows, file, origin="there")
    header, *lines = file.read_bytes().splitlines(keepends=True)
    row = json.loads(lines[2])
    row["config"]["block"] = 48
    lines[2] = json.dumps(row).encode() + b"\n"
    digest = hashlib.sha256(b"".join(lines)).hexdigest()
    file.write_bytes(json.dumps(json.loads(header) | {"digest": digest}).encode() + b"\n" + b"".join(lines))
    with Store.open(tmp_path / "own.db") as store:
        with pytest.raises(InvalidInput, match=r"line 4: .*block"):
            add_file(store, file)
        assert store.measurements() == []
        added = add_file(store, file, skip_invalid=True)
    assert (added.new, added.refused.rows) == (len(rows) - 1, 1)
    assert "line 4" in added.refused.reasons[0]


def test_what_is_no_database_or_export_says_so(tmp_path: Path, rows: list[Measurement]) -> None:
    """D73, as a source: an empty file is an error."""
    own, file = database(tmp_path / "own.db", rows), tmp_path / "rows.jsonl"
    other = database(tmp_path / "other.db", rows)
    write_export(rows, file, origin="there")
    text, empty = tmp_path / "notes.txt", tmp_path / "empty.db"
    text.write_text("hello\n", encoding="utf-8")
    empty.write_bytes(b"")
    with Store.open(own) as store:
        for path, add, error, message in (
            (file, add_database, InvalidInput, "flashtune db import"),
            (other, add_file, InvalidInput, "flashtune db merge"),
            (own, add_database, InvalidInput, "would be merged into"),
            (text, add_database, DatabaseDamaged, "not an SQLite database"),
            (empty, add_database, DatabaseDamaged, "empty"),
            (text, add_file, InvalidInput, "line 1"),
            (tmp_path / "none.db", add_database, StoreError, "there is no tuning database"),
            (tmp_path, add_database, StoreError, "there is no tuning database"),
            (tmp_path, add_file, InvalidInput, "is a folder, not a file"),
        ):
            with pytest.raises(error, match=message):
                add(store, path)
        assert len(store.measurements()) == len(rows)


def test_a_database_of_another_program_is_not_touched(tmp_path: Path) -> None:
    foreign = tmp_path / "other.db"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE notes (text)")
    before = foreign.read_bytes()
    with Store.open(tmp_path / "own.db") as store, pytest.raises(DatabaseForeign, match="another program"):
        add_database(store, foreign)
    assert foreign.read_bytes() == before


def test_an_export_replaces_nothing_but_an_export(tmp_path: Path, rows: list[Measurement]) -> None:
    own, file, notes = database(tmp_path / "own.db", rows), tmp_path / "rows.jsonl", tmp_path / "notes.txt"
    notes.write_text("mine", encoding="utf-8")
    with Store.open(own, readonly=True) as store:
        export_database(store, file)
        export_database(store, file, gpu_key=rows[0].gpu_key)
        assert len(read_export(file).measurements) == len(rows)
        with pytest.raises(InvalidInput, match=r"notes\.txt exists and is no flashtune export"):
            export_database(store, notes)
        with pytest.raises(InvalidInput, match="no measurements of that GPU"):
            export_database(store, tmp_path / "none.jsonl", gpu_key="8.0/other")
    assert notes.read_text(encoding="utf-8") == "mine"
    assert not (tmp_path / "none.jsonl").exists()
