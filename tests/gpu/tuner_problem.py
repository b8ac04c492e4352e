"""The problem that tests of the tuner measure on a real device. Processes that they start import this file."""

from __future__ import annotations

from flashtune.codegen.problem.problem import Problem


def problem(dtype: str = "float16", *, causal: bool = False, **changes: int) -> Problem:
    sizes = {"head_dim": 64, "batch": 2, "seqlen_q": 1000, "seqlen_k": 1000, "num_heads": 8, "num_heads_kv": 4}
    return Problem(dtype=dtype, causal=causal, **{**sizes, **changes})
