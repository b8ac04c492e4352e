"""Two sets of measurements: what only one has, and where they come to other winners."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.errors import InvalidInput
from flashtune.tuned_db.exchange.export_file import write_export
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.sharing.diff import compare, read_side
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
OLD = Path(__file__).parents[1] / "upgrade_assets" / "v0001.db"


@pytest.fixture
def rows(measurement: Make, pair: Make, problem: Make) -> list[Measurement]:
    return [
        measurement(config=pair(block=block, stages=1), problem=problem(batch=batch), median_us=50.0 + block / 8)
        for block, batch in itertools.product((16, 32, 128), (1, 2))
    ]


def test_the_same_rows_are_no_difference(rows: list[Measurement]) -> None:
    assert not compare(rows, rows)
    assert not compare(rows, reversed(rows))
    assert not compare([], [])


def test_rows_of_one_side_alone(rows: list[Measurement], measurement: Make) -> None:
    extra = measurement(status="timeout", median_us=None)
    found = compare(rows, [*rows, extra])
    assert (found.only_first, found.only_second, found.winners) == ((), (extra,), ())
    assert found
    back = compare([*rows, extra], rows)
    assert (back.only_first, back.only_second) == ((extra,), ())


def test_winners_that_differ_have_both_ratios(rows: list[Measurement]) -> None:
    found = compare(rows, rows[2:])  # without the fastest of both problems
    assert len(found.winners) == 2
    for changed in found.winners:
        assert changed.first is not None
        assert changed.second is not None
        assert (changed.first.config.key, changed.second.config.key) == ("block=16,stages=1", "block=32,stages=1")
        assert (changed.first.ratio, changed.second.ratio) == (0.52, 0.54)
    assert [changed.problem.batch for changed in found.winners] == [1, 2]


def test_a_problem_that_one_side_has_alone(rows: list[Measurement], measurement: Make, problem: Make) -> None:
    new = measurement(problem=problem(batch=9), gpu_key=gpu_by_alias("a100").key, gpu_name="a100")
    (changed,) = compare(rows, [*rows, new]).winners
    assert changed.first is None
    assert changed.second is not None
    assert (changed.gpu_name, changed.problem) == ("a100", new.problem)


def test_a_variant_that_is_barred_on_one_side_wins_there_no_more(rows: list[Measurement], measurement: Make) -> None:
    """Also for another problem of the same spec."""
    verdict = measurement(config=rows[0].config, problem=rows[1].problem, status="wrong")
    found = compare(rows, [*rows, verdict])
    assert [changed.problem.batch for changed in found.winners] == [1, 2]


def test_other_values_under_one_id_are_seen(rows: list[Measurement]) -> None:
    altered = dataclasses.replace(rows[0], median_us=1.0)
    found = compare(rows, [altered, *rows[1:]])
    assert found.changed == ((rows[0], altered),)
    assert found


def test_an_order_of_its_own(rows: list[Measurement]) -> None:
    wanted = compare(rows, [])
    assert len(wanted.only_first) == len(rows)
    for seed in range(5):
        random.Random(seed).shuffle(rows)
        assert compare(rows, []) == wanted


def test_files_are_known_by_their_content(store: Store, tmp_path: Path, rows: list[Measurement]) -> None:
    store.record_all(rows)
    shutil.copy(store.path, tmp_path / "export.jsonl")
    write_export(rows, tmp_path / "plain.db", origin="here")
    write_export(rows, tmp_path / "packed.gz", origin="here")
    wanted = {each.id: each for each in rows}
    for name in ("export.jsonl", "plain.db", "packed.gz"):
        side = read_side(tmp_path / name)
        assert {each.id: each for each in side.measurements} == wanted
        assert side.unreadable.rows == 0


def test_an_older_database_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    shutil.copy(OLD, path)
    before = path.read_bytes()
    assert len(read_side(path).measurements) == 4
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["old.db"]


def test_rows_that_cannot_be_read_are_counted(store: Store, rows: list[Measurement]) -> None:
    store.record_all(rows)
    with closing(sqlite3.connect(store.path)) as plain, plain:
        plain.execute("UPDATE measurement SET status = 'perfect' WHERE rowid < 3")
    side = read_side(store.path)
    assert (len(side.measurements), side.unreadable.rows) == (len(rows) - 2, 2)


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("block,us\n64,80\n")
    with pytest.raises(InvalidInput, match=r"text, line 1: not JSON"):
        read_side(tmp_path / "text")
    for path, why in (
        ("none", "there is no tuning database or export of one at .*none"),
        ("", "is a folder, not a file"),
    ):
        with pytest.raises(InvalidInput, match=why):
            read_side(tmp_path / path)
