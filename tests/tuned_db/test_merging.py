"""What merging promises, with winners: in any order the same (D77), and again nothing new (D78)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.tuned_db.exchange.export_file import write_export
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.sharing.merge import Added, add_database, add_file, export_database
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
H200 = gpu_by_alias("h200")


@pytest.fixture
def sides(tmp_path: Path, measurement: Make, pair: Make) -> tuple[Path, Path]:
    """Two databases of two machines: different winners for one problem, and one row that both have."""
    common = measurement(config=pair(block=16, stages=1), median_us=95.0)
    ours, theirs = pair(block=32, stages=1), pair(block=32, stages=2)
    a = [common, measurement(config=ours, median_us=80.0, unit="GPU-a", session="of a")]
    b = [
        common,
        measurement(config=theirs, median_us=70.0, unit="GPU-b", session="of b"),
        measurement(config=ours, median_us=85.0, unit="GPU-b", session="of b"),
    ]
    return made(tmp_path / "a.db", a), made(tmp_path / "b.db", b)


def made(path: Path, rows: Sequence[Measurement]) -> Path:
    with Store.open(path) as store:
        store.record_all(rows)
    return path


def merged(path: Path, *sources: Path) -> Path:
    with Store.open(path) as store:
        for each in sources:
            add_database(store, each)
    return path


def rows(path: Path) -> list[Measurement]:
    with Store.open(path, readonly=True) as store:
        return store.measurements()


def content(path: Path) -> bytes:
    """All rows in every field, in one order."""
    file = path.with_suffix(".jsonl")
    write_export(rows(path), file, origin="anywhere")
    return file.read_bytes()


def test_two_orders_give_the_same_rows_and_the_same_winner(
    tmp_path: Path, sides: tuple[Path, Path], problem: Make
) -> None:
    """D77. The rule is that of winners.py: here the least ratio to the default, by the median of sessions."""
    a, b = sides
    ab, ba = merged(tmp_path / "ab.db", a, b), merged(tmp_path / "ba.db", b, a)
    assert content(ab) == content(ba)
    everything = {each.id: each for each in [*rows(a), *rows(b)]}
    assert {each.id: each for each in rows(ab)} == everything, "unit and session say where each is from"
    assert len(everything) == 4

    best = {path: find(problem(), H200, store_path=path) for path in (a, b, ab, ba)}
    assert best[a].config != best[b].config
    assert best[ab] == best[ba]
    assert best[ab].config == best[b].config
    assert best[ab].measurement is not None
    assert best[ab].measurement.unit == "GPU-b"


def test_merging_again_adds_nothing(tmp_path: Path, sides: tuple[Path, Path]) -> None:
    """D78. merge(A, A) = A, with A under another name, since a database is not merged into itself."""
    a, b = sides
    copy = tmp_path / "copy.db"
    copy.write_bytes(a.read_bytes())
    assert content(merged(copy, a, a)) == content(a)
    once = content(merged(tmp_path / "once.db", a, b))
    assert content(merged(tmp_path / "twice.db", a, b, b)) == once
    assert content(merged(tmp_path / "thrice.db", a, b, tmp_path / "twice.db", a)) == once


def test_round_trips_add_nothing(tmp_path: Path, sides: tuple[Path, Path]) -> None:
    """D78: from A into B and back into A, and by an export."""
    a, b = sides
    count = len(rows(merged(b, a)))
    merged(a, b)
    assert content(merged(b, a)) == content(a)
    assert len(rows(b)) == count == 4
    with Store.open(a) as store:
        export_database(store, tmp_path / "out.jsonl")
        assert add_file(store, tmp_path / "out.jsonl") == Added(new=0, known=4)
