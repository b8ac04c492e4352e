"""The kernels of test_numbers.py and test_shapes.py: configs that are unlike those of emulated_kernels.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashtune.codegen.families.registry import read_config
from flashtune.codegen.problem.problem import Problem
from flashtune.emulator import Emulation, emulate

Array = NDArray[Any]

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


def expect(found: Emulation, out: Any, lse: Any, *, near: float = 0.0, lse_near: float = 3e-7) -> None:
    """One head: every column of row i of the output is out[i], its LSE lse[i]."""
    rows = np.broadcast_to(np.asarray(out, np.float64)[:, None], found.out[0, :, 0].shape)
    np.testing.assert_allclose(found.out[0, :, 0], rows, rtol=0, atol=near)
    np.testing.assert_allclose(found.lse[0, 0], np.asarray(lse, np.float64), rtol=3e-7, atol=lse_near)
