"""What proposes configs: the names that are allowed, and that each proposes legal ones that are new."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import IntDistribution
from optuna.samplers import BaseSampler
from tuner_fakes import FAMILY, GPU, FakeBench, landscape, problem, run

import flashtune
from flashtune.cli import main
from flashtune.codegen.plan.config import Config
from flashtune.errors import InvalidInput, InvalidType
from flashtune.tuner.search import strategy as strategies
from flashtune.tuner.search.family_search import FamilySearch
from flashtune.tuner.search.gaussian_process import ResidualSampler
from flashtune.tuner.search.space import Space, make_space
from flashtune.tuner.search.strategy import DEFAULT_SAMPLER, proposal, strategy

SPACE = make_space(problem(), GPU, FAMILY)
NAMES = ["residual", "tpe", "random", "exhaustive", "optuna:NSGAIISampler", "optuna:TPESampler"]


def asked(search: FamilySearch, count: int) -> list[Config]:
    found = []
    for _ in range(count):
        config = search.ask()
        assert config is not None
        search.tell(config, landscape(config))
        found.append(config)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_each_sampler_asks_for_legal_configs_once(name: str) -> None:
    found = asked(FamilySearch(SPACE, strategy(name), seed=2), 40)
    assert len(set(found)) == 40
    assert set(found) <= set(SPACE.configs)


def test_exhaustive_is_the_models_order_however_large_the_space() -> None:
    assert asked(FamilySearch(SPACE, strategy("exhaustive")), 70) == list(SPACE.configs[:70])


def test_random_knows_no_model_and_depends_on_the_seed() -> None:
    one, two = (asked(FamilySearch(SPACE, strategy("random"), seed=seed), 40) for seed in (1, 2))
    assert one != two
    for found in (one, two):
        assert np.mean([SPACE.rank[config] for config in found]) > len(SPACE) / 4


@pytest.mark.parametrize(
    "name",
    [
        "", "TPE", "TPESampler", "optuna:", "optuna:Nope", "optuna:nsgaii", "optuna:GridSampler", "optuna:BaseSampler",
        "optuna:PartialFixedSampler", "optuna:BruteForceSampler", "optuna:__name__", "optuna:samplers.TPESampler",
        "os:system", "optuna:tpe", "x" * 500,
    ],
)  # fmt: skip
def test_other_names_are_refused_with_what_is_allowed_and_nothing_is_imported(name: str) -> None:
    before = set(sys.modules)
    with pytest.raises(
        InvalidInput, match=r"Allowed: residual, tpe, random, exhaustive, .*optuna:TPESampler"
    ) as caught:
        strategy(name)
    assert "BruteForce" not in str(caught.value).partition("Allowed")[2]
    assert len(str(caught.value)) < 500
    assert set(sys.modules) == before


def test_the_default_is_the_same_everywhere() -> None:
    (option,) = (each for each in main.tune.params if each.name == "sampler")
    assert option.default == DEFAULT_SAMPLER
    assert inspect.signature(flashtune.tune).parameters["sampler"].default == DEFAULT_SAMPLER
    assert strategy(DEFAULT_SAMPLER).name == DEFAULT_SAMPLER


def test_a_name_that_is_no_text_is_refused() -> None:
    wrong: Any = optuna.samplers.RandomSampler
    with pytest.raises(InvalidType, match="must be text"):
        strategy(wrong)


def test_a_sampler_that_can_not_work_here_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Needy(optuna.samplers.RandomSampler):
        def sample_independent(self, *_: Any) -> Any:
            raise ModuleNotFoundError("No module named 'numbers2'")

    monkeypatch.setattr(optuna.samplers, "RandomSampler", Needy)
    with pytest.raises(InvalidInput, match=r"optuna:RandomSampler can't be used here: ModuleNotFoundError.*numbers2"):
        strategy("optuna:RandomSampler")


@pytest.mark.parametrize("name", [each for each in NAMES if each.startswith("optuna:")])
def test_trying_a_sampler_out_leaves_the_callers_log_level_alone(name: str) -> None:
    before = optuna.logging.get_verbosity()
    strategy(name)
    assert optuna.logging.get_verbosity() == before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", [optuna.logging.DEBUG, optuna.logging.INFO, optuna.logging.WARNING])
def test_a_search_writes_no_line_of_optunas(caplog: pytest.LogCaptureFixture, name: str, level: int) -> None:
    """A hole in the tests: Optuna tells of each study that is made, whatever level its user has chosen."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(level)
    optuna.logging.enable_propagation()
    try:
        asked(FamilySearch(SPACE, strategy(name), seed=2), 12)
        assert optuna.logging.get_verbosity() == level
    finally:
        optuna.logging.disable_propagation()
        optuna.logging.set_verbosity(before)
    assert [each.getMessage() for each in caplog.records if each.name.startswith("optuna")] == []


