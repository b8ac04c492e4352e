"""Small kernels for sm_90, in toys/: the same texts run on the CPU (emulator) and on a GPU, to the same expectations.

No test module: tests import it, those in other folders by its path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from flashtune.codegen.emulator import run_kernel
from flashtune.codegen.emulator.launch import Argument
from flashtune.codegen.reference import rounded
from flashtune.codegen.render import LineMarkingLoader, Source, environment
from flashtune.codegen.tensor_map import TensorMap

Array = NDArray[Any]

ENTRY = "toy"
MAIN = "toy.cu.jinja"
ELEMENTS = {"float16": "Half", "bfloat16": "BFloat16"}
BARRIERS = 1024
"""Bytes before the tiles, for mbarriers: tiles start on a multiple of 1024."""

HEAD = """
//% include "lib/types.cuh"
//% include "lib/ptx.cuh"
//% include "lib/ptx_sm90.cuh"
//% include "lib/descriptor.cuh"
//% include "lib/wgmma.cuh.jinja"
using Element = {{element}};
"""
"""What all begin with."""


def one_step(*widths: int) -> dict[str, object]:
    """Names of lib/wgmma.cuh.jinja for products of N in ``widths``, a step at a time."""
    shapes = [(n, 1) for n in widths]
    return {"shared_products": shapes, "register_products": shapes}


def text_of(name: str) -> str:
    return (Path(__file__).parent / "toys" / f"{name}.cu.jinja").read_text(encoding="utf-8")


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


def device_source(text: str, names: Mapping[str, object]) -> Source:
    """What NVRTC compiles."""
    inner = environment().loader
    assert inner is not None
    own = LineMarkingLoader(jinja2.DictLoader({MAIN: text}))
    jinja = environment().overlay(loader=jinja2.ChoiceLoader([own, inner]))
    return Source("toy.cu", jinja.get_template(MAIN).render(names))


def run_toy(
    text: str, names: Mapping[str, object], arguments: Sequence[Argument], threads: int, shared: int, **options: Any
) -> dict[str, Array]:
    """On the CPU: what the outputs hold, by name."""
    return run_kernel(
        MAIN, {MAIN: text}, names, ENTRY, arguments, threads=threads, shared_memory=shared, timeout=30, **options
    )
