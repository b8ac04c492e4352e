"""Configs and problems that tests of sm90_fwd's rules, plans and compiled kernels start from."""

from __future__ import annotations

from flashtune.codegen.compiler.render import Source
from flashtune.codegen.families.sm90_fwd import Sm90Fwd, Sm90FwdConfig
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem, Spec

FAMILY = Sm90Fwd()
H200 = gpu_by_alias("h200")
SPEC = Spec(dtype="bfloat16", head_dim=128)


def config(**changes: object) -> Sm90FwdConfig:
    values: dict[str, object] = {
        "warpgroups": 2,
        "block_n": 128,
        "num_stages": 2,
        "q_buffers": 2,
        "softmax": "lazy",
        "ping_pong": False,
        "scheduler": "static",
        "blocks_per_sm": 1,
    }
    return Sm90FwdConfig.from_json(values | changes)


def problem(seqlen_q: int, seqlen_k: int, **changes: object) -> Problem:
    values: dict[str, object] = {
        "dtype": "float16",
        "head_dim": 128,
        "batch": 2,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "num_heads": 8,
        "num_heads_kv": 4,
    }
    return Problem(**(values | changes))  # type: ignore[arg-type]


def source(spec: Spec, chosen: Sm90FwdConfig) -> Source:
    return FAMILY.source(chosen, spec)


def default(spec: Spec, gpu: Gpu = H200) -> Sm90FwdConfig:
    found = FAMILY.default(spec, gpu)
    assert isinstance(found, Sm90FwdConfig)
    return found
