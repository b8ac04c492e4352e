"""What tests of attention on the GPU share: inputs whose outputs are known by hand, and the comparison with these.

``ramp(n)`` is a v whose key j is j in every head and column; q of zeros gives every visible key the same weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

GB = 1 << 30


def full(shape: tuple[int, ...], value: float) -> Any:
    return np.full(shape, value, np.float64)


def ramp(seqlen: int, first: float = 0, step: float = 1, heads: int = 1, head_dim: int = 64, batch: int = 1) -> Any:
    rows = first + step * np.arange(seqlen, dtype=np.float64)
    return np.broadcast_to(rows[None, :, None, None], (batch, seqlen, heads, head_dim))


def differs(got: Any, want: Any, allowed: Any) -> Any:
    """Where ``got`` is neither ``want`` nor, both being finite, within ``allowed`` of it."""
    with np.errstate(invalid="ignore"):
        close = np.isfinite(want) & (np.abs(got - want) <= allowed)
    return ~((got == want) | close | (np.isnan(got) & np.isnan(want)))


def expect(
    label: str, out: Any, lse: Any, rows: Any, lse_rows: Any, *, rel: float = 1e-6, near: float = 0
) -> list[str]:
    """Compares (1, seqlen_q, heads, head_dim) with one value per row, and the LSE likewise; empty if all is well.

    Outputs may be ``near`` off, LSEs ``rel`` times their size (and the error of a logarithm near 1).
    """
    row_values = np.broadcast_to(np.asarray(rows, np.float64)[None, :, None, None], out.shape)
    lse_values = np.broadcast_to(np.asarray(lse_rows, np.float64)[None, None, :], lse.shape)
    found = []
    for what, got, want, allowed in (
        ("outputs", out, row_values, near),
        ("LSEs", lse, lse_values, rel * np.abs(lse_values) + 3e-7),
    ):
        wrong = differs(got, want, allowed)
        if wrong.any():
            at = tuple(int(each) for each in np.argwhere(wrong)[0])
            found.append(f"{label}: {int(wrong.sum())} {what} wrong, first at {at}: {got[at]!r}, must be {want[at]!r}")
    return found


def skip_unless_free(library: Any, needed: float) -> None:
    from flashtune.codegen.gpu.cuda import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < needed * GB:
        pytest.skip(f"needs {needed} GB of free device memory, {free / GB:.1f} are")
