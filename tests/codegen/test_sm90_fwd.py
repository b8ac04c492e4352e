"""Rules of sm90_fwd: what it refuses and why, what is legal, and where it is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sm90_points import FAMILY, H200, SPEC, config, default, problem

from flashtune.codegen.families.registry import default_config
from flashtune.codegen.families.sm90_fwd import Sm90FwdConfig
from flashtune.codegen.gpu.table import GPUS, gpu_by_alias
from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.errors import IllegalConfig, InvalidInput, UnsupportedProblem

HOPPER = [name for name, each in GPUS.items() if each.capability == (9, 0)]
HEAD_DIMS = range(8, 257, 8)


# ---- What is refused ----


@pytest.mark.parametrize(
    ("spec", "gpu", "reason"),
    [
        (SPEC, "a100", "needs compute capability 9.0, a100-sxm-80gb has 8.0"),
        (SPEC, "b200", "needs compute capability 9.0, b200 has 10.0"),
        (Spec(dtype="float32", head_dim=64), "h200", "dtype=float32 is not supported. Supported: float16, bfloat16"),
        (
            Spec(dtype="float16", head_dim=260),
            "h200",
            "head_dim=260 is not supported. Supported: multiples of 8 from 8 to 256",
        ),
        (Spec(dtype="float16", head_dim=264), "h200", "head_dim=264 is not supported"),
        (Spec(dtype="float16", head_dim=4), "h200", "head_dim=4 is not supported"),
        (Spec(dtype="float16", head_dim=64, out_dtype="float32"), "h200", "the output has the dtype of the inputs"),
        (Spec(dtype="float16", head_dim=64, alignment=2), "h200", "alignment=2 is not supported: TMA copies rows"),
    ],
)
def test_unsupported_says_why(spec: Spec, gpu: str, reason: str) -> None:
    assert reason in str(FAMILY.unsupported(spec, gpu_by_alias(gpu)))


@pytest.mark.parametrize(
    ("changes", "head_dim", "reason"),
    [
        ({"warpgroups": 2, "blocks_per_sm": 2}, 64, "blocks_per_sm=2 leaves too few registers for warpgroups=2"),
        (
            {"warpgroups": 3, "block_n": 208},
            64,
            "a product needs about 134 registers per thread, the kernel starts with 128",
        ),
        (
            {"warpgroups": 3, "block_n": 32},
            256,
            "a product needs about 158 registers per thread, the kernel starts with 128",
        ),
        ({"early_columns": 80}, 128, "early_columns=80 is for softmax=lazy or late, and at most half of block_n"),
        (
            {"early_columns": 32, "softmax": "exact"},
            128,
            "early_columns=32 is for softmax=lazy or late, and at most half of block_n",
        ),
        ({"warpgroups": 1, "ping_pong": True}, 128, "ping_pong=true needs two warpgroups that take turns"),
        ({"scheduler": "tile"}, 128, "q_buffers=2 is of no use with scheduler=tile: a thread block has one tile"),
        (
            {"overlap_tiles": True, "q_buffers": 1},
            128,
            "overlap_tiles=true needs q_buffers=2: the next Q comes before the last O leaves",
        ),
        ({"num_stages": 4}, 128, "needs 328704 B of shared memory, h200 has 232448 B"),
        (
            {"warpgroups": 1, "blocks_per_sm": 2, "num_stages": 3},
            128,
            "blocks_per_sm=2 do not fit the shared memory of h200",
        ),
        ({"block_n": 256}, 64, "needs about 256 registers per thread that computes, 240 are left"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_illegal_says_why(changes: dict[str, object], head_dim: int, reason: str) -> None:
    assert FAMILY.illegal(config(**changes), replace(SPEC, head_dim=head_dim), H200) == reason


def test_a_value_outside_the_choices_names_them() -> None:
    with pytest.raises(InvalidInput, match=r"block_n=72 is not allowed. Allowed: 32, 48, 64, 80, 96, 112, 128, 144"):
        config(block_n=72)
    with pytest.raises(InvalidInput, match=r"softmax='eager' is not allowed. Allowed: exact, lazy, late"):
        config(softmax="eager")


def test_no_keys_are_left_to_others() -> None:
    with pytest.raises(IllegalConfig, match="seqlen_k=0 leaves nothing that TMA could copy"):
        FAMILY.plan(problem(100, 0), config(), H200)
    assert default_config(problem(100, 0), H200).family != FAMILY.name


def test_more_tiles_than_a_launch_takes_are_refused_whatever_the_grid() -> None:
    huge = problem(2**20, 1, head_dim=8, batch=2**20, num_heads=1024, num_heads_kv=1)
    with pytest.raises(UnsupportedProblem, match="a launch takes at most 2147483647"):
        FAMILY.plan(huge, config(), H200)


# ---- What is legal ----


@pytest.mark.parametrize("gpu", HOPPER)
def test_default_is_legal_for_every_head_dim(gpu: str) -> None:
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            spec = Spec(dtype="float16", head_dim=head_dim, causal=causal)
            assert FAMILY.illegal(default(spec, GPUS[gpu]), spec, GPUS[gpu]) is None, spec


@pytest.mark.parametrize("gpu", HOPPER)
def test_default_is_legal_for_values_of_another_width(gpu: str) -> None:
    for head_dim in HEAD_DIMS[::3]:
        for head_dim_v in HEAD_DIMS[1::3]:
            spec = Spec(dtype="float16", head_dim=head_dim, head_dim_v=head_dim_v, causal=True)
            assert FAMILY.illegal(default(spec, GPUS[gpu]), spec, GPUS[gpu]) is None, spec


@pytest.mark.parametrize("gpu", HOPPER)
def test_default_is_legal_whatever_the_lengths(gpu: str) -> None:
    for head_dim in HEAD_DIMS:
        for seqlen_q in (1, 64, 65, 5000):
            asked = problem(seqlen_q, 300, head_dim=head_dim, causal=True)
            FAMILY.plan(asked, FAMILY.default_for(asked, GPUS[gpu]), GPUS[gpu])


def test_few_queries_take_one_warpgroup() -> None:
    few, many = (FAMILY.default_for(problem(each, 4096), H200) for each in (64, 65))
    assert isinstance(few, Sm90FwdConfig)
    assert isinstance(many, Sm90FwdConfig)
    assert (few.warpgroups, few.ping_pong) == (1, False)
    assert many.warpgroups > 1


def test_a_counter_is_left_out_where_each_block_has_one_tile() -> None:
    dynamic = config(scheduler="dynamic")
    small = replace(H200, num_sms=16)
    for seqlen_q, scheduler in ((128, "static"), (129, "dynamic")):  # 16 heads
        asked = problem(seqlen_q, 4096, causal=True)
        assert FAMILY.fitted(dynamic, asked, small) == replace(dynamic, scheduler=scheduler)
        chosen = FAMILY.default_for(replace(asked, batch=1000), small)
        assert chosen.to_json()["scheduler"] == "dynamic"
    assert FAMILY.fitted(config(scheduler="tile", q_buffers=1), problem(128, 9), small).to_json()["scheduler"] == "tile"


def test_enumeration_is_legal_distinct_and_counts_the_rest() -> None:
    legal, reasons = FAMILY.enumerate(SPEC, H200)
    assert len(legal) == len({each.key for each in legal}) > 100
    assert all(FAMILY.illegal(each, SPEC, H200) is None for each in legal)
    points = 1
    for each in Sm90FwdConfig.parameters():
        if each.searched and not each.by_problem:
            points *= len(set(each.choices) - set(each.left_out))
    assert len(legal) + sum(reasons.values()) == points


def test_variants_differ_in_sections_where_tiles_differ_in_length() -> None:
    asked = problem(4096, 4096, causal=True)
    for scheduler in ("tile", "static", "dynamic"):
        chosen = config(scheduler=scheduler, q_buffers=1)
        assert FAMILY.variants(chosen, replace(asked, causal=False), H200) == (chosen,)
        found = FAMILY.variants(chosen, asked, H200)
        assert len(found) == len({each.key for each in found}) >= 1
        for each in found:
            assert isinstance(each, Sm90FwdConfig)
            assert replace(each, heads_per_section=1) == chosen
            assert FAMILY.illegal(each, asked.spec, H200) is None


# ---- What is chosen where nothing is known ----


@pytest.mark.parametrize("gpu", ["h200", "h100"])
@pytest.mark.parametrize(
    ("asked", "family"),
    [
        (problem(4096, 4096), "sm90_fwd"),
        (problem(4096, 4096, causal=True), "sm90_fwd"),
        (problem(4096, 4096, head_dim=64), "sm90_fwd"),
        (problem(4096, 4096, head_dim=256, dtype="bfloat16"), "sm90_fwd"),
        (problem(1, 8192), "sm80_fwd"),
        (problem(1, 8192, num_heads=32), "sm80_fwd"),
        (problem(4096, 4096, alignment=2), "sm80_fwd"),
        (problem(4096, 4096, dtype="float32"), "fma_fwd"),
        (problem(4096, 4096, out_dtype="float32", dtype="bfloat16"), "fma_fwd"),
    ],
    ids=str,
)
def test_default_is_of_the_family_that_suits_the_problem(asked: Problem, family: str, gpu: str) -> None:
    assert default_config(asked, gpu_by_alias(gpu)).family == family


@pytest.mark.parametrize("gpu", ["a100", "rtx-4090", "b200"])
def test_other_chips_have_the_family_before(gpu: str) -> None:
    assert default_config(problem(4096, 4096), gpu_by_alias(gpu)).family == "sm80_fwd"
