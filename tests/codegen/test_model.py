"""The model must order things sanely, and choose well where a sweep says what would have been best."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashtune.codegen.compiler.nvrtc import compile_source
from flashtune.codegen.families import model
from flashtune.codegen.families.counts import Work, tensor_flops_clock, walk
from flashtune.codegen.families.registry import predict
from flashtune.codegen.families.resources import Resources, blocks_per_sm
from flashtune.codegen.families.sm80_fwd import Sm80Fwd, Sm80FwdConfig
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

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
    assert blocks_per_sm(needs, CHIP) == blocks


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


def test_masked_steps_cost_time() -> None:
    assert seconds(masked=2.0, masked_alu=10**5, masked_shared_bytes=10**4) > seconds()
    assert seconds(masked=0.0, masked_alu=10**5, masked_shared_bytes=10**4) == seconds()


def test_a_config_that_spills_must_promise_more_to_be_chosen() -> None:
    plain = model.estimate(LONG, work_of(LONG), NEEDS, CHIP)
    assert model.preference(plain, 0) == plain.seconds
    assert model.preference(plain, 4) == plain.seconds * model.SPILL_MARGIN


def test_causal_costs_more_than_half_and_less_than_all_of_full() -> None:
    causal = dataclasses.replace(LONG, causal=True)
    assert 0.5 * seconds() < seconds(causal) < 0.75 * seconds()


def test_one_tile_more_than_a_wave_starts_another_wave() -> None:
    resident = blocks_per_sm(NEEDS, CHIP) * CHIP.num_sms
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


@functools.cache
def check() -> ModuleType:
    """benchmarks/model_check.py, which is no package."""
    where = importlib.util.spec_from_file_location("model_check", BENCHMARKS / "model_check.py")
    assert where is not None
    assert where.loader is not None
    module = sys.modules["model_check"] = importlib.util.module_from_spec(where)
    where.loader.exec_module(module)
    return module


@functools.cache
def sweep() -> list[Any]:
    rows: list[Any] = check().read_sweep()
    return rows


@functools.cache
def fits() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(check().FITS.read_text(encoding="utf-8"))
    return found


def test_the_sweep_covers_the_grid_and_is_of_bounded_size() -> None:
    configs: dict[Any, set[Any]] = {}
    for row in sweep():
        configs.setdefault(row.problem.spec, set()).add(row.config)
    assert len({row.problem for row in sweep()}) == 36
    assert len(configs) == 6
    assert all(90 <= len(each) <= 500 for each in configs.values())


def test_what_ships_is_the_fit_to_the_whole_sweep() -> None:
    assert len(sweep()) == fits()["rows"]
    assert check().Fit().values() == fits()["all"]


def test_the_shipped_model_chooses_near_the_best_measured() -> None:
    summary = check().score(sweep(), check().Fit()).summary()
    assert summary == fits()["scores"]["all"]
    assert summary["chosen"]["geomean"] >= 0.95
    assert summary["compiled"]["geomean"] >= 0.95
    assert summary["ranked"]["geomean"] >= 0.90


def test_the_model_chooses_well_for_a_group_left_out_of_its_fit() -> None:
    scores: dict[str, dict[Any, float]] = {}
    assert set(fits()["without"]) == {check().group(row.problem) for row in sweep()}
    for name, values in fits()["without"].items():
        unseen = [row for row in sweep() if check().group(row.problem) == name]
        found = check().score(unseen, check().Fit.of(values))
        for way in ("ranked", "compiled", "chosen"):
            scores.setdefault(way, {}).update(getattr(found, way))
    assert all(len(each) == 36 for each in scores.values())
    means = {way: check().geomean(each.values()) for way, each in scores.items()}
    assert means["chosen"] >= 0.95
    assert min(scores["chosen"].values()) >= 0.75
    assert means["ranked"] >= 0.90
    stored = fits()["scores"]["left out"]
    assert {way: round(mean, 4) for way, mean in means.items()} == {
        way: each["geomean"] for way, each in stored.items()
    }


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["a100", "a10", "rtx-4090", "rtx-5090"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_chosen_for_a_card_compiles_without_spills_and_fits(name: str, head_dim: int, causal: bool) -> None:
    """No slower than `SPILL_MARGIN` times the fastest estimate, so no config that spills is preferred to it."""
    gpu, rules = gpu_by_alias(name), Sm80Fwd()
    heads = 2048 // head_dim
    problem = Problem(
        dtype="bfloat16", head_dim=head_dim, batch=4, seqlen_q=4096, seqlen_k=4096, num_heads=heads, num_heads_kv=heads,
        causal=causal,
    )  # fmt: skip
    legal, _ = rules.enumerate(problem.spec, gpu)
    expected = {each: predict(problem, each, gpu) for each in legal}
    fastest = min(each.seconds for each in expected.values())
    spills = {each: rules.work(each, problem, gpu).spill_bytes for each in legal}
    order = sorted(legal, key=lambda each: (model.preference(expected[each], spills[each]), each.key))
    for config in order[:8]:
        assert isinstance(config, Sm80FwdConfig)
        source = rules.source(config, problem.spec)
        built = compile_source(source, gpu.arch)
        estimate = predict(problem, config, gpu, built)
        if not built.spill_bytes and estimate.seconds <= fastest * model.SPILL_MARGIN:
            break
    else:
        pytest.fail(f"none of the 8 best-ranked, such as {order[0]}, compiles without spills and is fast")
    needs = rules.resources(config, problem.spec)
    shared = needs.shared_memory + built.static_shared_bytes
    assert shared <= gpu.shared_memory_block
    assert blocks_per_sm(Resources(needs.threads, shared, built.registers), gpu) >= config.blocks_per_sm
