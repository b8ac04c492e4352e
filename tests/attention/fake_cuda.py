"""The rules of CUDA without a device: which calls a graph capture forbids to whom, and errors that last.

By the documentation of cudaStreamBeginCapture, cudaStreamIsCapturing and cudaThreadExchangeStreamCaptureMode. The real
`CudaLayer` and codegen/launch.py run on it, with CuPy's own exceptions; kernels compute nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from flashtune.call.layer import CudaLayer
from flashtune.codegen import launch
from flashtune.codegen.compiler.nvrtc import Compiled
from flashtune.codegen.gpu.cuda import driver as cupy_driver
from flashtune.codegen.gpu.cuda import runtime as cupy_runtime
from flashtune.codegen.gpu.table import gpu_by_alias

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
UNSUPPORTED, INVALIDATED, IMPLICIT = 900, 901, 906
DEFAULT_STREAM = 0
STREAM, OTHER = 7000, 9000
"""The one that calls of the fake libraries use, and another."""


class DriverError(cupy_driver.CUDADriverError):
    """CuPy's error, whose text it asks libcuda for."""

    def __init__(self, status: int) -> None:
        RuntimeError.__init__(self, f"CUDA_ERROR_{status}: as the driver has it")
        self.status = status


def compiled(arch: str) -> Compiled:
    return Compiled(b"cubin", arch, "13.0", 96, 0, 0, 0, 0.1, "")


@dataclass
class Capture:
    thread: int
    mode: int
    blocking: bool
    """Of a stream that waits for the default stream."""
    valid: bool = True
    launched: list[int] = field(default_factory=list)
    """Functions that are part of the graph."""


class FakeCuda:
    """One process: streams that capture, by number; the state of each thread; and what has broken the context."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.threads = threading.local()
        self.captures: dict[int, Capture] = {}
        self.version = 13000
        self.status = 0
        """Of an error that each call gives from now on."""
        self.failing = ""
        """The one call that fails with ``status``; empty for all."""
        self.launched: list[int] = []
        self.loads = 0
        runtime = SimpleNamespace(
            CUDARuntimeError=cupy_runtime.CUDARuntimeError,
            getDevice=self.get_device,
            setDevice=self.set_device,
            driverGetVersion=lambda: self.version,
            streamIsCapturing=self.is_capturing,
            free=lambda address: self.unsafe("free"),
            memsetAsync=lambda address, value, size, stream: self.enqueue("memset", stream),
        )
        driver = SimpleNamespace(
            CUDADriverError=cupy_driver.CUDADriverError,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
            funcSetAttribute=lambda function, attribute, value: self.unsafe("attribute", driver=True),
            launchKernel=lambda function, *more: self.enqueue("launch", more[7], function, driver=True),
        )
        patch.setattr(launch, "runtime", runtime)
        patch.setattr(launch, "driver", driver)
        patch.setattr(launch, "Module", lambda: SimpleNamespace(load=self.load, get_function=self.function))
        patch.setattr(launch, "compiled", lambda source, arch, refresh=False: compiled(arch))
        patch.setattr(launch, "exchange_capture_mode", self.exchange)
        patch.setattr(launch, "describe_map", lambda *_: SimpleNamespace(encode=lambda: bytes(launch.MAP_BYTES)))
        self.layer = LayerOnFake(self, runtime)

    # What threads and streams are like

    @property
    def device(self) -> int:
        return getattr(self.threads, "device", 0)

    @property
    def mode(self) -> int:
        return getattr(self.threads, "mode", GLOBAL)

    def exchange(self, mode: int) -> int:
        before, self.threads.mode = self.mode, mode
        return before

    def begin_capture(self, stream: int, mode: int = GLOBAL, *, blocking: bool = False) -> Capture:
        self.captures[stream] = Capture(threading.get_ident(), mode, blocking)
        return self.captures[stream]

    def end_capture(self, stream: int) -> Capture:
        return self.captures.pop(stream)

    # Calls

    def get_device(self) -> int:
        self.must_work("getDevice")
        return self.device

    def set_device(self, device: int) -> None:
        self.must_work("setDevice")
        self.threads.device = device

    def context(self) -> int:
        return 100 + self.device

    def is_capturing(self, stream: int) -> bool:
        self.must_work("streamIsCapturing")
        if stream == DEFAULT_STREAM and any(each.blocking for each in self.captures.values()):
            raise cupy_runtime.CUDARuntimeError(IMPLICIT)
        if stream not in self.captures:
            return False
        if not self.captures[stream].valid:
            raise RuntimeError("the stream was capturing, but an error has invalidated the capture sequence")
        return True

    def unsafe(self, name: str, *, driver: bool = False) -> None:
        """What a capture may forbid: anything that allocates, frees or loads."""
        self.must_work(name, driver)
        here = threading.get_ident()
        own = [each for each in self.captures.values() if each.thread == here and each.mode != RELAXED]
        others = [each for each in self.captures.values() if each.thread != here and each.mode == GLOBAL]
        harmed = {GLOBAL: own + others, THREAD_LOCAL: own, RELAXED: []}[self.mode]
        for each in harmed:
            each.valid = False
        if harmed:
            raise self.error(UNSUPPORTED, driver)

    def enqueue(self, name: str, stream: int, function: int = 0, *, driver: bool = False) -> None:
        self.must_work(name, driver)
        if stream == DEFAULT_STREAM and (blocking := [each for each in self.captures.values() if each.blocking]):
            for each in blocking:
                each.valid = False
            raise self.error(IMPLICIT, driver)
        capture = self.captures.get(stream)
        if capture is not None and not capture.valid:
            raise self.error(INVALIDATED, driver)
        (self.launched if capture is None else capture.launched).append(function)

    def load(self, cubin: bytes) -> None:
        self.unsafe("load", driver=True)
        self.loads += 1

    def function(self, name: str) -> SimpleNamespace:
        self.unsafe("function", driver=True)
        return SimpleNamespace(ptr=1000 + self.loads)

    def must_work(self, name: str, driver: bool = False) -> None:
        if self.status and self.failing in ("", name):
            raise self.error(self.status, driver)

    @staticmethod
    def error(status: int, driver: bool) -> Exception:
        return DriverError(status) if driver else cupy_runtime.CUDARuntimeError(status)


class LayerOnFake(CudaLayer):
    """The real layer on a machine of two H200s."""

    def __init__(self, cuda: FakeCuda, runtime: Any) -> None:
        super().__init__()
        self.cuda = cuda
        self.context = cuda.context
        self._runtime = runtime

    @property
    def current(self) -> int:
        return self.cuda.device

    def gpu(self, device: int) -> Any:
        self.cuda.must_work("attributes")
        return gpu_by_alias("h200")
