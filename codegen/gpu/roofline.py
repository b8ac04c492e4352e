"""The least time that a card's rates allow for a problem: arithmetic or device memory, whichever takes longer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashtune.codegen.problem.problem import Problem

from .gpu import Gpu


@dataclass(frozen=True, slots=True)
class Limit:
    """What `Gpu` states as rates: those of the vendor, at the boost clock. Nothing reaches them fully."""

    seconds: float
    by: Literal["tensor rate", "float32 rate", "bandwidth"]
    tflops: float
    """The rate of arithmetic for the problem's dtype, in 10^12 operations per second."""

    def reached(self, seconds: float) -> float:
        """The part of the limit that a kernel of ``seconds`` reaches, 1 being all of it."""
        return self.seconds / seconds


def limit(problem: Problem, gpu: Gpu) -> Limit:
    """16-bit problems run on tensor cores where the card has any; softmax is not counted, inputs are read once."""
    tensor, rate = _rate(problem, gpu)
    arithmetic = problem.flops / (rate * 1e12)
    memory = problem.min_bytes / (gpu.bandwidth_gb_s * 1e9)
    if memory > arithmetic:
        return Limit(memory, "bandwidth", rate)
    return Limit(arithmetic, "tensor rate" if tensor else "float32 rate", rate)


def least_seconds(problem: Problem, gpu: Gpu) -> float:
    """What bounds even a launch that finds its tensors where the last one left them: only what is more than L2 holds
    comes from device memory then."""
    _, rate = _rate(problem, gpu)
    memory = max(0, problem.min_bytes - gpu.l2_bytes) / (gpu.bandwidth_gb_s * 1e9)
    return max(problem.flops / (rate * 1e12), memory)


def _rate(problem: Problem, gpu: Gpu) -> tuple[bool, float]:
    """Whether tensor cores do the arithmetic, and 10^12 operations per second."""
    tensor = problem.dtype != "float32" and gpu.tensor_tflops > 0
    return tensor, gpu.tensor_tflops if tensor else gpu.fp32_tflops
