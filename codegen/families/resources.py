"""What a thread block takes of an SM: threads, registers, shared memory; and how many of them fit."""

from __future__ import annotations

from dataclasses import dataclass

from flashtune.codegen.gpu.gpu import Gpu

_MAX_REGISTERS = 255
REGISTERS_SM = 65536
"""32-bit registers of an SM on every chip from sm_75 to sm_120 (CUDA programming guide)."""
REGISTER_UNIT = 256
"""Registers are given to warps in units of this many (same source)."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one thread block of a config takes, known before compiling. ``registers`` per thread is an estimate.

    ``spill_free`` is a promise that a test holds the family to; without it a config may spill a little, which can
    still be fastest.
    """

    threads: int
    shared_memory: int
    registers: int
    spill_free: bool = True


def register_cap(threads: int, blocks_per_sm: int) -> int:
    """Registers per thread that ``__launch_bounds__(threads, blocks_per_sm)`` leaves: allocated in steps of 8."""
    return min(_MAX_REGISTERS, 65536 // (threads * blocks_per_sm) // 8 * 8)


def too_large(needs: Resources, blocks_per_sm: int, gpu: Gpu) -> str | None:
    """Why ``blocks_per_sm`` thread blocks that take ``needs`` each can't be on an SM, or are no limit; or None."""
    if needs.shared_memory > gpu.shared_memory_block:
        return f"needs {needs.shared_memory} B of shared memory, {gpu} has {gpu.shared_memory_block} B"
    if blocks_per_sm * (needs.shared_memory + gpu.shared_memory_reserved) > gpu.shared_memory_sm:
        return f"blocks_per_sm={blocks_per_sm} do not fit the shared memory of {gpu}"
    cap = register_cap(needs.threads, blocks_per_sm)
    if needs.registers > cap:
        return f"needs about {needs.registers} registers per thread, {cap} are left"
    if blocks_per_sm > 1 and register_cap(needs.threads, blocks_per_sm - 1) == cap:
        return f"blocks_per_sm={blocks_per_sm} caps registers no more than {blocks_per_sm - 1} does"
    return None


def blocks_per_sm(needs: Resources, gpu: Gpu) -> int:
    """Thread blocks that fit one SM by threads, registers, shared memory and the block limit; 0 if none does."""
    warps = -(-needs.threads // 32)
    per_warp = -(-needs.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = REGISTERS_SM // per_warp // warps if per_warp else gpu.max_blocks_sm
    taken = needs.shared_memory + gpu.shared_memory_reserved
    by_shared = gpu.shared_memory_sm // taken if taken else gpu.max_blocks_sm
    return min(by_registers, by_shared, gpu.max_threads_sm // (warps * 32), gpu.max_blocks_sm)
