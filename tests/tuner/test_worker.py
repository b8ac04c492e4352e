"""Measured runs whose workers are real processes that die, hang, start slowly or are killed."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fake_worker import FakeUnit, Line
from tuner_fakes import FAMILY, GPU, FakeBuilder, only_sm80, problem

import flashtune
from flashtune.codegen.config import Config
from flashtune.codegen.problem import Problem
from flashtune.tuned_db.records import Measurement
from flashtune.tuned_db.store import Store
from flashtune.tuner import coordinator, post
from flashtune.tuner.budget import Budget, parse_budget
from flashtune.tuner.measured import measure_problems
from flashtune.tuner.records import SETTLED
from flashtune.tuner.report import Report
from flashtune.tuner.space import make_space

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")

PROBLEM = problem()
CONFIGS = make_space(PROBLEM, GPU, FAMILY).configs
"""In the model's order, which is the order of the first trials behind the default."""


def tune(path: Path, problems: Sequence[Problem], units: Sequence[FakeUnit], budget: Budget | str) -> Report:
    with Store.open(path) as store:
        return measure_problems(
            problems, GPU, store, units, FakeBuilder(), parse_budget(budget), 0, only_sm80, lambda progress: None
        )


def stored(path: Path, **wanted: str) -> list[Measurement]:
    with Store.open(path, readonly=True) as store:
        return store.measurements(**wanted)


