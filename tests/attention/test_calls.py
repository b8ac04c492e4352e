"""`attention()` from the arrays to the launch, on a fake device: strides, memo, copies, streams, devices, threads."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashtune import _gpu_arrays, attention
from flashtune._arrays import Facts, forget
from flashtune._check import _is_aligned
from flashtune.codegen.families.fma_fwd import FmaFwd
from flashtune.codegen.gpu import gpu_by_alias
from flashtune.codegen.problem import Spec
from flashtune.codegen.reference import tiled_attention
from flashtune.errors import InvalidInput, LaunchError


def expected(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    return tiled_attention(*(np.ascontiguousarray(each.host) for each in (q, k, v)), **options)


def inputs(fakes: Any, dtype: Any = np.float16) -> tuple[Any, Any, Any]:
    q = fakes.random(2, 5, 4, 16, seed=1, dtype=dtype)
    return q, fakes.random(2, 7, 2, 16, seed=2, dtype=dtype), fakes.random(2, 7, 2, 16, seed=3, dtype=dtype)


def same(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(got.host, want)


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


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("width", [8, 24])
def test_values_of_another_width(fakes: Any, layout: str, width: int) -> None:
    """The output has the columns of v; a first call, a warm one, one with ``out``, and v and ``out`` with gaps."""
    q, k, _ = inputs(fakes)
    v = fakes.random(2, 7, 2, width, seed=3)
    want_out, want_lse = expected(q, k, v, causal=True)

    def turned(host: Any) -> Any:
        return host.swapaxes(1, 2) if layout == "bhsd" else host

    arrays = [fakes.array(turned(each.host)) for each in (q, k, v)]
    gaps = np.zeros((2, 7, 2, 40), np.float16)
    gaps[..., 8 : 8 + width] = v.host
    with_gaps = [*arrays[:2], fakes.array(turned(gaps[..., 8 : 8 + width]))]
    for each in (arrays, arrays, with_gaps):
        out, lse = attention(*each, causal=True, return_lse=True, layout=layout)
        same(out, turned(want_out))
        same(lse, want_lse)
        assert out.host.flags.c_contiguous
    buffer = np.zeros((2, 5, 4, 48), np.float16)
    given = fakes.array(turned(buffer[..., 8 : 8 + width]))
    for _ in range(2):
        buffer[...] = 0
        assert attention(*arrays, causal=True, layout=layout, out=given) is given
        np.testing.assert_array_equal(buffer[..., 8 : 8 + width], want_out)
        assert not buffer[..., :8].any()
        assert not buffer[..., 8 + width :].any()
    problems = [launch.plan.problem for launch in fakes.layer.launches]
    assert {(each.head_dim, each.head_dim_v) for each in problems} == {(16, width)}


def test_a_call_with_narrow_values_is_not_the_last_call(fakes: Any) -> None:
    """v alone tells the two kinds apart, also where a warm call is known by more than its key."""
    q, k, v = inputs(fakes)
    narrow = fakes.random(2, 7, 2, 8, seed=3)
    for each in (v, narrow, v, v, narrow, narrow):
        same(attention(q, k, each), expected(q, k, each)[0])
    assert len(fakes.layer.loads) == 2


@pytest.mark.parametrize("which", [0, 1, 2])
def test_copies_keep_widths(fakes: Any, which: int) -> None:
    q, k, _ = inputs(fakes)
    arrays = [q, k, fakes.random(2, 7, 2, 8, seed=3)]
    arrays[which] = fakes.array(np.repeat(arrays[which].host, 2, axis=3)[..., ::2])
    for _ in range(2):
        out, lse = attention(*arrays, return_lse=True)
        want_out, want_lse = expected(*arrays)
        same(out, want_out)
        same(lse, want_lse)


def test_rows_of_narrow_values_count_for_the_alignment(fakes: Any) -> None:
    q, k, _ = inputs(fakes)
    v = np.zeros((2, 7, 2, 9), np.float16)[..., :8]
    attention(q, k, fakes.random(2, 7, 2, 8))
    attention(q, k, fakes.array(v))
    assert [launch.plan.problem.alignment for launch in fakes.layer.launches] == [16, 2]


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
    facts = Facts("k", (2, 7, 2, 16), (stride, 32, 16, 1), "float16", 2, "cuda:0", 4096)
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
    monkeypatch.setattr(_gpu_arrays, "MEMO_LIMIT", 3)
    fakes.layer.loading.set()
    for rows in (1, 2, 3, 4, 5, 1):
        q = fakes.random(1, rows, 1, 16)
        same(attention(q, q, q), expected(q, q, q)[0])
        assert len(fakes.kind.memo) <= 3
    assert [plan.problem.seqlen_q for plan in fakes.layer.loads] == [1, 2, 3, 4, 5, 1], "the oldest made room"


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_out_is_filled_and_returned(fakes: Any, layout: str) -> None:
    q, k, v = inputs(fakes)
    buffer = np.zeros((2, 5, 4, 24), np.float16)
    out_host = buffer[..., 4:20]
    arrays = [q, k, v]
    if layout == "bhsd":
        arrays = [fakes.array(each.host.swapaxes(1, 2)) for each in arrays]
        out_host = out_host.swapaxes(1, 2)
    out = fakes.array(out_host)
    for _ in range(2):
        buffer[...] = 0
        before = fakes.allocations
        assert attention(*arrays, out=out, layout=layout) is out
        assert fakes.allocations == before
        np.testing.assert_array_equal(buffer[..., 4:20], expected(q, k, v)[0])
        assert not buffer[..., :4].any()
        assert not buffer[..., 20:].any()


def test_overlap_is_seen_on_warm_calls_too(fakes: Any) -> None:
    q, k, v = inputs(fakes)
    attention(q, k, v, out=fakes.array(fakes.memory(q.host.shape, np.float16)))
    launched = len(fakes.layer.launches)
    with pytest.raises(InvalidInput, match=r"out .* overlaps q"):
        attention(q, k, v, out=fakes.array(q.host))
    assert len(fakes.layer.launches) == launched


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


def test_each_call_that_splits_keys_gets_memory_of_its_own(fakes: Any) -> None:
    q, k, v = fakes.random(1, 1, 2, 16), fakes.random(1, 4096, 2, 16), fakes.random(1, 4096, 2, 16)
    before = fakes.allocations
    for _ in range(3):
        attention(q, k, v)
    assert fakes.allocations - before == 6, "an output and a workspace each time"
    for launch in fakes.layer.launches:
        assert launch.plan.num_splits == 8
        assert launch.plan.workspace_bytes
        assert launch.workspace
    attention(q, fakes.random(1, 64, 2, 16), fakes.random(1, 64, 2, 16))
    assert fakes.layer.launches[-1].workspace == 0, "few keys are not split"


def test_memory_of_a_captured_launch_outlives_the_call(fakes: Any) -> None:
    """CuPy gives what is freed during a capture to anyone; torch reserves it for the graph."""
    q, k, v = fakes.random(1, 1, 2, 16), fakes.random(1, 4096, 2, 16), fakes.random(1, 4096, 2, 16)
    strided = fakes.array(np.repeat(k.host, 2, axis=-1)[..., ::2])
    attention(q, k, v)
    attention(q, strided, v)
    assert not fakes.kind.captured
    fakes.layer.captured = True
    attention(q, k, v)
    attention(q, strided, v)
    kept = {"cupy": 2 + 3, "torch": 0}[fakes.name]  # two workspaces, q, k and v of the call that copies k
    assert len(fakes.kind.captured) == kept


def test_a_launch_goes_to_the_stream_of_the_tensors_device(fakes: Any) -> None:
    q, k, v = inputs(fakes)
    attention(q, k, v)
    fakes.stream = 8000
    attention(q, k, v)
    elsewhere = [fakes.array(each.host, 1) for each in (q, k, v)]
    out = attention(*elsewhere)
    assert [(launch.device, launch.stream) for launch in fakes.layer.launches] == [(0, 7000), (0, 8000), (1, 8001)]
    assert (out.index if fakes.name == "torch" else out.data.device_id) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_the_current_device_is_left_as_it_was(fakes: Any, fails: bool) -> None:
    q, k, v = inputs(fakes)
    attention(q, k, v)
    fakes.layer.set_device(1)
    for _ in range(2):
        if fails:
            fakes.layer.failure = LaunchError("no")
            with pytest.raises(LaunchError):
                attention(q, k, v)
        else:
            same(attention(q, k, v), expected(q, k, v)[0])
        assert fakes.layer.current == 1


def test_a_thread_without_a_context_gets_one(fakes: Any) -> None:
    q, k, v = inputs(fakes)
    attention(q, k, v)
    fakes.layer.set_device(0, has_context=False)
    same(attention(q, k, v), expected(q, k, v)[0])


def test_threads_that_call_first_together_load_once(fakes: Any) -> None:
    q, k, v = inputs(fakes)
    want = expected(q, k, v)[0]
    barrier = threading.Barrier(8)
    results: list[Any] = []

    def work() -> None:
        barrier.wait()
        results.append(attention(q, k, v))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert len(results) == 8
    for each in results:
        same(each, want)
    assert len(fakes.layer.loads) == 1


def test_a_first_call_while_a_graph_is_captured_is_refused_and_works_later(fakes: Any) -> None:
    q, k, v = inputs(fakes)
    fakes.layer.captured = True
    before = fakes.allocations
    with pytest.raises(InvalidInput, match="captured"):
        attention(q, k, v)
    assert fakes.allocations == before
    fakes.layer.captured = False
    attention(q, k, v)
    fakes.layer.captured = True
    same(attention(q, k, v), expected(q, k, v)[0])


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
    monkeypatch.setattr("flashtune._choose.capture", lambda *_: pytest.fail("a warm call captures"))
    attention(q, k, v, causal=False)
