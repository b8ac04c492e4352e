"""CUDA graph captures and first calls: neither harms the other, in one thread or in two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from fake_arrays import Fakes
from fake_calls import inputs

import flashtune
from flashtune import attention
from flashtune.errors import InvalidInput

pytest.importorskip("flashtune.codegen.launch", reason="needs CuPy", exc_type=ImportError)
from fake_cuda import GLOBAL, OTHER, RELAXED, STREAM, THREAD_LOCAL, FakeCuda

from flashtune.codegen import launch


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What ``work`` gives in another thread; its error is raised here."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def plain(library: Fakes) -> dict[str, Any]:
    return dict(zip("qkv", inputs(library), strict=True))


def with_workspace(library: Fakes) -> dict[str, Any]:
    keys = library.random(1, 4096, 2, 16)
    return {"q": library.random(1, 1, 2, 16), "k": keys, "v": keys}


def with_copies(library: Fakes) -> dict[str, Any]:
    q, k, v = inputs(library)
    return {"q": q, "k": library.array(np.repeat(k.host, 2, axis=-1)[..., ::2]), "v": v}


def with_out_and_lse(library: Fakes) -> dict[str, Any]:
    return {**plain(library), "out": library.random(2, 5, 4, 16), "return_lse": True}


CALLS = [plain, with_workspace, with_copies, with_out_and_lse]


@pytest.mark.parametrize("make", CALLS)
@pytest.mark.parametrize("captured_first", [False, True])
def test_a_first_call_and_a_capture_in_another_thread(
    library: Fakes, cuda: FakeCuda, make: Callable[[Fakes], dict[str, Any]], captured_first: bool
) -> None:
    """F2: also one on which the capture waits, and one after it."""
    warm = library.random(1, 8, 2, 16)
    attention(warm, warm, warm)
    loads, launched = cuda.loads, len(cuda.launched)
    capture = cuda.begin_capture(OTHER)
    call = make(library)
    in_a_thread(lambda: attention(**call))
    assert capture.valid
    assert cuda.loads == loads + 1
    assert len(cuda.launched) > launched
    assert not capture.launched, "on a stream of its own"
    cuda.end_capture(OTHER)
    library.stream = OTHER if captured_first else STREAM
    attention(**call)


@pytest.mark.parametrize("make", CALLS)
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_a_first_call_inside_a_capture_is_captured(
    library: Fakes, cuda: FakeCuda, make: Callable[[Fakes], dict[str, Any]], mode: int
) -> None:
    """D43."""
    capture = cuda.begin_capture(STREAM, mode)
    attention(**make(library))
    assert capture.valid
    assert cuda.loads == 1
    assert capture.launched
    assert not cuda.launched


def test_an_older_driver_loads_nothing_inside_a_capture(library: Fakes, cuda: FakeCuda) -> None:
    """D43: before anything that is forbidden; a kernel that is there already is launched."""
    cuda.version = 12020
    q, k, v = inputs(library)
    capture = cuda.begin_capture(STREAM)
    with pytest.raises(InvalidInput, match="graph is being captured"):
        attention(q, k, v)
    assert capture.valid
    assert not cuda.loads
    cuda.end_capture(STREAM)
    attention(q, k, v)
    capture = cuda.begin_capture(STREAM)
    attention(q, k, v, scale=0.5)
    assert capture.valid
    assert len(capture.launched) == 1


def test_nothing_runs_on_the_default_stream_beside_a_capture_that_waits_for_it(library: Fakes, cuda: FakeCuda) -> None:
    """F2, F6: cudaErrorStreamCaptureImplicit is the one error that means a capture."""
    q, k, v = inputs(library)
    capture = cuda.begin_capture(OTHER, blocking=True)
    library.stream = 0
    with pytest.raises(InvalidInput, match="graph is being captured on a stream that waits for the default stream"):
        attention(q, k, v)
    assert capture.valid
    library.stream = STREAM
    attention(q, k, v)
    assert capture.valid


def test_a_capture_that_has_failed_is_named(library: Fakes, cuda: FakeCuda) -> None:
    """F6: CuPy raises a plain RuntimeError then."""
    cuda.begin_capture(STREAM).valid = False
    with pytest.raises(InvalidInput, match="invalid since an earlier error"):
        attention(*inputs(library))


def test_compile_beside_a_capture(library: Fakes, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: compile() loads as a first call does."""
    monkeypatch.setattr("flashtune.call.layer.CudaLayer.shared", lambda: cuda.layer)
    monkeypatch.setattr("flashtune.api._gpu", lambda gpu: cuda.layer.gpu(0))
    problem = flashtune.Problem(
        dtype="float16", head_dim=64, batch=1, seqlen_q=9, seqlen_k=9, num_heads=1, num_heads_kv=1
    )
    capture = cuda.begin_capture(OTHER)
    in_a_thread(lambda: flashtune.compile(problem))
    assert capture.valid
    assert cuda.loads == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_keeps_its_capture_mode(library: Fakes, cuda: FakeCuda, fails: bool) -> None:
    cuda.exchange(THREAD_LOCAL)
    q, k, v = inputs(library)
    cuda.status, cuda.failing = (1 if fails else 0), "streamIsCapturing"
    with pytest.raises(flashtune.errors.LaunchError) if fails else nullcontext():
        attention(q, k, v)
    assert cuda.mode == THREAD_LOCAL


@pytest.mark.parametrize("what", ["free", "malloc", "load", "attribute"])
def test_the_fake_refuses_what_cuda_refuses(cuda: FakeCuda, what: str) -> None:
    """Without the exchange of modes a call ruins a capture in another thread and fails."""
    capture = cuda.begin_capture(OTHER)
    with pytest.raises(RuntimeError, match=r"900|cudaErrorStreamCaptureUnsupported"):
        in_a_thread(lambda: cuda.unsafe(what, driver=what in ("load", "attribute")))
    assert not capture.valid
    assert cuda.begin_capture(OTHER).valid
    with launch.relaxed_capture():
        cuda.unsafe(what)
    assert cuda.captures[OTHER].valid
