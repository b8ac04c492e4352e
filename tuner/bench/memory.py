"""Device memory of a tuning run: inputs that all problems share, outputs to poison, references to keep."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from flashtune.codegen.gpu.cuda import cupy, runtime
from flashtune.codegen.plan.plan import Strides
from flashtune.codegen.problem.bits import Array
from flashtune.codegen.problem.problem import ITEM_BYTES, VECTOR_ALIGNMENT, Problem, Shape

from .inputs import random_values

CHUNK = 2**20 - 3
"""Elements that are random; longer inputs repeat them. Odd, so that rows of different blocks are not alike."""
POISON = 0xFF
"""Byte whose repetition is NaN in every floating-point dtype."""


class Arena:
    """Buffers by name that grow when more is asked for. All pointers are plain addresses."""

    def __init__(self) -> None:
        self._buffers: dict[str, Any] = {}

    def address(self, name: str, size: int) -> int:
        """Address of at least ``size`` bytes; their content is lost when the buffer has to grow."""
        self._grow(name, size)
        address: int = self._buffers[name].ptr
        return address

    def random(self, name: str, dtype: str, count: int, seed: int) -> int:
        """Address of at least ``count`` random numbers, which stay the same while the buffer does not grow."""
        item = ITEM_BYTES[dtype]
        label = f"{name}-{dtype}"
        if self._grow(label, count * item):
            address = self._buffers[label].ptr
            chunk = random_values(dtype, min(CHUNK, count), seed)
            upload(address, chunk)
            done = chunk.nbytes
            while done < count * item:
                size = min(done, count * item - done)
                runtime.memcpy(address + done, address, size, runtime.memcpyDeviceToDevice)
                done += size
            runtime.streamSynchronize(0)
        return self.address(label, count * item)

    def forget(self, *names: str) -> None:
        """Gives buffers up, so that :meth:`random` fills them anew. Nothing on a stream may use them any more."""
        for name in names:
            self._buffers.pop(name, None)

    @property
    def reusable_bytes(self) -> int:
        """Bytes in buffers that problems share."""
        return sum(each.mem.size for name, each in self._buffers.items() if not name.startswith("reference"))

    def _grow(self, name: str, size: int) -> bool:
        found = self._buffers.get(name)
        if found is not None and found.mem.size >= size:
            return False
        self._buffers.pop(name, None)  # the old one goes back to the pool first
        del found
        self._buffers[name] = cupy.cuda.alloc(max(size, 1))
        return True


def upload(address: int, values: Array) -> None:
    """Host to device. Complete on return, also for streams that don't wait for the default one."""
    runtime.memcpy(address, values.ctypes.data, values.nbytes, runtime.memcpyHostToDevice)
    runtime.streamSynchronize(0)


def download(address: int, like: Array) -> None:
    """Device to host, into ``like``."""
    runtime.memcpy(like.ctypes.data, address, like.nbytes, runtime.memcpyDeviceToHost)


def free_bytes() -> int:
    """Device memory that can be had: free for the driver, or unused in CuPy's pool."""
    free, _ = runtime.memGetInfo()
    return int(free) + int(cupy.get_default_memory_pool().free_bytes())


def skew(problem: Problem) -> int:
    """Bytes from a 16-byte boundary at which tensors of ``problem`` start, so that its alignment class is met."""
    return 0 if problem.alignment == VECTOR_ALIGNMENT else problem.alignment


class Elements(NamedTuple):
    """How many elements the tensors of a problem have."""

    q: int
    k: int
    v: int
    out: int
    lse: int


def elements(problem: Problem) -> Elements:
    q, k, v, out = map(math.prod, problem.shapes)
    return Elements(q, k, v, out, lse=problem.batch * problem.seqlen_q * problem.num_heads)


def contiguous(problem: Problem) -> tuple[Strides, Strides, Strides, Strides]:
    """Strides of contiguous (batch, seqlen, heads, columns) tensors q, k, v, out."""

    def of(shape: Shape) -> Strides:
        return (math.prod(shape[1:]), math.prod(shape[2:]), shape[3])

    q, k, v, out = map(of, problem.shapes)
    return q, k, v, out
