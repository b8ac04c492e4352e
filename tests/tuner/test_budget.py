"""Budgets: what is taken as one, and how much of it is left."""

from __future__ import annotations

from typing import Any

import pytest

from flashtune.errors import InvalidInput, InvalidType
from flashtune.tuner.results.budget import Budget, Meter, parse_budget


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("120s", Budget(seconds=120)),
        ("10m", Budget(seconds=600)),
        ("1.5h", Budget(seconds=5400)),
        (" 90 S", Budget(seconds=90)),
        ("200", Budget(trials=200)),
    ],
)
def test_budgets_are_times_or_trials(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    "text", ["", "0", "0s", "-5", "1.5", "10 minutes", "s", "1e3", "nan", "10mm", "\u0661s", "9" * 400 + "s"]
)
def test_other_budgets_are_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(InvalidInput, match="120s, 10m or 1h"):
        parse_budget(text)


@pytest.mark.parametrize(
    "amounts", [{}, {"seconds": 1.0, "trials": 1}, {"seconds": float("nan")}, {"seconds": float("inf")}, {"trials": 0}]
)
def test_a_budget_is_one_positive_amount(amounts: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="one of them must be set, and positive"):
        Budget(**amounts)


def test_a_budget_that_is_no_text_is_refused() -> None:
    given: Any = 200
    with pytest.raises(InvalidType, match="budget is a int"):
        parse_budget(given)


def test_a_meter_runs_from_one_to_zero() -> None:
    now = [100.0]
    meter = Meter(Budget(seconds=10), clock=lambda: now[0])
    assert meter.left == 1
    now[0] = 105.0
    assert (meter.left, meter.elapsed, meter.spent) == (0.5, 5.0, False)
    now[0] = 120.0
    assert (meter.left, meter.spent) == (0.0, True)
    counted = Meter(Budget(trials=4))
    counted.trials = 3
    assert counted.left == 0.25
