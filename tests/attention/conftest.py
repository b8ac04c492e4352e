"""Array libraries and a device without a GPU: "device memory" is host memory, and a launch computes in NumPy.

The fakes enter by the doors that flashtune offers: `TorchArrays` and `CupyArrays` take the array module and the device
layer. So the real validation, memo and warm paths run, and a launch reads whatever pointers and strides they bound.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashtune import _arrays
from flashtune._cupy import CupyArrays
from flashtune._torch import TorchArrays
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


class FakeTensor:
    """What flashtune reads of a torch tensor."""

    layout = "strided"
    tangent = None
    is_nested = False

    def __init__(self, host: Any, device: int = 0, requires_grad: bool = False) -> None:
        self.host, self.index, self.requires_grad = host, device, requires_grad

    @property
    def shape(self) -> Any:
        return self.host.shape

    @property
    def dtype(self) -> str:
        return f"torch.{self.host.dtype.name}"

    @property
    def device(self) -> str:
        return f"cuda:{self.index}" if self.is_cuda else "cpu"

    @property
    def is_cuda(self) -> bool:
        return self.index >= 0

    def get_device(self) -> int:
        return self.index

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.host.itemsize for step in self.host.strides)

    def data_ptr(self) -> int:
        return int(self.host.ctypes.data)

    def element_size(self) -> int:
        return int(self.host.itemsize)

    def new_empty(self, shape: tuple[int, ...], dtype: str) -> FakeTensor:
        return FakeTensor(allocate(shape, dtype.removeprefix("torch.")), self.index)

    def resolve_neg(self) -> FakeTensor:
        return self

    def contiguous(self) -> FakeTensor:
        return FakeTensor(copied(self.host), self.index)


class FakeParameter(FakeTensor): ...


class FakeGuards:
    """torch's TensorGuards. ``mode`` stands for the dispatch keys, which inference mode changes."""

    mode = "normal"

    def __init__(self, *tensors: FakeTensor, dynamic_dims_sizes: None, dynamic_dims_strides: None) -> None:
        self.seen = [self.facts(each) for each in tensors]

    def facts(self, tensor: Any) -> tuple[object, ...]:
        if not isinstance(tensor, FakeTensor):
            raise TypeError("expected Tensor()")
        where = (tensor.get_device(), tensor.is_cuda, tensor.requires_grad, FakeGuards.mode)
        return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, *where

    def check(self, *tensors: Any) -> bool:
        distinct = len({id(each) for each in tensors}) == len(tensors)
        return distinct and self.seen == [self.facts(each) for each in tensors]


class FakeArray:
    """What flashtune reads of a CuPy array. Like CuPy's, a new one lies on the current device."""

    layer: FakeLayer

    def __init__(self, shape: Any, dtype: Any = None, host: Any = None, device: int | None = None) -> None:
        self.host = allocate(shape, dtype) if host is None else host
        index = self.layer.current if device is None else device
        self.data = SimpleNamespace(ptr=int(self.host.ctypes.data), device_id=index)

    shape = property(lambda self: self.host.shape)
    dtype = property(lambda self: self.host.dtype)
    strides = property(lambda self: self.host.strides)


allocations = 0


def allocate(shape: tuple[int, ...], dtype: Any) -> Any:
    """Fresh poisoned memory."""
    global allocations
    allocations += 1
    array = memory(tuple(shape), np.dtype(dtype))
    array.view(np.uint8)[...] = 0xFF  # NaN
    return array


def copied(host: Any) -> Any:
    array = allocate(host.shape, host.dtype)
    array[...] = host
    return array


class Fakes:
    """One fake library and its device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.layer = FakeLayer()
        self.memory = memory
        self.grad = True
        self.stream = 7000
        self.forward_ad = SimpleNamespace(
            _current_level=-1, unpack_dual=lambda tensor: SimpleNamespace(tangent=tensor.tangent)
        )
        if name == "torch":
            names = {each: f"torch.{each}" for each in ("float16", "bfloat16", "float32", "float64", "uint8")}
            module = SimpleNamespace(
                Tensor=FakeTensor,
                nn=SimpleNamespace(Parameter=FakeParameter),
                strided="strided",
                autograd=SimpleNamespace(forward_ad=self.forward_ad),
                is_grad_enabled=lambda: self.grad,
                empty_strided=self._empty_strided,
                empty=lambda size: FakeTensor(allocate((size,), np.float32), -1),
                _C=SimpleNamespace(
                    _cuda_getCurrentRawStream=lambda device: self.stream + device,
                    _dynamo=SimpleNamespace(guards=SimpleNamespace(TensorGuards=FakeGuards)),
                ),
                **names,
            )
            self.kind: Any = TorchArrays(module, self.layer)
        else:
            array_type = type("FakeArray", (FakeArray,), {"layer": self.layer})
            self._array: Any = array_type
            module = SimpleNamespace(
                ndarray=array_type,
                ascontiguousarray=lambda array: self.array(copied(array.host), array.data.device_id),
                cuda=SimpleNamespace(
                    get_current_stream=lambda device: SimpleNamespace(ptr=self.stream + device), alloc=self._alloc
                ),
            )
            self.kind = CupyArrays(module, self.layer)

    def _alloc(self, size: int) -> SimpleNamespace:
        host = allocate((size,), np.uint8)
        return SimpleNamespace(ptr=int(host.ctypes.data), host=host)

    def _empty_strided(self, shape: Any, strides: Any, *, dtype: str, device: str) -> FakeTensor:
        assert device == "cuda", "the current device"
        tensor = FakeTensor(allocate(shape, dtype.removeprefix("torch.")), self.layer.current)
        assert tensor.stride() == strides
        return tensor

    @property
    def allocations(self) -> int:
        return allocations

    def array(self, host: Any, device: int = 0, **more: Any) -> Any:
        """``host`` as an array of the library, with its strides, on ``device``."""
        return FakeTensor(host, device, **more) if self.name == "torch" else self._array(None, host=host, device=device)

    def random(self, *shape: int, seed: int = 0, dtype: Any = np.float16) -> Any:
        host = memory(shape, dtype)
        host[...] = np.random.default_rng(seed).standard_normal(shape)
        return self.array(host)


@pytest.fixture(params=["torch", "cupy"])
def fakes(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """Each fake library in turn, with an empty tuning database."""
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "tuned.db"))
    made = Fakes(request.param)
    _arrays.register(made.kind)
    yield made
    _arrays.unregister(made.kind)
