"""How near device models are to each other, and problems."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from flashtune.codegen.problem.problem import Problem

CHIP = re.compile(
    r"(?P<model>[^/]+)/(?P<sms>\d+)sm/smem\d+/l2-(?P<l2>\d+)/(?P<memory>\d+)gb(?:/mig-(?P<mig>.+))?", re.ASCII
)
"""A device-model key behind its capability."""


def chip_distance(one: str, other: str) -> tuple[int, float]:
    """How different two device models of one capability are, by their keys.

    Octaves between their numbers of SMs, L2 sizes and memory sizes, added; a MIG slice is farther from a whole chip
    than any whole chip. A key of unknown form comes last.
    """
    first, second = (CHIP.fullmatch(key.partition("/")[2]) for key in (one, other))
    if not first or not second:
        return 2, 0.0
    octaves = sum(
        abs(math.log2(max(1, int(first[name])) / max(1, int(second[name])))) for name in ("sms", "l2", "memory")
    )
    return int(bool(first["mig"]) != bool(second["mig"])), octaves


def problem_distance(one: Problem, other: Problem) -> float:
    """Octaves between two problems of one spec, in the space of both lengths and batch times heads."""

    def place(each: Problem) -> Iterator[float]:
        for size in (each.seqlen_q, each.seqlen_k, each.batch * each.num_heads):
            yield math.log2(max(1, size))

    return math.dist(tuple(place(one)), tuple(place(other)))
