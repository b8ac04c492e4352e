"""A CUDA device whose worker spoils the kernels of some configs. Worker processes import this file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from flashtune.codegen.plan.plan import Plan
from flashtune.tuner.trial.outcome import Bench
from flashtune.tuner.workers.cuda_device import CudaUnit

BEGIN = "const i64 batch = tile.batch;"
"""In fma_fwd: what every thread of a block that has work comes by."""
DEEDS = {
    "illegal access": "*(volatile int*)16 = 1;",
    "hang": "while (true) { __nanosleep(1000); }",  # the compiler drops a loop that does nothing
}


@dataclass(frozen=True)
class SabotagedUnit(CudaUnit):
    """``deeds`` are pairs of a config's key and one of `DEEDS`."""

    deeds: tuple[tuple[str, str], ...] = ()

    def open(self) -> Bench:
        from flashtune.tuner.bench import device_bench

        real, deeds = device_bench.load, dict(self.deeds)

        def load(plan: Plan, device: int) -> Any:
            deed = deeds.get(plan.config.key)
            if deed is None or plan.problem.out_dtype:
                return real(plan, device)
            (kernel,) = plan.kernels
            assert BEGIN in kernel.source.text
            text = kernel.source.text.replace(BEGIN, f"{BEGIN} {DEEDS[deed]}")
            spoilt = dataclasses.replace(kernel, source=dataclasses.replace(kernel.source, text=text))
            return real(dataclasses.replace(plan, kernels=(spoilt,)), device)

        device_bench.load = load
        return CudaUnit.open(self)
