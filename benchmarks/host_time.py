"""Host time of a warm `attention()` call for CuPy and torch, output allocation and launch included.

    python benchmarks/host_time.py --out benchmarks/results/host_time_h200.json

The smallest problem, 8 rotating sets of inputs, fresh outputs, a synchronisation every 200 calls; it is not in the
time. Each figure is the median over rounds, after a warm-up of some seconds: on virtual machines a process can run at
half speed until then. torch's SDPA and `torch.empty_like` are timed in the same run, for scale.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from environment import environment

from flashtune import attention

SETS = 8
CALLS = 200
"""Between two synchronisations: fewer than the launches that a device queues."""
ROUNDS = 100
SHAPE = (1, 16, 1, 64)

Call = Callable[[Any, Any, Any], Any]


def cupy_sets() -> tuple[list[tuple[Any, ...]], Callable[[], Any]]:
    import cupy

    draw = np.random.default_rng(0)
    sets = [tuple(cupy.asarray(draw.standard_normal(SHAPE).astype(np.float16)) for _ in "qkv") for _ in range(SETS)]
    return sets, cupy.cuda.runtime.deviceSynchronize


def torch_sets() -> tuple[list[tuple[Any, ...]], Callable[[], Any]]:
    import torch

    sets = [tuple(torch.randn(SHAPE, device="cuda", dtype=torch.float16) for _ in "qkv") for _ in range(SETS)]
    return sets, torch.cuda.synchronize


def rounds(call: Call, sets: list[tuple[Any, ...]], wait: Callable[[], Any]) -> list[float]:
    """Microseconds per call, one figure per round."""
    times = []
    for _ in range(ROUNDS):
        wait()
        start = time.perf_counter()
        for number in range(CALLS):
            q, k, v = sets[number % SETS]
            call(q, k, v)
        times.append(1e6 * (time.perf_counter() - start) / CALLS)
    return times


def host_times(library: str, warm_seconds: float) -> dict[str, float]:
    sets, wait = cupy_sets() if library == "cupy" else torch_sets()
    out = attention(*sets[0])
    calls: dict[str, Call] = {
        "attention": attention,
        "attention, causal, LSE": lambda q, k, v: attention(q, k, v, causal=True, return_lse=True),
        "attention, out given": lambda q, k, v: attention(q, k, v, out=out),
    }
    if library == "torch":
        import torch

        heads_first = {id(q): [each.transpose(1, 2) for each in (q, k, v)] for q, k, v in sets}
        sdpa = torch.nn.functional.scaled_dot_product_attention
        calls["torch SDPA"] = lambda q, k, v: sdpa(*heads_first[id(q)])
        calls["torch.empty_like"] = lambda q, k, v: torch.empty_like(q)
    until = time.monotonic() + warm_seconds
    while time.monotonic() < until:
        rounds(attention, sets, wait)
    return {name: round(statistics.median(rounds(call, sets, wait)), 2) for name, call in calls.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", help="cupy, torch (default: those installed)")
    parser.add_argument("--warm", type=float, default=8.0, help="seconds of warm-up per library (default: 8)")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    options = parser.parse_args()
    installed = [name for name in ("cupy", "torch") if importlib.util.find_spec(name)]
    times = {library: host_times(library, options.warm) for library in options.libraries or installed}
    for library, figures in times.items():
        for what, micros in figures.items():
            print(f"{library:6} {what:24} {micros:7.2f} us", flush=True)
    if options.out:
        result = {"what": __doc__, "environment": environment(), "us_per_call": times}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
