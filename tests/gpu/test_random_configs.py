"""300 random legal configs of each tensor-core family on odd problems: right by the tolerance rule, same bits twice.

float16 through CuPy, bfloat16 through torch.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashtune import attention
from flashtune.codegen.families.family import Family
from flashtune.codegen.families.registry import family, source_for
from flashtune.codegen.gpu.devices import require_device
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import ITEM_BYTES, Problem, Spec
from flashtune.tuner.processes.capacity import cores
from flashtune.tuner.processes.compile_pool import ProcessBuilder

pytestmark = pytest.mark.gpu

FAMILIES = ("sm80_fwd", "sm90_fwd")
COUNT = 300
PARTS = 10
HEAD_DIMS = (8, 16, 24, 40, 64, 72, 80, 96, 128, 136, 192, 256)
LENGTHS = ((1, 1), (1, 700), (3, 65), (17, 300), (64, 64), (67, 1031), (200, 33), (130, 257), (515, 515), (700, 390))
HEADS = ((1, 1), (2, 1), (3, 3), (4, 2), (12, 2), (8, 1))
DTYPES = {"cupy": "float16", "torch": "bfloat16"}

Draw = tuple[Problem, Config]


def draws(kind: Family) -> Iterator[Draw]:
    draw = random.Random(kind.name)
    gpu = require_device()
    for number in range(COUNT):
        dtype = ("float16", "bfloat16")[number % 2]
        seqlen_q, seqlen_k = draw.choice(LENGTHS)
        num_heads, num_heads_kv = draw.choice(HEADS)
        problem = Problem(
            dtype=dtype,
            head_dim=draw.choice(HEAD_DIMS),
            batch=draw.choice((1, 2)),
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads=num_heads,
            num_heads_kv=num_heads_kv,
            causal=draw.random() < 0.5,
            alignment=draw.choice((16, 16, ITEM_BYTES[dtype])),
        )
        if kind.unsupported(problem.spec, gpu):
            problem = replace(problem, alignment=16)
        config = None
        while config is None or kind.unfit(config, problem, gpu):
            config = draw.choice(legal(kind, problem.spec, gpu))
            by_problem = {each.name: draw.choice(each.choices) for each in config.parameters() if each.by_problem}
            config = replace(config, **by_problem)
        yield problem, config


@functools.cache
def legal(kind: Family, spec: Spec, gpu: Gpu) -> list[Config]:
    return kind.enumerate(spec, gpu)[0]


@pytest.fixture(scope="module", params=FAMILIES)
def drawn(request: pytest.FixtureRequest, _own_database: None) -> list[Draw]:
    """The draws, compiled side by side as the tuner does it."""
    kind, gpu = family(request.param), require_device()
    if reason := kind.unsupported(Spec(dtype="float16", head_dim=64), gpu):
        pytest.skip(reason)
    found = list(draws(kind))
    builder = ProcessBuilder(require_device().arch, cores())
    try:
        jobs = [builder.submit(source_for(problem, config)) for problem, config in found]
        refused = [error for job in jobs if (error := job.result().error)]
    finally:
        builder.close()
    assert not refused, refused[0]
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_random_configs(library: Any, drawn: list[Draw], part: int) -> None:
    wrong = []
    for number, (problem, config) in enumerate(drawn):
        if problem.dtype == DTYPES[library.name] and number // 2 % PARTS == part:
            wrong += judged(library, problem, config, np.random.default_rng(number))
    assert not wrong, "\n".join(wrong)


def judged(library: Any, problem: Problem, config: Config, draw: np.random.Generator) -> list[str]:
    """What is wrong with two launches of ``config``."""
    *shapes, out_shape = problem.shapes
    host = [draw.standard_normal(shape) + 0.25 for shape in shapes]
    shift = 0 if problem.alignment == 16 else 1
    arrays = [library.put(each, problem.dtype, shift=shift).array for each in host]
    found = []
    for _ in range(2):
        out = library.put(np.full(out_shape, np.nan), problem.dtype, shift=shift)
        library.poison(problem.batch * problem.seqlen_q * problem.num_heads)
        _, lse = attention(*arrays, causal=problem.causal, out=out.array, return_lse=True, config=config)
        if not out.outside_is_nan():
            return [f"{config} {problem}: wrote outside of the output"]
        found.append((out.host(), library.read(lse, "float32")))
    (out_once, lse_once), (out_again, lse_again) = found
    if not (np.array_equal(out_once, out_again, equal_nan=True) and np.array_equal(lse_once, lse_again)):
        return [f"{config} {problem}: two launches differ"]
    label = f"{config} {problem}"
    return list(library.judge(out_once, lse_once, host, problem.dtype, label, causal=problem.causal))
