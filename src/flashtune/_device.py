"""The device as the array kinds see it (`Layer`), and the real one. Tests put another layer in its place."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from flashtune.codegen.compile import Compiled
from flashtune.codegen.gpu import Gpu
from flashtune.codegen.plan import Plan, Strides
from flashtune.errors import INSTALL, InvalidInput, LaunchError, MissingDependency


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

    def guard(self, device: int) -> AbstractContextManager[None]:
        """Makes ``device`` and its context current for a block, and restores what was current before."""

    def gpu(self, device: int) -> Gpu: ...

    def capturing(self, stream: int) -> bool:
        """Whether ``stream`` of the current device records a CUDA graph."""

    def load(self, plan: Plan, device: int, capturing: bool) -> Loaded:
        """``plan`` with its kernels on ``device``; compiles and loads those that are not there yet.

        Raises :class:`InvalidInput` instead of loading while a graph is captured.
        """


class CudaLayer:
    """CUDA through CuPy. Made when the first array in device memory is seen."""

    def __init__(self) -> None:
        try:
            from cupy.cuda import runtime
            from cupy_backends.cuda.api import driver

            from flashtune.codegen import launch
        except ImportError as error:
            raise MissingDependency(
                f"arrays in device memory need CuPy, which can't be imported ({error}): {INSTALL}"
            ) from error
        self.context: Callable[[], int] = driver.ctxGetCurrent
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

    def guard(self, device: int) -> AbstractContextManager[None]:
        self._refuse_in_fork()
        return _CurrentDevice(device, self._launch.DeviceGuard(device), self._runtime)

    def current_device(self) -> int:
        device: int = self._runtime.getDevice()
        return device

    def gpu(self, device: int) -> Gpu:
        from flashtune.codegen.device import gpu_of_device

        return gpu_of_device(device)

    def capturing(self, stream: int) -> bool:
        try:
            return bool(self._runtime.streamIsCapturing(stream))
        except self._runtime.CUDARuntimeError:
            return True  # the legacy default stream, asked while another stream captures

    def load(self, plan: Plan, device: int, capturing: bool) -> Loaded:
        key = (device, plan.gpu.arch, *((each.source.text, each.entry, each.shared_memory) for each in plan.kernels))
        first = self._loaded.get(key)
        if first is None:
            if capturing:
                raise InvalidInput(
                    f"{plan.config} is not loaded yet, and a CUDA graph is being captured: call attention() once with "
                    "arrays of the same kind, or flashtune.compile(problem), before the capture"
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


class _CurrentDevice:
    """`DeviceGuard` that also gives a thread without a CUDA context the one of ``device``."""

    __slots__ = ("device", "guard", "runtime")

    def __init__(self, device: int, guard: Any, runtime: Any) -> None:
        self.device = device
        self.guard = guard
        self.runtime = runtime

    def __enter__(self) -> None:
        self.guard.__enter__()
        self.runtime.setDevice(self.device)

    def __exit__(self, *error: Any) -> None:
        self.guard.__exit__(*error)
