"""Whole runs over times and results that must not be believed (cases D59, D64 and D67)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tuner_fakes import FAMILY, GPU, FakeBench, landscape, problem, run

from flashtune.codegen.plan.config import Config
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.trial.outcome import Outcome
from flashtune.tuner.trial.timing import Timing

PROBLEM = problem()
DEFAULT = FAMILY.default(PROBLEM.spec, GPU)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1e-6, 0.0, None], ids=str)
def test_a_time_that_is_no_time_is_a_failure_and_never_best(tmp_path: Path, bad: Any) -> None:
    """D67."""
    broken: list[Config] = []

    def outcome(config: Config, number: int) -> Outcome | None:
        if number not in (2, 5):
            return None
        broken.append(config)
        timing = None if bad is None else Timing(bad, bad, bad, 20)
        return Outcome(status="ok", stage="measure", timing=timing)

    bench = FakeBench(outcome=outcome)
    (row,) = run(tmp_path / "tuned.db", [PROBLEM], 12, bench=bench).rows
    assert len(broken) == 2
    assert row.config not in broken
    assert row.seconds is not None
    assert 0 < row.seconds < 1
    assert not set(broken) & set(bench.finalists[PROBLEM])
    with Store.open(tmp_path / "tuned.db", readonly=True) as store:
        assert {each.config for each in store.measurements(status="failed")} == set(broken)
        assert all(each.median_us and each.median_us > 0 for each in store.measurements(status="ok"))
        winner = store.winner(PROBLEM, GPU.key)
    assert winner is not None
    assert winner.config == row.config


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e-6, 0.0], ids=str)
def test_a_final_without_times_of_a_config_says_nothing_of_it(tmp_path: Path, bad: float) -> None:
    bench = FakeBench(final=lambda config: landscape(config) if config == DEFAULT else bad)
    (row,) = run(tmp_path / "tuned.db", [PROBLEM], 6, bench=bench).rows
    assert (row.config, row.ratio) == (DEFAULT, 1)
    with Store.open(tmp_path / "tuned.db", readonly=True) as store:
        finals = store.measurements(stage="final")
    assert [each.config for each in finals if each.status == "ok"] == [DEFAULT]
    assert [each.median_us for each in finals if each.status == "failed"] == [None] * 5


def test_a_default_without_a_time_is_no_baseline(tmp_path: Path) -> None:
    bench = FakeBench(final=lambda config: math.nan if config == DEFAULT else landscape(config))
    (row,) = run(tmp_path / "tuned.db", [PROBLEM], 6, bench=bench).rows
    assert row.config != DEFAULT
    assert row.ratio is None


def test_fast_wrong_results_are_stored_as_wrong_and_never_win(tmp_path: Path) -> None:
    """D59. What makes a result wrong is in test_simulated_device.py; here two that would be 100 times as fast."""
    liars: list[Config] = []

    def outcome(config: Config, number: int) -> Outcome | None:
        if number in (3, 4):
            liars.append(config)
            seconds = 1e-5
            timing = Timing(seconds, seconds, seconds, 20)
            return Outcome(status="wrong", stage="measure", timing=timing, message="the last column is wrong")
        return None

    path = tmp_path / "tuned.db"
    for _ in range(2):
        bench = FakeBench(outcome=outcome)
        (row,) = run(path, [PROBLEM], 8, bench=bench).rows
        assert row.config not in liars
        assert not set(liars) & set(bench.finalists[PROBLEM])
    with Store.open(path, readonly=True) as store:
        wrong = store.measurements(status="wrong")
        assert {each.config for each in wrong} == set(liars)
        assert {each.message for each in wrong} == {"the last column is wrong"}
        assert {each[:2] for each in store.rejected(PROBLEM.spec, GPU.key)} == {
            (each.family, each.key) for each in liars
        }
