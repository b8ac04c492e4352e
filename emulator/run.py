"""Runs a config on the CPU, with the tensors of a problem."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashtune.codegen.families.registry import family
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.plan.plan import POINTERS, describe_map, pack_arguments
from flashtune.codegen.problem.problem import Problem

from .build import build_kernel
from .job import MAP_ALIGNMENT, Launch, Placed, Pointer, check_options
from .source import host_source
from .tensors import (
    MAP_ADDRESS,
    Tensor,
    encode_for_emulator,
    input_tensor,
    output_tensor,
    workspace_tensor,
)

Array = NDArray[Any]

DEFAULT_GPU = "h200"
POINTER_NAMES = ("q", "k", "v", "out", "lse", "workspace")


@dataclass(frozen=True, slots=True, eq=False)
class Emulation:
    """The results of one launch: float32 values of ``out`` and ``lse`` (float64 where the output is).

    ``seed`` decided the order of blocks, warps and lanes. ``build_seconds`` is short where the cache had the program.
    """

    out: Array
    lse: Array
    seed: int
    build_seconds: float
    run_seconds: float


def emulate(
    problem: Problem,
    config: Config,
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    seed: int = 0,
    out_strides: Sequence[int] | None = None,
    want_lse: bool = True,
    gpu: Gpu | None = None,
    processes: int = 1,
    timeout: int = 120,
    templates: Mapping[str, str] | None = None,
) -> Emulation:
    """Runs ``config`` for ``problem`` on the CPU and checks what the kernel does on the way.

    q, k and v have the problem's shapes and any strides, in the problem's dtype (16-bit floats also as uint16 bits) or
    as float32 or float64, which is rounded. ``out_strides`` count elements: (batch, row, head, 1). ``gpu`` only decides
    which configs are legal; by default an H200. ``templates`` replaces template files by name: to try a change.

    Raises :class:`EmulationError` where the kernel does what it must not, with block, thread and template lines;
    :class:`CompileError` where the source uses what is not modelled; :class:`MissingDependency` without a compiler.
    """
    check_options(seed, processes, timeout)
    kind = family(config.family)
    plan = kind.plan(problem, config, gpu or gpu_by_alias(DEFAULT_GPU))
    (kernel,) = plan.kernels

    q_shape, k_shape, v_shape, out_shape = problem.shapes
    out_dtype = problem.spec.output
    lse_dtype = "float64" if out_dtype == "float64" else "float32"
    given = (("q", q, q_shape), ("k", k, k_shape), ("v", v, v_shape))
    inputs = [input_tensor(name, array, problem, shape) for name, array, shape in given]
    spaced = None if out_strides is None else tuple(out_strides)
    tensors = [*inputs, output_tensor("out", out_dtype, out_shape, spaced, problem.alignment)]
    if want_lse:
        tensors.append(output_tensor("lse", lse_dtype, (problem.batch, problem.num_heads, problem.seqlen_q)))
    if plan.workspace_bytes:
        tensors.append(workspace_tensor(plan))
    strides = (
        tensors[0].launch_strides, tensors[1].launch_strides, tensors[2].launch_strides, tensors[3].launch_strides
    )  # fmt: skip
    arguments = pack_arguments(plan, strides, problem.default_scale if scale is None else scale)

    started = time.perf_counter()
    program = build_kernel(host_source(kind, problem.spec, config, templates))
    built = time.perf_counter()
    params = bytes(POINTERS.size) + arguments
    addresses = {name: [Pointer(index * 8)] for index, name in enumerate(POINTER_NAMES)}
    if kernel.boxes:
        params += bytes(-len(params) % MAP_ALIGNMENT)
    for box in kernel.boxes:
        addresses[box.tensor].append(Pointer(len(params) + MAP_ADDRESS))
        params += encode_for_emulator(describe_map(box, problem, strides, 0))
    placed = [Placed(tensor, tuple(addresses[tensor.name]), _beyond(tensor, problem)) for tensor in tensors]
    launch = Launch(kernel.grid, kernel.threads, kernel.shared_memory, params, placed)
    results = launch.run(program, f"{config} for {problem}", seed, processes, timeout)
    ended = time.perf_counter()
    return Emulation(
        out=results["out"],
        lse=results["lse"] if want_lse else np.empty(0, np.float32),
        seed=seed,
        build_seconds=built - started,
        run_seconds=ended - built,
    )


def _beyond(tensor: Tensor, problem: Problem) -> int:
    """Element (0, 0, ...) starts on 16 bytes, or on one element and no more."""
    item = tensor.memory.itemsize
    return 0 if problem.alignment > item or tensor.name in ("lse", "workspace") else item
