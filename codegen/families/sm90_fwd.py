"""Rules of `sm90_fwd`: wgmma, TMA and warp specialisation on Hopper. The kernel is templates/sm90_fwd.cu.jinja."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config, parameter
from flashtune.codegen.plan.plan import TensorBox
from flashtune.codegen.problem.problem import VECTOR_ALIGNMENT, Problem, Spec

from .family import Family, unsupported_width
from .model import CompilerFacts, Estimate, with_memory_traffic
from .resources import Resources, register_cap
from .sm80_fwd import ELEMENTS
from .sm90_time import CONSTANTS, WARPGROUP_ROWS, TimeConstants, predict_seconds

_BARRIERS_BYTES = 1024
"""Before the tiles in shared memory, which start on whole swizzle patterns."""
_COUNTER_BYTES = 16
_REGISTERS = {(1, 1): (0, 0), (1, 2): (24, 232), (2, 1): (24, 240), (3, 1): (32, 160)}
"""By (warpgroups, blocks per SM): what a thread that loads and one that computes keep; 0: as launched."""
_WORKING_REGISTERS = 32
"""Beside accumulators and weights. With less left over, ptxas serialises the products: a cliff, not a slope."""
_SECTIONS = {"tile": (16,), "static": (1, 4), "dynamic": (4, 16)}
"""Heads listed together that are tried where some tiles are longer than others: those that won on an H200."""
_PRODUCT_REGISTERS = 30
"""Beside the accumulators of one wgmma. It must fit what a thread has at the start: ptxas refuses the kernel else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90FwdConfig(Config):
    """Parameters of `sm90_fwd`."""

    family: ClassVar[str] = "sm90_fwd"

    warpgroups: int = parameter(choices=(1, 2, 3), help="warpgroups that compute, 64 query rows each")
    block_n: int = parameter(
        choices=(32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256),
        left_out=(144, 208, 240, 256),
        help="keys of a loop step",
    )
    num_stages: int = parameter(choices=(2, 3, 4), left_out=(4,), help="blocks of K and of V in shared memory")
    q_buffers: int = parameter(choices=(1, 2), help="2: the next Q is loaded while the last O leaves")
    softmax: str = parameter(
        choices=("exact", "lazy", "late"),
        left_out=("exact",),
        help="row references: exact maxima; moved only when a score outgrows them by 2^8; or that found out afterwards",
    )
    early_columns: int = parameter(
        choices=(0, 32, 48, 64, 80),
        neutral=0,
        left_out=(80,),
        help="scores of a row that are weighed beside the product with V",
    )
    ping_pong: bool = parameter(choices=(False, True), help="warpgroups issue their products in turns")
    scheduler: str = parameter(
        choices=("tile", "static", "dynamic"),
        help="a thread block for each tile; or as many as fit, which take tiles by a fixed rule, or as they are done",
    )
    overlap_tiles: bool = parameter(
        choices=(False, True), neutral=False, help="a tile's first product with K beside the last one with V before it"
    )
    heads_per_section: int = parameter(
        choices=(1, 2, 4, 8, 16, 32, 64),
        neutral=1,
        by_problem=True,
        help="heads whose tiles are listed together, the longest first; more than 1 pays where lengths differ",
    )
    blocks_per_sm: int = parameter(choices=(1, 2), help="thread blocks that share an SM")


