"""Parts of the device side that need no device."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flashtune.codegen.problem import Problem
from flashtune.codegen.reference import plain_attention

bench = pytest.importorskip("flashtune.tuner.bench", reason="needs CuPy", exc_type=ImportError)
memory = pytest.importorskip("flashtune.tuner.memory", reason="needs CuPy", exc_type=ImportError)

SMALL = Problem(
    dtype="float32", head_dim=8, batch=3, seqlen_q=12, seqlen_k=20, num_heads=4, num_heads_kv=2, causal=True
)


@pytest.mark.parametrize("limit", [1, 100, 12 * 4 * 8, 2 * 12 * 4 * 8, 10**6])
@pytest.mark.parametrize("seqlen_k", [5, 12, 20])
@pytest.mark.parametrize("causal", [False, True])
def test_the_last_part_of_a_problem_gives_the_end_of_its_result(
    monkeypatch: pytest.MonkeyPatch, limit: int, seqlen_k: int, causal: bool
) -> None:
    monkeypatch.setattr(bench, "REFERENCE_ELEMENTS", limit)
    problem = dataclasses.replace(SMALL, seqlen_k=seqlen_k, causal=causal)
    part = bench.last_part(problem)
    draw = np.random.default_rng(0)
    q = draw.standard_normal((problem.batch, problem.seqlen_q, problem.num_heads, 8))
    k, v = draw.standard_normal((2, problem.batch, seqlen_k, problem.num_heads_kv, 8))
    out, lse = plain_attention(q, k, v, causal=causal)
    rows = slice(problem.seqlen_q - part.seqlen_q, None)
    batch = slice(problem.batch - part.batch, None)
    part_out, part_lse = plain_attention(q[batch, rows], k[batch], v[batch], causal=causal)
    np.testing.assert_allclose(part_out.ravel(), out.ravel()[-part_out.size :], rtol=1e-12)
    np.testing.assert_allclose(part_lse, lse[batch, :, rows], rtol=1e-12)
    assert memory.elements(part)[0] <= max(limit, problem.num_heads * 8)


def test_strides_and_sizes_are_those_of_contiguous_tensors() -> None:
    shapes = ((3, 12, 4, 8), (3, 20, 2, 8), (3, 20, 2, 8), (3, 12, 4, 8))
    for strides, shape in zip(memory.contiguous(SMALL), shapes, strict=True):
        assert strides == tuple(stride // 4 for stride in np.empty(shape, np.float32).strides[:3])
    assert memory.elements(SMALL) == (3 * 12 * 4 * 8, 3 * 20 * 2 * 8, 3 * 4 * 12)


@pytest.mark.parametrize(("alignment", "bytes_off"), [(16, 0), (4, 4)])
def test_skew_meets_the_alignment_class(alignment: int, bytes_off: int) -> None:
    assert memory.skew(dataclasses.replace(SMALL, alignment=alignment)) == bytes_off
