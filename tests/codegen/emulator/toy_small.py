"""A kernel of a few lines with two mbarriers: the body is what a test gives."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sm90_toys import HEAD, one_step, run_toy

from flashtune.codegen.plan.tensor_map import TensorMap
from flashtune.emulator.tensors import Mapped, output_tensor, plain_tensor

Array = NDArray[Any]

SMALL = (
    HEAD
    + """
extern "C" __global__ void toy(const __grid_constant__ TensorMap map, float* out) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const int thread = threadIdx.x;
  float* floats = reinterpret_cast<float*>(smem + 1024);
  const u32 bar = shared_address(smem), tile = bar + 1024;
  if (thread == 0) {
    mbarrier_init(bar, {{arrivals}});
    mbarrier_init(bar + 8, {{arrivals}});
    fence_mbarrier_init();
  }
  __syncthreads();
  {{body}}
}
"""
)


def run_small(body: str, arrivals: int = 128, threads: int = 128, seed: int = 0) -> Array:
    """``map`` is of 16 lines of 8 numbers 0, 1, 2, ... in float32, a box all of it; ``out`` has a number a thread."""
    lines = plain_tensor("lines", np.arange(128, dtype=np.float32).reshape(16, 8), "float32")
    out = output_tensor("out", "float32", (threads,))
    described = TensorMap(0, "float32", (8, 16, 1, 1), (32, 512, 512), (8, 16, 1, 1))
    names = {"element": "Half", **one_step(), "arrivals": arrivals, "body": body}
    return run_toy(SMALL, names, [Mapped(lines, described), out], threads, 2048, seed=seed)["out"]
