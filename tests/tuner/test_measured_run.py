"""Measured runs on a fake device: what is asked, stored and chosen."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tuner_fakes import FAMILY, GPU, FakeBench, FakeBuilder, landscape, problem, run, stored

from flashtune.codegen.families.registry import default_config
from flashtune.codegen.plan.config import Config
from flashtune.tuned_db.policy.ranked import ALIKE
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.results.report import Progress
from flashtune.tuner.search.space import make_space
from flashtune.tuner.trial.outcome import Outcome

PROBLEM = problem()
DEFAULT = FAMILY.default(PROBLEM.spec, GPU)


def test_the_default_is_tried_first_and_every_outcome_is_stored(path: Path) -> None:
    bench = FakeBench()
    report = run(path, [PROBLEM], 12, bench=bench)
    asked = [config for _, config in bench.attempts]
    assert asked[0] == DEFAULT
    assert len(set(asked)) == 12
    assert Counter(stored(path, stage="measure")) == Counter(asked)
    assert report.measured
    assert report.tried == 12


def test_progress_goes_from_nothing_to_all_of_the_budget(path: Path) -> None:
    """A hole in the tests: what is left could be told as what is done."""
    told: list[Progress] = []
    run(path, [PROBLEM, problem(512)], 16, progress=told.append)
    parts = [each.done for each in told]
    assert parts == sorted(parts)
    assert (parts[0], parts[-1]) == (0.0, 1.0)
    assert {each / 16 for each in range(17)} == set(parts)
    finished = [each.problems_done for each in told]
    assert finished == sorted(finished)
    assert {each.problems for each in told if each.problems_done} == {2}


def test_what_is_reported_is_what_a_look_up_will_find(path: Path) -> None:
    report = run(path, [PROBLEM], 30)
    (row,) = report.rows
    with Store.open(path, readonly=True) as store:
        winner = store.winner(PROBLEM, GPU.key)
    assert winner is not None
    assert row.config == winner.config
    assert row.ratio is not None
    assert row.ratio < 1
    assert row.next_ratio is not None
    assert row.next_ratio >= 1


def test_a_search_of_a_fifth_of_the_space_comes_within_three_percent_of_its_best(path: Path) -> None:
    space = make_space(PROBLEM, GPU, FAMILY)
    best = min(landscape(config) for config in space.configs)
    (row,) = run(path, [PROBLEM], len(space) // 5).rows
    assert row.seconds is not None
    assert row.seconds <= 1.03 * best


def test_candidates_are_timed_in_turns_with_the_default(path: Path) -> None:
    """While the card slows down by half, and speeds up again, the search is the one of a steady card."""
    steady, drifting = FakeBench(), FakeBench()
    drifting.drift = lambda number: 1 + number % 7 / 12
    run(path, [PROBLEM], 30, bench=steady)
    run(path.with_name("drifting.db"), [PROBLEM], 30, bench=drifting)
    assert drifting.attempts == steady.attempts
    assert set(drifting.finalists[PROBLEM]) == set(steady.finalists[PROBLEM])
    assert drifting.defaults == [None] + 29 * [default_config(PROBLEM, GPU)]
    with Store.open(path, readonly=True) as store:
        rows = store.measurements(problem=PROBLEM, stage="measure")
    ratios = [steady.seconds(each.config) / steady.seconds(default_config(PROBLEM, GPU)) for each in rows[1:]]
    assert [each.ratio for each in rows[1:]] == pytest.approx(ratios)
    assert [each.rounds for each in rows] == [None] + 29 * [20]


def test_running_again_repeats_nothing_and_goes_on(path: Path) -> None:
    first, second = FakeBench(), FakeBench()
    run(path, [PROBLEM], 10, bench=first)
    report = run(path, [PROBLEM], 10, bench=second)
    tried = [config for _, config in first.attempts + second.attempts]
    assert len(tried) == len(set(tried)) == 20
    assert report.rows[0].known == 10
    assert report.rows[0].tried == 10


def test_two_runs_with_one_seed_ask_the_same(tmp_path: Path) -> None:
    benches = [FakeBench(), FakeBench()]
    for number, bench in enumerate(benches):
        run(tmp_path / f"{number}.db", [PROBLEM], 40, bench=bench, seed=7)
    assert benches[0].attempts == benches[1].attempts


def test_trials_are_shared_evenly_over_problems(path: Path) -> None:
    problems = [problem(512), problem(1024), problem(2048, causal=True)]
    bench = FakeBench()
    run(path, problems, 12, bench=bench)
    assert Counter(each for each, _ in bench.attempts) == dict.fromkeys(problems, 4)


def test_winners_of_a_near_problem_are_tried_right_behind_the_default(path: Path) -> None:
    (row,) = run(path, [problem(512)], 30).rows
    bench = FakeBench()
    run(path, [PROBLEM], 2, bench=bench)
    assert [config for _, config in bench.attempts] == [DEFAULT, row.config]


def test_finals_decide_and_hold_the_default(path: Path) -> None:
    lucky: list[Config] = []

    def outcome(config: Config, number: int) -> Outcome | None:
        if number == 4:
            lucky.append(config)
        return None

    def seconds(config: Config) -> float:
        return 1e-5 if config in lucky else landscape(config)

    bench = FakeBench(seconds, outcome=outcome, final=landscape)
    report = run(path, [PROBLEM], 12, bench=bench)
    finalists = bench.finalists[PROBLEM]
    assert finalists[0] == DEFAULT
    assert lucky[0] in finalists
    assert landscape(report.rows[0].config) <= min(map(landscape, finalists)) * (1 + ALIKE)
    with Store.open(path, readonly=True) as store:
        finals = store.measurements(problem=PROBLEM, stage="final")
    assert {each.config for each in finals} == set(finalists)
    assert all(each.baseline_us == pytest.approx(landscape(DEFAULT) * 1e6) for each in finals)


def test_nothing_slower_than_the_default_wins(path: Path) -> None:
    bench = FakeBench(lambda config: 1e-3 if config == DEFAULT else 2e-3)
    (row,) = run(path, [PROBLEM], 12, bench=bench).rows
    assert row.config == DEFAULT
    assert row.ratio == 1


def test_compiler_facts_are_stored_with_the_measurement(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_AUTHOR", "Ada")
    run(path, [PROBLEM], 1, builder=FakeBuilder())
    with Store.open(path, readonly=True) as store:
        row = store.measurements(problem=PROBLEM, stage="measure")[0]
    assert (row.registers, row.spill_bytes, row.nvrtc) == (96, 0, "13.5")
    assert (row.unit, row.driver, row.cupy, row.clock_mhz) == ("GPU-fake", "580.1", "14.0", 1980.0)
    assert (row.power_w, row.temperature_c, row.throttle, row.contended) == (612.5, 61.0, "power_cap", False)
    assert (row.gpu_key, row.gpu_name, row.seed, row.author) == (GPU.key, GPU.name, 0, "Ada")
    assert row.samples == 20
