"""What the emulator models and what it reports, on kernels of a few lines."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashtune.emulator.faults import Fault
from flashtune.errors import CompileError, EmulationError, InvalidInput

pytestmark = pytest.mark.emulate

Toy = Callable[..., Any]
SHARED_BYTES = 7680
SEEDS = range(6)

FAULTS = {
    "read behind q": ("out[thread] = q[thread + 1];", "reads 4 bytes at byte 512 of q, which has 512"),
    "read before q": ("out[thread] = q[thread - 1];", "reads 4 bytes at byte -4 of q, which has 512"),
    "write behind out": ("out[thread + 1] = 1;", "writes 4 bytes at byte 512 of out, which has 512"),
    "write to an input": ("const_cast<float*>(q)[thread] = 1;", "of q, which is an input"),
    "a small address": ("out[thread] = *reinterpret_cast<float*>(16);", "at address 0x10, where there is no tensor"),
    "shared memory ends": (
        f"floats[{SHARED_BYTES // 4 - 127} + thread] = 1;",
        f"writes 4 bytes at byte {SHARED_BYTES} of shared memory, beyond the {SHARED_BYTES} bytes of the launch",
    ),
    "misaligned vector": (
        "out[thread] = reinterpret_cast<const uint4*>(q + 1)[thread / 32].x;",
        "misaligned access to 'const uint4' at byte",
    ),
    "misaligned vector in shared memory": (
        "reinterpret_cast<uint4*>(smem + 8)->x = 1;",
        "misaligned access to 'uint4' at byte 8 of shared memory: not a multiple of 16",
    ),
    "array index": ("float a[4] = {}; a[thread] = 1; out[thread] = a[0];", "is out of bounds for 'float[4]'"),
    "write, then read": (
        "floats[thread] = 1; out[thread] = floats[thread ^ 1];",
        "at templates/fma_fwd.cu.jinja:11: no barrier orders the two",
    ),
    "read, then write": (
        "float sum = floats[thread ^ 64]; floats[thread] = 1; out[thread] = sum;",
        "at templates/fma_fwd.cu.jinja:11: no barrier orders the two",
    ),
    "a warp is no block": (
        "floats[thread] = 1; __syncwarp(); out[thread] = floats[thread ^ 32];",
        "no barrier orders the two",
    ),
    "a shuffle orders no memory": (
        "floats[thread] = 1; __shfl_xor_sync(~0u, thread, 1); out[thread] = floats[thread ^ 1];",
        "no barrier orders the two",
    ),
    "no wait for a copy": (
        "if (thread == 0) { cp_async_16(shared_address(smem), q, true); cp_async_commit(); }"
        "__syncthreads(); out[thread] = floats[0];",
        "reads shared memory at byte 0 while a copy to it is in flight: thread 0 (warp 0, lane 0) started it at "
        "templates/fma_fwd.cu.jinja:11 and has not waited for it",
    ),
    "a wait for too few groups": (
        "for (int i = 0; i < 2; ++i) { cp_async_16(shared_address(smem + 16 * (2 * thread + i)), q, true);"
        "cp_async_commit(); } cp_async_wait<1>(); out[thread] = floats[8 * thread] + floats[8 * thread + 4];",
        "while a copy to it is in flight",
    ),
    "a wait for another group": (
        "cp_async_16(shared_address(smem + 16 * thread), q, true); cp_async_wait<0>();"
        "out[thread] = floats[4 * thread];",
        "while a copy to it is in flight",
    ),
    "a wait without a barrier": (
        "cp_async_16(shared_address(smem + 16 * thread), q, true); cp_async_commit(); cp_async_wait<0>();"
        "out[thread] = floats[4 * (thread ^ 64)];",
        "no barrier orders the two",
    ),
    "a copy over what is read": (
        "floats[thread] = 1; __syncthreads(); out[thread] = floats[thread ^ 64];"
        "if (thread < 32) cp_async_16(shared_address(smem + 16 * thread), q, true);",
        "no barrier orders the two",
    ),
    "a copy from outside": (
        "cp_async_16(shared_address(smem + 16 * thread), q + 4 * thread, true);",
        "reads 16 bytes at byte",
    ),
    "a misaligned copy": (
        "cp_async_16(shared_address(smem + 16 * thread), q + 1, true);",
        "an asynchronous copy of 16 bytes reads from",
    ),
    "a misaligned matrix row": (
        "u32 a[4]; ldmatrix_x4(a, shared_address(smem + 8)); out[thread] = a[0];",
        "ldmatrix of 16 bytes at byte 8 of shared memory: not a multiple of 16",
    ),
    "a matrix row from outside": (
        f"u32 a[4]; ldmatrix_x4(a, shared_address(smem + {SHARED_BYTES})); out[thread] = a[0];",
        f"ldmatrix at byte {SHARED_BYTES} of shared memory, beyond the {SHARED_BYTES} bytes of the launch",
    ),
    "a barrier for half of a warp": ("if (thread % 2) __syncthreads();", "the kernel"),
    "a barrier for one warp": ("if (thread < 32) __syncthreads();", "the kernel"),
    "two barriers": (
        "if (thread < 32) { __syncthreads(); }\nelse { __syncthreads(); }",
        "the barrier diverges",
    ),
    "a shuffle for half of a warp": ("if (thread % 2) out[thread] = __shfl_xor_sync(~0u, 1.0f, 2);", "the kernel"),
    "two operations": (
        "if (thread % 2) { __syncwarp(); }\nelse { __any_sync(~0u, 1); }",
        "the warp diverges",
    ),
    "part of a warp": ("__syncwarp(0xffffu);", "has the mask 0000ffff: only operations of the whole warp are modelled"),
    "trap": ("__builtin_trap();", "the kernel crashed: Illegal instruction"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "text"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_reported_with_its_place(body: str, text: str, toy: Toy) -> None:
    for seed in SEEDS:
        with pytest.raises(EmulationError) as caught:
            toy(body, seed=seed)
        fault = caught.value.fault
        assert isinstance(fault, Fault), str(caught.value)
        assert text in fault.text.replace("struct ", "").replace(" [", "["), str(caught.value)  # as clang says it
        assert fault.block == 0
        assert fault.thread < 128
        assert re.search(r"templates/fma_fwd.cu.jinja:(5|11|12)\b", str(fault)), str(fault)
        assert f"seed {seed}" in str(caught.value)


def test_a_kernel_that_does_not_end_is_stopped(toy: Toy) -> None:
    with pytest.raises(EmulationError, match="has not ended after 1 seconds"):
        toy("while (reinterpret_cast<volatile const float*>(q)[0] == 0) {}", timeout=1)


def test_a_stack_that_is_too_small_is_reported(toy: Toy) -> None:
    with pytest.raises(EmulationError, match="a thread needs more than 262144 bytes of stack"):
        toy("volatile char a[1 << 20]; a[0] = 1; out[thread] = a[0];")


GOOD = {
    "identity": ("out[thread] = q[thread];", np.arange(128)),
    "barrier": ("floats[thread] = thread; __syncthreads(); out[thread] = floats[thread ^ 127];", np.arange(128) ^ 127),
    "warp barrier": ("floats[thread] = thread; __syncwarp(); out[thread] = floats[thread ^ 31];", np.arange(128) ^ 31),
    "shuffles": (
        "const int l = thread % 32; out[thread] = __shfl_xor_sync(~0u, thread, 5) + __shfl_sync(~0u, 0.5 * l, 3)"
        "+ __shfl_down_sync(~0u, 1000 * l, 1) + __shfl_up_sync(~0u, 100000 * l, 1);",
        [
            (t ^ 5) + 1.5 + 1000 * min(t % 32 + 1, 31) + 100000 * max(t % 32 - 1, 0)
            for t in range(128)
        ],
    ),
    "votes": (
        "out[thread] = __any_sync(~0u, thread == 40) + 2 * __all_sync(~0u, thread != 40)"
        "+ 4 * (__ballot_sync(~0u, thread % 32 < 3) == 7u);",
        [5 if t // 32 == 1 else 6 for t in range(128)],
    ),
    "votes of the block": (
        "const int a = __syncthreads_or(thread == 40); const int b = __syncthreads_or(thread == 400);"
        "const int c = __syncthreads_and(thread < 128); out[thread] = 4 * a + 2 * b + c;",
        [5] * 128,
    ),
    "copies": (
        "cp_async_16(shared_address(smem + 16 * thread), q + 4 * (thread / 4), thread % 4 != 3); cp_async_commit();"
        "cp_async_wait<0>(); __syncthreads(); out[thread] = floats[4 * (127 - thread) + 1];",
        [0 if (127 - t) % 4 == 3 else 4 * ((127 - t) // 4) + 1 for t in range(128)],
    ),
    "copies that nobody waits for": (
        "cp_async_16(shared_address(smem + 16 * thread), q, true); out[thread] = 1;", [1] * 128,
    ),
    "atomics": (
        "if (thread == 0) { out[0] = 0; reinterpret_cast<int*>(smem)[0] = 0; } __syncthreads();"
        "atomicAdd(reinterpret_cast<int*>(smem), thread); atomicAdd(out, 1.0f); __syncthreads();"
        "if (thread > 0) out[thread] = reinterpret_cast<int*>(smem)[0];",
        [128] + [127 * 64] * 127,
    ),
    "NaN loses": ("out[thread] = fmaxf(__int_as_float(0x7fffffff), max(1.0f, __int_as_float(0x7fc00000)));", [1] * 128),
    "exp2 without denormals": (
        "out[thread] = exp2_approx(-126.0f - thread % 2) == 0.0f ? 1 : exp2_approx(-126.0f) * exp2_approx(127.0f);",
        [1 if t % 2 else 2 for t in range(128)],
    ),
    "shared memory starts as NaN": ("out[thread] = floats[thread] != floats[thread];", [1] * 128),
}  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), GOOD.values(), ids=GOOD)
def test_what_is_modelled_gives_the_right_values(body: str, expected: Any, toy: Toy) -> None:
    for seed in SEEDS:
        result = toy(body, seed=seed).out.reshape(-1)
        np.testing.assert_array_equal(result, np.asarray(expected, np.float32), err_msg=f"seed {seed}")


def test_a_copy_delivers_what_its_source_holds_at_the_wait(toy: Toy) -> None:
    body = """
  if (thread < 32) {
    out[4 * thread] = 1;
    cp_async_16(shared_address(smem + 16 * thread), out + 4 * thread, true);
    cp_async_commit();
    out[4 * thread] = 2;
    cp_async_wait<0>();
    out[4 * thread + 1] = floats[4 * thread];
  }
