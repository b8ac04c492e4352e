"""`flashtune noise` on fake benches: a sound machine passes, and what disturbs one is seen."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from click.testing import CliRunner
from tuner_fakes import FAMILY, GPU, READINGS, FakeBench, FakeBuilder, problem

from flashtune.cli.main import main
from flashtune.cli.tune.noise import print_noise
from flashtune.codegen.gpu import devices
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import FlashtuneError
from flashtune.tuner.commands import noise as module
from flashtune.tuner.commands.noise import Noise, against_itself
from flashtune.tuner.trial.outcome import Outcome
from flashtune.tuner.trial.sensors import Readings

PROBLEM = problem()
CONFIG = FAMILY.default(PROBLEM.spec, GPU)


class Machine(FakeBench):
    """Finals of 25 rounds of 1 ms; ``sigma`` is the noise of a round, ``second`` what the second candidate takes."""

    def __init__(self, sigma: float, second: float = 1.0, readings: Readings = READINGS) -> None:
        super().__init__(lambda config: 1e-3)
        self.sigma, self.second = sigma, second
        self.said = readings
        self.random = random.Random(5)

    def alike(self, problem: Problem, config: Config, copies: int, seconds: float) -> list[list[float]]:
        drift = [self.random.uniform(0.8, 1.2) for _ in range(25)]
        return [
            [1e-3 * each * factor * self.random.gauss(1, self.sigma) for each in drift]
            for factor in (1.0, self.second)[:copies]
        ]

    def readings(self) -> Readings:
        return self.said


def noise_of(bench: FakeBench, finals: int = 200) -> Noise:
    return against_itself(bench, PROBLEM, CONFIG, FakeBuilder(), finals)


def test_a_sound_machine_has_few_false_wins() -> None:
    found = noise_of(Machine(0.01))
    assert len(found.ratios) == 200
    assert {each.rounds for each in found.ratios} == {25}
    assert 1 <= found.false_wins <= found.expected_most
    assert found.seconds == pytest.approx(1e-3, rel=0.02)
    assert not found.flagged


def test_the_differences_that_can_be_told_follow_the_noise() -> None:
    calm, loud = noise_of(Machine(0.001)), noise_of(Machine(0.01))
    assert loud.smallest_difference == pytest.approx(10 * calm.smallest_difference, rel=0.1)
    assert loud.half_width == pytest.approx(10 * calm.half_width, rel=0.1)
    assert 0.005 < loud.smallest_difference < 0.02


@pytest.mark.parametrize("part", [0.5, 1.0, 2.0])
def test_a_difference_of_that_size_is_told_and_half_of_it_seldom(part: float) -> None:
    told = noise_of(Machine(0.01)).smallest_difference
    seen = noise_of(Machine(0.01, second=1 - part * told)).false_win_rate
    assert (part < 1 and seen < 0.8) or (part >= 1 and seen >= 0.9)


def test_a_machine_with_a_bias_is_found_out() -> None:
    """As where one of two neighbours in a round always meets a warm cache."""
    found = noise_of(Machine(0.002, second=0.99), finals=40)
    assert found.false_wins > found.expected_most


@pytest.mark.parametrize(("finals", "most"), [(1, 1), (40, 6), (200, 18)])
def test_how_many_false_wins_are_chance(finals: int, most: int) -> None:
    """Binomial with 5 %: 99 % quantiles, as tables have them."""
    assert noise_of(Machine(0.01), finals).expected_most == most


def test_what_disturbed_the_finals_is_counted() -> None:
    found = noise_of(Machine(0.01, readings=Readings(throttle="power_cap,hw_thermal", contended=True)), finals=3)
    assert found.flagged == {"hw_thermal": 3, "contended": 3}


def test_a_config_that_is_wrong_is_not_timed() -> None:
    bench = FakeBench(outcome=lambda config, number: Outcome(status="wrong", message="row 3"))
    with pytest.raises(FlashtuneError, match="wrong: row 3"):
        noise_of(bench)


def test_a_problem_that_does_not_fit_says_so() -> None:
    bench = FakeBench(unprepared="needs 900 GB")
    with pytest.raises(FlashtuneError, match="900 GB"):
        against_itself(bench, problem(8192), CONFIG, FakeBuilder(), 3)


def test_without_a_gpu_there_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", list)
    done = CliRunner().invoke(main, ["noise"])
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert done.output.count("\n") == 1


class Unit:
    def __init__(self, index: int, gpu: object, uuid: str) -> None:
        self.index = index

    def open(self) -> FakeBench:
        return Machine(0.01)

    def sources(self, problem: Problem) -> Sequence[object]:
        return []


def test_the_command_prints_rate_and_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "require_device", lambda: GPU)
    monkeypatch.setattr(module, "visible_gpus", lambda: [GPU])
    monkeypatch.setattr(module, "unit_uuid", lambda index: "GPU-fake")
    monkeypatch.setattr(module, "CudaUnit", Unit)
    monkeypatch.setattr(module, "ProcessBuilder", lambda arch, workers: FakeBuilder())
    done = CliRunner().invoke(main, ["noise", "--finals", "30"])
    assert done.exit_code == 0, done.output
    assert "false wins: " in done.stdout
    assert "of 30 (" in done.stdout
    assert "smallest difference that 95 % of the finals tell: " in done.stdout
    assert "too often" not in done.stdout
    wrong = CliRunner().invoke(main, ["noise", "--device", "1"])
    assert wrong.exit_code == 1
    assert "device 1 does not exist" in wrong.output


def test_a_bad_machine_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_noise(noise_of(Machine(0.002, second=0.99, readings=Readings(contended=True)), finals=40), GPU)
    said = capsys.readouterr().out
    assert "That is too often" in said
    assert "40 finals were flagged: contended" in said
