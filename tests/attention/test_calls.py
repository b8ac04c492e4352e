"""`attention()` from the arrays to the launch, on a fake device: results, warm calls, and what they remember."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_calls import expected, inputs, same

from flashtune import attention
from flashtune.call import gpu_arrays
from flashtune.call.arrays import forget
from flashtune.codegen.families.fma_fwd import FmaFwd
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Spec
from flashtune.errors import LaunchError


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.0, -1, 2.5])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_result_is_attention(fakes: Any, causal: bool, scale: float | None, dtype: Any) -> None:
    q, k, v = inputs(fakes, dtype)
    out, lse = attention(q, k, v, causal=causal, scale=scale, return_lse=True)
    want_out, want_lse = expected(q, k, v, causal=causal, scale=scale)
    same(out, want_out)
    same(lse, want_lse)
    assert (lse.host.shape, lse.host.dtype, lse.host.flags.c_contiguous) == ((2, 4, 5), np.float32, True)
    assert out.host.flags.c_contiguous
    same(attention(q, k, v, causal=causal, scale=scale), want_out)


def test_heads_first_layout_has_the_same_lse(fakes: Any) -> None:
    q, k, v = inputs(fakes)
    turned = [fakes.array(np.ascontiguousarray(each.host.swapaxes(1, 2))) for each in (q, k, v)]
    out, lse = attention(*turned, layout="bhsd", return_lse=True)
    want_out, want_lse = expected(q, k, v)
    same(out, want_out.swapaxes(1, 2))
    assert out.host.flags.c_contiguous
    same(lse, want_lse)


def test_a_warm_call_prepares_nothing(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(fakes)
    attention(q, k, v)

    def fail(*arguments: Any) -> None:
        raise AssertionError("the cold path ran")

    monkeypatch.setattr(fakes.kind, "prepare", fail)
    before = fakes.allocations
    for seed in range(3):
        other = fakes.random(2, 5, 4, 16, seed=seed)
        same(attention(other, k, v), expected(other, k, v)[0])
    assert fakes.allocations - before == 3, "the outputs"
    assert len(fakes.layer.loads) == 1


def test_forget_looks_up_again(fakes: Any) -> None:
    q, k, v = inputs(fakes)
    attention(q, k, v)
    forget()
    attention(q, k, v)
    assert len(fakes.layer.loads) == 2


def test_calls_of_two_kinds_take_turns(fakes: Any) -> None:
    small, large = fakes.random(1, 8, 2, 16), fakes.random(1, 40, 2, 16)
    for _ in range(3):
        for each in (small, large, large):
            assert attention(each, each, each).shape == each.shape
    launched = [launch.plan.problem.seqlen_q for launch in fakes.layer.launches]
    assert launched == [8, 40, 40] * 3
    assert len(fakes.layer.loads) == 2


def test_the_memo_is_bounded(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_arrays, "MEMO_LIMIT", 3)
    fakes.layer.loading.set()
    for rows in (1, 2, 3, 4, 5, 1):
        q = fakes.random(1, rows, 1, 16)
        same(attention(q, q, q), expected(q, q, q)[0])
        assert len(fakes.kind.memo) <= 3
    assert [plan.problem.seqlen_q for plan in fakes.layer.loads] == [1, 2, 3, 4, 5, 1], "the oldest made room"


@pytest.mark.parametrize("shape", [(0, 5, 4, 16), (2, 0, 4, 16)])
def test_an_empty_result_launches_nothing(fakes: Any, shape: tuple[int, ...]) -> None:
    q = fakes.random(*shape)
    k = fakes.random(shape[0], 7, 2, 16)
    for _ in range(2):
        out, lse = attention(q, k, k, return_lse=True)
        assert (out.host.shape, lse.host.shape) == (shape, (shape[0], 4, shape[1]))
        assert attention(q, k, fakes.random(shape[0], 7, 2, 8)).host.shape == (*shape[:3], 8)
        assert attention(q, k, k, out=q) is q
    assert fakes.layer.launches == fakes.layer.loads == []


def test_no_keys_give_zeros(fakes: Any) -> None:
    q, k = fakes.random(1, 3, 2, 16), fakes.random(1, 0, 2, 16)
    out, lse = attention(q, k, k, return_lse=True)
    same(out, np.zeros((1, 3, 2, 16), np.float16))
    same(lse, np.full((1, 2, 3), -np.inf, np.float32))


def test_config_is_used(fakes: Any) -> None:
    q, k, v = inputs(fakes)
    config = FmaFwd().default(Spec(dtype="float16", head_dim=16), gpu_by_alias("h100"))
    attention(q, k, v)
    attention(q, k, v, config=config)
    first, second = fakes.layer.launches
    assert first.plan.config != config
    assert second.plan.config == config


def test_a_failed_launch_raises_and_the_next_call_works(fakes: Any) -> None:
    q, k, v = inputs(fakes)
    fakes.layer.failure = LaunchError("out of resources")
    with pytest.raises(LaunchError, match="out of resources"):
        attention(q, k, v)
    fakes.layer.failure = None
    same(attention(q, k, v), expected(q, k, v)[0])


def test_an_untuned_problem_is_captured_once_and_warm_calls_write_nothing(
    fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "asked.jsonl"
    monkeypatch.setenv("FLASHTUNE_CAPTURE", str(path))
    q, k, v = (fakes.random(1, 77, 2, 64, seed=seed) for seed in range(3))
    attention(q, k, v)
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["problem"]["seqlen_q"] == 77
    monkeypatch.setattr("flashtune.call.choose.capture", lambda *_: pytest.fail("a warm call captures"))
    attention(q, k, v, causal=False)
