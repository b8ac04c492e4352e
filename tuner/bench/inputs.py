"""Random inputs, made on the host: a lean install has no cuRAND."""

from __future__ import annotations

import numpy as np

from flashtune.codegen.problem.bits import Array, to_memory


def random_values(dtype: str, count: int, seed: int) -> Array:
    """``count`` normal random numbers as they lie in memory: see :func:`to_memory`."""
    return to_memory(np.random.default_rng(seed).standard_normal(count, dtype=np.float32), dtype)
