"""Values that travel: what `Problem` and configs take, and reading them from data that nobody vouches for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flashtune import values
from flashtune.codegen.families.registry import read_config
from flashtune.codegen.families.sm80_fwd import Sm80FwdConfig
from flashtune.codegen.problem.problem import MAX_LENGTH, Problem
from flashtune.errors import FlashtuneError, InvalidInput, InvalidType

FIELDS: dict[str, Any] = {
    "dtype": "float16",
    "head_dim": 64,
    "batch": 1,
    "seqlen_q": 128,
    "seqlen_k": 128,
    "num_heads": 8,
    "num_heads_kv": 8,
}
CONFIG: dict[str, Any] = {
    "block_m": 64,
    "block_n": 64,
    "num_warps": 4,
    "num_stages": 1,
    "q_in_registers": False,
    "blocks_per_sm": 1,
}
HUGE = 10**5000
"""More digits than Python prints."""


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": 1},
        {"dtype": None},
        {"dtype": np.float16},
        {"head_dim": "64"},
        {"head_dim": 64.0},
        {"head_dim": True},
        {"head_dim": float("nan")},
        {"batch": np.int64(2)},
        {"causal": "no"},
        {"causal": 1},
        {"op": None},
        {"alignment": "16"},
        {"alignment": True},
        {"out_dtype": None},
        {"head_dim_v": 128.0},
        {"head_dim_v": None},
    ],
    ids=repr,
)
def test_a_problem_of_wrong_types_is_refused(change: dict[str, Any]) -> None:
    """Else ``causal=1`` would get a key of its own, and ``head_dim=64.0`` would reach the CUDA source."""
    ((name, got),) = change.items()
    with pytest.raises(InvalidType) as caught:
        Problem(**FIELDS | change)
    assert f"Problem.{name} must be " in str(caught.value)
    assert repr(got) in str(caught.value)


@pytest.mark.parametrize(
    "name", ["head_dim", "batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv", "head_dim_v"]
)
def test_numbers_out_of_range_are_refused(name: str) -> None:
    for got, words in ((HUGE, "at most"), (-HUGE, "at least"), (2**31, "at most"), (-1, "at least")):
        with pytest.raises(InvalidInput, match=f"{name}=.* must be {words}"):
            Problem(**FIELDS | {name: got})


def test_the_end_of_the_last_tile_fits_32_bits() -> None:
    """Kernels add up to a block of rows or keys to a position in the sequence."""
    blocks = [each.choices for each in Sm80FwdConfig.parameters() if each.name in ("block_m", "block_n")]
    assert MAX_LENGTH + 2 * max(map(max, blocks)) < 2**31
    for name in ("seqlen_q", "seqlen_k"):
        assert getattr(Problem(**FIELDS | {name: MAX_LENGTH}), name) == MAX_LENGTH
        with pytest.raises(InvalidInput, match=f"{name}={MAX_LENGTH + 1} must be at most {MAX_LENGTH}"):
            Problem(**FIELDS | {name: MAX_LENGTH + 1})


def test_a_problem_comes_back_from_json() -> None:
    for change in ({}, {"causal": True, "alignment": 2}, {"out_dtype": "float64"}, {"head_dim_v": 40}):
        problem = Problem(**FIELDS | change)
        again = values.from_json(Problem, json.loads(json.dumps(values.to_json(problem))))
        assert again == problem
        assert again.key == problem.key


def test_values_as_wide_as_keys_are_not_in_the_key() -> None:
    """Rows that were stored before values had a width of their own stay valid."""
    plain, same, wide = (Problem(**FIELDS | {"head_dim_v": width}) for width in (0, 64, 128))
    assert plain == same
    assert (same.head_dim_v, same.value_dim, same.spec.value_dim) == (0, 64, 64)
    assert "head_dim_v" not in same.key + same.spec.key + str(values.to_json(same))
    assert values.from_json(Problem, FIELDS) == plain
    assert (wide.value_dim, wide.spec.value_dim) == (128, 128)
    assert wide.key == f"{plain.key},head_dim_v=128"
    assert wide.spec.key == f"{plain.spec.key},head_dim_v=128"


def test_what_the_width_of_values_changes() -> None:
    problem = Problem(
        dtype="bfloat16", head_dim=192, head_dim_v=128, batch=2, seqlen_q=5, seqlen_k=7, num_heads=4, num_heads_kv=2
    )
    assert problem.shapes == ((2, 5, 4, 192), (2, 7, 2, 192), (2, 7, 2, 128), (2, 5, 4, 128))
    assert problem.flops == 2 * 2 * 4 * (5 * 7) * (192 + 128)
    assert problem.min_bytes == 2 * (2 * 5 * 4 * (192 + 128) + 2 * 7 * 2 * (192 + 128))
    assert problem.default_scale == pytest.approx(192**-0.5)
    assert str(problem) == "bfloat16 d192/128 b2 s5x7 h4/2"
    exact = replace(problem, out_dtype="float64")
    assert exact.min_bytes - problem.min_bytes == 6 * 2 * 5 * 4 * 128


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "float16",
        {1: 2},
        FIELDS | {"x" * 1000: 1},
        FIELDS | {"a\nb": 1},
        FIELDS | {"batch": 1.0},
        FIELDS | {"batch": True},
        FIELDS | {"batch": HUGE},
        FIELDS | {"batch": [HUGE]},
        FIELDS | {"causal": 1},
        FIELDS | {"head_dim_v": -8},
        FIELDS | {"head_dim_v": "64"},
        FIELDS | {"dtype": HUGE},
        FIELDS | {"dtype": ["float16"]},
        FIELDS | {"dtype": "float16,head_dim=8"},
        {},
    ],
    ids=lambda data: values.shown(data, 30),
)
def test_hostile_data_is_no_problem(data: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        values.from_json(Problem, data)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [None, ["sm80_fwd"], "x" * 500, HUGE], ids=lambda name: values.shown(name, 30))
def test_a_family_that_is_not_known(name: Any) -> None:
    with pytest.raises(InvalidInput, match=r"is not known\. Known: sm90_fwd, sm80_fwd, fma_fwd"):
        read_config(name, CONFIG)


@pytest.mark.parametrize("got", [np.array([64, 64]), HUGE, 64.0, "64"], ids=lambda got: values.shown(got, 30))
def test_a_config_takes_listed_values_only(got: Any) -> None:
    with pytest.raises(InvalidInput, match=r"block_m=.* is not allowed\. Allowed: .*64"):
        Sm80FwdConfig(**CONFIG | {"block_m": got})
    with pytest.raises(FlashtuneError):
        read_config("sm80_fwd", CONFIG | {"block_m": got})


def test_shown_is_short_and_never_fails() -> None:
    assert values.shown("h100") == "'h100'"
    assert values.shown("x" * 100) == "'" + "x" * 56 + "..."
    assert values.shown(HUGE) == "a value of type int with very many digits"


@given(st.text(st.characters(codec=None), max_size=600), st.integers(3, 500))
@example("no such table: \x1b]0;owned\x07\x1b[2J\x9b31m", 400)
@example("left \u202e thgir \u2066 \x00 \udce9", 400)
def test_printable_text_is_a_line_without_controls(text: str, limit: int) -> None:
    clean = values.printable(text, limit)
    assert clean.isprintable()
    assert len(clean) <= limit
    assert values.printable(clean, limit) == clean


@given(st.lists(st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1), max_size=9))
def test_printable_text_keeps_its_words(words: list[str]) -> None:
    assert values.printable(" \n\t ".join(words), 10_000) == " ".join(words)
