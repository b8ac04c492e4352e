"""Runs leave alone what has cost two workers: of other problems, of other sessions, and found out on the way."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from tuner_fakes import FAMILY, GPU, FakeBench, FakeBuilder, problem, run

from flashtune.cli.common.tables import print_report
from flashtune.codegen.plan.config import Config
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.results.report import Report
from flashtune.tuner.search.space import make_space
from flashtune.tuner.trial.outcome import DeviceLostError, Outcome

PROBLEM, OTHER = problem(), problem(2048)
CULPRIT = make_space(PROBLEM, GPU, FAMILY).configs[1]
"""Tried early by the model's order."""
DEFAULT = FAMILY.default(PROBLEM.spec, GPU)


def dying(*culprits: Config) -> FakeBench:
    def outcome(config: Config, number: int) -> Outcome | None:
        if config in culprits:
            raise DeviceLostError("an illegal memory access was encountered")
        return None

    return FakeBench(outcome=outcome)


def attempts(bench: FakeBench) -> Counter[Config]:
    return Counter(config for _, config in bench.attempts)


def printed(report: Report) -> str:
    text = io.StringIO()
    print_report(Console(width=200, file=text), report, "tuned.db")
    return text.getvalue()


def test_what_crashed_on_one_problem_is_not_tried_on_another_of_its_spec(path: Path) -> None:
    first = dying(CULPRIT)
    report = run(path, [PROBLEM], 8, bench=first)
    assert attempts(first)[CULPRIT] == 2
    assert report.blocklisted == 1
    second = dying(CULPRIT)
    report = run(path, [OTHER], 200, bench=second)
    assert attempts(second)[CULPRIT] == 0
    assert second.opened == 1
    assert len(second.attempts) == 200
    assert report.blocklisted == 1
    assert "Blocklisted, since they have cost two workers: 1" in printed(report)
    third = dying()
    report = run(path, [problem(causal=True)], 200, bench=third)
    assert attempts(third)[CULPRIT] == 1, "another spec is other code"
    assert report.blocklisted == 0
    assert "Blocklisted" not in printed(report)


def test_what_crashes_on_one_problem_is_at_once_left_alone_on_the_others(path: Path) -> None:
    problems = [problem(length) for length in (512, 1024, 2048, 4096)]
    benches = [dying(CULPRIT) for _ in range(2)]
    report = run(path, problems, 80, benches=benches)
    assert sum(attempts(bench)[CULPRIT] for bench in benches) <= 2 + 2, "each device may be at it already"
    assert report.failed["illegal_access"] <= 2
    assert report.tried == 80
    assert {row.tried for row in report.rows} == {20}
    assert report.blocklisted == 1


@pytest.mark.parametrize("hangs", [1, 2])
def test_a_config_that_hung_in_two_sessions_is_not_tried_again(path: Path, hangs: int) -> None:
    for where in (problem(512), problem(4096))[:hangs]:
        bench = FakeBench(outcome=lambda config, number: Outcome(status="timeout") if config == CULPRIT else None)
        run(path, [where], 2, bench=bench, first=[CULPRIT])
    bench = FakeBench()
    report = run(path, [PROBLEM], 60, bench=bench)
    assert attempts(bench)[CULPRIT] == (hangs == 1)
    assert report.blocklisted == (hangs == 2)


def test_a_user_can_not_put_it_first_and_finals_and_look_ups_leave_it_out(path: Path) -> None:
    fast = FakeBench(lambda config: 1e-5 if config == CULPRIT else 1e-3)
    (row,) = run(path, [PROBLEM], 6, bench=fast, first=[CULPRIT]).rows
    assert row.config == CULPRIT
    assert find(PROBLEM, GPU, store_path=path).config == CULPRIT
    run(path, [OTHER], 6, bench=dying(CULPRIT), first=[CULPRIT])
    assert find(PROBLEM, GPU, store_path=path).config != CULPRIT
    bench = FakeBench()
    (row,) = run(path, [PROBLEM], 6, bench=bench, first=[CULPRIT]).rows
    assert row.config != CULPRIT
    assert attempts(bench)[CULPRIT] == 0
    assert CULPRIT not in bench.finalists[PROBLEM]


def test_a_default_that_is_blocklisted_is_not_tried_either(path: Path) -> None:
    run(path, [OTHER], 2, bench=dying(DEFAULT))
    bench = dying(DEFAULT)
    (row,) = run(path, [PROBLEM], 10, bench=bench).rows
    assert attempts(bench)[DEFAULT] == 0
    assert bench.opened == 1
    assert row.config is not None
    assert row.ratio is None


def test_another_source_gets_another_chance(path: Path) -> None:
    run(path, [PROBLEM], 8, bench=dying(CULPRIT), builder=FakeBuilder(lambda source: Built(digest="e" * 64)))
    bench = FakeBench()
    report = run(path, [PROBLEM], 20, bench=bench)
    assert attempts(bench)[CULPRIT] == 1
    assert report.blocklisted == 0
