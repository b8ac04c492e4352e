"""Where a call runs and in whose memory, on a fake device: devices, streams, workspaces, captured graphs, threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from fake_calls import expected, inputs, same

from flashtune import attention
from flashtune.errors import InvalidInput, LaunchError


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


def test_a_launch_goes_to_the_stream_of_the_tensors_device(fakes: Any) -> None:
    q, k, v = inputs(fakes)
    attention(q, k, v)
    fakes.stream = 8000
    attention(q, k, v)
    elsewhere = [fakes.array(each.host, 1) for each in (q, k, v)]
    out = attention(*elsewhere)
    attention(elsewhere[0], fakes.array(np.repeat(k.host, 2, axis=-1)[..., ::2], 1), elsewhere[2])  # copies k
    launched = [(launch.device, launch.stream) for launch in fakes.layer.launches]
    assert launched == [(0, 7000), (0, 8000), (1, 8001), (1, 8001)]
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
        each.join()
    assert len(results) == 8
    for each in results:
        same(each, want)
    assert len(fakes.layer.loads) == 1
