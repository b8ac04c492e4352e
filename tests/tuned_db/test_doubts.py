"""What `flashtune db check` names: by reason, with where it came from, and the command that takes it out."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flashtune.cli.main import main
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.tuned_db.records.dates import latest
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.sharing.merge import add_database
from flashtune.tuned_db.store.store import Store
from flashtune.tuned_db.upkeep.doubts import AHEAD, CONTRADICTED, IMPOSSIBLE, LONELY, doubts
from flashtune.tuned_db.upkeep.health import inspect_rows

Make = Callable[..., Any]
WRONG = {"status": "wrong", "median_us": None, "baseline_us": None}
POTATO = {"gpu_key": "7.5/potato", "gpu_name": "potato"}


def reasons(*rows: Measurement, others: tuple[Measurement, ...] = ()) -> list[str]:
    return [each.reason for each in doubts(rows, others, latest())]


def test_sound_rows_are_in_no_doubt(measurement: Make, pair: Make) -> None:
    """Nor is a failure of one's own card, of what nobody found right there, or of a time limit."""
    failed = measurement(config=pair(block=16, stages=1), **WRONG)
    slow = measurement(status="timeout", median_us=None, baseline_us=None)
    assert reasons(measurement(), failed, slow) == []


def test_each_doubt_has_its_reason(measurement: Make) -> None:
    """M9, M10 and M11."""
    right = measurement(session="right")
    assert reasons(measurement(created="9998-01-01T00:00:00.000Z")) == [AHEAD]
    assert reasons(measurement(median_us=0.001)) == [IMPOSSIBLE]
    assert reasons(right, measurement(session="wrong", **WRONG)) == [CONTRADICTED]
    assert reasons(measurement(session="wrong", **WRONG), others=(right,)) == [CONTRADICTED]
    assert reasons(right, measurement(session="right", **WRONG)) == [], "it contradicts itself alone"
    assert reasons(right, measurement(**POTATO, **WRONG)) == [LONELY]
    assert reasons(measurement(**POTATO), measurement(**POTATO, session="wrong", **WRONG)) == [CONTRADICTED]
    assert reasons(measurement(median_us=0.001, created="9998-01-01T00:00:00.000Z")) == [AHEAD, IMPOSSIBLE]


def test_what_ships_speaks_too(store: Store, ship: Make, measurement: Make) -> None:
    ship(measurement(session="shipped"))
    store.record(measurement(session="wrong", **WRONG))
    content = inspect_rows(store)
    assert [(each.reason, each.why) for each in content.doubts] == [
        (CONTRADICTED, "wrong, and session shipped found it right")
    ]


@pytest.fixture
def poisoned(store: Store, path: Path, tmp_path: Path, measurement: Make) -> Path:
    """Own rows, one of which is odd, and 25 that a merge brought."""
    store.add([measurement(), measurement(session="o w n", median_us=0.001)])
    with Store.open(tmp_path / "poison.db") as poison:
        poison.add(measurement(session="evil", **POTATO, **WRONG) for _ in range(25))
    add_database(store, tmp_path / "poison.db")
    return path


def test_check_names_the_first_and_says_what_to_do(poisoned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashtune.cli.db.keep._first_gpu", lambda: gpu_by_alias("h200"))

    def run(*words: str) -> list[str]:
        said = CliRunner().invoke(main, [*words, "--db", str(poisoned)])
        assert said.exit_code == 0, said.output
        return said.stdout.splitlines()

    lines = run("db", "check")
    assert f"doubtful      1 {IMPOSSIBLE}" in lines or f"doubtful      25 {LONELY}" in lines
    assert sum("session evil, arrival 1: wrong on potato" in each for each in lines) in (19, 20)
    assert "              and 6 more" in lines
    commands = [each.split(" of them: flashtune ")[1] for each in lines if "to take out" in each]
    assert len(commands) == 2
    for each in commands:
        words = shlex.split(each)
        run(*words[: words.index("--db")])
    assert "doubtful      none" in run("db", "check")
    with Store.open(poisoned) as store:
        assert [each.session for each in store.measurements()] == ["01935f6e-0000-7000-8000-000000000000"]
