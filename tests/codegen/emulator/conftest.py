"""Kernels on the CPU: what all these tests share. Without a C++ compiler tests/conftest.py leaves them out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashtune.codegen.families.registry import family
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem
from flashtune.emulator import Emulation, emulate

sys.path.append(str(Path(__file__).parent))  # what several test files start from: sm90_toys.py and others

TOY = """
#include "lib/types.cuh"
#include "lib/params.cuh"
#include "lib/ptx.cuh"
extern "C" __global__ void fma_fwd(const Params params) {
  extern __shared__ __align__(16) unsigned char smem[];
  const int thread = threadIdx.x;
  const float* q = static_cast<const float*>(params.q);
  float* out = static_cast<float*>(params.out);
  float* floats = reinterpret_cast<float*>(smem);
"""


@pytest.fixture
def toy() -> Callable[..., Emulation]:
    """Runs a kernel of a few lines: one block of 128 threads with 5120 bytes of shared memory.

    q (1, 16, 1, 8) holds 0, 1, 2, ... in float32, k and v (1, 16, 1, 8) ones; out is as q.
    """
    problem = Problem(dtype="float32", head_dim=8, batch=1, seqlen_q=16, seqlen_k=16, num_heads=1, num_heads_kv=1)
    kind = family("fma_fwd")
    config = kind.config_type.from_json(
        {"block_m": 32, "block_n": 32, "num_threads": 128, "threads_n": 8, "share_kv": True, "blocks_per_sm": 1}
    )
    q = np.arange(16 * 8, dtype=np.float32).reshape(1, 16, 1, 8)
    ones = np.ones((1, 16, 1, 8), np.float32)

    def run(body: str, **options: Any) -> Emulation:
        text = f"{TOY}{body}\n}}\n"
        return emulate(problem, config, q, ones, ones, templates={"fma_fwd.cu.jinja": text}, **options)

    needed = kind.plan(problem, config, gpu_by_alias("h200")).kernels[0]
    assert (needed.grid, needed.threads, needed.shared_memory) == ((1, 1, 1), 128, 7680)
    return run
