"""A sample of the legal configs of each family on odd problems, against float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from turns import by_turns

from flashtune.codegen.families.family import Family
from flashtune.codegen.families.registry import families, family
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import ITEM_BYTES, Problem, Spec
from flashtune.codegen.problem.reference import rounded
from flashtune.codegen.problem.tolerance import attention_tolerances
from flashtune.emulator import emulate

pytestmark = pytest.mark.emulate

Array = NDArray[Any]
H200 = gpu_by_alias("h200")
GPUS = {"sm90_fwd": replace(H200, num_sms=3)}
"""Its thread blocks take several tiles each."""
HEAD_DIMS = (8, 16, 24, 40, 56, 64, 72, 80, 96, 112, 128, 136, 192, 256)
PER_FAMILY = 3 * len(HEAD_DIMS)
LENGTHS = ((1, 1), (1, 129), (15, 65), (17, 300), (64, 64), (67, 131), (100, 33), (130, 97))
HEADS = ((1, 1), (2, 1), (3, 3), (4, 2), (6, 2))
DTYPES = {
    "sm90_fwd": ("float16", "bfloat16"),
    "sm80_fwd": ("float16", "bfloat16"),
    "fma_fwd": ("float32", "float16", "bfloat16"),
}
CANDIDATES = 40


@dataclass(frozen=True)
class Sample:
    problem: Problem
    config: Config
    strided: bool
    want_lse: bool
    seed: int

    def __str__(self) -> str:
        extra = f"{' strided' if self.strided else ''}{'' if self.want_lse else ' no LSE'}"
        return f"{self.config} {self.problem}{extra}"


def samples(name: str) -> Iterator[Sample]:
    """The same for everyone. Of some legal configs the one is taken that has most choices not seen so far."""
    draw = random.Random(f"samples of {name}")
    rules = family(name)
    seen: set[tuple[str, object]] = set()
    for number in range(PER_FAMILY):
        dtype = DTYPES[name][number % len(DTYPES[name])]
        num_heads, num_heads_kv = draw.choice(HEADS)
        seqlen_q, seqlen_k = LENGTHS[number % len(LENGTHS)]
        problem = Problem(
            dtype=dtype,
            head_dim=HEAD_DIMS[number % len(HEAD_DIMS)],
            batch=draw.choice((1, 2)),
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads=num_heads,
            num_heads_kv=num_heads_kv,
            causal=draw.random() < 0.6,
            alignment=draw.choice((16, 16, ITEM_BYTES[dtype])),
        )
        if rules.unsupported(problem.spec, H200):
            problem = replace(problem, alignment=16)
        candidates = [candidate(rules, problem.spec, draw) for _ in range(CANDIDATES)]
        config = max(candidates, key=lambda each: len(set(each.to_json().items()) - seen))
        seen |= set(config.to_json().items())
        yield Sample(problem, config, strided=number % 3 == 1, want_lse=number % 5 != 4, seed=number)


def candidate(rules: Family, spec: Spec, draw: random.Random) -> Config:
    """A legal config with any values, also of parameters and choices that the tuner leaves alone: all must be right."""
    parameters = rules.config_type.parameters()
    while True:
        values: dict[str, Any] = {each.name: draw.choice(each.choices) for each in parameters}
        config = rules.config_type(**values)
        if rules.illegal(config, spec, H200) is None:
            return config


SAMPLES = {name: list(samples(name)) for name in families()}


def strided(array: Array, gap: int) -> Array:
    """The same values in a memory of (batch, head, seqlen) order, with ``gap`` elements of NaN behind each row."""
    batch, seqlen, heads, head_dim = array.shape
    memory = np.full((batch, heads, seqlen, head_dim + gap), np.nan, array.dtype)
    view = memory[..., :head_dim].swapaxes(1, 2)
    view[...] = array
    return view


@pytest.mark.parametrize("name", SAMPLES)
def test_the_sample_has_every_choice(name: str) -> None:
    chosen = [sample.config for sample in SAMPLES[name]]
    for parameter in family(name).config_type.parameters():
        if parameter.searched:
            assert {getattr(config, parameter.name) for config in chosen} == set(parameter.choices), parameter.name
    problems = [sample.problem for sample in SAMPLES[name]]
    assert {problem.head_dim for problem in problems} == set(HEAD_DIMS)
    unaligned = Spec(dtype="float16", head_dim=64, alignment=2)
    alignments = (True,) if family(name).unsupported(unaligned, H200) else (False, True)
    assert {(problem.causal, problem.alignment == 16) for problem in problems} == {
        (causal, aligned) for causal in (False, True) for aligned in alignments
    }


@pytest.mark.parametrize("sample", by_turns(itertools.chain(*SAMPLES.values()), 2))
def test_a_sampled_config_agrees_with_float64(sample: Sample) -> None:
    problem = sample.problem
    draw = np.random.default_rng(sample.seed)
    q, k, v = (rounded(draw.standard_normal(shape, dtype=np.float32), problem.dtype) for shape in problem.shapes[:3])
    allowed_out, allowed_lse = attention_tolerances(q, k, v, causal=problem.causal, dtype=problem.dtype)
    out_strides = None
    if sample.strided:
        q, k, v = (strided(each, gap) for each, gap in ((q, 8), (k, 0), (v, 16)))
        row = problem.value_dim + 32
        out_strides = (row * problem.num_heads * problem.seqlen_q, row * problem.num_heads, row, 1)
    result = emulate(
        problem, sample.config, q, k, v, seed=sample.seed, want_lse=sample.want_lse, out_strides=out_strides,
        gpu=GPUS.get(sample.config.family),
    )  # fmt: skip
    verdict = allowed_out.judge(result.out)
    assert verdict, f"{sample}: out is {verdict}"
    if sample.want_lse:
        verdict = allowed_lse.judge(result.lse)
        assert verdict, f"{sample}: LSE is {verdict}"
