"""How near chips are to each other, and problems; and which problems count as near."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.tuned_db.lookup.neighbours import NEIGHBOURS, near_problems
from flashtune.tuned_db.policy.distance import chip_distance, problem_distance
from flashtune.tuned_db.store.store import Store

H200 = gpu_by_alias("h200")
Make = Callable[..., Any]

KEY = "9.0a/{model}/{sms}sm/smem232448/l2-{l2}/{memory}gb"


@pytest.mark.parametrize(
    ("nearer", "farther"),
    [
        ({"sms": 130}, {"sms": 114}),
        ({"memory": 96}, {"memory": 80}),
        ({"sms": 78}, {"sms": 132, "mig": "7g.141gb"}),
        ({"sms": 16, "mig": "1g.18gb"}, {"odd": True}),
    ],
    ids=["SMs", "memory", "a slice is far", "an unknown form is last"],
)
def test_nearness_of_chips(nearer: dict[str, Any], farther: dict[str, Any]) -> None:
    def key(changes: dict[str, Any]) -> str:
        if changes.get("odd"):
            return "9.0a/unheard-of"
        text = KEY.format(**({"model": "x", "sms": 132, "l2": 62914560, "memory": 141} | changes))
        return text + (f"/mig-{changes['mig']}" if "mig" in changes else "")

    here = key({})
    assert chip_distance(here, here) == (0, 0.0)
    assert chip_distance(here, key(nearer)) < chip_distance(here, key(farther))


def test_every_key_of_the_table_is_understood() -> None:
    from flashtune.codegen.gpu.table import GPUS

    assert all(chip_distance(each.key, each.key) == (0, 0.0) for each in GPUS.values())


@pytest.mark.parametrize(
    ("changes", "octaves"),
    [
        ({}, 0.0),
        ({"batch": 1, "num_heads": 32}, 0.0),  # the same work, shared in another way
        ({"num_heads_kv": 16}, 0.0),
        ({"batch": 4}, 1.0),
        ({"seqlen_q": 2048, "seqlen_k": 2048}, math.sqrt(2)),
        ({"seqlen_q": 256, "batch": 4}, math.sqrt(5)),
        ({"seqlen_k": 0}, 10.0),  # as one key
    ],
)
def test_octaves_between_problems(problem: Make, changes: dict[str, Any], octaves: float) -> None:
    assert problem_distance(problem(), problem(**changes)) == pytest.approx(octaves)
    assert problem_distance(problem(**changes), problem()) == pytest.approx(octaves)


def test_the_nearest_come_first_and_at_most_some(store: Store, measurement: Make, problem: Make) -> None:
    asked = problem()
    batches = [1, 2, 3, 4, 5, 8, 16, 17, 32]  # 2 is asked for, 16 is three octaves off, 17 and 32 are too far
    near = [problem(batch=each) for each in batches] + [problem(batch=4, dtype="bfloat16")]
    store.record_all(measurement(problem=each) for each in [*near, problem(batch=3, causal=True)])
    found = near_problems(asked, H200.key, [store, store])
    assert [(each.batch, each.dtype) for _, each in found] == [
        (3, "float16"),
        (1, "float16"),
        (4, "float16"),
        (4, "bfloat16"),  # at the same distance the dtype asked for comes first
        (5, "float16"),
        (8, "float16"),
    ]
    assert [distance for distance, _ in found] == sorted(distance for distance, _ in found)
    assert len(found) == NEIGHBOURS
    assert near_problems(asked, "9.0a/h100/x", [store]) == []


def test_three_octaves_are_near_and_more_are_not(store: Store, measurement: Make, problem: Make) -> None:
    store.record_all(measurement(problem=problem(batch=each)) for each in (16, 17))
    assert [each.batch for _, each in near_problems(problem(), H200.key, [store])] == [16]
