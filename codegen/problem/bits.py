"""Values as they lie in device memory: 16-bit floats as their bits, so that nothing needs ml_dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashtune.errors import InvalidInput

from .reference import rounded

Array = NDArray[Any]


def to_memory(values: Array, dtype: str) -> Array:
    """float32 ``values`` rounded to ``dtype``; 16-bit floats come as uint16 bits."""
    if dtype == "float32":
        return np.ascontiguousarray(values, np.float32)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    if dtype == "bfloat16":
        return (rounded(values, dtype).view(np.uint32) >> 16).astype(np.uint16)
    raise InvalidInput(f"dtype={dtype[:40]!r} is not known here. Known: float16, bfloat16, float32")


def from_memory(values: Array, dtype: str) -> Array:
    """The float32 (float64 for float64) numbers behind what :func:`to_memory` gives, or a kernel wrote."""
    if dtype == "float16":
        return values.view(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return values.view(dtype)
