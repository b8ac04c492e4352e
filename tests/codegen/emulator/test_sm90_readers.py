"""Which lanes have read shared memory that one thread then writes, on sm_90: each of them counts, and no other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from toy_small import run_small

from flashtune.errors import EmulationError

pytestmark = pytest.mark.emulate


@dataclass(frozen=True)
class Readers:
    """Lanes that read number 5, then a write. In ``late`` the read of thread ``by`` is where nothing orders it."""

    good: str
    late: str
    by: int
    arrivals: int = 1


READ = "out[thread] = floats[5];"
PRODUCT = (
    "float d[4] = {}; const u32 a[4] = {}; wgmma_fence();"
    "wgmma_registers<Element, false>(d, &a, matrix_descriptor(tile, 128, 128, MatrixSwizzle::kNone), false);"
    "wgmma_commit(); wgmma_wait<0>();"
)
"""Reads 256 bytes of ``floats``."""
FIVE_WRITES = "if (thread == 5) { mbarrier_wait(bar, 0); floats[5] += 1; }"
OTHER_WARP_WRITES = "if (thread == 40) { mbarrier_wait(bar, 0); floats[5] = 1; }"
THREE_READ = f"if (thread < 2) {READ} if (thread == 0 || thread == 2) out[thread + 1] = floats[6];"
OTHER_WARP_LOADS = (
    "if (thread == 40) { mbarrier_wait(bar, 0); mbarrier_arrive_expect_tx(bar + 8, 512); mbarrier_arrive(bar + 8);"
    "mbarrier_arrive(bar + 8); tma_load_4d(tile, &map, bar + 8, 0, 0, 0, 0); mbarrier_wait(bar + 8, 0); }"
)
READERS = {
    "the writer reads first": Readers(
        f"if (thread == 0) {{ {READ} mbarrier_arrive(bar); }} {FIVE_WRITES}",
        f"if (thread == 0) {{ mbarrier_arrive(bar); {READ} }} {FIVE_WRITES}",
        by=0,
    ),
    "the writer knows the clocks of all other lanes": Readers(
        f"if (thread < 32 && thread != 5) {{ if (thread == 0) {READ} mbarrier_arrive(bar); }} {FIVE_WRITES}",
        f"if (thread < 32 && thread != 5) {{ mbarrier_arrive(bar); if (thread == 0) {READ} }} {FIVE_WRITES}",
        by=0,
        arrivals=31,
    ),
    "two lanes arrive": Readers(
        f"if (thread < 2) {{ {READ} mbarrier_arrive(bar); }} {OTHER_WARP_WRITES}",
        f"if (thread < 2) {{ {READ} if (thread == 0) mbarrier_arrive(bar); }}"
        f"if (thread == 2) mbarrier_arrive(bar); {OTHER_WARP_WRITES}",
        by=1,
        arrivals=2,
    ),
    "all lanes arrive": Readers(
        f"if (thread < 32) {{ {READ} mbarrier_arrive(bar); }} {OTHER_WARP_WRITES}",
        f"if (thread < 32) {{ if (thread != 1) {READ} mbarrier_arrive(bar); if (thread == 1) {READ} }}"
        f"{OTHER_WARP_WRITES}",
        by=1,
        arrivals=32,
    ),
    "one behind the other": Readers(
        f"if (thread == 0) {{ {READ} mbarrier_arrive(bar + 8); }}"
        f"if (thread == 5) {{ mbarrier_wait(bar + 8, 0); {READ} mbarrier_arrive(bar); }} {OTHER_WARP_WRITES}",
        f"if (thread == 0) {{ {READ} mbarrier_arrive(bar); mbarrier_arrive(bar + 8); }}"
        f"if (thread == 5) {{ mbarrier_wait(bar + 8, 0); {READ} }} {OTHER_WARP_WRITES}",
        by=5,
    ),
    "a lane behind a product": Readers(
        f"{PRODUCT} if (thread % 32 == 0) {{ {READ} mbarrier_arrive(bar); }} {OTHER_WARP_WRITES}",
        f"{PRODUCT} if (thread % 32 == 0) {{ if (thread != 0) {READ} mbarrier_arrive(bar); if (thread == 0) {READ} }}"
        f"{OTHER_WARP_WRITES}",
        by=0,
        arrivals=4,
    ),
    "a load over what different lanes have read": Readers(
        f"{THREE_READ} if (thread < 3) mbarrier_arrive(bar); {OTHER_WARP_LOADS}",
        f"{THREE_READ} if (thread < 4 && thread != 2) mbarrier_arrive(bar); {OTHER_WARP_LOADS}",
        by=2,
        arrivals=3,
    ),
}


@pytest.mark.parametrize("case", READERS.values(), ids=READERS)
def test_a_writer_must_come_behind_each_lane_that_has_read_and_no_other(case: Readers) -> None:
    begin = "floats[thread] = thread; fence_proxy_async(); __syncthreads();"
    what = rf"(writes|starts a TMA load to) .* which thread {case.by} \(.*\) read at .*: no barrier orders the two"
    for seed in range(6):
        assert run_small(begin + case.good, case.arrivals, seed=seed)[0] == 5
        with pytest.raises(EmulationError, match=what):
            run_small(begin + case.late, case.arrivals, seed=seed)
