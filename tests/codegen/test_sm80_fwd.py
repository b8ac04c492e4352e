"""Rules of sm80_fwd: what it refuses and why, and that what it promises compiles."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from turns import checkered

from flashtune.codegen.families.resources import register_cap
from flashtune.codegen.families.sm80_fwd import Sm80Fwd, Sm80FwdConfig
from flashtune.codegen.gpu.table import GPUS, gpu_by_alias
from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.errors import IllegalConfig, InvalidInput

FAMILY = Sm80Fwd()
A100 = gpu_by_alias("a100")
H200 = gpu_by_alias("h200")
SPEC = Spec(dtype="bfloat16", head_dim=128)
HEAD_DIMS = range(8, 257, 8)
SPILL_LIMIT = 256
"""Bytes, stores and loads, that a default may spill: outside of its loop, or a few addresses."""


def config(**changes: object) -> Sm80FwdConfig:
    values: dict[str, object] = {
        "block_m": 128,
        "block_n": 64,
        "num_warps": 4,
        "num_stages": 1,
        "q_in_registers": False,
        "blocks_per_sm": 1,
    }
    return Sm80FwdConfig.from_json(values | changes)


@pytest.mark.parametrize(
    ("spec", "gpu", "reason"),
    [
        (SPEC, "t4", "needs compute capability 8.0 or later, t4 has 7.5"),
        (Spec(dtype="float32", head_dim=64), "a100", "dtype=float32 is not supported. Supported: float16, bfloat16"),
        (
            Spec(dtype="float16", head_dim=260),
            "a100",
            "head_dim=260 is not supported. Supported: multiples of 8 from 8 to",
        ),
        (Spec(dtype="float16", head_dim=264), "a100", "head_dim=264 is not supported"),
        (Spec(dtype="float16", head_dim=4), "a100", "head_dim=4 is not supported"),
        (Spec(dtype="float16", head_dim=64, out_dtype="float32"), "a100", "the output has the dtype of the inputs"),
    ],
)
def test_unsupported_says_why(spec: Spec, gpu: str, reason: str) -> None:
    assert reason in str(FAMILY.unsupported(spec, gpu_by_alias(gpu)))


@pytest.mark.parametrize(
    ("changes", "gpu", "reason"),
    [
        ({"block_m": 16}, "a100", "block_m=16 does not give each of 4 warps whole tiles of 16 rows"),
        ({"block_m": 256}, "a100", "64 rows per warp: at most 32 fit the registers"),
        ({"block_n": 128}, "a100", "needs about 284 registers per thread, 255 are left"),
        ({"num_stages": 3, "num_warps": 8}, "rtx-4090", "needs 131072 B of shared memory, rtx-4090 has 101376 B"),
        ({"blocks_per_sm": 4}, "a100", "blocks_per_sm=4 do not fit the shared memory of a100-sxm-80gb"),
        ({"blocks_per_sm": 2}, "h200", "blocks_per_sm=2 caps registers no more than 1 does"),
    ],
)
def test_illegal_says_why(changes: dict[str, object], gpu: str, reason: str) -> None:
    assert FAMILY.illegal(config(**changes), SPEC, gpu_by_alias(gpu)) == reason


def test_a_value_outside_the_choices_names_them() -> None:
    with pytest.raises(InvalidInput, match=r"block_n=65 is not allowed. Allowed: 16, 32, 48, 64, 80, 96, 128"):
        config(block_n=65)


def test_register_cap_is_what_launch_bounds_leave() -> None:
    assert register_cap(128, 1) == 255
    assert register_cap(128, 4) == 128
    assert register_cap(256, 3) == 80


@pytest.mark.parametrize("gpu", [name for name, each in GPUS.items() if each.capability >= (8, 0)])
def test_default_is_legal_for_every_head_dim(gpu: str) -> None:
    for head_dim in HEAD_DIMS:
        spec = Spec(dtype="float16", head_dim=head_dim, causal=True)
        assert FAMILY.illegal(FAMILY.default(spec, GPUS[gpu]), spec, GPUS[gpu]) is None, head_dim


def test_enumeration_is_legal_distinct_and_counts_the_rest() -> None:
    legal, reasons = FAMILY.enumerate(SPEC, H200)
    assert len(legal) == len({each.key for each in legal}) > 100
    assert all(FAMILY.illegal(each, SPEC, H200) is None for each in legal)
    searched = [each for each in Sm80FwdConfig.parameters() if each.searched and not each.by_problem]
    points = 1
    for each in searched:
        points *= len(each.choices)
    assert len(legal) + sum(reasons.values()) == points


def test_shared_memory_is_counted_as_the_kernel_lays_it_out() -> None:
    # Q: 128 rows of 256 bytes; K and V: 2 stages of 64 rows each.
    assert FAMILY.resources(config(num_stages=2), SPEC).shared_memory == (128 + 2 * 2 * 64) * 256
    # Q in registers: K and V take its place.
    assert FAMILY.resources(config(num_stages=2, q_in_registers=True), SPEC).shared_memory == 2 * 2 * 64 * 256
    # head_dim 72 takes rows of 80.
    assert FAMILY.resources(config(), Spec(dtype="float16", head_dim=72)).shared_memory == (128 + 2 * 64) * 160


def problem(seqlen_q: int, seqlen_k: int, num_heads: int = 8, num_heads_kv: int = 8, batch: int = 1) -> Problem:
    return Problem(
        dtype="float16", head_dim=128, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=num_heads,
        num_heads_kv=num_heads_kv,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "block_m", "pack_heads", "num_splits", "launched"),
    [
        (problem(4096, 4096), 128, False, 1, 1),  # 256 tiles fill 132 SMs
        (problem(1, 8192), 32, False, 0, 16),  # 8 tiles, 512 keys for each of 16
        (problem(1, 8192, 32, 8), 32, True, 0, 16),  # 4 heads share a tile
        (problem(20, 300, 32, 8), 128, True, 1, 1),  # too few keys to share
        (problem(1, 4096, batch=64), 32, False, 1, 1),
        (problem(1, 4096, batch=16), 32, False, 0, 2),  # 128 small tiles leave an SM to one
        (problem(128, 4096, batch=16), 128, False, 1, 1),  # 128 large ones don't
        (problem(33, 100_000), 64, False, 0, 33),  # two blocks per SM
        (problem(33, 0), 64, False, 1, 1),
    ],
)
def test_default_follows_queries_and_heads(
    asked: Problem, block_m: int, pack_heads: bool, num_splits: int, launched: int
) -> None:
    found = FAMILY.default_for(asked, H200)
    assert isinstance(found, Sm80FwdConfig)
    assert (found.block_m, found.pack_heads, found.num_splits) == (block_m, pack_heads, num_splits)
    plan = FAMILY.plan(asked, found, H200)
    assert plan.num_splits == launched
    assert plan.kernels[0].grid[0] == FAMILY.tiles(found, asked) * launched


def test_default_is_legal_whatever_the_lengths() -> None:
    for gpu in (each for each in GPUS.values() if each.capability >= (8, 0)):
        for head_dim in HEAD_DIMS:
            for seqlen_q, group in itertools.product((1, 17, 40, 64, 65, 500), (1, 4)):
                asked = replace(problem(seqlen_q, 9000, 8, 8 // group), head_dim=head_dim, causal=True)
                FAMILY.plan(asked, FAMILY.default_for(asked, gpu), gpu)


def test_variants_are_what_may_pay_for_the_problem() -> None:
    def found(asked: Problem, **changes: object) -> set[tuple[bool, int]]:
        configs = FAMILY.variants(config(**changes), asked, H200)
        assert all(FAMILY.illegal(each, asked.spec, H200) is None for each in configs)
        return {(each.pack_heads, each.num_splits) for each in configs if isinstance(each, Sm80FwdConfig)}

    assert found(problem(4096, 4096)) == {(False, 1)}
    assert found(problem(4096, 4096, 32, 8)) == {(False, 1)}
    assert found(problem(64, 8192)) == {(False, each) for each in (0, 1, 2, 4, 8, 32)}  # 0 is 16 here
    assert found(problem(1, 1024, 32, 8, batch=64)) == {(False, 1), (True, 1)}


def test_what_was_chosen_for_other_lengths_is_split_by_the_rule() -> None:
    decode = config(block_m=32, num_warps=2, pack_heads=True, num_splits=16)
    assert FAMILY.fitted(decode, problem(1, 65536, 32, 8), H200) == replace(decode, num_splits=0)
    assert FAMILY.fitted(decode, problem(1, 65536, 32, 8, batch=256), H200) == replace(decode, num_splits=1)
    assert FAMILY.fitted(config(), problem(1, 65536, 32, 8), H200) == config()


def test_sizes_that_a_config_can_not_serve_are_refused() -> None:
    packed = replace(problem(2**28, 100, 8, 1), head_dim=8)
    with pytest.raises(IllegalConfig, match="pack_heads=true makes 2147483648 rows of queries"):
        FAMILY.plan(packed, config(pack_heads=True), H200)
    with pytest.raises(IllegalConfig, match="num_splits=64 needs 4563406848 bytes of workspace"):
        FAMILY.plan(problem(4096, 65536, 32, 8), config(num_splits=64), H200)


def test_more_parts_than_key_blocks_are_not_launched() -> None:
    assert FAMILY.num_splits(config(num_splits=64), problem(64, 130), H200) == 3
    assert FAMILY.num_splits(config(num_splits=64), problem(64, 0), H200) == 1


def test_the_workspace_is_laid_out_as_the_kernel_does_it() -> None:
    # 3 tiles of 4 parts: 128 threads hold 2 row tiles of 16 column tiles of O and one entry of sums, 16 bytes each.
    plan = FAMILY.plan(problem(300, 4096, 1, 1), config(num_splits=4), H200)
    assert (plan.zeroed_bytes, plan.workspace_bytes) == (256, 256 + 3 * 4 * 128 * 2 * 17 * 16)
    alone = FAMILY.plan(problem(300, 4096, 1, 1), config(num_splits=1), H200)
    assert (alone.zeroed_bytes, alone.workspace_bytes) == (0, 0)


def test_the_number_of_parts_is_not_in_the_source() -> None:
    sources = {each: FAMILY.source(config(num_splits=each), SPEC).text
               for each in (0, 1, 2, 64)}  # fmt: skip
    assert sources[0] == sources[2] == sources[64] != sources[1]


ARCHS = {
    "a100": "sm_80",
    "a10": "sm_86",
    "rtx-4090": "sm_89",
    "h200": "sm_90a",
    "b200": "sm_100a",
    "rtx-5090": "sm_120",
}


@pytest.mark.nvrtc
@pytest.mark.parametrize(("gpu", "head_dim"), checkered(ARCHS, (16, 72, 128, 256)))
def test_sample_compiles_and_keeps_the_promise_of_no_spills(gpu: str, head_dim: int) -> None:
    from flashtune.codegen.compiler.nvrtc import compile_source

    draw = random.Random(f"{gpu} {head_dim}")
    device = gpu_by_alias(gpu)
    assert device.arch == ARCHS[gpu]
    spec = Spec(
        dtype=draw.choice(["float16", "bfloat16"]),
        head_dim=head_dim,
        causal=draw.random() < 0.5,
        alignment=draw.choice([16, 16, 2]),
    )
    legal, _ = FAMILY.enumerate(spec, device)
    promised = [each for each in legal if FAMILY.resources(each, spec).spill_free]
    for each in [FAMILY.default(spec, device), *draw.sample(promised, 2)]:
        built = compile_source(FAMILY.source(each, spec), device.arch)
        allowed = 0 if each in promised else SPILL_LIMIT
        assert built.spill_bytes <= allowed, f"{spec} {each}: {built.spill_bytes} bytes"
        assert built.registers <= register_cap(32 * each.num_warps, each.blocks_per_sm), f"{spec} {each}"
        assert built.static_shared_bytes == 0
