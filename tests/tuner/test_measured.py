"""Measured runs on a fake device: what is asked, stored and chosen, and how a run ends."""

from __future__ import annotations

import signal
from collections import Counter
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from tuner_fakes import FAMILY, GPU, FakeBench, FakeBuilder, landscape, problem, run

from flashtune.codegen.config import Config
from flashtune.codegen.model import default_config
from flashtune.codegen.problem import Problem
from flashtune.codegen.render import Source
from flashtune.tuned_db.ranked import ALIKE
from flashtune.tuned_db.store import Store
from flashtune.tuner import post
from flashtune.tuner.build import Built
from flashtune.tuner.space import make_space
from flashtune.tuner.trial import DeviceLostError, Outcome, judge_resources

PROBLEM = problem()
DEFAULT = FAMILY.default(PROBLEM.spec, GPU)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuned.db"


def stored(path: Path, **wanted: str) -> list[Config]:
    with Store.open(path, readonly=True) as store:
        return [each.config for each in store.measurements(problem=PROBLEM, **wanted)]


def test_the_default_is_tried_first_and_every_outcome_is_stored(path: Path) -> None:
    bench = FakeBench()
    report = run(path, [PROBLEM], 12, bench=bench)
    asked = [config for _, config in bench.attempts]
    assert asked[0] == DEFAULT
    assert len(set(asked)) == 12
    assert Counter(stored(path, stage="measure")) == Counter(asked)
    assert report.measured
    assert report.tried == 12


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


@pytest.mark.parametrize("status", ["wrong", "illegal_access"])
def test_nothing_is_timed_beside_a_default_that_is_not_correct(path: Path, status: str) -> None:
    bench = FakeBench(outcome=lambda config, number: Outcome(status=status) if number == 1 else None)
    report = run(path, [PROBLEM], 8, bench=bench)
    assert len(bench.attempts) == 8
    assert set(bench.defaults) == {None}
    assert report.rows[0].config is not None


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


@pytest.mark.parametrize("status", ["wrong", "compile_error", "spills", "failed", "out_of_memory"])
def test_a_failure_is_stored_and_never_chosen(path: Path, status: str) -> None:
    def outcome(config: Config, number: int) -> Outcome | None:
        return Outcome(status=status, message="as the test wants it") if number % 2 == 0 else None

    bench = FakeBench(outcome=outcome)
    report = run(path, [PROBLEM], 10, bench=bench)
    failed = {config for number, (_, config) in enumerate(bench.attempts, start=1) if number % 2 == 0}
    assert set(stored(path, status=status)) == failed
    assert report.failed == {status: 5}
    assert report.rows[0].config not in failed
    assert not failed & set(bench.finalists[PROBLEM])


def test_failures_that_may_pass_are_tried_again_by_the_next_run(path: Path) -> None:
    """D63: out of memory is not for ever."""
    run(path, [PROBLEM], 1, bench=FakeBench(outcome=lambda config, number: Outcome(status="out_of_memory")))
    again = FakeBench()
    run(path, [PROBLEM], 1, bench=again)
    assert again.attempts == [(PROBLEM, DEFAULT)]


def test_nothing_correct_gives_a_row_that_says_so(path: Path) -> None:
    report = run(path, [PROBLEM], 3, bench=FakeBench(outcome=lambda config, number: Outcome(status="wrong")))
    assert report.rows[0].config is None
    assert "no config was correct" in report.rows[0].why


def test_ctrl_c_keeps_what_was_measured_and_reports_the_best(path: Path) -> None:
    def outcome(config: Config, number: int) -> Outcome | None:
        if number == 5:
            signal.raise_signal(signal.SIGINT)
        return None

    bench = FakeBench(outcome=outcome)
    report = run(path, [PROBLEM], 20, bench=bench)
    assert report.interrupted
    assert len(stored(path)) == len(bench.attempts) == 5, "the one that was being measured came in"
    assert report.rows[0].config in stored(path)


def test_ctrl_c_before_anything_was_tried_is_a_report_too(path: Path) -> None:
    report = run(path, [PROBLEM], 20, progress=lambda _: signal.raise_signal(signal.SIGINT))
    assert report.interrupted
    assert report.tried == 0
    assert (report.rows[0].config, report.rows[0].why) == (None, "the run ended before its turn")


def test_a_config_that_costs_two_workers_is_blamed_and_all_else_goes_on(path: Path) -> None:
    culprits: list[Config] = []

    def outcome(config: Config, number: int) -> Outcome | None:
        if number == 3:
            culprits.append(config)
        if config in culprits:
            raise DeviceLostError(f"{config} made the GPU context unusable")
        return None

    first, second = FakeBench(outcome=outcome), FakeBench()
    report = run(path, [PROBLEM], 20, bench=first)
    asked = Counter(config for _, config in first.attempts)
    assert asked.pop(culprits[0]) == 2
    assert set(asked.values()) == {1}
    assert first.opened == 3
    assert not report.stopped
    assert report.tried == 20
    assert report.failed == {"illegal_access": 1}
    assert stored(path, status="illegal_access") == culprits
    assert report.rows[0].config is not None
    run(path, [PROBLEM], 20, bench=second)
    assert culprits[0] not in [config for _, config in second.attempts]


