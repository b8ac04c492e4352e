"""Predicted time of a config: occupancy, waves and the slowest pipe of an SM. Ranks configs; measuring decides.

One SM at a time: its resident blocks share the tensor cores, the exponential unit, the float32 pipe, shared memory
and the SM's share of L2 bandwidth. A step costs the busiest of these pipes plus a part of the others, which shrinks
with the warps there are to overlap them, or what one block waits for in turn if that is longer. Tiles run in waves; the
last wave has fewer blocks on an SM and is shorter.

What vendors' tables say is fixed; the rest, `Constants`, is fitted by benchmarks/fit_model.py to a sweep of sm80_fwd on
an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.problem.problem import Problem

from .counts import Bound, Work
from .resources import Resources, blocks_per_sm

EXP_CLOCK = 16
"""Exponentials per clock and SM (same source)."""
ISSUE_CLOCK = 128
"""Lanes for which an SM starts an instruction per clock: 32 on each of its schedulers, however many float32 units
there are (64 on sm_80, which matter to `Work.flops` that don't run on tensor cores)."""
SHARED_CLOCK = 128
"""Bytes of shared memory per clock and SM (32 banks of 4 bytes)."""
L2_CLOCK = 64
"""Bytes per clock that one SM gets from L2."""
MEMORY_REACHED = 0.89
"""Part of the nominal memory bandwidth that a copy reaches (4265 of 4800 GB/s on an H200, 0.93 on A100)."""
CLOCK_REACHED = 0.97
"""Part of the boost clock that is held in short runs (1920 of 1980 MHz on an H200); under lasting load it is less."""
PART_SECONDS = 0.6e-6
"""For each part of a tile's keys: the last block reads the parts one after the other. Set by hand near the rows with
one query in benchmarks/results/tune_h200_wide.jsonl.gz."""
LAUNCH_SECONDS = 2.5e-6
"""From the start of a launch to the first block running, and the drain at the end."""
SCHEDULERS = 4
"""Warp schedulers of an SM."""
FITTED_CAPABILITY = (9, 0)
"""Of the chip whose measurements the constants are fitted to."""
SPILL_MARGIN = 1.1
"""By so much a config that spills must be predicted faster to be chosen unmeasured on other chips: what spills cost was
fitted on one, where they cost little."""
LATENCY_SHARPNESS = 4
"""Of the soft maximum of throughput and latency: near their balance both cost some."""
MEMORY_SHARPNESS = 2
"""Of that of time on the chip and of device memory, which overlap less well: tiles start and end with misses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What no table says. Latencies in clocks, the rest are factors."""

    exposed: float
    """Part of the less busy pipes that a lone warp per scheduler can't overlap with the busiest; falls as 1/warps."""
    chained: float
    """Part of the less busy pipes that a block waits for when it has the SM to itself."""
    shared: float
    """Clocks that shared memory is busy per nominal clock: below 1, as reads hide behind matrix products well."""
    spill: float
    """Clocks of a spilled byte per clock of a byte in shared memory."""
    step_latency: float
    """Clocks of a block's step in which it does nothing: barriers, row reductions, first fragment loads."""
    load_latency: float
    """Further such clocks, over the number of stages: keys and values that have not arrived."""
    tile_latency: float
    """Clocks of a tile outside its steps: index arithmetic, Q and first K load, normalising, output."""
    uneven: float
    """Part of what the longest tile has above the mean by which SMs end apart; causal tiles start longest first in
    each head, not over all."""
    ends: float
    """Clocks of a byte of Q or output per clock of a byte from L2: they come from or go to device memory, in bursts."""


CONSTANTS = Constants(
    exposed=0.3978,
    chained=0.03362,
    shared=0.8037,
    spill=1.881,
    step_latency=540.2,
    load_latency=384.4,
    tile_latency=430.0,
    uneven=0.723,
    ends=5.098,
)
"""The fit to all groups in benchmarks/results/model_fit.json; a test compares them."""


class CompilerFacts(Protocol):
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


def preference(estimate: Estimate, spill_bytes: int) -> float:
    """What to order configs by where the first is used unmeasured; less is better. Seconds, but for `SPILL_MARGIN`."""
    return estimate.seconds * (SPILL_MARGIN if spill_bytes else 1.0)


def predict_by_counts(
    problem: Problem, gpu: Gpu, work: Work, needs: Resources, compiled: CompilerFacts | None, constants: Constants
) -> Estimate:
    """The expected time of a launch that does ``work``, whose thread blocks take ``needs``."""
    if compiled is None:
        expected = Resources(needs.threads, needs.shared_memory, work.registers or needs.registers)
        return estimate(problem, work, expected, gpu, work.spill_bytes, constants)
    real = Resources(needs.threads, needs.shared_memory + compiled.static_shared_bytes, compiled.registers)
    return estimate(problem, work, real, gpu, compiled.spill_bytes, constants)


def estimate(
    problem: Problem, work: Work, needs: Resources, gpu: Gpu, spilled: int = 0, constants: Constants = CONSTANTS
) -> Estimate:
    """The model proper, for counts that are already known. ``spilled``: bytes per thread, stores and loads."""
    resident = max(1, blocks_per_sm(needs, gpu))
    slots = resident * gpu.num_sms
    used = min(resident, -(-work.tiles // gpu.num_sms))
    full, rest = divmod(work.tiles, slots)
    sm = _Sm(work, needs, spilled, constants)
    clocks = full * sm.wave(resident)
    if rest:
        clocks += sm.wave(-(-rest // gpu.num_sms))
    clocks = max(clocks + constants.uneven * (work.longest - work.steps) * sm.step(used), sm.alone())
    on_chip = clocks / (gpu.clock_mhz * 1e6 * CLOCK_REACHED)
    memory = problem.min_bytes / (gpu.bandwidth_gb_s * 1e9 * MEMORY_REACHED)
    adding_up = work.parts * PART_SECONDS if work.parts > 1 else 0.0
    seconds = _soft_max(on_chip, memory, MEMORY_SHARPNESS) + LAUNCH_SECONDS + adding_up
    bound: Bound = "memory" if memory > on_chip else sm.bound(used)
    return Estimate(seconds, bound, resident, work.tiles / slots, problem.flops / seconds / 1e12)


def with_memory_traffic(
    problem: Problem, gpu: Gpu, on_chip: float, bound: Bound, needs: Resources, tiles: int, blocks: int
) -> Estimate:
    """The expected time of ``blocks`` thread blocks that need ``on_chip`` seconds without device memory."""
    memory = problem.min_bytes / (gpu.bandwidth_gb_s * 1e9 * MEMORY_REACHED)
    seconds = _soft_max(on_chip, memory, MEMORY_SHARPNESS)
    resident = max(1, blocks_per_sm(needs, gpu))
    waves = tiles / (resident * gpu.num_sms)
    found: Bound = "memory" if memory > on_chip else bound
    return Estimate(seconds, found, min(resident, -(-blocks // gpu.num_sms)), waves, problem.flops / seconds / 1e12)


class _Sm:
    """One SM: clocks that its pipes need for one step of one block."""

    def __init__(self, work: Work, needs: Resources, spilled: int, constants: Constants) -> None:
        self.work = work
        self.constants = constants
        self.warps = -(-needs.threads // 32)
        self.narrow = max(1.0, SCHEDULERS / self.warps)
        """Times as long that a block takes that has fewer warps than there are schedulers, each with its own pipes."""
        products = work.flops / work.flops_clock
        alu = work.alu / ISSUE_CLOCK + work.exponentials / EXP_CLOCK
        spill_bytes = constants.spill * spilled * needs.threads  # as if all of it were in the loop
        self.pipes: dict[Bound, float] = {
            "tensor": products if work.tensor else 0.0,
            "alu": alu + (0.0 if work.tensor else products),
            "shared": (constants.shared * work.shared_bytes + spill_bytes) / SHARED_CLOCK,
            "memory": work.step_bytes / L2_CLOCK,
        }
        self.busiest = max(self.pipes.values())
        self.others = sum(self.pipes.values()) - self.busiest
        waiting = constants.step_latency + constants.load_latency / max(1, work.stages)
        if not work.stages:
            waiting += self.pipes["memory"]
        self.chain = self.narrow * (self.busiest + constants.chained * self.others) + waiting
        self.masking = work.masked_alu / ISSUE_CLOCK + work.masked_shared_bytes / SHARED_CLOCK
        self.ends = constants.ends * work.tile_bytes / L2_CLOCK

    def step(self, resident: int) -> float:
        """Clocks in which each of ``resident`` blocks gets one step further."""
        warps = max(1.0, resident * self.warps / SCHEDULERS)
        turn = self.busiest + self.others * self.constants.exposed / warps
        return _soft_max(max(resident, self.narrow) * turn, self.chain, LATENCY_SHARPNESS)

    def wave(self, resident: int) -> float:
        """Clocks until ``resident`` mean tiles that start together are done."""
        tile = self.constants.tile_latency + resident * (self.ends + self.work.masked * self.masking)
        return self.work.steps * self.step(resident) + tile

    def alone(self) -> float:
        """Clocks of the longest tile with an SM to itself: no schedule is shorter."""
        tile = self.constants.tile_latency + self.ends + self.work.masked * self.masking
        return self.work.longest * self.step(1) + tile

    def bound(self, resident: int) -> Bound:
        """The busiest pipe if it is busy most of the time, else latency."""
        busy = resident * self.work.steps * self.busiest
        if busy < self.wave(resident) / 2:
            return "latency"
        return max(self.pipes, key=lambda name: self.pipes[name])


def _soft_max(first: float, second: float, sharpness: int) -> float:
    larger, smaller = max(first, second), min(first, second)
    return float(larger * (1 + (smaller / larger) ** sharpness) ** (1 / sharpness))
