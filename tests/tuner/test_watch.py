"""Readings around a measurement: what is a slowdown, what explains a clock, and what is measured again."""

from __future__ import annotations

import pytest

from flashtune.tuner.trial.sensors import Readings, Watch


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


@pytest.mark.parametrize("word", ["hw_thermal", "sw_thermal"])
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


@pytest.mark.parametrize("word", ["power_cap", "power_brake", "hw_slowdown"])
def test_power_is_noted_and_no_slowdown(word: str) -> None:
    """Point 9: at its power limit a card says any of these, for a moment or for as long as it works."""
    run = Run([Readings(1500.0, throttle=""), Readings(1480.0, throttle=word), Readings(1500.0, throttle="")])
    for number in range(1, 4):
        assert run.watch.measured(run.measure) == number
        assert not run.watch.last.slowed
        assert run.watch.last.throttle == (word if number < 3 else "")
    assert not run.pauses


@pytest.mark.parametrize("word", ["power_brake", "hw_slowdown"])
def test_power_that_costs_half_of_the_clock_is_a_slowdown(word: str) -> None:
    run = Run([Readings(1980.0, throttle="")])
    run.watch.measured(run.measure)
    run.states = [Readings(990.0, throttle=word)]
    run.watch.measured(run.measure)
    assert run.measured == 3
    assert run.watch.last.reasons == sorted([word, "slow_clock"])
    assert run.watch.last.slowed


def test_the_power_limit_explains_a_clock_also_when_it_was_said_before_the_load_ended() -> None:
    """Point 9: reasons go with the load, and the clock comes back later."""
    run = Run([Readings(1980.0, throttle="")])
    run.watch.measured(run.measure)
    run.states = [Readings(), Readings(1300.0, throttle="power_cap"), Readings(1300.0, throttle="")]
    run.watch.measured(run.measure)
    assert run.measured == 2
    assert run.watch.last.throttle == "power_cap"


def test_what_the_timer_noticed_is_a_slowdown_of_that_measurement_alone() -> None:
    """F14: measured again, then flagged."""
    noticed = [["slow_host"], [], ["slow_host"], []]
    asked = iter(noticed)
    run = Run([Readings(1980.0, throttle="power_cap")])
    run.watch = Watch(run.read, run.pauses.append, lambda: next(asked))
    assert run.watch.measured(run.measure) == 1, "what was timed before it does not count"
    assert run.watch.last.throttle == "power_cap"
    asked = iter([[], ["slow_host"], [], ["slow_host"]])
    assert run.watch.measured(run.measure) == 3
    assert run.watch.last.throttle == "power_cap,slow_host"
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