def settled(path: Path) -> Counter[tuple[Problem, Config]]:
    """How many rows there are that say what came of a config."""
    return Counter(
        (each.problem, each.config) for each in stored(path) if each.stage != "final" and each.status in SETTLED
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_all_gone(lines: Sequence[Line]) -> None:
    deadline = time.monotonic() + 60
    pids = {each.pid for each in lines}
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuned.db"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_each_way_to_die_twice_is_blamed_on_the_config_and_the_others_are_measured(path: Path, log: Path) -> None:
    """D61, in each way. By the command it is in test_tune_command.py."""
    bad = dict(zip(CONFIGS[1:5], ("exit", "kill", "crash", "lose"), strict=True))
    unit = FakeUnit("one", log, {config.key: deed for config, deed in bad.items()})
    report = tune(path, [PROBLEM], [unit], "20")
    assert not report.stopped
    assert report.failed == {"illegal_access": 4}
    attempts = Counter(each.config for each in unit.lines("attempt"))
    assert attempts == {str(config): 2 if config in bad else 1 for _, config in settled(path)}
    assert len(attempts) == 20
    said = {each.config: each.message for each in stored(path, status="illegal_access")}
    assert [said[config].partition(" (")[0] for config in bad] == [
        "its worker exited with code 7",
        "its worker was killed by SIGKILL",
        "its worker was killed by SIGSEGV",
        "cudaErrorIllegalAddress: an illegal memory access was encountered",
    ]
    assert report.rows[0].config not in bad
    assert len(unit.lines("start")) == 9
    assert_all_gone(unit.lines())


def test_a_config_whose_worker_was_killed_from_outside_is_measured_by_the_next(path: Path, log: Path) -> None:
    unit = FakeUnit("one", log, {CONFIGS[2].key: "once kill", "prepare": "once exit", "final": "once crash"})
    report = tune(path, [PROBLEM], [unit], "8")
    assert report.failed == {}
    assert set(settled(path).values()) == {1}
    assert len(settled(path)) == 8
    assert stored(path, stage="final")
    assert len(unit.lines("start")) == 4


def test_a_hang_ends_at_its_limit_and_is_not_tried_again(
    path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D62. The process that has the device is gone, and with it all that it held there."""
    monkeypatch.setattr(coordinator, "ATTEMPT_SECONDS", 5.0)  # the others may have to wait for a core
    unit = FakeUnit("one", log, {CONFIGS[1].key: "hang"})
    for _ in range(2):
        report = tune(path, [PROBLEM], [unit], "6")
        assert report.tried == 6
    (row,) = stored(path, status="timeout")
    assert row.config == CONFIGS[1]
    assert "time limit" in row.message
    assert [each.config for each in unit.lines("attempt")].count(str(CONFIGS[1])) == 1
    assert_all_gone(unit.lines())


def test_an_exception_leaves_the_worker_alive(path: Path, log: Path) -> None:
    unit = FakeUnit("one", log, {CONFIGS[1].key: "raise", "final": "raise"})
    report = tune(path, [PROBLEM], [unit], "5")
    assert report.failed == {"failed": 1}
    assert report.rows[0].config is not None
    assert len(unit.lines("start")) == 1


@pytest.mark.parametrize(
    ("deed", "message"),
    [("exit", "exited with code 7"), ("lose", "illegal memory access"), ("hang", "time limit"), ("raise", "Zero")],
)
def test_a_device_that_can_not_be_opened_ends_the_run_with_the_reason(
    path: Path,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    deed: str,
    message: str,
) -> None:
    caplog.set_level(logging.INFO, "flashtune")
    if deed == "hang":
        monkeypatch.setattr(post, "START_SECONDS", 1.0)
    unit = FakeUnit("one", log, {"open": deed})
    report = tune(path, [PROBLEM], [unit], "5")
    assert "one was given up" in report.stopped
    assert message in report.stopped
    deaths = [each for each in caplog.messages if each.startswith("one: ")]
    assert len(deaths) == post.IDLE_DEATHS
    assert all(message in each for each in deaths)
    assert_all_gone(unit.lines())


def test_a_second_device_that_can_not_be_opened_leaves_all_to_the_first(path: Path, log: Path) -> None:
    units = [FakeUnit("one", log), FakeUnit("two", log, {"open": "exit"})]
    problems = [problem(512), problem(1024)]
    report = tune(path, problems, units, "12")
    assert not report.stopped
    assert "two was given up" in report.note
    assert {row.tried for row in report.rows} == {6}
    assert {each.unit for each in stored(path)} == {"GPU-one"}


def test_two_devices_take_half_the_time_of_one(tmp_path: Path) -> None:
    problems = [problem(512), problem(1024), problem(2048), problem(4096)]
    spans = []
    for count in (1, 2):
        units = [FakeUnit(f"unit-{each}", tmp_path / f"log-{count}", {}, 0.2) for each in range(count)]
        report = tune(tmp_path / f"{count}.db", problems, units, "32")
        assert report.tried == 32
        times = [each.time for each in units[0].lines("attempt", "done", "final")]
        spans.append(max(times) - min(times))
    assert spans[1] <= 0.65 * spans[0], spans


def test_a_time_budget_is_wall_time_on_two_devices_too(path: Path, log: Path) -> None:
    units = [FakeUnit(f"unit-{each}", log, {}, 0.01) for each in range(2)]
    started = time.monotonic()
    report = tune(path, [problem(512), problem(1024)], units, "4s")
    assert time.monotonic() - started > 3
    attempts = [each.time for each in units[0].lines("attempt")]
    assert max(attempts) - min(attempts) < 4, "not for each of them"
    assert all(row.ratio is not None for row in report.rows)
    homes = {(each.problem, each.unit) for each in stored(path)}
    assert len(homes) == len({unit for _, unit in homes}) == 2


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
from test_worker import tune
from tuner_fakes import problem

if __name__ == "__main__":
    units = [FakeUnit(f"unit-{each}", Path("log"), {}, 0.01) for each in range(2)]
    report = tune(Path("tuned.db"), [problem(512), problem(1024)], units, "400")
    print(report.interrupted, report.tried, [row.config is not None for row in report.rows])
"""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run over two devices in a process of its own, which has begun to measure."""
    (tmp_path / "session.py").write_text(SESSION)
    paths = [Path(flashtune.__file__).parents[1], Path(__file__).parent]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    process = subprocess.Popen(
        [sys.executable, "session.py"], stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    )
    with process:
        deadline = time.monotonic() + 60
        while len(FakeUnit("", tmp_path / "log").lines("done")) < 40 and time.monotonic() < deadline:
            time.sleep(0.01)
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
    started = time.monotonic()
    session.send_signal(signal.SIGINT)
    said, _ = session.communicate(timeout=60)
    begun = [each for each in FakeUnit("", log).lines("attempt") if each.time > started]
    assert len(begun) <= 6, "for each device the next and what was behind it"
    interrupted, tried, found = said.split(maxsplit=2)
    assert interrupted == "True"
    assert found == "[True, True]\n"
    assert settled(path).total() == int(tried) >= 34
    assert_all_gone(FakeUnit("", log).lines())
