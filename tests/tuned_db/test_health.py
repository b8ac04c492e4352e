"""What `check` says: of the file, of its rows, and of what they do for a GPU."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.errors import DatabaseDamaged, DatabaseForeign, StoreError
from flashtune.tuned_db.records.parse import REASONS
from flashtune.tuned_db.schema.version import SCHEMA_VERSION
from flashtune.tuned_db.store.store import Store
from flashtune.tuned_db.upkeep import health as keeping
from flashtune.tuned_db.upkeep.health import inspect_file, inspect_rows, serves

Make = Callable[..., Any]
H200, H100, A100 = (gpu_by_alias(each) for each in ("h200", "h100", "a100"))


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as plain, plain:
        for each in statements:
            plain.execute(each)


class TestFile:
    def test_a_sound_one(self, store: Store, path: Path, measurement: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        store.record(measurement())
        before = path.read_bytes()
        health = inspect_file(path)
        assert (health.schema, health.journal, health.network, health.faults) == (SCHEMA_VERSION, "wal", False, ())
        assert path.read_bytes() == before
        assert [each.name for each in path.parent.iterdir()] == ["tuned.db"]
        monkeypatch.setattr(keeping, "on_network", lambda _: True)
        assert inspect_file(path).network is True
        keeping.back_up(path, path.with_name("copy.db"))
        assert inspect_file(path.with_name("copy.db")).journal == "rollback"

    def test_while_another_writes(self, store: Store, path: Path) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            other.execute("DELETE FROM origin")
            assert inspect_file(path, timeout=0.1).faults == ()

    def test_pages_that_are_damaged(self, store: Store, path: Path, measurement: Make) -> None:
        store.record_all([measurement(message="x" * 500) for _ in range(100)])
        data = bytearray(path.read_bytes())
        data[-20_000:] = random.Random(3).randbytes(20_000)
        path.write_bytes(data)
        assert inspect_file(path).faults
        assert path.read_bytes() == data

    def test_an_index_that_misses_rows(self, store: Store, path: Path, measurement: Make) -> None:
        """Reads by that index would not find them: such a file opens, and must not pass for sound."""
        store.record_all([measurement(session="first") for _ in range(3)])
        query = "SELECT sql FROM sqlite_master WHERE name = 'ix_measurement_session'"
        with closing(sqlite3.connect(path)) as plain:
            (whole,) = plain.execute(query).fetchone()
        with closing(sqlite3.connect(path)) as plain, plain:
            plain.execute("PRAGMA writable_schema = ON")
            partial = f"{whole} WHERE session = 'first'"
            plain.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'ix_measurement_session'", (partial,))
        change(path, "UPDATE measurement SET session = 'second' WHERE rowid < 3")
        with closing(sqlite3.connect(path)) as plain, plain:
            plain.execute("PRAGMA writable_schema = ON")
            plain.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'ix_measurement_session'", (whole,))
        assert any("missing from index" in each for each in inspect_file(path).faults)

    def test_rows_that_point_nowhere(self, store: Store, path: Path, measurement: Make) -> None:
        store.record_all([measurement() for _ in range(3)])
        change(path, "DELETE FROM device")
        assert inspect_file(path).faults == ("3 rows of measurement point to a device that is gone",)

    def test_what_is_no_tuning_database(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="does not exist"):
            inspect_file(tmp_path / "none.db")
        (tmp_path / "text.db").write_text("hello" * 100)
        with pytest.raises(DatabaseDamaged, match="not an SQLite database"):
            inspect_file(tmp_path / "text.db")
        change(tmp_path / "songs.db", "CREATE TABLE songs (title TEXT)")
        with pytest.raises(DatabaseForeign):
            inspect_file(tmp_path / "songs.db")

    def test_a_lock_is_no_damage(
        self, store: Store, path: Path, locked: Callable[[Path], AbstractContextManager[None]]
    ) -> None:
        with locked(path), pytest.raises(StoreError, match="locked by another process"):
            inspect_file(path, timeout=0.1)


class TestRows:
    def test_by_source_and_gpu(
        self, store: Store, measurement: Make, pair: Make, problem: Make, templates: dict[str, str]
    ) -> None:
        store.record_all([measurement(config=pair(block=block, stages=1)) for block in (16, 32, 64)])
        store.record(measurement(source_digest="ab" * 32))
        store.record(measurement(source_digest="", status="skipped", median_us=None))
        store.record(measurement(config=pair(block=256, stages=3), source_digest="cd" * 32, status="compile_error"))
        store.record(measurement(gpu_key=A100.key, gpu_name=A100.name))
        store.record(measurement(problem=problem(head_dim=256), source_digest="ef" * 32, gpu_key="7.7/odd"))
        found = inspect_rows(store)
        assert found.measurements == 8
        assert list(found.sources) == sorted(found.sources)
        h200 = found.sources[H200.key]
        assert (h200.gpu_name, h200.rows) == (H200.name, 6)
        assert (h200.current, h200.older, h200.refused, h200.none) == (3, 1, 1, 1)
        assert found.sources[A100.key].current == 1
        assert found.sources["7.7/odd"].refused == 1
        templates["pair.cu.jinja"] += "changed\n"
        keeping.source_digest.cache_clear()
        again = inspect_rows(store).sources[H200.key]
        assert (again.current, again.older) == (0, 4)
        assert len(store.measurements()) == 8

    def test_each_row_that_cannot_be_read_has_its_reason(
        self, store: Store, path: Path, measurement: Make, prediction: Make
    ) -> None:
        good, bad, worse = store.record_all([measurement() for _ in range(3)])
        store.record_prediction(prediction())
        change(
            path,
            f"UPDATE measurement SET status = 'perfect' WHERE id = '{bad.id}'",
            f"UPDATE measurement SET registers = -1 WHERE id = '{worse.id}'",
            "UPDATE prediction SET rank = 0",
        )
        found = inspect_rows(store)
        assert found.measurements == 1
        assert found.unreadable.rows == 3
        reasons = sorted(found.unreadable.reasons)
        assert any(each.startswith(f"{bad.id}: status='perfect' is not known") for each in reasons)
        assert any(each.startswith(f"{worse.id}: registers=-1") for each in reasons)
        assert reasons[-1].startswith("prediction: rank=0")
        assert good.id not in str(reasons)

    def test_a_hostile_id_is_shown_as_text(self, store: Store, path: Path, measurement: Make) -> None:
        store.record(measurement())
        change(path, "UPDATE measurement SET id = 'a' || char(27) || '[2J' || char(10) || hex(zeroblob(5000))")
        (reason,) = inspect_rows(store).unreadable.reasons
        assert reason.isprintable()
        assert len(reason) < 300

    def test_reasons_of_many_are_not_all_kept(self, store: Store, path: Path, measurement: Make) -> None:
        store.record_all([measurement() for _ in range(REASONS + 20)])
        change(path, "UPDATE measurement SET status = 'perfect'")
        unreadable = inspect_rows(store).unreadable
        assert (unreadable.rows, len(unreadable.reasons)) == (REASONS + 20, REASONS)


class TestService:
    def test_levels(self, store: Store, measurement: Make, problem: Make, prediction: Make) -> None:
        store.record(measurement())
        store.record(measurement(problem=problem(batch=1), source_digest="ab" * 32))
        store.record_prediction(prediction(problem=problem(batch=64, head_dim=128)))
        assert serves(store, H200).levels == Counter(exact=1, older_source=1, predicted=1)
        assert serves(store, H200).why == ""
        assert serves(store, H100).levels == Counter(borrowed=2)

    def test_entries_for_another_gpu_alone(self, store: Store, measurement: Make) -> None:
        """D80: why there is no hit."""
        store.record(measurement())
        found = serves(store, A100)
        assert not found.levels
        assert found.others == (H200.name,)
        assert "it holds entries for h200 only" in found.why

    def test_nothing_that_succeeded(self, store: Store, measurement: Make) -> None:
        assert "no measurement that succeeded" in serves(store, H200).why
        store.record(measurement(status="timeout", median_us=None))
        assert "no measurement that succeeded" in serves(store, H200).why

    def test_what_cannot_be_used(self, store: Store, measurement: Make, pair: Make) -> None:
        """Of that GPU, but of a config that its family refuses today."""
        store.record(measurement(config=pair(block=256, stages=3)))
        assert "can't be used" in serves(store, H200).why
