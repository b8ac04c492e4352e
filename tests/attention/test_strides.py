"""Strides and alignment of what `attention()` is given, on a fake device: what is taken as it is, what is copied."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_arrays import FakeArray, Fakes
from fake_calls import expected, inputs, same

from flashtune import attention
from flashtune.call import arrays as arrays
from flashtune.call.arrays import ArrayFacts
from flashtune.call.check import _is_aligned


def test_each_tensor_keeps_its_own_strides(fakes: Any) -> None:
    _, k, v = inputs(fakes)
    long = fakes.random(2, 10, 4, 24, seed=4).host
    q_view = fakes.array(long[:, ::2, :, :16])
    v_view = fakes.array(np.ascontiguousarray(v.host.swapaxes(1, 2)).swapaxes(1, 2))
    out = attention(q_view, k, v_view)
    same(out, expected(q_view, k, v)[0])
    assert out.host.flags.c_contiguous


def test_expanded_heads_and_batch(fakes: Any) -> None:
    q = fakes.random(2, 5, 4, 16)
    one = fakes.random(1, 7, 1, 16, seed=1).host
    k = fakes.array(np.broadcast_to(one, (2, 7, 4, 16)))
    same(attention(q, k, k), expected(q, k, k)[0])


@pytest.mark.parametrize("says", [True, False])
def test_arrays_may_say_that_they_are_contiguous(says: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Strides then count where they are not; a CuPy whose arrays don't say so does as well."""
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "tuned.db"))
    if not says:
        monkeypatch.delattr(FakeArray, "_c_contiguous")
    fakes = Fakes("cupy")
    arrays.register(fakes.kind)
    try:
        q, k, v = inputs(fakes)
        spread = fakes.array(np.repeat(k.host, 2, axis=1)[:, ::2])
        for keys in (k, spread, k, spread):
            same(attention(q, keys, v), expected(q, keys, v)[0])
        assert len({launch.strides for launch in fakes.layer.launches}) == 2
    finally:
        arrays.unregister(fakes.kind)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_what_runs_backwards_is_not_for_tma(fakes: Any, axis: int) -> None:
    """Rows start on 16 bytes all the same; no family that copies by TMA is asked."""
    q, k, v = inputs(fakes)
    turned = [fakes.array(np.flip(each.host, axis)) for each in (k, v)]
    same(attention(q, *turned), expected(q, *turned)[0])
    plan = fakes.layer.launches[-1].plan
    assert (plan.problem.alignment, plan.kernels[0].boxes) == (2, ())
    attention(q, k, v)
    assert fakes.layer.launches[-1].plan.problem.alignment == 16


@pytest.mark.parametrize(("stride", "aligned"), [(2**39 - 8, True), (2**39, False), (0, True), (-8, False), (4, False)])
def test_strides_are_aligned_where_tma_takes_them(stride: int, aligned: bool) -> None:
    facts = ArrayFacts("k", (2, 7, 2, 16), (stride, 32, 16, 1), "float16", 2, "cuda:0", 4096)
    assert _is_aligned(facts) is aligned
    assert _is_aligned(dataclasses.replace(facts, shape=(1, 7, 2, 16)))


def test_alignment_follows_each_call(fakes: Any) -> None:
    """One memo entry per alignment: a shifted or narrow view must not meet the kernel of an aligned one."""
    q, k, v = inputs(fakes)
    shifted_host = fakes.memory(q.host.shape, np.float16, 2)
    shifted_host[...] = q.host
    narrow = np.zeros((2, 7, 2, 17), np.float16)[..., :16]
    narrow[...] = k.host
    want = expected(q, k, v)[0]
    for query, key, alignment in (
        (q, k, 16),
        (fakes.array(shifted_host), k, 2),
        (q, fakes.array(narrow), 2),
        (q, k, 16),
    ):
        same(attention(query, key, v), want)
        assert fakes.layer.launches[-1].plan.problem.alignment == alignment


def test_strides_of_single_elements_do_not_count(fakes: Any) -> None:
    host = fakes.memory((1, 5, 4, 16), np.float16)
    host[...] = 1
    odd = np.lib.stride_tricks.as_strided(host, host.shape, (2, *host.strides[1:]))
    attention(fakes.array(odd), fakes.array(odd), fakes.array(odd))
    (launch,) = fakes.layer.launches
    assert launch.plan.problem.alignment == 16
    assert launch.strides[0] == (0, 64, 16)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_last_stride_other_than_one_is_copied_on_every_call(fakes: Any, which: int) -> None:
    arrays = list(inputs(fakes))
    wide = np.repeat(arrays[which].host, 2, axis=3)
    arrays[which] = fakes.array(wide[..., ::2])
    want = expected(*arrays)[0]
    for _ in range(2):
        before = fakes.allocations
        same(attention(*arrays), want)
        assert fakes.allocations - before == 2, "the copy and the output"
    wide[...] = 0
    same(attention(*arrays), expected(*arrays)[0])
