"""What only a problem's own size or its ragged neighbour shows, on the simulated device: each fault is found there."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from simulated_device import (
    BUILT,
    CONFIG,
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

from flashtune.tuner.bench import device_bench as bench
from flashtune.tuner.bench import exact

NEIGHBOUR = exact.ragged(PROBLEM)


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    return Simulation(monkeypatch)


@pytest.fixture(params=[PROBLEM, NEIGHBOUR], ids=["own-size", "neighbour"])
def faulty(simulation: Simulation, request: pytest.FixtureRequest) -> Simulation:
    """A simulation whose faults show at one of the two sizes alone."""
    simulation.only_at = request.param
    assert simulation.attempt().status == "ok"
    return simulation


def assert_found(simulation: Simulation, words: str) -> None:
    outcome = simulation.bench.attempt(PROBLEM, CONFIG, OTHER, None)
    assert outcome.status == "wrong", outcome
    assert words in outcome.message
    assert str(simulation.only_at) in outcome.message
    assert outcome.timing is None


def behind_the_lse(out: np.ndarray, lse: np.ndarray) -> None:
    ctypes.memset(lse.ctypes.data + lse.nbytes, 0, 4)


def before_the_lse(out: np.ndarray, lse: np.ndarray) -> None:
    ctypes.memset(lse.ctypes.data - 4, 0, 4)


@pytest.mark.parametrize("change", [behind_the_end, before_the_start, behind_the_lse, before_the_lse])
def test_what_is_written_beside_output_or_lse_is_found(faulty: Simulation, change: Change) -> None:
    faulty.change = change
    assert_found(faulty, "wrote outside its output")


@pytest.mark.parametrize("change", [zeros, last_column, lse_shifted, lse_not_written, odd_rows_poisoned])
def test_a_wrong_result_is_found(faulty: Simulation, change: Change) -> None:
    faulty.change = change
    assert_found(faulty, "rows")


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_changed_input_is_found_and_the_next_config_has_the_right_one(faulty: Simulation, name: str) -> None:
    faulty.spoil_input = name
    assert_found(faulty, f"changed its input {name}")
    faulty.spoil_input = ""
    after = faulty.attempt()
    assert after.status == "ok", after.message


def test_a_changed_reference_is_found_and_made_again(faulty: Simulation) -> None:
    assert faulty.only_at is not None
    reference, _ = faulty.bench._full._reference(faulty.only_at)
    faulty.change = lambda out, lse: ctypes.memset(reference, 0, 8)
    assert_found(faulty, "changed its input the reference")
    faulty.change = lambda out, lse: None
    assert faulty.attempt().status == "ok"


def test_two_results_of_two_launches_are_found(faulty: Simulation) -> None:
    """Both of them within the tolerance."""
    calls = itertools.count()

    def change(out: np.ndarray, lse: np.ndarray) -> None:
        out.view(np.uint16)[-1, -1, -1, -1] ^= next(calls) & 1

    faulty.change = change
    assert_found(faulty, "two launches")


def test_a_result_that_the_second_launch_leaves_out_is_found(faulty: Simulation) -> None:
    calls = itertools.count()

    def change(out: np.ndarray, lse: np.ndarray) -> None:
        if next(calls) & 1:
            out.view(np.uint16)[-1, -1] = 0xFFFF

    faulty.change = change
    assert_found(faulty, "two launches")


@pytest.mark.parametrize("where", ["behind", "before"])
@pytest.mark.parametrize("at", ["own-size", "neighbour"])
def test_what_is_written_beside_the_workspace_is_found(simulation: Simulation, at: str, where: str) -> None:
    problem = dataclasses.replace(PROBLEM, seqlen_k=600)  # enough keys to share
    config = dataclasses.replace(CONFIG, num_splits=2)
    assert simulation.bench.prepare(problem) is None
    sound = simulation.bench.attempt(problem, config, BUILT, None)
    assert sound.status == "ok", sound.message
    simulation.beside_workspace = where
    simulation.only_at = problem if at == "own-size" else exact.ragged(problem)
    outcome = simulation.bench.attempt(problem, config, OTHER, None)
    assert outcome.status == "wrong"
    assert outcome.message == f"{simulation.only_at}: wrote outside its output"


def test_what_a_config_spoils_while_it_is_timed_is_not_blamed_on_the_next(simulation: Simulation) -> None:
    """It writes to its inputs from the fourth launch on, when all checks are over."""
    assert simulation.attempt().status == "ok"
    launches: Iterator[int] = itertools.count()
    k = simulation.bench._full._inputs(PROBLEM)[1]

    def change(out: np.ndarray, lse: np.ndarray) -> None:
        if next(launches) > 2:
            ctypes.memset(k, 0, 2)

    simulation.only_at, simulation.change = PROBLEM, change
    assert simulation.attempt().status == "ok"
    simulation.change = lambda out, lse: None
    after = simulation.attempt()
    assert after.status == "ok", after.message


def test_a_problem_that_takes_long_is_checked_at_its_own_size_alone(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "NEIGHBOUR_SECONDS", 0.0)
    simulation.only_at, simulation.change = NEIGHBOUR, zeros
    assert simulation.attempt().status == "ok"
    simulation.only_at = PROBLEM
    assert simulation.attempt().status == "wrong"


def test_an_error_between_two_sums_leaves_nothing_to_the_next_config(simulation: Simulation) -> None:
    """The second launch fails and the device survives, as where a launch has too many threads."""
    assert simulation.attempt().status == "ok"
    calls = itertools.count()
    fault = simulation.errors

    def refuse() -> None:
        if next(calls) == 3:  # behind those at the samples
            raise fault("cudaErrorLaunchOutOfResources")

    simulation.refuse = refuse
    assert simulation.bench.attempt(PROBLEM, CONFIG, OTHER, None).status == "failed"
    assert simulation.bench.attempt(PROBLEM, CONFIG, OTHER, None).status == "ok"
