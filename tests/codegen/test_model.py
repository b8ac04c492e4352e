"""The model need not be right, but it must order things sanely."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flashtune.codegen import model
from flashtune.codegen.family import Resources
from flashtune.codegen.gpu import Gpu
from flashtune.codegen.problem import Problem
from flashtune.codegen.work import Work, tensor_flops_clock, walk

CHIP = Gpu(
    name="test-chip",
    capability=(8, 0),
    num_sms=108,
    shared_memory_block=166912,
    l2_bytes=40 * 2**20,
    memory_gb=80,
    bandwidth_gb_s=2039.0,
    clock_mhz=1410,
    tensor_tflops=312.0,
)
BASE: dict[str, Any] = {"dtype": "float16", "head_dim": 128, "num_heads": 16, "num_heads_kv": 16}
LONG = Problem(batch=4, seqlen_q=4096, seqlen_k=4096, **BASE)


def work_of(problem: Problem, block_m: int = 128, block_n: int = 64, stages: int = 2) -> Work:
    mean, longest = walk(problem, block_m, block_n)
    dim = problem.head_dim
    return Work(
        tiles=problem.batch * problem.num_heads * -(-problem.seqlen_q // block_m),
        steps=mean,
        longest=longest,
        flops=4 * block_m * block_n * dim,
        flops_clock=0.9 * tensor_flops_clock(CHIP),
        tensor=True,
        exponentials=block_m * block_n,
        alu=5 * block_m * block_n,
        shared_bytes=4 * 2 * block_n * dim * 2,
        step_bytes=2 * block_n * dim * 2,
        tile_bytes=2 * block_m * dim * 2,
        stages=stages,
    )


NEEDS = Resources(threads=128, shared_memory=65536, registers=128)


def seconds(problem: Problem = LONG, needs: Resources = NEEDS, spilled: int = 0, **changes: Any) -> float:
    work = dataclasses.replace(work_of(problem), **changes)
    return model.estimate(problem, work, needs, CHIP, spilled).seconds


@pytest.mark.parametrize(
    ("needs", "blocks"),
    [
        (Resources(threads=128, shared_memory=0, registers=128), 4),
        (Resources(threads=128, shared_memory=0, registers=129), 3),
        (Resources(threads=128, shared_memory=0, registers=16), 16),
        (Resources(threads=32, shared_memory=0, registers=16), 32),
        (Resources(threads=128, shared_memory=54 * 1024, registers=32), 2),
        (Resources(threads=128, shared_memory=53 * 1024, registers=32), 3),
        (Resources(threads=1024, shared_memory=0, registers=128), 0),
    ],
    ids=["registers", "registers-rounded-up", "threads", "blocks", "shared", "shared-with-reserve", "does-not-fit"],
)
def test_occupancy_follows_the_tightest_limit(needs: Resources, blocks: int) -> None:
    assert model.blocks_per_sm(needs, CHIP) == blocks


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (64, 64), (129, 1000), (1000, 129), (5, 0), (257, 257)])
def test_walk_counts_the_blocks_that_hold_a_visible_key(rows: int, keys: int, causal: bool) -> None:
    problem = Problem(batch=1, seqlen_q=rows, seqlen_k=keys, causal=causal, **BASE)
    counts = []
    for first in range(0, rows, 64):
        last_row = min(first + 64, rows) - 1
        visible = min(keys, last_row + keys - rows + 1) if causal else keys
        counts.append(len({key // 32 for key in range(visible)}))
    mean, longest = walk(problem, 64, 32)
    assert mean == pytest.approx(sum(counts) / len(counts))
    assert longest == max(counts)


def test_more_stages_are_never_slower_at_equal_occupancy() -> None:
    times = [seconds(stages=stages) for stages in (0, 1, 2, 3)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_stages_that_cost_occupancy_can_be_slower() -> None:
    shared = dataclasses.replace(NEEDS, shared_memory=120 * 1024)
    assert seconds(stages=3, needs=shared) > seconds(stages=2)


@pytest.mark.parametrize("name", ["flops", "exponentials", "alu", "shared_bytes", "step_bytes", "tile_bytes"])
def test_more_of_anything_is_never_faster(name: str) -> None:
    base = getattr(work_of(LONG), name)
    times = [seconds(**{name: base * factor}) for factor in (1, 2, 16)]
    assert times[0] <= times[1] < times[2]


def test_spills_cost_time() -> None:
    assert seconds(spilled=400) > seconds()


def test_causal_costs_more_than_half_and_less_than_all_of_full() -> None:
    causal = dataclasses.replace(LONG, causal=True)
    assert 0.5 * seconds() < seconds(causal) < 0.75 * seconds()


def test_one_tile_more_than_a_wave_starts_another_wave() -> None:
    resident = model.blocks_per_sm(NEEDS, CHIP) * CHIP.num_sms
    exact, more = seconds(tiles=resident), seconds(tiles=resident + 1)
    assert exact < more < 2 * exact


def test_estimate_is_near_what_the_chip_is_known_to_reach() -> None:
    """FlashAttention-2 reaches about 190 to 225 TFLOP/s on an A100 for this problem."""
    got = model.estimate(LONG, work_of(LONG), NEEDS, CHIP)
    assert 150 < got.tflops < 260
    assert got.blocks_sm == 2
    assert "2 blocks/SM" in got.why


@pytest.mark.parametrize(
    ("bound", "changes"),
    [
        ("tensor", {}),
        ("alu", {"exponentials": 10**6}),
        ("shared", {"shared_bytes": 10**7}),
        ("memory", {"step_bytes": 10**7}),
    ],
)
def test_bound_names_the_busiest_pipe(bound: str, changes: dict[str, Any]) -> None:
    work = dataclasses.replace(work_of(LONG), **changes)
    assert model.estimate(LONG, work, NEEDS, CHIP).bound == bound


def test_one_short_tile_is_bound_by_latency() -> None:
    short = Problem(batch=1, seqlen_q=64, seqlen_k=64, **BASE)
    assert model.estimate(short, work_of(short), NEEDS, CHIP).bound == "latency"


def test_few_queries_against_many_keys_are_bound_by_memory() -> None:
    decode = Problem(batch=512, seqlen_q=1, seqlen_k=8192, **BASE)
    work = dataclasses.replace(work_of(decode, block_m=16), step_bytes=0, flops=0, alu=0, exponentials=0)
    work = dataclasses.replace(work, shared_bytes=0, stages=8)
    assert model.estimate(decode, work, NEEDS, CHIP).bound == "memory"