"""
    assert (toy(body).out.reshape(32, 4)[:, 1] == 2).all()


def test_matrices_lie_in_registers_as_the_instruction_says(toy: Toy) -> None:
    """ldmatrix of 64 x 8 numbers, plain and transposed: thread (g, t) holds (g, 2t) and (g, 2t + 1)."""
    body = """
  for (int i = thread; i < 512; i += 128) reinterpret_cast<u16*>(smem)[i] = i;
  __syncthreads();
  u32 plain[4], transposed[4];
  ldmatrix_x4(plain, shared_address(smem + 16 * (thread % 32)));
  ldmatrix_x4_trans(transposed, shared_address(smem + 16 * (thread % 32)));
  if (thread < 32) {
    out[4 * thread] = plain[1] & 0xffff;
    out[4 * thread + 1] = plain[3] >> 16;
    out[4 * thread + 2] = transposed[1] & 0xffff;
    out[4 * thread + 3] = transposed[3] >> 16;
  }
"""
    matrices = np.arange(256).reshape(4, 8, 8)
    for lane, got in enumerate(toy(body).out.reshape(32, 4)):
        group, pair = lane // 4, 2 * (lane % 4)
        assert list(got) == [
            matrices[1, group, pair],
            matrices[3, group, pair + 1],
            matrices[1, pair, group],
            matrices[3, pair + 1, group],
        ]


def test_products_are_cut_off_not_rounded(toy: Toy) -> None:
    """1 + 1.5 2^-24 is nearer to 1 + 2^-23 than to 1; -1 + 1.5 2^-24 is as near to -1 + 2^-24 as to -1 + 2^-23."""
    body = """
  const u32 small = from_float<Half>(0x1p-12f).bits;
  u32 a[4] = {};
  u32 b0 = 0;
  if (thread % 4 == 0) { a[0] = small; b0 = from_float<Half>(0x1.8p-12f).bits; }
  float d[4] = {1, -1, 1, 1};
  mma_m16n8k16<Half>(d, a, b0, 0);
  out[thread] = thread % 2 ? d[0] : d[1];
