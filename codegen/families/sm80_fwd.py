"""Rules of `sm80_fwd`: tensor cores through mma.sync, sm_80 and later. The kernel is templates/sm80_fwd.cu.jinja."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config, parameter
from flashtune.codegen.problem.problem import MAX_LENGTH, Problem, Spec

from .counts import Work, masked, tensor_flops_clock, walk
from .family import Family, unsupported_width
from .model import CONSTANTS, Constants
from .resources import Resources, register_cap, too_large

ELEMENTS = {"float16": "Half", "bfloat16": "BFloat16"}
"""What tensor cores multiply, by its name in templates/lib/types.cuh."""
_MMA_SYNC_SHARE = {9: 0.62, 10: 0.31}
"""Share of a chip's tensor rate that mma.sync reaches, by major capability, where newer instructions reach more.
Hopper: as microbenchmarks report; 10.x: assumed to do per clock what Hopper does; not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Arithmetic beside the matrix products and exponentials, in operations per lane."""

    alu_per_score: float
    """Scale, maximum, sum, conversion, and what the compiler adds."""
    alu_per_thread: float
    """Per step: addresses, copies, references, loop."""
    masked_alu_per_score: float
    """In steps that the mask cuts: compare and select."""


COSTS = Costs(alu_per_score=7.622, alu_per_thread=158.7, masked_alu_per_score=8.287)
"""Fitted together with the model's constants; see `model.CONSTANTS`."""

SPLITS = (1, 2, 4, 8, 16, 32, 64)
KEYS_PER_SPLIT = 512
"""Fewest for which a split by rule pays on an H200: 1 query, 8 tiles, 8192 keys in 32 x 64 tiles took 28 us in 16
parts, 30 us in 8 and 35 us in 32 (benchmarks/results/tune_h200_wide.jsonl.gz)."""
MAX_WORKSPACE = 2**28
"""Bytes. The rule takes at most some tens of MB; more than this is a number of parts that was meant for less."""

