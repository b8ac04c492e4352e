"""Tuning on a real device when workers or the session are killed: no worker stays, no row is lost or made twice."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import alive
from tuner_problem import problem

from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.results.report import Progress
from flashtune.tuner.tune.session import tune

pytestmark = pytest.mark.gpu


def settled(path: Path) -> Counter[tuple[Problem, Config]]:
    """How many rows say what came of a config."""
    with Store.open(path, readonly=True) as store:
        return Counter((each.problem, each.config) for each in store.measurements() if each.stage != "final")


def test_ten_random_kills_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    path, problems, trials = tmp_path / "tuned.db", [problem(), problem(causal=True)], 120
    draw, over = random.Random(0), threading.Event()
    outcomes, killed = [0], list[int]()

    def count(progress: Progress) -> None:
        outcomes[0] += progress.text.endswith(" ms")

    def kill() -> None:
        seen = 0
        while len(killed) < 10 and not over.wait(draw.uniform(0.0, 0.15)):
            workers = [each for each in multiprocessing.active_children() if each.name == "flashtune cuda:0"]
            if outcomes[0] >= seen + 4 and workers and workers[0].pid not in (None, *killed):
                seen = outcomes[0]
                killed.append(workers[0].pid or 0)
                workers[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        report = tune(problems, mode="measure", devices=[0], database=path, budget=str(trials), progress=count)
    finally:
        over.set()
        killer.join()
    assert len(killed) == 10
    assert not report.stopped
    assert report.tried == trials
    assert "illegal_access" not in report.failed
    assert settled(path).total() == trials
    assert set(settled(path).values()) == {1}
    assert all(row.ratio is not None for row in report.rows)


SESSION = """
import sys
from tuner_problem import problem
from flashtune.tuner.tune.session import tune

if __name__ == "__main__":
    report = tune([problem(), problem(causal=True)], mode="measure", devices=[0], database=sys.argv[1], budget="10m")
    print(report.interrupted, report.tried, all(row.config is not None for row in report.rows))
"""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own, which has measured a few configs."""
    (tmp_path / "session.py").write_text(SESSION)
    process = subprocess.Popen(
        [sys.executable, "session.py", "tuned.db"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
    )
    with process:
        path, deadline = tmp_path / "tuned.db", time.monotonic() + 180
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
            if path.exists() and path.stat().st_size and settled(path).total() >= 20:
                break
        yield process
        process.kill()


def children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(each) for thread in threads for each in (thread / "children").read_text().split()]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "ctrl-c"])
def test_a_session_that_ends_early_leaves_no_worker_and_all_rows(
    session: subprocess.Popen[str], tmp_path: Path, how: signal.Signals
) -> None:
    path, workers = tmp_path / "tuned.db", children(session.pid)
    assert workers
    started = time.monotonic()
    session.send_signal(how)
    said, _ = session.communicate(timeout=60)
    if how is signal.SIGINT:
        assert time.monotonic() - started < 2
        assert said == f"True {settled(path).total()} True\n"
    while any(alive(pid) for pid in workers) and time.monotonic() - started < 30:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in workers)
    before = settled(path)
    report = tune([problem(), problem(causal=True)], mode="measure", devices=[0], database=path, budget="8")
    assert sum(row.known for row in report.rows) == before.total() >= 20
    assert settled(path).total() == before.total() + 8
    assert set(settled(path).values()) == {1}
