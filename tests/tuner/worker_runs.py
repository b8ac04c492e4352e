"""Runs on worker processes whose device is a fake one: what they store, and that no process is left behind."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from fake_worker import FakeUnit, Line
from processes import alive
from tuner_fakes import means, request

from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.results.budget import Budget, parse_budget
from flashtune.tuner.results.report import Report
from flashtune.tuner.results.rows import SETTLED
from flashtune.tuner.tune.measured_run import measure_problems
from flashtune.tuner.workers.process_worker import ProcessWorker


def tune(
    path: Path,
    problems: Sequence[Problem],
    units: Sequence[FakeUnit],
    budget: Budget | str,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    with Store.open(path) as store:
        return measure_problems(
            request(problems, budget=parse_budget(budget)), means(store, *units, hire=ProcessWorker, clock=clock)
        )


def stored(path: Path, **wanted: str) -> list[Measurement]:
    with Store.open(path, readonly=True) as store:
        return store.measurements(**wanted)


def settled(path: Path) -> Counter[tuple[Problem, Config]]:
    """How many rows there are that say what came of a config."""
    return Counter(
        (each.problem, each.config) for each in stored(path) if each.stage != "final" and each.status in SETTLED
    )


def assert_all_gone(lines: Sequence[Line]) -> None:
    deadline = time.monotonic() + 60
    pids = {each.pid for each in lines}
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]
