"""The options of `attention()`: what each may be, by its type and value alone.

They are parts of the keys by which calls are remembered, and as a key 1 equals True and Decimal(1) equals 1.0. So flags
and scales come in one type each before a key is made of them: what is refused once is always refused.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

from flashtune.codegen.plan.config import Config
from flashtune.errors import InvalidInput, InvalidType
from flashtune.values import shown

LAYOUTS: dict[str, tuple[int, int, int]] = {"bshd": (0, 1, 2), "bhsd": (0, 2, 1)}
"""Where batch, row and head are, by layout; head_dim is last."""

MAX_SCALE = 2.0**127
"""Kernels multiply the scale by log2(e) in float32."""


def flag(name: str, got: object) -> bool:
    """``got`` as a bool, which it or a numpy.bool must be: 0 and 1, None and arrays of one element are refused."""
    if isinstance(got, bool):
        return got
    import numpy

    if isinstance(got, numpy.bool):
        return bool(got)
    raise InvalidType(f"{name}={shown(got)} must be True or False")


def real_scale(got: object) -> float:
    """A scale as a float: any real number of Python or NumPy that is no bool, of a size that kernels can take."""
    if isinstance(got, bool) or not isinstance(got, numbers.Real):
        raise InvalidType(f"scale={shown(got)} must be a real number, or None for 1/sqrt(head_dim)")
    try:
        scale = float(got)
    except OverflowError:
        scale = math.inf
    if not abs(scale) <= MAX_SCALE:  # false for NaN too
        raise InvalidInput(f"scale={shown(got)} must be finite and at most 2**127 ({MAX_SCALE:.4g}) in magnitude")
    return scale


def check_options(causal: object, scale: object, return_lse: object, layout: Any, config: object) -> None:
    """Refuses the first of them that is not as it must be."""
    flag("causal", causal)
    flag("return_lse", return_lse)
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise InvalidInput(f"layout={shown(layout)} is not known. Known: {', '.join(map(repr, LAYOUTS))}")
    if config is not None and not isinstance(config, Config):
        raise InvalidType(f"config={shown(config)} must be a config of a kernel family, or None")
    if scale is not None:
        real_scale(scale)
