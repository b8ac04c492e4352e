"""A machine of two GPUs that are none: "device memory" is host memory, and a launch computes in NumPy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from flashtune.codegen.compile import Compiled
from flashtune.codegen.gpu import Gpu, gpu_by_alias
from flashtune.codegen.plan import Plan
from flashtune.codegen.reference import tiled_attention
from flashtune.errors import InvalidInput, LaunchError


def memory(shape: tuple[int, ...], dtype: Any, offset: int = 0) -> Any:
    """An array ``offset`` bytes behind a 256-byte boundary, as an allocator of device memory would place it."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + 512, np.uint8)
    start = -raw.ctypes.data % 256 + offset
    return raw[start : start + size].view(dtype).reshape(shape)


def view(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """The array at ``address`` with ``strides`` in elements."""
    steps = tuple(stride * dtype.itemsize for stride in strides)
    interface = {"data": (address, False), "shape": shape, "strides": steps, "typestr": dtype.str, "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


class FakeLayer:
    """A machine of two H100s whose kernels are `tiled_attention`."""

    errors: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self.state = threading.local()
        self.launches: list[SimpleNamespace] = []
        self.loads: list[Plan] = []
        self.loading = threading.Event()
        self.captured = False
        self.failure: Exception | None = None
        self.context = self._context

    @property
    def current(self) -> int:
        return getattr(self.state, "device", 0)

    def set_device(self, device: int, *, has_context: bool = True) -> None:
        self.state.device = device
        self.state.has_context = has_context

    def _context(self) -> int:
        return 100 + self.current if getattr(self.state, "has_context", True) else 0

    @contextmanager
    def guard(self, device: int) -> Iterator[None]:
        before = self.current
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def gpu(self, device: int) -> Gpu:
        return gpu_by_alias("h100")

    def capturing(self, stream: int) -> bool:
        return self.captured

    def load(self, plan: Plan, device: int, capturing: bool) -> FakeLoaded:
        if capturing:
            raise InvalidInput("a CUDA graph is being captured")
        if self.failure is not None and not isinstance(self.failure, LaunchError):
            raise self.failure
        self.loads.append(plan)
        self.loading.wait(0.05)  # time for other threads to make the same first call
        return FakeLoaded(self, plan, device)


class FakeLoaded:
    def __init__(self, layer: FakeLayer, plan: Plan, device: int) -> None:
        self.layer, self.plan, self.device = layer, plan, device
        self.compiled: tuple[Compiled, ...] = ()

    def bind(self, strides: Any, scale: float) -> FakeBound:
        return FakeBound(self, strides, scale)


class FakeBound:
    def __init__(self, loaded: FakeLoaded, strides: Any, scale: float) -> None:
        self.loaded, self.strides, self.scale = loaded, strides, scale

    def launch(self, q: int, k: int, v: int, out: int, lse: int, stream: int, workspace: int = 0) -> None:
        layer, plan, problem = self.loaded.layer, self.loaded.plan, self.loaded.plan.problem
        assert layer.context() == 100 + self.loaded.device, "launched without the context of the tensors' device"
        if layer.failure is not None:
            raise layer.failure
        layer.launches.append(
            SimpleNamespace(
                plan=plan, device=self.loaded.device, stream=stream, strides=self.strides, workspace=workspace
            )
        )
        dtype = np.dtype(problem.dtype)
        q_at, k_at, v_at, out_at = (
            view(address, shape, (*strides, 1), dtype)
            for address, shape, strides in zip((q, k, v, out), problem.shapes, self.strides, strict=True)
        )
        result, logsumexp = tiled_attention(q_at, k_at, v_at, causal=problem.causal, scale=self.scale)
        out_at[...] = result
        if lse:
            shape = logsumexp.shape
            view(lse, shape, (shape[1] * shape[2], shape[2], 1), np.dtype(np.float32))[...] = logsumexp
