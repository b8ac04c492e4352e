"""Measured runs on a fake device that meet failures, deaths and Ctrl-C: what is stored, and how a run ends."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
from tuner_fakes import FAMILY, GPU, FakeBench, ShutBench, problem, run, stored

from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.trial.outcome import SPILL_LIMIT, DeviceLostError, Outcome, judge_resources
from flashtune.tuner.workers import supervisor

PROBLEM = problem()
DEFAULT = FAMILY.default(PROBLEM.spec, GPU)


@pytest.mark.parametrize("status", ["wrong", "illegal_access"])
def test_nothing_is_timed_beside_a_default_that_is_not_correct(path: Path, status: str) -> None:
    bench = FakeBench(outcome=lambda config, number: Outcome(status=status) if number == 1 else None)
    report = run(path, [PROBLEM], 8, bench=bench)
    assert len(bench.attempts) == 8
    assert set(bench.defaults) == {None}
    assert report.rows[0].config is not None


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


def test_a_problem_that_does_not_fit_is_skipped_with_its_reason(path: Path) -> None:
    """D63: the other problem is tuned."""
    big = problem(8192)
    bench = FakeBench(unprepared="needs 900 GB of device memory, 80 GB can be had")
    report = run(path, [big, PROBLEM], 6, bench=bench)
    assert report.rows[0].config is None
    assert "900 GB" in report.rows[0].why
    assert report.rows[1].config is not None


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
    assert report.failed["illegal_access"] <= supervisor.FRUITLESS_DEATHS / 2
    assert report.rows[0].config is None


def test_a_device_that_can_not_be_opened_ends_the_run(path: Path) -> None:
    bench = ShutBench()
    report = run(path, [PROBLEM], 10, bench=bench)
    assert bench.opened == supervisor.IDLE_DEATHS
    assert "no memory for a context" in report.stopped
    assert report.rows[0].config is None
    assert not stored(path)


def test_a_problem_whose_reference_costs_two_workers_is_skipped(path: Path) -> None:
    class Bad(FakeBench):
        def prepare(self, problem: Problem) -> str | None:
            if problem.seqlen_q == 512:
                raise DeviceLostError("the reference hit a wall")
            return super().prepare(problem)

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
            return super().prepare(problem)

    def outcome(config: Config, number: int) -> Outcome | None:
        if number in (3, 6):
            raise DeviceLostError("killed for reasons of its own")
        return None

    report = run(path, [PROBLEM], 10, bench=Unlucky(outcome=outcome))
    assert report.failed == {}
    assert report.rows[0].tried == 10


def test_a_source_that_the_compiler_dies_over_is_a_failure_that_may_pass(path: Path) -> None:
    built = Built(digest="d" * 64, error="a compile worker died", crashed=True)
    outcome = judge_resources(PROBLEM, DEFAULT, GPU, built)
    assert outcome is not None
    assert outcome.status == "failed"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_config_may_run_as_long_as_the_compilers_facts_fit_the_card(head_dim: int) -> None:
    """A hole in the tests: what the compiler adds to shared memory could be taken off it. Each fact up to its limit
    and one beyond."""
    asked = problem(head_dim=head_dim)
    default = FAMILY.default(asked.spec, GPU)
    needs = FAMILY.resources(default, asked.spec)
    room = GPU.shared_memory_block - needs.shared_memory
    assert room > 0

    def judged(**facts: int) -> Outcome | None:
        return judge_resources(asked, default, GPU, Built(**{"digest": "d" * 64, "registers": 96, **facts}))  # type: ignore[arg-type]

    for static in (0, 1, room - 1, room):
        assert judged(static_shared_bytes=static) is None
    beyond = judged(static_shared_bytes=room + 1)
    assert beyond is not None
    assert (beyond.status, beyond.message) == (
        "spills",
        f"needs {GPU.shared_memory_block + 1} B of shared memory, {GPU} has {GPU.shared_memory_block} B",
    )
    allowed = 0 if needs.spill_free else SPILL_LIMIT
    assert judged(spill_bytes=allowed) is None
    spilled = judged(spill_bytes=allowed + 1)
    assert spilled is not None
    assert f"spills {allowed + 1} bytes per thread, {allowed} are" in spilled.message
