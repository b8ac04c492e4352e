"""Small ragged problems of a `Spec` with host results, against which every candidate is checked in full.

The full-size problem is checked on the device (`compare`); what depends on the code alone, tails, masks, rows that see
no key, wrap-around of stages, grouped heads, shows here, where a float64 reference and a plain implementation are cheap
and do not depend on any kernel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from flashtune.codegen.problem.bits import Array, from_memory
from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.codegen.problem.tolerance import Tolerance, attention_tolerances

from .inputs import random_values

_SHAPES = ((2, 197, 709, 4, 2), (1, 333, 197, 3, 1), (1, 5, 1337, 4, 2))
"""batch, seqlen_q, seqlen_k, num_heads, num_heads_kv. No length is a multiple of a tile. The first has more key blocks
than any pipeline has stages; in the second a causal mask leaves rows without keys; the third has so few tiles that
families which share keys among thread blocks by a rule do so."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One problem with inputs as they lie in memory and what is allowed of the results."""

    problem: Problem
    q: Array
    k: Array
    v: Array
    out: Tolerance
    lse: Tolerance


@functools.lru_cache(maxsize=16)
def samples(spec: Spec) -> tuple[Sample, ...]:
    """The samples of ``spec``, always the same; some tenths of a second the first time."""
    return tuple(_sample(spec, *shape, seed) for seed, shape in enumerate(_SHAPES))


def _sample(
    spec: Spec, batch: int, seqlen_q: int, seqlen_k: int, num_heads: int, num_heads_kv: int, seed: int
) -> Sample:
    problem = Problem(
        dtype=spec.dtype,
        head_dim=spec.head_dim,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        causal=spec.causal,
        alignment=spec.alignment,
        out_dtype=spec.out_dtype,
        head_dim_v=spec.head_dim_v,
    )
    raw_q, raw_k, raw_v = (
        random_values(spec.dtype, int(np.prod(shape)), 100 * seed + index).reshape(shape)
        for index, shape in enumerate(problem.shapes[:3])
    )
    q, k, v = (from_memory(each, spec.dtype) for each in (raw_q, raw_k, raw_v))
    out, lse = attention_tolerances(q, k, v, causal=spec.causal, dtype=spec.dtype, out_dtype=spec.out_dtype)
    return Sample(problem, raw_q, raw_k, raw_v, out, lse)
