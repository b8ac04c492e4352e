"""A producer and a consumer warpgroup with a ring of tiles: toys/ring.cu.jinja, what it is given, the right result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sm90_toys import BARRIERS, ELEMENTS, one_step, text_of

from flashtune.codegen.plan.tensor_map import TensorMap

Array = NDArray[Any]

RING = text_of("ring")


@dataclass(frozen=True)
class Ring:
    """A (rows x columns) times B (columns x 64); ``rows`` and ``columns`` need not be multiples of 64."""

    stages: int = 2
    rows: int = 64
    columns: int = 300
    dtype: str = "bfloat16"

    @property
    def tiles(self) -> int:
        return -(-self.columns // 64)

    @property
    def blocks(self) -> int:
        return -(-self.rows // 64)

    @property
    def padded(self) -> int:
        """Columns of A in memory: rows start on a multiple of 16 bytes."""
        return -(-self.columns // 8) * 8

    @property
    def shared_memory(self) -> int:
        return BARRIERS + self.stages * 2 * 64 * 64 * 2

    def names(self) -> dict[str, object]:
        return {"stages": self.stages, "element": ELEMENTS[self.dtype], **one_step(64)}

    def maps(self) -> dict[str, TensorMap]:
        def matrix(lines: int, columns: int, pitch: int) -> TensorMap:
            size = lines * pitch * 2
            return TensorMap(
                0, self.dtype, (columns, lines, 1, 1), (2 * pitch, size, size), (64, 64, 1, 1), swizzle=128
            )

        return {
            "a": matrix(self.rows, self.columns, self.padded),
            "b": matrix(self.columns, 64, 64),
            "c": matrix(self.rows, 64, 64),
        }

    def inputs(self, seed: int = 2) -> tuple[Array, Array]:
        """float32 numbers that float16 and bfloat16 hold; what no tensor owns in A is NaN."""
        draw = np.random.default_rng(seed)
        a = np.full((self.rows, self.padded), np.nan, np.float32)
        a[:, : self.columns] = draw.integers(-8, 9, (self.rows, self.columns)) / 8
        b = draw.integers(-8, 9, (self.columns, 64)).astype(np.float32) / 8
        return a, b

    def product(self, a: Array, b: Array) -> Array:
        """float64."""
        return a[:, : self.columns].astype(np.float64) @ b.astype(np.float64)


RINGS = {
    "two stages": Ring(),
    "three stages, two blocks, the last cut": Ring(stages=3, rows=100, columns=520, dtype="float16"),
    "fewer tiles than stages": Ring(stages=3, columns=60),
}
