"""Several runs on one database: started together, and with others that hold its lock."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from tuner_fakes import FakeBench, means, problem, request, run

import flashtune
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import StoreError
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.run.coordinator import Coordinator
from flashtune.tuner.trial.outcome import Outcome
from flashtune.tuner.tune.measured_run import measure_problems

TUNERS, TRIALS = 8, 2
PROBLEM = problem()

TOGETHER = """
import multiprocessing, sys
from pathlib import Path
from tuner_fakes import FakeBench, problem, run

def tune(path, number, barrier):
    barrier.wait()
    run(path, [problem()], int(sys.argv[3]), bench=FakeBench(unit=f"GPU-{number}"), seed=number)

folder, tuners = Path(sys.argv[1]), int(sys.argv[2])
context = multiprocessing.get_context("fork")
run(folder / "all that is imported.db", [problem()], 1)
for turn in range(int(sys.argv[4])):
    barrier = context.Barrier(tuners)
    path = folder / "deep" / str(turn) / "tuned.db"
    workers = [context.Process(target=tune, args=(path, number, barrier)) for number in range(tuners)]
    [each.start() for each in workers]
    [each.join() for each in workers]
    print([each.exitcode for each in workers], sorted(each.name for each in path.parent.iterdir()))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_eight_tuners_start_together_where_there_is_no_database(tmp_path: Path, rounds: int) -> None:
    """D70. One database comes of it, with all trials of all of them."""
    paths = [str(Path(flashtune.__file__).parents[1]), str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", TOGETHER, str(tmp_path), str(TUNERS), str(TRIALS), str(rounds)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{[0] * TUNERS} ['tuned.db']"] * rounds, done.stderr
    for turn in range(rounds):
        with Store.open(tmp_path / "deep" / str(turn) / "tuned.db", readonly=True) as store:
            rows = store.measurements()
        trials = Counter(each.session for each in rows if each.stage != "final")
        assert list(trials.values()) == [TRIALS] * TUNERS
        assert {each.unit for each in rows} == {f"GPU-{number}" for number in range(TUNERS)}
        finals = {each.session for each in rows if each.stage == "final"}
        assert finals == set(trials)


class Locker:
    """Another program that takes the write lock of a database, and gives it up again when it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.locks: list[sqlite3.Connection] = []

    def hold(self) -> None:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        connection.execute("BEGIN IMMEDIATE")
        self.locks.append(connection)

    def release(self) -> None:
        while self.locks:
            with closing(self.locks.pop()) as connection:
                connection.execute("COMMIT")


@pytest.fixture
def locker(tmp_path: Path) -> Iterator[Locker]:
    locker = Locker(tmp_path / "tuned.db")
    yield locker
    locker.release()


def locking(locker: Locker, at: int, and_then: Callable[[], object]) -> FakeBench:
    """The lock is taken while candidate number ``at`` is measured."""

    def outcome(config: Config, number: int) -> Outcome | None:
        if number == at:
            locker.hold()
            and_then()
        return None

    return FakeBench(outcome=outcome)


def kept(path: Path) -> Counter[Config]:
    with Store.open(path, readonly=True) as store:
        return Counter(each.config for each in store.measurements(stage="measure"))


def test_a_run_waits_for_who_holds_the_lock_and_loses_nothing(locker: Locker) -> None:
    """D71, in the middle of a run."""
    later = threading.Timer(1.0, locker.release)
    bench = locking(locker, 4, later.start)
    report = run(locker.path, [PROBLEM], 8, bench=bench)
    later.join()
    assert report.tried == 8
    assert kept(locker.path) == Counter(config for _, config in bench.attempts)


class LockedFinal(FakeBench):
    """The lock is taken while finalists are measured."""

    def __init__(self, locker: Locker) -> None:
        super().__init__()
        self.locker = locker

    def finals(
        self, problem: Problem, configs: Sequence[Config], seconds: float, margin: float | None = None
    ) -> dict[Config, list[float]]:
        self.locker.hold()
        return super().finals(problem, configs, seconds, margin)


@pytest.mark.parametrize("stage", ["measure", "final"])
def test_what_was_measured_is_stored_though_the_lock_was_held_too_long(
    locker: Locker, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """D71, where a run gives up waiting: it ends with the reason, and tries once more to store what it has."""
    bench = LockedFinal(locker) if stage == "final" else locking(locker, 4, lambda: None)
    finish = Coordinator.finish

    def released(self: Coordinator) -> None:
        locker.release()
        finish(self)

    monkeypatch.setattr(Coordinator, "finish", released)
    with Store.open(locker.path, timeout=0.2) as store, pytest.raises(StoreError, match=r"locked by another process"):
        measure_problems(request([PROBLEM], 10), means(store, bench))
    assert len(bench.attempts) >= 4
    assert (len(bench.attempts) == 10) == (stage == "final")
    assert kept(locker.path) == Counter(config for _, config in bench.attempts)
    with Store.open(locker.path, readonly=True) as store:
        finals = [each.config for each in store.measurements(stage="final")]
    assert Counter(finals) == Counter(bench.finalists.get(PROBLEM, []))
