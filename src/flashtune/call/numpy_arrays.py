"""NumPy arrays: the tiled online softmax on the CPU, the algorithm that the kernels run."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashtune.codegen.problem.reference import tiled_attention
from flashtune.errors import InvalidInput, InvalidType

from .arrays import ArrayFacts, ArrayKind, Options
from .check import check_call, check_overlap


class NumpyArrays(ArrayKind):
    name = "NumPy array"
    types = (np.ndarray,)

    def call(self, q: Any, k: Any, v: Any, out: Any, options: Options) -> Any:
        facts = [self.facts(name, array) for name, array in (("q", q), ("k", k), ("v", v))]
        out_facts = None if out is None else self.facts("out", out)
        call = check_call(facts[0], facts[1], facts[2], out_facts, options)
        if call.config is not None:
            raise InvalidInput(f"config={call.config} picks a GPU kernel; NumPy arrays run on the CPU: leave it out")
        if out_facts is not None:
            q_address, k_address, v_address = (each.address for each in facts)
            check_overlap(call.extents, q_address, k_address, v_address, out_facts.address)
        heads_first = options[3] == "bhsd"
        if heads_first:
            q, k, v = (array.swapaxes(1, 2) for array in (q, k, v))
        result, lse = tiled_attention(q, k, v, causal=call.problem.causal, scale=call.scale)
        if heads_first:
            result = result.swapaxes(1, 2)
        if out is None:
            out = np.ascontiguousarray(result)
        else:
            out[...] = result
        return (out, lse) if call.return_lse else out

    def refusal(self, kind: type) -> str | None:
        if issubclass(kind, np.ma.MaskedArray):
            return "masked arrays are not supported, their mask would be ignored"
        return super().refusal(kind)

    def facts(self, name: str, array: Any) -> ArrayFacts:
        if not self.owns(array):
            kind = type(array)
            raise InvalidType(f"{name} is a {kind.__module__}.{kind.__qualname__}; with q, it must be a {self.name}")
        if reason := self.refusal(type(array)):
            raise InvalidType(f"{name}: {reason}")
        item = array.dtype.itemsize
        if not array.dtype.isnative or any(stride % max(item, 1) for stride in array.strides):
            raise InvalidType(
                f"{name} has dtype {array.dtype.str} and strides {array.strides} in bytes: the byte order must be that "
                f"of this machine, and each stride a multiple of {item}"
            )
        return ArrayFacts(
            name=name,
            shape=array.shape,
            strides=tuple(stride // max(item, 1) for stride in array.strides),
            dtype=array.dtype.name,
            item_bytes=item,
            device="cpu",
            address=array.ctypes.data,
            writable=array.flags.writeable,
        )


def make_kind() -> NumpyArrays:
    return NumpyArrays()
