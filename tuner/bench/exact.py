"""What a problem's full-size result is compared with: fma_fwd in float64 on its end; and the problem's neighbour."""

from __future__ import annotations

import dataclasses

from flashtune.codegen.compiler.render import Source
from flashtune.codegen.families.registry import family
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.plan import Plan
from flashtune.codegen.problem.problem import Problem

from .checksum import checksum_source
from .compare import compare_source

REFERENCE_ELEMENTS = 2**22
"""Output elements, from the end of a problem, that are compared with the float64 reference: 32 MiB of it."""
SHORTER_Q, SHORTER_K = 53, 37
"""How much shorter a ragged neighbour is. Not the same, so that a causal mask lies differently on the tiles."""


def sources(problem: Problem, gpu: Gpu) -> list[Source]:
    """What a bench launches for ``problem`` besides candidates."""
    return [reference_plan(problem, gpu).kernels[0].source, compare_source(problem.spec), checksum_source()]


def reference_plan(problem: Problem, gpu: Gpu) -> Plan:
    """fma_fwd in float64 on the part of ``problem`` that is compared."""
    exact = dataclasses.replace(last_part(problem), out_dtype="float64")
    kind = family("fma_fwd")
    default = kind.default(exact.spec, gpu)
    config = kind.config_type.from_json({**default.to_json(), "accumulate": "float64"})
    return kind.plan(exact, config, gpu)


def last_part(problem: Problem) -> Problem:
    """The end of ``problem`` that is compared with the reference: whole batch entries, or the last rows of the last.

    Its queries and output are the end of those of ``problem``; with causal aligned bottom-right its mask is the same.
    """
    entry = problem.seqlen_q * problem.num_heads * problem.value_dim
    if entry <= REFERENCE_ELEMENTS:
        return dataclasses.replace(problem, batch=min(problem.batch, REFERENCE_ELEMENTS // entry))
    rows = max(1, REFERENCE_ELEMENTS // (problem.num_heads * problem.value_dim))
    return dataclasses.replace(problem, batch=1, seqlen_q=min(rows, problem.seqlen_q))


def ragged(problem: Problem) -> Problem:
    """A neighbour of ``problem`` of about its size whose lengths no tile divides; itself where it is too short."""
    return dataclasses.replace(
        problem, seqlen_q=_ragged(problem.seqlen_q, SHORTER_Q), seqlen_k=_ragged(problem.seqlen_k, SHORTER_K)
    )


def _ragged(length: int, shorter: int) -> int:
    """An odd length below ``length``, since no tile is odd; at least about half of it. What is short stays as it is:
    one query has a `Spec` of its own."""
    return length if length < 4 else length - min(shorter, length // 2) | 1
