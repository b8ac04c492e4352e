"""`attention()` in CUDA graphs: captured, replayed, and called first inside a capture."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from streams import Stream, capture, copy, unused_config

import flashtune
from flashtune import attention
from flashtune.errors import InvalidInput

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("return_lse", [False, True])
def test_graph_replay_equals_eager(library: Any, return_lse: bool) -> None:
    draw = np.random.default_rng(11)
    arrays = [library.put(draw.standard_normal((2, 65, 4, 64)), "float16").array for _ in range(3)]
    fresh = [library.put(draw.standard_normal((2, 65, 4, 64)), "float16").array for _ in range(3)]

    def call(inputs: list[Any]) -> Any:
        return attention(*inputs, causal=True, return_lse=return_lse)

    want = call(fresh)
    stream = Stream(library)
    with stream:
        for _ in range(3):
            call(arrays)
    stream.synchronize()
    with capture(library, stream) as replay:
        out = call(arrays)
    library.synchronize()
    for old, new in zip(arrays, fresh, strict=True):
        copy(library, old, new, 2 * 2 * 65 * 4 * 64, stream)
    stream.synchronize()
    replay[0]()
    library.synchronize()
    pairs = zip(out, want, strict=True) if return_lse else [(out, want)]
    for what, (got, expected) in zip(("out", "LSE"), pairs, strict=False):
        same = (library.get(got) == library.get(expected)).all()
        assert same, f"{library.name} {return_lse=}: {what} of the replay differs from an eager call"


UNSEEN = {
    ("cupy", "global"): 24,
    ("cupy", "thread_local"): 152,
    ("cupy", "beside"): 120,
    ("torch", "global"): 56,
    ("torch", "thread_local"): 136,
    ("torch", "beside"): 112,
}
"""A head_dim for each first call: kernels are shared between libraries."""


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_first_call_inside_a_capture(library: Any, mode: str) -> None:
    """D43: it is captured; with a driver that loads nothing then, one error before anything that the capture forbids.

    Either way the capture goes on and ends well.
    """
    from flashtune.codegen.gpu.cuda import cupy

    head_dim = UNSEEN[library.name, mode]
    config = unused_config(head_dim)
    q = library.put(np.ones((1, 40, 1, head_dim)), "float16").array
    out = library.put(np.full((1, 40, 1, head_dim), np.nan), "float16").array
    known = library.put(np.ones((1, 40, 1, 64)), "float16").array
    stream = Stream(library)
    with stream:
        blocks = [attention(known, known, known) for _ in range(4)]
        del blocks  # what CuPy's pool gives to the warm call, which has no leave to ask for memory
    stream.synchronize()
    refused, made = "", None
    with capture(library, stream, mode) as replay:
        try:
            attention(q, q, q, config=config, out=out)
            made = attention(q, q, q, config=config, scale=0.5)
        except InvalidInput as error:
            refused = str(error)
        beside = attention(known, known, known)
    replay[0]()
    stream.synchronize()
    library.synchronize()
    assert (library.read(beside, "float16") == 1).all()
    if cupy.cuda.runtime.driverGetVersion() < 12030:
        assert "graph is being captured" in refused
        return
    assert not refused
    assert (library.read(out, "float16") == 1).all()
    assert (library.read(made, "float16") == 1).all()


def test_a_first_call_beside_a_capture_in_another_thread(library: Any) -> None:
    """F2: neither harms the other, though the call loads a kernel and needs memory that the library has to ask for."""
    head_dim = UNSEEN[library.name, "beside"]
    config = unused_config(head_dim)
    small = library.put(np.ones((1, 128, 4, 64)), "float16").array
    large = library.put(np.ones((1, 8192, 24, head_dim)), "float16").array
    stream = Stream(library)
    with stream:
        blocks = [attention(small, small, small) for _ in range(4)]
        del blocks  # for the warm calls of the capture
    stream.synchronize()
    library.synchronize()
    inside, ended = threading.Event(), threading.Event()
    found: list[Any] = []

    def work() -> None:
        try:
            assert inside.wait(60)
            found.append(attention(large, large, large, config=config))
        except BaseException as error:  # a thread's error would be lost
            found.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    with capture(library, stream, "global") as replay:
        first = attention(small, small, small)
        inside.set()
        assert ended.wait(120)
        second = attention(small, small, first)
    thread.join()
    assert not isinstance(found[0], BaseException), repr(found[0])
    replay[0]()
    stream.synchronize()
    library.synchronize()
    for each in (first, second, found[0]):
        assert (library.read(each, "float16") == 1).all()


def test_compile_makes_a_first_call_capturable(library: Any) -> None:
    problem = flashtune.Problem(
        dtype="float16", head_dim=104, batch=1, seqlen_q=9, seqlen_k=9, num_heads=1, num_heads_kv=1, causal=True
    )
    (built,) = flashtune.compile(problem)
    assert built.registers > 0
    q = library.put(np.ones((1, 9, 1, 104)), "float16").array
    stream = Stream(library)
    with capture(library, stream) as replay:
        out = attention(q, q, q, causal=True)
    replay[0]()
    stream.synchronize()
    library.synchronize()
    assert (library.read(out, "float16") == 1).all()


def test_a_captured_call_that_shares_keys_leaves_other_memory_alone(library: Any) -> None:
    """Its workspace is nobody else's, also for arrays that are made between capture and replay."""
    draw = np.random.default_rng(3)
    host = [draw.standard_normal(shape) for shape in ((1, 1, 8, 64), (1, 8192, 8, 64), (1, 8192, 8, 64))]
    q, k, v = (library.put(each, "float16").array for each in host)
    problem = flashtune.Problem(
        dtype="float16", head_dim=64, batch=1, seqlen_q=1, seqlen_k=8192, num_heads=8, num_heads_kv=8
    )
    size = flashtune.plan(problem).workspace_bytes
    assert size
    stream = Stream(library)
    with stream:
        attention(q, k, v, return_lse=True)
    stream.synchronize()
    with capture(library, stream) as replay:
        out, lse = attention(q, k, v, return_lse=True)
    with stream:
        others = [library.put(np.full((1, 1, 1, size // 4), number), "float32") for number in range(1, 5)]
        stream.synchronize()
        for _ in range(3):
            replay[0]()
    stream.synchronize()
    library.synchronize()
    assert all((each.host() == number).all() for number, each in enumerate(others, 1))
    assert not library.judge(library.read(out, "float16"), library.read(lse, "float32"), host, "float16", "replayed")
