"""The tolerance rule: what passes, what does not, and what is said about it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from flashtune.codegen.problem.reference import plain_attention
from flashtune.codegen.problem.tolerance import attention_tolerances, judge, tolerance, ulp
from flashtune.errors import InvalidInput

INFINITY = math.inf


def values(*numbers: float) -> Any:
    return np.array(numbers, np.float64)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("value", [1.0, 1.5, -2.0, 3.999, 1e-3, 6e4, 0.0])
def test_ulp_is_the_distance_to_the_next_number(value: float, dtype: str) -> None:
    held = np.abs(np.dtype(dtype).type(value))
    expected = np.nextafter(held, np.dtype(dtype).type(INFINITY)) - held
    assert ulp(values(float(held)), dtype)[0] == expected


def test_ulp_of_bfloat16_and_of_what_is_not_finite() -> None:
    assert list(ulp(values(1.0, -3.0, 256.0, 0.0), "bfloat16")) == [2**-7, 2**-6, 2.0, 2.0**-133]
    assert list(ulp(values(INFINITY, math.nan), "float32")) == [0, 0]
    assert ulp(values(1e-45), "float32")[0] == 2.0**-149


def test_an_error_of_one_ulp_passes_where_the_plain_result_is_exact() -> None:
    reference = np.linspace(1, 2, 100, endpoint=False)
    assert judge(reference + 2**-10, reference, reference, "float16")
    assert not judge(reference + 2.1 * 2**-10, reference, reference, "float16")
    assert judge(reference + 2.1 * 2**-10, reference, reference, "bfloat16")


def test_twice_the_plain_error_and_one_ulp_pass() -> None:
    reference = np.full(50, 1.0)
    plain = reference + 0.01
    verdict = judge(reference - 0.02 - 2**-23, plain, reference, "float32")
    assert verdict.ok
    assert verdict.max_error == pytest.approx(verdict.max_bound)
    assert verdict.rms_error == pytest.approx(verdict.rms_bound)
    assert not judge(reference - 0.0201, plain, reference, "float32")


def test_a_small_element_next_to_large_ones_is_not_excused() -> None:
    reference = values(1000.0, 1e-3)
    verdict = judge(values(1000.0, 1e-3 + 0.01), reference, reference, "float16")
    assert not verdict
    assert "1 of 2 values beyond their bound, the worst at (1,)" in verdict.text
    assert verdict.max_error == pytest.approx(0.01)


def test_many_errors_below_the_largest_plain_error_fail_by_rms() -> None:
    reference = np.full(1000, 1.0)
    plain = reference.copy()
    plain[0] += 0.01
    verdict = judge(reference + 0.01, plain, reference, "float32")
    assert not verdict.ok
    assert verdict.max_error <= verdict.max_bound
    assert verdict.rms_error > verdict.rms_bound
    assert "RMS error 0.01" in verdict.text


@pytest.mark.parametrize(
    ("ours", "reference", "ok"),
    [
        (-INFINITY, -INFINITY, True),
        (-INFINITY, -1e30, False),
        (-1e30, -INFINITY, False),
        (INFINITY, -INFINITY, False),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),  # real NaN must not be hidden
        (math.nan, -INFINITY, False),
        (0.0, math.nan, False),
    ],
)
def test_values_that_are_not_finite_must_match(ours: float, reference: float, ok: bool) -> None:
    verdict = judge(values(1.0, ours), values(1.0, reference), values(1.0, reference), "float32")
    assert verdict.ok is ok
    assert verdict.text.startswith("ok" if ok else "wrong: 1 of 2 values differ in kind, the first at (1,)")
    assert verdict.max_error == (0.0 if ok else INFINITY)


def test_nothing_finite_and_all_matching_passes() -> None:
    assert judge(values(-INFINITY), values(-INFINITY), values(-INFINITY), "float32")
    assert judge(values(), values(), values(), "float32")


def test_overflow_of_the_output_dtype_is_right() -> None:
    assert judge(values(INFINITY), values(INFINITY), values(65520.0), "float16")
    assert not judge(values(INFINITY), values(65504.0), values(65504.0), "float16")
    assert not judge(values(65504.0), values(INFINITY), values(70000.0), "float16")
    assert judge(values(70000.0), values(70000.0), values(70000.0), "float32")


def test_what_the_plain_result_loses_does_not_widen_the_bound() -> None:
    reference = values(1.0, 2.0)
    assert not judge(values(1.0, 2.5), values(1.0, math.nan), reference, "float32")
    assert not judge(values(1.0, 2.5), values(1.0, INFINITY), reference, "float32")
    assert judge(values(1.0, 2.0), values(1.0, INFINITY), reference, "float32")


def test_several_plain_results_give_the_largest_error() -> None:
    reference = values(1.0, 2.0, 4.0)
    one = tolerance(np.stack([reference]), reference, "float32")
    two = tolerance(np.stack([reference, reference + values(0, 0.5, 0)]), reference, "float32")
    assert (one.plain_max, two.plain_max) == (0.0, 0.5)
    assert two.plain_rms == pytest.approx(math.sqrt(0.25 / 6))


def test_tiny_errors_do_not_vanish_when_squared() -> None:
    reference = np.full(4, 1e-300)
    assert not judge(reference * 1.5, reference, reference, "float64")


def test_any_dtype_that_holds_the_values_is_accepted() -> None:
    reference = values(1.0, 2.0)
    assert judge(reference.astype(np.float16), reference.astype(np.float16), reference, "float16")
    assert judge(reference.astype(np.float32), reference.astype(np.float32), reference, "bfloat16")


def test_bad_arguments_are_named() -> None:
    one = values(1.0)
    with pytest.raises(
        InvalidInput, match=r"dtype='int8' has no tolerance. Known: float16, bfloat16, float32, float64"
    ):
        judge(one, one, one, "int8")
    with pytest.raises(InvalidInput, match=r"shape \(1, 1\) is compared with a reference of shape \(1,\)"):
        judge(one[None], one, one, "float32")
    with pytest.raises(InvalidInput, match=r"the plain result has shape \(2,\), the reference \(1,\)"):
        judge(one, values(1.0, 2.0), one, "float32")


def test_a_verdict_is_frozen_and_says_its_numbers() -> None:
    verdict = judge(values(1.0), values(1.0), values(1.0), "float32")
    assert str(verdict) == "ok: max error 0 (bound 1.19e-07), RMS error 0 (bound 1.19e-07)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        verdict.__setattr__("ok", False)


def test_attention_tolerances_catch_a_wrong_column_and_a_wrong_lse() -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, 9, 2, 16)).astype(np.float16) for _ in range(3))
    for_out, for_lse = attention_tolerances(q, k, v, causal=True)
    out, lse = plain_attention(q, k, v, causal=True, compute_dtype=np.float32)
    assert for_out.judge(out), for_out.judge(out)
    assert for_lse.judge(lse), for_lse.judge(lse)
    out[..., -1] = 0
    assert not for_out.judge(out)
    assert not for_lse.judge(lse + np.float32(1e-4))


def test_small_problems_are_judged_by_more_than_one_order_of_summation() -> None:
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((1, 1, 1, 256)).astype(np.float32) for _ in range(3))
    _, exact = plain_attention(q, k, v)
    _, lse = plain_attention(q, k, v, compute_dtype=np.float32)
    _, for_lse = attention_tolerances(q, k, v)
    assert for_lse.plain_max >= abs(float(lse[0, 0, 0]) - float(exact[0, 0, 0]))
    turned = [np.ascontiguousarray(each[..., ::-1]) for each in (q, k)]
    _, other = plain_attention(*turned, v, compute_dtype=np.float32)
    assert for_lse.judge(other), for_lse.judge(other)


def test_float32_results_of_sixteen_bit_inputs_are_judged_in_float32() -> None:
    random = np.random.default_rng(5)
    q, k, v = (random.standard_normal((1, 8, 1, 16)).astype(np.float16) for _ in range(3))
    rough, _ = attention_tolerances(q, k, v)
    fine, _ = attention_tolerances(q, k, v, out_dtype="float32")
    assert fine.ulp.max() < rough.ulp.max() / 1000
