"""Numbers, masks and shapes that other attention kernels got wrong, on the CPU: values known by hand.

Configs here are unlike those of test_kernels.py. Memory outside a tensor can't be read at all: the emulator reports it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashtune.codegen.emulator import Emulation, emulate
from flashtune.codegen.family import family, read_config
from flashtune.codegen.gpu import gpu_by_alias
from flashtune.codegen.problem import Problem
from flashtune.codegen.reference import rounded
from flashtune.codegen.tolerance import attention_tolerances
from flashtune.errors import UnsupportedProblem

pytestmark = pytest.mark.emulate

Array = NDArray[Any]
INFINITY = math.inf
LENGTHS = (1, 2, 15, 16, 17, 64, 65, 129)
HEAD_DIMS = (8, 16, 24, 40, 56, 64, 72, 80, 96, 112, 128, 256)

SM80: dict[str, object] = {
    "block_m": 32,
    "block_n": 48,
    "num_warps": 2,
    "num_stages": 3,
    "q_in_registers": True,
    "blocks_per_sm": 1,
}
SM90: dict[str, object] = {
    "warpgroups": 1,
    "block_n": 32,
    "num_stages": 3,
    "q_buffers": 1,
    "softmax": "late",
    "ping_pong": False,
    "scheduler": "tile",
    "blocks_per_sm": 1,
}
PLAIN: dict[str, object] = {
    "block_m": 16,
    "block_n": 16,
    "num_warps": 1,
    "num_stages": 1,
    "q_in_registers": False,
    "blocks_per_sm": 1,
}
FMA: dict[str, object] = {
    "block_m": 32,
    "block_n": 16,
    "num_threads": 64,
    "threads_n": 8,
    "share_kv": True,
    "blocks_per_sm": 1,
}


@dataclass(frozen=True)
class Kernel:
    family: str
    dtype: str
    config: Mapping[str, object] = field(hash=False)

    def __call__(self, q: Array, k: Array, v: Array, *, causal: bool = False, **options: Any) -> Emulation:
        problem = Problem(
            dtype=self.dtype,
            head_dim=q.shape[3],
            batch=q.shape[0],
            seqlen_q=q.shape[1],
            seqlen_k=k.shape[1],
            num_heads=q.shape[2],
            num_heads_kv=k.shape[2],
            causal=causal,
            alignment=options.pop("alignment", 16),
        )
        return emulate(problem, read_config(self.family, self.config), q, k, v, **options)


KERNELS = {
    "sm90_fwd float16": Kernel("sm90_fwd", "float16", SM90),
    "sm90_fwd bfloat16": Kernel("sm90_fwd", "bfloat16", SM90 | {"block_n": 48, "softmax": "lazy"}),
    "sm80_fwd float16": Kernel("sm80_fwd", "float16", SM80),
    "sm80_fwd bfloat16": Kernel("sm80_fwd", "bfloat16", PLAIN | {"rescale_threshold": 0}),
    "fma_fwd float32": Kernel("fma_fwd", "float32", FMA),
    "fma_fwd float16": Kernel("fma_fwd", "float16", FMA | {"share_kv": False, "threads_n": 16, "block_m": 16}),
}
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
WITHOUT_TMA = {name: kernel for name, kernel in KERNELS.items() if kernel.family != "sm90_fwd"}
every_kernel_without_tma = pytest.mark.parametrize("kernel", WITHOUT_TMA.values(), ids=WITHOUT_TMA)


def full(seqlen: int, value: float, head_dim: int = 64, heads: int = 1, batch: int = 1) -> Array:
    return np.full((batch, seqlen, heads, head_dim), value, np.float32)


def by_key(values: Any, head_dim: int = 64) -> Array:
    """One head in which every column of key j holds values[j]."""
    listed = np.asarray(values, np.float32)
    return np.broadcast_to(listed[None, :, None, None], (1, len(listed), 1, head_dim)).copy()


def normal(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    return rounded(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), dtype)


def expect(found: Emulation, out: Any, lse: Any, *, near: float = 0.0, lse_near: float = 3e-7) -> None:
    """One head: every column of row i of the output is out[i], its LSE lse[i]."""
    rows = np.broadcast_to(np.asarray(out, np.float64)[:, None], found.out[0, :, 0].shape)
    np.testing.assert_allclose(found.out[0, :, 0], rows, rtol=0, atol=near)
    np.testing.assert_allclose(found.lse[0, 0], np.asarray(lse, np.float64), rtol=3e-7, atol=lse_near)


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


# ---- Shapes ----
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ["sm90_fwd float16", "sm80_fwd float16", "fma_fwd float32"])
def test_the_last_column_of_every_head_dim_counts(name: str, head_dim: int) -> None:
    kernel = KERNELS[name]
    q, k = full(3, 0, head_dim), full(50, 0, head_dim)
    q[..., -1], k[..., -1] = normal((1, 3, 1), kernel.dtype, 1), 4 * normal((1, 50, 1), kernel.dtype, 2)
    v = normal(k.shape, kernel.dtype, 3)
    options: dict[str, object] = {"num_stages": 1} if name.startswith("sm80") else {}
    found = Kernel(kernel.family, kernel.dtype, {**kernel.config, **options})(q, k, v, scale=1.0)
    for allowed, ours in zip(
        attention_tolerances(q, k, v, scale=1.0, dtype=kernel.dtype), (found.out, found.lse), strict=True
    ):
        verdict = allowed.judge(ours)
        assert verdict, f"head_dim={head_dim}: {verdict}"


@pytest.mark.parametrize("head_dim", [1, 36, 257, 264, 512])
@every_kernel
def test_other_head_dims_are_refused(kernel: Kernel, head_dim: int) -> None:
    each = full(1, 0, head_dim)
    with pytest.raises(UnsupportedProblem, match=rf"head_dim={head_dim} is not supported. Supported: multiples of 8"):
        kernel(each, each, each)


@every_kernel
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_lengths(kernel: Kernel, seqlen_q: int) -> None:
    for seqlen_k in LENGTHS:
        found = kernel(full(seqlen_q, 0, 16), full(seqlen_k, 1, 16), full(seqlen_k, 1, 16), seed=seqlen_k)
        expect(found, [1] * seqlen_q, [math.log(seqlen_k)] * seqlen_q, near=1e-3, lse_near=1e-6)


@every_kernel
def test_many_keys_and_many_queries(kernel: Kernel) -> None:
    for seqlen_q, seqlen_k in ((1, 1025), (1025, 1), (129, 1025)):
        found = kernel(full(seqlen_q, 0, 16), full(seqlen_k, 1, 16), full(seqlen_k, 1, 16))
        expect(found, [1] * seqlen_q, [math.log(seqlen_k)] * seqlen_q, near=1e-3, lse_near=1e-6)


@functools.cache
def random_inputs(dtype: str, batch: int, seqlen_q: int, seqlen_k: int, heads: int, kv: int) -> tuple[Array, ...]:
    q = normal((batch, seqlen_q, heads, 32), dtype, 4)
    return q, normal((batch, seqlen_k, kv, 32), dtype, 5), normal((batch, seqlen_k, kv, 32), dtype, 6)


def same_as_contiguous(kernel: Kernel, q: Array, k: Array, v: Array, **options: Any) -> None:
    dense = kernel(*(np.ascontiguousarray(each) for each in (q, k, v)))
    found = kernel(q, k, v, **options)
    assert found.out.tobytes() == dense.out.tobytes()
    assert found.lse.tobytes() == dense.lse.tobytes()


@every_kernel
def test_each_tensor_has_strides_of_its_own(kernel: Kernel) -> None:
    q, k, v = random_inputs(kernel.dtype, 2, 62, 45, 4, 2)
    swapped = np.ascontiguousarray(v.swapaxes(1, 2)).swapaxes(1, 2)
    same_as_contiguous(kernel, q[:, ::2], k, swapped)


@every_kernel
@pytest.mark.parametrize("seqlen_k", [32, 33, 34, 65])
def test_one_head_of_keys_seen_as_eight(kernel: Kernel, seqlen_k: int) -> None:
    q, k, v = random_inputs(kernel.dtype, 1, 5, seqlen_k, 8, 1)
    shape = (1, seqlen_k, 8, 32)
    same_as_contiguous(kernel, q, np.broadcast_to(k, shape), np.broadcast_to(v, shape))


@every_kernel
def test_one_batch_entry_seen_as_three(kernel: Kernel) -> None:
    q, k, v = random_inputs(kernel.dtype, 3, 5, 34, 2, 2)
    shape = k.shape
    same_as_contiguous(kernel, q, np.broadcast_to(k[:1], shape), np.broadcast_to(v[:1], shape))


@every_kernel_without_tma
def test_keys_in_reverse_order(kernel: Kernel) -> None:
    q, k, v = random_inputs(kernel.dtype, 2, 5, 65, 2, 2)
    same_as_contiguous(kernel, q, k[:, ::-1], v[:, ::-1])


@every_kernel_without_tma
def test_rows_that_begin_anywhere(kernel: Kernel) -> None:
    """Rows of 33 elements, of which 32 are used; the first element too is only aligned to its own size."""
    q, k, v = random_inputs(kernel.dtype, 2, 19, 65, 4, 2)
    shifted = []
    for each in (q, k, v):
        memory = np.full((*each.shape[:3], 33), np.nan, np.float32)
        memory[..., 1:] = each
        shifted.append(memory[..., 1:])
    item = {"float32": 4}.get(kernel.dtype, 2)
    same_as_contiguous(kernel, *shifted, alignment=item, out_strides=(33 * 4 * 19, 33 * 4, 33, 1))


@every_kernel
@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 6, 7, 16, 32, 71])
def test_each_query_head_reads_its_head_of_keys(kernel: Kernel, ratio: int) -> None:
    v = full(3, 0, 16, heads=3)
    v += np.arange(3, dtype=np.float32)[:, None]
    found = kernel(full(2, 0, 16, heads=3 * ratio), full(3, 0, 16, heads=3), v)
    heads = np.arange(3 * ratio) // ratio
    assert (found.out == heads[None, None, :, None]).all()
    np.testing.assert_allclose(found.lse, math.log(3), rtol=3e-7)


@pytest.mark.parametrize("name", ["sm90_fwd", "sm80_fwd", "fma_fwd"])
def test_many_batch_entries_and_heads(name: str) -> None:
    """What stands in for batch times heads beyond 65535: the grid has one dimension, whatever they are."""
    problem = Problem(dtype="float16", head_dim=8, batch=67, seqlen_q=1, seqlen_k=2, num_heads=5, num_heads_kv=5)
    v = full(2, 0, 8, heads=5, batch=67)
    v += (np.arange(67, dtype=np.float32) % 7)[:, None, None, None]
    config = family(name).default(problem.spec, gpu_by_alias("h200"))
    found = emulate(problem, config, full(1, 0, 8, heads=5, batch=67), full(2, 0, 8, heads=5, batch=67), v)
    assert (found.out == v[:, :1]).all()
