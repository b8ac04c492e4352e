"""F14: times of a real card, launched by a host that is slowed down on purpose."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import pytest
from streams import SLEEP

from flashtune.codegen.gpu.devices import require_device

pytestmark = pytest.mark.gpu

CYCLES = 13_000
"""About 7.5 us."""
LAUNCHES = 64


def test_host_time_is_in_no_time_or_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    from flashtune.codegen.gpu.cuda import cupy
    from flashtune.tuner.bench.timer import Timer

    kernel = cupy.RawKernel(SLEEP, "sleep_cycles")
    timer = Timer(require_device().l2_bytes)

    def launcher(host: float) -> Callable[[], None]:
        def launch() -> None:
            begun = time.perf_counter()
            while time.perf_counter() - begun < host:
                pass
            kernel((1,), (1,), (np.int64(CYCLES),))

        return launch

    with timer._stream:
        timer.settle(launcher(0.0))
        timer.noticed()
        quick = statistics.median(timer.seconds(launcher(0.0), LAUNCHES))
        found = {0.0: (quick, timer.noticed())}
        for host in (20e-6, 75e-6, 200e-6, 0.003):
            found[host] = statistics.median(timer.seconds(launcher(host), LAUNCHES)), timer.noticed()
    with capsys.disabled():
        for host, (seconds, said) in found.items():
            print(f"\nlaunched in {1e6 * host:.0f} us: {1e6 * seconds:.2f} us {said}", end="")
    assert 4e-6 < quick < 20e-6
    for host, (seconds, said) in found.items():
        assert said == ["slow_host"] or seconds == pytest.approx(quick, rel=0.05), host
    assert not any(said for host, (_, said) in found.items() if host <= 75e-6)
    assert found[0.003][1] == ["slow_host"]
