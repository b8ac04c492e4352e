"""Inputs made on the host: their form in memory, and samples that reject what kernels get wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.codegen.problem.bits import from_memory, to_memory
from flashtune.codegen.problem.problem import Spec
from flashtune.codegen.problem.reference import plain_attention
from flashtune.tuner.bench.inputs import random_values
from flashtune.tuner.bench.samples import samples


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bfloat16_rounds_to_the_nearest_even(value: float) -> None:
    single = np.array([value], np.float32)
    got = float(from_memory(to_memory(single, "bfloat16"), "bfloat16")[0])
    bits = int(single.view(np.uint32)[0])
    low = np.array([bits & 0xFFFF0000], np.uint32).view(np.float32)[0]
    high_bits = (bits & 0xFFFF0000) + 0x10000
    high = np.array([high_bits], np.uint32).view(np.float32)[0]
    below, above = abs(float(single[0]) - float(low)), abs(float(high) - float(single[0]))
    if math.isinf(float(high)):
        return
    if below != above:
        assert got == float(low if below < above else high)
    else:
        assert got == float(low if bits >> 16 & 1 == 0 else high)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_memory_form_keeps_rounded_values(dtype: str) -> None:
    values = from_memory(random_values(dtype, 1000, seed=1), dtype)
    assert np.array_equal(from_memory(to_memory(values, dtype), dtype), values)
    assert values.std() == pytest.approx(1, abs=0.1)
    assert np.array_equal(random_values(dtype, 1000, seed=1), random_values(dtype, 2000, seed=1)[:1000])


def test_samples_have_the_widths_of_their_spec() -> None:
    for sample in samples(Spec(dtype="float16", head_dim=40, head_dim_v=24, causal=True)):
        assert (sample.problem.head_dim, sample.problem.head_dim_v) == (40, 24)
        assert (sample.q.shape[3], sample.k.shape[3], sample.v.shape[3]) == (40, 40, 24)
        assert sample.out.reference.shape == sample.problem.shapes[3]
        halves = (each.view(np.float16) for each in (sample.q, sample.k, sample.v))
        assert sample.out.judge(plain_attention(*halves, causal=True, compute_dtype=np.float32)[0])


def test_samples_reject_what_kernels_get_wrong() -> None:
    spec = Spec(dtype="float16", head_dim=64, causal=True)
    sample = samples(spec)[0]
    halves = (each.view(np.float16) for each in (sample.q, sample.k, sample.v))
    right, _ = plain_attention(*halves, causal=True, compute_dtype=np.float32)
    assert sample.out.judge(right)
    for wrong in (np.zeros_like(right), np.full_like(right, np.nan)):
        assert not sample.out.judge(wrong)
    last_column = right.copy()
    last_column[..., -1] = last_column[..., -2]
    assert not sample.out.judge(last_column)
    even_rows = right.copy()
    even_rows[:, 1::2] = np.nan
    assert not sample.out.judge(even_rows)
