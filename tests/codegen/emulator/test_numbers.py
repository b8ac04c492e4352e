"""Numbers and masks that other attention kernels got wrong, on the CPU: values known by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from case_kernels import KERNELS, Kernel, every_kernel, expect
from emulated_kernels import by_key, full

from flashtune.codegen.problem.reference import rounded

pytestmark = pytest.mark.emulate

INFINITY = math.inf


# ---- Numbers ----
@every_kernel
def test_no_finite_number_stands_for_minus_infinity(kernel: Kernel) -> None:
    expect(kernel(full(1, -128), full(1, 64), full(1, 1), scale=1.0), [1], [-524288], lse_near=0.1)


@pytest.mark.parametrize("name", ["sm80_fwd bfloat16", "fma_fwd float32"])
def test_the_largest_score_of_a_row_has_weight_one(name: str) -> None:
    q = full(1, 133120)
    expect(KERNELS[name](q, q, q), [133120], [1.417675e11], lse_near=1.4e5)


@every_kernel
def test_many_equal_weights(kernel: Kernel) -> None:
    expect(kernel(full(1, 0), full(8192, 1), full(8192, 1)), [1], [9.010913], near=1e-3, lse_near=1e-4)


@every_kernel
def test_scale_zero(kernel: Kernel) -> None:
    q, k, v = full(4, 3, 16), full(4, 2, 16), by_key(range(4), 16)
    expect(kernel(q, k, v, scale=0.0), [1.5] * 4, [math.log(4)] * 4)
    expect(kernel(q, k, v, scale=0.0, causal=True), [0, 0.5, 1, 1.5], np.log([1, 2, 3, 4]))


def test_float32_is_multiplied_in_float32() -> None:
    q, k = full(1, 0), full(1, 0)
    q[..., 0], k[..., 0] = 1, 1 + 2.0**-12
    expect(KERNELS["fma_fwd float32"](q, k, full(1, 1), scale=1.0), [1], [1.00024414], lse_near=1e-6)


@every_kernel
@pytest.mark.parametrize("value", [np.nan, INFINITY, -INFINITY])
def test_what_the_mask_hides_has_no_influence(kernel: Kernel, value: float) -> None:
    q, k, v = full(2, 1), full(2, 1), full(2, 5)
    k[:, 1] = v[:, 1] = value
    found = kernel(q, k, v, causal=True)
    assert (found.out[0, 0] == 5).all()
    assert found.lse[0, 0, 0] == pytest.approx(8, rel=3e-7)
    if np.isnan(value):
        assert np.isnan(found.out[0, 1]).all()
        assert np.isnan(found.lse[0, 0, 1])


@every_kernel
@pytest.mark.parametrize("finite", [0, 64, 127, 130])
def test_keys_with_scores_of_minus_infinity(kernel: Kernel, finite: int) -> None:
    k, v = full(131, 0), full(131, 1)
    k[..., 63] = -INFINITY
    k[:, finite], v[:, finite] = 0, 7
    expect(kernel(full(1, 1), k, v), [7], [0])


@every_kernel
def test_scores_and_values_near_the_end_of_float16(kernel: Kernel) -> None:
    found = kernel(full(1, 200, 128), full(2, 200, 128), by_key([1, 3], 128))
    expect(found, [2], [452549.03], lse_near=0.1)
    large = float(rounded(np.full(1, 60000, np.float32), kernel.dtype)[0])
    step = 0 if kernel.family == "sm80_fwd" else 0.25
    expect(kernel(full(1, 0), full(4096, 1), full(4096, large)), [large], [math.log(4096)], near=step)


# ---- Masks ----
@every_kernel
def test_more_queries_than_keys(kernel: Kernel) -> None:
    none = [-INFINITY] * 3
    expect(kernel(full(5, 0), full(2, 0), by_key([1, 2]), causal=True), [0, 0, 0, 1, 1.5], [*none, 0, math.log(2)])


@every_kernel
def test_the_last_query_sees_every_key(kernel: Kernel) -> None:
    expect(kernel(full(1, 0), full(8, 0), by_key(range(8)), causal=True), [3.5], [math.log(8)])


@every_kernel
@pytest.mark.parametrize("lengths", [(15, 17), (17, 16), (33, 97), (64, 47), (49, 49)], ids=str)
def test_each_query_sees_its_keys_and_no_more(kernel: Kernel, lengths: tuple[int, int]) -> None:
    """With equal weights the LSE counts the keys; the largest value seen says which was the last."""
    seqlen_q, seqlen_k = lengths
    seen = np.arange(seqlen_q) + 1 + seqlen_k - seqlen_q
    with np.errstate(divide="ignore"):
        lse = np.log(np.maximum(seen, 0))
    out = np.where(seen > 0, (seen - 1) / 2, 0)
    found = kernel(full(seqlen_q, 0), full(seqlen_k, 0), by_key(range(seqlen_k)), causal=True)
    expect(found, out, lse, near=0.0 if kernel.dtype == "float32" else 0.13, lse_near=1e-6)
