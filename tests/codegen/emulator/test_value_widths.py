"""Kernels on the CPU whose values have another width than their keys."""

from __future__ import annotations

import numpy as np
import pytest
from emulated_kernels import compare, config_of, problem_of, random_inputs

from flashtune.codegen.families.registry import family
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem
from flashtune.emulator import emulate
from flashtune.errors import InvalidInput

pytestmark = pytest.mark.emulate

H200 = gpu_by_alias("h200")
WIDTHS = ((64, 40), (40, 64), (192, 128), (8, 256), (256, 8))
"""Columns of q and k, and of v."""


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("widths", WIDTHS, ids="{0[0]}/{0[1]}".format)
@pytest.mark.parametrize("share_kv", [False, True])
def test_values_of_another_width(share_kv: bool, widths: tuple[int, int], dtype: str, causal: bool) -> None:
    head_dim, head_dim_v = widths
    problem = problem_of(dtype, 37, 53, head_dim, "4/2", head_dim_v=head_dim_v, causal=causal)
    compare(problem, config_of("fma_fwd", share_kv=share_kv), *random_inputs(problem))


@pytest.mark.parametrize(
    "problem",
    [
        problem_of("float16", 130, 67, 192, "3/1", head_dim_v=128, batch=2, causal=True),  # 63 rows see no key
        problem_of("float32", 33, 65, 40, head_dim_v=64, alignment=4, causal=True),
        problem_of("float16", 33, 65, 64, head_dim_v=40, alignment=2),
        problem_of("bfloat16", 1, 131, 128, head_dim_v=64),
        problem_of("float16", 17, 35, 192, head_dim_v=128, out_dtype="float64"),
        problem_of("float32", 17, 35, 72, head_dim_v=40, out_dtype="float64", causal=True),
        problem_of("float32", 3, 0, 64, head_dim_v=40),
    ],
    ids=str,
)
def test_defaults_for_values_of_another_width(problem: Problem) -> None:
    compare(problem, family("fma_fwd").default(problem.spec, H200), *random_inputs(problem))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, problem_of("float16", 70, 50, 64, "4/2", head_dim_v=40, causal=True)),
        ({"q_in_registers": True, "num_stages": 1}, problem_of("bfloat16", 70, 50, 24, head_dim_v=128, causal=True)),
        (
            {"block_m": 64, "num_splits": 2, "pack_heads": True},
            problem_of("bfloat16", 7, 90, 192, "4/2", head_dim_v=128, causal=True),
        ),
        ({"num_stages": 3}, problem_of("float16", 40, 70, 40, head_dim_v=56, alignment=2, causal=True)),
    ],
    ids=str,
)
def test_values_of_another_width_on_tensor_cores(config: dict[str, object], problem: Problem) -> None:
    """An infinity that the mask hides from all rows but the last is in a column of its own."""
    q, k, v = random_inputs(problem)
    v[0, -1, 0, -3] = np.inf
    compare(problem, config_of("sm80_fwd", **config), q, k, v)


def test_narrow_values_are_the_first_columns_of_wide_ones() -> None:
    """Bit for bit, with strides of their own, and an output whose rows lie farther apart than they are wide."""
    wide = problem_of("float16", 20, 45, 24, "4/2", batch=2, causal=True)
    narrow = problem_of("float16", 20, 45, 24, "4/2", batch=2, causal=True, head_dim_v=16)
    q, k, v = random_inputs(wide)
    want = emulate(wide, config_of("fma_fwd"), q, k, v)
    found = emulate(narrow, config_of("fma_fwd"), q, k, v[..., :16], out_strides=(4096, 96, 24, 1))
    assert found.out.shape == (2, 20, 4, 16)
    assert found.out.tobytes() == np.ascontiguousarray(want.out[..., :16]).tobytes()
    assert found.lse.tobytes() == want.lse.tobytes()


def test_a_v_of_the_width_of_k_is_refused() -> None:
    problem = problem_of("float16", 3, 5, 24, head_dim_v=16)
    q, k, _ = random_inputs(problem)
    with pytest.raises(InvalidInput, match=r"v has shape \(1, 5, 1, 24\), the problem needs \(1, 5, 1, 16\)"):
        emulate(problem, config_of("fma_fwd"), q, k, k)
