"""Array libraries without a GPU: tensors and arrays lie in host memory, and fake_layer.py is their device.

The fakes enter by the doors that flashtune offers: `TorchArrays` and `CupyArrays` take the array module and the device
layer. So the real validation, memo and warm paths run, and a launch reads whatever pointers and strides they bound.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_layer import FakeLayer, memory, own

from flashtune.call.cupy_arrays import CupyArrays
from flashtune.call.torch_arrays import TorchArrays


class FakeTensor:
    """What flashtune reads of a torch tensor."""

    layout = "strided"
    tangent = None
    is_nested = False
    freed = False
    """Whether its storage is of size 0 by now, as sharded training leaves parameters."""

    def __init__(self, host: Any, device: int = 0, requires_grad: bool = False) -> None:
        self.host, self.index, self.requires_grad = host, device, requires_grad
        own(self, host, device)

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
        return int(self.host.ctypes.data) if self.host.size and not self.freed else 0

    def element_size(self) -> int:
        return int(self.host.itemsize)

    def new_empty(self, shape: tuple[int, ...], *, dtype: str) -> FakeTensor:
        return FakeTensor(allocate(shape, numpy_name(dtype)), self.index)

    def resolve_neg(self) -> FakeTensor:
        return self

    def contiguous(self) -> FakeTensor:
        return FakeTensor(copied(self.host), self.index)


class FakeParameter(FakeTensor): ...


class FakeAcceleratorError(RuntimeError):
    """What torch raises where CUDA refuses something."""

    def __init__(self, error_code: int) -> None:
        super().__init__(f"CUDA error: {error_code}\nCompile with TORCH_USE_CUDA_DSA to enable assertions.\n")
        self.error_code = error_code


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

    layer: Any

    def __init__(self, shape: Any, dtype: Any = None, *, host: Any = None, device: int | None = None) -> None:
        self.host = allocate(shape, dtype) if host is None else host
        index = self.layer.current if device is None else device
        self.data = SimpleNamespace(ptr=int(self.host.ctypes.data) if self.host.size else 0, device_id=index)
        own(self, self.host, index)

    shape = property(lambda self: self.host.shape)
    dtype = property(lambda self: self.host.dtype)
    strides = property(lambda self: self.host.strides)
    _c_contiguous = property(lambda self: self.host.flags.c_contiguous)


class FakeMemory:
    """What CuPy's allocator gives."""

    def __init__(self, host: Any, device: int) -> None:
        self.host, self.ptr, self.device_id = host, int(host.ctypes.data), device
        own(self, host, device)


def numpy_name(dtype: str) -> str:
    """Of a dtype of torch, which takes no other."""
    library, _, name = dtype.partition(".")
    assert library == "torch"
    return name


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
    """One fake library and its device, which may be another than a `FakeLayer`."""

    def __init__(self, name: str, layer: Any = None) -> None:
        self.name = name
        self.layer: Any = layer or FakeLayer()
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
                AcceleratorError=FakeAcceleratorError,
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

    def _alloc(self, size: int) -> FakeMemory:
        return FakeMemory(allocate((size,), np.uint8), self.layer.current)

    def _empty_strided(self, shape: Any, strides: Any, *, dtype: str, device: str) -> FakeTensor:
        assert device == "cuda", "the current device"
        tensor = FakeTensor(allocate(shape, numpy_name(dtype)), self.layer.current)
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
