"""Intervals of paired ratios: that they hold what they promise, and what a final decides by them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tuner_fakes import FAMILY, GPU, FakeBench, landscape, problem, run

from flashtune.codegen.plan.config import Config
from flashtune.tuned_db.policy.ranked import ALIKE
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.search.problem_search import FINALISTS
from flashtune.tuner.trial.intervals import FEWEST_ROUNDS, beaten, interval_place, paired, paired_ratio, ratios_to

PROBLEM = problem()
DEFAULT = FAMILY.default(PROBLEM.spec, GPU)


# Conover, Practical Nonparametric Statistics, table of sign-test intervals: places from 1, so 8 of 25 is 7 before it.
@pytest.mark.parametrize(
    ("count", "place"), [(5, None), (6, 0), (8, 0), (9, 1), (12, 2), (15, 3), (20, 5), (25, 7), (50, 17), (100, 39)]
)
def test_places_are_those_of_the_binomial_tables(count: int, place: int | None) -> None:
    assert interval_place(count) == place


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=40))
def test_an_interval_lies_around_its_median_and_within_the_ratios(ratios: list[float]) -> None:
    found = paired(ratios, [1.0] * len(ratios))
    assert found.rounds == len(ratios)
    if len(ratios) < FEWEST_ROUNDS:
        assert (found.low, found.high, found.told_apart) == (None, None, False)
    else:
        assert found.low is not None
        assert found.high is not None
        assert min(ratios) <= found.low <= found.median <= found.high <= max(ratios)


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from([6, 9, 17, 25]))
def test_a_change_of_unit_and_drift_change_nothing(seed: int, count: int) -> None:
    draw = random.Random(seed)
    ours, other, drift = ([draw.uniform(0.9, 1.1) for _ in range(count)] for _ in range(3))
    found = paired(ours, other)
    shifted = ([1e3 * time * factor for time, factor in zip(each, drift, strict=True)] for each in (ours, other))
    moved = paired(*shifted)
    assert moved.median == pytest.approx(found.median)
    assert (moved.low, moved.high) == pytest.approx((found.low, found.high))


@pytest.mark.parametrize("count", [9, 25])
@pytest.mark.parametrize("shape", ["gauss", "outliers", "skewed"])
def test_intervals_hold_the_truth_at_least_as_often_as_they_say(count: int, shape: str) -> None:
    """2000 finals of each: 95 % would be 1900, less three standard deviations 1870."""
    draw = random.Random(count)

    def one() -> float:
        if shape == "gauss":
            return draw.gauss(1.0, 0.01)
        if shape == "skewed":
            return 1.0 + draw.expovariate(100.0)
        return draw.gauss(1.0, 0.01) + (0.5 if draw.random() < 0.1 else 0.0)

    missed = sum(paired([one() for _ in range(count)], [one() for _ in range(count)]).told_apart for _ in range(2000))
    assert missed <= 130
    assert missed >= 20, "an interval that is far too wide would tell nothing"


def test_one_outlier_in_nine_rounds_moves_no_end() -> None:
    other = [1.0] * 9
    calm = paired([0.90 + number / 1000 for number in range(9)], other)
    burst = paired([*(0.90 + number / 1000 for number in range(8)), 5.0], other)
    assert (burst.low, burst.high) == (calm.low, calm.high)


def test_paired_ratios_cancel_drift() -> None:
    drift = [1.0, 1.3, 0.9, 2.0, 1.1]
    assert paired_ratio([0.8 * each for each in drift], drift) == pytest.approx(0.8)
    assert ratios_to({"a": [0.8 * each for each in drift], "default": drift}, "default")["default"] == 1


def final_rows(path: Path) -> dict[Config, Measurement]:
    with Store.open(path, readonly=True) as store:
        return {each.config: each for each in store.measurements(problem=PROBLEM, stage="final")}


def test_the_interval_of_a_final_is_stored(tmp_path: Path) -> None:
    draw = random.Random(1)
    bench = FakeBench(final=lambda config: landscape(config) * draw.gauss(1, 0.003))
    report = run(tmp_path / "tuned.db", [PROBLEM], 12, bench=bench)
    rows = final_rows(tmp_path / "tuned.db")
    assert len(rows) == 12
    for config, row in rows.items():
        assert row.rounds == 9
        assert row.paired_ratio == pytest.approx(landscape(config) / landscape(DEFAULT), rel=0.01)
        assert row.ratio == row.paired_ratio
        assert row.ratio_low is not None
        assert row.ratio_high is not None
        assert row.ratio_low <= row.paired_ratio <= row.ratio_high
        assert (row.ratio_low == row.ratio_high) == (config == DEFAULT)
    (told,) = report.rows
    winner = rows[told.config] if told.config else None
    assert winner is not None
    assert (told.ratio, told.ratio_low, told.ratio_high) == (winner.ratio, winner.ratio_low, winner.ratio_high)


def test_the_previous_winner_takes_part_in_the_next_final(tmp_path: Path) -> None:
    """Though enough others were faster when they were measured one by one."""
    path = tmp_path / "tuned.db"
    first = run(path, [PROBLEM], 10).rows[0].config
    assert first is not None
    assert first != DEFAULT
    bench = FakeBench(lambda config: landscape(config) / (1 if config == DEFAULT else 4), final=landscape)
    (row,) = run(path, [PROBLEM], 40, bench=bench).rows
    asked = bench.finalists[PROBLEM]
    assert asked[:2] == [DEFAULT, first]
    assert len(asked) == FINALISTS + 2
    assert landscape(row.config) <= min(map(landscape, asked)) * (1 + ALIKE)


def test_equal_configs_give_the_same_winner_each_time(tmp_path: Path) -> None:
    """D66. Nine equally fast configs and a slower default, each final with other noise of 1 %."""
    winners, spreads = set(), []
    for number in range(20):
        draw = random.Random(number)

        def noisy(config: Config, draw: random.Random = draw) -> float:
            return (1.2e-3 if config == DEFAULT else 1e-3) * draw.gauss(1, 0.01)

        path = tmp_path / f"{number}.db"
        bench = FakeBench(lambda config: 1.2e-3 if config == DEFAULT else 1e-3, final=noisy)
        (row,) = run(path, [PROBLEM], 9, bench=bench).rows
        winners.add(row.config)
        assert 5 < row.tied <= 8
        spreads += [(each.q20_us, each.q80_us) for each in final_rows(path).values()]
    assert len(winners) == 1
    assert all(q20 and q80 and 0 < q80 - q20 < 0.1 * q80 for q20, q80 in spreads)


def test_nothing_that_is_as_fast_as_the_default_replaces_it_more_often_than_chance(tmp_path: Path) -> None:
    """Eight candidates, each with 2.5 % to look faster; they share the default's luck, so fewer than 1 in 5 finals."""
    replaced = 0
    for number in range(20):
        draw = random.Random(number)
        bench = FakeBench(lambda config: 1e-3, final=lambda config, draw=draw: 1e-3 * draw.gauss(1, 0.01))
        (row,) = run(tmp_path / f"{number}.db", [PROBLEM], 9, bench=bench).rows
        replaced += row.config != DEFAULT
    assert replaced <= 4


def test_what_is_surely_slower_by_more_than_the_margin_is_beaten() -> None:
    draw = random.Random(3)

    def times(ratio: float) -> list[float]:
        return [ratio * draw.gauss(1, 0.002) for _ in range(12)]

    rounds = {"best": times(1.0), "as fast": times(1.002), "slower": times(1.02), "few": times(1.5)[:5]}
    assert beaten(rounds, 0.005) == {"slower"}
    assert beaten(rounds, 0.05) == set()
