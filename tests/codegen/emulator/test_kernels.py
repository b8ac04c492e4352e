"""Kernels on the CPU, against float64 and against values known by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashtune.codegen.config import Config
from flashtune.codegen.emulator import Emulation, emulate
from flashtune.codegen.family import family, read_config
from flashtune.codegen.gpu import gpu_by_alias
from flashtune.codegen.problem import Problem
from flashtune.codegen.reference import rounded
from flashtune.codegen.tolerance import attention_tolerances
from flashtune.errors import InvalidInput

pytestmark = pytest.mark.emulate

Array = NDArray[Any]
H200 = gpu_by_alias("h200")
INFINITY = math.inf
SM80 = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2, "q_in_registers": False, "blocks_per_sm": 1}
FMA = {"block_m": 32, "block_n": 32, "num_threads": 128, "threads_n": 8, "share_kv": False, "blocks_per_sm": 1}
FAMILIES = {
    "sm80_fwd bfloat16": ("sm80_fwd", "bfloat16"),
    "sm80_fwd float16": ("sm80_fwd", "float16"),
    "fma_fwd float32": ("fma_fwd", "float32"),
    "fma_fwd bfloat16": ("fma_fwd", "bfloat16"),
}


def config_of(name: str, **changes: object) -> Config:
    return read_config(name, (SM80 if name == "sm80_fwd" else FMA) | changes)


def problem_of(dtype: str, seqlen_q: int, seqlen_k: int, head_dim: int, heads: str = "2/1", **more: Any) -> Problem:
    num_heads, num_heads_kv = map(int, heads.split("/"))
    return Problem(
        dtype=dtype,
        head_dim=head_dim,
        batch=more.pop("batch", 1),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        **more,
    )


def random_inputs(problem: Problem, seed: int = 0) -> tuple[Array, Array, Array]:
    draw = np.random.default_rng(seed)
    q, k, v = (rounded(draw.standard_normal(shape, dtype=np.float32), problem.dtype) for shape in problem.shapes[:3])
    return q, k, v


def compare(problem: Problem, config: Config, q: Array, k: Array, v: Array, **options: Any) -> Emulation:
    """Runs ``config`` and asserts that out and LSE are within tolerance."""
    result = emulate(problem, config, q, k, v, **options)
    allowed = attention_tolerances(
        q, k, v, causal=problem.causal, scale=options.get("scale"), dtype=problem.dtype, out_dtype=problem.spec.output
    )
    for name, tolerance, ours in zip(("out", "LSE"), allowed, (result.out, result.lse), strict=True):
        verdict = tolerance.judge(ours)
        assert verdict, f"{config} for {problem}, {options}: {name} is {verdict}"
    return result


CASES: dict[str, tuple[Config, Problem]] = {
    f"{config.family} {config.key} {problem}": (config, problem)
    for config, problem in (
        (config_of("sm80_fwd"), problem_of("bfloat16", 130, 257, 64, causal=True)),
        (config_of("sm80_fwd", q_in_registers=True), problem_of("float16", 130, 257, 64, causal=True)),
        (config_of("sm80_fwd", q_in_registers=True, num_stages=3), problem_of("float16", 70, 33, 128, causal=True)),
        (config_of("sm80_fwd", num_stages=1), problem_of("bfloat16", 1, 257, 256, "3/3")),
        (config_of("sm80_fwd", num_stages=3, block_n=16), problem_of("float16", 100, 100, 8, "6/2", causal=True)),
        (config_of("sm80_fwd", block_m=16, num_warps=1), problem_of("bfloat16", 31, 65, 40, batch=2)),
        (config_of("sm80_fwd", block_m=32, num_warps=1, block_n=48), problem_of("float16", 33, 129, 24, alignment=2)),
        (config_of("sm80_fwd", rescale_threshold=0), problem_of("float16", 257, 130, 72, causal=True)),
        (config_of("fma_fwd"), problem_of("float32", 130, 257, 64, causal=True)),
        (config_of("fma_fwd", share_kv=True), problem_of("float32", 33, 129, 128, "6/2", causal=True)),
        (config_of("fma_fwd", threads_n=16, num_threads=256), problem_of("bfloat16", 65, 33, 256, causal=True)),
        (config_of("fma_fwd", share_kv=True), problem_of("float16", 31, 65, 8, batch=2)),
        (config_of("fma_fwd", block_n=16), problem_of("float32", 17, 65, 40, alignment=4)),
        (
            config_of("fma_fwd", accumulate="float64", block_m=16),
            problem_of("float16", 33, 65, 24, causal=True, out_dtype="float64"),
        ),
    )
}


@pytest.mark.parametrize(("config", "problem"), CASES.values(), ids=CASES)
def test_out_and_lse_agree_with_float64(config: Config, problem: Problem) -> None:
    compare(problem, config, *random_inputs(problem))


WIDTHS = ((64, 40), (40, 64), (192, 128), (8, 256), (256, 8))
"""Columns of q and k, and of v."""


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("widths", WIDTHS, ids="{0[0]}/{0[1]}".format)
@pytest.mark.parametrize("share_kv", [False, True])
def test_values_of_another_width(share_kv: bool, widths: tuple[int, int], dtype: str, causal: bool) -> None:
    head_dim, head_dim_v = widths
    problem = problem_of(dtype, 37, 53, head_dim, "4/2", head_dim_v=head_dim_v, causal=causal)
    compare(problem, config_of("fma_fwd", share_kv=share_kv), *random_inputs(problem))


@pytest.mark.parametrize(
    "problem",
    [
        problem_of("float16", 130, 67, 192, "3/1", head_dim_v=128, batch=2, causal=True),  # 63 rows see no key
        problem_of("float32", 33, 65, 40, head_dim_v=64, alignment=4, causal=True),
        problem_of("float16", 33, 65, 64, head_dim_v=40, alignment=2),
        problem_of("bfloat16", 1, 131, 128, head_dim_v=64),
        problem_of("float16", 17, 35, 192, head_dim_v=128, out_dtype="float64"),
        problem_of("float32", 17, 35, 72, head_dim_v=40, out_dtype="float64", causal=True),
        problem_of("float32", 3, 0, 64, head_dim_v=40),
    ],
    ids=str,
)
def test_defaults_for_values_of_another_width(problem: Problem) -> None:
    compare(problem, family("fma_fwd").default(problem.spec, H200), *random_inputs(problem))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, problem_of("float16", 70, 50, 64, "4/2", head_dim_v=40, causal=True)),
        ({"q_in_registers": True, "num_stages": 1}, problem_of("bfloat16", 70, 50, 24, head_dim_v=128, causal=True)),
        (
            {"block_m": 64, "num_splits": 2, "pack_heads": True},
            problem_of("bfloat16", 7, 90, 192, "4/2", head_dim_v=128, causal=True),
        ),
        ({"num_stages": 3}, problem_of("float16", 40, 70, 40, head_dim_v=56, alignment=2, causal=True)),
    ],
    ids=str,
)
def test_values_of_another_width_on_tensor_cores(config: dict[str, object], problem: Problem) -> None:
    """An infinity that the mask hides from all rows but the last is in a column of its own."""
    q, k, v = random_inputs(problem)
    v[0, -1, 0, -3] = np.inf
    compare(problem, config_of("sm80_fwd", **config), q, k, v)


def test_narrow_values_are_the_first_columns_of_wide_ones() -> None:
    """Bit for bit, with strides of their own, and an output whose rows lie farther apart than they are wide."""
    wide = problem_of("float16", 20, 45, 24, "4/2", batch=2, causal=True)
    narrow = problem_of("float16", 20, 45, 24, "4/2", batch=2, causal=True, head_dim_v=16)
    q, k, v = random_inputs(wide)
    want = emulate(wide, config_of("fma_fwd"), q, k, v)
    found = emulate(narrow, config_of("fma_fwd"), q, k, v[..., :16], out_strides=(4096, 96, 24, 1))
    assert found.out.shape == (2, 20, 4, 16)
    assert found.out.tobytes() == np.ascontiguousarray(want.out[..., :16]).tobytes()
    assert found.lse.tobytes() == want.lse.tobytes()


def test_a_v_of_the_width_of_k_is_refused() -> None:
    problem = problem_of("float16", 3, 5, 24, head_dim_v=16)
    q, k, _ = random_inputs(problem)
    with pytest.raises(InvalidInput, match=r"v has shape \(1, 5, 1, 24\), the problem needs \(1, 5, 1, 16\)"):
        emulate(problem, config_of("fma_fwd"), q, k, k)


@pytest.mark.parametrize("name", ["sm90_fwd", "sm80_fwd", "fma_fwd"])
@pytest.mark.parametrize("head_dim", [16, 56, 80, 96, 112])
def test_defaults_at_other_head_dims(name: str, head_dim: int) -> None:
    problem = problem_of("bfloat16", 67, 131, head_dim, causal=True)
    compare(problem, family(name).default(problem.spec, H200), *random_inputs(problem))


@pytest.mark.parametrize("name", ["sm80_fwd", "fma_fwd"])
def test_the_order_of_threads_and_the_number_of_processes_change_no_bit(name: str) -> None:
    problem = problem_of("bfloat16", 70, 100, 64, causal=True)
    inputs = random_inputs(problem)
    first = emulate(problem, config_of(name), *inputs, seed=1)
    for seed in (2, 3, 4):
        other = emulate(problem, config_of(name), *inputs, seed=seed, processes=seed // 2)
        assert first.out.tobytes() == other.out.tobytes(), f"seed {seed}"
        assert first.lse.tobytes() == other.lse.tobytes(), f"seed {seed}"


@pytest.mark.parametrize("name", ["sm80_fwd", "fma_fwd"])
def test_each_tensor_has_strides_of_its_own(name: str) -> None:
    """q every second token, k shared by all heads, v from (batch, head, seqlen, dim), out with gaps, no LSE."""
    problem = problem_of("float16", 20, 45, 16, "4/2", batch=2)
    draw = np.random.default_rng(3)
    q = draw.standard_normal((2, 40, 4, 16)).astype(np.float16)[:, ::2]
    k = np.broadcast_to(draw.standard_normal((2, 45, 1, 16)).astype(np.float16), (2, 45, 2, 16))
    v = draw.standard_normal((2, 2, 45, 16)).astype(np.float16).swapaxes(1, 2)
    config = config_of(name)
    spaced = compare(problem, config, q, k, v, out_strides=(4096, 96, 24, 1))
    dense = emulate(problem, config, *(np.ascontiguousarray(each) for each in (q, k, v)), want_lse=False)
    assert spaced.out.tobytes() == dense.out.tobytes()
    assert dense.lse.size == 0


@dataclass(frozen=True)
class OneHead:
    """Runs a config of ``family`` on one head with given values."""

    family: str
    dtype: str

    def __call__(self, q: Array, k: Array, v: Array, *, causal: bool = False, **options: Any) -> tuple[Array, Array]:
        """Rows of out and of the LSE, as float64."""
        problem = problem_of(self.dtype, q.shape[1], k.shape[1], q.shape[3], "1/1", causal=causal)
        result = emulate(problem, config_of(self.family), q, k, v, **options)
        return result.out[0, :, 0].astype(np.float64), result.lse[0, 0].astype(np.float64)


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def kernel(request: pytest.FixtureRequest) -> OneHead:
    return OneHead(*request.param)


def full(seqlen: int, value: float, head_dim: int = 64) -> Array:
    return np.full((1, seqlen, 1, head_dim), value, np.float32)


def ramp(seqlen: int, head_dim: int = 64) -> Array:
    return np.broadcast_to(np.arange(seqlen, dtype=np.float32)[None, :, None, None], (1, seqlen, 1, head_dim)).copy()


def expect(found: tuple[Array, Array], out: Any, lse: Any, near: float = 0.0, relative: float = 1e-6) -> None:
    got_out, got_lse = found
    rows = np.broadcast_to(np.asarray(out, np.float64)[:, None], got_out.shape)
    np.testing.assert_allclose(got_out, rows, rtol=0, atol=near)
    np.testing.assert_allclose(got_lse, np.asarray(lse, np.float64), rtol=relative, atol=3e-7)


def test_a_single_huge_negative_score(kernel: OneHead) -> None:
    expect(kernel(full(1, -128), full(1, 64), full(1, 1), scale=1.0), [1.0], [-524288], relative=2e-7)


def test_the_largest_score_has_weight_one(kernel: OneHead) -> None:
    large = 133120.0 if kernel.dtype != "float16" else 60000.0
    q = full(1, large)
    expect(kernel(q, q, q), [large], [large**2 * 8])


def test_sums_are_float32(kernel: OneHead) -> None:
    expect(kernel(full(1, 0), full(4097, 1), full(4097, 1)), [1.0], [math.log(4097)], near=1e-3)


def test_scale_zero_is_a_value(kernel: OneHead) -> None:
    q, k, v = full(4, 3, 16), full(4, 2, 16), ramp(4, 16)
    expect(kernel(q, k, v, scale=0.0), [1.5] * 4, [math.log(4)] * 4)
    expect(kernel(q, k, v, scale=0.0, causal=True), [0, 0.5, 1, 1.5], np.log([1, 2, 3, 4]))


def test_masked_keys_have_no_influence(kernel: OneHead) -> None:
    q, k, v = full(2, 1), full(2, 1), full(2, 5)
    for value in (np.nan, INFINITY, -INFINITY):
        k[:, 1] = v[:, 1] = value
        out, lse = kernel(q, k, v, causal=True)
        assert (out[0] == 5).all()
        assert np.isfinite(lse[0])
    k[:, 1] = v[:, 1] = np.nan
    assert np.isnan(kernel(q, k, v, causal=True)[0][1]).all()


@pytest.mark.parametrize("finite", [0, 64, 127, 130])
def test_scores_of_minus_infinity_have_no_weight(kernel: OneHead, finite: int) -> None:
    q, k, v = full(1, 1), full(131, 0), full(131, 1)
    k[..., 5] = -INFINITY
    k[:, finite] = 0
    v[:, finite] = 7
    expect(kernel(q, k, v), [7], [0])


def test_large_scores_and_values(kernel: OneHead) -> None:
    v = full(2, 1, 128)
    v[:, 1] = 3
    expect(kernel(full(1, 200, 128), full(2, 200, 128), v), [2], [452549.03], relative=2e-7)
    large = 60000.0 if kernel.dtype != "bfloat16" else 59904.0
    expect(kernel(full(1, 0), full(513, 1), full(513, large)), [large], [math.log(513)], near=32)


def test_rows_that_see_no_key(kernel: OneHead) -> None:
    out = [0, 0, 0, 1, 1.5]
    lse = [-INFINITY, -INFINITY, -INFINITY, 0, math.log(2)]
    expect(kernel(full(5, 0), full(2, 0), ramp(2) + 1, causal=True), out, lse)
    expect(kernel(full(70, 0), full(2, 0), ramp(2), causal=True), [0] * 69 + [0.5], [-INFINITY] * 68 + [0, math.log(2)])


def test_no_key_at_all(kernel: OneHead) -> None:
    expect(kernel(full(3, 1), full(0, 1), full(0, 1)), [0] * 3, [-INFINITY] * 3)


@pytest.mark.parametrize("lengths", [(1, 1), (2, 15), (15, 17), (17, 16), (64, 63), (65, 128), (129, 65)], ids=str)
def test_lengths_around_tiles(kernel: OneHead, lengths: tuple[int, int]) -> None:
    seqlen_q, seqlen_k = lengths
    found = kernel(full(seqlen_q, 0), full(seqlen_k, 1), full(seqlen_k, 1))
    expect(found, [1] * seqlen_q, [math.log(seqlen_k)] * seqlen_q, near=0.004)


# ---- sm80_fwd: keys shared by several blocks, heads that share tiles ----

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
