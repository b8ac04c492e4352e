"""Who measures what: how problems and trials are shared out, and runs on two fake devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuner_fakes import FakeBench, problem, run

from flashtune.codegen.plan.config import Config
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.run.deal import deal, trial_seconds, trials_each
from flashtune.tuner.trial.outcome import DeviceLostError, Outcome

PROBLEM = problem()
COSTS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=40)


@given(COSTS, st.integers(1, 8))
def test_all_is_dealt_once_and_no_hand_is_heavier_than_it_must_be(costs: list[float], hands: int) -> None:
    dealt = deal(costs, hands)
    assert sorted(item for hand in dealt for item in hand) == list(range(len(costs)))
    loads = [sum(costs[item] for item in hand) for hand in dealt]
    assert max(loads) <= sum(costs) / hands + max(costs) + 1e-9
    assert dealt == deal(costs, hands)


def test_equal_costs_are_dealt_evenly() -> None:
    assert [len(hand) for hand in deal([1.0] * 8, 2)] == [4, 4]


@given(st.integers(1, 10**6), st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 40))
def test_what_closed_problems_left_goes_to_the_open_ones(budget: int, closed: list[int], still_open: int) -> None:
    each = trials_each(budget, closed, still_open)
    assert each * still_open >= budget - sum(closed) > (each - 1) * still_open


@pytest.mark.parametrize(("launch", "launches"), [(1e-6, 45), (1e-3, 25), (0.01, 10), (1.0, 10)])
def test_a_trial_takes_as_many_launches_as_its_time_allows(launch: float, launches: int) -> None:
    assert trial_seconds(launch) == pytest.approx(0.03 + launches * launch)


# Runs on two fake devices


def test_a_problem_stays_on_one_device_and_rows_name_it(path: Path) -> None:
    problems = [problem(512), problem(1024), problem(2048), problem(4096)]
    benches = [FakeBench(unit="GPU-a"), FakeBench(unit="GPU-b")]
    report = run(path, problems, 40, benches=benches)
    assert {row.tried for row in report.rows} == {10}
    homes = [{each for each, _ in bench.attempts} for bench in benches]
    assert [len(each) for each in homes] == [2, 2]
    assert not homes[0] & homes[1]
    assert [set(bench.finalists) for bench in benches] == homes
    with Store.open(path, readonly=True) as store:
        units = {(each.problem, each.unit) for each in store.measurements()}
    assert units == {(each, bench.uuid) for bench, home in zip(benches, homes, strict=True) for each in home}


def test_problems_of_a_lost_device_go_on_on_the_other(path: Path) -> None:
    def outcome(config: Config, number: int) -> Outcome | None:
        if number > 3:
            raise DeviceLostError("the card fell off the bus")
        return None

    problems = [problem(512), problem(1024)]
    benches = [FakeBench(unit="GPU-a", outcome=outcome), FakeBench(unit="GPU-b")]
    report = run(path, problems, 60, benches=benches)
    assert not report.stopped
    assert "GPU-a was given up" in report.note
    assert "fell off the bus" in report.note
    assert report.tried == 60
    assert set(benches[1].finalists) == set(problems)
    assert all(row.config is not None for row in report.rows)


def test_progress_names_the_device_where_there_are_several(path: Path) -> None:
    said: list[str] = []
    benches = [FakeBench(unit="GPU-a"), FakeBench(unit="GPU-b")]
    run(path, [PROBLEM, problem(512)], 8, benches=benches, progress=lambda progress: said.append(progress.text))
    assert sum(text.startswith("GPU-a: ") for text in said) == sum(text.startswith("GPU-b: ") for text in said) > 4
    said.clear()
    run(path, [PROBLEM], 8, progress=lambda progress: said.append(progress.text))
    assert not any(text.startswith("GPU") for text in said)
