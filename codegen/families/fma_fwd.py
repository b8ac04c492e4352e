"""Rules of `fma_fwd`: exact attention in float32 or float64 arithmetic on CUDA cores, from sm_75 on.

It is the portable fallback, and with ``accumulate="float64"`` the device reference that other kernels are checked with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config, parameter
from flashtune.codegen.problem.problem import INPUT_DTYPES, ITEM_BYTES, VECTOR_ALIGNMENT, Problem, Spec
from flashtune.errors import UnsupportedProblem

from .counts import Work, fp32_flops_clock, walk
from .family import Family, unsupported_width
from .resources import Resources, register_cap, too_large

MIN_CAPABILITY = (7, 5)
PACK = 4
"""Elements of one access to shared memory; also what each row of a tile there is padded by."""

_FMA_EFFICIENCY = 0.7
"""Part of the float32 rate left to multiply-adds in the inner loop: the rest issues loads and conversions."""
_FLOAT64_RATE = {(8, 0): 0.5, (9, 0): 0.5, (10, 0): 0.5}
"""float64 rate relative to float32, where it is more than the usual 1/64."""
_SCORE_OPERATIONS = 12
"""Per score: exp without the fast approximation, scale, subtract, maximum, sum, the round trip of the weight."""

CHUNK = 8
"""Output columns of a thread that are worked on at once."""
_DEFAULT_SHAPES = (
    (64, 64, 128),
    (64, 32, 128),
    (64, 64, 256),
    (64, 32, 256),
    (32, 32, 128),
    (32, 16, 128),
    (16, 16, 64),
    (16, 16, 128),
)
"""block_m, block_n, num_threads: first those in which a thread does most with what it loads."""

_WORKING_REGISTERS = 35
"""Registers beside accumulators and operands: addresses, loop counters, loads in flight; fitted to NVRTC 13.5."""

CUDA_TYPES = {"float16": "Half", "bfloat16": "BFloat16", "float32": "float", "float64": "double"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FmaFwdConfig(Config):
    """A thread block of ``num_threads`` owns ``block_m`` query rows; ``threads_n`` neighbours share a row."""

    family: ClassVar[str] = "fma_fwd"

    block_m: int = parameter(choices=(16, 32, 64, 128), help="query rows of a thread block")
    block_n: int = parameter(choices=(16, 32, 64, 128), help="keys of one step")
    num_threads: int = parameter(choices=(64, 128, 256), help="threads of a block")
    threads_n: int = parameter(choices=(8, 16, 32), help="threads that share a query row")
    share_kv: bool = parameter(choices=(False, True), help="V takes the place of K in shared memory")
    blocks_per_sm: int = parameter(choices=(1, 2, 3, 4), help="blocks of an SM that the compiler leaves registers for")
    accumulate: str = parameter(
        choices=("float32", "float64"), neutral="float32", searched=False, help="type of scores, sums and output"
    )

    @property
    def threads_m(self) -> int:
        """Groups of threads, each of which has query rows of its own."""
        return self.num_threads // self.threads_n

    @property
    def rows(self) -> int:
        """Query rows of a thread."""
        return self.block_m // self.threads_m

    @property
    def keys(self) -> int:
        """Keys of a thread, in the scores of one step."""
        return self.block_n // self.threads_n


class FmaFwd(Family[FmaFwdConfig]):
    name = "fma_fwd"
    last_resort = True
    config_type = FmaFwdConfig
    entry = "fma_fwd"

    def unsupported(self, spec: Spec, gpu: Gpu) -> str | None:
        if gpu.capability < MIN_CAPABILITY:
            return f"compute capability {gpu.capability[0]}.{gpu.capability[1]} is too old. Supported: 7.5 and later"
        if spec.dtype not in INPUT_DTYPES:
            return f"dtype={spec.dtype} is not supported. Supported: {', '.join(INPUT_DTYPES)}"
        return unsupported_width(spec)

    def illegal(self, config: FmaFwdConfig, spec: Spec, gpu: Gpu) -> str | None:
        if spec.output == "float64" and config.accumulate != "float64":
            return "an output in float64 needs accumulate=float64"
        if spec.value_dim % config.threads_n:
            name = "head_dim_v" if spec.head_dim_v else "head_dim"
            return f"{name}={spec.value_dim} can't be divided among threads_n={config.threads_n}"
        if config.block_m % config.threads_m:
            return f"block_m={config.block_m} does not give each of {config.threads_m} groups of threads whole rows"
        if config.block_n < config.threads_n:
            return f"block_n={config.block_n} gives threads_n={config.threads_n} less than a key each"
        return too_large(self.resources(config, spec), config.blocks_per_sm, gpu)

    def default(self, spec: Spec, gpu: Gpu) -> FmaFwdConfig:
        """The first of a list that does not spill, with two blocks on an SM where that can be had."""
        accumulate = "float64" if spec.output == "float64" else "float32"
        for blocks in (2, 1):
            for (block_m, block_n, num_threads), threads_n, share_kv in itertools.product(
                _DEFAULT_SHAPES, (8, 16), (False, True)
            ):
                config = FmaFwdConfig(
                    block_m=block_m,
                    block_n=block_n,
                    num_threads=num_threads,
                    threads_n=threads_n,
                    share_kv=share_kv,
                    blocks_per_sm=1,
                    accumulate=accumulate,
                )
                needs = self.resources(config, spec)
                fits = blocks * (needs.shared_memory + gpu.shared_memory_reserved) <= gpu.shared_memory_sm
                if fits and needs.spill_free and not self.illegal(config, spec, gpu):
                    return config
        raise UnsupportedProblem(f"{self.name}: no default for {spec} on {gpu}")

    def resources(self, config: FmaFwdConfig, spec: Spec) -> Resources:
        needed = registers(config, spec)
        cap = register_cap(config.num_threads, config.blocks_per_sm)
        margin = 32  # with the next two lines calibrated with NVRTC 13.5, held by a test
        margin += 32 if spec.value_dim // config.threads_n > 16 else 0
        margin += 32 if spec.alignment != VECTOR_ALIGNMENT else 0
        return Resources(
            threads=config.num_threads,
            shared_memory=shared_memory(config, spec),
            registers=needed,
            spill_free=needed + margin <= cap,
        )

    def names(self, config: FmaFwdConfig, spec: Spec) -> Mapping[str, object]:
        return {
            "input_type": CUDA_TYPES[spec.dtype],
            "output_type": CUDA_TYPES[spec.output],
            "accum_type": CUDA_TYPES[config.accumulate],
            "lse_type": "double" if spec.output == "float64" else "float",
            "share_kv": "true" if config.share_kv else "false",
            "aligned": "true" if spec.alignment == VECTOR_ALIGNMENT else "false",
            "out_pack": math.gcd(PACK, spec.value_dim // config.threads_n),
            "shared_memory": shared_memory(config, spec),
        }

    def tiles(self, config: FmaFwdConfig, problem: Problem) -> int:
        return -(-problem.seqlen_q // config.block_m) * problem.batch * problem.num_heads

    def work(self, config: FmaFwdConfig, problem: Problem, gpu: Gpu) -> Work:
        dim, value_dim, item = problem.head_dim, problem.value_dim, ITEM_BYTES[problem.dtype]
        accum = ITEM_BYTES[config.accumulate]
        steps, longest = walk(problem, config.block_m, config.block_n)
        scores = config.block_m * config.block_n
        dims = value_dim // config.threads_n
        out_pack = math.gcd(PACK, dims)
        chunks = -(-dims // CHUNK)
        loads_queries_keys = (config.rows + config.keys) * dim // PACK * _load_bytes(PACK * item)
        loads_weights = chunks * config.rows * config.block_n // PACK * _load_bytes(PACK * accum)
        loads_values = config.block_n * dims // out_pack * _load_bytes(out_pack * item)
        reads = config.num_threads // 32 * (loads_queries_keys + loads_weights + loads_values)
        keys_values = config.block_n * (dim + value_dim) * item
        rate = _FMA_EFFICIENCY * fp32_flops_clock(gpu)
        if config.accumulate == "float64":
            rate *= _FLOAT64_RATE.get(gpu.capability, 1 / 64)
        return Work(
            tiles=self.tiles(config, problem),
            steps=steps,
            longest=longest,
            flops=2 * scores * (dim + value_dim),
            flops_clock=rate,
            tensor=False,
            exponentials=scores,
            alu=_SCORE_OPERATIONS * scores + config.block_m * value_dim,
            shared_bytes=reads + keys_values + scores * accum,
            step_bytes=keys_values,
            tile_bytes=config.block_m * (dim * item + value_dim * ITEM_BYTES[problem.spec.output]),
            stages=0,
        )


def shared_memory(config: FmaFwdConfig, spec: Spec) -> int:
    """Bytes for the weights, Q, K and V; rows are padded. A tile that K and V share holds the wider."""
    weights = config.block_m * (config.block_n + PACK) * ITEM_BYTES[config.accumulate]
    row, row_v = ((width + PACK) * ITEM_BYTES[spec.dtype] for width in (spec.head_dim, spec.value_dim))
    return weights + row * config.block_m + config.block_n * (max(row, row_v) if config.share_kv else row + row_v)


def _load_bytes(lane_bytes: int) -> int:
    """Shared-memory bandwidth that one load of a warp takes. Half of the lanes read what another lane reads."""
    return max(128, 16 * lane_bytes)


def registers(config: FmaFwdConfig, spec: Spec) -> int:
    """Estimate of the registers that a thread needs at once."""
    rows, dims = config.rows, spec.value_dim // config.threads_n
    chunk = min(CHUNK, dims)
    scores = rows * config.keys + PACK * config.keys + PACK  # S = Q K^T: the scores, a pack of K, a pack of Q
    values = rows + rows * chunk + PACK * rows + chunk  # P V: rescale, a chunk of the output, packs of P and V
    return ITEM_BYTES[config.accumulate] // 4 * (rows * dims + 2 * rows + max(scores, values)) + _WORKING_REGISTERS
