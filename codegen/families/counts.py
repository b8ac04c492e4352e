"""What one launch does, in counts that `model` turns into time. Families know the counts, the model knows the chips."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.problem.problem import Problem

Bound = Literal["tensor", "alu", "shared", "memory", "latency"]
"""What a kernel's time is mostly due to."""


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
    tiles = -(-problem.seqlen_q // block_m)
    blocks = -(-problem.seqlen_k // block_n)
    if not problem.causal:
        return float(blocks), blocks
    offset = problem.seqlen_k - problem.seqlen_q
    stride = max(1, tiles // 4096)  # a million-token sequence does not need every tile counted
    visited = [_visible(min((tile + 1) * block_m, problem.seqlen_q) + offset, block_n, blocks)
               for tile in range(0, tiles, stride)]  # fmt: skip
    last = _visible(problem.seqlen_k, block_n, blocks)
    return sum(visited) / len(visited), max(max(visited), last)


@functools.lru_cache(maxsize=4096)
def masked(problem: Problem, block_m: int, block_n: int) -> float:
    """Mean over the tiles of one head: key blocks that a tile of ``block_m`` rows visits and not all its rows see."""
    tiles = -(-problem.seqlen_q // block_m)
    blocks = -(-problem.seqlen_k // block_n)
    whole = problem.seqlen_k // block_n
    if not problem.causal:
        return float(blocks - whole)
    offset = problem.seqlen_k - problem.seqlen_q
    stride = max(1, tiles // 4096)
    counts = [_visible(min((tile + 1) * block_m, problem.seqlen_q) + offset, block_n, blocks)
              - min(whole, max(0, tile * block_m + 1 + offset) // block_n)
              for tile in range(0, tiles, stride)]  # fmt: skip
    return sum(counts) / len(counts)


def _visible(keys: int, block_n: int, blocks: int) -> int:
    return min(blocks, max(0, -(-keys // block_n)))


def tensor_flops_clock(gpu: Gpu) -> float:
    """16-bit tensor-core operations per clock and SM at the chip's full rate."""
    return gpu.tensor_tflops * 1e6 / (gpu.num_sms * gpu.clock_mhz)


def fp32_flops_clock(gpu: Gpu) -> float:
    """float32 operations per clock and SM; a multiply-add counts two."""
    return gpu.fp32_tflops * 1e6 / (gpu.num_sms * gpu.clock_mhz)