"""
    out = toy(body).out.reshape(-1)
    assert (out[1::2] == 1).all()
    assert (out[0::2] == np.float32(-1 + 2.0**-23)).all()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("__nanosleep(1);", "__nanosleep"),
        ("wgmma_fence();", "wgmma_fence"),
        ("__shared__ float tile[32]; out[0] = tile[0];", "weak declaration"),
    ],
)
def test_what_is_not_modelled_is_named(body: str, named: str, toy: Toy) -> None:
    with pytest.raises(CompileError, match=r"templates/fma_fwd.cu.jinja:11") as caught:
        toy(body)
    assert named in str(caught.value)
    assert caught.value.source_path is not None
    assert caught.value.source_path.exists()


def test_writes_between_the_rows_of_the_output_are_found(toy: Toy) -> None:
    assert toy("out[thread / 8 * 12 + thread % 8] = q[thread];", out_strides=(192, 12, 8, 1)).out[0, 15, 0, 7] == 127
    with pytest.raises(EmulationError, match="wrote 4 bytes between the elements of out"):
        toy("out[thread / 8 * 12 + thread % 8] = q[thread]; if (thread == 9) out[9] = 1;", out_strides=(192, 12, 8, 1))


@pytest.mark.parametrize(
    ("options", "text"),
    [({"seed": -1}, "seed=-1"), ({"processes": 0}, "processes=0"), ({"timeout": 0}, "timeout=0"),
     ({"out_strides": (128, 8, 1)}, "4 dimensions and 3 strides"), ({"out_strides": (1, 9, 8, 1)}, "alignment=16"),
     ({"out_strides": (1, 8, 1, 2)}, "the last must be 1")],
)  # fmt: skip
def test_bad_input_is_refused(options: dict[str, Any], text: str, toy: Toy) -> None:
    with pytest.raises(InvalidInput, match=text):
        toy("", **options)
