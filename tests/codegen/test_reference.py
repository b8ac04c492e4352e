"""NumPy attention: values known by hand for the tiled and the plain form, and that both agree."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashtune.codegen.problem.reference import plain_attention, rounded, tiled_attention
from flashtune.codegen.problem.tolerance import attention_tolerances

INFINITY = math.inf
Attention = Callable[..., tuple[Any, Any]]


def small_tiles(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    return tiled_attention(q, k, v, block_m=3, block_n=16, **options)


def plain_float32(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    return plain_attention(q, k, v, compute_dtype=np.float32, **options)


@pytest.fixture(params=[tiled_attention, small_tiles, plain_attention, plain_float32], ids=lambda each: each.__name__)
def attend(request: pytest.FixtureRequest) -> Attention:
    form: Attention = request.param
    return form


def full(*shape: int, value: float = 1.0, dtype: Any = np.float16) -> Any:
    return np.full(shape, value, dtype)


def by_key(values: Any, head_dim: int = 64, dtype: Any = np.float16) -> Any:
    """v of one batch entry and head whose key j holds ``values[j]`` in every column."""
    return np.repeat(np.asarray(values, dtype)[None, :, None, None], head_dim, axis=3)


def rows(out: Any) -> list[float]:
    """The rows of an output that is the same in every column."""
    assert np.array_equal(out, np.broadcast_to(out[..., :1], out.shape), equal_nan=True)
    return [float(each) for each in out[0, :, 0, 0]]


def test_no_finite_number_stands_in_for_minus_infinity(attend: Attention) -> None:
    out, lse = attend(full(1, 1, 1, 64, value=-128), full(1, 1, 1, 64, value=64), full(1, 1, 1, 64), scale=1.0)
    assert rows(out) == [1.0]
    assert lse[0, 0, 0] == pytest.approx(-524288, abs=0.1)


def test_the_largest_score_has_weight_one_even_where_float32_is_coarse(attend: Attention) -> None:
    x = full(1, 1, 1, 64, value=133120, dtype=np.float32)
    out, lse = attend(x, x, x)
    assert rows(out) == [133120]
    assert lse[0, 0, 0] == pytest.approx(1.417675e11, rel=1e-6)


def test_sums_are_not_kept_in_sixteen_bits(attend: Attention) -> None:
    out, lse = attend(full(1, 1, 1, 64, value=0), full(1, 8192, 1, 64), full(1, 8192, 1, 64))
    assert rows(out) == pytest.approx([1.0], abs=1e-3)
    assert lse[0, 0, 0] == pytest.approx(9.010913, abs=1e-4)


def test_zero_is_a_scale(attend: Attention) -> None:
    q, k, v = full(1, 4, 1, 16, value=3), full(1, 4, 1, 16, value=2), by_key(range(4), 16)
    out, lse = attend(q, k, v, scale=0.0)
    assert rows(out) == [1.5] * 4
    assert list(lse[0, 0]) == pytest.approx([math.log(4)] * 4)
    out, lse = attend(q, k, v, scale=0.0, causal=True)
    assert rows(out) == [0, 0.5, 1, 1.5]
    assert list(lse[0, 0]) == pytest.approx([math.log(seen) for seen in (1, 2, 3, 4)], abs=1e-6)


def test_float32_has_no_coarser_arithmetic(attend: Attention) -> None:
    q, k = np.zeros((2, 1, 1, 1, 64), np.float32)
    q[..., 0], k[..., 0] = 1, 1 + 2**-12
    _, lse = attend(q, k, q, scale=1.0)
    assert lse[0, 0, 0] == pytest.approx(1.00024414, abs=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_hidden_keys_have_no_influence_and_visible_nan_shows(attend: Attention, dtype: Any) -> None:
    q, k, v = full(1, 2, 1, 64, dtype=dtype), full(1, 2, 1, 64, dtype=dtype), by_key([5, 5], dtype=dtype)
    k[:, 1] = v[:, 1] = np.nan
    out, lse = attend(q, k, v, causal=True)
    assert (out[0, 0] == 5).all()
    assert np.isfinite(lse[0, 0, 0])
    assert np.isnan(out[0, 1]).all()
    assert np.isnan(lse[0, 0, 1])


def test_a_hidden_infinite_value_has_no_influence(attend: Attention) -> None:
    v = by_key([5, 7])
    v[0, 1, 0, 3] = np.inf
    out, _ = attend(full(1, 2, 1, 64, value=0), full(1, 2, 1, 64), v, causal=True)
    assert (out[0, 0] == 5).all()
    assert out[0, 1, 0, 3] == np.inf
    assert (np.delete(out[0, 1, 0], 3) == 6).all()


@pytest.mark.parametrize("finite", [0, 64, 127, 130])
def test_scores_of_minus_infinity_weigh_nothing(attend: Attention, finite: int) -> None:
    k, v = full(1, 131, 1, 64), by_key([1] * 131)
    k[..., 3] = -INFINITY
    k[:, finite], v[:, finite] = 0, 7
    out, lse = attend(full(1, 1, 1, 64), k, v)
    assert rows(out) == [7.0]
    assert lse[0, 0, 0] == 0


def test_a_row_of_nothing_but_minus_infinity_is_zero(attend: Attention) -> None:
    k = full(1, 20, 1, 64)
    k[..., 3] = -INFINITY
    out, lse = attend(full(1, 1, 1, 64), k, by_key([np.nan] * 20))
    assert rows(out) == [0.0]
    assert lse[0, 0, 0] == -INFINITY


def test_products_and_sums_do_not_overflow_sixteen_bits(attend: Attention) -> None:
    out, lse = attend(full(1, 1, 1, 128, value=200), full(1, 2, 1, 128, value=200), by_key([1, 3], 128))
    assert rows(out) == [2.0]
    assert lse[0, 0, 0] == pytest.approx(452549.03, abs=0.1)
    out, _ = attend(full(1, 1, 1, 64, value=0), full(1, 4096, 1, 64), full(1, 4096, 1, 64, value=60000))
    assert rows(out) == [60000]


def test_causal_is_aligned_at_the_last_query(attend: Attention) -> None:
    out, lse = attend(full(1, 5, 1, 64, value=0), full(1, 2, 1, 64), by_key([1, 2]), causal=True)
    assert rows(out) == [0, 0, 0, 1, 1.5]
    assert list(lse[0, 0]) == pytest.approx([-INFINITY, -INFINITY, -INFINITY, 0, math.log(2)])
    out, lse = attend(full(1, 1, 1, 64, value=0), full(1, 8, 1, 64), by_key(range(8)), causal=True)
    assert rows(out) == [3.5]
    assert lse[0, 0, 0] == pytest.approx(math.log(8))


@pytest.mark.parametrize("causal", [False, True])
def test_no_keys_at_all(attend: Attention, causal: bool) -> None:
    out, lse = attend(full(2, 3, 4, 8), full(2, 0, 2, 8), full(2, 0, 2, 8), causal=causal)
    assert out.shape == (2, 3, 4, 8)
    assert not out.any()
    assert (lse == -INFINITY).all()


@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 56, 64, 72, 80, 96, 112, 128, 256])
def test_the_last_column_counts(attend: Attention, head_dim: int) -> None:
    q, k = np.zeros((1, 2, 1, head_dim), np.float32), np.zeros((1, 2, 1, head_dim), np.float32)
    q[0, :, 0, -1], k[0, 1, 0, -1] = (1, 2), math.log(3)
    out, lse = attend(q, k, by_key([0, 1], head_dim, np.float32), scale=1.0)
    assert rows(out) == pytest.approx([3 / 4, 9 / 10])
    assert list(lse[0, 0]) == pytest.approx([math.log(4), math.log(10)])


@pytest.mark.parametrize("seqlen_q", [1, 2, 15, 65, 257])
def test_lengths_around_tiles(attend: Attention, seqlen_q: int) -> None:
    for seqlen_k in (1, 2, 15, 16, 17, 127, 129, 257, 1025):
        out, lse = attend(full(1, seqlen_q, 1, 8, value=0), full(1, seqlen_k, 1, 8), full(1, seqlen_k, 1, 8))
        assert rows(out) == pytest.approx([1.0] * seqlen_q, abs=1e-3), seqlen_k
        assert lse[0, 0] == pytest.approx(math.log(seqlen_k), abs=1e-6), seqlen_k


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 6, 7, 16, 32, 71])
def test_query_heads_read_their_group(attend: Attention, ratio: int) -> None:
    v = np.broadcast_to(np.arange(3, dtype=np.float16)[None, None, :, None], (2, 4, 3, 8))
    out, _ = attend(full(2, 2, 3 * ratio, 8, value=0), full(2, 4, 3, 8), v)
    assert (out == (np.arange(3 * ratio) // ratio)[None, None, :, None]).all()


@pytest.mark.parametrize("seqlen_k", [32, 33, 34, 65])
def test_expanded_heads_equal_their_copies(attend: Attention, seqlen_k: int) -> None:
    random = np.random.default_rng(3)
    q = random.standard_normal((2, 5, 8, 16)).astype(np.float32)
    k, v = random.standard_normal((2, 1, seqlen_k, 1, 16)).astype(np.float32)
    k, v = np.broadcast_to(k, (2, seqlen_k, 8, 16)), np.broadcast_to(v, (2, seqlen_k, 8, 16))
    out, lse = attend(q, k, v)
    expected, expected_lse = attend(q, k.copy(), v.copy())
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (3, 70), (70, 3), (200, 210)])
@pytest.mark.parametrize("scale", [None, 1.5, -0.2])
def test_any_tiling_is_within_tolerance(
    seqlen_q: int, seqlen_k: int, dtype: Any, causal: bool, scale: float | None
) -> None:
    random = np.random.default_rng(seqlen_q)
    q = (random.standard_normal((2, seqlen_q, 6, 40)) + 0.25).astype(dtype)
    k, v = ((random.standard_normal((2, seqlen_k, 3, 40)) + 0.25).astype(dtype) for _ in range(2))
    allowed, allowed_lse = attention_tolerances(q, k, v, causal=causal, scale=scale)
    for block_m, block_n in ((1, 1), (64, 16), (7, 500)):
        if block_n * block_m == 1 and seqlen_q * seqlen_k > 1000:
            continue  # slow
        out, lse = tiled_attention(q, k, v, causal=causal, scale=scale, block_m=block_m, block_n=block_n)
        assert (out.dtype, lse.dtype) == (dtype, np.float32)
        assert allowed.judge(out), allowed.judge(out)
        assert allowed_lse.judge(lse), allowed_lse.judge(lse)


@pytest.mark.parametrize("width", [1, 8, 40])
def test_values_of_another_width(attend: Attention, width: int) -> None:
    """Each column of the output depends on its own column of v alone; the LSE on none."""
    random = np.random.default_rng(5)
    q, k, v = (
        random.standard_normal(shape).astype(np.float32) for shape in ((1, 9, 4, 24), (1, 7, 2, 24), (1, 7, 2, 40))
    )
    out, lse = attend(q, k, v[..., :width], causal=True)
    assert out.shape == (1, 9, 4, width)
    scores = np.einsum("brhd,bkhd->bhrk", q, np.repeat(k, 2, axis=2)).astype(np.float64) * 24**-0.5
    seen = np.tril(np.ones((9, 7), bool), 7 - 9)
    weights = np.where(seen, np.exp(scores), 0)
    total = weights.sum(axis=-1, keepdims=True)
    exact = np.einsum("bhrk,bkhd->brhd", weights / np.where(total, total, 1), np.repeat(v, 2, axis=2))
    np.testing.assert_allclose(out, exact[..., :width], rtol=1e-5, atol=1e-6)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse, np.log(total[..., 0]), rtol=1e-5, atol=1e-6)


def test_tolerances_know_values_of_another_width() -> None:
    """A small problem: the head dimension is taken in several orders, v in its own."""
    random = np.random.default_rng(6)
    q, k, v = (
        random.standard_normal(shape).astype(np.float16) for shape in ((1, 9, 2, 24), (1, 7, 2, 24), (1, 7, 2, 8))
    )
    for allowed, ours in zip(attention_tolerances(q, k, v), tiled_attention(q, k, v), strict=True):
        assert allowed.judge(ours), allowed.judge(ours)


def test_float64_is_tiled_in_float64() -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, 90, 2, 8)) for _ in range(3))
    out, lse = tiled_attention(q, k, v, causal=True, block_m=16, block_n=32)
    expected, expected_lse = plain_attention(q, k, v, causal=True)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-14)
    assert lse.dtype == np.float32
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)


def test_memory_does_not_grow_with_the_square_of_the_length() -> None:
    def peak(seqlen: int) -> int:
        x = np.ones((1, seqlen, 1, 8), np.float32)
        tracemalloc.start()
        try:
            tiled_attention(x, x, x, block_m=64, block_n=512)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(8192) < peak(2048) + 8 * 6144 * 8 * 4  # a score matrix alone would take 240 MB more


def test_the_plain_form_rounds_operands_and_output() -> None:
    random = np.random.default_rng(2)
    q, k, v = (rounded(random.standard_normal((1, 30, 2, 16)).astype(np.float32), "bfloat16") for _ in range(3))
    out, lse = plain_attention(q, k, v, compute_dtype=np.float32, dtype="bfloat16")
    assert (out.dtype, lse.dtype) == (np.float32, np.float32)
    assert np.array_equal(out, rounded(out, "bfloat16"))
    unrounded, _ = plain_attention(q, k, v, compute_dtype=np.float32, dtype="bfloat16", out_dtype="float32")
    assert np.array_equal(out, rounded(unrounded, "bfloat16"))
    full_weights, _ = plain_attention(q, k, v, compute_dtype=np.float32, dtype="float32")
    assert not np.array_equal(unrounded, full_weights)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1 + 2**-8, 1.0),  # ties go to even
        (1 + 3 * 2**-8, 1 + 2**-6),
        (1 + 2**-8 + 2**-20, 1 + 2**-7),
        (-3.3895314e38, -3.3895314e38),  # the largest
        (3.4e38, INFINITY),
        (-INFINITY, -INFINITY),
        (math.nan, math.nan),
        (0.0, 0.0),
    ],
)
def test_bfloat16_rounds_to_nearest_even(value: float, expected: float) -> None:
    got = rounded(np.array([value], np.float32), "bfloat16")
    np.testing.assert_array_equal(got, np.array([expected], np.float32))


def test_bfloat16_arrays_keep_their_dtype() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes", reason="bfloat16 in NumPy needs ml_dtypes").bfloat16
    random = np.random.default_rng(4)
    q, k, v = (random.standard_normal((1, 20, 2, 8)).astype(bfloat16) for _ in range(3))
    assert tiled_attention(q, k, v)[0].dtype == bfloat16
    out, _ = plain_attention(q, k, v, compute_dtype=np.float32)
    assert out.dtype == bfloat16
    held, _ = plain_attention(
        *(each.astype(np.float32) for each in (q, k, v)), compute_dtype=np.float32, dtype="bfloat16"
    )
    assert np.array_equal(out.astype(np.float32), held)
