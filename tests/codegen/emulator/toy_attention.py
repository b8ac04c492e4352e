"""Attention as a pipeline: toys/attention.cu.jinja, what it is given, the right result, and what rounding leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sm90_toys import BARRIERS, ELEMENTS, one_step, text_of

from flashtune.codegen.plan.tensor_map import TensorMap
from flashtune.codegen.problem.reference import rounded

Array = NDArray[Any]

ATTENTION = text_of("attention")


@dataclass(frozen=True)
class Attention:
    """Heads of dimension 64; ``blocks`` thread blocks share the tiles of 128 rows; (head, row, dimension) in memory."""

    stages: int = 2
    rows: int = 200
    keys: int = 320
    heads: int = 3
    blocks: int = 2
    dtype: str = "bfloat16"
    p_shared: bool = False

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // 128)

    @property
    def shared_memory(self) -> int:
        return BARRIERS + (2 + 2 * self.stages + 2 * self.p_shared) * 64 * 64 * 2

    def names(self) -> dict[str, object]:
        return {
            "stages": self.stages,
            "element": ELEMENTS[self.dtype],
            **one_step(64),
            "p_shared": str(self.p_shared).lower(),
        }

    def numbers(self) -> list[np.generic]:
        """The arguments behind the maps."""
        counts = (self.row_tiles, self.row_tiles * self.heads, self.keys // 64)
        return [*(np.int32(each) for each in counts), np.float32(math.log2(math.e) / 8)]

    def maps(self) -> dict[str, TensorMap]:
        def tensor(rows: int) -> TensorMap:
            dims, strides = (64, rows, self.heads, 1), (128, 128 * rows, 128 * rows * self.heads)
            return TensorMap(0, self.dtype, dims, strides, (64, 64, 1, 1), swizzle=128)

        return {"q": tensor(self.rows), "k": tensor(self.keys), "v": tensor(self.keys), "o": tensor(self.rows)}

    def inputs(self, seed: int = 3) -> tuple[Array, Array, Array]:
        """q, k, v as float32, rounded to the dtype."""
        draw = np.random.default_rng(seed)
        shapes = ((self.heads, self.rows, 64), (self.heads, self.keys, 64), (self.heads, self.keys, 64))
        q, k, v = (rounded(draw.standard_normal(shape, np.float32), self.dtype) for shape in shapes)
        return q, k, v

    def expected(self, q: Array, k: Array, v: Array) -> Array:
        """float64."""
        scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(1, 2) / 8
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.asarray(weights / weights.sum(-1, keepdims=True) @ v.astype(np.float64))

    def error(self, found: Array, expected: Array) -> float:
        """Relative, of all together."""
        return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


ATTENTIONS = {
    "two stages, tiles in turn": Attention(),
    "three stages, one block of keys": Attention(stages=3, rows=130, keys=64, heads=2, blocks=1, dtype="float16"),
    "three stages, one tile each": Attention(stages=3, rows=128, keys=512, heads=2),
    "P through shared memory": Attention(rows=128, keys=256, p_shared=True),
}
ATTENTION_ERROR = {"float16": 1e-3, "bfloat16": 6e-3}
"""What rounding of P and O leaves; a lost block of keys or rows gives more than a tenth."""
