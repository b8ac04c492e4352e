"""`DeviceBench` on a simulated device: good kernels pass and each kind of wrong one fails.

What the device really does is tested in tests/gpu. Faults that only the full size shows are in test_full_size.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
from simulated_device import (
    BUILT,
    CONFIG,
    LAUNCH_SECONDS,
    OTHER,
    PROBLEM,
    Change,
    Simulation,
    before_the_start,
    behind_the_end,
    last_column,
    lse_not_written,
    lse_shifted,
    odd_rows_poisoned,
    zeros,
)
from tuner_fakes import FAMILY, GPU

from flashtune.codegen.families.fma_fwd import FmaFwd
from flashtune.tuner.bench import exact
from flashtune.tuner.bench import timer as measure
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.search.space import make_space
from flashtune.tuner.trial.outcome import DeviceLostError
from flashtune.tuner.trial.sensors import Readings, Watch
from flashtune.tuner.trial.timing import MAX_ROUNDS


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    return Simulation(monkeypatch)


def test_a_right_kernel_is_measured(simulation: Simulation) -> None:
    outcome = simulation.attempt()
    assert outcome.status == "ok", outcome.message
    assert outcome.stage == "measure"
    assert outcome.seconds == pytest.approx(LAUNCH_SECONDS)
    assert outcome.max_error is not None
    assert outcome.max_error > 0


@pytest.mark.parametrize("head_dim_v", [16, 64])
@pytest.mark.parametrize("limit", [10**6, 10 * 4 * 16])
def test_values_of_another_width(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, limit: int, head_dim_v: int
) -> None:
    """Where all of the output has a reference and where only its last rows have; then with a fault."""
    monkeypatch.setattr(exact, "REFERENCE_ELEMENTS", limit)
    problem = dataclasses.replace(PROBLEM, head_dim_v=head_dim_v)
    config = FmaFwd().default(problem.spec, GPU)
    for wanted in (problem, PROBLEM, problem):  # buffers that the other problem has left
        assert simulation.bench.prepare(wanted) is None
        outcome = simulation.bench.attempt(wanted, config, BUILT, None)
        assert outcome.status == "ok", outcome.message
    simulation.only_at, simulation.change = problem, last_column
    assert "rows" in simulation.bench.attempt(problem, config, BUILT, None).message


def test_a_slow_kernel_is_only_screened(simulation: Simulation) -> None:
    assert simulation.attempt(best=LAUNCH_SECONDS / 2).stage == "screen"
    hopeless = simulation.attempt(best=LAUNCH_SECONDS / 10)
    assert hopeless.timing is not None
    assert hopeless.timing.count == 1


@pytest.mark.parametrize(
    "change",
    [zeros, last_column, lse_shifted, lse_not_written, odd_rows_poisoned, behind_the_end, before_the_start],
)
def test_a_wrong_kernel_is_rejected_untimed(simulation: Simulation, change: Change) -> None:
    """D59: zeros, the last column alone, and what else can be wrong."""
    simulation.change = change
    outcome = simulation.attempt()
    assert outcome.status == "wrong", outcome
    assert outcome.timing is None
    assert outcome.message


@pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "at-full-size-only"])
def test_a_kernel_that_leaves_what_a_good_one_wrote_is_rejected(simulation: Simulation, everywhere: bool) -> None:
    """D60: it writes even rows only, and the odd ones hold the right values of the kernel before it."""
    assert simulation.attempt().status == "ok"
    simulation.rows = slice(0, None, 2)
    simulation.only_at = None if everywhere else PROBLEM
    worse = simulation.bench.attempt(PROBLEM, dataclasses.replace(CONFIG, num_stages=2), OTHER, None)
    assert worse.status == "wrong"
    assert worse.timing is None
    simulation.rows = slice(None)
    assert simulation.attempt().status == "ok"


def test_the_same_config_first_and_last_of_twelve_takes_the_same_time(simulation: Simulation) -> None:
    """D64: loading takes 1000 launches of time, which no measurement may hold; launches differ by up to 4 %."""
    draw = random.Random(0)
    simulation.duration = lambda first: 1000.0 if first else draw.uniform(0.98, 1.02)
    configs = [CONFIG, *(each for each in make_space(PROBLEM, GPU, FAMILY).configs if each != CONFIG)][:11]
    assert simulation.bench.prepare(PROBLEM) is None
    timings = []
    for number, config in enumerate([*configs, CONFIG]):
        outcome = simulation.bench.attempt(PROBLEM, config, Built(digest=f"{number:064x}", registers=96), None)
        assert outcome.status == "ok", outcome.message
        assert outcome.timing is not None
        timings.append(outcome.timing)
    first, last = timings[0], timings[-1]
    assert first.median == pytest.approx(last.median, rel=first.spread)
    assert 0 < first.spread < 0.04
    assert all(0.98 * LAUNCH_SECONDS <= each.median <= 1.02 * LAUNCH_SECONDS for each in timings)


def test_readings_around_each_measurement_come_with_it(simulation: Simulation) -> None:
    """D65 on the device side: the clock halves while one candidate is timed, first once, then for good."""
    sound_pair, slow_pair = [False, False], [False, True]
    clocks = iter([*sound_pair, *slow_pair, *sound_pair, *slow_pair, *slow_pair])
    simulation.bench._watch = Watch(
        lambda: Readings(990.0 if next(clocks) else 1980.0, throttle=""), pause=lambda seconds: None
    )
    sound = simulation.attempt()
    again = simulation.attempt()
    flagged = simulation.attempt()
    assert [each.readings.throttle for each in (sound, again, flagged)] == ["", "", "slow_clock"]
    assert [each.readings.clock_mhz for each in (sound, again, flagged)] == [1980.0, 1980.0, 990.0]
    assert {each.status for each in (sound, again, flagged)} == {"ok"}
    assert next(clocks, None) is None, "two readings for each of five measurements"


def test_copies_of_a_config_are_interleaved_like_finalists(simulation: Simulation) -> None:
    assert simulation.attempt().status == "ok"
    rounds = simulation.bench.alike(PROBLEM, CONFIG, 2, 0.0)
    assert [len(times) for times in rounds] == [measure.MIN_ROUNDS] * 2


def test_a_kernel_that_changes_its_inputs_is_rejected(simulation: Simulation) -> None:
    """D60, the inputs."""
    simulation.spoil_input = "k"
    assert simulation.attempt().message == "changed its input k"


def test_a_kernel_that_gives_two_results_is_rejected(simulation: Simulation) -> None:
    calls = itertools.count()

    def change(out: np.ndarray, lse: np.ndarray) -> None:
        out.view(np.uint16)[0, 0, 0, 0] ^= next(calls) & 1

    simulation.change = change
    assert "two launches" in simulation.attempt().message


@pytest.mark.parametrize("limit", [10**6, 40 * 4 * 32, 10 * 4 * 32], ids=["all", "last-entry", "last-rows"])
@pytest.mark.parametrize("change", [zeros, lse_shifted, lse_not_written, odd_rows_poisoned])
def test_what_only_the_full_size_shows_is_found(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, change: Change, limit: int
) -> None:
    monkeypatch.setattr(exact, "REFERENCE_ELEMENTS", limit)
    simulation.only_at = PROBLEM
    assert simulation.attempt().status == "ok"
    simulation.change = change
    outcome = simulation.attempt()
    assert outcome.status == "wrong"
    assert "rows" in outcome.message


def test_rows_without_a_reference_must_still_be_written(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "REFERENCE_ELEMENTS", 10 * 4 * 32)
    simulation.only_at = PROBLEM

    def change(out: np.ndarray, lse: np.ndarray) -> None:
        out[0, 3] = 0xFFFF

    simulation.change = change
    assert simulation.attempt().status == "wrong"


def test_a_crash_says_that_the_device_is_lost(simulation: Simulation) -> None:
    assert simulation.bench.prepare(PROBLEM) is None
    simulation.crash = True
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        simulation.attempt()


def test_finals_interleave_all_configs(simulation: Simulation) -> None:
    assert simulation.attempt().status == "ok"
    other = dataclasses.replace(CONFIG, num_stages=2)
    rounds = simulation.bench.finals(PROBLEM, [CONFIG, other], 0.0)
    assert {len(times) for times in rounds.values()} == {measure.MIN_ROUNDS}
    assert set(rounds) == {CONFIG, other}


def test_too_large_a_problem_is_skipped_with_its_need(simulation: Simulation) -> None:
    """D63, the inputs. A candidate's own memory is in test_out_of_memory.py."""
    large = dataclasses.replace(PROBLEM, batch=2**12, seqlen_q=2**12, seqlen_k=2**12)
    reason = simulation.bench.prepare(large)
    assert reason is not None
    assert "GB of device memory" in reason


