// One function per PTX instruction of sm_90 that the templates use, beside ptx.cuh. Needs sm_90a (setmaxnreg, wgmma).
// The products themselves are in wgmma.cuh.jinja, as their text depends on their width.
//
// Shared-memory addresses are 32 bits (shared_address()); barriers are mbarriers, 8 bytes of shared memory on 8 bytes.

#pragma once

// What cuTensorMapEncodeTiled writes (codegen/plan/tensor_map.py). A kernel takes it as `const __grid_constant__ TensorMap`
// and passes its address on: a copy is no tensor map.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// ---- Barriers in shared memory ----
// A phase completes when `arrivals` threads have arrived and all bytes that were announced have come.
__device__ __forceinline__ void mbarrier_init(u32 barrier_smem, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier_smem), "r"(arrivals) : "memory");
}

// Behind mbarrier_init, in its thread, before the barrier of the block that lets others use it.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_invalidate(u32 barrier_smem) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier_smem) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier_smem) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier_smem) : "memory");
}

// Announces bytes of copies, then arrives.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier_smem, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_smem), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_expect_tx(u32 barrier_smem, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier_smem), "r"(bytes) : "memory");
}

// Whether the phase of that parity has completed: of a fresh barrier 1 has, 0 has not.
__device__ __forceinline__ bool mbarrier_test_wait(u32 barrier_smem, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier_smem), "r"(parity)
      : "memory");
  return done != 0;
}

// The same; may first sleep for as long as the hardware likes.
__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier_smem, u32 parity) {
  u32 done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier_smem), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier_smem, u32 parity) {
  while (!mbarrier_try_wait(barrier_smem, parity)) {
  }
}

// Ordinary writes to shared memory before it, of this thread or known to it, are seen by TMA and wgmma behind it.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Barrier `id` of the block, 1 to 15, for `threads` of it in whole warps; 0 is __syncthreads.
__device__ __forceinline__ void named_barrier_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Arithmetic ----
// One instruction, where the maximum of three floats takes two.
__device__ __forceinline__ int max_signed(int a, int b, int c) {
  return __vimax3_s32(a, b, c);
}

// ---- One thread, and registers of a warpgroup ----
// True in one lane of a converged warp, the same at every call.
__device__ __forceinline__ bool elect_one() {
  u32 elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- Tiles of tensors (TMA) ----
// Coordinates count elements, the innermost dimension first; the innermost one comes to a multiple of 16 bytes, else
// the instruction is illegal. What lies outside of the tensor is filled in by a load and left out by a store; a load's
// bytes are those of the whole box nevertheless. A store's coordinates are not negative, and it writes 16 bytes at a
// time: where rows of the tensor end within 16 bytes, it also writes what lies behind them.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load_4d(u32 target_smem, const TensorMap* map, u32 barrier_smem, int c0, int c1,
                                            int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target_smem),
      "l"(map), "r"(barrier_smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_load_5d(u32 target_smem, const TensorMap* map, u32 barrier_smem, int c0, int c1,
                                            int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(target_smem),
      "l"(map), "r"(barrier_smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// What stays in the L2 cache: policies as createpolicy makes them for a whole access.
constexpr u64 kCacheNormal = 0x1000000000000000;
constexpr u64 kCacheEvictFirst = 0x12F0000000000000;
constexpr u64 kCacheEvictLast = 0x14F0000000000000;

__device__ __forceinline__ void tma_load_4d(u32 target_smem, const TensorMap* map, u32 barrier_smem, int c0, int c1,
                                            int c2, int c3, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target_smem),
      "l"(map), "r"(barrier_smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tma_load_5d(u32 target_smem, const TensorMap* map, u32 barrier_smem, int c0, int c1,
                                            int c2, int c3, int c4, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(target_smem),
      "l"(map), "r"(barrier_smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tma_store_4d(const TensorMap* map, u32 source_smem, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(source_smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

__device__ __forceinline__ void tma_store_5d(const TensorMap* map, u32 source_smem, int c0, int c1, int c2, int c3,
                                             int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(source_smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Groups of stores count for the thread that issued them.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until at most kPending groups have not read their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Until at most kPending groups have not been written.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Products of a warpgroup ----
// Before the first product, and between any use of registers of a product and the product.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most kPending groups of products are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// ---- Matrices from registers ----
// The inverse of ldmatrix_x4: lane L gives the address of row L % 8 of matrix L / 8.
__device__ __forceinline__ void stmatrix_x4(u32 row_smem, const u32 (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_smem), "r"(fragment[0]),
               "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_trans(u32 row_smem, const u32 (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_smem),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}
