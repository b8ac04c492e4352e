"""Configs of sm90_fwd for a chip of few SMs, and their comparison with float64, for several orders of threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from flashtune.codegen.families.sm90_fwd import Sm90FwdConfig
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem
from flashtune.codegen.problem.tolerance import Tolerance, attention_tolerances
from flashtune.emulator import Emulation, emulate

Array = NDArray[Any]
SMALL = replace(gpu_by_alias("h200"), num_sms=2)
"""Two thread blocks, or four, do all the tiles."""


def config_of(**changes: Any) -> Sm90FwdConfig:
    values: dict[str, Any] = {
        "warpgroups": 1,
        "block_n": 64,
        "num_stages": 2,
        "q_buffers": 1,
        "softmax": "lazy",
        "ping_pong": False,
        "scheduler": "static",
        "blocks_per_sm": 1,
    }
    return Sm90FwdConfig.from_json(values | changes)


def compare(
    problem: Problem,
    config: Sm90FwdConfig,
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    seeds: tuple[int, ...] = (0,),
    gpu: Gpu = SMALL,
    allowed: tuple[Tolerance, Tolerance] | None = None,
    **options: Any,
) -> Emulation:
    """Runs ``config`` and asserts that out and LSE are within tolerance, and the same bits for each of ``seeds``."""
    first, *others = (emulate(problem, config, q, k, v, scale=scale, seed=seed, gpu=gpu, **options) for seed in seeds)
    allowed = allowed or attention_tolerances(q, k, v, causal=problem.causal, scale=scale, dtype=problem.dtype)
    for name, tolerance, ours in zip(("out", "LSE"), allowed, (first.out, first.lse), strict=True):
        verdict = tolerance.judge(ours)
        assert verdict, f"{config} for {problem}, scale {scale}: {name} is {verdict}"
    for other in others:
        assert first.out.tobytes() == other.out.tobytes(), f"seed {other.seed}"
        assert first.lse.tobytes() == other.lse.tobytes(), f"seed {other.seed}"
    return first
