"""The device as the array kinds see it (`Layer`), and the real one. Tests put another layer in its place."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from flashtune.codegen.compiler.nvrtc import Compiled
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.plan import Plan, Strides
from flashtune.errors import InvalidInput, LaunchError

CAPTURE_IMPLICIT = 906
"""cudaErrorStreamCaptureImplicit."""
LOADS_IN_CAPTURE = 12030
"""From CUDA 12.3 on the driver loads a kernel while the thread that asks for it captures a graph."""


class Bound(Protocol):
    def launch(self, q: int, k: int, v: int, out: int, lse: int, stream: int, workspace: int = 0) -> None: ...


class Loaded(Protocol):
    plan: Plan
    compiled: tuple[Compiled, ...]

    def bind(self, strides: tuple[Strides, Strides, Strides, Strides], scale: float) -> Bound: ...


class Layer(Protocol):
    """All that a call needs of CUDA."""

    context: Callable[[], int]
    """The calling thread's current CUDA context (0 if there is none): asked on each warm call."""
    errors: tuple[type[Exception], ...]
    """What array libraries raise where CUDA refuses something, a lack of memory aside; each adds its own. Users get
    :meth:`LaunchError.of` it."""

    def guard(self, device: int) -> AbstractContextManager[None]:
        """Makes ``device`` and its context current for a block, and restores what was current before.

        The block neither harms nor minds a CUDA graph that is captured meanwhile, and raises none of `errors`.
        """

    def gpu(self, device: int) -> Gpu: ...

    def capturing(self, stream: int) -> bool:
        """Whether ``stream`` of the current device records a CUDA graph.

        Raises :class:`InvalidInput` where nothing can run on it because of a capture.
        """

    def load(self, plan: Plan, device: int, capturing: bool) -> Loaded:
        """``plan`` with its kernels on ``device``; compiles and loads those that are not there yet.

        Raises :class:`InvalidInput` instead of loading while this thread captures a graph with a driver that is too old
        for that.
        """


class CudaLayer:
    """CUDA through CuPy. Made when the first array in device memory is seen."""

    def __init__(self) -> None:
        from flashtune.codegen import launch
        from flashtune.codegen.gpu.cuda import driver, runtime

        self.context: Callable[[], int] = driver.ctxGetCurrent
        self.errors: tuple[type[Exception], ...] = launch.CUDA_ERRORS
        self._launch = launch
        self._runtime = runtime
        self._loaded: dict[tuple[object, ...], Any] = {}
        self._forked = False
        os.register_at_fork(after_in_child=self._after_fork)

    @classmethod
    @functools.cache
    def shared(cls) -> CudaLayer:
        """The one layer of the process, so that CuPy and torch share loaded kernels."""
        return cls()

    @contextmanager
    def guard(self, device: int) -> Iterator[None]:
        self._refuse_in_fork()
        try:
            with self._launch.DeviceGuard(device), self._launch.relaxed_capture():
                self._runtime.setDevice(device)  # a thread without a context gets that of the device
                yield
        except self.errors as error:
            raise LaunchError.of(f"cuda:{device}", error) from error

    def current_device(self) -> int:
        try:
            device: int = self._runtime.getDevice()
        except self.errors as error:
            raise LaunchError.of("the current CUDA device", error) from error
        return device

    def gpu(self, device: int) -> Gpu:
        from flashtune.codegen.gpu.devices import gpu_of_device

        return gpu_of_device(device)

    def capturing(self, stream: int) -> bool:
        try:
            return bool(self._runtime.streamIsCapturing(stream))
        except self._runtime.CUDARuntimeError as error:
            if getattr(error, "status", None) != CAPTURE_IMPLICIT:
                raise LaunchError.of(f"stream {stream:#x}", error) from error
            raise InvalidInput(
                "a CUDA graph is being captured on a stream that waits for the default stream, on which nothing can "
                "run until that ends: make this call on another stream, or capture on a non-blocking one"
            ) from error
        except RuntimeError as error:  # CuPy's own word for a capture that an error has ended
            raise InvalidInput(
                f"the CUDA graph that is being captured on this stream is invalid since an earlier error ({error}): "
                "end the capture first"
            ) from error

    def load(self, plan: Plan, device: int, capturing: bool) -> Loaded:
        key = (device, plan.gpu.arch, *((each.source, each.entry, each.shared_memory) for each in plan.kernels))
        first = self._loaded.get(key)
        if first is None:
            if capturing and self._runtime.driverGetVersion() < LOADS_IN_CAPTURE:
                raise InvalidInput(
                    f"{plan.config} is not loaded yet, and a CUDA graph is being captured, in which a driver older "
                    "than CUDA 12.3 loads nothing: call attention() once with arrays of the same kind, or "
                    "flashtune.compile(problem), before the capture"
                )
            first = self._loaded[key] = self._launch.load(plan, device)
        again: Any = copy.copy(first)  # the same kernels with the grid of this problem
        again.plan = plan
        result: Loaded = again
        return result

    def _after_fork(self) -> None:
        self._forked = bool(self._loaded)

    def _refuse_in_fork(self) -> None:
        if self._forked:
            raise LaunchError(
                f"process {os.getpid()} was forked after attention() had used CUDA, which does not survive a fork. "
                "Start workers with multiprocessing's 'spawn' method"
            )
