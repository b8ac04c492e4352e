"""A machine of two GPUs that are none: "device memory" is host memory, and a launch computes in NumPy."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from flashtune.codegen.compiler.nvrtc import Compiled
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.plan import TENSORS, Plan, describe_map, pack_arguments
from flashtune.codegen.problem.reference import tiled_attention
from flashtune.errors import InvalidInput, LaunchError

DEVICES = (0, 1)


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


def extent(address: int, shape: tuple[int, ...], steps: tuple[int, ...], item: int) -> tuple[int, int]:
    """First byte and one past the last of an array with elements; ``steps`` are strides in bytes."""
    reached = [(size - 1) * step for size, step in zip(shape, steps, strict=True)]
    return address + sum(min(each, 0) for each in reached), address + sum(max(each, 0) for each in reached) + item


_owned: dict[int, tuple[int, int, int]] = {}


def own(owner: Any, host: Any, device: int) -> None:
    """``owner`` holds the memory of ``host`` on ``device`` for as long as it lives."""
    if host.size:
        _owned[id(owner)] = (*extent(host.ctypes.data, host.shape, host.strides, host.itemsize), device)
        weakref.finalize(owner, _owned.pop, id(owner), None).atexit = False


def is_owned(first: int, last: int, device: int) -> bool:
    return any(low <= first and last <= high and where == device for low, high, where in list(_owned.values()))


def device_of(stream: int) -> int:
    """Streams are numbered by device."""
    return stream % 1000


class FakeLayer:
    """A machine of two H100s whose kernels are `tiled_attention`.

    As on a real one, a launch needs the context and a stream of its device, and memory there that somebody holds and
    that is aligned as the plan says; what its tensor maps can't describe is refused.
    """

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
        assert device in DEVICES, "invalid device ordinal"
        before = self.current
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def gpu(self, device: int) -> Gpu:
        assert device in DEVICES, "invalid device ordinal"
        return gpu_by_alias("h100")

    def capturing(self, stream: int) -> bool:
        assert device_of(stream) == self.current, "asked of a stream of another device"
        return self.captured

    def load(self, plan: Plan, device: int, capturing: bool) -> FakeLoaded:
        assert device in DEVICES, "invalid device ordinal"
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
        pack_arguments(self.plan, strides, scale)
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
        assert device_of(stream) == self.loaded.device, "launched on a stream of another device"
        dtype = np.dtype(problem.dtype)
        self.must_reach((q, k, v, out), lse, workspace)
        if workspace:
            ctypes.memset(workspace, 0x5A, plan.workspace_bytes)
        q_at, k_at, v_at, out_at = (
            view(address, shape, (*strides, 1), dtype)
            for address, shape, strides in zip((q, k, v, out), problem.shapes, self.strides, strict=True)
        )
        result, logsumexp = tiled_attention(q_at, k_at, v_at, causal=problem.causal, scale=self.scale)
        out_at[...] = result
        if lse:
            shape = logsumexp.shape
            view(lse, shape, (shape[1] * shape[2], shape[2], 1), np.dtype(np.float32))[...] = logsumexp

    def must_reach(self, addresses: tuple[int, int, int, int], lse: int, workspace: int) -> None:
        """That all memory is there and as the plan has it."""
        plan, device = self.loaded.plan, self.loaded.device
        problem, item = plan.problem, np.dtype(plan.problem.dtype).itemsize
        lengths = [(workspace, plan.workspace_bytes), (lse, problem.batch * problem.num_heads * problem.seqlen_q * 4)]
        assert bool(workspace) == bool(plan.workspace_bytes)
        for address, size in lengths:
            assert not address or is_owned(address, address + size, device), "memory that nobody holds there"
        for address, shape, strides in zip(addresses, problem.shapes, self.strides, strict=True):
            if 0 not in shape:
                steps = tuple(stride * item for stride in (*strides, 1))
                assert is_owned(*extent(address, shape, steps, item), device), "memory that nobody holds there"
                reached = [step for step, size in zip(steps[:3], shape, strict=False) if size > 1]
                assert not any(each % problem.alignment for each in (address, *reached)), (
                    "not aligned as the plan has it"
                )
        for box in plan.kernels[0].boxes:
            describe_map(box, problem, self.strides, addresses[TENSORS.index(box.tensor)])
