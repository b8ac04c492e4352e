"""What the card says around measurements: read, repeated where it was slowed down, flagged and stored."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import DRIVER, NEW_NAMES, FakeNvml
from tuner_fakes import READINGS, FakeBench, problem, run

from flashtune.codegen import device
from flashtune.codegen.config import Config
from flashtune.codegen.problem import Problem
from flashtune.tuned_db.records import THROTTLES
from flashtune.tuned_db.store import Store
from flashtune.tuner.build import Built
from flashtune.tuner.readings import REASONS, Readings, Sensors, Watch, others
from flashtune.tuner.timing import Timing
from flashtune.tuner.trial import Evidence, Outcome

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
    assert device.driver_version() == DRIVER
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
    assert set(REASONS.values()) | {"slow_clock"} == set(THROTTLES)


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
    ("processes", "count"), [([], 0), ([7], 0), ([7, 8], 1), ([90], 0), ([90, 91], 1), ([90, 91, 92], 2), ([7, 90], 1)]
)
def test_others_are_counted_though_a_container_hides_our_own_id(processes: list[int], count: int) -> None:
    assert others(processes, 7) == count


class Run:
    """Measurements of one after the other; ``states`` says how the card is at each reading."""

    def __init__(self, states: list[Readings]) -> None:
        self.states = states
        self.at = 0
        self.measured = 0
        self.pauses: list[float] = []
        self.watch = Watch(self.read, self.pauses.append)

    def read(self) -> Readings:
        return self.states[min(self.at, len(self.states) - 1)]

    def measure(self) -> int:
        self.at += 1
        self.measured += 1
        return self.measured


def test_a_sound_measurement_is_made_once() -> None:
    run = Run([Readings(1980.0, 600.0, 60.0, "power_cap", False)])
    assert run.watch.measured(run.measure) == 1
    assert run.watch.last == run.states[0]
    assert not run.pauses


@pytest.mark.parametrize("word", ["hw_slowdown", "hw_thermal", "sw_thermal", "power_brake"])
def test_a_slowdown_that_passes_costs_a_second_measurement(word: str) -> None:
    run = Run([Readings(1980.0, throttle=""), Readings(1980.0, throttle=word), Readings(1980.0, throttle="")])
    run.states = [Readings(1980.0, throttle=word), Readings(1980.0, throttle=""), Readings(1980.0, throttle="")]
    assert run.watch.measured(run.measure) == 2
    assert run.watch.last.throttle == ""
    assert len(run.pauses) == 1


def test_a_slowdown_that_lasts_is_flagged() -> None:
    run = Run([Readings(1500.0, 300.0, 91.0, "hw_thermal,power_cap")])
    assert run.watch.measured(run.measure) == 2
    assert run.watch.last == Readings(1500.0, 300.0, 91.0, "hw_thermal,power_cap")
    assert run.watch.last.slowed


@pytest.mark.parametrize("word", ["power_cap", "sync_boost", "clock_setting"])
def test_a_clock_that_is_held_down_on_purpose_is_no_slowdown(word: str) -> None:
    run = Run([Readings(1980.0, throttle="")])
    run.watch.measured(run.measure)
    run.states = [Readings(1000.0, throttle=word)]
    run.watch.measured(run.measure)
    assert run.measured == 2
    assert not run.watch.last.slowed


def test_unknown_stays_unknown() -> None:
    run = Run([Readings()])
    run.watch.measured(run.measure)
    assert run.watch.last == Readings()


def test_a_stranger_at_either_end_is_noticed() -> None:
    for states in ([True, False], [False, True]):
        run = Run([Readings(contended=each) for each in states])
        run.watch.measured(run.measure)
        assert run.watch.last.contended is True


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


@pytest.mark.parametrize("reason", ["", "hw_slowdown"])
def test_a_clock_that_stays_halved_is_flagged(tmp_path: Path, reason: str) -> None:
    """D65, where it lasts."""
    bench = SlowingBench(lasting=True, reason=reason)
    report = run(tmp_path / "tuned.db", [PROBLEM], 10, bench=bench)
    assert bench.times == [1, 1, 1, 2, 2, 2, 1, 1, 1, 1]
    rows = rows_of(tmp_path / "tuned.db", bench)
    assert [each.clock_mhz for each in rows] == [1980.0] * 3 + [990.0] * 3 + [1980.0] * 4
    assert [each.flagged for each in rows] == [False] * 3 + [True] * 3 + [False] * 4
    assert all("slow_clock" in (each.throttle or "") for each in rows[3:6])
    assert sum(report.flagged.values()) == (6 if reason else 3)


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
