"""Worker processes that are killed at random moments, and ones whose session is killed or interrupted."""

from __future__ import annotations

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
from fake_worker import FakeUnit
from processes import alive
from tuner_fakes import problem
from worker_runs import assert_all_gone, settled, stored, tune

import flashtune

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


class Killer(threading.Thread):
    """Kills workers at random moments, each time of the process that was heard of last."""

    def __init__(self, unit: FakeUnit, kills: int, seed: int) -> None:
        super().__init__()
        self.unit = unit
        self.left = kills
        self.killed: list[int] = []
        self.over = threading.Event()
        self._random = random.Random(seed)

    def run(self) -> None:
        """Lets each worker finish something first: ones that never do are given up, as they should be."""
        seen = Counter[int]()
        while self.left and not self.over.wait(self._random.uniform(0.0, 0.08)):
            done = Counter(each.pid for each in self.unit.lines("done"))
            ready = [pid for pid, count in done.items() if count > seen[pid] and pid not in self.killed and alive(pid)]
            if ready:
                pid = self._random.choice(ready)
                os.kill(pid, signal.SIGKILL)
                self.killed.append(pid)
                self.left -= 1
            seen = done


@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("devices", [1, 2])
def test_random_kills_lose_nothing_and_repeat_nothing(path: Path, log: Path, devices: int, kills: int) -> None:
    units = [FakeUnit(f"unit-{each}", log, {}, 0.005) for each in range(devices)]
    problems = [problem(512), problem(1024), problem(2048)]
    trials = 12 * kills
    killer = Killer(units[0], kills, seed=devices)
    killer.start()
    try:
        report = tune(path, problems, units, str(trials))
    finally:
        killer.over.set()
        killer.join()
    assert len(killer.killed) == kills
    assert not report.stopped
    assert not report.note
    assert report.tried == trials
    rows = settled(path)
    assert set(rows.values()) == {1}
    assert rows.total() == trials
    assert all(row.tried == trials / 3 and row.ratio is not None for row in report.rows)
    lost = {(each.problem, each.config) for each in units[0].lines("done")} - {
        (each.key, str(config)) for each, config in rows
    }
    assert not lost
    homes = {(each.problem, each.unit) for each in stored(path)}
    assert len(homes) == 3
    assert_all_gone(units[0].lines())


SESSION = """
import sys
from pathlib import Path
from fake_worker import FakeUnit
from tuner_fakes import problem
from worker_runs import tune

if __name__ == "__main__":
    units = [FakeUnit(f"unit-{each}", Path("log"), {}, 0.05) for each in range(2)]
    report = tune(Path("tuned.db"), [problem(512), problem(1024)], units, "1000")
    print(report.interrupted, report.tried, [row.config is not None for row in report.rows])
"""


def attempts_done(log: Path) -> list[int]:
    done = Counter(each.unit for each in FakeUnit("", log).lines("done"))
    return [done["unit-0"], done["unit-1"]]


@pytest.fixture
def session(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run over two devices in a process of its own, which has begun to measure."""
    (tmp_path / "session.py").write_text(SESSION)
    paths = [Path(flashtune.__file__).parents[1], *Path(__file__).parents[:2]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    process = subprocess.Popen(
        [sys.executable, "session.py"], stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    )
    with process:
        while any(count < 20 for count in attempts_done(tmp_path / "log")) and process.poll() is None:
            time.sleep(0.01)
        assert process.poll() is None
        yield process
        process.kill()


def test_killing_the_session_ends_its_workers_and_the_next_run_goes_on(
    session: subprocess.Popen[str], path: Path, log: Path
) -> None:
    session.kill()
    session.wait()
    unit = FakeUnit("unit-0", log)
    assert_all_gone(unit.lines())
    before = settled(path)
    done = {(each.problem, each.config) for each in unit.lines("done")}
    kept = {(each.key, str(config)) for each, config in before}
    assert len(done - kept) <= 6, "for each device one that is being stored and two behind it"
    assert len(kept) >= 34
    units = [unit, FakeUnit("unit-1", log)]
    report = tune(path, [problem(512), problem(1024)], units, "60")
    assert sum(row.known for row in report.rows) == before.total()
    assert settled(path).total() == before.total() + 60
    assert set(settled(path).values()) == {1}


def test_ctrl_c_answers_at_once_with_what_is_known(session: subprocess.Popen[str], path: Path, log: Path) -> None:
    session.send_signal(signal.SIGINT)
    started = time.monotonic()
    said, _ = session.communicate(timeout=60)
    begun = [each for each in FakeUnit("", log).lines("attempt") if each.time > started]
    assert len(begun) <= 6, "for each device the next and what was behind it"
    interrupted, tried, found = said.split(maxsplit=2)
    assert interrupted == "True"
    assert found == "[True, True]\n"
    assert settled(path).total() == int(tried) >= 34
    assert_all_gone(FakeUnit("", log).lines())
