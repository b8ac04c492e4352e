"""Predicted time of `sm90_fwd`, whose warpgroups overlap in ways that the general model (`model.py`) doesn't know.

A step of a thread block is one block of keys for each of its warpgroups. It lasts as long as the tensor cores need for
all of them, or the schedulers for all exponentials and what belongs to them, or as long as one warpgroup is busy from
one step to its next: near their balance, somewhat longer. A tile adds its first product and softmax, which nothing
overlaps, and its output. Counts are of what is executed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.problem.problem import Problem

from .counts import Bound, masked, tensor_flops_clock, walk

if TYPE_CHECKING:
    from .sm90_fwd import Sm90FwdConfig

WARPGROUP_ROWS = 64
"""Query rows of a warpgroup: the M of a wgmma."""
HOPPER_FLOPS_CLOCK = 4096
"""Of 16-bit products, per clock and SM: what the clocks below are counted for."""
CLOCK_HELD = 0.86
"""Part of the boost clock in these kernels, which run into the power limit (about 1700 of 1980 MHz on an H200)."""
COUNTER_SECONDS = 1.5e-6
"""For the counter of scheduler=dynamic to be zeroed before the launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeConstants:
    """In clocks unless said. Fitted by benchmarks/fit_sm90.py; a test compares them with its result file."""

    tensor: float
    """Clocks of the tensor cores per nominal clock."""
    issue_exact: float
    """Per key of a block and warpgroup, for the schedulers of an SM: softmax=exact, and so on."""
    issue_lazy: float
    issue_late: float
    chain: float
    """One warpgroup from step to step: products, barriers, votes."""
    chain_exact: float
    """Further, per key of a block."""
    chain_lazy: float
    chain_late: float
    early_32: float
    """Factor on both for early_columns=32, and so on."""
    early_48: float
    early_64: float
    early_80: float
    ping_pong: float
    """Factor on the softmax in the chain."""
    more_stages: float
    """Factor on the chain where num_stages is more than 2."""
    tile: float
    """Once a tile."""
    tile_column: float
    """Once a tile, per column of the output."""
    overlap_tiles: float
    """Factor on what is once a tile."""
    block: float
    """For a thread block that has one tile only: barriers, first loads."""
    one_q: float
    """Once a tile where q_buffers is 1: the next Q waits for the last O."""
    uneven: float
    """Part of what the longest tile has above the mean by which thread blocks end apart."""
    uneven_static: float
    """The same for scheduler=static."""
    masked: float
    """Per key of a block that a mask cuts through, and warpgroup."""
    launch_us: float
    """Microseconds."""
    sharpness: float
    """Of the soft maximum of the three."""


CONSTANTS = TimeConstants(
    tensor=0.8194,
    issue_exact=4.913,
    issue_lazy=3.208,
    issue_late=3.199,
    chain=618.2,
    chain_exact=7.184,
    chain_lazy=2.999,
    chain_late=3.203,
    early_32=0.9107,
    early_48=0.7414,
    early_64=1.016,
    early_80=1.144,
    ping_pong=0.9785,
    more_stages=0.9169,
    tile=133.3,
    tile_column=15.65,
    overlap_tiles=1.061,
    block=5323.0,
    one_q=2246.0,
    uneven=0.7779,
    uneven_static=1.079,
    masked=1.699,
    launch_us=8.943,
    sharpness=2.084,
)
"""The fit to all groups in benchmarks/results/model_fit_sm90.json; a test compares them."""


def predict_seconds(
    config: Sm90FwdConfig, problem: Problem, gpu: Gpu, constants: TimeConstants = CONSTANTS
) -> tuple[float, Bound]:
    """On-chip time, and what bounds a step. Traffic with device memory is not in it."""
    one = constants
    block_m, block_n = WARPGROUP_ROWS * config.warpgroups, config.block_n
    resident = config.blocks_per_sm
    working = config.warpgroups * resident
    steps, longest = walk(problem, block_m, block_n)
    tiles = -(-problem.seqlen_q // block_m) * problem.batch * problem.num_heads

    rate = HOPPER_FLOPS_CLOCK / tensor_flops_clock(gpu)
    keys_clocks = rate * -(-problem.head_dim // 16) * block_n / 2
    values_clocks = rate * block_n / 16 * problem.value_dim / 2
    early = {0: 1.0, 32: one.early_32, 48: one.early_48, 64: one.early_64, 80: one.early_80}[config.early_columns]
    turns = one.ping_pong if config.ping_pong else 1.0
    softmax: float = getattr(one, f"chain_{config.softmax}") * block_n * early * turns
    chain = keys_clocks + one.chain + softmax
    if config.num_stages > 2:
        chain *= one.more_stages
    parts: dict[Bound, float] = {
        "tensor": one.tensor * working * (keys_clocks + values_clocks),
        "alu": getattr(one, f"issue_{config.softmax}") * working * block_n * early,
        "latency": chain,
    }
    step = sum(part**one.sharpness for part in parts.values()) ** (1 / one.sharpness)

    once = one.tile + one.tile_column * problem.value_dim + chain
    if config.overlap_tiles:
        once *= one.overlap_tiles
    if config.scheduler == "tile":
        once += one.block / resident
    elif config.q_buffers == 1:
        once += one.one_q
    tile = steps * step + masked(problem, WARPGROUP_ROWS, block_n) * one.masked * block_n * working + once
    places = gpu.num_sms * resident
    if problem.causal:
        uneven = one.uneven_static if config.scheduler == "static" else one.uneven
        clocks = max(1.0, tiles / places) * tile + uneven * (longest - steps) * step
    else:
        clocks = -(-tiles // places) * tile
    seconds = clocks / (gpu.clock_mhz * 1e6 * CLOCK_HELD) + one.launch_us * 1e-6
    if config.scheduler == "dynamic":
        seconds += COUNTER_SECONDS
    return seconds, max(parts, key=lambda name: parts[name])
