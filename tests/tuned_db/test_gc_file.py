"""What gc does to a file: it makes it smaller where nobody reads it, and says where it could not."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flashtune.errors import StoreError
from flashtune.tuned_db.backends.sqlite import opening
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.store.store import Store
from flashtune.tuned_db.upkeep import gc
from flashtune.tuned_db.upkeep.gc import collect

Make = Callable[..., Any]


def test_a_file_shrinks_and_forgets_configs_that_no_row_is_about(
    store: Store, path: Path, prediction: Make, searched: Callable[..., list[Measurement]], pair: Make
) -> None:
    guess = prediction(config=pair(block=64, stages=2))
    store.record_prediction(guess)
    for number in range(60):
        store.record_all(searched(f"{number}", message="x" * 1000))
    found = collect(store, days=0)
    assert found.removed == 360
    assert found.note == ""
    assert found.bytes_after < found.bytes_before / 2
    assert found.bytes_after == path.stat().st_size
    with closing(sqlite3.connect(path)) as plain:
        assert plain.execute("SELECT count(*) FROM variant").fetchone() == (3,)  # of finals, and what is predicted
        assert plain.execute("SELECT count(*) FROM sqlite_master WHERE name LIKE 'gc%'").fetchone() == (0,)
        assert plain.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert store.predictions() == [guess]


def test_a_file_that_is_in_use_is_collected_and_not_made_smaller(
    store: Store, path: Path, searched: Callable[..., list[Measurement]]
) -> None:
    store.record_all(searched())
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM measurement").fetchone()
        found = collect(store, days=0, timeout=0.1)
        assert reader.execute("SELECT count(*) FROM measurement").fetchone() == (8,), "a reader sees one moment"
    assert found.removed == 6
    assert "is being read by another process" in found.note
    assert store.count() == 2


def test_ctrl_c_while_the_file_shrinks_says_what_was_removed(
    store: Store, searched: Callable[..., list[Measurement]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> sqlite3.Connection:
        raise KeyboardInterrupt

    store.record_all(searched())
    monkeypatch.setattr(gc, "connect", interrupted)
    found = collect(store, days=0)
    assert (found.removed, store.count()) == (6, 2)
    assert "interrupted" in found.note


def test_without_a_log_a_reader_is_waited_for_once(
    path: Path, searched: Callable[..., list[Measurement]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network mount: each page of more than the cache holds waited for the reader, as long as is allowed."""
    monkeypatch.setattr(opening, "on_network", lambda path: True)
    store = Store.open(path, timeout=0.2)
    store.record_all(searched())
    many = [row for number in range(500) for row in searched(f"{number}", message="x" * 1000)]
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM measurement").fetchone()
        began = time.monotonic()
        for write in (lambda: store.add(many), lambda: collect(store, days=0)):
            with pytest.raises(StoreError, match="locked by another process"):
                write()
        assert time.monotonic() - began < 90, "a wait for each page takes minutes"
    assert store.count() == 8
