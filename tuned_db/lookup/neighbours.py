"""Which tuned problems are near enough to another to lend it their winners."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.policy.distance import problem_distance

from .sources import RowSource

NEIGHBOURS, FARTHEST = 6, 3.0
"""Near problems that are looked at, and how far off in octaves they may be."""
TWINS = {"float16": "bfloat16", "bfloat16": "float16"}
"""dtypes that take as long."""


def near_problems(problem: Problem, gpu_key: str, sources: Sequence[RowSource]) -> list[tuple[float, Problem]]:
    """Problems near ``problem`` that ``sources`` have times of on a device model, with their distance, nearest first.

    They have the same `Spec`, but for the dtype, which may be the twin of that asked for.
    """
    spec = problem.spec
    specs = [spec, *(dataclasses.replace(spec, dtype=twin) for twin in filter(None, [TWINS.get(spec.dtype)]))]
    found: dict[str, tuple[float, bool, str, Problem]] = {}
    for source in sources:
        for each in specs:
            for near in source.problems(spec=each, gpu_key=gpu_key):
                found[near.key] = problem_distance(problem, near), near.spec != spec, near.key, near
    found.pop(problem.key, None)
    nearest = sorted(each for each in found.values() if each[0] <= FARTHEST)[:NEIGHBOURS]
    return [(distance, near) for distance, *_, near in nearest]
