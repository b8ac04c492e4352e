"""CuPy and torch as tests see them: data made by NumPy, placed between NaN on the device, and the judgement of results.

Nothing here launches a kernel of CuPy or torch: a lean install has neither cuBLAS nor cuRAND, and values cross over as
bits, so that bfloat16 needs no dtype on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from flashtune import attention
from flashtune.codegen.problem.tolerance import attention_tolerances

GUARD = 64
"""Elements of NaN before and behind each array."""


def encode(values: Any, dtype: str) -> Any:
    """``values`` rounded to ``dtype``, as bits."""
    single = np.asarray(values, np.float32)
    if dtype == "float32":
        return single.view(np.uint32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return single.astype(np.float16).view(np.uint16)
    bits = single.view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # ties to even
    return np.where(np.isnan(single), np.uint16(0x7FC0), nearest)


def decode(bits: Any, dtype: str) -> Any:
    """The values of ``bits`` in float32."""
    if dtype == "float32":
        return bits.view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass
class Placed:
    """A view of a device buffer. ``strides`` and ``offset`` count elements."""

    library: Library
    buffer: Any
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def array(self) -> Any:
        return self.library.view(self.buffer, self.offset, self.shape, self.strides)

    def all(self) -> Any:
        """The whole buffer in float32."""
        return decode(self.library.get(self.buffer), self.dtype)

    def host(self) -> Any:
        values = self.all()[self.offset :]
        steps = tuple(stride * values.itemsize for stride in self.strides)
        return np.lib.stride_tricks.as_strided(values, self.shape, steps).copy()

    def outside_is_nan(self) -> bool:
        values = self.all()
        inside = np.zeros(values.shape, bool)
        steps = tuple(stride * inside.itemsize for stride in self.strides)
        np.lib.stride_tricks.as_strided(inside[self.offset :], self.shape, steps)[...] = True
        return bool(np.isnan(values[~inside]).all())


class Library:
    """One array library on device 0."""

    SHAPES = ((1, 131, 197, 2, 1), (2, 77, 61, 3, 1), (1, 1, 259, 5, 5))
    """(batch, seqlen_q, seqlen_k, num_heads, num_heads_kv): longer keys, rows without keys, one query."""

    name: str
    encode = staticmethod(encode)

    def dtype(self, name: str) -> Any:
        raise NotImplementedError

    def put_bits(self, bits: Any, dtype: str) -> Any:
        """A 1-D device array of ``dtype`` from bits."""
        raise NotImplementedError

    def get(self, array: Any) -> Any:
        """The bits of a contiguous device array."""
        raise NotImplementedError

    def view(self, buffer: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        raise NotImplementedError

    def synchronize(self) -> None:
        raise NotImplementedError

    def put(self, values: Any, dtype: str, *, axes: tuple[int, ...] = (0, 1, 2, 3), shift: int = 0) -> Placed:
        """``values`` between NaN; in memory its dimensions lie in the order ``axes``, ``shift`` elements off."""
        in_memory = np.ascontiguousarray(np.transpose(values, axes))
        steps = [0] * in_memory.ndim
        for at, axis in enumerate(axes):
            steps[axis] = int(np.prod(in_memory.shape[at + 1 :]))
        before = np.full(GUARD + shift, np.nan)
        flat = np.concatenate([before, in_memory.reshape(-1), np.full(GUARD, np.nan)])
        buffer = self.put_bits(encode(flat, dtype), dtype)
        return Placed(self, buffer, dtype, GUARD + shift, tuple(values.shape), tuple(steps))

    def read(self, array: Any, dtype: str) -> Any:
        """A contiguous device array in float32."""
        return decode(self.get(array), dtype)

    def poison(self, count: int) -> None:
        """Fills the blocks that the library's pool hands out next with NaN."""
        blocks = [self.put_bits(encode(np.full(max(count, 1), np.nan), "float32"), "float32") for _ in range(3)]
        self.synchronize()
        del blocks

    def run(self, q: Any, k: Any, v: Any, dtype: str, **options: Any) -> tuple[Any, Any]:
        """(output, LSE) of ``attention()`` on host values, float32, through guarded and poisoned memory."""
        placed = [self.put(each, dtype) for each in (q, k, v)]
        out = self.put(np.full((*np.shape(q)[:3], np.shape(v)[3]), np.nan), dtype)
        batch, seqlen_q, heads = np.shape(q)[:3]
        self.poison(batch * seqlen_q * heads)
        _, lse = attention(*(each.array for each in placed), out=out.array, return_lse=True, **options)
        assert out.outside_is_nan(), f"wrote outside of the output: {self.name} {dtype} {np.shape(q)} {options}"
        return out.host(), self.read(lse, "float32")

    def problems_of(self, q: Any, k: Any, v: Any, dtype: str, **options: Any) -> list[str]:
        """What is wrong with the result of a call on host values; empty if nothing is."""
        out, lse = self.run(q, k, v, dtype, **options)
        return self.judge(out, lse, (q, k, v), dtype, str(options), **options)

    def judge(self, out: Any, lse: Any, values: Any, dtype: str, label: str, **options: Any) -> list[str]:
        """Judges a result for the ``values`` of q, k and v by the tolerance rule; empty if it is right."""
        q, k, v = (decode(encode(each, dtype), dtype) for each in values)
        masks = {name: options[name] for name in ("causal", "scale") if name in options}
        label = f"{self.name} {dtype} q{q.shape} k{k.shape} v{v.shape} {label}"
        allowed = attention_tolerances(q, k, v, dtype=dtype, **masks)
        verdicts = zip(("out", "LSE"), (allowed[0].judge(out), allowed[1].judge(lse)), strict=True)
        return [f"{label}: {what} {verdict}" for what, verdict in verdicts if not verdict]


class Cupy(Library):
    name = "cupy"

    def __init__(self) -> None:
        from flashtune.codegen.gpu.cuda import cupy

        self.cupy = cupy

    def dtype(self, name: str) -> Any:
        if name == "bfloat16":
            return pytest.importorskip("ml_dtypes", reason="bfloat16 in CuPy needs ml_dtypes").bfloat16
        return np.dtype(name)

    def put_bits(self, bits: Any, dtype: str) -> Any:
        return self.cupy.asarray(bits).view(self.dtype(dtype))

    def get(self, array: Any) -> Any:
        return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32).get()

    def view(self, buffer: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        steps = tuple(stride * buffer.dtype.itemsize for stride in strides)
        return self.cupy.lib.stride_tricks.as_strided(buffer[offset:], shape, steps)

    def synchronize(self) -> None:
        self.cupy.cuda.runtime.deviceSynchronize()


class Torch(Library):
    name = "torch"

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch", reason="torch is not installed")
        if not self.torch.cuda.is_available():
            pytest.skip("the torch installed has no CUDA")

    def dtype(self, name: str) -> Any:
        return getattr(self.torch, name)

    def put_bits(self, bits: Any, dtype: str) -> Any:
        signed = bits.view(np.int16 if bits.itemsize == 2 else np.int32)
        return self.torch.from_numpy(np.ascontiguousarray(signed)).cuda().view(self.dtype(dtype))

    def get(self, array: Any) -> Any:
        two = array.element_size() == 2
        signed = array.view(self.torch.int16 if two else self.torch.int32).cpu().numpy()
        return signed.view(np.uint16 if two else np.uint32)

    def view(self, buffer: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return buffer.as_strided(shape, strides, offset)

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()
