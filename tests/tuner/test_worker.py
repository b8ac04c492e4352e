"""Measured runs whose workers are real processes that die, hang or start slowly."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_worker import FakeUnit
from tuner_fakes import FAMILY, GPU, problem
from worker_runs import assert_all_gone, settled, stored, tune

from flashtune.tuner.run import coordinator
from flashtune.tuner.search.space import make_space
from flashtune.tuner.workers import supervisor

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")

PROBLEM = problem()
CONFIGS = make_space(PROBLEM, GPU, FAMILY).configs
"""In the model's order, which is the order of the first trials behind the default."""


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
    assert [each.config for each in unit.lines("attempt")].count(str(CONFIGS[1])) <= 1, "or killed before it said so"
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
        monkeypatch.setattr(supervisor, "START_SECONDS", 1.0)
    unit = FakeUnit("one", log, {"open": deed})
    report = tune(path, [PROBLEM], [unit], "5")
    assert "one was given up" in report.stopped
    assert message in report.stopped
    deaths = [each for each in caplog.messages if each.startswith("one: ")]
    assert len(deaths) == supervisor.IDLE_DEATHS
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


def test_two_devices_are_at_work_at_the_same_time(path: Path, log: Path) -> None:
    """Each attempt waits for one on the other device, up to the limit that would make it a failure."""
    units = [FakeUnit("one", log, beside="two"), FakeUnit("two", log, beside="one")]
    report = tune(path, [problem(512), problem(1024), problem(2048), problem(4096)], units, "32")
    assert (report.tried, report.failed) == (32, {})
    assert [each.begun(each.name) for each in units] == [16, 16]


class Clock:
    """Stands still until each of ``units`` has finished three attempts: what they need to start is not counted."""

    def __init__(self, units: Sequence[FakeUnit]) -> None:
        self.units = units
        self.started: float | None = None

    def __call__(self) -> float:
        if self.started is None:
            done = Counter(each.unit for each in self.units[0].lines("done"))
            if min(done[each.name] for each in self.units) < 3:
                return 0.0
            self.started = time.monotonic()
        return time.monotonic() - self.started


def test_a_time_budget_is_wall_time_on_two_devices_too(path: Path, log: Path) -> None:
    units = [FakeUnit(f"unit-{each}", log, {}, 0.01) for each in range(2)]
    clock = Clock(units)
    report = tune(path, [problem(512), problem(1024)], units, "4s", clock)
    assert clock() > 3
    assert clock.started is not None
    late = [each for each in units[0].lines("attempt") if each.time > clock.started + 4]
    assert len(late) <= 4, "for each device one that it is at and one behind it"
    assert all(row.ratio is not None for row in report.rows)
    homes = {(each.problem, each.unit) for each in stored(path)}
    assert len(homes) == len({unit for _, unit in homes}) == 2