def test_problems_share_inputs_and_stay_correct_when_buffers_grow(simulation: Simulation) -> None:
    assert simulation.attempt().status == "ok"
    longer = dataclasses.replace(PROBLEM, seqlen_q=200, seqlen_k=300)
    assert simulation.bench.prepare(longer) is None
    assert simulation.bench.attempt(longer, CONFIG, BUILT, None).status == "ok"
    assert simulation.attempt().status == "ok"


def test_a_clock_that_moves_leaves_the_ratio_to_the_default(simulation: Simulation) -> None:
    """Launches get slower by a fifth during the measurement, and by 2 % at random."""
    assert simulation.attempt().ratio is None
    draw, started = random.Random(0), simulation.runtime.launches
    simulation.duration = lambda first: draw.uniform(0.99, 1.01) * (1 + (simulation.runtime.launches - started) / 400)
    other = dataclasses.replace(CONFIG, num_stages=2 if CONFIG.num_stages != 2 else 3)
    outcome = simulation.bench.attempt(PROBLEM, other, OTHER, None, CONFIG)
    assert outcome.timing is not None
    assert outcome.timing.q80 > 1.05 * outcome.timing.q20
    assert outcome.ratio is not None
    assert outcome.ratio.median == pytest.approx(1.0, abs=0.01)
    assert outcome.baseline == pytest.approx(outcome.timing.median, rel=0.02)


