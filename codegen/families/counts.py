"""What one launch does, in counts that `model` turns into time. Families know the counts, the model knows the chips."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.problem.problem import Problem

Array = NDArray[np.int64]
Bound = Literal["tensor", "alu", "shared", "memory", "latency"]
"""What a kernel's time is mostly due to."""
MOST_TILES = 4096
"""Tiles of a head that are counted one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Counts for one config and problem. A *step* is one thread block handling one block of keys.

    Counts are of what is executed, so padded rows, keys and columns count in full.
    """

    tiles: int
    """Thread blocks of the launch."""
    steps: float
    """Mean steps of a tile; causal tiles skip the key blocks that they can't see."""
    longest: int
    """Steps of the tile with the most."""
    flops: int
    """Per step: operations of the two matrix products."""
    flops_clock: float
    """Matrix-product operations that one SM sustains per clock in this family's inner loop, nothing else binding."""
    tensor: bool
    """Whether the matrix products run on tensor cores; else they share the float32 pipe with ``alu``."""
    exponentials: int
    """Per step."""
    alu: int
    """Per step: other float32 and integer operations, per lane."""
    shared_bytes: int
    """Per step: bytes that warps read from and write to shared memory."""
    step_bytes: int
    """Per step: bytes of K and V asked of the L2 cache."""
    tile_bytes: int
    """Per tile: bytes of Q in and output out."""
    stages: int
    """Blocks of K (and of V) in shared memory at once. With 1, K is loaded while V is used and V while K is; 0 means
    that loads are waited for at once."""
    masked: float = 0.0
    """Mean steps of a tile whose keys not every row sees: they do what follows beside the rest."""
    masked_alu: int = 0
    """Per masked step: further operations, per lane."""
    masked_shared_bytes: int = 0
    """Per masked step: further bytes through shared memory."""
    registers: int = 0
    """Per thread, as the compiler is expected to give them; 0: as `Resources` estimates."""
    parts: int = 1
    """Thread blocks that share the keys of a tile; the last of them adds up what all have left."""
    spill_bytes: int = 0
    """Per thread, stores and loads: what the compiler is expected to spill."""


@functools.lru_cache(maxsize=4096)
def walk(problem: Problem, block_m: int, block_n: int) -> tuple[float, int]:
    """Key blocks that a tile of ``block_m`` rows visits: (mean over the tiles of one head, most of any tile)."""
    visited = _blocks(*problem.mask.seen_by_any(*_tiles(problem, block_m)), block_n)
    last = _blocks(*problem.mask.seen(np.array([problem.seqlen_q - 1])), block_n)
    return float(visited.mean()), int(max(visited.max(), last[0]))


@functools.lru_cache(maxsize=4096)
def masked(problem: Problem, block_m: int, block_n: int) -> float:
    """Mean over the tiles of one head: key blocks that a tile of ``block_m`` rows visits and not all its rows see."""
    tiles = _tiles(problem, block_m)
    visited = _blocks(*problem.mask.seen_by_any(*tiles), block_n)
    return float((visited - _whole_blocks(*problem.mask.seen_by_all(*tiles), block_n)).mean())


def _tiles(problem: Problem, block_m: int) -> tuple[Array, Array]:
    """First rows, and one past the last, of the tiles of one head; of a million tokens not every tile counts."""
    tiles = -(-problem.seqlen_q // block_m)
    begins = block_m * np.arange(0, tiles, max(1, tiles // MOST_TILES))
    return begins, np.minimum(begins + block_m, problem.seqlen_q)


def _blocks(begin: Array, end: Array, block_n: int) -> Array:
    """Numbers of blocks of keys that hold any of [begin, end)."""
    found: Array = np.where(end > begin, -(-end // block_n) - begin // block_n, 0)
    return found


def _whole_blocks(begin: Array, end: Array, block_n: int) -> Array:
    """Numbers of blocks of keys that lie in [begin, end)."""
    found: Array = np.maximum(0, end // block_n - -(-begin // block_n))
    return found


def tensor_flops_clock(gpu: Gpu) -> float:
    """16-bit tensor-core operations per clock and SM at the chip's full rate."""
    return gpu.tensor_tflops * 1e6 / (gpu.num_sms * gpu.clock_mhz)


def fp32_flops_clock(gpu: Gpu) -> float:
    """float32 operations per clock and SM; a multiply-add counts two."""
    return gpu.fp32_tflops * 1e6 / (gpu.num_sms * gpu.clock_mhz)
