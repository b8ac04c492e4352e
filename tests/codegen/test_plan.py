"""Launch arguments: the Python and the CUDA form of `struct Params` are the same."""

from __future__ import annotations

import struct
from importlib import resources

import pytest

from flashtune.codegen.families.sm80_fwd import Sm80Fwd
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.plan import ARGUMENTS, PARAMS_BYTES, PARAMS_FIELDS, POINTERS, Plan, pack_arguments
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import IllegalConfig, UnsupportedProblem

PROBLEM = Problem(
    dtype="float16", head_dim=64, batch=2, seqlen_q=100, seqlen_k=300, num_heads=6, num_heads_kv=3, causal=True
)
FAMILY = Sm80Fwd()
GPU = gpu_by_alias("a100")


def test_params_has_the_members_of_the_cuda_struct() -> None:
    text = resources.files("flashtune.templates").joinpath("lib/params.cuh").read_text(encoding="utf-8")
    body = text.split("struct Params {")[1].split("}")[0]
    codes = {"const void*": "Q", "void*": "Q", "i64": "q", "int": "i", "float": "f"}
    members = [line.strip().rstrip(";").rsplit(" ", 1) for line in body.strip().splitlines()]
    assert tuple((name, codes[kind]) for kind, name in members) == PARAMS_FIELDS


def test_params_packs_without_padding() -> None:
    native = struct.Struct("@" + "".join(code for _, code in PARAMS_FIELDS) + "0q")  # the end is aligned like a member
    assert POINTERS.size + ARGUMENTS.size == PARAMS_BYTES == native.size


def test_arguments_hold_strides_lengths_and_scale() -> None:
    strides = ((1, 2, 3), (4, 5, 6), (-7, 8, 0), (2**40, 11, 12))
    plan = Plan(PROBLEM, FAMILY.default(PROBLEM.spec, GPU), GPU, (), num_splits=5, heads_per_section=4)
    packed = ARGUMENTS.unpack(pack_arguments(plan, strides, 0.5))
    assert packed == (1, 2, 3, 4, 5, 6, -7, 8, 0, 2**40, 11, 12, 2, 100, 300, 6, 3, 5, 4, 0.5)


def test_plan_launches_one_block_per_tile() -> None:
    config = FAMILY.default(PROBLEM.spec, GPU)
    (kernel,) = FAMILY.plan(PROBLEM, config, GPU).kernels
    assert kernel.grid == (2 * 6 * -(-100 // config.block_m), 1, 1)  # type: ignore[attr-defined]
    assert kernel.entry in kernel.source.text


def test_plan_refuses_an_illegal_config_with_both_numbers() -> None:
    spec = Problem(dtype="float16", head_dim=256, batch=1, seqlen_q=1, seqlen_k=1, num_heads=1, num_heads_kv=1)
    config = FAMILY.config_type.from_json(
        {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 3, "q_in_registers": False, "blocks_per_sm": 1}
    )
    with pytest.raises(IllegalConfig, match=r"needs 229376 B of shared memory, rtx-4090 has 101376 B"):
        FAMILY.plan(spec, config, gpu_by_alias("rtx-4090"))


def test_plan_refuses_more_tiles_than_a_launch_takes() -> None:
    huge = Problem(dtype="float16", head_dim=8, batch=2**20, seqlen_q=2**20, seqlen_k=1, num_heads=1024, num_heads_kv=1)
    with pytest.raises(UnsupportedProblem, match="thread blocks, a launch takes at most 2147483647"):
        FAMILY.plan(huge, FAMILY.default(huge.spec, GPU), GPU)
