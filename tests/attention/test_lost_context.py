"""F6: errors of CUDA on the way of a call: one of ours each, and those that last say that a new process is needed."""

from __future__ import annotations

from typing import Any

import pytest
from fake_arrays import Fakes
from fake_calls import inputs

import flashtune
from flashtune import attention
from flashtune.errors import STICKY, ContextLost, LaunchError

pytest.importorskip("flashtune.codegen.launch", reason="needs CuPy", exc_type=ImportError)
from cuda.bindings import driver, runtime
from fake_cuda import FakeCuda

from flashtune.call.layer import CudaLayer
from flashtune.codegen.gpu import cuda as cuda_module

COLD = (
    "getDevice",
    "setDevice",
    "attributes",
    "streamIsCapturing",
    "free",
    "load",
    "function",
    "attribute",
    "malloc",
    "launch",
    "",
)
"""Calls of CUDA that a first call makes; all of them."""


def refused(library: Fakes, **options: Any) -> LaunchError:
    """The error of a call, beside which nothing is said: a warning is an error in tests."""
    arrays = inputs(library)
    with pytest.raises(LaunchError) as caught:
        attention(*arrays, **options)
    return caught.value


def sound(library: Fakes, error: LaunchError) -> bool:
    """Whether CuPy's or torch's is the cause of ``error``, which says so in one line."""
    said = str(error.__cause__).splitlines()[:1]
    return isinstance(error.__cause__, library.layer.errors) and said[0] in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("failing", COLD)
@pytest.mark.parametrize("status", [700, 702, 719])
def test_a_first_call_after_the_context_is_lost(library: Fakes, cuda: FakeCuda, failing: str, status: int) -> None:
    cuda.status, cuda.failing = status, failing
    error = refused(library)
    assert type(error) is ContextLost
    assert sound(library, error)
    assert "Start a new process" in str(error)
    assert "graph" not in str(error)
    assert cuda.loads <= 1, "no other config is tried"


@pytest.mark.parametrize("options", [{}, {"return_lse": True}])
@pytest.mark.parametrize("failing", ["launch", "malloc"])
def test_a_warm_call_after_the_context_is_lost(
    library: Fakes, cuda: FakeCuda, failing: str, options: dict[str, Any]
) -> None:
    for _ in range(2):
        attention(*inputs(library), **options)
    cuda.status, cuda.failing = 716, failing
    error = refused(library, **options)
    assert type(error) is ContextLost
    assert sound(library, error)


@pytest.mark.parametrize("failing", ["getDevice", "free", "load"])
def test_compile_after_the_context_is_lost(
    library: Fakes, cuda: FakeCuda, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashtune.call.layer.CudaLayer.shared", lambda: cuda.layer)
    monkeypatch.setattr("flashtune.api._gpu", lambda gpu: cuda.layer.gpu(0))
    sizes = {"batch": 1, "seqlen_q": 9, "seqlen_k": 9, "num_heads": 1, "num_heads_kv": 1}
    cuda.status, cuda.failing = 719, failing
    with pytest.raises(ContextLost, match="Start a new process") as caught:
        flashtune.compile(flashtune.Problem(dtype="float16", head_dim=64, **sizes))
    assert sound(library, caught.value)


def test_the_current_device_of_a_lost_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """plan(), explain() and others that ask for it."""

    def lost() -> int:
        raise cuda_module.runtime.CUDARuntimeError(700)

    monkeypatch.setattr("flashtune.codegen.gpu.devices.require_device", lambda: None)
    monkeypatch.setattr(cuda_module.runtime, "getDevice", lost)
    problem = flashtune.Problem(
        dtype="float16", head_dim=64, batch=1, seqlen_q=9, seqlen_k=9, num_heads=1, num_heads_kv=1
    )
    for asked in (flashtune.plan, flashtune.explain, flashtune.choices_digest):
        with pytest.raises(ContextLost, match="Start a new process"):
            asked(problem)


@pytest.mark.parametrize("failing", ["setDevice", "streamIsCapturing", "launch"])
def test_what_passes_is_no_lost_context(library: Fakes, cuda: FakeCuda, failing: str) -> None:
    cuda.status, cuda.failing = 701, failing  # out of resources
    error = refused(library)
    assert type(error) is LaunchError
    assert sound(library, error)
    assert "process" not in str(error)
    cuda.status = 0
    attention(*inputs(library))


def test_any_cuda_error_is_no_capture() -> None:
    """The runtime of the fault's own report."""

    class Runtime:
        class CUDARuntimeError(RuntimeError): ...

        def streamIsCapturing(self, stream: int) -> bool:  # noqa: N802
            raise self.CUDARuntimeError("cudaErrorLaunchTimeout: the launch timed out")

    layer = object.__new__(CudaLayer)
    layer._runtime = Runtime()
    with pytest.raises(LaunchError, match="cudaErrorLaunchTimeout: the launch timed out"):
        layer.capturing(0)


@pytest.mark.parametrize("codes", [driver.CUresult, runtime.cudaError_t])
def test_what_lasts_is_what_nvidia_says_does(codes: Any) -> None:
    """Each code whose documentation asks for a new process; and a few that name no way out but are none."""
    lasting = {each.value for each in codes if "terminated and relaunched" in " ".join((each.__doc__ or "").split())}
    assert len(lasting) > 9
    assert lasting <= STICKY
    assert {each.value: each.name for each in codes if each.value in STICKY - lasting}.keys() <= {
        214,
        220,
        226,
        709,
        710,
    }
