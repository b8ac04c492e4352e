// The functions of templates/lib/ptx_sm90.cuh for the host, which takes this file in its place: the same names and
// parameters. All of them are in the runtime: mbarrier.h, tma.h, warpgroup.h, wgmma.h.

// Can't be copied: where CUDA would take the address of a copy, which is no tensor map, this is refused.
struct alignas(64) TensorMap {
  u64 opaque[16];

  TensorMap(const TensorMap&) = delete;
  TensorMap& operator=(const TensorMap&) = delete;
};

__device__ __forceinline__ void mbarrier_init(u32 barrier_smem, u32 arrivals) {
  emulator_mbarrier_init(barrier_smem, arrivals);
}

__device__ __forceinline__ void fence_mbarrier_init() {
  emulator_fence_mbarrier_init();
}

__device__ __forceinline__ void mbarrier_invalidate(u32 barrier_smem) {
  emulator_mbarrier_invalidate(barrier_smem);
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier_smem) {
  emulator_mbarrier_arrive(barrier_smem, 0);
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier_smem, u32 bytes) {
  emulator_mbarrier_arrive(barrier_smem, bytes);
}

__device__ __forceinline__ void mbarrier_expect_tx(u32 barrier_smem, u32 bytes) {
  emulator_mbarrier_expect(barrier_smem, bytes);
}

__device__ __forceinline__ bool mbarrier_test_wait(u32 barrier_smem, u32 parity) {
  return emulator_mbarrier_test(barrier_smem, parity);
}

__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier_smem, u32 parity) {
  return emulator_mbarrier_test(barrier_smem, parity);
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier_smem, u32 parity, EMULATOR_SITE) {
  emulator_mbarrier_wait(barrier_smem, parity, file, line);
}

__device__ __forceinline__ void fence_proxy_async() {
  emulator_fence_proxy_async();
}

__device__ __forceinline__ void named_barrier_sync(u32 id, u32 threads, EMULATOR_SITE) {
  emulator_named_barrier(id, threads, true, file, line);
}

__device__ __forceinline__ void named_barrier_arrive(u32 id, u32 threads, EMULATOR_SITE) {
  emulator_named_barrier(id, threads, false, file, line);
}

__device__ __forceinline__ int max_signed(int a, int b, int c) {
  const int larger = a > b ? a : b;
  return larger > c ? larger : c;
}

__device__ __forceinline__ bool elect_one(EMULATOR_SITE) {
  return emulator_elect(file, line);
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec(EMULATOR_SITE) {
  emulator_setmaxnreg(kRegisters, false, file, line);
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc(EMULATOR_SITE) {
  emulator_setmaxnreg(kRegisters, true, file, line);
}

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  emulator_tensor_map_prefetch(map, "prefetch.tensormap");
}

__device__ __forceinline__ void tma_load_4d(u32 target_smem, const TensorMap* map, u32 barrier_smem, int c0, int c1,
                                            int c2, int c3) {
  const int coordinates[] = {c0, c1, c2, c3};
  emulator_tma_load(target_smem, map, barrier_smem, 4, coordinates);
}

__device__ __forceinline__ void tma_load_5d(u32 target_smem, const TensorMap* map, u32 barrier_smem, int c0, int c1,
                                            int c2, int c3, int c4) {
  const int coordinates[] = {c0, c1, c2, c3, c4};
  emulator_tma_load(target_smem, map, barrier_smem, 5, coordinates);
}

constexpr u64 kCacheNormal = 0x1000000000000000;
constexpr u64 kCacheEvictFirst = 0x12F0000000000000;
constexpr u64 kCacheEvictLast = 0x14F0000000000000;

__device__ __forceinline__ void tma_load_4d(u32 target_smem, const TensorMap* map, u32 barrier_smem, int c0, int c1,
                                            int c2, int c3, u64 policy) {
  static_cast<void>(policy);
  tma_load_4d(target_smem, map, barrier_smem, c0, c1, c2, c3);
}

__device__ __forceinline__ void tma_load_5d(u32 target_smem, const TensorMap* map, u32 barrier_smem, int c0, int c1,
                                            int c2, int c3, int c4, u64 policy) {
  static_cast<void>(policy);
  tma_load_5d(target_smem, map, barrier_smem, c0, c1, c2, c3, c4);
}

__device__ __forceinline__ void tma_store_4d(const TensorMap* map, u32 source_smem, int c0, int c1, int c2, int c3) {
  const int coordinates[] = {c0, c1, c2, c3};
  emulator_tma_store(map, source_smem, 4, coordinates);
}

__device__ __forceinline__ void tma_store_5d(const TensorMap* map, u32 source_smem, int c0, int c1, int c2, int c3,
                                             int c4) {
  const int coordinates[] = {c0, c1, c2, c3, c4};
  emulator_tma_store(map, source_smem, 5, coordinates);
}

__device__ __forceinline__ void bulk_commit() {
  emulator_bulk_commit();
}

template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  emulator_bulk_wait(kPending, true);
}

template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  emulator_bulk_wait(kPending, false);
}

__device__ __forceinline__ void wgmma_fence(EMULATOR_SITE) {
  emulator_wgmma_fence(file, line);
}

__device__ __forceinline__ void wgmma_commit(EMULATOR_SITE) {
  emulator_wgmma_commit(file, line);
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait(EMULATOR_SITE) {
  emulator_wgmma_wait(kPending, file, line);
}

__device__ __forceinline__ void stmatrix_x4(u32 row_smem, const u32 (&fragment)[4], EMULATOR_SITE) {
  const EmulatorWords words = {fragment[0], fragment[1], fragment[2], fragment[3]};
  emulator_stmatrix(row_smem, false, words, file, line);
}

__device__ __forceinline__ void stmatrix_x4_trans(u32 row_smem, const u32 (&fragment)[4], EMULATOR_SITE) {
  const EmulatorWords words = {fragment[0], fragment[1], fragment[2], fragment[3]};
  emulator_stmatrix(row_smem, true, words, file, line);
}
