"""What the card says around measurements: read, repeated where it was slowed down, flagged and stored."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import DRIVER, NEW_NAMES, FakeNvml
from tuner_fakes import READINGS, FakeBench, problem, run

from flashtune.codegen.gpu import devices
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.records.measurement import THROTTLES
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.trial.outcome import Evidence, Outcome
from flashtune.tuner.trial.sensors import REASONS, Readings, Sensors, Watch, others
from flashtune.tuner.trial.timing import Timing

PROBLEM = problem()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    made = FakeNvml("GPU-0", "GPU-1")
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def test_everything_is_read_in_its_unit(nvml: FakeNvml) -> None:
    card = nvml.cards["GPU-1"]
    card.bits = 0x1 | 0x4 | 0x40
    sensors = Sensors("GPU-1")
    assert sensors.note == ""
    assert sensors.read() == Readings(1980.0, 612.5, 61.0, "hw_thermal,power_cap", False)
    card.bits = 0x1
    assert sensors.read().throttle == ""


def test_others_that_use_nvml_meanwhile_take_nothing_away(nvml: FakeNvml) -> None:
    sensors = Sensors("GPU-0")
    assert devices.driver_version() == DRIVER
    assert sensors.read() == Readings(1980.0, 612.5, 61.0, "", False)
    assert nvml.uses == 1


def test_a_card_that_nvml_does_not_know_leaves_a_note(nvml: FakeNvml) -> None:
    sensors = Sensors("GPU-7")
    assert sensors.read() == Readings()
    assert "Not Found" in sensors.note


def test_names_of_older_releases_do_as_well(nvml: FakeNvml) -> None:
    nvml.left_out = NEW_NAMES
    nvml.cards["GPU-1"].bits = 0x8
    assert Sensors("GPU-1").read() == Readings(1980.0, 612.5, 61.0, "hw_slowdown", False)


def test_words_for_reasons_are_those_that_are_stored() -> None:
    assert set(REASONS.values()) | {"slow_clock", "slow_host"} == set(THROTTLES)


def test_without_nvidia_ml_py_there_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sensors = Sensors("GPU-1")
    assert sensors.read() == Readings()
    assert "nvidia-ml-py is not installed" in sensors.note


@pytest.mark.parametrize("refused", ["all", "nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_without_permission_there_is_a_note(nvml: FakeNvml, refused: str) -> None:
    nvml.refused.add(refused)
    sensors = Sensors("GPU-1")
    assert sensors.read() == Readings()
    assert "Insufficient Permissions" in sensors.note


def test_what_a_card_does_not_know_is_left_out(nvml: FakeNvml) -> None:
    nvml.refused |= {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetComputeRunningProcesses"}
    sensors = Sensors("GPU-1")
    assert sensors.note == ""
    assert sensors.read() == Readings(1980.0, None, 61.0, "", None)


@pytest.mark.parametrize(
    ("processes", "ours", "count"),
    [
        ([], 1, 0),
        ([7], 1, 0),
        ([7, 8], 1, 1),
        ([6, 7], 2, 0),
        ([6, 7, 8], 2, 1),
        ([90], 1, 0),
        ([90, 91], 1, 1),
        ([90, 91], 2, 0),
        ([90, 91, 92], 1, 2),
        ([90, 91, 92], 2, 1),
        ([7, 90], 1, 1),
    ],
)
def test_others_are_counted_though_a_container_hides_our_own_ids(processes: list[int], ours: int, count: int) -> None:
    """7 is the worker, 6 its session, which has the card open too where two processes are ours."""
    assert others(processes, {6, 7}, ours) == count


def test_a_session_that_has_the_card_open_is_no_stranger(nvml: FakeNvml) -> None:
    """Point 9: tune() or verify() in a process that called attention() before, its id hidden or not."""
    card, hidden = nvml.cards["GPU-1"], 10**9
    card.processes = [os.getpid(), os.getppid()]
    assert Sensors("GPU-1", ours=2).read().contended is False
    card.processes = [hidden, hidden + 1]
    assert Sensors("GPU-1", ours=2).read().contended is False
    assert Sensors("GPU-1").read().contended is True
    card.processes += [hidden + 2]
    assert Sensors("GPU-1", ours=2).read().contended is True


class SlowingBench(FakeBench):
    """Its clock halves while candidates 4 to 6 are measured: for all of the time, or the first time only."""

    def __init__(self, *, lasting: bool, reason: str = "") -> None:
        super().__init__()
        self.lasting = lasting
        self.reason = reason
        self.slow = False
        self.times: list[int] = []
        self.watch = Watch(self.read, self.cool)

    def cool(self, seconds: float) -> None:
        self.slow = False

    def read(self) -> Readings:
        return Readings(990.0 if self.slow else 1980.0, 600.0, 60.0, self.reason if self.slow else "", False)

    def readings(self) -> Readings:
        return self.watch.last

    def attempt(
        self, problem: Problem, config: Config, built: Built, best: float | None, default: Config | None = None
    ) -> Outcome:
        self.attempts.append((problem, config))
        number, times = len(self.attempts), []

        def measure() -> Timing:
            times.append(number)
            self.slow = number in (4, 5, 6) and (self.lasting or len(times) == 1)
            seconds = self.seconds(config) * (2 if self.slow else 1)
            return Timing(seconds, seconds, seconds, 20)

        timing = self.watch.measured(measure)
        self.slow = False
        self.times.append(len(times))
        return Outcome(status="ok", stage="measure", timing=timing, readings=self.watch.last)


def rows_of(path: Path, bench: FakeBench) -> list[Any]:
    """Measured rows in the order in which they were tried."""
    with Store.open(path, readonly=True) as store:
        rows = {each.config: each for each in store.measurements(problem=PROBLEM, stage="measure")}
    return [rows[config] for _, config in bench.attempts]


@pytest.mark.parametrize("reason", ["", "hw_slowdown"])
def test_a_clock_that_halves_for_three_candidates_is_measured_again(tmp_path: Path, reason: str) -> None:
    """D65, where it passes."""
    bench = SlowingBench(lasting=False, reason=reason)
    report = run(tmp_path / "tuned.db", [PROBLEM], 10, bench=bench)
    assert bench.times == [1, 1, 1, 2, 2, 2, 1, 1, 1, 1]
    rows = rows_of(tmp_path / "tuned.db", bench)
    assert [each.clock_mhz for each in rows] == [1980.0] * 10
    assert [each.median_us for each in rows] == [pytest.approx(bench.seconds(each.config) * 1e6) for each in rows]
    assert not any(each.flagged for each in rows)
    assert not report.flagged


@pytest.mark.parametrize("reason", ["", "hw_slowdown", "hw_thermal"])
def test_a_clock_that_stays_halved_is_flagged(tmp_path: Path, reason: str) -> None:
    """D65, where it lasts."""
    bench = SlowingBench(lasting=True, reason=reason)
    report = run(tmp_path / "tuned.db", [PROBLEM], 10, bench=bench)
    assert bench.times == [1, 1, 1, 2, 2, 2, 1, 1, 1, 1]
    rows = rows_of(tmp_path / "tuned.db", bench)
    assert [each.clock_mhz for each in rows] == [1980.0] * 3 + [990.0] * 3 + [1980.0] * 4
    assert [each.flagged for each in rows] == [False] * 3 + [True] * 3 + [False] * 4
    assert all("slow_clock" in (each.throttle or "") for each in rows[3:6])
    assert sum(report.flagged.values()) == (6 if reason == "hw_thermal" else 3)


def test_one_note_says_what_is_not_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    """D65, without NVML: two devices, one note."""
    benches = [FakeBench(unit=f"GPU-{each}") for each in "ab"]
    for each in benches:
        each.evidence = Evidence(unit=each.uuid, note="clock is not recorded: nvidia-ml-py is not installed")
    report = run(tmp_path / "tuned.db", [PROBLEM, problem(512)], 8, benches=benches)
    assert report.note == "clock is not recorded: nvidia-ml-py is not installed"
    assert report.tried == 8
    assert not report.stopped


def test_strangers_on_the_card_are_counted_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = FakeBench()
    monkeypatch.setattr(bench, "readings", lambda: Readings(contended=True))
    report = run(tmp_path / "tuned.db", [PROBLEM], 5, bench=bench)
    assert report.flagged == {"another process had the card open": 5}
    with Store.open(tmp_path / "tuned.db", readonly=True) as store:
        assert {each.contended for each in store.measurements(stage="final")} == {True}
        assert {each.contended for each in store.measurements(stage="measure")} == {READINGS.contended}
