"""From a `Plan` to kernels on a device: compile or take from the cache, load, bind strides, launch.

A warm launch packs six pointers and makes one driver call, or two where a workspace has to be zeroed. The caller gives
the stream, and the device must be current (:class:`DeviceGuard`).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from flashtune.codegen.compiler.kernel_cache import compiled
from flashtune.codegen.compiler.nvrtc import Compiled
from flashtune.codegen.gpu.cuda import Module, driver, runtime
from flashtune.codegen.plan.plan import (
    PARAMS_BYTES,
    POINTERS,
    TENSORS,
    Kernel,
    Plan,
    Strides,
    TensorBox,
    describe_map,
    pack_arguments,
)
from flashtune.codegen.plan.tensor_map import MAP_BYTES
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import ContextLost, IllegalConfig, LaunchError

CUDA_ERRORS = (runtime.CUDARuntimeError, driver.CUDADriverError)
"""What CuPy raises where CUDA refuses something; users of flashtune get :meth:`LaunchError.of` it."""

pack_pointers = POINTERS.pack_into

KEPT_MAPS = 64
"""Sets of tensor maps that a bound plan keeps, four of 128 bytes each: enough for what a loop rotates through."""
_MAP_ALIGNMENT = 64
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


class DeviceGuard:
    """Makes ``device`` current for a block of code and restores what was current before."""

    __slots__ = ("device", "previous")

    def __init__(self, device: int) -> None:
        self.device = device
        self.previous = device

    def __enter__(self) -> None:
        self.previous = runtime.getDevice()
        if self.previous != self.device:
            runtime.setDevice(self.device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.previous != self.device:
            runtime.setDevice(self.previous)


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """A block in which this thread may load and allocate while it or another thread captures a CUDA graph.

    While any thread captures in global mode, torch's default, the driver refuses both to every thread, and who tries
    ruins that capture. What this block launches on a stream that captures is still captured.
    """
    before = exchange_capture_mode(_RELAXED)
    try:
        yield
    finally:
        exchange_capture_mode(before)


def exchange_capture_mode(mode: int) -> int:
    """Gives this thread ``mode``, a CUstreamCaptureMode, and returns the one that it had. CuPy does not offer this."""
    swapped = ctypes.c_int(mode)
    status = _driver_library().cuThreadExchangeStreamCaptureMode(ctypes.byref(swapped))
    if status:
        raise LaunchError(f"the driver refused stream capture mode {mode} (error {status})")
    return swapped.value


@functools.cache
def _driver_library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # there already: CuPy has loaded it


class _Slot:
    """Memory that one launch reads its parameters from: `struct Params`, tensor maps, and pointers to them."""

    __slots__ = ("address", "arguments", "maps", "memory", "params")

    def __init__(self, arguments: bytes, num_maps: int) -> None:
        self.params = ctypes.create_string_buffer(bytes(POINTERS.size) + arguments, PARAMS_BYTES)
        self.memory = ctypes.create_string_buffer(num_maps * MAP_BYTES + _MAP_ALIGNMENT)
        start = -ctypes.addressof(self.memory) % _MAP_ALIGNMENT
        self.maps = memoryview(self.memory).cast("B")[start : start + num_maps * MAP_BYTES]
        first = ctypes.addressof(self.memory) + start
        found = [ctypes.addressof(self.params), *(first + number * MAP_BYTES for number in range(num_maps))]
        self.arguments = (ctypes.c_void_p * len(found))(*found)
        self.address = ctypes.addressof(self.arguments)


class _Maps:
    """The tensor maps of a kernel for the addresses of (q, k, v, out). Kept: encoding takes microseconds, and callers'
    addresses come again."""

    __slots__ = ("boxes", "lock", "problem", "sets", "strides")

    def __init__(self, boxes: tuple[TensorBox, ...], problem: Problem, strides: tuple[Strides, ...]) -> None:
        self.boxes = boxes
        self.problem = problem
        self.strides = strides
        self.sets: dict[tuple[int, ...], bytes] = {}
        self.lock = threading.Lock()

    def encode(self, addresses: tuple[int, ...]) -> bytes:
        """All maps, one behind the other."""
        found = b"".join(
            describe_map(box, self.problem, self.strides, addresses[TENSORS.index(box.tensor)]).encode()
            for box in self.boxes
        )
        with self.lock:  # readers take none: a dict gives them the set or none
            while len(self.sets) >= KEPT_MAPS:
                del self.sets[next(iter(self.sets))]
            self.sets[addresses] = found
        return found


class BoundPlan:
    """A loaded plan with its strides and scale: only pointers are missing. Safe to launch from several threads."""

    __slots__ = ("_arguments", "_launch", "_maps", "_slots", "loaded")

    def __init__(self, loaded: LoadedPlan, strides: tuple[Strides, Strides, Strides, Strides], scale: float) -> None:
        (kernel,) = loaded.plan.kernels
        geometry = (*kernel.grid, kernel.threads, 1, 1, kernel.shared_memory)
        self.loaded = loaded
        self._arguments = pack_arguments(loaded.plan, strides, scale)
        self._launch = functools.partial(driver.launchKernel, loaded.functions[0].ptr, *geometry)
        self._maps = _Maps(kernel.boxes, loaded.plan.problem, strides) if kernel.boxes else None
        self._slots: deque[_Slot] = deque([_Slot(self._arguments, len(kernel.boxes))])

    def launch(self, q: int, k: int, v: int, out: int, lse: int, stream: int, workspace: int = 0) -> None:
        """Launches on ``stream`` (a raw cudaStream_t) of the current device; ``lse`` is 0 if not wanted.

        ``workspace`` is the address of the plan's ``workspace_bytes``, whose start is zeroed on ``stream`` first.

        A launch takes a slot out of the pool and puts it back, so that threads never share one.
        """
        slots = self._slots
        try:
            slot = slots.pop()
        except IndexError:  # other threads have them all
            slot = _Slot(self._arguments, len(self._maps.boxes) if self._maps else 0)
        pack_pointers(slot.params, 0, q, k, v, out, lse, workspace)
        maps = self._maps
        if maps is not None:
            addresses = q, k, v, out
            slot.maps[:] = maps.sets.get(addresses) or maps.encode(addresses)
        try:
            if workspace:
                runtime.memsetAsync(workspace, 0, self.loaded.plan.zeroed_bytes, stream)
            self._launch(stream, slot.address, 0)
        except CUDA_ERRORS as error:
            raise LaunchError.of(f"{self.loaded.plan.config} on {self.loaded.plan.gpu}", error) from error
        slots.append(slot)


class LoadedPlan:
    """A plan whose kernels are loaded on one device."""

    __slots__ = ("compiled", "device", "functions", "plan")

    def __init__(self, plan: Plan, device: int, built: tuple[Compiled, ...]) -> None:
        self.plan = plan
        self.device = device
        self.compiled = built
        with DeviceGuard(device):
            runtime.free(0)  # makes the device's primary context current
            self.functions = [_load(kernel, each, plan) for kernel, each in zip(plan.kernels, built, strict=True)]

    def bind(self, strides: tuple[Strides, Strides, Strides, Strides], scale: float) -> BoundPlan:
        """``strides`` of q, k, v and out in elements: (batch, row, head)."""
        return BoundPlan(self, strides, scale)


def load(plan: Plan, device: int) -> LoadedPlan:
    """Compiles ``plan`` (or takes it from the disk cache) and loads it on ``device``."""
    limit = plan.gpu.shared_memory_block
    for kernel in plan.kernels:
        if kernel.shared_memory > limit:
            raise IllegalConfig(
                f"{plan.config}: needs {kernel.shared_memory} B of shared memory, {plan.gpu} has {limit} B"
            )
    try:
        return LoadedPlan(plan, device, _built(plan, refresh=False))
    except ContextLost:
        raise
    except LaunchError:  # a cubin that the driver refuses may be an old one: once more with a fresh one
        return LoadedPlan(plan, device, _built(plan, refresh=True))


def _built(plan: Plan, *, refresh: bool) -> tuple[Compiled, ...]:
    return tuple(compiled(kernel.source, plan.gpu.arch, refresh=refresh) for kernel in plan.kernels)


def _load(kernel: Kernel, built: Compiled, plan: Plan) -> Any:
    module = Module()
    try:
        module.load(built.cubin)
        function = module.get_function(kernel.entry)
        driver.funcSetAttribute(
            function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared_memory
        )
    except driver.CUDADriverError as error:
        raise LaunchError.of(
            f"{plan.config} could not be loaded on {plan.gpu} (the cubin is for {built.arch}, built by NVRTC "
            f"{built.nvrtc}; the driver supports CUDA {runtime.driverGetVersion()})",
            error,
        ) from error
    return function
