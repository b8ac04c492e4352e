"""The kernel of sm90_fwd on the CPU: each softmax schedule, on inputs that are hard for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulated_kernels import problem_of, random_inputs
from numpy.typing import NDArray
from sm90_fwd_kernels import SMALL, compare, config_of

from flashtune.codegen.families.sm90_fwd import Sm90FwdConfig
from flashtune.codegen.problem.reference import rounded
from flashtune.codegen.problem.tolerance import Tolerance, attention_tolerances
from flashtune.emulator import Emulation

pytestmark = pytest.mark.emulate

Array = NDArray[Any]
INFINITY = math.inf

SCHEDULES = {
    "exact": config_of(softmax="exact"),
    "lazy": config_of(softmax="lazy"),
    "lazy, early columns": config_of(softmax="lazy", early_columns=32),
    "late": config_of(softmax="late", q_buffers=2, overlap_tiles=True),
    "late, early columns": config_of(softmax="late", early_columns=32),
}
every_schedule = pytest.mark.parametrize("config", SCHEDULES.values(), ids=SCHEDULES)
ROWS, KEYS, HEAD_DIM = 100, 210, 32


def by_score(scores: Array, seed: int = 7) -> tuple[Array, Array, Array]:
    """Inputs whose scores of key j in head h are ``scores[h, j]`` for all rows, before the scale; v is random."""
    heads = len(scores)
    q, k = np.zeros((1, ROWS, heads, HEAD_DIM), np.float32), np.zeros((1, KEYS, heads, HEAD_DIM), np.float32)
    q[..., 5] = 1
    k[0, :, :, 5] = np.asarray(scores, np.float32).T
    v = np.random.default_rng(seed).standard_normal(k.shape, dtype=np.float32)
    return q, k, v


def run(config: Sm90FwdConfig, inputs: tuple[Array, Array, Array], causal: bool, **options: Any) -> Emulation:
    q, k, v = (rounded(each, "bfloat16") for each in inputs)
    heads = f"{q.shape[2]}/{k.shape[2]}"
    return compare(problem_of("bfloat16", ROWS, KEYS, HEAD_DIM, heads, causal=causal), config, q, k, v, **options)


KEY = np.arange(KEYS)


def ends(places: tuple[int, ...], before: float, behind: float) -> Array:
    """A head each with scores ``before`` up to the place and ``behind`` from there on."""
    return np.stack([np.where(place > KEY, before, behind) for place in places])


def alone(places: tuple[int, ...], there: float, elsewhere: float) -> Array:
    return np.stack([np.where(place == KEY, there, elsewhere) for place in places])


SCORES: dict[str, Callable[[], Array]] = {
    "growing by 1000 a key": lambda: np.stack([1000.0 * KEY, 1000.0 * (KEY - 300)]),
    "falling by 1000 a key": lambda: np.stack([-1000.0 * KEY, 1000.0 * (300 - KEY)]),
    "growing slowly": lambda: np.stack([factor * KEY for factor in (0.02, 0.08, 0.1, 0.3, 1.0)]),
    "to and fro": lambda: np.stack([20.0 * (KEY // 64 % 2), -20.0 * (KEY // 16 % 2), 900.0 * (-1.0) ** KEY]),
    "constant": lambda: np.stack([0.0 * KEY, 0.0 * KEY + 30000, 0.0 * KEY - 30000, 0.0 * KEY - 1]),
    "all negative": lambda: np.stack([-1.0 - KEY, KEY - 2000.0, -np.exp2(KEY / 16), -np.exp2((KEYS - KEY) / 16)]),
    "one large key": lambda: alone((0, 63, 64, 95, 96, 127, 128, 209), 9.0, 0.0),
    "one huge key": lambda: alone((0, 64, 100, 127, 209), 1500.0, 0.0),
    "minus infinity first": lambda: ends((1, 64, 100, 128, 209), -INFINITY, 1.0),
    "minus infinity last": lambda: ends((1, 64, 110, 209), 1.0, -INFINITY),
    "minus infinity but for one": lambda: alone((0, 100, 190, 209), -7.0, -INFINITY),
    "minus infinity": lambda: np.full((1, KEYS), -INFINITY),
    "infinity": lambda: alone((0, 70, 150, 209), INFINITY, 0.0),
    "NaN": lambda: alone((0, 70, 150, 209), np.nan, 1.0),
}


@functools.cache
def hard(name: str, causal: bool) -> tuple[tuple[Array, Array, Array], tuple[Tolerance, Tolerance]]:
    q, k, v = (rounded(each, "bfloat16") for each in by_score(SCORES[name]()))
    return (q, k, v), attention_tolerances(q, k, v, causal=causal, scale=1.0, dtype="bfloat16")


def by_turns() -> list[Any]:
    """Scores, schedules and masks. A bare `pytest` leaves out every second one: each pair has one of the two masks."""
    return [
        pytest.param(
            name, SCHEDULES[schedule], causal,
            id=f"{name}, {schedule}{', causal' if causal else ''}",
            marks=[pytest.mark.slow] * ((first + second + causal) % 2),
        )
        for first, name in enumerate(SCORES)
        for second, schedule in enumerate(SCHEDULES)
        for causal in (False, True)
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "config", "causal"), by_turns())
def test_scores_that_are_hard(name: str, config: Sm90FwdConfig, causal: bool) -> None:
    inputs, allowed = hard(name, causal)
    run(config, inputs, causal, scale=1.0, allowed=allowed)


@every_schedule
@pytest.mark.parametrize("value", [np.nan, INFINITY, -INFINITY], ids=str)
def test_what_the_mask_hides_has_no_influence(config: Sm90FwdConfig, value: float) -> None:
    """Keys and values from some key on, in one head each, in both, or in single columns of a few keys."""
    q, k, v = random_inputs(problem_of("bfloat16", ROWS, KEYS, HEAD_DIM, "4/4"))
    hidden = KEYS - ROWS + 40  # rows from 40 on see it
    k[0, hidden:, 0] = value
    v[0, hidden:, 1] = value
    k[0, hidden + 20, 2], v[0, hidden + 20, 2] = value, value
    v[0, hidden, 3, 7] = v[0, hidden + 30, 3, 9] = v[0, KEYS - 1, 3, 31] = value
    found = run(config, (q, k, v), True)
    assert np.isfinite(found.out[:, :40]).all()


@every_schedule
@pytest.mark.parametrize("causal", [False, True])
def test_visible_infinities_and_nan_give_what_the_reference_gives(config: Sm90FwdConfig, causal: bool) -> None:
    q, k, v = random_inputs(problem_of("bfloat16", ROWS, KEYS, HEAD_DIM, "6/6"), seed=2)
    v[0, 3, 0, 1], v[0, 120, 0, 1], v[0, 199, 0, 2] = INFINITY, -INFINITY, np.nan
    k[0, 5, 1, 4] = INFINITY  # scores of both signs
    k[0, 130, 2, 4] = -INFINITY
    k[0, 100, 3], k[0, 209, 3, 0] = np.nan, INFINITY
    q[0, 10, 4], q[0, 70, 4, 3], q[0, 90, 4, 3] = np.nan, INFINITY, -INFINITY
    q[0, :, 5] = 0
    v[0, 64:128, 5, 3] = INFINITY
    run(config, (q, k, v), causal)


@every_schedule
@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-35, -1e-42, 60.0, -(2.0**60)])
def test_any_scale(config: Sm90FwdConfig, scale: float) -> None:
    q, k, v = random_inputs(problem_of("bfloat16", ROWS, KEYS, HEAD_DIM, "2/1"), seed=3)
    if abs(scale) <= 1:
        v[0, 180, 0, 3] = INFINITY  # hidden from rows before 70
    run(config, (q, k, v), True, scale=scale, gpu=replace(SMALL, num_sms=4))  # a block for each tile


@pytest.mark.parametrize("changes", [{}, {"q_buffers": 2, "overlap_tiles": True}], ids=str)
def test_a_negative_scale_in_blocks_that_take_several_tiles(changes: dict[str, Any]) -> None:
    problem = problem_of("bfloat16", 200, 100, HEAD_DIM, "4/2")
    compare(problem, config_of(**changes), *random_inputs(problem), scale=-0.7)


@pytest.mark.parametrize("factor", [2.0**12, 2.0**20, 2.0**27, 2.0**32])
def test_large_scores_beside_values_that_the_mask_hides(factor: float) -> None:
    problem = problem_of("bfloat16", ROWS, KEYS, 64, "2/1", causal=True)
    q, k, v = random_inputs(problem, seed=6)
    v[0, 180, 0, 3] = np.nan
    compare(problem, config_of(softmax="late"), np.float32(factor) * q, k, v)


@every_schedule
def test_rows_that_see_no_key(config: Sm90FwdConfig) -> None:
    """150 rows against 40 keys: whole tiles, a part of one, and a tile that ends behind the last row."""
    problem = problem_of("bfloat16", 150, 40, HEAD_DIM, "2/1", causal=True)
    q, k, v = random_inputs(problem)
    found = compare(problem, config, q, k, v)
    assert (found.out[:, :110] == 0).all()
    assert (found.lse[:, :, :110] == -INFINITY).all()
    v[0, 39, 0, 5] = k[0, 39] = np.nan
    found = compare(problem, config, q, k, v)
    assert (found.out[:, :110] == 0).all()
    assert np.isfinite(found.out[:, 110:149]).all()
