"""Predicted time of a config: occupancy, waves and the slowest pipe of an SM. Ranks configs; measuring decides.

One SM at a time: its resident blocks share the tensor cores, the exponential unit, the float32 pipe, shared memory
and the SM's share of L2 bandwidth. A step costs the busiest of these pipes plus a part of the others, which shrinks
with the warps there are to overlap them. Tiles run in waves; the last wave has fewer blocks on an SM and is shorter.

The constants are rough: from vendors' tables where noted, else set by hand near a first set of sm80_fwd configs timed
on an H200 at 4096 tokens. They have not been fitted to the sweep in benchmarks/results/tune_h200_grid.jsonl.gz.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from .config import Config
from .family import Resources, family
from .gpu import Gpu
from .problem import Problem
from .work import Work, fp32_flops_clock

Bound = Literal["tensor", "alu", "shared", "memory", "latency"]

REGISTERS_SM = 65536
"""32-bit registers of an SM on every chip from sm_75 to sm_120 (CUDA programming guide)."""
REGISTER_UNIT = 256
"""Registers are given to warps in units of this many (same source)."""
EXP_CLOCK = 16
"""Exponentials per clock and SM (same source)."""
SHARED_CLOCK = 128
"""Bytes of shared memory per clock and SM (32 banks of 4 bytes)."""
L2_CLOCK = 64
"""Bytes per clock that one SM gets from L2."""
MEMORY_REACHED = 0.92
"""Part of the nominal memory bandwidth that a copy reaches (4265 of 4800 GB/s on an H200, 0.93 on A100)."""
CLOCK_REACHED = 0.9
"""Part of the boost clock that is held under tensor load; H100-class chips at their power limit hold less."""
EXPOSED = 0.45
"""Part of the less busy pipes that a lone warp per scheduler can't overlap with the busiest; falls as 1/warps."""
STEP_LATENCY = 100.0
"""Clocks of a step that only other resident blocks can hide: barrier, row reductions, first fragment loads."""
LOAD_LATENCY = 200.0
"""Clocks from asking L2 for a key block until its first byte can be used."""
TILE_LATENCY = 2500.0
"""Clocks of a tile outside its steps: index arithmetic, Q and first K load, normalising, output."""
LAUNCH_SECONDS = 2.5e-6
"""From the start of a launch to the first block running, and the drain at the end."""
SCHEDULERS = 4
"""Warp schedulers of an SM."""