@pytest.mark.parametrize("seconds", [1e-3, 1e-2, 0.5], ids=["short", "long", "very-long"])
def test_launches_in_turns_have_the_clock_of_the_other_as_often(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Behind a launch of the other the clock is 10 % lower: times differ with the order, which a ratio has to bear."""
    timer, order = simulation.bench._timer, []

    def launched(launches: list[str]) -> list[float]:
        order.extend(launches)
        before = ["", *launches[:-1]]
        return [seconds * (1.1 if last not in ("", each) else 1.0) for last, each in zip(before, launches, strict=True)]

    monkeypatch.setattr(timer, "_seconds", launched)
    found = timer.measure("candidate", None, "default")
    assert found.ratio.median == pytest.approx(1.0, abs=0.05)
    assert order.count("default") >= 3
    if seconds < 0.3:
        rounds = order[-4 * (len(found.own) // 2) :]
        assert rounds == ["candidate", "default", "default", "candidate"] * (len(found.own) // 2)
        assert found.ratio.rounds == len(found.own) >= 9
        assert sum(found.own) == pytest.approx(sum(found.default), rel=0.02)


RACE = {"default": 1.2, "best": 1.0, "near": 1.003, "slow": 1.1}


@pytest.mark.parametrize(
    ("margin", "rounds"),
    [
        (None, (MAX_ROUNDS,) * 4),
        (0.005, (MAX_ROUNDS, MAX_ROUNDS, MAX_ROUNDS, 9)),
        (0.15, (MAX_ROUNDS,) * 4),
        (0.001, (MAX_ROUNDS, MAX_ROUNDS, 9, 9)),
    ],
)
def test_the_slow_leave_a_race_and_the_default_stays(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, margin: float | None, rounds: tuple[int, ...]
) -> None:
    timer = simulation.bench._timer
    monkeypatch.setattr(timer, "seconds", lambda launch, count: [launch()] * count)
    launches = {name: (lambda seconds=seconds: seconds) for name, seconds in RACE.items()}
    found = timer.interleaved(launches, 60.0, margin)
    assert tuple(len(times) for times in found.values()) == rounds
    assert list(found) == list(RACE)
