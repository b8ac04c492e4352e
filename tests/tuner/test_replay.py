"""The search finds the best of kept sweeps quickly: a part of benchmarks/replay.py, which has the whole comparison."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashtune.tuner.search.strategy import DEFAULT_SAMPLER

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EVERY = {"sm80": 6, "sm90": 2, "families": 6}
"""Each so-manieth problem of a part is replayed here."""


@functools.cache
def replaying() -> ModuleType:
    """benchmarks/replay.py, which is no package."""
    for name in ("environment", "model_check", "replay"):
        where = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert where is not None
        assert where.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(where)
        where.loader.exec_module(module)
    return module


def chosen(part: str) -> list[Any]:
    sweeps: list[Any] = replaying().sweeps(part)[:: EVERY[part]]
    return sweeps


@pytest.mark.parametrize("model", ["left out", "rough"])
@pytest.mark.parametrize("part", ["sm80", "sm90", "families"])
def test_the_default_sampler_comes_near_the_best_of_the_sweep(part: str, model: str) -> None:
    rows = replaying().compare(part, model, [DEFAULT_SAMPLER], 1, chosen(part))
    assert replaying().meets_bars(rows[DEFAULT_SAMPLER]), rows


@pytest.mark.parametrize("model", ["left out", "rough"])
def test_the_default_sampler_wins_where_the_model_is_off(model: str) -> None:
    """By regret: with `sm90_fwd`, whose model is the less exact."""
    rows = replaying().compare("sm90", model, [DEFAULT_SAMPLER, "tpe", "exhaustive"], 1, replaying().sweeps("sm90"))
    assert rows[DEFAULT_SAMPLER]["mean"] < min(rows["tpe"]["mean"], rows["exhaustive"]["mean"]), rows


def test_proposing_at_random_misses_the_bars() -> None:
    """Else they would say nothing."""
    rows = replaying().compare("sm80", "left out", ["random"], 1, chosen("sm80"))
    assert not replaying().meets_bars(rows["random"]), rows


def test_the_better_family_gets_most_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """By both families' times, which the first trials of each show."""
    replay, trials = replaying(), 24
    families: list[str] = []

    class Noted(replay.ProblemSearch):  # type: ignore[misc, name-defined]
        def tell(self, config: Any, *rest: Any) -> None:
            families.append(config.family)
            super().tell(config, *rest)

    monkeypatch.setattr(replay, "ProblemSearch", Noted)
    sweeps = [each for each in chosen("families") if sum(config.family == "sm90_fwd" for config in each.rows) > trials]
    assert len(sweeps) >= 4
    for sweep in sweeps:
        families.clear()
        replay.replay(sweep, replay.spaces(sweep, "left out", 0), DEFAULT_SAMPLER, 0, trials)
        assert len(families) == trials
        assert families.count("sm90_fwd") >= 18, sweep.problem
        assert families.count("sm80_fwd") >= 2, sweep.problem


def test_a_replay_holds_what_was_measured_and_nothing_illegal() -> None:
    sizes = {part: sorted(len(each.rows) for each in replaying().sweeps(part)) for part in EVERY}
    kept = stored()
    assert {part: len(each) for part, each in sizes.items()} == kept["problems"]
    assert {part: [each[0], each[-1]] for part, each in sizes.items()} == kept["configs"]


def test_the_kept_comparison_is_of_the_default_and_passed() -> None:
    kept = stored()
    assert kept["default"] == DEFAULT_SAMPLER
    assert kept["passed"] == {"bars": True, "best": True}
    for models in kept["regret in %"].values():
        for rows in models.values():
            assert replaying().meets_bars(rows[DEFAULT_SAMPLER])
            assert replaying().loses_to(rows, DEFAULT_SAMPLER) == []


def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BENCHMARKS / "results" / "replay.json").read_text(encoding="utf-8"))
    return found
