"""A CUDA device as a `Unit`: it travels to a worker's process, which opens it there."""

from __future__ import annotations

from dataclasses import dataclass

from flashtune.codegen.gpu import Gpu
from flashtune.codegen.problem import Problem
from flashtune.codegen.render import Source

from .trial import Bench


@dataclass(frozen=True, slots=True)
class CudaUnit:
    """CUDA device ``index``, which is ``gpu``. ``uuid`` is empty if not known."""

    index: int
    gpu: Gpu
    uuid: str

    @property
    def name(self) -> str:
        return f"cuda:{self.index}"

    def open(self) -> Bench:
        from cupy.cuda import runtime

        from .bench import DeviceBench

        runtime.setDevice(self.index)  # first of all: no memory is taken of another device
        return DeviceBench(self.index, self.gpu)

    def sources(self, problem: Problem) -> list[Source]:
        from .exact import sources

        return sources(problem, self.gpu)