class Facts(Protocol):
    """What the model wants to know from the compiler: the part of `Compiled` that counts here."""

    @property
    def registers(self) -> int: ...
    @property
    def spill_bytes(self) -> int: ...
    @property
    def static_shared_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the model expects of one config on one problem and GPU."""

    seconds: float
    bound: Bound
    blocks_sm: int
    """Resident thread blocks per SM."""
    waves: float
    """Tiles over resident blocks of the whole chip; below 1 some SMs have less than they could hold."""
    tflops: float
    """Useful operations (visible pairs only) per second, in 10^12."""

    @property
    def why(self) -> str:
        plural = "s" if self.blocks_sm != 1 else ""
        return (
            f"{self.bound}-bound, {self.blocks_sm} block{plural}/SM, {self.waves:.2g} waves, {self.tflops:.0f} TFLOP/s"
        )


def predict(problem: Problem, config: Config, gpu: Gpu, compiled: Facts | None = None) -> Estimate:
    """Expected time of ``config``, which must be legal. ``compiled`` replaces the estimated registers by real ones."""
    kind = family(config.family)
    work = kind.work(config, problem, gpu)
    needs = kind.resources(config, problem.spec)
    if compiled is not None:
        shared = needs.shared_memory + compiled.static_shared_bytes
        needs = Resources(needs.threads, shared, compiled.registers)
    spilled = compiled.spill_bytes if compiled is not None else 0
    return estimate(problem, work, needs, gpu, spilled)


def blocks_per_sm(needs: Resources, gpu: Gpu) -> int:
    """Thread blocks that fit one SM by threads, registers, shared memory and the block limit; 0 if none does."""
    warps = -(-needs.threads // 32)
    per_warp = -(-needs.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = REGISTERS_SM // per_warp // warps if per_warp else gpu.max_blocks_sm
    taken = needs.shared_memory + gpu.shared_memory_reserved
    by_shared = gpu.shared_memory_sm // taken if taken else gpu.max_blocks_sm
    return min(by_registers, by_shared, gpu.max_threads_sm // (warps * 32), gpu.max_blocks_sm)


def estimate(problem: Problem, work: Work, needs: Resources, gpu: Gpu, spilled: int = 0) -> Estimate:
    """The model proper, for counts that are already known. ``spilled``: bytes per thread, stores and loads."""
    resident = max(1, blocks_per_sm(needs, gpu))
    slots = resident * gpu.num_sms
    full, rest = divmod(work.tiles, slots)
    sm = _Sm(work, needs, gpu, spilled)
    clocks = full * sm.wave(resident)
    if rest:
        clocks += sm.wave(-(-rest // gpu.num_sms))
    clocks = max(clocks, sm.alone())
    on_chip = clocks / (gpu.clock_mhz * 1e6 * CLOCK_REACHED)
    memory = problem.min_bytes / (gpu.bandwidth_gb_s * 1e9 * MEMORY_REACHED)
    seconds = max(on_chip, memory) + LAUNCH_SECONDS
    used = min(resident, -(-work.tiles // gpu.num_sms))
    bound: Bound = "memory" if memory > on_chip else sm.bound(used)
    return Estimate(seconds, bound, resident, work.tiles / slots, problem.flops / seconds / 1e12)


class _Sm:
    """One SM: clocks that its pipes need for one step of one block."""

    def __init__(self, work: Work, needs: Resources, gpu: Gpu, spilled: int) -> None:
        self.work = work
        self.warps = -(-needs.threads // 32)
        products = work.flops / work.flops_clock
        alu = work.alu / (fp32_flops_clock(gpu) / 2)
        spill_bytes = spilled * needs.threads  # as if all of it were in the loop; through the same data path
        self.pipes: dict[Bound, float] = {
            "tensor": products if work.tensor else 0.0,
            "alu": max(work.exponentials / EXP_CLOCK, alu + (0.0 if work.tensor else products)),
            "shared": (work.shared_bytes + spill_bytes) / SHARED_CLOCK,
            "memory": work.step_bytes / L2_CLOCK,
        }
        self.busiest = max(self.pipes.values())
        self.others = sum(self.pipes.values()) - self.busiest

    def step(self, resident: int) -> float:
        """Clocks after which one more step is done, with ``resident`` blocks taking turns."""
        return max(self.busiest + self._exposed(resident), self._latency(self.busiest) / resident)

    def _exposed(self, resident: int) -> float:
        warps = max(1.0, resident * self.warps / SCHEDULERS)
        return self.others * EXPOSED / warps

    def _latency(self, own: float) -> float:
        """Clocks of one block's step from start to end: its own pipes in turn, and waiting."""
        busy = own + self.others * EXPOSED + STEP_LATENCY
        ahead = max(0.0, self.work.stages - 0.5) * busy
        return busy + max(0.0, LOAD_LATENCY + self.pipes["memory"] - ahead)

    def wave(self, resident: int) -> float:
        """Clocks until ``resident`` mean tiles that start together are done."""
        tile = TILE_LATENCY / resident + self.work.tile_bytes / L2_CLOCK
        return resident * (self.work.steps * self.step(resident) + tile)

    def alone(self) -> float:
        """Clocks of the longest tile with an SM to itself: no schedule is shorter."""
        return self.work.longest * self.step(1) + TILE_LATENCY + self.work.tile_bytes / L2_CLOCK

    def bound(self, resident: int) -> Bound:
        """The busiest pipe if it is busy most of the time, else latency."""
        busy = resident * self.work.steps * self.busiest
        if busy < self.wave(resident) / 2:
            return "latency"
        return max(self.pipes, key=lambda name: self.pipes[name])
