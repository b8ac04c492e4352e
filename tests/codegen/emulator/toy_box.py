"""A tile loaded and stored anywhere in a tensor: toys/box.cu.jinja, what it is given, the right result, and boxes that
the hardware refuses or stores elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sm90_toys import one_step, text_of

from flashtune.codegen.plan.tensor_map import TensorMap

Array = NDArray[Any]

BOX = text_of("box")


@dataclass(frozen=True)
class Box:
    """A load at ``at`` of a tensor ``dims`` (16-bit numbers 1, 2, ...), and a store of it to another one at ``to``."""

    dims: tuple[int, ...]
    box: tuple[int, ...]
    at: tuple[int, ...]
    to: tuple[int, ...]
    swizzle: int = 0
    fill: str = "zero"
    gap: int = 0
    """Elements between lines in memory beyond what they hold."""

    shared_memory: int = field(default=8192, init=False)

    def names(self) -> dict[str, object]:
        rank = len(self.dims)
        loaded, stored = (", ".join(f"{name}{axis}" for axis in range(rank)) for name in "ct")
        return {
            "element": "Half",
            **one_step(),
            "load": f"tma_load_{rank}d(tile, &map, bar, {loaded})",
            "store": f"tma_store_{rank}d(&target, tile, {stored})",
        }

    def numbers(self) -> list[np.int32]:
        """The arguments behind the pointers."""
        return [np.int32(each) for each in (*(*self.at, 0)[:5], *(*self.to, 0)[:5], self.map().box_bytes)]

    @property
    def pitches(self) -> tuple[int, ...]:
        """Elements in memory between neighbours, by dimension."""
        line = -(-(self.dims[0] + self.gap) // 8) * 8
        return (1, *(line * math.prod(self.dims[1:axis]) for axis in range(1, len(self.dims))))

    def map(self) -> TensorMap:
        strides = tuple(2 * pitch for pitch in self.pitches[1:])
        return TensorMap(0, "float16", self.dims, strides, self.box, swizzle=self.swizzle, fill=self.fill)

    def memory(self) -> Array:
        """Bits, 60000 in gaps."""
        memory = np.full(self.pitches[-1] * self.dims[-1], 60000, np.uint16)
        self.view(memory)[...] = np.arange(1, math.prod(self.dims) + 1).reshape(self.dims[::-1])
        return memory

    def target(self) -> Array:
        """What the store meets: 50000, and 60000 in gaps."""
        memory = self.memory()
        self.view(memory)[...] = 50000
        return memory

    def view(self, memory: Array) -> Array:
        """Indices from the outermost dimension on."""
        strides = [memory.itemsize * pitch for pitch in self.pitches[::-1]]
        return np.lib.stride_tricks.as_strided(memory, self.dims[::-1], strides)

    def inside(self, corner: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Indices into the box, and into the tensor with the box at ``corner``, of what lies in both."""
        for index in np.ndindex(*self.box[::-1]):
            place = tuple(start + step for start, step in zip(corner[::-1], index, strict=True))
            if all(0 <= each < dim for each, dim in zip(place, self.dims[::-1], strict=True)):
                yield index, place

    def loaded(self) -> Array:
        """The box, bits; -1 where any NaN may be."""
        lines = np.full(self.box[::-1], 0 if self.fill == "zero" else -1, np.int64)
        tensor = self.view(self.memory())
        for index, place in self.inside(self.at):
            lines[index] = tensor[place]
        return lines

    def expected(self) -> Array:
        """The same as it lies in shared memory."""
        units = self.loaded().reshape(-1, 8)
        found = np.empty_like(units)
        for unit, values in enumerate(units):
            address = 16 * unit
            found[(address ^ ((address >> 7) & (max(self.swizzle, 16) // 16 - 1)) << 4) // 16] = values
        return found.reshape(-1)

    def stored(self) -> Array:
        """What the second tensor's memory holds at the end, bits; -1 where any NaN may be."""
        memory = self.target().astype(np.int64)
        tensor, lines = self.view(memory), self.loaded()
        for index, place in self.inside(self.to):
            tensor[place] = lines[index]
        return memory

    def outcome(self, seen: Array, second: Array) -> str:
        """ "right", or what of a run's results is not."""
        if wrong := differing(seen, self.expected()):
            return f"shared memory is wrong at {wrong}"
        if not (wrong := differing(second, self.stored())):
            return "right"
        gaps = np.full(second.shape, True)
        self.view(gaps)[...] = False
        return f"the store wrote {'beyond rows' if gaps[wrong].all() else 'wrongly'}, at {wrong}"


def differing(found: Array, expected: Array) -> list[int]:
    """Where; -1 is any NaN of float16."""
    fits = np.where(expected < 0, (found & 0x7FFF) > 0x7C00, found == expected)
    return [int(each) for each in np.flatnonzero(~fits)]


BOXES = {
    "inside": Box((16, 5, 3, 2), (8, 3, 2, 2), (8, 1, 1, 0), (0, 2, 0, 0)),
    "over the far edges": Box((16, 5, 3, 2), (16, 3, 2, 2), (8, 3, 2, 1), (8, 4, 1, 1)),
    "over the near edges": Box((16, 5, 3, 2), (16, 4, 2, 2), (-8, -2, -1, -1), (8, 1, 1, 1)),
    "from rows that end within 16 bytes": Box((12, 5, 3, 2), (8, 3, 2, 2), (8, 3, 2, 1), (0, 3, 2, 1)),
    "beyond the innermost": Box((16, 5, 3, 2), (8, 3, 2, 1), (16, 0, 0, 0), (24, 0, 0, 0)),
    "beyond the outermost": Box((16, 5, 3, 2), (8, 3, 2, 1), (0, 0, 0, 2), (0, 0, 0, 3)),
    "beyond in the middle": Box((16, 5, 3, 2), (8, 3, 2, 1), (0, 0, 3, 0), (0, 5, 0, 0)),
    "before the tensor": Box((16, 5, 3, 2), (8, 3, 2, 1), (-8, -3, 0, 0), (0, 1, 1, 1)),
    "five dimensions, gaps": Box((16, 5, 3, 2, 3), (8, 3, 1, 2, 2), (8, -1, 2, 1, 2), (8, 4, 2, 1, 1), gap=11),
    "swizzle of 32 bytes": Box((40, 40, 1, 2), (16, 20, 1, 2), (32, -2, 0, 0), (32, 30, 0, 0), swizzle=32),
    "swizzle of 64 bytes": Box((64, 40, 1, 2), (32, 20, 1, 2), (40, 25, 0, 1), (48, 25, 0, 0), swizzle=64),
    "swizzle of 128 bytes": Box((80, 40, 1, 1), (64, 20, 1, 1), (-8, 21, 0, 0), (24, 21, 0, 0), swizzle=128),
    "NaN outside": Box((40, 10, 1, 1), (32, 12, 1, 1), (-8, -1, 0, 0), (16, 0, 0, 0), fill="nan"),
}


@dataclass(frozen=True)
class Misuse:
    """A box that the emulator refuses, and what a device does with it: as `Box.outcome` or the error has it."""

    box: Box
    report: str
    device: str


_MISPLACED = "whose innermost coordinate is {}: {} bytes, not a multiple of 16"
MISUSES = {
    "a load off 16 bytes": Misuse(
        Box((32, 5, 1, 1), (8, 3, 1, 1), (12, 0, 0, 0), (0, 0, 0, 0)),
        "a TMA load " + _MISPLACED.format(12, 24),
        "cudaErrorIllegalInstruction",
    ),
    "a load off 16 bytes below zero": Misuse(
        Box((32, 5, 1, 1), (8, 3, 1, 1), (-3, 0, 0, 0), (0, 0, 0, 0)),
        "a TMA load " + _MISPLACED.format(-3, -6),
        "cudaErrorIllegalInstruction",
    ),
    "a store off 16 bytes": Misuse(
        Box((32, 5, 1, 1), (8, 3, 1, 1), (0, 0, 0, 0), (4, 0, 0, 0)),
        "a TMA store " + _MISPLACED.format(4, 8),
        "cudaErrorIllegalInstruction",
    ),
    "a store to rows that end within 16 bytes": Misuse(
        Box((12, 5, 3, 2), (8, 3, 2, 2), (8, 3, 2, 1), (8, 3, 2, 1)),
        "a TMA store over the end of rows of 24 bytes: hardware stores 16 bytes at a time, so 8 beyond the row",
        "the store wrote beyond rows",
    ),
    "a store below zero, innermost": Misuse(
        Box((32, 5, 1, 1), (16, 3, 1, 1), (0, 0, 0, 0), (-8, 0, 0, 0)),
        "a TMA store to coordinate -8 of dimension 0",
        "cudaErrorIllegalInstruction",
    ),
    "a store below zero": Misuse(
        Box((32, 5, 3, 1), (16, 3, 2, 1), (0, 0, 0, 0), (0, -1, 0, 0)),
        "a TMA store to coordinate -1 of dimension 1",
        "cudaErrorIllegalInstruction",
    ),
}