class Sm90Fwd(Family[Sm90FwdConfig]):
    name = "sm90_fwd"
    config_type = Sm90FwdConfig
    entry = "sm90_fwd"

    def __init__(self, times: TimeConstants = CONSTANTS) -> None:
        self.times = times

    def unsupported(self, spec: Spec, gpu: Gpu) -> str | None:
        if gpu.arch != "sm_90a":
            major, minor = gpu.capability
            return f"needs compute capability 9.0, {gpu} has {major}.{minor}"
        if spec.dtype not in ELEMENTS:
            return f"dtype={spec.dtype} is not supported. Supported: {', '.join(ELEMENTS)}"
        if spec.out_dtype:
            return f"out_dtype={spec.out_dtype} is not supported: the output has the dtype of the inputs"
        if reason := unsupported_width(spec):
            return reason
        if spec.alignment != VECTOR_ALIGNMENT:
            return f"alignment={spec.alignment} is not supported: TMA copies rows that start on 16 bytes"
        return None

    def illegal(self, config: Sm90FwdConfig, spec: Spec, gpu: Gpu) -> str | None:
        if (config.warpgroups, config.blocks_per_sm) not in _REGISTERS:
            return f"blocks_per_sm={config.blocks_per_sm} leaves too few registers for warpgroups={config.warpgroups}"
        entry = _entry_registers(config)
        widest = max(config.block_n, spec.value_dim) // 2 + _PRODUCT_REGISTERS
        if widest > entry:
            return f"a product needs about {widest} registers per thread, the kernel starts with {entry}"
        if config.early_columns and (config.softmax == "exact" or 2 * config.early_columns > config.block_n):
            return f"early_columns={config.early_columns} is for softmax=lazy or late, and at most half of block_n"
        if config.ping_pong and config.warpgroups == 1:
            return "ping_pong=true needs two warpgroups that take turns"
        if config.scheduler == "tile" and config.q_buffers > 1:
            return "q_buffers=2 is of no use with scheduler=tile: a thread block has one tile"
        if config.overlap_tiles and config.q_buffers == 1:
            return "overlap_tiles=true needs q_buffers=2: the next Q comes before the last O leaves"
        needs = self.resources(config, spec)
        if needs.shared_memory > gpu.shared_memory_block:
            return f"needs {needs.shared_memory} B of shared memory, {gpu} has {gpu.shared_memory_block} B"
        if config.blocks_per_sm * (needs.shared_memory + gpu.shared_memory_reserved) > gpu.shared_memory_sm:
            return f"blocks_per_sm={config.blocks_per_sm} do not fit the shared memory of {gpu}"
        left = self._registers_left(config)
        if needs.registers > left:
            return f"needs about {needs.registers} registers per thread that computes, {left} are left"
        return None

    def default(self, spec: Spec, gpu: Gpu) -> Sm90FwdConfig:
        """Three warpgroups for short rows, else two; as many keys as leave room for two tiles of Q, where that pays."""
        dim = max(spec.head_dim, spec.value_dim)
        return Sm90FwdConfig(
            warpgroups=3 if dim <= 64 else 2,
            block_n=128 if dim <= 128 else 64 if dim > 192 else 80 if spec.value_dim > 128 else 96,
            num_stages=2,
            q_buffers=2 if dim <= 192 else 1,
            softmax="late",
            early_columns=0 if dim <= 64 else 32,
            ping_pong=dim <= 64,
            scheduler="dynamic" if spec.causal else "static",
            heads_per_section=16 if spec.causal else 1,
            blocks_per_sm=1,
        )

    def default_for(self, problem: Problem, gpu: Gpu) -> Sm90FwdConfig:
        """Fewer rows a block where queries are few."""
        config = self.default(problem.spec, gpu)
        if problem.seqlen_q <= WARPGROUP_ROWS:
            config = replace(config, warpgroups=1, ping_pong=False)
        return self.fitted(config, problem, gpu)

    def fitted(self, config: Sm90FwdConfig, problem: Problem, gpu: Gpu) -> Sm90FwdConfig:
        """No counter, which costs each launch a memory to be zeroed, where every thread block has one tile at most."""
        if config.scheduler == "dynamic" and self.tiles(config, problem) <= config.blocks_per_sm * gpu.num_sms:
            sections = min(config.heads_per_section, max(_SECTIONS["static"]))
            return replace(config, scheduler="static", heads_per_section=sections)
        return config

    def variants(self, config: Sm90FwdConfig, problem: Problem, gpu: Gpu) -> Sequence[Sm90FwdConfig]:
        """Sections of several heads where some tiles are longer than others."""
        if not problem.causal:
            return (config,)
        return [replace(config, heads_per_section=each) for each in _SECTIONS[config.scheduler]]

    def unfit(self, config: Sm90FwdConfig, problem: Problem, gpu: Gpu) -> str | None:
        if problem.seqlen_k == 0:
            return "seqlen_k=0 leaves nothing that TMA could copy"
        return super().unfit(config, problem, gpu)

    def resources(self, config: Sm90FwdConfig, spec: Spec) -> Resources:
        row, value_row = 2 * padded(spec.head_dim), 2 * padded(spec.value_dim)
        queries = config.q_buffers * config.warpgroups * WARPGROUP_ROWS * max(row, value_row)
        keys_values = config.num_stages * config.block_n * (row + value_row)
        scores, weights, out = config.block_n // 2, config.block_n // 4, spec.value_dim // 2
        registers = scores + weights + out + _WORKING_REGISTERS
        # Where few are left, or rows are wide, some words of a tile are kept in memory, outside of the loops.
        spare = self._registers_left(config) - registers
        return Resources(
            threads=128 * (config.warpgroups + 1),
            shared_memory=_BARRIERS_BYTES + queries + keys_values,
            registers=registers,
            spill_free=max(spec.head_dim, spec.value_dim) <= 128 and spare >= 16,  # held by a test with NVRTC 13.5
        )

    def _registers_left(self, config: Sm90FwdConfig) -> int:
        """For a thread that computes."""
        return _registers(config)[1] or _entry_registers(config)

    def names(self, config: Sm90FwdConfig, spec: Spec) -> Mapping[str, object]:
        keys = [config.block_n, *_half(config.block_n)]
        return {
            "element": ELEMENTS[spec.dtype],
            "shared_products": [(n, -(-spec.head_dim // 16)) for n in keys],
            "register_products": [(spec.value_dim, n // 16) for n in keys],
            "registers": _registers(config),
        }

    def tensor_boxes(self, config: Sm90FwdConfig, spec: Spec) -> Sequence[TensorBox]:
        keys, values = (64 if padded(dim) % 64 == 0 else 32 for dim in (spec.head_dim, spec.value_dim))
        return [
            TensorBox(tensor="q", rows=WARPGROUP_ROWS, columns=keys),
            TensorBox(tensor="k", rows=config.block_n, columns=keys),
            TensorBox(tensor="v", rows=config.block_n, columns=values),
            TensorBox(tensor="out", rows=WARPGROUP_ROWS, columns=values),
        ]

    def tiles(self, config: Sm90FwdConfig, problem: Problem) -> int:
        return -(-problem.seqlen_q // (WARPGROUP_ROWS * config.warpgroups)) * problem.batch * problem.num_heads

    def blocks(self, config: Sm90FwdConfig, problem: Problem, gpu: Gpu) -> int:
        tiles = self.tiles(config, problem)
        return tiles if config.scheduler == "tile" else min(tiles, config.blocks_per_sm * gpu.num_sms)

    def heads_per_section(self, config: Sm90FwdConfig) -> int:
        return config.heads_per_section

    def workspace(self, config: Sm90FwdConfig, problem: Problem, num_splits: int) -> tuple[int, int]:
        """The counter of templates/blocks/scheduler_persistent.cuh."""
        return (_COUNTER_BYTES, _COUNTER_BYTES) if config.scheduler == "dynamic" else (0, 0)

    def predict(
        self, config: Sm90FwdConfig, problem: Problem, gpu: Gpu, compiled: CompilerFacts | None = None
    ) -> Estimate:
        """As `sm90_time.py` has it: what the compiler made tells nothing more, since legal configs don't spill."""
        seconds, bound = predict_seconds(config, problem, gpu, self.times)
        tiles, blocks = self.tiles(config, problem), self.blocks(config, problem, gpu)
        needs = self.resources(config, problem.spec)
        return with_memory_traffic(problem, gpu, seconds, bound, needs, tiles, blocks)


def padded(head_dim: int) -> int:
    """Columns of a tile in shared memory: whole swizzled lines of 64 or 128 bytes."""
    return -(-head_dim // 32) * 32


def _half(block_n: int) -> tuple[int, ...]:
    """Half a block where that is one of its own, as in templates/blocks/wgmma_attention.cuh."""
    return (block_n // 2,) if block_n % 32 == 0 else ()


def _registers(config: Sm90FwdConfig) -> tuple[int, int]:
    return _REGISTERS[config.warpgroups, config.blocks_per_sm]


def _entry_registers(config: Sm90FwdConfig) -> int:
    return register_cap(128 * (config.warpgroups + 1), config.blocks_per_sm)
