"""Tensor maps that a bound plan keeps: bounded, and safe under threads."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from flashtune.codegen.families.sm90_fwd import Sm90Fwd
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.tensor_map import MAP_BYTES, TensorMap
from flashtune.codegen.problem.problem import Problem

launch = pytest.importorskip("flashtune.codegen.launch", reason="CuPy is not installed")

GPU = gpu_by_alias("h200")
PROBLEM = Problem(dtype="float16", head_dim=64, batch=2, seqlen_q=9, seqlen_k=9, num_heads=2, num_heads_kv=2)
STRIDES = ((9 * 128, 128, 64),) * 4


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(TensorMap, "encode", lambda self: self.address.to_bytes(8, "little").ljust(MAP_BYTES, b"."))
    family = Sm90Fwd()
    boxes = tuple(family.tensor_boxes(family.default(PROBLEM.spec, GPU), PROBLEM.spec))
    return launch._Maps(boxes, PROBLEM, STRIDES)


def test_a_set_has_the_map_of_each_tensor_in_order(maps: launch._Maps) -> None:
    found = maps.encode((16, 32, 48, 64))
    assert [int.from_bytes(found[at : at + 8], "little") for at in range(0, 4 * MAP_BYTES, MAP_BYTES)] == [
        16,
        32,
        48,
        64,
    ]
    assert maps.sets[16, 32, 48, 64] == found


def test_so_many_are_kept(maps: launch._Maps) -> None:
    for number in range(3 * launch.KEPT_MAPS):
        maps.encode((16 * number, 0, 0, 0))
    assert len(maps.sets) == launch.KEPT_MAPS
    assert (16 * (3 * launch.KEPT_MAPS - 1), 0, 0, 0) in maps.sets


def test_threads_may_add_at_once(maps: launch._Maps) -> None:
    def add(thread: int) -> None:
        for number in range(2000):
            maps.encode((16 * (2000 * thread + number), 0, 0, 0))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(add, range(4)))
    finally:
        sys.setswitchinterval(before)
    assert len(maps.sets) == launch.KEPT_MAPS
