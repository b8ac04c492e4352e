"""Numerics, masks and shapes that have broken attention libraries, with values known by hand; on CuPy and on torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from expected import expect, full, ramp

from flashtune import attention
from flashtune.errors import InvalidInput, UnsupportedProblem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

INFINITY = math.inf
HEAD_DIMS = (8, 16, 24, 40, 56, 64, 72, 80, 96, 112, 128, 256)


class TestNumerics:
    def test_a_single_huge_negative_score(self, library: Any) -> None:
        """No finite number may stand in for minus infinity."""
        q, k, v = (full((1, 1, 1, 64), value) for value in (-128, 64, 1))
        out, lse = library.run(q, k, v, "float16", scale=1.0)
        assert not expect("score -524288", out, lse, [1.0], [-524288], rel=0.1 / 524288)

    def test_the_largest_score_has_weight_one(self, library: Any) -> None:
        q = full((1, 1, 1, 64), 133120)
        library.dtype("bfloat16")
        out, lse = library.run(q, q, q, "bfloat16")
        assert not expect("score 1.4e11", out, lse, [133120], [1.417675e11])

    def test_sums_are_float32(self, library: Any, dtype: str) -> None:
        q, k, v = full((1, 1, 1, 64), 0), full((1, 8192, 1, 64), 1), full((1, 8192, 1, 64), 1)
        out, lse = library.run(q, k, v, dtype)
        assert not expect("8192 equal keys", out, lse, [1.0], [9.010913], rel=1e-4 / 9, near=1e-3)

    def test_scale_zero(self, library: Any, dtype: str) -> None:
        q, k, v = full((1, 4, 1, 16), 3), full((1, 4, 1, 16), 2), ramp(4, head_dim=16)
        out, lse = library.run(q, k, v, dtype, scale=0.0)
        found = expect("scale 0", out, lse, [1.5] * 4, [math.log(4)] * 4)
        out, lse = library.run(q, k, v, dtype, scale=0.0, causal=True)
        found += expect("scale 0, causal", out, lse, [0, 0.5, 1, 1.5], np.log([1, 2, 3, 4]))
        assert not found

    def test_negative_scale(self, library: Any, dtype: str) -> None:
        draw = np.random.default_rng(5)
        q, k, v = (draw.standard_normal((1, 33, 2, 64)) for _ in range(3))
        found = library.problems_of(q, k, v, dtype, scale=-0.5)
        assert not found + library.problems_of(q, k, v, dtype, scale=-0.5, causal=True)

    def test_float32_is_not_tf32(self, library: Any) -> None:
        q, k = np.zeros((1, 1, 1, 64)), np.zeros((1, 1, 1, 64))
        q[..., 0], k[..., 0] = 1, 1 + 2**-12
        out, lse = library.run(q, k, full(k.shape, 1), "float32", scale=1.0)
        assert not expect("1 + 2**-12", out, lse, [1.0], [1.00024414], rel=1e-6)

    def test_masked_keys_have_no_influence(self, library: Any, dtype: str) -> None:
        q, k, v = full((1, 2, 1, 64), 1), full((1, 2, 1, 64), 1), full((1, 2, 1, 64), 5)
        k[:, 1] = v[:, 1] = np.nan
        out, lse = library.run(q, k, v, dtype, causal=True)
        assert (out[0, 0] == 5).all(), f"{library.name} {dtype}: row 0 is {out[0, 0, 0, :4]}, must be 5"
        assert np.isfinite(lse[0, 0, 0]), f"{library.name} {dtype}: LSE of row 0 is {lse[0, 0, 0]}"
        assert np.isnan(out[0, 1]).all(), f"{library.name} {dtype}: row 1 is {out[0, 1, 0, :4]}, must be NaN"

    def test_scores_of_minus_infinity(self, library: Any, dtype: str) -> None:
        found = []
        for finite in (0, 64, 127, 130):
            q, k, v = full((1, 1, 1, 64), 1), full((1, 131, 1, 64), 0), full((1, 131, 1, 64), 3)
            k[:, :, :, 5] = -INFINITY
            k[:, finite] = 0
            v[:, finite] = 7
            out, lse = library.run(q, k, v, dtype)
            found += expect(f"{library.name} {dtype}, finite key {finite}", out, lse, [7], [0])
        assert not found

    def test_large_values(self, library: Any) -> None:
        q = full((1, 1, 1, 128), 200)
        k, v = full((1, 2, 1, 128), 200), ramp(2, first=1, step=2, head_dim=128)
        out, lse = library.run(q, k, v, "float16")
        found = expect("q = k = 200", out, lse, [2.0], [452549.03], rel=0.1 / 452549)
        q, k, v = full((1, 1, 1, 64), 0), full((1, 4096, 1, 64), 1), full((1, 4096, 1, 64), 60000)
        out, lse = library.run(q, k, v, "float16")
        assert not found + expect("v = 60000", out, lse, [60000], [math.log(4096)])


class TestMasks:
    def test_rows_without_a_key(self, library: Any, dtype: str) -> None:
        q, k = full((1, 5, 1, 64), 0), full((1, 2, 1, 64), 1)
        out, lse = library.run(q, k, ramp(2, first=1), dtype, causal=True)
        assert not expect("causal 5 x 2", out, lse, [0, 0, 0, 1, 1.5], [-INFINITY] * 3 + [0, math.log(2)])

    def test_the_last_query_sees_every_key(self, library: Any, dtype: str) -> None:
        q, k = full((1, 1, 1, 64), 0), full((1, 8, 1, 64), 1)
        out, lse = library.run(q, k, ramp(8), dtype, causal=True)
        assert not expect("causal 1 x 8", out, lse, [3.5], [math.log(8)])

    def test_no_keys(self, library: Any, dtype: str) -> None:
        q, none = full((1, 3, 2, 64), 1), full((1, 0, 2, 64), 1)
        found = []
        for causal in (False, True):
            out, lse = library.run(q, none, none, dtype, causal=causal)
            found += expect(f"{library.name} {dtype} no keys, {causal=}", out, lse, [0] * 3, [-INFINITY] * 3)
        assert not found


class TestShapes:
    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_the_last_column_counts(self, library: Any, dtype: str, head_dim: int) -> None:
        draw = np.random.default_rng(head_dim)
        q, k = np.zeros((1, 19, 2, head_dim)), np.zeros((1, 35, 1, head_dim))
        q[..., -1], k[..., -1] = 3 * draw.standard_normal((1, 19, 2)), 3 * draw.standard_normal((1, 35, 1))
        assert not library.problems_of(q, k, draw.standard_normal(k.shape), dtype)

    @pytest.mark.parametrize("head_dim", [257, 260, 320, 512])
    def test_other_head_dims_are_refused(self, library: Any, dtype: str, head_dim: int) -> None:
        q = library.put(full((1, 4, 1, head_dim), 1), dtype).array
        with pytest.raises(UnsupportedProblem, match=f"head_dim={head_dim} .* 8 to 256"):
            attention(q, q, q)

    def test_head_dim_zero_is_refused(self, library: Any, dtype: str) -> None:
        q = library.put(full((1, 4, 1, 0), 1), dtype).array
        with pytest.raises(InvalidInput, match="head_dim=0"):
            attention(q, q, q)

    @pytest.mark.parametrize("causal", [False, True])
    def test_lengths_around_tiles(self, library: Any, dtype: str, causal: bool) -> None:
        """NaN lies right behind each buffer."""
        lengths = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1025)
        found = []
        for seqlen_q in lengths:
            for seqlen_k in lengths:
                q, k = full((1, seqlen_q, 1, 64), 0), full((1, seqlen_k, 1, 64), 1)
                out, lse = library.run(q, k, k, dtype, causal=causal)
                seen = np.full(seqlen_q, seqlen_k)
                if causal:
                    seen = np.maximum(np.arange(seqlen_q) + 1 + seqlen_k - seqlen_q, 0)
                with np.errstate(divide="ignore"):
                    label = f"{library.name} {dtype} {causal=} {seqlen_q=} {seqlen_k=}"
                    found += expect(label, out, lse, (seen > 0) * 1.0, np.log(seen), near=1e-6)
        assert not found, "\n".join(found[:20])

    @pytest.mark.parametrize("shape", [(65536, 4, 8, 64), (4096, 17, 17, 64)])
    def test_grids_beyond_65535(self, library: Any, shape: tuple[int, ...]) -> None:
        """v is the batch index modulo 7, held once per batch entry."""
        batch, head_dim = shape[0], shape[3]
        zeros = library.put(full((1, 1, 1, head_dim), 0), "float16")
        q = library.view(zeros.buffer, zeros.offset, shape, (0, 0, 0, 1))
        values = np.broadcast_to((np.arange(batch) % 7)[:, None, None, None], (batch, 1, 1, head_dim))
        placed = library.put(values.astype(np.float64), "float16")
        v = library.view(placed.buffer, placed.offset, shape, (head_dim, 0, 0, 1))
        out, lse = attention(q, q, v, return_lse=True)
        log = math.log(shape[1])
        for entry in (0, batch // 2, batch - 1):
            got = library.read(out[entry], "float16")
            assert (got == entry % 7).all(), f"{library.name} {shape} entry {entry}: {np.unique(got)}"
            got = library.read(lse[entry], "float32")
            assert np.allclose(got, log, rtol=1e-6), f"{library.name} {shape} LSE of entry {entry}: {np.unique(got)}"

    @pytest.mark.parametrize("ratio", [1, 2, 3, 5, 6, 7, 16, 32, 71])
    def test_grouped_heads(self, library: Any, dtype: str, ratio: int) -> None:
        q, k = full((1, 3, 2 * ratio, 64), 0), full((1, 5, 2, 64), 1)
        v = np.broadcast_to(np.arange(2.0)[None, None, :, None], k.shape)
        out, _ = library.run(q, k, v, dtype)
        want = np.broadcast_to((np.arange(2 * ratio) // ratio)[None, None, :, None], out.shape)
        assert (out == want).all(), f"{library.name} {dtype} {ratio=}: heads give {out[0, 0, :, 0]}"

    @pytest.mark.parametrize(("heads", "heads_kv"), [(33, 2), (3, 2), (4, 0), (2, 4)])
    def test_head_counts_that_do_not_divide(self, library: Any, dtype: str, heads: int, heads_kv: int) -> None:
        q = library.put(full((1, 4, heads, 64), 1), dtype).array
        k = library.put(full((1, 4, heads_kv, 64), 1), dtype).array
        with pytest.raises(InvalidInput, match=f"{heads} heads.* {heads_kv}"):
            attention(q, k, k)
        library.synchronize()

    @pytest.mark.parametrize("shape", [(0, 4, 2, 64), (2, 0, 2, 64)])
    def test_empty_results(self, library: Any, dtype: str, shape: tuple[int, ...]) -> None:
        q = library.put(full(shape, 1), dtype).array
        k = library.put(full((shape[0], 5, 2, 64), 1), dtype).array
        for _ in range(2):
            out, lse = attention(q, k, k, return_lse=True)
            assert (tuple(out.shape), tuple(lse.shape)) == (shape, (shape[0], 2, shape[1]))
