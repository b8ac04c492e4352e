"""Memory is O(N): the output, the LSE and, where keys are shared, a bounded workspace; up to a million tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import flashtune
from flashtune.codegen.gpu import cuda
from flashtune.codegen.problem.reference import plain_attention

pytestmark = pytest.mark.gpu
pytest.importorskip("flashtune.codegen.launch", reason="needs CuPy", exc_type=ImportError)
cupy = cuda.cupy

HEAD_DIM = 64
TOLERANCE = 2e-3
"""For averages of many random values of size 1: far above rounding, far below any of them."""


@pytest.fixture
def requested() -> Iterator[list[int]]:
    """Sizes in bytes of all that CuPy is asked for during the test."""
    if not cupy.cuda.is_available():
        pytest.skip("no CUDA device")
    sizes: list[int] = []

    def allocate(size: int) -> object:
        sizes.append(size)
        return cupy.get_default_memory_pool().malloc(size)

    cupy.cuda.set_allocator(allocate)
    yield sizes
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
    cupy.get_default_memory_pool().free_all_blocks()


def random_inputs(seqlen: int) -> list[object]:
    draw = np.random.default_rng(seqlen)
    return [cupy.asarray(draw.standard_normal((1, seqlen, 1, HEAD_DIM), np.float32).astype(np.float16)) for _ in "qkv"]


def check_rows(q: object, k: object, v: object, out: object, rows: list[int]) -> None:
    """Compares single rows of a full attention with float64 on the host."""
    host_q, host_k, host_v, host_out = (cupy.asnumpy(each) for each in (q, k, v, out))
    for row in rows:
        want, _ = plain_attention(host_q[:, row : row + 1], host_k, host_v, causal=False, compute_dtype=np.float64)
        error = float(np.abs(host_out[:, row].astype(np.float64) - want[:, 0]).max())
        assert error < TOLERANCE, f"row {row} of {host_q.shape[1]}: error {error}"


@pytest.mark.parametrize("seqlen", [2**power for power in range(10, 18)])
def test_a_call_allocates_its_output_and_lse_and_its_workspace(seqlen: int, requested: list[int]) -> None:
    q, k, v = random_inputs(seqlen)
    asked = flashtune.Problem(
        dtype="float16", head_dim=HEAD_DIM, batch=1, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=1, num_heads_kv=1
    )
    plan = flashtune.plan(asked)
    blocks = 2 * plan.gpu.num_sms  # share keys at most, each with a tile of 128 rows and its sums
    assert plan.workspace_bytes <= blocks * 128 * (HEAD_DIM + 8) * 4 + 4096
    flashtune.attention(q, k, v, return_lse=True)  # compiles and loads
    cupy.cuda.runtime.deviceSynchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    free_before, _ = cupy.cuda.runtime.memGetInfo()
    requested.clear()
    out, lse = flashtune.attention(q, k, v, return_lse=True)
    cupy.cuda.runtime.deviceSynchronize()
    free_after, _ = cupy.cuda.runtime.memGetInfo()
    sizes = [each for each in (out.nbytes, lse.nbytes, plan.workspace_bytes) if each]
    assert sorted(requested) == sorted(sizes)
    assert lse.nbytes == 4 * seqlen
    grain = 3 * 2**21  # the driver maps whole pages of 2 MiB for each
    assert free_before - free_after <= sum(sizes) + grain
    check_rows(q, k, v, out, [0, seqlen // 2 + 1, seqlen - 1])


def test_a_million_tokens_run(requested: list[int]) -> None:
    seqlen = 2**20
    q, k, v = random_inputs(seqlen)
    requested.clear()
    out = flashtune.attention(q, k, v)
    cupy.cuda.runtime.deviceSynchronize()
    assert requested == [out.nbytes]
    check_rows(q, k, v, out, [0, 777_777, seqlen - 1])
