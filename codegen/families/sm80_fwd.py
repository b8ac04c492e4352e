"""Rules of `sm80_fwd`: tensor cores through mma.sync, sm_80 and later. The kernel is templates/sm80_fwd.cu.jinja."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..config import Config, parameter
from ..family import Family, Resources, register_cap, too_large
from ..gpu import Gpu
from ..problem import Problem, Spec
from ..work import Work, masked, tensor_flops_clock, walk

_ELEMENTS = {"float16": "Half", "bfloat16": "BFloat16"}
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


COSTS = Costs(alu_per_score=7.889, alu_per_thread=173.1, masked_alu_per_score=6.25)
"""Fitted together with the model's constants; see `model.CONSTANTS`."""

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


class Sm80Fwd(Family):
    name = "sm80_fwd"
    config_type = Sm80FwdConfig
    entry = "sm80_fwd"

    def __init__(self, costs: Costs = COSTS) -> None:
        self.costs = costs

    def unsupported(self, spec: Spec, gpu: Gpu) -> str | None:
        if gpu.capability < (8, 0):
            major, minor = gpu.capability
            return f"needs compute capability 8.0 or later, {gpu} has {major}.{minor}"
        if spec.dtype not in _ELEMENTS:
            return f"dtype={spec.dtype} is not supported. Supported: {', '.join(_ELEMENTS)}"
        if spec.out_dtype:
            return f"out_dtype={spec.out_dtype} is not supported: the output has the dtype of the inputs"
        if spec.head_dim % 8 or not 8 <= spec.head_dim <= 256:
            return f"head_dim={spec.head_dim} is not supported. Supported: multiples of 8 from 8 to 256"
        return None

    def illegal(self, config: Config, spec: Spec, gpu: Gpu) -> str | None:
        assert isinstance(config, Sm80FwdConfig)
        rows = config.block_m // config.num_warps
        if config.block_m % config.num_warps or rows % 16:
            return f"block_m={config.block_m} does not give each of {config.num_warps} warps whole tiles of 16 rows"
        if rows > 32:
            return f"{rows} rows per warp: at most 32 fit the registers"
        return too_large(self.resources(config, spec), config.blocks_per_sm, gpu)

    def default(self, spec: Spec, gpu: Gpu) -> Config:
        if spec.head_dim <= 64:
            shape = {"block_m": 128, "block_n": 128, "num_warps": 4}
        elif spec.head_dim <= 128:
            shape = {"block_m": 128, "block_n": 64, "num_warps": 4}
        else:
            shape = {"block_m": 64, "block_n": 64, "num_warps": 4}
        return Sm80FwdConfig(**shape, num_stages=1, q_in_registers=False, rescale_threshold=8, blocks_per_sm=1)

    def resources(self, config: Config, spec: Spec) -> Resources:
        assert isinstance(config, Sm80FwdConfig)
        padded = -(-spec.head_dim // 16) * 16
        row_bytes = 2 * padded
        queries = config.block_m * row_bytes
        keys_values = 2 * config.num_stages * config.block_n * row_bytes
        row_tiles = max(1, config.block_m // config.num_warps // 16)
        out = row_tiles * spec.head_dim // 8 * 4
        scores = row_tiles * config.block_n // 8 * 4
        kept = row_tiles * padded // 16 * 4 if config.q_in_registers else row_tiles * 4
        registers = out + scores + kept + _WORKING_REGISTERS
        left = register_cap(32 * config.num_warps, config.blocks_per_sm) - registers
        return Resources(
            threads=32 * config.num_warps,
            shared_memory=max(queries, keys_values) if config.q_in_registers else queries + keys_values,
            registers=registers,
            spill_free=left >= 32 + spec.head_dim // 6,  # calibrated with NVRTC 13.5, held by a test
        )

    def names(self, config: Config, spec: Spec) -> Mapping[str, object]:
        return {"element": _ELEMENTS[spec.dtype]}

    def tiles(self, config: Config, problem: Problem) -> int:
        assert isinstance(config, Sm80FwdConfig)
        return -(-problem.seqlen_q // config.block_m) * problem.batch * problem.num_heads

    def work(self, config: Config, problem: Problem, gpu: Gpu) -> Work:
        assert isinstance(config, Sm80FwdConfig)
        m, n, threads = config.block_m, config.block_n, 32 * config.num_warps
        padded = -(-problem.head_dim // 16) * 16
        steps, longest = walk(problem, m, n)
        keys_values = 2 * n * padded * 2
        queries = 0 if config.q_in_registers else m * padded * 2
        share = _MMA_SYNC_SHARE.get(gpu.capability[0], 1.0)
        registers, spilled = self._expected(config, problem.spec)
        return Work(
            tiles=self.tiles(config, problem),
            steps=steps,
            longest=longest,
            flops=2 * m * n * (padded + problem.head_dim),
            flops_clock=share * tensor_flops_clock(gpu),
            tensor=True,
            exponentials=m * n,
            alu=int(self.costs.alu_per_score * m * n + self.costs.alu_per_thread * threads),
            shared_bytes=keys_values * (config.num_warps + 1) + queries,
            step_bytes=2 * n * problem.head_dim * 2,
            tile_bytes=2 * m * problem.head_dim * 2,
            stages=config.num_stages,
            masked=masked(problem, m, n),
            masked_alu=int(self.costs.masked_alu_per_score * m * n),
            masked_shared_bytes=n * padded * 2,
            registers=registers,
            spill_bytes=spilled,
        )

    def _expected(self, config: Sm80FwdConfig, spec: Spec) -> tuple[int, int]:
        """Registers and spilled bytes per thread that the compiler is expected to give; as it did for sm_90."""
        least = self.resources(config, spec).registers
        cap = register_cap(32 * config.num_warps, config.blocks_per_sm)
        free = least + 46 + spec.head_dim // 16  # it takes more than it must while there are some
        short = least + 32 + spec.head_dim // 6 - cap
        return min(cap, free), max(0, 5 * (short - 5) // 2)
