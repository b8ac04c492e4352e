"""Attention in NumPy: the plain formula, which needs N x N memory, and the tiled online softmax, which does not.

q is (batch, seqlen_q, num_heads, head_dim), k (batch, seqlen_k, num_heads_kv, head_dim), v (batch, seqlen_k,
num_heads_kv, head_dim_v) and out (batch, seqlen_q, num_heads, head_dim_v); query head h reads key head
``h // (num_heads // num_heads_kv)``. Causal is aligned bottom-right: key j is visible to query i when
``j <= i + seqlen_k - seqlen_q``. Hidden keys have no influence, not even through NaN or infinity. A row that sees no
key, or only scores of -inf, has output 0 and LSE -inf. LSE is the natural logarithm of the sum of exp of the scaled
visible scores, (batch, num_heads, seqlen_q).

float16, float32 and float64 are NumPy's; bfloat16 arrays carry the dtype of ``ml_dtypes``. Nothing here checks shapes:
that is :class:`.problem.Problem`'s task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .mask import Mask

Array = NDArray[Any]
Compute = type[np.float32] | type[np.float64]
Product = Callable[[Array, Array], Array]

SEQUENTIAL_TERMS = 2**20
"""Most terms of one product that are summed one after the other, in Python."""
MATRIX_ROWS = 16
"""Fewest rows and columns that BLAS is sure to treat as a matrix."""


def tiled_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    block_m: int = 256,
    block_n: int = 256,
) -> tuple[Array, Array]:
    """Exact attention by tiles of ``block_m`` queries and ``block_n`` keys: (out in q's dtype, float32 LSE).

    One tile of scores exists at a time, so memory beyond the results does not grow with the sequence. Arithmetic is
    float64 for float64 input, else float32.
    """
    seqlen_q, seqlen_k, head_dim = q.shape[1], k.shape[1], q.shape[3]
    compute: Compute = np.float64 if q.dtype == np.float64 else np.float32
    factor = compute(1.0 / math.sqrt(head_dim) if scale is None else scale)
    mask = Mask(seqlen_q, seqlen_k, causal)
    out = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    lse = np.empty((q.shape[0], q.shape[2], seqlen_q), np.float32)

    with np.errstate(all="ignore"):  # infinities and NaN are values here
        for batch, heads, head_kv in _groups(q, k):
            for row_begin in range(0, seqlen_q, block_m):
                rows = slice(row_begin, min(row_begin + block_m, seqlen_q))
                queries = _by_head(q[batch, rows, heads], compute)  # [group, block_m, head_dim]

                row_max = np.full((*queries.shape[:2], 1), -np.inf, compute)  # of the scores so far
                row_sum = np.zeros_like(row_max)  # of exp(score - row_max) so far
                accumulated = np.zeros((*queries.shape[:2], v.shape[3]), compute)  # of exp(score - row_max) times value
                first, end = (int(each[0]) for each in mask.seen_by_any(np.array([rows.start]), np.array([rows.stop])))
                for key_begin in range(first // block_n * block_n, end, block_n):
                    keys = slice(key_begin, min(key_begin + block_n, seqlen_k))
                    visible = _visible(mask, rows, keys)

                    scores = queries @ k[batch, keys, head_kv].astype(compute).T * factor
                    scores = np.where(visible, scores, -np.inf)
                    new_max = np.maximum(row_max, scores.max(axis=-1, keepdims=True))
                    subtracted = _subtractable(new_max)
                    weights = np.exp(scores - subtracted)
                    rescale = np.exp(row_max - subtracted)

                    row_sum = row_sum * rescale + weights.sum(axis=-1, keepdims=True)
                    values = v[batch, keys, head_kv].astype(compute)
                    accumulated = accumulated * rescale + _weighted(weights, values, visible)
                    row_max = new_max

                nothing = row_sum == 0
                result = np.where(nothing, 0, accumulated / row_sum)  # the one division
                out[batch, rows, heads] = result.swapaxes(0, 1).astype(out.dtype)
                lse[batch, heads, rows] = np.where(nothing, -np.inf, row_max + np.log(row_sum))[..., 0]
    return out, lse


def plain_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    compute_dtype: Compute = np.float64,
    dtype: str = "",
    out_dtype: str = "",
) -> tuple[Array, Array]:
    """The standard formula, one whole score matrix per head: (out, LSE).

    ``compute_dtype=np.float64`` is the reference of the project: nothing is rounded, both results are float64.
    ``np.float32`` is the plain implementation that errors are compared with: scores and softmax in float32, the
    operands of both products (the weights too) rounded to ``dtype``, the output to ``out_dtype``, LSE in float32.
    16-bit operands are multiplied as tensor cores do it, float32 operands as a plain loop.
    ``dtype`` is by default that of ``q``; float32 arrays may stand for bfloat16 by its name. The output array has the
    dtype of ``q`` where that holds ``out_dtype``, else float32.
    """
    seqlen_q, seqlen_k, head_dim = q.shape[1], k.shape[1], q.shape[3]
    exact = compute_dtype is np.float64
    factor = compute_dtype(1.0 / math.sqrt(head_dim) if scale is None else scale)
    visible = _visible(Mask(seqlen_q, seqlen_k, causal), slice(0, seqlen_q), slice(0, seqlen_k))
    dtype = dtype or q.dtype.name
    out_dtype = out_dtype or dtype
    product: Product = np.matmul if exact else _sequential if dtype == "float32" else _tensor_core
    held = np.dtype(np.float64) if exact else q.dtype if q.dtype.name == out_dtype else np.dtype(np.float32)
    out = np.empty((*q.shape[:3], v.shape[3]), held)
    lse = np.empty((q.shape[0], q.shape[2], seqlen_q), compute_dtype)

    with np.errstate(all="ignore"):
        for batch, heads, head_kv in _groups(q, k):
            queries = _by_head(q[batch, :, heads], compute_dtype)
            scores = product(queries, k[batch, :, head_kv].astype(compute_dtype).T) * factor
            scores = np.where(visible, scores, -np.inf)
            row_max = scores.max(axis=-1, keepdims=True, initial=-np.inf)
            weights = np.exp(scores - _subtractable(row_max))
            row_sum = weights.sum(axis=-1, keepdims=True)
            nothing = row_sum == 0
            weights = np.where(nothing, 0, weights / row_sum)
            if not exact:
                weights = rounded(weights, dtype)
            values = v[batch, :, head_kv].astype(compute_dtype)
            result = np.where(nothing, 0, _weighted(weights, values, visible, product))
            if not exact:
                result = rounded(result, out_dtype)
            out[batch, :, heads] = result.swapaxes(0, 1).astype(held)
            lse[batch, heads] = np.where(nothing, -np.inf, row_max + np.log(row_sum))[..., 0]
    return out, lse


def rounded(values: Array, dtype: str) -> Array:
    """float32 ``values`` rounded to the nearest that ``dtype`` (a name) holds, ties to even; still float32."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype != "bfloat16":
        return values
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(values), kept.view(np.float32), values)


