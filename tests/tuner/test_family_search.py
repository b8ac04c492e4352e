"""The search through a space: in what order it asks, that it repeats nothing, and what it learns from."""

from __future__ import annotations

import dataclasses

import numpy as np
import optuna
import pytest
from tuner_fakes import FAMILY, GPU, landscape, problem

from flashtune.codegen.plan.config import Config
from flashtune.tuner.search.family_search import FamilySearch
from flashtune.tuner.search.space import Space, make_space
from flashtune.tuner.search.strategy import EXHAUSTIVE, strategy

SPACE = make_space(problem(), GPU, FAMILY)


def smaller(count: int) -> Space:
    return Space(SPACE.family, SPACE.configs[:count], SPACE.estimates[:count], SPACE.rejected)


def test_small_spaces_are_walked_in_the_models_order() -> None:
    space = smaller(EXHAUSTIVE)
    search = FamilySearch(space)
    asked = []
    while (config := search.ask()) is not None:
        asked.append(config)
        search.tell(config, landscape(config))
    assert asked == list(space.configs)


@pytest.mark.parametrize("failing", [0, 3], ids=["all-correct", "every-third-fails"])
def test_a_search_asks_for_every_legal_config_exactly_once(failing: int) -> None:
    space = smaller(EXHAUSTIVE + 30)
    search = FamilySearch(space, seed=3)
    asked: list[Config] = []
    while (config := search.ask()) is not None:
        asked.append(config)
        search.tell(config, None if failing and len(asked) % failing == 0 else landscape(config))
    assert sorted(config.key for config in asked) == sorted(config.key for config in space.configs)


def test_several_configs_may_be_out_at_once() -> None:
    search = FamilySearch(SPACE, seed=1)
    out = [search.ask() for _ in range(30)]
    assert len(set(out)) == 30


def test_a_search_starts_with_what_it_is_told_and_leaves_out_what_is_known() -> None:
    first = [SPACE.configs[40], SPACE.configs[9], SPACE.configs[40]]
    known = {SPACE.configs[0]: 1e-3, SPACE.configs[1]: None, SPACE.configs[9]: 2e-3}
    search = FamilySearch(SPACE, known=known, first=first)
    asked = [search.ask() for _ in range(20)]
    assert asked[0] == SPACE.configs[40]
    assert not set(asked) & set(known)


def test_known_times_steer_the_search() -> None:
    """With many results known, proposals are better than the average of the space."""
    known = {config: landscape(config) for config in SPACE.configs[::4]}
    search = FamilySearch(SPACE, known=known, seed=5)
    asked = [search.ask() for _ in range(24)]
    mean = np.mean([landscape(config) for config in asked if config is not None])
    assert mean < 0.9 * np.mean([landscape(config) for config in SPACE.configs])


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_share_of_the_trials_goes_next_to_the_fastest(share: float) -> None:
    """So that all around the fastest is tried, which random proposals alone leave to chance."""
    target = SPACE.configs[len(SPACE) // 2]

    def distance(config: Config) -> int:
        own, other = SPACE.point(config), SPACE.point(target)
        return sum(abs(own[name] - other[name]) for name in own)

    search = FamilySearch(SPACE, dataclasses.replace(strategy("random"), near_share=share), seed=3)
    tried = set()
    for _ in range(80):
        config = search.ask()
        assert config is not None
        search.tell(config, 1e-3 * (1 + distance(config)))
        tried.add(config)
    fastest = min(tried, key=distance)
    assert (SPACE.neighbour(fastest, tried) is None) == (share > 0)


def test_searching_leaves_the_callers_log_level_alone() -> None:
    before = optuna.logging.get_verbosity()
    FamilySearch(SPACE).ask()
    assert optuna.logging.get_verbosity() == before
