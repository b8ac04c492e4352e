"""The sensors of a real card, and its A/A test."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashtune.codegen.gpu.devices import unit_uuid
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.bench.timer import MAX_ROUNDS
from flashtune.tuner.commands.noise import noise
from flashtune.tuner.trial.intervals import FEWEST_ROUNDS
from flashtune.tuner.trial.sensors import Sensors
from flashtune.tuner.tune.session import tune

pytestmark = pytest.mark.gpu

PROBLEM = Problem(
    dtype="float16", head_dim=64, batch=4, seqlen_q=2048, seqlen_k=2048, num_heads=16, num_heads_kv=16, causal=True
)


def test_the_card_says_how_it_is() -> None:
    sensors = Sensors(unit_uuid(0))
    if sensors.note:
        pytest.skip(sensors.note)
    said = sensors.read()
    assert said.clock_mhz is None or 100 < said.clock_mhz < 4000
    assert said.power_w is None or 5 < said.power_w < 2000
    assert said.temperature_c is None or 0 < said.temperature_c < 110


def test_one_config_seldom_wins_against_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "none.db"))
    found, _ = noise(PROBLEM, finals=20)
    assert {each.rounds for each in found.ratios} <= set(range(FEWEST_ROUNDS, MAX_ROUNDS + 1))
    assert found.false_wins <= found.expected_most, [(each.low, each.high) for each in found.ratios]
    assert 0 < found.smallest_difference < 0.05


def test_two_tunings_agree_within_their_intervals(tmp_path: Path) -> None:
    rows = [tune([PROBLEM], database=tmp_path / f"{name}.db", budget="24").rows[0] for name in "ab"]
    for name, row in zip("ab", rows, strict=True):
        with Store.open(tmp_path / f"{name}.db", readonly=True) as store:
            finals = store.measurements(problem=PROBLEM, stage="final", status="ok")
        assert all(each.ratio_low and each.ratio_high and each.rounds for each in finals)
        assert row.ratio_high is not None
        assert row.ratio_high <= 1
    low = max(row.ratio_low or 0 for row in rows)
    high = min(row.ratio_high or 2 for row in rows)
    assert low <= 1.02 * high
