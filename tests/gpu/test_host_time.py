"""What a warm call costs the host: at most 12 us, for CuPy and torch, output allocation and launch included.

``python tests/gpu/test_host_time.py`` prints the figures without pytest.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashtune import attention

pytestmark = pytest.mark.gpu

LIMIT_US = 12.0
SETS = 8
CALLS = 200
"""Between two synchronisations: fewer than the launches that a device queues."""
ROUNDS = 30
SHAPE = (1, 16, 1, 64)


def host_time(
    call: Callable[[Any, Any, Any], Any], sets: list[tuple[Any, Any, Any]], wait: Callable[[], None]
) -> float:
    """Median over rounds of the mean host time of a call, in microseconds. Waiting for the device is not in it."""
    times = []
    for _ in range(ROUNDS):
        wait()
        start = time.perf_counter()
        for number in range(CALLS):
            q, k, v = sets[number % SETS]
            call(q, k, v)
        times.append((time.perf_counter() - start) / CALLS)
    return 1e6 * statistics.median(times[2:])


def cupy_sets() -> tuple[list[tuple[Any, Any, Any]], Callable[[], None]]:
    import cupy

    draw = np.random.default_rng(0)

    def array() -> Any:
        return cupy.asarray(draw.standard_normal(SHAPE).astype(np.float16))

    return [(array(), array(), array()) for _ in range(SETS)], cupy.cuda.runtime.deviceSynchronize


def torch_sets() -> tuple[list[tuple[Any, Any, Any]], Callable[[], None]]:
    import torch

    draw = np.random.default_rng(0)

    def tensor() -> Any:
        return torch.from_numpy(draw.standard_normal(SHAPE).astype(np.float16)).cuda()

    return [(tensor(), tensor(), tensor()) for _ in range(SETS)], torch.cuda.synchronize


def host_times(name: str) -> dict[str, float]:
    """Microseconds per call by what is called; for torch SDPA is among them, on the same inputs."""
    sets, wait = cupy_sets() if name == "cupy" else torch_sets()
    out = attention(*sets[0])
    found = {
        "attention": host_time(lambda q, k, v: attention(q, k, v), sets, wait),
        "attention, causal, LSE": host_time(
            lambda q, k, v: attention(q, k, v, causal=True, return_lse=True), sets, wait
        ),
        "attention, out given": host_time(lambda q, k, v: attention(q, k, v, out=out), sets, wait),
    }
    if name == "torch":
        import torch

        sdpa = torch.nn.functional.scaled_dot_product_attention
        heads_first = [tuple(each.transpose(1, 2) for each in one) for one in sets]
        with torch.no_grad():
            found["torch SDPA"] = host_time(lambda q, k, v: sdpa(q, k, v), heads_first, wait)
        found["torch.empty_like"] = host_time(lambda q, k, v: torch.empty_like(q), sets, wait)
    return found


def table(name: str, times: dict[str, float]) -> str:
    return "\n".join(f"{name:6} {what:24} {micros:7.2f} us" for what, micros in times.items())


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_a_warm_call_is_cheap(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        if not torch.cuda.is_available():
            pytest.skip("the torch installed has no CUDA")
    times = host_times(name)
    with capsys.disabled():
        print("\n" + table(name, times))
    slow = {what: micros for what, micros in times.items() if what.startswith("attention") and micros > LIMIT_US}
    assert not slow, f"above {LIMIT_US} us:\n{table(name, times)}"


if __name__ == "__main__":
    for library in sys.argv[1:] or ["cupy", "torch"]:
        print(table(library, host_times(library)), flush=True)
