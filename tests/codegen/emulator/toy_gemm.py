"""A product of two matrices, tiles through TMA both ways: toys/gemm.cu.jinja, what it is given, the right result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sm90_toys import BARRIERS, ELEMENTS, one_step, text_of

from flashtune.codegen.plan.tensor_map import TensorMap

Array = NDArray[Any]

GEMM = text_of("gemm")


@dataclass(frozen=True)
class Gemm:
    """C = A B by toys/gemm.cu.jinja; a row of 16 bytes is no swizzle."""

    n: int = 64
    k: int = 64
    a_row: int = 128
    b_row: int = 128
    trans_a: bool = False
    trans_b: bool = False
    a_registers: bool = False
    dtype: str = "float16"

    def names(self) -> dict[str, object]:
        flags = {each: str(getattr(self, each)).lower() for each in ("trans_a", "trans_b", "a_registers")}
        return {
            "n": self.n,
            "k": self.k,
            "a_row": self.a_row,
            "b_row": self.b_row,
            "element": ELEMENTS[self.dtype],
            **one_step(self.n),
            **flags,
        }

    @property
    def shared_memory(self) -> int:
        return BARRIERS + 128 * self.k + -(-2 * self.n * self.k // 1024) * 1024 + 256 * self.n

    @property
    def a_lines(self) -> int:
        return self.k if self.trans_a else 64

    @property
    def b_lines(self) -> int:
        return self.k if self.trans_b else self.n

    def maps(self) -> dict[str, TensorMap]:
        """Of A, B and C as stored, addresses 0."""
        return {
            "a": chunked(self.dtype, self.a_lines, 64 if self.trans_a else self.k, self.a_row),
            "b": chunked(self.dtype, self.b_lines, self.n if self.trans_b else self.k, self.b_row),
            "c": chunked("float32", 64, self.n, 16),
        }


def chunked(dtype: str, lines: int, columns: int, row: int) -> TensorMap:
    """A matrix of ``lines`` times ``columns`` as chunks of ``row`` bytes of each line."""
    item = 4 if dtype == "float32" else 2
    wide = row // item
    size = lines * columns * item
    return TensorMap(
        address=0,
        dtype=dtype,
        dims=(wide, lines, columns // wide, 1, 1),
        strides=(columns * item, row, size, size),
        box=(wide, lines, columns // wide, 1, 1),
        swizzle=0 if row == 16 else row,
    )


GEMMS = {
    "128 B, both K-major": Gemm(),
    "128 B, two chunks of K, wide": Gemm(n=128, k=128, dtype="bfloat16"),
    "64 B, both K-major": Gemm(n=24, a_row=64, b_row=64, dtype="bfloat16"),
    "32 B, both K-major": Gemm(n=40, a_row=32, b_row=32),
    "no swizzle, both K-major": Gemm(n=16, a_row=16, b_row=16),
    "128 B, B transposed": Gemm(n=64, trans_b=True),
    "128 B, B transposed, several chunks": Gemm(n=192, k=32, a_row=64, trans_b=True, dtype="bfloat16"),
    "64 B, B transposed": Gemm(n=96, b_row=64, trans_b=True),
    "32 B, B transposed": Gemm(n=48, b_row=32, trans_b=True),
    "no swizzle, B transposed": Gemm(n=40, a_row=16, b_row=16, trans_b=True, dtype="bfloat16"),
    "128 B, A transposed": Gemm(n=8, trans_a=True),
    "64 B, both transposed": Gemm(n=32, a_row=64, b_row=64, trans_a=True, trans_b=True, dtype="bfloat16"),
    "32 B, A transposed": Gemm(n=72, a_row=32, trans_a=True),
    "no swizzle, A transposed": Gemm(n=56, a_row=16, trans_a=True),
    "A in registers": Gemm(n=88, a_registers=True),
    "A in registers, B transposed": Gemm(n=256, a_registers=True, trans_b=True, dtype="bfloat16"),
}


def gemm_inputs(gemm: Gemm, seed: int = 1) -> tuple[Array, Array]:
    """A and B as stored: float32 numbers that float16 and bfloat16 hold."""
    draw = np.random.default_rng(seed)
    shapes = ((gemm.a_lines, 64 if gemm.trans_a else gemm.k), (gemm.b_lines, gemm.n if gemm.trans_b else gemm.k))
    a, b = (draw.integers(-127, 128, shape).astype(np.float32) / 32 for shape in shapes)
    return a, b


def gemm_product(gemm: Gemm, a: Array, b: Array) -> Array:
    """float64."""
    left = a.T if gemm.trans_a else a
    right = b if gemm.trans_b else b.T
    return left.astype(np.float64) @ right.astype(np.float64)
