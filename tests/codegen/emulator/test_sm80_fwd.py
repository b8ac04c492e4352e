"""The kernel of sm80_fwd on the CPU: keys shared by several blocks, heads that share tiles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from emulated_kernels import compare, config_of, full, problem_of, ramp, random_inputs
from numpy.typing import NDArray

from flashtune.codegen.families.registry import family
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.emulator import Emulation, emulate

pytestmark = pytest.mark.emulate

Array = NDArray[Any]
H200 = gpu_by_alias("h200")
INFINITY = math.inf
SPLITS = (0, 1, 2, 4, 64)


def sm80(**changes: object) -> Config:
    return config_of("sm80_fwd", **{"block_m": 32, "block_n": 16, "num_warps": 2, **changes})


def same_for_any_order(problem: Problem, config: Config, q: Array, k: Array, v: Array, **options: Any) -> Emulation:
    """As :func:`compare`, and the order in which blocks and threads run must not change a bit."""
    first = compare(problem, config, q, k, v, seed=1, **options)
    second = emulate(problem, config, q, k, v, seed=2, **options)
    assert first.out.tobytes() == second.out.tobytes()
    assert first.lse.tobytes() == second.lse.tobytes()
    return first


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize(
    "problem",
    [
        problem_of("bfloat16", 1, 1100, 64, "2/2"),
        problem_of("float16", 40, 1100, 32, "4/2", causal=True),
        problem_of("bfloat16", 45, 62, 40, "3/1", batch=2, causal=True),  # the first rows see nothing of the last parts
        problem_of("float16", 45, 20, 32, causal=True),  # 25 rows see no key
        problem_of("float16", 33, 17, 72, alignment=2),
    ],
    ids=str,
)
def test_any_number_of_parts_is_right_and_repeatable(problem: Problem, num_splits: int) -> None:
    same_for_any_order(problem, sm80(num_splits=num_splits), *random_inputs(problem))


def test_parts_by_rule_are_as_many_as_the_plan_says() -> None:
    """0 gives the bits of the number that it stands for, and not those of a single part."""
    problem = problem_of("bfloat16", 1, 1100, 64)
    inputs = random_inputs(problem)
    launched = family("sm80_fwd").plan(problem, sm80(num_splits=0), H200).num_splits
    assert launched == 2
    by_rule, asked, alone = (emulate(problem, sm80(num_splits=each), *inputs) for each in (0, launched, 1))
    assert by_rule.out.tobytes() == asked.out.tobytes()
    assert by_rule.lse.tobytes() == asked.lse.tobytes()
    assert by_rule.out.tobytes() != alone.out.tobytes()


def test_parts_are_the_same_bits_in_several_processes() -> None:
    problem = problem_of("bfloat16", 45, 190, 32, "4/2", causal=True)
    inputs = random_inputs(problem)
    one, three = (emulate(problem, sm80(num_splits=4), *inputs, processes=each) for each in (1, 3))
    assert one.out.tobytes() == three.out.tobytes()
    assert one.lse.tobytes() == three.lse.tobytes()


@pytest.mark.parametrize("num_splits", [0, 4, 64])
@pytest.mark.parametrize("pack_heads", [False, True])
def test_no_key_at_all_whatever_the_parts(num_splits: int, pack_heads: bool) -> None:
    problem = problem_of("float16", 5, 0, 32, "4/2", causal=True)
    result = compare(problem, sm80(num_splits=num_splits, pack_heads=pack_heads), *random_inputs(problem))
    assert (result.out == 0).all()
    assert (result.lse == -INFINITY).all()


def test_without_lse_parts_give_the_same_output() -> None:
    problem = problem_of("float16", 20, 100, 32, "4/2", causal=True)
    inputs = random_inputs(problem)
    for pack_heads in (False, True):
        config = sm80(num_splits=4, pack_heads=pack_heads)
        with_lse, without = (emulate(problem, config, *inputs, want_lse=each) for each in (True, False))
        assert with_lse.out.tobytes() == without.out.tobytes()
        assert without.lse.size == 0


def test_parts_with_values_known_by_hand() -> None:
    """4 parts of 16 keys: a row sees part of the first, all of it and one key more, or all keys but the last."""
    problem = problem_of("float16", 63, 64, 32, "1/1", causal=True)
    result = emulate(problem, sm80(num_splits=4), full(63, 0, 32), full(64, 1, 32), ramp(64, 32))
    seen = np.arange(63) + 2
    out = np.broadcast_to((seen - 1)[:, None] / 2, (63, 32))
    np.testing.assert_allclose(result.out[0, :, 0], out, rtol=2**-11)
    np.testing.assert_allclose(result.lse[0, 0], np.log(seen), rtol=1e-6)


@pytest.mark.parametrize("largest", [0, 16, 33, 70, 99])
def test_huge_scores_in_one_part(largest: int) -> None:
    """Scores of about 1e9 and of -1e9: one key has all the weight, whichever part it is in."""
    problem = problem_of("bfloat16", 3, 100, 64, "1/1")
    q, k, v = full(3, 11264), full(100, -11264), ramp(100)
    k[:, largest] = 11264
    result = same_for_any_order(problem, sm80(num_splits=4), q, k, v)
    assert (result.out == np.float32(largest)).all()
    np.testing.assert_allclose(result.lse, 11264.0**2 * 8, rtol=2e-7)


def test_equal_huge_scores_in_all_parts() -> None:
    problem = problem_of("bfloat16", 3, 100, 64, "1/1")
    for score in (11264, -11264):
        result = same_for_any_order(problem, sm80(num_splits=4), full(3, score), full(100, 11264), full(100, 3))
        assert (result.out == 3).all()
        np.testing.assert_allclose(result.lse, score * 11264.0 * 8, rtol=2e-7)


@pytest.mark.parametrize("pack_heads", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_values_that_are_not_finite_in_some_parts(causal: bool, pack_heads: bool) -> None:
    problem = problem_of("float16", 45, 78, 32, "4/2", causal=causal)
    q, k, v = random_inputs(problem)
    v[:, 2, 0, 1] = INFINITY
    v[:, 20, :, 5] = INFINITY
    v[:, 50, 0, 5] = -INFINITY  # with the one before: NaN
    v[:, 64, 1, 6] = -INFINITY
    v[:, 77, :, 7] = np.nan
    result = same_for_any_order(problem, sm80(num_splits=4, pack_heads=pack_heads), q, k, v)
    assert np.isinf(result.out).any()
    assert np.isnan(result.out).any()


def test_scores_of_minus_infinity_in_whole_parts() -> None:
    for finite in (0, 40, 63):
        problem = problem_of("float16", 3, 64, 32, "1/1")
        q, k, v = full(3, 1, 32), full(64, 0, 32), full(64, 1, 32)
        k[..., 5] = -INFINITY
        k[:, finite] = 0
        v[:, finite] = 7
        result = same_for_any_order(problem, sm80(num_splits=4), q, k, v)
        assert (result.out == 7).all()
        assert (result.lse == 0).all()


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(
    ("problem", "changes"),
    [
        (problem_of("bfloat16", 1, 70, 64, "8/1"), {}),
        (problem_of("float16", 45, 62, 32, "4/2", batch=2, causal=True), {}),
        (problem_of("float16", 11, 45, 40, "6/2", batch=2, causal=True), {"q_in_registers": True}),
        (problem_of("bfloat16", 9, 78, 24, "16/2", causal=True), {"block_m": 64, "num_stages": 3}),
        (problem_of("float16", 25, 20, 32, "3/1", causal=True), {"num_stages": 1}),  # 5 queries see no key
        (problem_of("float16", 13, 33, 40, "6/2", causal=True, alignment=2), {}),
        (problem_of("float16", 7, 50, 136, "3/1", alignment=2), {"block_m": 16, "num_warps": 1}),
        (problem_of("bfloat16", 37, 62, 32, "3/3", causal=True), {}),  # each head is a group of its own
    ],
    ids=str,
)
def test_heads_that_share_tiles(problem: Problem, changes: dict[str, object], num_splits: int) -> None:
    inputs = random_inputs(problem)
    packed = same_for_any_order(problem, sm80(pack_heads=True, num_splits=num_splits, **changes), *inputs)
    if problem.num_heads == problem.num_heads_kv:
        plain = emulate(problem, sm80(num_splits=num_splits, **changes), *inputs)
        assert packed.out.tobytes() == plain.out.tobytes()
        assert packed.lse.tobytes() == plain.lse.tobytes()


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("alignment", [16, 2])
def test_heads_that_share_tiles_have_strides_of_their_own(alignment: int, num_splits: int) -> None:
    """Heads before queries in Q, every second key in K, gaps in the output: at 2 bytes all strides are odd."""
    problem = problem_of("float16", 20, 45, 16, "6/2", batch=2, causal=True, alignment=alignment)
    draw = np.random.default_rng(3)
    row = 24 if alignment == 16 else 19
    q = draw.standard_normal((2, 6, 20, row)).astype(np.float16)[..., :16].swapaxes(1, 2)
    k = draw.standard_normal((2, 90, 2, row)).astype(np.float16)[:, ::2, :, :16]
    v = draw.standard_normal((2, 2, 45, row)).astype(np.float16)[..., :16].swapaxes(1, 2)
    config = sm80(pack_heads=True, num_splits=num_splits)
    spaced = compare(problem, config, q, k, v, out_strides=(200 * row, row, 22 * row, 1))
    dense = emulate(problem, config, *(np.ascontiguousarray(each) for each in (q, k, v)))
    assert spaced.out.tobytes() == dense.out.tobytes()
    assert spaced.lse.tobytes() == dense.lse.tobytes()


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-35, 2.5])
def test_parts_at_any_scale(scale: float, num_splits: int) -> None:
    problem = problem_of("float16", 20, 45, 16, "4/2", causal=True)
    compare(problem, sm80(pack_heads=True, num_splits=num_splits), *random_inputs(problem), scale=scale)


@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 40, 56, 64, 72, 96, 128, 136, 192, 256])
def test_a_block_of_one_warp(head_dim: int) -> None:
    """Its copies don't come out even with the permutation of chunks."""
    problem = problem_of("bfloat16", 19, 50, head_dim, causal=True)
    compare(problem, sm80(block_m=16, num_warps=1), *random_inputs(problem))
    rows = 32 if head_dim <= 128 else 16  # what registers hold
    packed = sm80(block_m=rows, num_warps=1, block_n=48, num_splits=2, pack_heads=True)
    compare(problem, packed, *random_inputs(problem))
