"""`attention()` in CUDA graphs: captured, replayed, and called first inside a capture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from streams import Stream, copy, unused_config

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
    if library.name == "torch":
        graph: Any = library.torch.cuda.CUDAGraph()
        with library.torch.cuda.graph(graph, stream=stream.stream):
            out = call(arrays)
        replay = graph.replay
    else:
        with stream:
            stream.stream.begin_capture()
            out = call(arrays)
            graph = stream.stream.end_capture()
        replay = graph.launch
    library.synchronize()
    for old, new in zip(arrays, fresh, strict=True):
        copy(library, old, new, 2 * 2 * 65 * 4 * 64, stream)
    stream.synchronize()
    replay()
    library.synchronize()
    pairs = zip(out, want, strict=True) if return_lse else [(out, want)]
    for what, (got, expected) in zip(("out", "LSE"), pairs, strict=False):
        same = (library.get(got) == library.get(expected)).all()
        assert same, f"{library.name} {return_lse=}: {what} of the replay differs from an eager call"


def test_a_first_call_inside_a_capture(library: Any) -> None:
    """A clear error before anything forbidden is called: the capture goes on and ends well."""
    head_dim = 56 if library.name == "torch" else 24  # kernels are shared between libraries
    config = unused_config(head_dim)
    q = library.put(np.ones((1, 40, 1, head_dim)), "float16").array
    stream = Stream(library)
    messages = []

    def first_call() -> None:
        try:
            attention(q, q, q, config=config)
        except InvalidInput as error:
            messages.append(str(error))

    if library.name == "torch":
        graph = library.torch.cuda.CUDAGraph()
        with library.torch.cuda.graph(graph, stream=stream.stream):
            first_call()
            kept = library.torch.zeros(4, device="cuda")
        graph.replay()
        assert kept.sum().item() == 0
    else:
        with stream:
            stream.stream.begin_capture()
            first_call()
            stream.stream.end_capture()
    assert len(messages) == 1, f"{library.name}: the call in the capture did not raise InvalidInput"
    assert "graph" in messages[0]
    out = attention(q, q, q, config=config)
    assert (library.read(out, "float16") == 1).all()


def test_compile_makes_a_first_call_capturable(library: Any) -> None:
    problem = flashtune.Problem(
        dtype="float16", head_dim=104, batch=1, seqlen_q=9, seqlen_k=9, num_heads=1, num_heads_kv=1, causal=True
    )
    (built,) = flashtune.compile(problem)
    assert built.registers > 0
    q = library.put(np.ones((1, 9, 1, 104)), "float16").array
    stream = Stream(library)
    if library.name == "torch":
        graph: Any = library.torch.cuda.CUDAGraph()
        with library.torch.cuda.graph(graph, stream=stream.stream):
            out = attention(q, q, q, causal=True)
        graph.replay()
    else:
        with stream:
            library.cupy.empty(q.shape, q.dtype)  # the pool has a block for the output then
            stream.stream.begin_capture()
            out = attention(q, q, q, causal=True)
            stream.stream.end_capture().launch()
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
    if library.name == "torch":
        graph: Any = library.torch.cuda.CUDAGraph()
        with library.torch.cuda.graph(graph, stream=stream.stream):
            out, lse = attention(q, k, v, return_lse=True)
        replay = graph.replay
    else:
        with stream:
            stream.stream.begin_capture()
            out, lse = attention(q, k, v, return_lse=True)
            graph = stream.stream.end_capture()
        replay = graph.launch
    with stream:
        others = [library.put(np.full((1, 1, 1, size // 4), number), "float32") for number in range(1, 5)]
        stream.synchronize()
        for _ in range(3):
            replay()
    stream.synchronize()
    library.synchronize()
    assert all((each.host() == number).all() for number, each in enumerate(others, 1))
    assert not library.judge(library.read(out, "float16"), library.read(lse, "float32"), host, "float16", "replayed")
