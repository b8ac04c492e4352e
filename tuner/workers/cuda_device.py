"""A CUDA device as a `Unit`: it travels to a worker's process, which opens it there."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from flashtune.codegen.compiler.render import Source
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.trial.outcome import Bench


@dataclass(frozen=True, slots=True)
class CudaUnit:
    """CUDA device ``index``, which is ``gpu``. ``uuid`` is empty if not known.

    ``shared`` is whether the process that makes this has the card open itself, as one that called attention() before.
    """

    index: int
    gpu: Gpu
    uuid: str
    shared: bool = False

    @property
    def name(self) -> str:
        return f"cuda:{self.index}"

    def open(self) -> Bench:
        from flashtune.codegen.gpu.cuda import runtime
        from flashtune.tuner.bench.device_bench import DeviceBench

        runtime.setDevice(self.index)  # first of all: no memory is taken of another device
        return DeviceBench(self.index, self.gpu, 2 if self.shared else 1)

    def sources(self, problem: Problem) -> list[Source]:
        from flashtune.tuner.bench.exact import sources

        return sources(problem, self.gpu)


def is_open(index: int) -> bool:
    """Whether this process has CUDA device ``index`` open. CuPy has no such question."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    failed = cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDevicePrimaryCtxGetState(
        device, ctypes.byref(flags), ctypes.byref(active)
    )
    return not failed and active.value != 0
