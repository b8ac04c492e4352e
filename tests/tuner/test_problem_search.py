"""How the trials of one problem are shared: between families, and what is tried before the search proposes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tuner_fakes import problem

from flashtune.codegen.families.registry import families, family
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.search import problem_search
from flashtune.tuner.search.problem_search import FAMILY_FLOOR, FAMILY_TRIALS, ProblemSearch
from flashtune.tuner.search.space import Space, make_space
from flashtune.tuner.search.strategy import strategy
from flashtune.tuner.tune.measured_run import HOPELESS_FAMILY, search_spaces

H200 = gpu_by_alias("h200")
PROBLEM = problem(4096)
NAMES = ("sm90_fwd", "sm80_fwd")


def level(space: Space) -> Space:
    """``space`` as if both families were predicted to take as long."""
    first = space.estimates[0].seconds
    return dataclasses.replace(
        space, estimates=tuple(dataclasses.replace(each, seconds=each.seconds / first) for each in space.estimates)
    )


SPACES = [level(make_space(PROBLEM, H200, family(name))) for name in NAMES]
DEFAULT = family("sm90_fwd").default_for(PROBLEM, H200)
ROW: Any = None


def dealt(
    seconds: Callable[[Config], float | None], trials: int = 60, target: ProblemSearch | None = None
) -> Counter[str]:
    """Trials by family."""
    target = target or ProblemSearch(PROBLEM, SPACES, DEFAULT, {}, [], 0)
    found: Counter[str] = Counter()
    for _ in range(trials):
        config = target.ask()
        assert config is not None
        found[config.family] += 1
        target.tell(config, ROW, seconds(config))
    return found


def times(ratio: float) -> Callable[[Config], float]:
    return lambda config: 1e-3 * (ratio if config.family == "sm80_fwd" else 1.0)


def test_equal_families_get_equally_many_trials() -> None:
    assert dealt(times(1.0)) == {"sm90_fwd": 30, "sm80_fwd": 30}


@pytest.mark.parametrize(("ratio", "least", "most"), [(1.1, 16, 22), (1.5, 4, 8), (0.9, 38, 44), (0.6, 50, 56)])
def test_trials_follow_the_better_family_with_a_floor(ratio: float, least: int, most: int) -> None:
    assert least <= dealt(times(ratio))["sm80_fwd"] <= most
    assert dealt(times(ratio)).total() == 60


@pytest.mark.parametrize("seconds", [times(2.5), lambda config: 1e-3 if config.family == "sm90_fwd" else None])
def test_a_family_that_loses_or_always_fails_is_left(seconds: Callable[[Config], float | None]) -> None:
    assert dealt(seconds)["sm80_fwd"] == FAMILY_TRIALS


def test_an_exhaustive_search_leaves_no_family() -> None:
    few = [dataclasses.replace(each, configs=each.configs[:9], estimates=each.estimates[:9]) for each in SPACES]
    target = ProblemSearch(PROBLEM, few, few[0].configs[0], {}, [], 0, strategy("exhaustive"))
    assert dealt(times(2.5), 18, target) == {"sm90_fwd": 9, "sm80_fwd": 9}


def test_a_config_of_the_users_that_is_faster_than_all_families_ends_no_search() -> None:
    foreign = family("fma_fwd").default(PROBLEM.spec, H200)
    target = ProblemSearch(PROBLEM, SPACES, DEFAULT, {}, [], 0, given=[foreign])
    found = dealt(lambda config: 1e-4 if config == foreign else 1e-3, 40, target)
    assert found.total() == 40


def test_before_anything_is_measured_shares_follow_the_model() -> None:
    slow = dataclasses.replace(
        SPACES[1],
        estimates=tuple(dataclasses.replace(each, seconds=3 * each.seconds) for each in SPACES[1].estimates),
    )
    target = ProblemSearch(PROBLEM, [SPACES[0], slow], DEFAULT, {}, [], 0)
    families = Counter(config.family for _ in range(22) if (config := target.ask()))
    assert families["sm80_fwd"] == round(22 * FAMILY_FLOOR)


def test_a_family_that_has_nothing_left_leaves_its_trials_to_the_others() -> None:
    few = dataclasses.replace(SPACES[0], configs=SPACES[0].configs[:5], estimates=SPACES[0].estimates[:5])
    target = ProblemSearch(PROBLEM, [few, SPACES[1]], few.configs[0], {}, [], 0)
    assert dealt(times(1.5), 40, target) == {"sm90_fwd": 5, "sm80_fwd": 35}


def test_all_is_walked_in_the_end() -> None:
    few = [dataclasses.replace(each, configs=each.configs[:7], estimates=each.estimates[:7]) for each in SPACES]
    target = ProblemSearch(PROBLEM, few, few[0].configs[0], {}, [], 0)
    assert dealt(times(1.4), 14, target) == {"sm90_fwd": 7, "sm80_fwd": 7}
    assert target.ask() is None
    assert target.exhausted


def test_the_default_is_tried_first_then_what_the_user_gives_then_winners() -> None:
    winner, given, foreign = SPACES[1].configs[30], SPACES[1].configs[50], family("fma_fwd").default(PROBLEM.spec, H200)
    target = ProblemSearch(PROBLEM, SPACES, DEFAULT, {}, [winner], 0, given=[given, foreign, given])
    asked = [target.ask() for _ in range(12)]
    assert asked[:3] == [DEFAULT, given, foreign]
    assert winner in asked[3:]
    assert len(set(asked)) == 12
    for config in asked:
        assert config is not None
        target.tell(config, ROW, 1e-3)
    assert foreign in target.finalists(1.0) or len(target.finalists(1.0)) == problem_search.FINALISTS + 1
    assert set(target.seconds) == set(asked)


def test_what_the_user_gives_and_is_known_is_not_tried_again() -> None:
    given = SPACES[1].configs[50]
    target = ProblemSearch(PROBLEM, SPACES, DEFAULT, {given: _ok()}, [], 0, given=[given])
    assert [target.ask() for _ in range(1)] == [DEFAULT]


def _ok() -> Any:
    class Row:
        status, median_us, ratio = "ok", 900.0, None

    return Row()


def decoding(seqlen_k: int) -> Problem:
    few = dataclasses.replace(PROBLEM, batch=1, seqlen_q=1, seqlen_k=seqlen_k)
    return dataclasses.replace(few, num_heads=8, num_heads_kv=1, head_dim=128)


@pytest.mark.parametrize("asked", [PROBLEM, decoding(4096), decoding(262144)], ids=str)
def test_hopeless_families_are_not_searched_the_first_neither(asked: Problem) -> None:
    kinds = [each for each in families().values() if each.unsupported(asked.spec, H200) is None]
    assert kinds[0].name == "sm90_fwd"
    best = {each.name: make_space(asked, H200, each).estimates[0].seconds for each in kinds}
    expected = [name for name, seconds in best.items() if seconds <= HOPELESS_FAMILY * min(best.values())]
    assert [space.family.name for space in search_spaces(asked, H200, kinds, {})] == expected
    assert ("sm90_fwd" in expected) == (asked != decoding(262144))


def test_the_only_family_is_searched_whatever_it_is_predicted_to_take() -> None:
    (space,) = search_spaces(decoding(262144), H200, [family("sm90_fwd")], {})
    assert space.family.name == "sm90_fwd"


def test_default_and_previous_winner_are_tried_first_whichever_families_are_searched() -> None:
    previous = SPACES[0].configs[5]
    target = ProblemSearch(PROBLEM, SPACES[1:], DEFAULT, {}, [], 0, previous=previous)
    assert [target.ask(), target.ask()] == [DEFAULT, previous]
    assert {each.family for each in (target.ask(), target.ask()) if each} == {"sm80_fwd"}


def test_there_is_no_final_before_the_previous_winner_was_tried() -> None:
    previous = SPACES[0].configs[5]
    target = ProblemSearch(PROBLEM, SPACES, DEFAULT, {}, [], 0, previous=previous)
    target.ask()
    target.tell(DEFAULT, ROW, 1e-3)
    assert target.finalists(1.0) == []
    target.ask()
    target.tell(previous, ROW, None)  # it does not work here any more
    assert target.finalists(1.0) == [DEFAULT]
