"""The kernel of sm90_fwd on the CPU: its schedules against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulated_kernels import problem_of, random_inputs
from sm90_fwd_kernels import SMALL, compare, config_of

from flashtune.codegen.families.sm90_fwd import Sm90FwdConfig
from flashtune.codegen.problem.problem import Problem
from flashtune.emulator import emulate

pytestmark = pytest.mark.emulate

CASES: dict[str, tuple[Sm90FwdConfig, Problem]] = {
    f"{config.key} {problem}": (config, problem)
    for config, problem in (
        (
            config_of(warpgroups=2, softmax="exact", q_buffers=2, heads_per_section=4),
            problem_of("bfloat16", 300, 260, 64, "4/2", batch=2, causal=True),
        ),
        (
            config_of(warpgroups=2, early_columns=32, q_buffers=2, ping_pong=True, overlap_tiles=True),
            problem_of("float16", 290, 130, 64, "2/2", causal=True),  # 160 rows see no key
        ),
        (
            config_of(
                warpgroups=3, num_stages=3, q_buffers=2, softmax="late", early_columns=32, ping_pong=True,
                scheduler="dynamic", overlap_tiles=True,
            ),
            problem_of("bfloat16", 300, 261, 64, "3/1", batch=2),
        ),
        (
            config_of(
                warpgroups=2, block_n=96, num_stages=4, softmax="late", early_columns=48, scheduler="dynamic",
                heads_per_section=2,
            ),
            problem_of("float16", 270, 340, 40, "3/3", causal=True),
        ),
        (
            config_of(block_n=48, scheduler="tile", blocks_per_sm=2),
            problem_of("float16", 65, 100, 72, batch=2),
        ),
        (
            config_of(
                block_n=32, num_stages=3, q_buffers=2, softmax="late", overlap_tiles=True, blocks_per_sm=2,
                heads_per_section=64,
            ),
            problem_of("bfloat16", 200, 300, 8, "4/1", causal=True),
        ),
        (
            config_of(warpgroups=3, block_n=80, softmax="exact", scheduler="tile", ping_pong=True),
            problem_of("float16", 250, 190, 96, causal=True),
        ),
        (
            config_of(warpgroups=2, softmax="late", early_columns=32),
            problem_of("bfloat16", 257, 200, 128, causal=True),
        ),
        (
            config_of(block_n=80, scheduler="dynamic", early_columns=32),
            problem_of("float16", 70, 97, 192, "3/1"),
        ),
        (
            config_of(block_n=48, softmax="late", num_stages=3, q_buffers=2),
            problem_of("bfloat16", 70, 120, 256, "3/1", causal=True),
        ),
        (
            config_of(warpgroups=2, block_n=112, early_columns=48, q_buffers=2, scheduler="dynamic"),
            problem_of("float16", 129, 300, 64, "3/1", causal=True),
        ),
        (
            config_of(softmax="exact", q_buffers=2, scheduler="dynamic", overlap_tiles=True, block_n=32),
            problem_of("bfloat16", 150, 81, 16, "2/2", batch=2, causal=True),
        ),
        (
            config_of(block_n=160, softmax="late", early_columns=80, ping_pong=True, warpgroups=2),
            problem_of("bfloat16", 140, 410, 32, causal=True),
        ),
        (
            config_of(block_n=256, scheduler="tile"),
            problem_of("float16", 1, 300, 8, "6/3"),
        ),
        (
            config_of(warpgroups=2, block_n=96, softmax="late", early_columns=32, scheduler="dynamic"),
            problem_of("bfloat16", 200, 260, 192, head_dim_v=128, causal=True),
        ),
        (
            config_of(warpgroups=2, q_buffers=2, overlap_tiles=True),
            problem_of("float16", 270, 100, 40, head_dim_v=128),
        ),
        (
            config_of(block_n=48, softmax="late", q_buffers=2),
            problem_of("bfloat16", 150, 100, 72, "2/2", head_dim_v=24, causal=True),
        ),
    )
}  # fmt: skip


@pytest.mark.parametrize(("config", "problem"), CASES.values(), ids=CASES)
def test_out_and_lse_agree_with_float64(config: Sm90FwdConfig, problem: Problem) -> None:
    compare(problem, config, *random_inputs(problem), seeds=(1, 2))


@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
def test_sections_and_the_number_of_blocks_change_no_bit(scheduler: str) -> None:
    problem = problem_of("float16", 150, 90, 16, "6/2", batch=2, causal=True)
    inputs = random_inputs(problem)
    config = config_of(block_n=32, softmax="late", scheduler=scheduler, q_buffers=2)
    first = compare(problem, config, *inputs)
    for heads_per_section, num_sms, processes in ((1, 1, 1), (2, 3, 2), (4, 5, 3), (64, 132, 1)):
        other = emulate(
            problem, replace(config, heads_per_section=heads_per_section), *inputs, seed=num_sms,
            gpu=replace(SMALL, num_sms=num_sms), processes=processes,
        )  # fmt: skip
        assert first.out.tobytes() == other.out.tobytes(), (heads_per_section, num_sms)
        assert first.lse.tobytes() == other.lse.tobytes(), (heads_per_section, num_sms)


@pytest.mark.parametrize("causal", [False, True])
def test_each_tensor_has_strides_of_its_own(causal: bool) -> None:
    """q every second token, k shared by all heads, v from (batch, head, seqlen, dim), out with gaps, no LSE."""
    problem = problem_of("float16", 70, 45, 16, "4/2", batch=2, causal=causal)
    draw = np.random.default_rng(3)
    q = draw.standard_normal((2, 140, 4, 16)).astype(np.float16)[:, ::2]
    k = np.broadcast_to(draw.standard_normal((2, 45, 1, 16)).astype(np.float16), (2, 45, 2, 16))
    v = draw.standard_normal((2, 2, 45, 16)).astype(np.float16).swapaxes(1, 2)
    v[:, 40, :, 3] = np.nan  # read again, by its strides
    config = config_of(block_n=32)
    spaced = compare(problem, config, q, k, v, out_strides=(8192, 96, 24, 1))
    dense = emulate(problem, config, *(np.ascontiguousarray(each) for each in (q, k, v)), want_lse=False, gpu=SMALL)
    assert spaced.out.tobytes() == dense.out.tobytes()
    assert dense.lse.size == 0