def _groups(q: Array, k: Array) -> Iterator[tuple[int, slice, int]]:
    """(batch, query heads, the key head they share), one after the other."""
    num_heads_kv = k.shape[2]
    group = q.shape[2] // num_heads_kv
    for batch in range(q.shape[0]):
        for head_kv in range(num_heads_kv):
            yield batch, slice(head_kv * group, (head_kv + 1) * group), head_kv


def _by_head(rows: Array, compute: Compute) -> Array:
    """(rows, heads, head_dim) to (heads, rows, head_dim) in the dtype of the arithmetic."""
    return np.ascontiguousarray(rows.swapaxes(0, 1), dtype=compute)


def _visible(mask: Mask, rows: slice, keys: slice) -> NDArray[np.bool_]:
    """Which of ``keys`` each of ``rows`` sees: [rows, keys]."""
    begin, end = mask.seen(np.arange(rows.start, rows.stop))
    key = np.arange(keys.start, keys.stop)
    seen: NDArray[np.bool_] = (begin[:, None] <= key) & (key < end[:, None])
    return seen


def _subtractable(row_max: Array) -> Array:
    """``row_max``, or 0 for rows whose scores are all -inf: -inf - -inf would be NaN."""
    return np.where(row_max == -np.inf, row_max.dtype.type(0), row_max)


def _sequential(left: Array, right: Array) -> Array:
    """``left @ right`` that sums one term after the other, as a plain loop does, where that is affordable.

    Small products, and single rows and columns, BLAS sums in lanes. Its errors are then several times smaller than
    those of larger products and of any attention kernel: a yardstick that would depend on the shape.
    """
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    if rows * inner * columns <= SEQUENTIAL_TERMS:
        total = np.zeros((*left.shape[:-1], columns), left.dtype)
        for term in range(inner):
            total += left[..., term, None] * right[term]
        return total
    if rows < MATRIX_ROWS:
        left = np.concatenate([left, np.zeros((*left.shape[:-2], MATRIX_ROWS, inner), left.dtype)], axis=-2)
    if columns < MATRIX_ROWS:
        right = np.concatenate([right, np.zeros((inner, MATRIX_ROWS), right.dtype)], axis=-1)
    product: Array = np.matmul(left, right)
    return product[..., :rows, :columns]


def _tensor_core(left: Array, right: Array) -> Array:
    """``left @ right`` of 16-bit values with float32 sums that are cut off, not rounded, every 16 terms.

    That is how tensor cores add (Fasi, Higham, Mikaitis, Pranesh: Numerical behavior of NVIDIA tensor cores, PeerJ
    Computer Science 2021), so no kernel on them can do better. Within 16 terms the sum is exact here.
    """
    total = np.zeros((*left.shape[:-1], right.shape[-1]), np.float32)
    wide_left, wide_right = left.astype(np.float64), right.astype(np.float64)
    for begin in range(0, left.shape[-1], 16):
        terms = slice(begin, begin + 16)
        exact = total + wide_left[..., terms] @ wide_right[terms]
        total = exact.astype(np.float32)
        total = np.where(np.abs(total) > np.abs(exact), np.nextafter(total, np.float32(0)), total)
    return total


def _weighted(weights: Array, values: Array, visible: NDArray[np.bool_], product: Product = np.matmul) -> Array:
    """``weights @ values`` in which hidden keys do not count, not even as 0 times NaN."""
    finite = np.isfinite(values)
    total = product(weights, np.where(finite, values, 0))
    for key in np.flatnonzero(~finite.all(axis=-1)):
        seeing = visible[:, key]
        total[:, seeing] += weights[:, seeing, key, None] * np.where(finite[key], 0, values[key])
    return total
