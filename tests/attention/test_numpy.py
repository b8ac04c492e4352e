"""`attention()` on NumPy arrays: values known by hand, masks, shapes, layouts and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from flashtune import attention
from flashtune.codegen.families.sm80_fwd import Sm80FwdConfig
from flashtune.codegen.problem.reference import plain_attention
from flashtune.codegen.problem.tolerance import judge
from flashtune.errors import InvalidInput, InvalidType

DTYPES = [np.float16, "bfloat16", np.float32]
INFINITY = math.inf


@pytest.fixture(params=DTYPES, ids=lambda dtype: np.dtype(dtype).name if dtype != "bfloat16" else "bfloat16")
def dtype(request: pytest.FixtureRequest) -> Any:
    if request.param != "bfloat16":
        return np.dtype(request.param)
    return np.dtype(pytest.importorskip("ml_dtypes", reason="bfloat16 in NumPy needs ml_dtypes").bfloat16)


def ramp(seqlen: int, dtype: Any, first: float = 0, step: float = 1, heads: int = 1, head_dim: int = 64) -> Any:
    """v of one batch entry whose key j is ``first + step * j`` in every head and column."""
    rows = first + step * np.arange(seqlen)
    return np.broadcast_to(rows[None, :, None, None], (1, seqlen, heads, head_dim)).astype(dtype)


def rows(out: Any) -> list[float]:
    """Row values of an output that is constant over heads and columns."""
    values = out.astype(np.float64)
    assert (values == values[..., :1, :1]).all()
    return [float(each) for each in values[0, :, 0, 0]]


def test_scale_zero_is_a_scale(dtype: Any) -> None:
    q, k, v = np.full((1, 4, 1, 16), 3, dtype), np.full((1, 4, 1, 16), 2, dtype), ramp(4, dtype, head_dim=16)
    out, lse = attention(q, k, v, scale=0.0, return_lse=True)
    assert rows(out) == [1.5] * 4
    np.testing.assert_allclose(lse, math.log(4), rtol=1e-6)
    out, lse = attention(q, k, v, scale=0.0, causal=True, return_lse=True)
    assert rows(out) == [0, 0.5, 1, 1.5]
    np.testing.assert_allclose(lse[0, 0], np.log([1, 2, 3, 4]), rtol=1e-6)


def test_rows_without_a_key_are_zero(dtype: Any) -> None:
    q, k = np.zeros((1, 5, 1, 64), dtype), np.ones((1, 2, 1, 64), dtype)
    out, lse = attention(q, k, ramp(2, dtype, first=1), causal=True, return_lse=True)
    assert rows(out) == [0, 0, 0, 1, 1.5]
    np.testing.assert_allclose(lse[0, 0], [-INFINITY] * 3 + [0, math.log(2)], rtol=1e-6)


def test_the_last_query_sees_every_key(dtype: Any) -> None:
    q, k = np.zeros((1, 1, 1, 64), dtype), np.ones((1, 8, 1, 64), dtype)
    out, lse = attention(q, k, ramp(8, dtype), causal=True, return_lse=True)
    assert rows(out) == [3.5]
    np.testing.assert_allclose(lse, math.log(8), rtol=1e-6)


def test_large_negative_scores_are_not_minus_infinity() -> None:
    q, k, v = (np.full((1, 1, 1, 64), value, np.float16) for value in (-128, 64, 1))
    out, lse = attention(q, k, v, scale=1.0, return_lse=True)
    assert rows(out) == [1.0]
    assert abs(float(lse[0, 0, 0]) + 524288) <= 0.1


def test_masked_keys_have_no_influence_and_seen_ones_do(dtype: Any) -> None:
    q, k, v = np.ones((1, 2, 1, 64), dtype), np.ones((1, 2, 1, 64), dtype), ramp(2, dtype, first=5, step=0)
    k[:, 1] = np.nan
    v[:, 1] = np.nan
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert (out[0, 0] == 5).all()
    assert np.isfinite(lse[0, 0, 0])
    assert np.isnan(out[0, 1]).all()


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 16])
def test_grouped_heads(ratio: int, dtype: Any) -> None:
    q, k = np.zeros((1, 3, 2 * ratio, 16), dtype), np.ones((1, 4, 2, 16), dtype)
    v = np.broadcast_to(np.arange(2)[None, None, :, None], k.shape).astype(dtype)
    out = attention(q, k, v).astype(np.float64)
    assert (out == (np.arange(2 * ratio) // ratio)[None, None, :, None]).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (7, 300), (300, 7), (513, 513)])
def test_random_values_are_within_tolerance(seqlen_q: int, seqlen_k: int, causal: bool, dtype: Any) -> None:
    random = np.random.default_rng(7)
    q = random.standard_normal((2, seqlen_q, 4, 24)).astype(dtype)
    k, v = (random.standard_normal((2, seqlen_k, 2, 24)).astype(dtype) for _ in range(2))
    out, lse = attention(q, k, v, causal=causal, return_lse=True)
    reference, reference_lse = plain_attention(q, k, v, causal=causal)
    plain, plain_lse = plain_attention(q, k, v, causal=causal, compute_dtype=np.float32)
    assert out.dtype == dtype
    assert judge(out, plain, reference, np.dtype(dtype).name)
    assert judge(lse, plain_lse, reference_lse, "float32")


def test_heads_first_layout() -> None:
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((2, rows, 4, 16)).astype(np.float32) for rows in (5, 6, 6))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    turned = [each.swapaxes(1, 2) for each in (q, k, v)]
    got, got_lse = attention(*turned, causal=True, return_lse=True, layout="bhsd")
    assert got.shape == (2, 4, 5, 16)
    assert got.flags.c_contiguous
    assert got_lse.shape == lse.shape == (2, 4, 5)
    np.testing.assert_allclose(got.swapaxes(1, 2), out, rtol=1e-6)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-6)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(24, 16), (16, 24), (5, 1), (3, 7)])
def test_values_of_another_width(head_dim: int, head_dim_v: int, dtype: Any) -> None:
    """Any width on the CPU; both layouts, with and without ``out``."""
    random = np.random.default_rng(3)
    q = random.standard_normal((2, 9, 4, head_dim)).astype(dtype)
    k, v = (random.standard_normal((2, 7, 2, width)).astype(dtype) for width in (head_dim, head_dim_v))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert (out.shape, lse.shape, out.dtype) == ((2, 9, 4, head_dim_v), (2, 4, 9), dtype)
    reference, reference_lse = plain_attention(q, k, v, causal=True)
    plain, plain_lse = plain_attention(q, k, v, causal=True, compute_dtype=np.float32)
    assert judge(out, plain, reference, np.dtype(dtype).name)
    assert judge(lse, plain_lse, reference_lse, "float32")
    filled = np.zeros((2, 4, 9, head_dim_v), dtype)
    turned = [each.swapaxes(1, 2) for each in (q, k, v)]
    assert attention(*turned, causal=True, layout="bhsd", out=filled) is filled
    np.testing.assert_array_equal(filled.swapaxes(1, 2), out)
    for wrong in (head_dim, head_dim_v + 1):
        with pytest.raises(InvalidInput, match=r"out has shape .* that of q with the head_dim of v"):
            attention(q, k, v, out=np.zeros((2, 9, 4, wrong), dtype))


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (1, 0, 2, 8)])
def test_empty_results(shape: tuple[int, ...]) -> None:
    q, k = np.ones(shape, np.float32), np.ones((shape[0], 4, 2, 8), np.float32)
    out, lse = attention(q, k, k, return_lse=True)
    assert (out.shape, lse.shape) == (shape, (shape[0], 2, shape[1]))


def test_no_keys() -> None:
    q, k = np.ones((1, 3, 2, 8), np.float32), np.ones((1, 0, 2, 8), np.float32)
    out, lse = attention(q, k, k, return_lse=True)
    assert not out.any()
    assert (lse == -INFINITY).all()


def test_out_is_filled_and_returned() -> None:
    random = np.random.default_rng(1)
    q = random.standard_normal((1, 5, 2, 8)).astype(np.float32)
    buffer = np.full((1, 5, 2, 12), 9, np.float32)
    out = buffer[..., 2:10]
    assert attention(q, q, q, out=out) is out
    np.testing.assert_array_equal(out, attention(q, q, q))
    assert (buffer[..., :2] == 9).all()
    assert (buffer[..., 10:] == 9).all()


def test_inputs_are_left_alone() -> None:
    q = np.ones((1, 3, 2, 8), np.float32)
    q.setflags(write=False)
    attention(q, q, q)


def _read_only() -> Any:
    out = np.empty((1, 3, 2, 8), np.float32)
    out.setflags(write=False)
    return out


Q = np.ones((1, 3, 2, 8), np.float32)
CONFIG = Sm80FwdConfig(block_m=64, block_n=64, num_warps=4, num_stages=1, q_in_registers=False, blocks_per_sm=1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"out": _read_only()}, InvalidInput, "out is read-only"),
        ({"out": Q}, InvalidInput, "out .* overlaps q"),
        ({"out": [1.0]}, InvalidType, "out is a builtins.list; with q, it must be a NumPy array"),
        ({"out": np.empty((1, 3, 2, 16), np.float32)}, InvalidInput, r"out has shape \(1, 3, 2, 16\)"),
        ({"k": Q.astype(np.float64)}, InvalidType, "k has dtype float64. Supported: float16, bfloat16, float32"),
        ({"k": Q.astype(">f4")}, InvalidType, "k has dtype >f4 .* byte order"),
        ({"v": np.ma.masked_array(Q)}, InvalidType, "v: masked arrays"),
        ({"q": np.ma.masked_array(Q)}, InvalidType, "q: masked arrays"),
        ({"v": Q.tolist()}, InvalidType, "v is a builtins.list"),
        ({"k": Q[0]}, InvalidInput, "k has shape .* takes 4"),
        ({"config": CONFIG}, InvalidInput, "config=sm80_fwd.* picks a GPU kernel"),
        ({"v": Q[..., :0]}, InvalidInput, "head_dim_v=0 must be at least 1"),
        ({"scale": math.nan}, InvalidInput, "scale=nan"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refusals(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    inputs = {"q": Q, "k": Q, "v": Q} | {name: arguments[name] for name in "qkv" if name in arguments}
    with pytest.raises(error, match=message):
        attention(*inputs.values(), **{name: value for name, value in arguments.items() if name not in "qkv"})
