"""Who measures what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.tuner.sharing import deal, trial_seconds, trials_each

COSTS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=40)


@given(COSTS, st.integers(1, 8))
def test_all_is_dealt_once_and_no_hand_is_heavier_than_it_must_be(costs: list[float], hands: int) -> None:
    dealt = deal(costs, hands)
    assert sorted(item for hand in dealt for item in hand) == list(range(len(costs)))
    loads = [sum(costs[item] for item in hand) for hand in dealt]
    assert max(loads) <= sum(costs) / hands + max(costs) + 1e-9
    assert dealt == deal(costs, hands)


def test_equal_costs_are_dealt_evenly() -> None:
    assert [len(hand) for hand in deal([1.0] * 8, 2)] == [4, 4]


@given(st.integers(1, 10**6), st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 40))
def test_what_closed_problems_left_goes_to_the_open_ones(budget: int, closed: list[int], still_open: int) -> None:
    each = trials_each(budget, closed, still_open)
    assert each * still_open >= budget - sum(closed) > (each - 1) * still_open


@pytest.mark.parametrize(("launch", "launches"), [(1e-6, 45), (1e-3, 25), (0.01, 10), (1.0, 10)])
def test_a_trial_takes_as_many_launches_as_its_time_allows(launch: float, launches: int) -> None:
    assert trial_seconds(launch) == pytest.approx(0.03 + launches * launch)
