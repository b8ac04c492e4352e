"""Inputs that show what random ones don't: each changes q, k and v of a setup in place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def growing(q: Array, k: Array, v: Array) -> None:
    """Later keys have larger scores, up to about 300."""
    k *= np.linspace(0.1, 40, k.shape[1], dtype=np.float32)[:, None, None]


def falling(q: Array, k: Array, v: Array) -> None:
    """Earlier keys have larger scores."""
    k *= np.linspace(40, 0.1, k.shape[1], dtype=np.float32)[:, None, None]


def growing_far(q: Array, k: Array, v: Array) -> None:
    """The same, so far that references have to be subtracted from scores before they are scaled."""
    k *= np.linspace(0.1, 400, k.shape[1], dtype=np.float32)[:, None, None]


def rising(q: Array, k: Array, v: Array) -> None:
    """Scores rise from about -2300 to -570: in the last block of keys references get small enough for the fast way."""
    q[...] = 1
    k[...] = np.linspace(-400, -100, k.shape[1], dtype=np.float32)[:, None, None]


def unseen(q: Array, k: Array, v: Array) -> None:
    """Two keys have large scores, and are none of the first 32 of their block of 64."""
    k[:, 60] *= 4
    k[:, 110] *= 30


def one_far(q: Array, k: Array, v: Array) -> None:
    """One key has scores of thousands, and is none of the first 32 of its block of 64."""
    k[:, 110] *= 3000


def further_far(q: Array, k: Array, v: Array) -> None:
    """The same, behind a key of the first block whose scores are large already."""
    k[:, 20] *= 1000
    k[:, 110] *= 3000


def large_nonfinite(q: Array, k: Array, v: Array) -> None:
    q *= 2**20
    v[:, 60, :, 5] = np.nan


def nonfinite(q: Array, k: Array, v: Array) -> None:
    """NaN and infinities in some columns of V, in the last block of keys and in one before it."""
    v[:, 60, :, 5] = np.nan
    v[:, 40, :, 7] = np.inf
    v[:, 33, 0, 20] = -np.inf


def at_the_ends(q: Array, k: Array, v: Array) -> None:
    """An infinity at the first and last key of each block of 16, in columns of their own."""
    for column, key in enumerate((0, 15, 16, 31, 32, 47, 48, 61)):
        v[:, key, :, column] = np.inf


def in_one_column(q: Array, k: Array, v: Array) -> None:
    """NaN behind the mask, in the second 32 columns alone."""
    v[:, 60, :, 45] = np.nan


def large(q: Array, k: Array, v: Array) -> None:
    for each in (q, k, v):
        each[...] = 133120