def test_a_worker_that_dies_once_costs_nothing(path: Path) -> None:
    def outcome(config: Config, number: int) -> Outcome | None:
        if number in (3, 7):
            raise DeviceLostError("killed for reasons of its own")
        return None

    bench = FakeBench(outcome=outcome)
    report = run(path, [PROBLEM], 12, bench=bench)
    assert report.failed == {}
    assert len(stored(path, stage="measure")) == len(set(stored(path, stage="measure"))) == 12
    assert len(bench.attempts) == 14
    assert bench.opened == 3


def test_a_device_on_which_every_candidate_dies_ends_the_run(path: Path) -> None:
    def outcome(config: Config, number: int) -> Outcome | None:
        raise DeviceLostError("the card fell off the bus")

    report = run(path, [PROBLEM], 100, bench=FakeBench(outcome=outcome))
    assert "fell off the bus" in report.stopped
    assert "GPU-fake" in report.stopped
    assert report.failed["illegal_access"] <= post.FRUITLESS_DEATHS / 2
    assert report.rows[0].config is None


def test_a_device_that_can_not_be_opened_ends_the_run(path: Path) -> None:
    class Shut(FakeBench):
        def open(self) -> FakeBench:
            super().open()
            raise DeviceLostError("no memory for a context")

    bench = Shut()
    report = run(path, [PROBLEM], 10, bench=bench)
    assert bench.opened == post.IDLE_DEATHS
    assert "no memory for a context" in report.stopped
    assert report.rows[0].config is None
    assert not stored(path)


def test_a_problem_whose_reference_costs_two_workers_is_skipped(path: Path) -> None:
    class Bad(FakeBench):
        def prepare(self, problem: Problem) -> str | None:
            if problem.seqlen_q == 512:
                raise DeviceLostError("the reference hit a wall")
            return None

    bench = Bad()
    report = run(path, [problem(512), PROBLEM], 10, bench=bench)
    assert not report.stopped
    assert "hit a wall" in report.rows[0].why
    assert report.rows[1].tried == 10
    assert bench.opened == 3


def test_deaths_over_a_reference_that_was_made_in_between_do_not_add_up(path: Path) -> None:
    class Unlucky(FakeBench):
        prepared = 0

        def prepare(self, problem: Problem) -> str | None:
            self.prepared += 1
            if self.prepared in (2, 5):
                raise DeviceLostError("killed for reasons of its own")
            return None

    def outcome(config: Config, number: int) -> Outcome | None:
        if number in (3, 6):
            raise DeviceLostError("killed for reasons of its own")
        return None

    report = run(path, [PROBLEM], 10, bench=Unlucky(outcome=outcome))
    assert report.failed == {}
    assert report.rows[0].tried == 10


def test_a_compiler_that_died_is_asked_again(path: Path) -> None:
    class Dying(FakeBuilder):
        def submit(self, source: Source) -> Future[Built]:
            job = super().submit(source)
            if self.submitted[source.digest] == 1:
                job = Future()
                job.set_exception(BrokenProcessPool())
            return job

    report = run(path, [PROBLEM], 10, builder=Dying())
    assert report.tried == 10
    assert report.failed == {}


def test_a_source_that_the_compiler_dies_over_is_a_failure_that_may_pass(path: Path) -> None:
    built = Built(digest="d" * 64, error="a compile worker died", crashed=True)
    outcome = judge_resources(PROBLEM, DEFAULT, GPU, built)
    assert outcome is not None
    assert outcome.status == "failed"


def test_an_unforeseen_error_of_a_candidate_is_a_failure_of_that_candidate(path: Path) -> None:
    def outcome(config: Config, number: int) -> Outcome | None:
        if number == 2:
            raise ZeroDivisionError("in the bench")
        return None

    bench = FakeBench(outcome=outcome)
    report = run(path, [PROBLEM], 6, bench=bench)
    assert report.failed == {"failed": 1}
    assert bench.opened == 1
    with Store.open(path, readonly=True) as store:
        (row,) = store.measurements(status="failed")
    assert row.message == "ZeroDivisionError: in the bench"


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


def test_a_problem_that_does_not_fit_is_skipped_with_its_reason(path: Path) -> None:
    """D63: the other problem is tuned."""
    big = problem(8192)
    bench = FakeBench(unprepared="needs 900 GB of device memory, 80 GB can be had")
    report = run(path, [big, PROBLEM], 6, bench=bench)
    assert report.rows[0].config is None
    assert "900 GB" in report.rows[0].why
    assert report.rows[1].config is not None


def test_winners_of_a_near_problem_are_tried_right_behind_the_default(path: Path) -> None:
    (row,) = run(path, [problem(512)], 30).rows
    bench = FakeBench()
    run(path, [PROBLEM], 2, bench=bench)
    assert [config for _, config in bench.attempts] == [DEFAULT, row.config]


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
