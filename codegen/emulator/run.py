"""Runs a config on the CPU: a job file, a program built from the generated source, results back."""

from __future__ import annotations

import os
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashtune.errors import EmulationError, InvalidInput

from ..config import Config
from ..family import family
from ..gpu import Gpu, gpu_by_alias
from ..plan import PARAMS_BYTES, POINTERS, Kernel, Plan, pack_arguments
from ..problem import Problem
from .build import build_kernel
from .faults import read_fault
from .source import host_source
from .tensors import Tensor, input_tensor, output_tensor

Array = NDArray[Any]

DEFAULT_GPU = "h200"
FAULT_STATUS = 3
MAX_SEED = 2**64

_JOB = struct.Struct("<Q10I")
_ENTRY = struct.Struct("<16sQQ4I")
_ALIGNED = 256
"""Bytes: what allocations of CUDA start on."""


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
    if not 0 <= seed < MAX_SEED:
        raise InvalidInput(f"seed={seed} must be at least 0 and below 2**64")
    for name, number in (("processes", processes), ("timeout", timeout)):
        if number < 1:
            raise InvalidInput(f"{name}={number} must be at least 1")
    kind = family(config.family)
    plan = kind.plan(problem, config, gpu or gpu_by_alias(DEFAULT_GPU))
    (kernel,) = plan.kernels

    q_shape = (problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim)
    kv_shape = (problem.batch, problem.seqlen_k, problem.num_heads_kv, problem.head_dim)
    out_dtype = problem.spec.output
    lse_dtype = "float64" if out_dtype == "float64" else "float32"
    given = (("q", q, q_shape), ("k", k, kv_shape), ("v", v, kv_shape))
    inputs = [input_tensor(name, array, problem, shape) for name, array, shape in given]
    spaced = None if out_strides is None else tuple(out_strides)
    tensors = [*inputs, output_tensor("out", out_dtype, q_shape, spaced, problem.alignment)]
    if want_lse:
        tensors.append(output_tensor("lse", lse_dtype, (problem.batch, problem.num_heads, problem.seqlen_q)))
    strides = (
        tensors[0].launch_strides, tensors[1].launch_strides, tensors[2].launch_strides, tensors[3].launch_strides
    )  # fmt: skip
    arguments = pack_arguments(problem, strides, problem.default_scale if scale is None else scale)

    started = time.perf_counter()
    program = build_kernel(host_source(kind, problem.spec, config, templates))
    built = time.perf_counter()
    results = _launch(plan, kernel, program, arguments, tensors, seed, processes, timeout)
    ended = time.perf_counter()
    return Emulation(
        out=results["out"],
        lse=results["lse"] if want_lse else np.empty(0, np.float32),
        seed=seed,
        build_seconds=built - started,
        run_seconds=ended - built,
    )


def _launch(
    plan: Plan,
    kernel: Kernel,
    program: Path,
    arguments: bytes,
    tensors: Sequence[Tensor],
    seed: int,
    processes: int,
    timeout: int,
) -> dict[str, Array]:
    """Runs ``program`` and reads what it wrote: values by tensor name."""
    job, places = _job(kernel, arguments, tensors, plan.problem, seed, processes, timeout)
    file, path = tempfile.mkstemp(prefix="flashtune-emulate-")
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(job)
        what = f"{plan.config} for {plan.problem}, seed {seed}"
        try:
            # The program ends itself, saying where it hangs; twice the time is for one that can't any more.
            done = subprocess.run(
                [str(program), path], capture_output=True, text=True, errors="replace", timeout=2 * timeout, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise EmulationError(f"{what}: the emulator has not ended after {2 * timeout} s") from error
        if done.returncode:
            fault = read_fault(done.stderr, program)
            if fault is None or done.returncode != FAULT_STATUS:
                raise EmulationError(f"{what}: the emulator ended with status {done.returncode}: {done.stderr[:500]}")
            raise EmulationError(f"{what}: {fault}", fault=fault)
        written = Path(path).read_bytes()
    finally:
        Path(path).unlink(missing_ok=True)
    results = {}
    for tensor, place in zip(tensors, places, strict=True):
        if tensor.writable:
            memory = np.frombuffer(written, tensor.memory.dtype, tensor.memory.size, place)
            if changed := tensor.gaps(memory):
                raise EmulationError(f"{what}: wrote {changed} bytes between the elements of {tensor.name}")
            results[tensor.name] = tensor.values(memory)
    return results


def _job(
    kernel: Kernel,
    arguments: bytes,
    tensors: Sequence[Tensor],
    problem: Problem,
    seed: int,
    processes: int,
    timeout: int,
) -> tuple[bytes, list[int]]:
    """The job file, as runtime.cpp reads it, and where in it the memory of each tensor lies."""
    params_offset = _JOB.size + len(tensors) * _ENTRY.size
    end = params_offset + PARAMS_BYTES
    head = _JOB.pack(
        seed, *kernel.grid, kernel.threads, kernel.shared_memory, processes, timeout, PARAMS_BYTES, len(tensors),
        params_offset,
    )  # fmt: skip
    entries, places, contents = [], [], []
    pointers = ("q", "k", "v", "out", "lse")
    for tensor in tensors:
        place = -(-end // _ALIGNED) * _ALIGNED
        contents.append(bytes(place - end) + tensor.memory.tobytes())
        end = place + tensor.memory.nbytes
        places.append(place)
        item = tensor.memory.itemsize
        # Element (0, 0, ...) starts on 16 bytes, or on one element and no more.
        first = 0 if problem.alignment > item or tensor.name == "lse" else item
        misaligned = (first - tensor.begin * item) % _ALIGNED
        pointer = pointers.index(tensor.name) * POINTERS.size // len(pointers)
        begin = tensor.begin * item
        name, size = tensor.name.encode(), tensor.memory.nbytes
        entries.append(_ENTRY.pack(name, place, size, pointer, misaligned, tensor.writable, begin))
    return b"".join([head, *entries, bytes(POINTERS.size), arguments, *contents]), places