def test_what_a_sampler_leaves_out_is_sampled_alone() -> None:
    class Half(optuna.samplers.RandomSampler):
        def infer_relative_search_space(self, *_: Any) -> dict[str, Any]:
            return {"first": ranges["first"]}

        def sample_relative(self, *_: Any) -> dict[str, Any]:
            return {"first": 7}

    ranges: strategies.Ranges = {"first": IntDistribution(0, 9), "second": IntDistribution(3, 3)}
    study = optuna.create_study(sampler=Half(seed=0))
    trial = study.ask()
    assert proposal(Half(seed=0), study, study.trials[trial.number], ranges) == {"first": 7, "second": 3}


def misjudged(space: Space, factor: float) -> dict[Config, float]:
    """Times as the model expects them, but for what has several stages, which takes ``factor`` as long."""
    expected = zip(space.configs, space.estimates, strict=True)
    stages = {config: int(config.to_json()["num_stages"]) for config in space.configs}
    return {config: each.seconds * (factor if stages[config] == 1 else 1.0) for config, each in expected}


@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_the_default_sampler_learns_what_the_model_is_off_by(factor: float) -> None:
    times = misjudged(SPACE, factor)
    search = FamilySearch(SPACE, strategy("residual"))
    best, found = min(times.values()), []
    for _ in range(24):
        config = search.ask()
        assert config is not None
        search.tell(config, times[config])
        found.append(times[config])
    assert min(found) == best
    unlearned = [times[config] for config in SPACE.configs[:24]]
    assert np.mean(found[12:]) < np.mean(unlearned[12:])


def test_the_default_sampler_avoids_what_is_like_a_failure() -> None:
    failing = {config for config in SPACE.configs if config.to_json()["num_stages"] == 1}
    search = FamilySearch(SPACE, strategy("residual"))
    found = []
    for _ in range(40):
        config = search.ask()
        assert config is not None
        search.tell(config, None if config in failing else SPACE.estimates[SPACE.rank[config]].seconds)
        found.append(config)
    assert len(failing & set(found[10:])) < len(failing & set(SPACE.configs[:40]))


def test_learning_one_result_at_a_time_is_a_gaussian_process() -> None:
    """Against the formulas, solved in one go."""
    from flashtune.tuner.search import gaussian_process

    process = gaussian_process._Process(SPACE)
    ranks = list(range(0, 60, 3))
    rng = np.random.default_rng(5)
    values = process.expected[ranks] + 0.3 + 0.1 * rng.standard_normal(len(ranks))
    for rank, value in zip(ranks, values, strict=True):
        process.tell(rank, float(value))
    distance = np.abs(SPACE.grid[:, None] - SPACE.grid[ranks][None]).sum(axis=2)
    shared = gaussian_process.SPREAD**2 * np.exp(-distance / gaussian_process.RANGE)
    within = shared[ranks] + gaussian_process.NOISE**2 * np.eye(len(ranks))
    off = values - process.expected[ranks]
    mean = shared @ np.linalg.solve(within, off - np.median(off))
    left = gaussian_process.SPREAD**2 - (shared * np.linalg.solve(within, shared.T).T).sum(axis=1)
    np.testing.assert_allclose(process.means[0] - np.median(off) * process.means[1], mean, atol=1e-9)
    np.testing.assert_allclose(process.left, left, atol=1e-9)
    score = process.expected + mean - np.sqrt(left)
    score[ranks] = np.inf
    assert process.best([]) == int(np.argmin(score))


def test_configs_that_are_out_spread_the_next_ones() -> None:
    sampler: BaseSampler = ResidualSampler(SPACE)
    search = FamilySearch(SPACE, strategies.Strategy("alone", lambda space, seed: sampler, startup=0, model_share=0.0))
    out = [search.ask() for _ in range(30)]
    assert len(set(out)) == 30


def test_a_run_takes_the_sampler_it_is_told(tmp_path: Path) -> None:
    benches = {name: FakeBench() for name in ("exhaustive", "random")}
    for name, bench in benches.items():
        run(tmp_path / f"{name}.db", [problem()], 12, bench=bench, sampler=name)
    default = FAMILY.default(problem().spec, GPU)
    walked = [config for _, config in benches["exhaustive"].attempts if config != default]
    assert walked == [config for config in SPACE.configs if config != default][: len(walked)]
    assert benches["random"].attempts[1:] != benches["exhaustive"].attempts[1:]