_WORKING_REGISTERS = 20
"""Registers beside accumulators and operands: addresses, softmax state, fragments in flight. A lower bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm80FwdConfig(Config):
    """Parameters of `sm80_fwd`."""

    family: ClassVar[str] = "sm80_fwd"

    block_m: int = parameter(choices=(16, 32, 64, 128, 256), help="query rows of a thread block")
    block_n: int = parameter(choices=(16, 32, 48, 64, 80, 96, 128), help="keys of a loop step")
    num_warps: int = parameter(choices=(1, 2, 4, 8), help="warps of a thread block; each owns block_m / num_warps rows")
    num_stages: int = parameter(choices=(1, 2, 3), help="blocks of K and of V in shared memory")
    q_in_registers: bool = parameter(choices=(False, True), help="keep Q in registers; K and V then take its place")
    rescale_threshold: int = parameter(
        choices=(0, 8),
        neutral=8,
        searched=False,
        help="powers of 2 by which scores may outgrow the row reference before O is rescaled; 0: the exact maximum",
    )
    blocks_per_sm: int = parameter(choices=(1, 2, 3, 4), help="thread blocks per SM that registers are capped for")
    pack_heads: bool = parameter(
        choices=(False, True),
        neutral=False,
        by_problem=True,
        help="query heads that share keys share tiles: for grouped heads and few queries",
    )
    num_splits: int = parameter(
        choices=(0, *SPLITS),
        neutral=1,
        by_problem=True,
        help="thread blocks that share the keys of a tile, where there are few tiles; 0: as many as fill the GPU",
    )


class Sm80Fwd(Family[Sm80FwdConfig]):
    name = "sm80_fwd"
    config_type = Sm80FwdConfig
    entry = "sm80_fwd"

    def __init__(self, costs: Costs = COSTS, constants: Constants = CONSTANTS) -> None:
        self.costs = costs
        self.constants = constants

    def unsupported(self, spec: Spec, gpu: Gpu) -> str | None:
        if gpu.capability < (8, 0):
            major, minor = gpu.capability
            return f"needs compute capability 8.0 or later, {gpu} has {major}.{minor}"
        if spec.dtype not in ELEMENTS:
            return f"dtype={spec.dtype} is not supported. Supported: {', '.join(ELEMENTS)}"
        if spec.out_dtype:
            return f"out_dtype={spec.out_dtype} is not supported: the output has the dtype of the inputs"
        return unsupported_width(spec)

    def illegal(self, config: Sm80FwdConfig, spec: Spec, gpu: Gpu) -> str | None:
        rows = config.block_m // config.num_warps
        if config.block_m % config.num_warps or rows % 16:
            return f"block_m={config.block_m} does not give each of {config.num_warps} warps whole tiles of 16 rows"
        if rows > 32:
            return f"{rows} rows per warp: at most 32 fit the registers"
        return too_large(self.resources(config, spec), config.blocks_per_sm, gpu)

    def default(self, spec: Spec, gpu: Gpu) -> Sm80FwdConfig:
        """Large tiles first: they are legal where shared memory has room for them."""
        width = max(spec.head_dim, spec.value_dim)
        if width <= 64:
            shapes: Sequence[tuple[int, int, int]] = ((128, 128, 4),)
        elif width <= 128:
            shapes = ((128, 64, 4),)
        else:
            shapes = ((128, 128, 8), (128, 64, 8), (64, 64, 4))
        found = [
            Sm80FwdConfig(block_m=m, block_n=n, num_warps=warps, num_stages=1, q_in_registers=False, blocks_per_sm=1)
            for m, n, warps in shapes
        ]
        return next((each for each in found if self.illegal(each, spec, gpu) is None), found[-1])

    def default_for(self, problem: Problem, gpu: Gpu) -> Sm80FwdConfig:
        """Short queries take tiles of no more rows than they have; where tiles are few, blocks share their keys."""
        config = self.default(problem.spec, gpu)
        group = problem.num_heads // problem.num_heads_kv
        pack = group > 1 and problem.seqlen_q < config.block_m
        rows = problem.seqlen_q * (group if pack else 1)
        if rows <= 64:
            block_m = 32 if rows <= 32 else 64  # two warps for 16 rows too: one loads too slowly
            stages = 2 if max(problem.head_dim, problem.value_dim) <= 128 else 1
            config = replace(config, block_m=block_m, block_n=64, num_warps=block_m // 16, num_stages=stages)
        config = replace(config, pack_heads=pack)
        return replace(config, num_splits=0 if self._splits_to_fill(config, problem, gpu) > 1 else 1)

    def variants(self, config: Sm80FwdConfig, problem: Problem, gpu: Gpu) -> Sequence[Sm80FwdConfig]:
        """Packed where heads are grouped and queries few; split where tiles are fewer than thread blocks fit."""
        group = problem.num_heads // problem.num_heads_kv
        packs = (False, True) if group > 1 and problem.seqlen_q <= 4 * config.block_m else (False,)
        found = []
        for pack in packs:
            packed = replace(config, pack_heads=pack)
            most = self._splits_to_fill(packed, problem, gpu)
            splits = [0, *(each for each in SPLITS if each == 1 or (each // 2 < 2 * most and each != most))]
            found += [replace(packed, num_splits=each) for each in (splits if most > 1 else (1,))]
        return [each for each in found if self.unfit(each, problem, gpu) is None] or found[:1]

    def fitted(self, config: Sm80FwdConfig, problem: Problem, gpu: Gpu) -> Sm80FwdConfig:
        """Splits by the rule, not into as many parts as were right for other lengths; none where they don't pay."""
        if config.num_splits == 1:
            return config
        return replace(config, num_splits=0 if self._splits_to_fill(config, problem, gpu) > 1 else 1)

    def unfit(self, config: Sm80FwdConfig, problem: Problem, gpu: Gpu) -> str | None:
        rows = problem.seqlen_q * problem.num_heads // problem.num_heads_kv
        if config.pack_heads and rows > MAX_LENGTH:
            return f"pack_heads=true makes {rows} rows of queries, at most {MAX_LENGTH} can be"
        size, _ = self.workspace(config, problem, self.num_splits(config, problem, gpu))
        if size > MAX_WORKSPACE:
            return f"num_splits={config.num_splits} needs {size} bytes of workspace, at most {MAX_WORKSPACE} are taken"
        return super().unfit(config, problem, gpu)

    def num_splits(self, config: Sm80FwdConfig, problem: Problem, gpu: Gpu) -> int:
        if config.num_splits == 0:
            return self._splits_to_fill(config, problem, gpu)
        return max(1, min(config.num_splits, -(-problem.seqlen_k // config.block_n)))

    def _splits_to_fill(self, config: Sm80FwdConfig, problem: Problem, gpu: Gpu) -> int:
        """So many that the blocks come to two per SM, with enough keys each to pay for adding up; 1 for many tiles."""
        tiles = self.tiles(config, problem)
        if config.block_m > 64 and 5 * tiles > 4 * gpu.num_sms:  # one large tile keeps an SM busy
            return 1
        return max(1, min(2 * gpu.num_sms // tiles, problem.seqlen_k // KEYS_PER_SPLIT, SPLITS[-1]))

    def workspace(self, config: Sm80FwdConfig, problem: Problem, num_splits: int) -> tuple[int, int]:
        """As templates/blocks/split_keys.cuh lays it out."""
        if num_splits == 1:
            return 0, 0
        tiles = self.tiles(config, problem)
        counters = -(-tiles * 4 // 256) * 256
        row_tiles = config.block_m // config.num_warps // 16
        part = 32 * config.num_warps * row_tiles * (problem.value_dim // 8 + 1) * 16
        return counters + tiles * num_splits * part, counters

    def resources(self, config: Sm80FwdConfig, spec: Spec) -> Resources:
        padded, padded_v = _padded(spec.head_dim), _padded(spec.value_dim)
        queries, output = (config.block_m * 2 * width for width in (padded, padded_v))
        keys_values = config.num_stages * config.block_n * 2 * (padded + padded_v)
        shared_memory = max(queries, keys_values) if config.q_in_registers else queries + keys_values
        row_tiles = max(1, config.block_m // config.num_warps // 16)
        out = row_tiles * spec.value_dim // 8 * 4
        scores = row_tiles * config.block_n // 8 * 4
        kept = row_tiles * padded // 16 * 4 if config.q_in_registers else row_tiles * 4
        registers = out + scores + kept + _WORKING_REGISTERS
        left = register_cap(32 * config.num_warps, config.blocks_per_sm) - registers
        return Resources(
            threads=32 * config.num_warps,
            shared_memory=max(shared_memory, output),
            registers=registers,
            spill_free=left
            >= 40 + max(spec.head_dim, spec.value_dim) // 5,  # calibrated with NVRTC 13.5, held by a test
        )

    def names(self, config: Sm80FwdConfig, spec: Spec) -> Mapping[str, object]:
        return {"element": ELEMENTS[spec.dtype]}

    def tiles(self, config: Sm80FwdConfig, problem: Problem) -> int:
        group = problem.num_heads // problem.num_heads_kv if config.pack_heads else 1
        return -(-problem.seqlen_q * group // config.block_m) * problem.batch * (problem.num_heads // group)

    def work(self, config: Sm80FwdConfig, problem: Problem, gpu: Gpu) -> Work:
        m, n, threads = config.block_m, config.block_n, 32 * config.num_warps
        padded, padded_v = _padded(problem.head_dim), _padded(problem.value_dim)
        splits = self.num_splits(config, problem, gpu)
        queries_tile = max(1, m * problem.num_heads_kv // problem.num_heads) if config.pack_heads else m
        steps, longest = walk(problem, queries_tile, n)
        keys_values = n * (padded + padded_v) * 2
        queries = 0 if config.q_in_registers else m * padded * 2
        share = _MMA_SYNC_SHARE.get(gpu.capability[0], 1.0)
        registers, spilled = self._expected(config, problem.spec)
        return Work(
            tiles=self.tiles(config, problem) * splits,
            steps=steps / splits,
            longest=-(-longest // splits),
            parts=splits,
            flops=2 * m * n * (padded + problem.value_dim),
            flops_clock=share * tensor_flops_clock(gpu),
            tensor=True,
            exponentials=m * n,
            alu=int(self.costs.alu_per_score * m * n + self.costs.alu_per_thread * threads),
            shared_bytes=keys_values * (config.num_warps + 1) + queries,
            step_bytes=n * (problem.head_dim + problem.value_dim) * 2,
            # Q and O; each part of a split one is written and read as float32.
            tile_bytes=m * (2 * problem.head_dim + problem.value_dim * (2 if splits == 1 else 8)),
            stages=config.num_stages,
            masked=masked(problem, queries_tile, n) / splits,
            masked_alu=int(self.costs.masked_alu_per_score * m * n),
            masked_shared_bytes=n * padded_v * 2,
            registers=registers,
            spill_bytes=spilled,
        )

    def _expected(self, config: Sm80FwdConfig, spec: Spec) -> tuple[int, int]:
        """Registers and spilled bytes per thread that the compiler is expected to give; as it did for sm_90."""
        least = self.resources(config, spec).registers
        cap = register_cap(32 * config.num_warps, config.blocks_per_sm)
        width = max(spec.head_dim, spec.value_dim)
        free = least + 46 + width // 16  # it takes more than it must while there are some
        short = least + 32 + width // 6 - cap
        return min(cap, free), max(0, 5 * (short - 5) // 2)


def _padded(columns: int) -> int:
    """Columns of a tile in shared memory."""
    return -(-columns // 16) * 16
