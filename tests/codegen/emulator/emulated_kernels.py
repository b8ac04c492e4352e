"""Configs, problems and inputs for kernels on the CPU, and their comparison with float64: what several tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashtune.codegen.families.registry import read_config
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.codegen.problem.reference import rounded
from flashtune.codegen.problem.tolerance import attention_tolerances
from flashtune.emulator import Emulation, emulate

Array = NDArray[Any]

SM80 = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2, "q_in_registers": False, "blocks_per_sm": 1}
FMA = {"block_m": 32, "block_n": 32, "num_threads": 128, "threads_n": 8, "share_kv": False, "blocks_per_sm": 1}


def config_of(name: str, **changes: object) -> Config:
    return read_config(name, (SM80 if name == "sm80_fwd" else FMA) | changes)


def problem_of(dtype: str, seqlen_q: int, seqlen_k: int, head_dim: int, heads: str = "2/1", **more: Any) -> Problem:
    num_heads, num_heads_kv = map(int, heads.split("/"))
    return Problem(
        dtype=dtype,
        head_dim=head_dim,
        batch=more.pop("batch", 1),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        **more,
    )


def random_inputs(problem: Problem, seed: int = 0) -> tuple[Array, Array, Array]:
    draw = np.random.default_rng(seed)
    q, k, v = (rounded(draw.standard_normal(shape, dtype=np.float32), problem.dtype) for shape in problem.shapes[:3])
    return q, k, v


def compare(problem: Problem, config: Config, q: Array, k: Array, v: Array, **options: Any) -> Emulation:
    """Runs ``config`` and asserts that out and LSE are within tolerance."""
    result = emulate(problem, config, q, k, v, **options)
    allowed = attention_tolerances(
        q, k, v, causal=problem.causal, scale=options.get("scale"), dtype=problem.dtype, out_dtype=problem.spec.output
    )
    for name, tolerance, ours in zip(("out", "LSE"), allowed, (result.out, result.lse), strict=True):
        verdict = tolerance.judge(ours)
        assert verdict, f"{config} for {problem}, {options}: {name} is {verdict}"
    return result


def full(seqlen: int, value: float, head_dim: int = 64, heads: int = 1, batch: int = 1) -> Array:
    return np.full((batch, seqlen, heads, head_dim), value, np.float32)


def by_key(values: Any, head_dim: int = 64) -> Array:
    """One head in which every column of key j holds values[j]."""
    listed = np.asarray(values, np.float32)
    return np.broadcast_to(listed[None, :, None, None], (1, len(listed), 1, head_dim)).copy()


def ramp(seqlen: int, head_dim: int = 64) -> Array:
    """One head in which key j holds j."""
    return by_key(range(seqlen), head_dim)
