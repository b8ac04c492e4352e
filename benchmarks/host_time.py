"""Host time of a warm `attention()` call for CuPy and torch, output allocation and launch included.

    python benchmarks/host_time.py --out benchmarks/results/host_time_h200.json

The smallest problem, and one that `sm90_fwd` serves on Hopper: tensor maps, with a mask also a counter. 8 rotating
sets of inputs, fresh outputs, a synchronisation every 200 calls; it is not in the time. All kinds of calls take turns,
so that a slower second of the machine falls on each of them, and each figure is the median over rounds, after a warm-up
of some seconds: on virtual machines a process can run at half speed until then. torch's SDPA, `torch.empty_like` and
`cupy.ndarray` are timed in the same run, for scale.
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
SMALLEST = (1, 16, 1, 64)
LARGER = (1, 1024, 16, 128)

Call = Callable[[Any, Any, Any], Any]
Sets = list[tuple[Any, ...]]


def cupy_sets(shape: tuple[int, ...]) -> Sets:
    import cupy

    draw = np.random.default_rng(0)
    return [tuple(cupy.asarray(draw.standard_normal(shape).astype(np.float16)) for _ in "qkv") for _ in range(SETS)]


def torch_sets(shape: tuple[int, ...]) -> Sets:
    import torch

    return [tuple(torch.randn(shape, device="cuda", dtype=torch.float16) for _ in "qkv") for _ in range(SETS)]


def waiting(library: str) -> Callable[[], Any]:
    if library == "cupy":
        import cupy

        wait: Callable[[], Any] = cupy.cuda.runtime.deviceSynchronize
    else:
        import torch

        wait = torch.cuda.synchronize
    return wait


def micros(call: Call, sets: Sets, wait: Callable[[], Any]) -> float:
    """Per call, over one round."""
    wait()
    start = time.perf_counter()
    for number in range(CALLS):
        q, k, v = sets[number % SETS]
        call(q, k, v)
    return 1e6 * (time.perf_counter() - start) / CALLS


def calls_of(library: str) -> dict[str, tuple[Call, Sets]]:
    sets, larger = map(cupy_sets if library == "cupy" else torch_sets, (SMALLEST, LARGER))
    out = attention(*sets[0])
    calls: dict[str, Call] = {
        "attention": attention,
        "attention, causal, LSE": lambda q, k, v: attention(q, k, v, causal=True, return_lse=True),
        "attention, out given": lambda q, k, v: attention(q, k, v, out=out),
    }
    if library == "cupy":
        import cupy

        calls["cupy.ndarray"] = lambda q, k, v: cupy.ndarray(q.shape, q.dtype)
    else:
        import torch

        heads_first = {id(q): [each.transpose(1, 2) for each in (q, k, v)] for q, k, v in sets}
        sdpa = torch.nn.functional.scaled_dot_product_attention
        calls["torch SDPA"] = lambda q, k, v: sdpa(*heads_first[id(q)])
        calls["torch.empty_like"] = lambda q, k, v: torch.empty_like(q)
    return {name: (call, sets) for name, call in calls.items()} | {
        "attention, 1024 tokens": (attention, larger),
        "attention, 1024 tokens, causal": (lambda q, k, v: attention(q, k, v, causal=True), larger),
    }


def host_times(libraries: list[str], warm_seconds: float) -> dict[str, dict[str, float]]:
    calls = {library: calls_of(library) for library in libraries}
    waits = {library: waiting(library) for library in libraries}
    times: dict[tuple[str, str], list[float]] = {
        (library, name): [] for library in libraries for name in calls[library]
    }
    until = time.monotonic() + warm_seconds
    rounds = 0
    while rounds < ROUNDS:
        warm = time.monotonic() >= until
        for (library, name), found in times.items():
            micro = micros(*calls[library][name], waits[library])
            if warm:
                found.append(micro)
        rounds += warm
    return {
        library: {name: round(statistics.median(times[library, name]), 2) for name in calls[library]}
        for library in libraries
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", help="cupy, torch (default: those installed)")
    parser.add_argument("--warm", type=float, default=8.0, help="seconds of warm-up (default: 8)")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    options = parser.parse_args()
    installed = [name for name in ("cupy", "torch") if importlib.util.find_spec(name)]
    times = host_times(options.libraries or installed, options.warm)
    for library, figures in times.items():
        for what, micros in figures.items():
            print(f"{library:6} {what:32} {micros:7.2f} us", flush=True)
    if options.out:
        result = {"what": __doc__, "environment": environment(), "us_per_call": times}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
