"""Tensors as they lie in memory: NumPy arrays of any strides to bytes and back."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashtune.codegen.plan.plan import Plan, Strides
from flashtune.codegen.plan.tensor_map import MAP_BYTES, TensorMap
from flashtune.codegen.problem.bits import to_memory
from flashtune.codegen.problem.problem import ITEM_BYTES, VECTOR_ALIGNMENT, Problem
from flashtune.errors import InvalidInput

Array = NDArray[Any]

_MEMORY: dict[str, type[np.generic]] = {
    "float16": np.uint16, "bfloat16": np.uint16, "float32": np.float32, "float64": np.float64
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One argument of a kernel.

    ``memory`` is all between its first and its last element, elements as they lie in memory (16-bit floats as bits);
    what belongs to no element is all ones: NaN. ``begin`` is the index of element (0, 0, ...) in it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    memory: Array
    begin: int
    writable: bool = False

    @property
    def launch_strides(self) -> Strides:
        """(batch, row, head)."""
        batch, row, head, _ = self.strides
        return batch, row, head

    def view(self, memory: Array) -> Array:
        """The elements in ``memory``, which is laid out as this tensor's."""
        item = memory.itemsize
        return np.lib.stride_tricks.as_strided(
            memory[self.begin :] if memory.size else memory, self.shape, [stride * item for stride in self.strides]
        )

    def values(self, memory: Array) -> Array:
        """What the elements in ``memory`` stand for: float32, or float64."""
        found = np.ascontiguousarray(self.view(memory))
        if self.dtype == "float16":
            return found.view(np.float16).astype(np.float32)
        if self.dtype == "bfloat16":
            return (found.astype(np.uint32) << 16).view(np.float32)
        return found

    def gaps(self, memory: Array) -> int:
        """How many bytes of ``memory`` that belong to no element have been written."""
        touched = memory.view(np.uint8).copy()
        item = memory.itemsize
        owned = np.zeros(memory.size, bool)
        self.view(owned)[...] = True
        return int((touched.reshape(-1, item)[~owned] != 0xFF).sum()) if memory.size else 0


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """A tensor map as an argument. Its ``address`` counts bytes from element (0, 0, ...) of ``tensor``."""

    tensor: Tensor
    map: TensorMap


_MAP = struct.Struct("<2Q9Q5H4B")
_MAP_MAGIC = 0x70616D726F736E74
MAP_ADDRESS = 8
"""Byte of an encoded map where the runtime writes the address."""


def encode_for_emulator(described: TensorMap) -> bytes:
    """What tma.h reads in place of the driver's 128 bytes. Raises :class:`InvalidInput` for what is not modelled."""
    row = described.box[0] * described.item_bytes
    if described.swizzle and row != described.swizzle:
        raise InvalidInput(
            f"{described}: the emulator needs rows of {described.swizzle} bytes for this swizzle, not {row}"
        )
    lacking = 5 - described.rank
    dims = (*described.dims, *[1] * lacking)
    strides = (*described.strides, *[0] * lacking)
    box = (*described.box, *[1] * lacking)
    fill = 0xFF if described.fill == "nan" else 0
    encoded = _MAP.pack(
        _MAP_MAGIC, 0, *dims, *strides, *box, described.rank, described.item_bytes, described.swizzle, fill
    )
    return encoded.ljust(MAP_BYTES, b"\0")


def input_tensor(name: str, array: Array, problem: Problem, shape: tuple[int, ...]) -> Tensor:
    """``array`` as the kernel gets it: with the strides that it has, its values rounded to the problem's dtype.

    Raises :class:`InvalidInput` for another shape, and for strides that the problem's alignment excludes.
    """
    if array.shape != shape:
        raise InvalidInput(f"{name} has shape {array.shape}, the problem needs {shape}")
    item = array.itemsize
    strides = tuple(stride // item for stride in array.strides)
    values = bits_of(array, problem.dtype, name)
    return _laid_out(name, problem.dtype, shape, strides, problem.alignment, values)


def plain_tensor(name: str, array: Array, dtype: str) -> Tensor:
    """``array``, rounded to ``dtype``, contiguous, as an input of any shape."""
    values = bits_of(np.ascontiguousarray(array), dtype, name)
    strides = tuple(stride // values.itemsize for stride in values.strides)
    return _laid_out(name, dtype, array.shape, strides, 0, values)


def output_tensor(
    name: str, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, alignment: int = 0
) -> Tensor:
    """Memory for a result, all ones. Default strides are those of a contiguous array."""
    if strides is None:
        strides = tuple(int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape)))
    return _laid_out(name, dtype, shape, strides, alignment, None)


def workspace_tensor(plan: Plan) -> Tensor:
    """Memory of a launch for itself: zeros where the plan wants them, all ones beyond."""
    tensor = output_tensor("workspace", "float32", (plan.workspace_bytes // 4,))
    tensor.memory[: plan.zeroed_bytes // 4] = 0
    return tensor


def bits_of(array: Array, dtype: str, name: str = "the array") -> Array:
    """``array`` as elements of ``dtype`` in memory. 16-bit floats may come as bits: uint16 or ml_dtypes' bfloat16."""
    given = array.dtype.name
    if dtype in ("float16", "bfloat16") and given in ("uint16", dtype):
        return array.view(np.uint16)
    if given not in ("float32", "float64"):
        raise InvalidInput(f"{name} has dtype {given}; {dtype} comes as {dtype}, float32 or float64 (uint16: bits)")
    with np.errstate(over="ignore", invalid="ignore"):
        return to_memory(array.astype(np.float32), dtype)


def _laid_out(
    name: str, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], alignment: int, values: Array | None
) -> Tensor:
    item = ITEM_BYTES[dtype]
    if len(strides) != len(shape):
        raise InvalidInput(f"{name} has {len(shape)} dimensions and {len(strides)} strides: {strides}")
    empty = 0 in shape
    used = [stride for stride, length in zip(strides[:-1], shape[:-1], strict=True) if length > 1]
    if shape[-1] > 1 and strides[-1] != 1 and not empty:
        raise InvalidInput(f"{name} has strides {strides}: the last must be 1")
    if alignment == VECTOR_ALIGNMENT and any(stride * item % alignment for stride in used) and not empty:
        raise InvalidInput(f"{name} has strides {strides}: alignment=16 needs multiples of {alignment // item}")
    steps = [stride * (length - 1) for stride, length in zip(strides, shape, strict=True)]
    begin = 0 if empty else -sum(step for step in steps if step < 0)
    size = 0 if empty else begin + sum(step for step in steps if step > 0) + 1
    memory = np.full(size * item, 0xFF, np.uint8).view(_MEMORY[dtype])
    tensor = Tensor(name, dtype, shape, strides, memory, begin, writable=values is None)
    if values is not None and size:
        tensor.view(memory)[...] = values
    return tensor
