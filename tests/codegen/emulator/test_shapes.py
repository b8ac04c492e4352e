"""Head dims, lengths, strides and numbers of heads that other attention kernels got wrong, on the CPU.

Memory outside a tensor can't be read at all: the emulator reports it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from case_kernels import KERNELS, Kernel, every_kernel, expect
from emulated_kernels import full
from numpy.typing import NDArray

from flashtune.codegen.families.registry import family
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem
from flashtune.codegen.problem.reference import rounded
from flashtune.codegen.problem.tolerance import attention_tolerances
from flashtune.emulator import emulate
from flashtune.errors import UnsupportedProblem

pytestmark = pytest.mark.emulate

Array = NDArray[Any]
LENGTHS = (1, 2, 15, 16, 17, 64, 65, 129)
HEAD_DIMS = (8, 16, 24, 40, 56, 64, 72, 80, 96, 112, 128, 256)
WITHOUT_TMA = {name: kernel for name, kernel in KERNELS.items() if kernel.family != "sm90_fwd"}
every_kernel_without_tma = pytest.mark.parametrize("kernel", WITHOUT_TMA.values(), ids=WITHOUT_TMA)


def normal(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    return rounded(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), dtype)


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
