"""Parts of the device side that need no device."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem
from flashtune.codegen.problem.reference import plain_attention

exact = pytest.importorskip("flashtune.tuner.bench.exact", reason="needs CuPy", exc_type=ImportError)
memory = pytest.importorskip("flashtune.tuner.bench.memory", reason="needs CuPy", exc_type=ImportError)

SMALL = Problem(
    dtype="float32", head_dim=8, batch=3, seqlen_q=12, seqlen_k=20, num_heads=4, num_heads_kv=2, causal=True
)


@pytest.mark.parametrize("limit", [1, 100, 12 * 4 * 8, 2 * 12 * 4 * 8, 10**6])
@pytest.mark.parametrize("seqlen_k", [5, 12, 20])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim_v", [0, 5, 16])
def test_the_last_part_of_a_problem_gives_the_end_of_its_result(
    monkeypatch: pytest.MonkeyPatch, limit: int, seqlen_k: int, head_dim_v: int, causal: bool
) -> None:
    monkeypatch.setattr(exact, "REFERENCE_ELEMENTS", limit)
    problem = dataclasses.replace(SMALL, seqlen_k=seqlen_k, causal=causal, head_dim_v=head_dim_v)
    part = exact.last_part(problem)
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal(shape) for shape in problem.shapes[:3])
    out, lse = plain_attention(q, k, v, causal=causal)
    rows = slice(problem.seqlen_q - part.seqlen_q, None)
    batch = slice(problem.batch - part.batch, None)
    part_out, part_lse = plain_attention(q[batch, rows], k[batch], v[batch], causal=causal)
    np.testing.assert_allclose(part_out.ravel(), out.ravel()[-part_out.size :], rtol=1e-12)
    np.testing.assert_allclose(part_lse, lse[batch, :, rows], rtol=1e-12)
    assert memory.elements(part).out <= max(limit, problem.num_heads * problem.value_dim)


def test_strides_and_sizes_are_those_of_contiguous_tensors() -> None:
    problem = dataclasses.replace(SMALL, head_dim_v=16)
    shapes = ((3, 12, 4, 8), (3, 20, 2, 8), (3, 20, 2, 16), (3, 12, 4, 16))
    for strides, shape in zip(memory.contiguous(problem), shapes, strict=True):
        assert strides == tuple(stride // 4 for stride in np.empty(shape, np.float32).strides[:3])
    assert memory.elements(problem) == (3 * 12 * 4 * 8, 3 * 20 * 2 * 8, 3 * 20 * 2 * 16, 3 * 12 * 4 * 16, 3 * 4 * 12)
    assert memory.elements(SMALL).out == memory.elements(SMALL).q


@pytest.mark.parametrize("head_dim_v", [16, 64])
def test_the_reference_and_its_comparison_have_the_columns_of_the_output(head_dim_v: int) -> None:
    problem = dataclasses.replace(SMALL, dtype="float16", head_dim=40, head_dim_v=head_dim_v)
    plan = exact.reference_plan(problem, gpu_by_alias("h200"))
    assert (plan.problem.head_dim_v, plan.problem.out_dtype, plan.config.family) == (head_dim_v, "float64", "fma_fwd")
    reference, comparison, _ = exact.sources(problem, gpu_by_alias("h200"))
    assert f"kValueDim = {head_dim_v};" in reference.text
    assert f"kHeadDim = {head_dim_v};" in comparison.text


@pytest.mark.parametrize(("alignment", "bytes_off"), [(16, 0), (4, 4)])
def test_skew_meets_the_alignment_class(alignment: int, bytes_off: int) -> None:
    assert memory.skew(dataclasses.replace(SMALL, alignment=alignment)) == bytes_off


@pytest.mark.parametrize("length", [1, 2, 3, 4, 20, 64, 197, 1000, 1024, 262144])
def test_a_ragged_neighbour_is_a_little_shorter_and_fits_no_tile(length: int) -> None:
    problem = dataclasses.replace(SMALL, seqlen_q=length, seqlen_k=length)
    near = exact.ragged(problem)
    assert dataclasses.replace(near, seqlen_q=length, seqlen_k=length) == problem
    assert near.spec == problem.spec
    if length < 4:
        assert near == problem
        return
    assert near.seqlen_q < length
    for each in (near.seqlen_q, near.seqlen_k):
        assert each % 2 == 1
        assert max(length // 2, length - 60) <= each <= length
