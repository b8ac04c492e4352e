"""mbarriers, named barriers and what else single threads do on sm_90, on kernels of a few lines."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from toy_small import run_small

from flashtune.emulator.faults import Fault
from flashtune.errors import CompileError, EmulationError

pytestmark = pytest.mark.emulate

Array = NDArray[Any]
SEEDS = range(2)

NEXT = "(thread + 1) % 128"
SMALL_GOOD = {
    "a fresh barrier has completed parity 1": ("mbarrier_wait(bar, 1); out[thread] = 1;", 128, np.ones(128)),
    "arrivals order memory": (
        f"floats[thread] = thread; mbarrier_arrive(bar); mbarrier_wait(bar, 0); out[thread] = floats[{NEXT}];",
        128,
        (np.arange(128) + 1) % 128,
    ),
    "one lane speaks for a warp behind a barrier of the warp": (
        f"floats[thread] = thread; __syncwarp(); if (thread % 32 == 0) mbarrier_arrive(bar); mbarrier_wait(bar, 0);"
        f"out[thread] = floats[{NEXT}];",
        4,
        (np.arange(128) + 1) % 128,
    ),
    "what one lane has waited for, the warp knows behind a barrier": (
        f"floats[thread] = thread; mbarrier_arrive(bar); if (thread % 32 == 7) mbarrier_wait(bar, 0); __syncwarp();"
        f"out[thread] = floats[{NEXT}];",
        128,
        (np.arange(128) + 1) % 128,
    ),
    "phases in turn": (
        "float sum = 0; for (int turn = 0; turn < 5; ++turn) { floats[thread] = thread + turn; mbarrier_arrive(bar);"
        f"mbarrier_wait(bar, turn & 1); sum += floats[{NEXT}]; mbarrier_arrive(bar + 8);"
        "mbarrier_wait(bar + 8, turn & 1); } out[thread] = sum;",
        128,
        5 * ((np.arange(128) + 1) % 128) + 10,
    ),
    "a loop of tests": (
        f"floats[thread] = thread; mbarrier_arrive(bar); while (!mbarrier_test_wait(bar, 0)) {{}}"
        f"out[thread] = floats[{NEXT}];",
        128,
        (np.arange(128) + 1) % 128,
    ),
    "bytes come before they are announced": (
        "if (thread == 0) { tma_load_4d(tile, &map, bar, 0, 0, 0, 0); mbarrier_expect_tx(bar, 512);"
        "mbarrier_arrive(bar); } while (!mbarrier_try_wait(bar, 0)) {} out[thread] = floats[thread];",
        1,
        np.arange(128),
    ),
    "invalidated, and used again": (
        "mbarrier_arrive(bar); mbarrier_wait(bar, 0); __syncthreads(); if (thread == 0) { mbarrier_invalidate(bar);"
        "mbarrier_init(bar, 128); fence_mbarrier_init(); } __syncthreads(); mbarrier_arrive(bar);"
        "mbarrier_wait(bar, 0); out[thread] = 1;",
        128,
        np.ones(128),
    ),
    "a barrier of a part of the block": (
        "floats[thread] = thread; if (thread < 64) { named_barrier_sync(3, 64); out[thread] = floats[thread ^ 32]; }"
        "else { named_barrier_arrive(4, 64); out[thread] = 1; }",
        1,
        np.where(np.arange(128) < 64, np.arange(128) ^ 32, 1),
    ),
    "some arrive, some wait": (
        "floats[thread] = thread; if (thread < 64) { named_barrier_arrive(3, 128); out[thread] = 1; }"
        "else { named_barrier_sync(3, 128); out[thread] = floats[thread - 64]; }",
        1,
        np.where(np.arange(128) < 64, 1, np.arange(128) - 64),
    ),
    "one thread hands out numbers, warps take them": (
        "if (thread == 0) { mbarrier_init(bar + 16, 4); fence_mbarrier_init(); } __syncthreads();"
        "u32* next = reinterpret_cast<u32*>(floats); float sum = 0; for (int turn = 0; turn < 6; ++turn) {"
        "if (thread == 5) { mbarrier_wait(bar + 16, turn & 1 ^ 1); *next = 10 * turn; mbarrier_arrive(bar); }"
        "mbarrier_wait(bar, turn & 1); sum += *next; __syncwarp(); if (thread % 32 == 0) mbarrier_arrive(bar + 16); }"
        "out[thread] = sum;",
        1,
        np.full(128, 150),
    ),
    "one lane is elected, the same each time": (
        "const bool first = elect_one(), again = elect_one(); out[thread] = (first == again) + 2 *"
        "(__ballot_sync(~0u, first) != 0 && (__ballot_sync(~0u, first) & (__ballot_sync(~0u, first) - 1)) == 0);",
        1,
        np.full(128, 3),
    ),
    "matrices from registers": (
        "u16* halves = reinterpret_cast<u16*>(floats); for (int i = thread; i < 256; i += 128) halves[i] = i;"
        "__syncthreads(); if (thread < 32) { u32 a[4]; ldmatrix_x4(a, tile + thread * 16);"
        "stmatrix_x4_trans(tile + 512 + thread * 16, a); } __syncthreads(); float wrong = 0;"
        "for (int i = thread; i < 256; i += 128) wrong += halves[256 + i] != i / 64 * 64 + i % 8 * 8 + i / 8 % 8;"
        "out[thread] = wrong;",
        1,
        np.zeros(128),
    ),
    "the largest of three": ("out[thread] = __vimax3_s32(thread, 5, -thread);", 1, np.maximum(np.arange(128), 5)),
}


@pytest.mark.parametrize(("body", "arrivals", "expected"), SMALL_GOOD.values(), ids=SMALL_GOOD)
def test_barriers_do_what_they_say(body: str, arrivals: int, expected: Array) -> None:
    for seed in range(6):
        np.testing.assert_array_equal(run_small(body, arrivals, seed=seed), expected, err_msg=f"seed {seed}")


SMALL_FAULTS = {
    "one lane speaks for a warp": (
        f"floats[thread] = thread; if (thread % 32 == 0) mbarrier_arrive(bar); mbarrier_wait(bar, 0);"
        f"out[thread] = floats[{NEXT}];",
        4,
        r"reads shared memory at byte \d+, which thread \d+ .* wrote at .*: no barrier orders the two",
    ),
    "one lane waits for a warp": (
        f"floats[thread] = thread; mbarrier_arrive(bar); if (thread % 32 == 7) mbarrier_wait(bar, 0);"
        f"out[thread] = floats[{NEXT}];",
        128,
        r"no barrier orders the two",
    ),
    "a write behind the arrival": (
        f"mbarrier_arrive(bar); floats[thread] = thread; mbarrier_wait(bar, 0); out[thread] = floats[{NEXT}];",
        128,
        r"no barrier orders the two",
    ),
    "a read behind the arrival": (
        "if (thread < 64) { mbarrier_arrive(bar); out[thread] = floats[thread]; }"
        "else { mbarrier_wait(bar, 0); floats[thread - 64] = 1; out[thread] = 1; }",
        64,
        r"no barrier orders the two",
    ),
    "arrivals of another phase": (
        "mbarrier_wait(bar, 1); if (thread == 0) mbarrier_wait(bar + 8, 0);",
        128,
        r"deadlock; 1 threads from 0 on wait at templates/toy.cu.jinja:\d+ for parity 0 of the mbarrier at byte 8, "
        r"whose phase 0 lacks 128 of 128 arrivals and 0 bytes",
    ),
    "one arrival too many while bytes are missing": (
        "if (thread == 0) { mbarrier_arrive_expect_tx(bar, 512); mbarrier_arrive(bar); }",
        1,
        r"arrives once more at the mbarrier at byte 0 of shared memory, whose phase 0 has had its 1 arrivals",
    ),
    "no barrier there": (
        "mbarrier_arrive(bar + 16);",
        1,
        r"mbarrier.arrive at byte 16 of shared memory, where no mbarrier",
    ),
    "parity 2": ("mbarrier_wait(bar, 2);", 1, r"for parity 2: it is 0 or 1"),
    "no arrivals at all": ("if (thread == 0) mbarrier_init(bar + 24, 0);", 1, r"for 0 arrivals: 1 to 1048575 can be"),
    "too many bytes": (
        "if (thread == 0) mbarrier_expect_tx(bar, 1u << 20);",
        1,
        r"expects 1048576 bytes: at most 1048575",
    ),
    "invalidated too early": (
        "if (thread == 0) { mbarrier_arrive_expect_tx(bar, 512); tma_load_4d(tile, &map, bar, 0, 0, 0, 0);"
        "mbarrier_invalidate(bar); }",
        1,
        r"mbarrier.inval at byte 0 of shared memory, while \d copies and 0 threads still use it|nobody has waited",
    ),
    "a part of the block for odd numbers": (
        "named_barrier_sync(1, 100);",
        1,
        r"for 100 threads: whole warps of the block's",
    ),
    "a part of the block orders only that part": (
        "floats[thread] = thread; if (thread < 64) named_barrier_sync(1, 64); out[thread] = floats[thread ^ 64];",
        1,
        r"no barrier orders the two",
    ),
    "a tensor map from the stack": (
        "alignas(64) unsigned char copy[128] = {}; if (thread == 0) { mbarrier_arrive_expect_tx(bar, 512);"
        "tma_load_4d(tile, reinterpret_cast<const TensorMap*>(copy), bar, 0, 0, 0, 0); }",
        1,
        r"a TMA load takes a copy of a tensor map: it must be the kernel's parameter itself",
    ),
}


@pytest.mark.parametrize(("body", "arrivals", "pattern"), SMALL_FAULTS.values(), ids=SMALL_FAULTS)
def test_a_wrong_use_of_barriers_is_reported(body: str, arrivals: int, pattern: str) -> None:
    for seed in SEEDS:
        with pytest.raises(EmulationError) as caught:
            run_small(body, arrivals, seed=seed)
        fault = caught.value.fault
        assert isinstance(fault, Fault), str(caught.value)
        assert re.search(pattern, fault.text), str(caught.value)


def test_registers_beyond_those_of_the_block_are_reported() -> None:
    body = "setmaxnreg_inc<136>(); out[thread] = 1;"
    with pytest.raises(EmulationError, match="the warpgroups of the block now ask for 69632, more than the 65536"):
        run_small(body, threads=512)
    assert run_small("setmaxnreg_inc<128>(); out[thread] = 1;", threads=512).sum() == 512


def test_a_copy_of_a_tensor_map_is_refused() -> None:
    with pytest.raises(CompileError, match="deleted function"):
        run_small("const TensorMap copy = map; prefetch_tensor_map(&copy);")


def test_a_warp_that_is_slow_to_wait_may_find_the_next_phase_completed() -> None:
    """Warp 0 completes two phases; who has not asked for the first by then waits for ever."""
    body = "if (thread < 32) { if (thread == 0) { mbarrier_arrive(bar); mbarrier_arrive(bar); } }"
    body += "else { mbarrier_wait(bar, 0); } out[thread] = 1;"
    reports = []
    for seed in range(12):
        try:
            run_small(body, 1, seed=seed)
        except EmulationError as error:
            reports.append(str(error))
    assert reports
    assert all("for parity 0 of the mbarrier at byte 0, whose phase 2 lacks 1 of 1" in report for report in reports)
