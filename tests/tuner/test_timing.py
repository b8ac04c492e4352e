"""Arithmetic of timing: quantiles, what is no time, and the order of each round."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from flashtune.tuner.trial.timing import shuffled, summarise


def test_quantiles_are_those_of_numpy() -> None:
    times = [3e-3, 1e-3, 2e-3, 5e-3, 9e-3, 4e-3]
    timing = summarise(times)
    assert timing.median == pytest.approx(np.median(times))
    assert (timing.q20, timing.q80) == pytest.approx(tuple(np.quantile(times, [0.2, 0.8])))
    assert timing.count == 6


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1e-3])
def test_a_time_that_is_no_time_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="no time"):
        summarise([1e-3, bad])


def test_each_round_has_an_order_of_its_own() -> None:
    orders = [shuffled("abcdef", number) for number in range(200)]
    assert orders == [shuffled("abcdef", number) for number in range(200)]
    assert all(sorted(each) == list("abcdef") for each in orders)
    behind = Counter(pair for each in orders for pair in itertools.pairwise(each))
    assert len(behind) == 30
    assert max(behind.values()) < 2 * min(behind.values()), "each comes behind each other about as often"
