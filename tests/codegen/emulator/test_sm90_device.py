"""The toys for sm_90 as NVRTC compiles them: every wrapper assembles, and no product is serialised."""

from __future__ import annotations

import re

import pytest
from sm90_toys import HEAD, device_source, one_step
from toy_attention import ATTENTION, ATTENTIONS
from toy_box import BOX, BOXES
from toy_gemm import GEMM, GEMMS
from toy_ring import RING, RINGS

from flashtune.codegen.compiler.nvrtc import compile_source

pytestmark = pytest.mark.nvrtc

BAD = re.compile(r"serializ|ignored|C75\d\d|spill stores [^0]", re.IGNORECASE)

EVERYTHING = (
    HEAD
    + """
struct TwoSteps {
  static constexpr int kCount = 2;
  static constexpr int a(int step) {
    return 32 * step;
  }
  static constexpr int b(int step) {
    return 2048 * step;
  }
};

template <int kRegisters>
__device__ __forceinline__ void products(u32 tile, float* out) {
  float d[kRegisters];
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    d[i] = 1.0f;
  }
  const u32 a[2][4] = {};
  const u64 matrix = matrix_descriptor(tile, 16, 1024, kSwizzleOfRow<128>);
  wgmma_fence();
  wgmma_shared<Element, false, false>(d, matrix, matrix, true);
  wgmma_shared<Element, true, false>(d, matrix, descriptor_plus(matrix, 32), true);
  wgmma_shared<Element, false, true>(d, matrix, matrix, true);
  wgmma_shared<Element, true, true>(d, matrix, matrix, true);
  wgmma_shared<Element, false, false, TwoSteps>(d, matrix, matrix, true);
  wgmma_registers<Element, false>(d, a, matrix, true);
  wgmma_registers<Element, true>(d, a, matrix, true);
  wgmma_registers<Element, true, TwoSteps>(d, a, matrix, true);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    out[i * 128 + threadIdx.x] = d[i];
  }
}

extern "C" __global__ void __launch_bounds__(128, 1) toy(const __grid_constant__ TensorMap map, float* out) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 bar = shared_address(smem), tile = bar + 1024;
  setmaxnreg_dec<240>();
  mbarrier_init(bar, 1);
  fence_mbarrier_init();
  prefetch_tensor_map(&map);
  mbarrier_expect_tx(bar, 16);
  mbarrier_arrive_expect_tx(bar, 16);
  mbarrier_arrive(bar);
  tma_load_4d(tile, &map, bar, 0, 0, 0, 0);
  tma_load_4d(tile, &map, bar, 0, 0, 0, 0, kCacheEvictFirst);
  tma_load_5d(tile, &map, bar, 0, 0, 0, 0, 0);
  tma_load_5d(tile, &map, bar, 0, 0, 0, 0, 0, kCacheNormal);
  mbarrier_wait(bar, 0);
  while (!mbarrier_test_wait(bar, 1)) {
  }
  //% for n, steps in shared_products if steps == 1
  products<{{n // 2}}>(tile, out);
  //% endfor
  const u32 a[4] = {tile, tile, tile, tile};
  stmatrix_x4(tile, a);
  stmatrix_x4_trans(tile, a);
  fence_proxy_async();
  named_barrier_arrive(2, 128);
  named_barrier_sync(1, 128);
  if (elect_one()) {
    tma_store_4d(&map, tile, 0, 0, 0, 0);
    tma_store_5d(&map, tile, 0, 0, 0, 0, 0);
    bulk_commit();
    bulk_wait_read<1>();
    bulk_wait<0>();
  }
  mbarrier_invalidate(bar);
  setmaxnreg_inc<248>();
}
"""
)


WIDTHS = (
    HEAD
    + """
//% for n, steps in shared_products
extern "C" __global__ void __launch_bounds__(128, 1) toy_{{n}}(float* out, u64 a, u64 b) {
  float d[{{n // 2}}];
  wgmma_fence();
  wgmma_shared<Element, false, true>(d, a, b, false);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < {{n // 2}}; ++i) {
    out[i * 128 + threadIdx.x] = d[i];
  }
}
//% endfor
"""
)


@pytest.mark.parametrize("element", ["Half", "BFloat16"])
def test_every_function_assembles(element: str) -> None:
    shapes = [(8, 1), (8, 2), (72, 1), (72, 2)]
    names = {"element": element, "shared_products": shapes, "register_products": shapes}
    built = compile_source(device_source(EVERYTHING, names), "sm_90a")
    assert not re.search("serializ", built.log), built.log
    assert built.spill_bytes == 0


def test_every_width_assembles() -> None:
    widths = list(range(8, 257, 8))
    built = compile_source(device_source(WIDTHS, {"element": "BFloat16", **one_step(*widths)}), "sm_90a")
    assert not BAD.search(built.log), built.log
    assert built.log.count("Compiling entry function") == len(widths)


@pytest.mark.parametrize("name", GEMMS)
def test_the_products_compile(name: str) -> None:
    gemm = GEMMS[name]
    built = compile_source(device_source(GEMM, gemm.names()), "sm_90a")
    assert not BAD.search(built.log), built.log


@pytest.mark.parametrize("name", RINGS)
def test_the_rings_compile(name: str) -> None:
    built = compile_source(device_source(RING, RINGS[name].names()), "sm_90a")
    assert not BAD.search(built.log), built.log


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_compiles_and_spills_nothing(name: str) -> None:
    built = compile_source(device_source(ATTENTION, ATTENTIONS[name].names()), "sm_90a")
    assert not BAD.search(built.log), built.log
    assert built.spill_bytes == 0


@pytest.mark.parametrize("rank", [4, 5])
def test_the_boxes_compile(rank: int) -> None:
    box = next(each for each in BOXES.values() if len(each.dims) == rank)
    built = compile_source(device_source(BOX, box.names()), "sm_90a")
    assert not BAD.search(built.log), built.log
