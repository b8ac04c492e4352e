"""One config for several shapes: the least geometric mean of ratios, of configs known for all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tuner_fakes import FAMILY, GPU, FakeBench, problem, run

from flashtune.codegen.plan.config import Config
from flashtune.errors import InvalidInput
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.commands.one_config import check_shareable, choose, shared_config

SHORT, LONG = problem(1024), problem(4096)
BASE = FAMILY.default(SHORT.spec, GPU)


def configs() -> list[Config]:
    others = [replace(BASE, **{each.name: choice}) for each in BASE.parameters() for choice in each.choices]
    return list(dict.fromkeys([BASE, *others]))[:3]


def test_the_least_mean_of_ratios_wins_over_the_least_sum_of_times() -> None:
    first, second, third = configs()
    found = choose({SHORT: {first: 1.0, second: 2.0, third: 1.1}, LONG: {first: 130.0, second: 100.0, third: 120.0}})
    assert found is not None
    assert found.config == first  # sqrt(1.3) = 1.140; third: sqrt(1.32) = 1.149; second: sqrt(2), the least sum
    assert found.ratio == pytest.approx(1.3**0.5)
    assert (found.worst, found.considered) == (LONG, 3)
    assert found.worst_ratio == pytest.approx(1.3)


def test_a_config_that_is_not_known_for_all_is_no_choice() -> None:
    first, second, third = configs()
    found = choose({SHORT: {first: 1.0, second: 2.0}, LONG: {second: 1.0, third: 0.5}})
    assert found is not None
    assert (found.config, found.considered) == (second, 1)
    assert choose({SHORT: {first: 1.0}, LONG: {second: 1.0}}) is None


def test_it_is_made_of_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    run(path, [SHORT, LONG], 40, bench=FakeBench())
    with Store.open(path) as store:
        found = shared_config(store, [SHORT, LONG], GPU, measured=True)
        assert shared_config(store, [SHORT, LONG], GPU, measured=False) is None
        known = [{row.config for row in store.measurements(problem=each, status="ok")} for each in (SHORT, LONG)]
    assert found is not None
    assert found.considered == len(known[0] & known[1]) >= 1
    assert found.ratio >= 1


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        ([SHORT], "two problems at least"),
        ([SHORT, SHORT], "two problems at least"),
        ([SHORT, replace(SHORT, causal=True)], "these have 2 kinds: dtype=float16,head_dim=64, dtype"),
    ],
    ids=["one", "same", "specs"],
)
def test_problems_that_no_kernel_serves_together_are_refused(problems: list[object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        check_shareable(problems)  # type: ignore[arg-type]
