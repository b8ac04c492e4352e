"""Rows that ship with flashtune, in look-ups."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.tuned_db.exchange.export_file import ExportHeader, read_lines
from flashtune.tuned_db.lookup import sources
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]

H100 = gpu_by_alias("h100")

STALE = "5" * 64


def test_rows_of_the_user_win_over_those_that_ship(
    look: Make, store: Store, measurement: Make, pair: Make, ship: Make, problem: Make
) -> None:
    shipped = measurement(median_us=10.0)
    ship(shipped)
    choice = look()
    assert (choice.level, choice.origin, choice.measurement) == ("exact", "bundled", shipped)
    store.record(measurement(source_digest=STALE))
    assert look().origin == "bundled"
    mine = store.record(measurement(config=pair(block=16, stages=1), median_us=90.0))
    assert (look().origin, look().measurement) == ("user", mine)


def test_a_final_that_ships_comes_before_a_run_of_the_users_that_had_none(
    look: Make, store: Store, measurement: Make, pair: Make, ship: Make
) -> None:
    """A run that was stopped after its first config must not put that in the place of what ships."""
    shipped = measurement(stage="final")
    ship(shipped)
    store.record(measurement(config=pair(block=16, stages=1), stage="measure", median_us=1.0))
    assert (look().origin, look().measurement) == ("bundled", shipped)


def test_what_ships_lends_to_other_chips(look: Make, measurement: Make, ship: Make, path: Path) -> None:
    ship(measurement())
    assert look(gpu=H100).evidence.startswith("borrowed from h200")
    assert not path.exists()


def test_bundled_rows_of_another_version_are_passed_over(
    look: Make, measurement: Make, ship: Make, shipped: Path
) -> None:
    ship(measurement())
    file = shipped / "some.jsonl"
    file.write_bytes(file.read_bytes().replace(b"580.159", b"580.160"))
    sources.bundled.cache_clear()
    assert look().level == "default"


def test_of_bundled_rows_those_that_this_version_can_not_take_are_passed_over(
    look: Make, measurement: Make, ship: Make, shipped: Path, pair: Make
) -> None:
    ship(measurement(median_us=90.0), measurement(config=pair(block=16, stages=1), median_us=50.0))
    file = shipped / "some.jsonl"
    header, *rows = file.read_text().splitlines()
    rows = [row.replace('"median_us":50.0', '"median_us":50.0,"later_field":1') for row in rows] + ["[]"]
    body = "".join(row + "\n" for row in rows)
    digest = hashlib.sha256(body.encode()).hexdigest()
    changed = json.loads(header) | {"rows": len(rows), "digest": digest}
    file.write_text(json.dumps(changed) + "\n" + body)
    sources.bundled.cache_clear()
    choice = look()
    assert (choice.level, choice.measurement.median_us) == ("exact", 90.0)


def test_what_ships_is_read_once_and_only_for_its_capability(
    look: Make, measurement: Make, ship: Make, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counting(path: Path) -> tuple[ExportHeader, Iterator[bytes]]:
        read.append(path)
        return read_lines(path)

    monkeypatch.setattr(sources, "read_lines", counting)
    ship(measurement())
    look(gpu=gpu_by_alias("a100"))
    assert read == []
    for _ in range(3):
        assert look().level == "exact"
    assert len(read) == 1


def test_a_problem_with_values_in_values_is_read_whole(
    measurement: Make, ship: Make, shipped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pattern ended at the first bracket: rows of a newer version were passed over as no measurement at all."""
    ship(measurement())
    (line,) = read_lines(shipped / "some.jsonl")[1]
    newer = line.replace(b'"problem":{', b'"problem":{"features":{"window":[3,"}"]},')
    assert newer != line
    with caplog.at_level("DEBUG", "flashtune"):
        sources.Shipped([newer], "9.0a")
    (record,) = caplog.records
    assert record.getMessage().startswith("passed over: Problem has no field features. Known: dtype,")
