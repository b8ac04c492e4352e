"""sm90_fwd's own time model: it orders things sanely, and chooses well where a sweep says what would have been best."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashtune.codegen.families.registry import default_config, predict
from flashtune.codegen.families.sm90_fwd import Sm90Fwd, Sm90FwdConfig
from flashtune.codegen.families.sm90_time import CONSTANTS, TimeConstants, predict_seconds
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.tune.presets import preset

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GPU = gpu_by_alias("h200")
LONG = Problem(
    dtype="bfloat16", head_dim=128, batch=4, seqlen_q=4096, seqlen_k=4096, num_heads=16, num_heads_kv=16
)  # fmt: skip


@functools.cache
def fitting() -> ModuleType:
    """benchmarks/fit_sm90.py, which is no package."""
    for name in ("environment", "least_squares", "model_check", "fit_sm90"):
        where = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert where is not None
        assert where.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(where)
        where.loader.exec_module(module)
    return module


@functools.cache
def sweep() -> list[Any]:
    rows: list[Any] = fitting().read_sweep()
    return rows


@functools.cache
def fits() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(fitting().FITS.read_text(encoding="utf-8"))
    return found


def seconds(problem: Problem, **changes: Any) -> float:
    config = replace(Sm90Fwd().default(problem.spec, GPU), **changes)
    assert isinstance(config, Sm90FwdConfig)
    return predict_seconds(config, problem, GPU)[0]


def test_more_keys_take_longer_and_a_mask_saves_time() -> None:
    assert seconds(replace(LONG, seqlen_k=8192)) > 1.8 * seconds(LONG)
    assert seconds(replace(LONG, causal=True)) < 0.75 * seconds(LONG)


def test_a_chip_with_slower_tensor_cores_is_slower() -> None:
    config = Sm90Fwd().default(LONG.spec, GPU)
    assert isinstance(config, Sm90FwdConfig)
    slow = predict_seconds(config, LONG, gpu_by_alias("h20"))
    assert slow[0] > 4 * seconds(LONG)
    assert slow[1] == "tensor"


def test_exact_maxima_never_pay() -> None:
    assert seconds(LONG, softmax="exact", early_columns=0) > seconds(LONG, softmax="lazy", early_columns=0)


def test_one_query_is_left_to_a_family_that_shares_keys() -> None:
    decode = replace(LONG, batch=1, seqlen_q=1, seqlen_k=65536)
    assert default_config(LONG, GPU).family == "sm90_fwd"
    assert default_config(decode, GPU).family == "sm80_fwd"


def test_memory_bounds_what_reads_much_and_computes_little() -> None:
    few = replace(LONG, batch=512, seqlen_q=64, seqlen_k=64, num_heads=64, num_heads_kv=64)
    config = Sm90Fwd().default(few.spec, GPU)
    assert predict(few, config, replace(GPU, bandwidth_gb_s=100.0)).bound == "memory"


def test_the_sweep_covers_the_grid() -> None:
    assert {row.problem for row in sweep()} >= set(preset("grid"))


def test_what_ships_is_the_fit_to_the_whole_sweep() -> None:
    assert len(sweep()) == fits()["rows"]
    assert asdict(CONSTANTS) == fits()["all"]
    assert fitting().summary(fitting().scores(sweep(), CONSTANTS)) == fits()["scores"]["all"]


@functools.cache
def unseen() -> dict[Problem, tuple[float, bool]]:
    """What the model chooses for each group by constants that were fitted without it."""
    found: dict[Problem, tuple[float, bool]] = {}
    assert set(fits()["without"]) == {fitting().group(row.problem) for row in sweep()}
    for name, values in fits()["without"].items():
        rows = [row for row in sweep() if fitting().group(row.problem) == name]
        found |= fitting().scores(rows, TimeConstants(**values))
    return found


def test_the_model_chooses_well_for_a_group_left_out_of_its_fit() -> None:
    assert fitting().summary(unseen()) == fits()["scores"]["left out"]
    assert fits()["scores"]["left out"]["geomean"] >= 0.90


def test_a_config_within_three_percent_is_among_the_first_five() -> None:
    of_grid = [near for problem, (_, near) in unseen().items() if problem in preset("grid")]
    assert len(of_grid) == 36
    assert sum(of_grid) >= 30


@pytest.mark.parametrize("name", ["h100", "h200", "gh200", "h20"])
def test_every_hopper_gets_a_prediction(name: str) -> None:
    for problem in preset("grid"):
        assert predict(problem, default_config(problem, gpu_by_alias(name)), gpu_by_alias(name)).seconds > 0
