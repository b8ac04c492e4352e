"""Kernels on the CPU, against float64: schedules, head dims, strides, and the order of threads."""

from __future__ import annotations

import numpy as np
import pytest
from emulated_kernels import compare, config_of, problem_of, random_inputs

from flashtune.codegen.families.registry import family
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.emulator import emulate

pytestmark = pytest.mark.emulate

H200 = gpu_by_alias("h200")

CASES: dict[str, tuple[Config, Problem]] = {
    f"{config.family} {config.key} {problem}": (config, problem)
    for config, problem in (
        (config_of("sm80_fwd"), problem_of("bfloat16", 130, 257, 64, causal=True)),
        (config_of("sm80_fwd", q_in_registers=True), problem_of("float16", 130, 257, 64, causal=True)),
        (config_of("sm80_fwd", q_in_registers=True, num_stages=3), problem_of("float16", 70, 33, 128, causal=True)),
        (config_of("sm80_fwd", num_stages=1), problem_of("bfloat16", 1, 257, 256, "3/3")),
        (config_of("sm80_fwd", num_stages=3, block_n=16), problem_of("float16", 100, 100, 8, "6/2", causal=True)),
        (config_of("sm80_fwd", block_m=16, num_warps=1), problem_of("bfloat16", 31, 65, 40, batch=2)),
        (config_of("sm80_fwd", block_m=32, num_warps=1, block_n=48), problem_of("float16", 33, 129, 24, alignment=2)),
        (config_of("sm80_fwd", rescale_threshold=0), problem_of("float16", 257, 130, 72, causal=True)),
        (config_of("fma_fwd"), problem_of("float32", 130, 257, 64, causal=True)),
        (config_of("fma_fwd", share_kv=True), problem_of("float32", 33, 129, 128, "6/2", causal=True)),
        (config_of("fma_fwd", threads_n=16, num_threads=256), problem_of("bfloat16", 65, 33, 256, causal=True)),
        (config_of("fma_fwd", share_kv=True), problem_of("float16", 31, 65, 8, batch=2)),
        (config_of("fma_fwd", block_n=16), problem_of("float32", 17, 65, 40, alignment=4)),
        (
            config_of("fma_fwd", accumulate="float64", block_m=16),
            problem_of("float16", 33, 65, 24, causal=True, out_dtype="float64"),
        ),
    )
}


@pytest.mark.parametrize(("config", "problem"), CASES.values(), ids=CASES)
def test_out_and_lse_agree_with_float64(config: Config, problem: Problem) -> None:
    compare(problem, config, *random_inputs(problem))


@pytest.mark.parametrize("name", ["sm90_fwd", "sm80_fwd", "fma_fwd"])
@pytest.mark.parametrize("head_dim", [16, 56, 80, 96, 112])
def test_defaults_at_other_head_dims(name: str, head_dim: int) -> None:
    problem = problem_of("bfloat16", 67, 131, head_dim, causal=True)
    compare(problem, family(name).default(problem.spec, H200), *random_inputs(problem))


@pytest.mark.parametrize("name", ["sm80_fwd", "fma_fwd"])
def test_the_order_of_threads_and_the_number_of_processes_change_no_bit(name: str) -> None:
    problem = problem_of("bfloat16", 70, 100, 64, causal=True)
    inputs = random_inputs(problem)
    first = emulate(problem, config_of(name), *inputs, seed=1)
    for seed in (2, 3, 4):
        other = emulate(problem, config_of(name), *inputs, seed=seed, processes=seed // 2)
        assert first.out.tobytes() == other.out.tobytes(), f"seed {seed}"
        assert first.lse.tobytes() == other.lse.tobytes(), f"seed {seed}"


@pytest.mark.parametrize("name", ["sm80_fwd", "fma_fwd"])
def test_each_tensor_has_strides_of_its_own(name: str) -> None:
    """q every second token, k shared by all heads, v from (batch, head, seqlen, dim), out with gaps, no LSE."""
    problem = problem_of("float16", 20, 45, 16, "4/2", batch=2)
    draw = np.random.default_rng(3)
    q = draw.standard_normal((2, 40, 4, 16)).astype(np.float16)[:, ::2]
    k = np.broadcast_to(draw.standard_normal((2, 45, 1, 16)).astype(np.float16), (2, 45, 2, 16))
    v = draw.standard_normal((2, 2, 45, 16)).astype(np.float16).swapaxes(1, 2)
    config = config_of(name)
    spaced = compare(problem, config, q, k, v, out_strides=(4096, 96, 24, 1))
    dense = emulate(problem, config, *(np.ascontiguousarray(each) for each in (q, k, v)), want_lse=False)
    assert spaced.out.tobytes() == dense.out.tobytes()
    assert dense.lse.size == 0
