"""Kernels on the CPU with one head and values known by hand: numbers, masks, and lengths around those of a tile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from emulated_kernels import config_of, full, problem_of, ramp
from numpy.typing import NDArray

from flashtune.emulator import emulate

pytestmark = pytest.mark.emulate

Array = NDArray[Any]
INFINITY = math.inf
FAMILIES = {
    "sm80_fwd bfloat16": ("sm80_fwd", "bfloat16"),
    "sm80_fwd float16": ("sm80_fwd", "float16"),
    "fma_fwd float32": ("fma_fwd", "float32"),
    "fma_fwd bfloat16": ("fma_fwd", "bfloat16"),
}


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
