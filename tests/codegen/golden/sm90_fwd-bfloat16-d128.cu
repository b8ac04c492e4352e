// dtype=bfloat16,head_dim=128
// sm90_fwd(warpgroups=2,block_n=128,num_stages=2,q_buffers=2,softmax=lazy,ping_pong=false,scheduler=static,blocks_per_sm=1)



// A thread block owns kBlockM query rows of one head at a time and walks the keys in blocks of kBlockN. One warpgroup loads:
// a single thread of it asks TMA for tiles and waits where the rings are full. The others compute, each with 64 rows:
//
//   S = Q K^T           wgmma, Q and K in shared memory
//   P = exp(S - m)      m: a reference per row, near the maximum so far
//   l = l + rowsum(P)
//   O = O + P V         wgmma, P in registers, V in shared memory
//
// The product with V of one block is under way together with the product with K of the next one, and beside the softmax
// of that. O leaves through the shared memory of Q.
// Names for the types that kernels use. No CUDA header is included anywhere: NVRTC finds none without a toolkit.

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

// 16-bit floats are carried as bits; conversions are in ptx.cuh.
struct Half {
  u16 bits;
};
struct BFloat16 {
  u16 bits;
};

// A constant as an argument: one loop body, compiled with and without masks.
template <bool kValue>
struct Flag {
  static constexpr bool value = kValue;
};

constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float negative_infinity() {
  return __int_as_float(0xff800000);
}
// One function per PTX instruction that the templates use. Inline asm stands here and nowhere else, so that a host
// build can replace this file.

// Shared-memory address of a generic pointer.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes to shared memory without passing through registers; writes zeros where `valid` is false, and then
// reads nothing.
__device__ __forceinline__ void cp_async_16(u32 target_smem, const void* source_gmem, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target_smem), "l"(source_gmem),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of the committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane L gives the address of row L % 8 of matrix L / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&fragment)[4], u32 row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row_smem)
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&fragment)[4], u32 row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row_smem)
               : "memory");
}

// d += a b for a 16x16 (row-major) and b 16x8 (column-major) of 16-bit floats, d 16x8 in float32.
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<Half>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<BFloat16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x with 2 ulp; denormal results become 0. One MUFU instruction.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to nearest even; `low` goes to the lower half.
template <typename Element>
__device__ __forceinline__ u32 pack(float low, float high);

template <>
__device__ __forceinline__ u32 pack<Half>(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ u32 pack<BFloat16>(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float to_float(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

__device__ __forceinline__ float to_float(BFloat16 x) {
  return __int_as_float(static_cast<int>(x.bits) << 16);
}

__device__ __forceinline__ float to_float(float x) {
  return x;
}

// Rounds to nearest even. bfloat16 by integer arithmetic: sm_75 has no instruction for it.
template <typename T>
__device__ __forceinline__ T from_float(float x);

template <>
__device__ __forceinline__ Half from_float<Half>(float x) {
  Half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float x) {
  const u32 bits = static_cast<u32>(__float_as_int(x));
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return BFloat16{static_cast<u16>(is_nan ? 0x7fffu : rounded)};
}

template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
// One function per PTX instruction of sm_90 that the templates use, beside ptx.cuh. Needs sm_90a (setmaxnreg, wgmma).
// The products themselves are in wgmma.cuh.jinja, as their text depends on their width.
//
// Shared-memory addresses are 32 bits (shared_address()); barriers are mbarriers, 8 bytes of shared memory on 8 bytes.

// What cuTensorMapEncodeTiled writes (codegen/tensor_map.py). A kernel takes it as `const __grid_constant__ TensorMap`
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
// Where a wgmma finds a matrix in shared memory: the 64-bit matrix descriptor.
// (PTX ISA, "Asynchronous warpgroup-level matrix shared memory layout": matrix descriptor format, strides.)
//
//   bits  0-13  start address >> 4       bits 32-45  stride byte offset (SBO) >> 4
//   bits 16-29  leading byte offset (LBO) >> 4       bits 49-51  base offset, 0 here
//   bits 62-63  swizzle
//
// A swizzled tile is made of rows of W = 128, 64 or 32 bytes; eight of them are a pattern, which must start on a
// multiple of 8 W bytes. Byte b of it lies at b ^ (b >> 7 & (W / 16 - 1)) << 4 in absolute addresses. For 16-bit
// elements (A: 64 x 16, B: N x 16 of one instruction):
//
//   layout             a row holds                       SBO                  LBO
//   K-major, W         W / 2 of K, of one M or N         next 8 of M or N     not used
//   MN-major, W        W / 2 of M or N, of one K         next 8 of K          next W / 2 of M or N
//   K-major, none      8 of K; 8 rows are contiguous     next 8 of M or N     next 8 of K
//   MN-major, none     8 of M or N; 8 rows contiguous    next 8 of M or N     next 8 of K
//
// In a K-major row the next 16 of K are 32 bytes further: hardware permutes absolute addresses, so the start may lie
// inside of the first row.

// Codes of the descriptor: not those of tensor maps.
enum class MatrixSwizzle : u32 { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

template <int kRowBytes>
constexpr MatrixSwizzle kSwizzleOfRow = kRowBytes == 128  ? MatrixSwizzle::k128
                                        : kRowBytes == 64 ? MatrixSwizzle::k64
                                        : kRowBytes == 32 ? MatrixSwizzle::k32
                                                          : MatrixSwizzle::kNone;

constexpr __device__ __forceinline__ u64 matrix_descriptor(u32 start_smem, u32 leading_bytes, u32 stride_bytes,
                                                           MatrixSwizzle swizzle) {
  return static_cast<u64>((start_smem & 0x3ffffu) >> 4) | static_cast<u64>((leading_bytes & 0x3ffffu) >> 4) << 16 |
         static_cast<u64>((stride_bytes & 0x3ffffu) >> 4) << 32 | static_cast<u64>(swizzle) << 62;
}

// The descriptor of what lies `bytes` further. Only the lower word changes: the start stays below 2^18 bytes.
constexpr __device__ __forceinline__ u64 descriptor_plus(u64 descriptor, u32 bytes) {
  return descriptor + (bytes >> 4);
}




// Inline asm names each register, so each shape has its own text. All steps of a product are one statement, whose operands
// list D once: with a statement for each step, a fifth of the compiler's time went into such lists.
template <typename Element, int kN, int kSteps>
struct SharedProduct;

template <typename Element, int kN, int kSteps>
struct RegisterProduct;

// The steps of a product, and how many bytes from the operands of step 0 each step's lie.
struct OneStep {
  static constexpr int kCount = 1;
  static constexpr int a(int) {
    return 0;
  }
  static constexpr int b(int) {
    return 0;
  }
};

// clang-format off: control lines stand between the lines of a statement.
template <>
struct SharedProduct<BFloat16, 128, 8> {
  template <bool kTransA, bool kTransB, typename Steps>
  static __device__ __forceinline__ void add(float (&d)[64], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        ".reg .b64 a, b;\n"
        "setp.ne.b32 accumulate, %66, 0;\n"
        "add.s64 a, %64, %69;\n"
        "add.s64 b, %65, %70;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, a, b, accumulate, 1, 1, %67, %68;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %64, %71;\n"
        "add.s64 b, %65, %72;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, a, b, accumulate, 1, 1, %67, %68;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %64, %73;\n"
        "add.s64 b, %65, %74;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, a, b, accumulate, 1, 1, %67, %68;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %64, %75;\n"
        "add.s64 b, %65, %76;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, a, b, accumulate, 1, 1, %67, %68;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %64, %77;\n"
        "add.s64 b, %65, %78;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, a, b, accumulate, 1, 1, %67, %68;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %64, %79;\n"
        "add.s64 b, %65, %80;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, a, b, accumulate, 1, 1, %67, %68;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %64, %81;\n"
        "add.s64 b, %65, %82;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, a, b, accumulate, 1, 1, %67, %68;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %64, %83;\n"
        "add.s64 b, %65, %84;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, a, b, accumulate, 1, 1, %67, %68;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransA ? 1 : 0), "n"(kTransB ? 1 : 0)
        , "n"(Steps::a(0) >> 4), "n"(Steps::b(0) >> 4)
        , "n"(Steps::a(1) >> 4), "n"(Steps::b(1) >> 4)
        , "n"(Steps::a(2) >> 4), "n"(Steps::b(2) >> 4)
        , "n"(Steps::a(3) >> 4), "n"(Steps::b(3) >> 4)
        , "n"(Steps::a(4) >> 4), "n"(Steps::b(4) >> 4)
        , "n"(Steps::a(5) >> 4), "n"(Steps::b(5) >> 4)
        , "n"(Steps::a(6) >> 4), "n"(Steps::b(6) >> 4)
        , "n"(Steps::a(7) >> 4), "n"(Steps::b(7) >> 4)
        : "memory");
  }
};

template <>
struct SharedProduct<BFloat16, 64, 8> {
  template <bool kTransA, bool kTransB, typename Steps>
  static __device__ __forceinline__ void add(float (&d)[32], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        ".reg .b64 a, b;\n"
        "setp.ne.b32 accumulate, %34, 0;\n"
        "add.s64 a, %32, %37;\n"
        "add.s64 b, %33, %38;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, a, b, accumulate, 1, 1, %35, %36;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %32, %39;\n"
        "add.s64 b, %33, %40;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, a, b, accumulate, 1, 1, %35, %36;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %32, %41;\n"
        "add.s64 b, %33, %42;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, a, b, accumulate, 1, 1, %35, %36;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %32, %43;\n"
        "add.s64 b, %33, %44;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, a, b, accumulate, 1, 1, %35, %36;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %32, %45;\n"
        "add.s64 b, %33, %46;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, a, b, accumulate, 1, 1, %35, %36;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %32, %47;\n"
        "add.s64 b, %33, %48;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, a, b, accumulate, 1, 1, %35, %36;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %32, %49;\n"
        "add.s64 b, %33, %50;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, a, b, accumulate, 1, 1, %35, %36;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 a, %32, %51;\n"
        "add.s64 b, %33, %52;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, a, b, accumulate, 1, 1, %35, %36;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransA ? 1 : 0), "n"(kTransB ? 1 : 0)
        , "n"(Steps::a(0) >> 4), "n"(Steps::b(0) >> 4)
        , "n"(Steps::a(1) >> 4), "n"(Steps::b(1) >> 4)
        , "n"(Steps::a(2) >> 4), "n"(Steps::b(2) >> 4)
        , "n"(Steps::a(3) >> 4), "n"(Steps::b(3) >> 4)
        , "n"(Steps::a(4) >> 4), "n"(Steps::b(4) >> 4)
        , "n"(Steps::a(5) >> 4), "n"(Steps::b(5) >> 4)
        , "n"(Steps::a(6) >> 4), "n"(Steps::b(6) >> 4)
        , "n"(Steps::a(7) >> 4), "n"(Steps::b(7) >> 4)
        : "memory");
  }
};

template <>
struct RegisterProduct<BFloat16, 128, 8> {
  template <bool kTransB, typename Steps>
  static __device__ __forceinline__ void add(float (&d)[64], const u32 (*a)[4], u64 b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        ".reg .b64 b;\n"
        "setp.ne.b32 accumulate, %65, 0;\n"
        "add.s64 b, %64, %71;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%67, %68, %69, %70}, b, accumulate, 1, 1, %66;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 b, %64, %76;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%72, %73, %74, %75}, b, accumulate, 1, 1, %66;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 b, %64, %81;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%77, %78, %79, %80}, b, accumulate, 1, 1, %66;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 b, %64, %86;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%82, %83, %84, %85}, b, accumulate, 1, 1, %66;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 b, %64, %91;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%87, %88, %89, %90}, b, accumulate, 1, 1, %66;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 b, %64, %96;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%92, %93, %94, %95}, b, accumulate, 1, 1, %66;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 b, %64, %101;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%97, %98, %99, %100}, b, accumulate, 1, 1, %66;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 b, %64, %106;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%102, %103, %104, %105}, b, accumulate, 1, 1, %66;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransB ? 1 : 0)
        , "r"(a[0][0]), "r"(a[0][1]), "r"(a[0][2]), "r"(a[0][3]), "n"(Steps::b(0) >> 4)
        , "r"(a[1][0]), "r"(a[1][1]), "r"(a[1][2]), "r"(a[1][3]), "n"(Steps::b(1) >> 4)
        , "r"(a[2][0]), "r"(a[2][1]), "r"(a[2][2]), "r"(a[2][3]), "n"(Steps::b(2) >> 4)
        , "r"(a[3][0]), "r"(a[3][1]), "r"(a[3][2]), "r"(a[3][3]), "n"(Steps::b(3) >> 4)
        , "r"(a[4][0]), "r"(a[4][1]), "r"(a[4][2]), "r"(a[4][3]), "n"(Steps::b(4) >> 4)
        , "r"(a[5][0]), "r"(a[5][1]), "r"(a[5][2]), "r"(a[5][3]), "n"(Steps::b(5) >> 4)
        , "r"(a[6][0]), "r"(a[6][1]), "r"(a[6][2]), "r"(a[6][3]), "n"(Steps::b(6) >> 4)
        , "r"(a[7][0]), "r"(a[7][1]), "r"(a[7][2]), "r"(a[7][3]), "n"(Steps::b(7) >> 4)
        : "memory");
  }
};

template <>
struct RegisterProduct<BFloat16, 128, 4> {
  template <bool kTransB, typename Steps>
  static __device__ __forceinline__ void add(float (&d)[64], const u32 (*a)[4], u64 b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        ".reg .b64 b;\n"
        "setp.ne.b32 accumulate, %65, 0;\n"
        "add.s64 b, %64, %71;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%67, %68, %69, %70}, b, accumulate, 1, 1, %66;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 b, %64, %76;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%72, %73, %74, %75}, b, accumulate, 1, 1, %66;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 b, %64, %81;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%77, %78, %79, %80}, b, accumulate, 1, 1, %66;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "add.s64 b, %64, %86;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%82, %83, %84, %85}, b, accumulate, 1, 1, %66;\n"
        "setp.eq.b32 accumulate, 0, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransB ? 1 : 0)
        , "r"(a[0][0]), "r"(a[0][1]), "r"(a[0][2]), "r"(a[0][3]), "n"(Steps::b(0) >> 4)
        , "r"(a[1][0]), "r"(a[1][1]), "r"(a[1][2]), "r"(a[1][3]), "n"(Steps::b(1) >> 4)
        , "r"(a[2][0]), "r"(a[2][1]), "r"(a[2][2]), "r"(a[2][3]), "n"(Steps::b(2) >> 4)
        , "r"(a[3][0]), "r"(a[3][1]), "r"(a[3][2]), "r"(a[3][3]), "n"(Steps::b(3) >> 4)
        : "memory");
  }
};

// clang-format on

// A and B in shared memory; transposed ones are MN-major. d[4 i + 2 r + e] of lane (g, t) is row 16 w + g + 8 r and
// column 8 i + 2 t + e, for warp w of the warpgroup. Without `accumulate`, D is not read.
template <typename Element, bool kTransA, bool kTransB, typename Steps = OneStep, int kRegisters>
__device__ __forceinline__ void wgmma_shared(float (&d)[kRegisters], u64 a, u64 b, bool accumulate) {
  SharedProduct<Element, 2 * kRegisters, Steps::kCount>::template add<kTransA, kTransB, Steps>(d, a, b, accumulate);
}

// A in registers, four for each step, as for mma_m16n8k16: a warp has its 16 rows.
template <typename Element, bool kTransB, typename Steps = OneStep, int kRegisters>
__device__ __forceinline__ void wgmma_registers(float (&d)[kRegisters], const u32 (*a)[4], u64 b, bool accumulate) {
  RegisterProduct<Element, 2 * kRegisters, Steps::kCount>::template add<kTransB, Steps>(d, a, b, accumulate);
}
// The one kernel argument of every forward family. Mirrored by PARAMS_FIELDS in codegen/plan.py, which a test compares.
//
// q: (batch, seqlen_q, num_heads, head_dim); k: (batch, seqlen_k, num_heads_kv, head_dim); v and out as k and q, with
// head_dim_v columns. Strides count elements, and the last dimension has stride 1. lse: contiguous (batch, num_heads,
// seqlen_q), or null if not wanted.
// workspace: device memory of this launch alone, laid out by the family, or null; num_splits: thread blocks that share
// the keys of one tile of queries; heads_per_section: heads whose tiles are listed together, where blocks take several.
struct Params {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  void* lse;
  void* workspace;
  i64 q_stride_batch;
  i64 q_stride_row;
  i64 q_stride_head;
  i64 k_stride_batch;
  i64 k_stride_row;
  i64 k_stride_head;
  i64 v_stride_batch;
  i64 v_stride_row;
  i64 v_stride_head;
  i64 out_stride_batch;
  i64 out_stride_row;
  i64 out_stride_head;
  int batch;
  int seqlen_q;
  int seqlen_k;
  int num_heads;
  int num_heads_kv;
  int num_splits;
  int heads_per_section;
  float scale;
};
// Rings of tiles in shared memory between one thread that loads and warps that use. Needs ptx_sm90.cuh.
//
// A stage has two mbarriers: `full` completes when its bytes have come, `empty` when every warp that reads it has
// released it. Both sides count tiles over the whole life of the thread block: the parities must not start anew.

// Tile i of a ring: it lies in stage i % kStages, and its phase is i / kStages.
template <int kStages>
struct Turn {
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int kStages>
struct Ring {
  static constexpr u32 kBytes = 16 * kStages;

  u32 barriers_smem;

  // By one thread. `releases`: how many come for each tile.
  __device__ __forceinline__ void init(u32 releases) const {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(barriers_smem + 16 * stage, 1);
      mbarrier_init(barriers_smem + 16 * stage + 8, releases);
    }
  }

  __device__ __forceinline__ u32 full(const Turn<kStages>& turn) const {
    return barriers_smem + 16 * turn.stage;
  }

  // Until the tile that had this stage is not needed any more.
  __device__ __forceinline__ void acquire(const Turn<kStages>& turn) const {
    mbarrier_wait(full(turn) + 8, turn.parity ^ 1);
  }

  // The same; then announces the bytes to come.
  __device__ __forceinline__ void acquire(const Turn<kStages>& turn, u32 bytes) const {
    acquire(turn);
    mbarrier_arrive_expect_tx(full(turn), bytes);
  }

  __device__ __forceinline__ void wait(const Turn<kStages>& turn) const {
    mbarrier_wait(full(turn), turn.parity);
  }

  // By one thread for all that it speaks for.
  __device__ __forceinline__ void release(const Turn<kStages>& turn) const {
    mbarrier_arrive(full(turn) + 8);
  }
};
// Online softmax over rows that are spread over the 4 lanes of a quad, as mma.sync and wgmma lay them out. Needs
// types.cuh, ptx.cuh.
//
// Scores are used as they come from Q K^T. With c = scale * log2(e), the weight of a score s against the row's
// reference m is 2^((s - m) c). Any m gives the same result; the running maximum keeps weights at or below 1.

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// A reference that can be subtracted: a row that has seen nothing but -inf keeps weights of exactly 0.
__device__ __forceinline__ float finite_reference(float reference) {
  return reference == negative_infinity() ? 0.0f : reference;
}

// The scale of a problem in the two forms that the loop needs. `prescale` is set where scores must be scaled before the
// maximum is taken: a scale of 0 or below, or one so small that c would be flushed to 0.
struct ScoreScale {
  bool prescale;
  float natural;  // multiplies scores in the LSE
  float log2;     // c

  __device__ __forceinline__ explicit ScoreScale(float scale)
      : prescale(!(scale > 1e-30f)), natural(prescale ? 1.0f : scale), log2(natural * kLog2E) {}
};

// kRowTiles tiles of 16 rows; a thread holds 2 rows of each. For each block of scores: observe(), then weigh().
template <int kRowTiles>
struct OnlineSoftmax {
  // From here on, (s c - m c) with a rounded m c would move all weights of a row by more than 2^-14, and overflow at
  // 2^31. The slower (s - m) c is exact for the largest score, whatever its size.
  static constexpr float kCarefulFrom = 1024.0f;

  float reference[kRowTiles][2];  // m
  float shift[kRowTiles][2];      // m c; 0 where m was subtracted from the scores before
  float sum[kRowTiles][2];        // of this thread's own columns; reduced over the quad at the end
  bool careful = false;

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[tile][half] = negative_infinity();
        shift[tile][half] = 0.0f;
        sum[tile][half] = 0.0f;
      }
    }
  }

  // Looks at a block of scores. Where one outgrows its row's reference by more than kThreshold (in powers of 2), the
  // references of the warp move up to the maxima and what was accumulated is scaled down. Each thread looks at its own
  // columns, so that blocks which move nothing need no exchange but a vote.
  template <int kThreshold, int kScoreTiles, int kOutTiles>
  __device__ __forceinline__ void observe(float (&scores)[kRowTiles][kScoreTiles][4],
                                          float (&out)[kRowTiles][kOutTiles][4], float scale_log2) {
    float maximum[kRowTiles][2];
    bool moves = false;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float found = negative_infinity();
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
          found = fmaxf(found, fmaxf(scores[tile][n][2 * half], scores[tile][n][2 * half + 1]));
        }
        maximum[tile][half] = found;
        moves = moves || (found - reference[tile][half]) * scale_log2 > kThreshold;
      }
    }
    if (__any_sync(0xffffffffu, moves)) {
      move_references(maximum, out, scale_log2);
    }
    if (careful) {
      subtract_references(scores);
    }
  }

  // Turns the scores that were observed last into weights.
  template <int kScoreTiles>
  __device__ __forceinline__ void weigh(float (&scores)[kRowTiles][kScoreTiles][4], float scale_log2) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
          for (int column = 0; column < 2; ++column) {
            float& score = scores[tile][n][2 * half + column];
            score = exp2_approx(fmaf(score, scale_log2, -shift[tile][half]));
            sum[tile][half] += score;
          }
        }
      }
    }
  }

  // Natural logarithm of the row's sum of exp; -inf for a row without weight. Call after reduce().
  __device__ __forceinline__ float log_sum_exp(int tile, int half, const ScoreScale& scale) const {
    const float total = sum[tile][half];
    return total == 0.0f ? negative_infinity() : finite_reference(reference[tile][half]) * scale.natural + logf(total);
  }

  // What the accumulated output is multiplied with; 0 for a row without weight. Call after reduce().
  __device__ __forceinline__ float normaliser(int tile, int half) const {
    const float total = sum[tile][half];
    return total == 0.0f ? 0.0f : 1.0f / total;
  }

  __device__ __forceinline__ void reduce() {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      sum[tile][0] = quad_sum(sum[tile][0]);
      sum[tile][1] = quad_sum(sum[tile][1]);
    }
  }

 private:
  template <int kOutTiles>
  __device__ __forceinline__ void move_references(const float (&maximum)[kRowTiles][2],
                                                  float (&out)[kRowTiles][kOutTiles][4], float scale_log2) {
    bool large = false;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old = reference[tile][half];
        const float moved = fmaxf(old, quad_max(maximum[tile][half]));
        const float rescale = exp2_approx((old - finite_reference(moved)) * scale_log2);
        reference[tile][half] = moved;
        large = large || fabsf(finite_reference(moved) * scale_log2) > kCarefulFrom;
        sum[tile][half] *= rescale;
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
          out[tile][n][2 * half] *= rescale;
          out[tile][n][2 * half + 1] *= rescale;
        }
      }
    }
    careful = __any_sync(0xffffffffu, large);
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shift[tile][half] = careful ? 0.0f : finite_reference(reference[tile][half]) * scale_log2;
      }
    }
  }

  template <int kScoreTiles>
  __device__ __forceinline__ void subtract_references(float (&scores)[kRowTiles][kScoreTiles][4]) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float from = finite_reference(reference[tile][half]);
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
          scores[tile][n][2 * half] -= from;
          scores[tile][n][2 * half + 1] -= from;
        }
      }
    }
  }
};
// Online softmax of the two rows that a thread has part of in an accumulator of wgmma. Needs online_softmax.cuh,
// ptx_sm90.cuh.
//
// scores[4 i + 2 half + e] is row `half`. As in online_softmax.cuh, the weight of a score s against its row's reference
// m is 2^((s - m) c), and any m gives the same result. Here a reference moves only when a score outgrows it by a factor
// that float32 and 16-bit weights bear, so that most blocks need no exchange between threads and no rescaling.
//
// A block of scores goes: outgrown(), and move() if so; subtract(); weigh() for all of them in parts; accept(). Where some
// scores are weighed unseen, surpassed() tells behind them whether they were too large; they must then be there to be
// weighed again.

struct RowSoftmax {
  static constexpr float kLargestGrowth = 8.0f;  // powers of 2
  static constexpr float kLargestWeight = 256.0f;
  // As in OnlineSoftmax: from here on m is subtracted from the scores before they are scaled. Those are always looked at
  // before, as the difference takes their place.
  static constexpr float kCarefulFrom = 1024.0f;

  float reference[2] = {negative_infinity(), negative_infinity()};  // m
  float shift[2] = {0.0f, 0.0f};                                    // m c; 0 where m is subtracted before
  float sum[2] = {0.0f, 0.0f};    // of this thread's own columns; reduced over the quad at the end
  float block[2] = {0.0f, 0.0f};  // as sum, of the block at hand
  float rescale[2];               // what came before is to be multiplied with, after move()
  bool careful = false;
  bool unset = true;  // a row of the warp has no reference

  // Whether one of the first kCount scores outgrows its row's reference, in any row of the warp. Threads look at their
  // own columns. Compares floats as integers, three at a time: among negative ones the order is reversed, so where all
  // are negative the answer may be a needless yes.
  template <int kCount, int kScores>
  __device__ __forceinline__ bool outgrown(const float (&scores)[kScores], float scale_log2) const {
    bool found = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int most = __float_as_int(negative_infinity());
#pragma unroll
      for (int i = half; i < kCount / 2; i += 2) {
        most = max_signed(most, __float_as_int(scores[2 * i]), __float_as_int(scores[2 * i + 1]));
      }
      const float largest = most >= 0 ? __int_as_float(most) : 0.0f;
      found = found || (largest - reference[half]) * scale_log2 > kLargestGrowth;
    }
    return __any_sync(0xffffffffu, found);
  }

  // Whether the weights of the block are too large, or the row has no reference that they could be measured by.
  __device__ __forceinline__ bool surpassed() const {
    return __any_sync(0xffffffffu, unset || !(block[0] <= kLargestWeight && block[1] <= kLargestWeight));
  }

  // Moves the references up to the maxima of scores [kFirst, kLast), and scales the sums.
  template <int kFirst, int kLast, int kScores>
  __device__ __forceinline__ void move(const float (&scores)[kScores], float scale_log2) {
    bool large = false, none = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = negative_infinity();
#pragma unroll
      for (int i = kFirst / 2 + half; i < kLast / 2; i += 2) {
        most = fmaxf(most, fmaxf(scores[2 * i], scores[2 * i + 1]));
      }
      const float moved = fmaxf(reference[half], quad_max(most));
      const float finite = finite_reference(moved);
      rescale[half] = exp2_approx((reference[half] - finite) * scale_log2);
      reference[half] = moved;
      sum[half] *= rescale[half];
      shift[half] = finite * scale_log2;
      large = large || fabsf(shift[half]) > kCarefulFrom;
      none = none || moved == negative_infinity();
    }
    careful = __any_sync(0xffffffffu, large);
    unset = __any_sync(0xffffffffu, none);
    if (careful) {
      shift[0] = 0.0f;
      shift[1] = 0.0f;
    }
  }

  // Scores [kFirst, kLast) become differences from their references where that is needed.
  template <int kFirst, int kLast, int kScores>
  __device__ __forceinline__ void subtract(float (&scores)[kScores]) const {
    if (careful) {
      const float from[2] = {finite_reference(reference[0]), finite_reference(reference[1])};
#pragma unroll
      for (int i = kFirst / 2; i < kLast / 2; ++i) {
        scores[2 * i] -= from[i % 2];
        scores[2 * i + 1] -= from[i % 2];
      }
    }
  }

  // The weights of scores [kFirst, kLast), given to take(i, weight of scores[2 i], weight of scores[2 i + 1]).
  template <int kFirst, int kLast, int kScores, typename Take>
  __device__ __forceinline__ void weigh(const float (&scores)[kScores], float scale_log2, Take take) {
#pragma unroll
    for (int i = kFirst / 2; i < kLast / 2; ++i) {
      const float first = exp2_approx(fmaf(scores[2 * i], scale_log2, -shift[i % 2]));
      const float second = exp2_approx(fmaf(scores[2 * i + 1], scale_log2, -shift[i % 2]));
      block[i % 2] += first;
      block[i % 2] += second;
      take(i, first, second);
    }
  }

  // The block's weights count.
  __device__ __forceinline__ void accept() {
    sum[0] += block[0];
    sum[1] += block[1];
    block[0] = 0.0f;
    block[1] = 0.0f;
  }

  __device__ __forceinline__ void reduce() {
    sum[0] = quad_sum(sum[0]);
    sum[1] = quad_sum(sum[1]);
  }

  // After reduce(): natural logarithm of the row's sum of exp; -inf for a row without weight.
  __device__ __forceinline__ float log_sum_exp(int half, float scale) const {
    return sum[half] == 0.0f ? negative_infinity() : finite_reference(reference[half]) * scale + logf(sum[half]);
  }

  // After reduce(): what the output is multiplied with; 0 for a row without weight.
  __device__ __forceinline__ float normaliser(int half) const {
    return sum[half] == 0.0f ? 0.0f : 1.0f / sum[half];
  }
};

using Element = BFloat16;
constexpr int kHeadDim = 128;
constexpr int kValueDim = 128;       // columns of V and O
constexpr int kWarpgroups = 2;  // that compute
constexpr int kBlockM = 64 * kWarpgroups;
constexpr int kBlockN = 128;
constexpr int kNumStages = 2;
constexpr int kQBuffers = 2;
constexpr bool kExact = false;  // references are exact maxima
constexpr bool kLate = false;    // scores are weighed, then looked at
constexpr int kEarlyColumns = 0;  // of a block, weighed beside the product with V
constexpr bool kPingPong = false;          // warpgroups issue products in turns
constexpr bool kOverlapTiles = false;  // the next S beside the last O
constexpr bool kDynamic = false;  // tiles are taken from a counter
constexpr int kBlocksPerSm = 1;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
constexpr int kThreads = 128 * (kWarpgroups + 1);




constexpr bool kCausal = false;

// What a tile of scores needs: nothing (no visible pair), no mask at all, or a test per element.
enum class TileKind { kSkip, kFull, kPartial };

struct Mask {
  int seqlen_q;
  int seqlen_k;

  // Key `col` is visible to query `row`. Causal is aligned bottom-right: the last query sees every key.
  __device__ __forceinline__ bool visible(int row, int col) const {
    bool seen = col < seqlen_k;
    if constexpr (kCausal) {
      seen = seen && col <= row + (seqlen_k - seqlen_q);
    }
    return seen;
  }

  // One past the last key that any of the queries [row_begin, row_end) sees. May be 0.
  __device__ __forceinline__ int key_end(int row_end) const {
    if constexpr (kCausal) {
      return max(0, min(seqlen_k, min(row_end, seqlen_q) + (seqlen_k - seqlen_q)));
    }
    return seqlen_k;
  }

  // One past the last key that every query from row_begin on sees. May be 0.
  __device__ __forceinline__ int full_end(int row_begin) const {
    if constexpr (kCausal) {
      return max(0, min(seqlen_k, row_begin + 1 + (seqlen_k - seqlen_q)));
    }
    return seqlen_k;
  }

  // Queries [row_begin, row_end) against keys [col_begin, col_end).
  __device__ __forceinline__ TileKind classify(int row_begin, int row_end, int col_begin, int col_end) const {
    if (col_begin >= key_end(row_end)) {
      return TileKind::kSkip;
    }
    bool full = col_end <= seqlen_k;
    if constexpr (kCausal) {
      full = full && col_end - 1 <= row_begin + (seqlen_k - seqlen_q);
    }
    return full ? TileKind::kFull : TileKind::kPartial;
  }
};
// Scheduler: thread blocks that each take several tiles. One thread asks for tiles, the others are told their numbers.
// Needs: kBlockM, kCausal, kDynamic, Params.
//
// Tiles are numbered by sections of heads, whose keys and values then stay in the L2 cache; in a section, the longest come
// first. With kDynamic a block takes the next number when it is done with one, from a counter in the workspace that is 0
// at the launch. Else blocks take them to and fro (0 1 2, 2 1 0, 0 1 2, ...), or just one each where the grid has as many
// blocks as there are tiles.
struct alignas(16) Tile {
  int row_begin;
  int head;
  int head_kv;
  int batch;
};

struct TileNumbers {
  int row_tiles;
  int num_heads;
  int heads;    // of all batch entries
  int group;    // query heads per key head
  int section;  // heads

  __device__ __forceinline__ explicit TileNumbers(const Params& params)
      : row_tiles((params.seqlen_q + kBlockM - 1) / kBlockM),
        num_heads(params.num_heads),
        heads(params.batch * params.num_heads),
        group(params.num_heads / params.num_heads_kv),
        section(min(params.heads_per_section, heads)) {}

  __device__ __forceinline__ int count() const {
    return row_tiles * heads;
  }

  __device__ __forceinline__ Tile tile(int number) const {
    const int section_tiles = section * row_tiles;
    const int first_head = number / section_tiles * section;
    const int rest = number % section_tiles;
    const int section_heads = min(section, heads - first_head);
    const int row_tile = rest / section_heads;
    const int head = first_head + rest % section_heads;
    return {(kCausal ? row_tiles - 1 - row_tile : row_tile) * kBlockM, head % num_heads, head % num_heads / group,
            head / num_heads};
  }
};

// By one thread of a block. A number that is not below the count means that nothing is left.
class NextTile {
  i64 number = blockIdx.x;
  int round = 0;

 public:
  __device__ __forceinline__ i64 current() const {
    return number;
  }

  __device__ __forceinline__ void advance(const Params& params) {
    if constexpr (kDynamic) {
      number = i64(gridDim.x) + atomicAdd(static_cast<u32*>(params.workspace), 1u);
    } else {
      ++round;
      number = i64(round) * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    }
  }
};
// The two matrix products of attention with wgmma, and what happens to their registers in between. Needs: the parameters
// and mask of the family, pipeline.cuh, descriptor.cuh, wgmma.cuh.jinja, row_softmax.cuh.
//
// A warpgroup owns 64 rows of Q. Its accumulators (g = lane / 4, t = lane % 4, warp w of the four): scores[4 i + 2 half + e]
// is row 16 w + g + 8 half and column 8 i + 2 t + e. Packed to 16 bits, 16 neighbouring columns are an A operand.
//
// In shared memory a tile is a row of panels, as wide as a swizzled line is long: a row of a panel is one line.
template <int kColumns>
struct Panels {
  static constexpr int kPadded = (kColumns + 31) / 32 * 32;
  static constexpr int kWidth = kPadded % 64 == 0 ? 64 : 32;  // columns
  static constexpr int kCount = kPadded / kWidth;
  static constexpr int kLine = kWidth * 2;       // bytes
  static constexpr int kRowBytes = kPadded * 2;  // in all panels together
};
using KeyPanels = Panels<kHeadDim>;     // of Q and K
using ValuePanels = Panels<kValueDim>;  // of V and O

constexpr int kWarpgroupRows = 64;
constexpr int kHeadSteps = (kHeadDim + 15) / 16;  // of the first product, which sums over columns
constexpr int kKeySteps = kBlockN / 16;           // of the second, which sums over keys
constexpr bool kHalves = kBlockN % 32 == 0;       // half a block can be a block of its own
constexpr int kHalfBlock = kHalves ? kBlockN / 2 : kBlockN;
constexpr int kQueriesBytes = kWarpgroupRows * KeyPanels::kRowBytes;  // of a warpgroup
constexpr int kOutBytes = kWarpgroupRows * ValuePanels::kRowBytes;
constexpr int kKeysBytes = kBlockN * KeyPanels::kRowBytes;
constexpr int kValuesBytes = kBlockN * ValuePanels::kRowBytes;
static_assert(kHeadDim % 8 == 0 && kValueDim % 8 == 0 && kBlockN % 16 == 0, "what one wgmma takes");

constexpr int kScores = kBlockN / 2;  // of a thread
using Scores = float[kScores];
using Weights = u32[kKeySteps][4];
using Output = float[kValueDim / 2];

__device__ __forceinline__ int lane() {
  return threadIdx.x % 32;
}

// Row of the warpgroup's 64 that `half` of this thread's entries belong to.
__device__ __forceinline__ int fragment_row(int half) {
  return threadIdx.x % 128 / 32 * 16 + 8 * half + lane() / 4;
}

// Blocks of kBlockN keys that rows of a tile see. One at least: without keys, all of it is masked.
__device__ __forceinline__ int tile_key_blocks(const Mask& mask, int row_begin) {
  return max(1, (mask.key_end(row_begin + kBlockM) + kBlockN - 1) / kBlockN);
}

// Those that a warpgroup works on: from full_end on with a mask. Where the tiles of a thread block overlap, all its
// warpgroups work on the same blocks.
struct KeyBlocks {
  int full_end;
  int end;
  int tile_end;
  bool half;  // no row sees more than half of the last one

  __device__ __forceinline__ KeyBlocks() {}

  __device__ __forceinline__ KeyBlocks(const Mask& mask, int row_begin, int query_begin)
      : tile_end(tile_key_blocks(mask, row_begin)) {
    const bool empty = query_begin >= mask.seqlen_q;
    const int keys = empty ? 0 : mask.key_end(query_begin + kWarpgroupRows);
    end = kOverlapTiles ? tile_end : max(1, (keys + kBlockN - 1) / kBlockN);
    full_end = empty ? 0 : mask.full_end(query_begin) / kBlockN;
    half = kHalves && end > 1 && keys <= (end - 1) * kBlockN + kBlockN / 2;
  }
};

// Steps of the first product: a swizzled line holds a few, then comes the next panel.
struct HeadSteps {
  static constexpr int kCount = kHeadSteps;

  static constexpr int offset(int step, int rows) {
    constexpr int kPanelSteps = KeyPanels::kWidth / 16;
    return step / kPanelSteps * rows * KeyPanels::kLine + step % kPanelSteps * 32;
  }
  static constexpr int a(int step) {
    return offset(step, kWarpgroupRows);
  }
  static constexpr int b(int step) {
    return offset(step, kBlockN);
  }
};

// S = Q K^T for the first kKeys keys of a block, started.
template <int kKeys>
__device__ __forceinline__ void multiply_keys(Scores& scores, u32 q_smem, u32 k_smem) {
  float (&part)[kKeys / 2] = reinterpret_cast<float (&)[kKeys / 2]>(scores);
  constexpr int kLine = KeyPanels::kLine;
  const u64 q = matrix_descriptor(q_smem, 16, 8 * kLine, kSwizzleOfRow<kLine>);
  const u64 k = matrix_descriptor(k_smem, 16, 8 * kLine, kSwizzleOfRow<kLine>);
  wgmma_shared<Element, false, false, HeadSteps>(part, q, k, false);
  wgmma_commit();
}

// Steps of the second product: 16 keys each, which are lines of a panel.
template <int kKeys>
struct KeySteps {
  static constexpr int kCount = kKeys / 16;

  static constexpr int b(int step) {
    return step * 16 * ValuePanels::kLine;
  }
};

// O += P V for the first kKeys keys of a block, started. V is MN-major: a line holds columns of one key.
template <int kKeys>
__device__ __forceinline__ void multiply_values(Output& out, const Weights& weights, u32 v_smem) {
  constexpr int kLine = ValuePanels::kLine;
  const u64 v = matrix_descriptor(v_smem, kBlockN * kLine, 8 * kLine, kSwizzleOfRow<kLine>);
  wgmma_registers<Element, true, KeySteps<kKeys>>(out, weights, v, true);
  wgmma_commit();
}

// Scores that the mask hides become -inf. query_begin: of the warpgroup. A thread's columns of a row are numbered from 0 to
// kKeys / 4; which of them count is a bit each, because one instruction makes 7 predicates from bits.
template <int kKeys>
__device__ __forceinline__ void apply_mask(Scores& scores, const Mask& mask, int query_begin, int key_begin) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int end = mask.key_end(query_begin + fragment_row(half) + 1);
    const int keys = max(0, end - key_begin - lane() % 4 * 2);
    const int columns = keys / 8 * 2 + min(keys % 8, 2);
#pragma unroll
    for (int first = 0; first < kKeys / 4; first += 32) {
      const int seen = max(0, columns - first);
      const u32 bits = seen < 32 ? (1u << seen) - 1 : 0xffffffffu;
#pragma unroll
      for (int column = first; column < min(first + 32, kKeys / 4); ++column) {
        float& score = scores[column / 2 * 4 + 2 * half + column % 2];
        score = bits >> (column - first) & 1 ? score : negative_infinity();
      }
    }
  }
}

// The first kEarly scores become weights where they are.
template <int kEarly>
__device__ __forceinline__ void weigh_in_place(Scores& scores, RowSoftmax& softmax, float scale_log2) {
  softmax.weigh<0, kEarly>(scores, scale_log2, [&](int pair, float first, float second) {
    scores[2 * pair] = first;
    scores[2 * pair + 1] = second;
  });
}

// References have moved since: the weights follow.
template <int kEarly>
__device__ __forceinline__ void rescale_in_place(Scores& scores, RowSoftmax& softmax) {
  softmax.block[0] = 0.0f;
  softmax.block[1] = 0.0f;
#pragma unroll
  for (int pair = 0; pair < kEarly / 2; ++pair) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      float& weight = scores[2 * pair + column];
      weight *= softmax.rescale[pair % 2];
      softmax.block[pair % 2] += weight;
    }
  }
}

// P: the other scores weighed, and all rounded to 16 bits. The scores stay as they are.
template <int kEarly, int kKeys>
__device__ __forceinline__ void weigh_rest(Weights& weights, const Scores& scores, RowSoftmax& softmax,
                                           float scale_log2) {
#pragma unroll
  for (int pair = 0; pair < kEarly / 2; ++pair) {
    weights[pair / 4][pair % 4] = pack<Element>(scores[2 * pair], scores[2 * pair + 1]);
  }
  softmax.weigh<kEarly, kKeys / 2>(scores, scale_log2, [&](int pair, float first, float second) {
    weights[pair / 4][pair % 4] = pack<Element>(first, second);
  });
}

__device__ __forceinline__ void scale_rows(Output& out, const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kValueDim / 2; ++i) {
    out[i] *= factor[i / 2 % 2];
  }
}

// The tile's rows of Q times -1 or 0, in place, by the warpgroup that owns them: a scale that is not positive then leaves
// a positive one. Both are exact.
__device__ __forceinline__ void fold_scale(char* q_smem, float factor) {
#pragma unroll 1
  for (int index = threadIdx.x % 128; index < kQueriesBytes / 2; index += 128) {
    Element& entry = reinterpret_cast<Element*>(q_smem)[index];
    entry = from_float<Element>(to_float(entry) * factor);
  }
  fence_proxy_async();
}

// Where a chunk of 16 bytes of one of a warpgroup's 64 rows of O lies: chunks of a line are permuted as the swizzle of its
// width does it.
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  constexpr int kLine = ValuePanels::kLine;
  constexpr int kChunks = kLine / 16;
  const int permuted = chunk % kChunks ^ (row * kLine / 128 % kChunks);
  return (chunk / kChunks * kWarpgroupRows + row) * kLine + permuted * 16;
}

__device__ __forceinline__ int element_offset(int row, int column) {
  return chunk_offset(row, column / 8) + column % 8 * 2;
}

// Rounds the output into the tile that held the warpgroup's rows of Q. A warp writes its own rows.
__device__ __forceinline__ void stage_output(u32 out_smem, const Output& out) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
#pragma unroll
  for (int step = 0; step < (kValueDim + 15) / 16; ++step) {
    u32 fragment[4] = {0, 0, 0, 0};
#pragma unroll
    for (int word = 0; word < (16 * step + 16 <= kValueDim ? 4 : 2); ++word) {
      fragment[word] = pack<Element>(out[8 * step + 2 * word], out[8 * step + 2 * word + 1]);
    }
    stmatrix_x4(out_smem + chunk_offset(row, 2 * step + lane() / 16), fragment);
  }
}
// What a thread block has in shared memory, and the thread that fills it by TMA. Needs: the parameters of the family,
// scheduler_persistent.cuh, wgmma_attention.cuh, pipeline.cuh.

struct TensorMaps {
  const TensorMap* q;  // boxes of kWarpgroupRows lines of a panel
  const TensorMap* k;  // of kBlockN lines
  const TensorMap* v;
  const TensorMap* out;  // as q
};

// Dynamic shared memory, from its start on.
constexpr u32 kTilesOffset = 512;  // behind the barriers: a Tile for each Q
constexpr u32 kQOffset = 1024;
constexpr u32 kRowsBytes = kQueriesBytes > kOutBytes ? kQueriesBytes : kOutBytes;  // O leaves through Q's memory
constexpr u32 kKOffset = kQOffset + kQBuffers * kWarpgroups * kRowsBytes;
constexpr u32 kVOffset = kKOffset + kNumStages * kKeysBytes;
constexpr int kNoTile = -1;  // as row_begin: nothing is left

// Named barriers.
constexpr u32 kTurnBarrier = 1;                                // + warpgroup: its turn to issue products
constexpr u32 kWarpgroupBarrier = kTurnBarrier + kWarpgroups;  // + warpgroup: its four warps

struct Shared {
  char* memory;
  u32 smem;
  Ring<kQBuffers> queries;  // with the tile that they belong to
  Ring<kNumStages> keys;
  Ring<kNumStages> values;

  __device__ __forceinline__ explicit Shared(char* memory)
      : memory(memory),
        smem(shared_address(memory)),
        queries{smem},
        keys{smem + Ring<kQBuffers>::kBytes},
        values{smem + Ring<kQBuffers>::kBytes + Ring<kNumStages>::kBytes} {}

  __device__ __forceinline__ void init() const {
    queries.init(kWarpgroups);
    keys.init(4 * kWarpgroups);
    values.init(4 * kWarpgroups);
    fence_mbarrier_init();
  }
  __device__ __forceinline__ Tile& tile(int buffer) const {
    return reinterpret_cast<Tile*>(memory + kTilesOffset)[buffer];
  }
  __device__ __forceinline__ u32 q_offset(int buffer, int warpgroup) const {
    return kQOffset + (buffer * kWarpgroups + warpgroup) * kRowsBytes;
  }
  __device__ __forceinline__ u32 k(int stage) const {
    return smem + kKOffset + stage * kKeysBytes;
  }
  __device__ __forceinline__ u32 v(int stage) const {
    return smem + kVOffset + stage * kValuesBytes;
  }
};

// What a warpgroup has to do in a tile.
struct Work {
  Tile tile;
  int query_begin;
  bool empty;  // all of its rows are behind the last query
  KeyBlocks blocks;
  u32 q_offset;  // in shared memory: its rows of Q, later of O
};

// A tile of kRows rows from `row` on.
template <typename Panels, int kRows>
__device__ __forceinline__ void load_panels(u32 target_smem, const TensorMap* map, u32 barrier, int row, int head,
                                            int batch, u64 policy) {
#pragma unroll
  for (int panel = 0; panel < Panels::kCount; ++panel) {
    tma_load_4d(target_smem + panel * kRows * Panels::kLine, map, barrier, panel * Panels::kWidth, row, head, batch,
                policy);
  }
}

// Rows behind the last query stay where they are.
__device__ __forceinline__ void store_panels(const TensorMap* map, u32 source_smem, const Work& work) {
  if (work.empty) {
    return;
  }
#pragma unroll
  for (int panel = 0; panel < ValuePanels::kCount; ++panel) {
    tma_store_4d(map, source_smem + panel * kWarpgroupRows * ValuePanels::kLine, panel * ValuePanels::kWidth,
                 work.query_begin, work.tile.head, work.tile.batch);
  }
}

// After reduce().
__device__ __forceinline__ void store_log_sum_exp(const Params& params, const RowSoftmax& softmax, float scale,
                                                  const Work& work) {
  float* lse_gmem =
      static_cast<float*>(params.lse) + (i64(work.tile.batch) * params.num_heads + work.tile.head) * params.seqlen_q;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = work.query_begin + fragment_row(half);
    if (lane() % 4 == 0 && query < params.seqlen_q) {
      lse_gmem[query] = softmax.log_sum_exp(half, scale);
    }
  }
}

// One thread loads for the whole block, and tells the others which tiles.
__device__ __forceinline__ void load(const Shared& shared, const Params& params, const TensorMaps& maps) {
  const Mask mask{params.seqlen_q, params.seqlen_k};
  const TileNumbers numbers(params);
  NextTile next;
  Turn<kQBuffers> q;
  Turn<kNumStages> k, v;
  Tile tile = {};
  const auto load_keys = [&](int block) {
    shared.keys.acquire(k, kKeysBytes);
    load_panels<KeyPanels, kBlockN>(shared.k(k.stage), maps.k, shared.keys.full(k), block * kBlockN, tile.head_kv,
                                    tile.batch, kCacheEvictLast);
    k.advance();
  };
  const auto load_values = [&](int block) {
    shared.values.acquire(v, kValuesBytes);
    load_panels<ValuePanels, kBlockN>(shared.v(v.stage), maps.v, shared.values.full(v), block * kBlockN, tile.head_kv,
                                      tile.batch, kCacheEvictLast);
    v.advance();
  };
  // Q comes behind the first keys, because an earlier tile's O may still be in its place.
  const auto begin_tile = [&](int row_begin) {
    load_keys(0);
    shared.queries.acquire(q);
    shared.tile(q.stage) = {row_begin, tile.head, tile.head_kv, tile.batch};
    mbarrier_arrive_expect_tx(shared.queries.full(q), kWarpgroups * kQueriesBytes);
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
      load_panels<KeyPanels, kWarpgroupRows>(shared.smem + shared.q_offset(q.stage, warpgroup), maps.q,
                                             shared.queries.full(q), tile.row_begin + warpgroup * kWarpgroupRows,
                                             tile.head, tile.batch, kCacheEvictFirst);
    }
    q.advance();
  };
#pragma unroll 1
  while (next.current() < numbers.count()) {
    tile = numbers.tile(static_cast<int>(next.current()));
    next.advance(params);  // early: a counter takes a while to answer
    const int key_blocks = tile_key_blocks(mask, tile.row_begin);
    begin_tile(tile.row_begin);
#pragma unroll 1
    for (int block = 1; block < key_blocks; ++block) {  // V a block behind K, as it is needed later
      load_keys(block);
      load_values(block - 1);
    }
    load_values(key_blocks - 1);
  }
  begin_tile(kNoTile);  // The last tile's once more: where tiles overlap, a product is started that nobody uses.
}

__device__ __forceinline__ void compute(const Shared& shared, const Params& params, const TensorMaps& maps,
                                        int warpgroup) {
  const Mask mask{params.seqlen_q, params.seqlen_k};
  // A scale that is not positive goes into Q as a factor of -1 or 0.
  const float sign = params.scale > 0.0f ? 1.0f : params.scale < 0.0f ? -1.0f : 0.0f;
  const float scale = sign == 0.0f ? 1.0f : fabsf(params.scale);
  const float scale_log2 = scale * kLog2E;
  const bool speaks = lane() == 0;  // for its warp
  const bool stores = threadIdx.x % 128 == 0;
  const auto release = [&](const auto& ring, auto& turn) {
    if (speaks) {
      ring.release(turn);
    }
    turn.advance();
  };
  const auto take_turn = [&] {
    if constexpr (kPingPong) {
      named_barrier_sync(kTurnBarrier + warpgroup, 256);
    }
  };
  const auto pass_turn = [&] {
    if constexpr (kPingPong) {
      named_barrier_arrive(kTurnBarrier + (warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1), 256);
    }
  };
  if (warpgroup == kWarpgroups - 1) {
    pass_turn();  // the first begins
  }

  Turn<kQBuffers> q, drained;
  Turn<kNumStages> k, v;
  bool storing = false;
  const auto drain = [&] {
    if (stores) {
      bulk_wait_read<0>();
      shared.queries.release(drained);
    }
    drained.advance();
    storing = false;
  };
  Scores scores;    // S of a block of keys
  Weights weights;  // P of the block before

  // The next tile, when its Q has come; false where nothing is left.
  const auto next_work = [&](Work& work) {
    shared.queries.wait(q);
    // From lane 0, so that the compiler knows it to be the same for all.
    const Tile found = shared.tile(q.stage);
    work.tile = {__shfl_sync(0xffffffffu, found.row_begin, 0), __shfl_sync(0xffffffffu, found.head, 0),
                 __shfl_sync(0xffffffffu, found.head_kv, 0), __shfl_sync(0xffffffffu, found.batch, 0)};
    work.q_offset = shared.q_offset(q.stage, warpgroup);
    q.advance();
    if (work.tile.row_begin == kNoTile) {
      return false;
    }
    work.query_begin = work.tile.row_begin + warpgroup * kWarpgroupRows;
    work.empty = work.query_begin >= params.seqlen_q;
    work.blocks = KeyBlocks(mask, work.tile.row_begin, work.query_begin);
    if (sign != 1.0f) {
      fold_scale(shared.memory + work.q_offset, sign);
      named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
    }
    return true;
  };
  const auto start_scores = [&](const Work& work) {
    shared.keys.wait(k);
    take_turn();
    wgmma_fence();
    multiply_keys<kBlockN>(scores, shared.smem + work.q_offset, shared.k(k.stage));
    pass_turn();
  };

  Work work;
  bool more = next_work(work);
  if constexpr (kOverlapTiles) {
    start_scores(work);
    wgmma_wait<0>();
  }
#pragma unroll 1
  while (more) {
    RowSoftmax softmax;
    Output out = {};  // O
    if constexpr (!kOverlapTiles) {
      start_scores(work);
      wgmma_wait<0>();
    }
    release(shared.keys, k);
    if (work.blocks.full_end == 0) {
      apply_mask<kBlockN>(scores, mask, work.query_begin, 0);
    }
    softmax.move<0, kScores>(scores, scale_log2);
    softmax.subtract<0, kScores>(scores);
    weigh_rest<0, kBlockN>(weights, scores, softmax, scale_log2);
    softmax.accept();
    if (storing) {  // the last O has left its place, so that another Q can come
      drain();
    }

    const auto step = [&](int block, auto masked, auto half) {
      constexpr int kKeys = half.value ? kHalfBlock : kBlockN;
      // The first kEarly scores are weighed beside the product with V. The rest are looked at before, or afterwards.
      constexpr bool kUnseen = kLate && !masked.value;
      constexpr int kEarly = masked.value ? 0 : kEarlyColumns / 2;
      constexpr int kSeen = kUnseen ? kEarly : kKeys / 2;
      shared.keys.wait(k);
      take_turn();
      wgmma_fence();
      multiply_keys<kKeys>(scores, shared.smem + work.q_offset, shared.k(k.stage));
      shared.values.wait(v);
      multiply_values<kBlockN>(out, weights, shared.v(v.stage));
      pass_turn();
      wgmma_wait<1>();  // S is there, the product with V under way.
      release(shared.keys, k);
      if constexpr (masked.value) {
        apply_mask<kKeys>(scores, mask, work.query_begin, block * kBlockN);
      }
      bool moves = kExact || (kSeen > 0 && softmax.outgrown<kSeen>(scores, scale_log2));
      if (kUnseen && softmax.careful) {
        moves = softmax.outgrown<kKeys / 2>(scores, scale_log2);
      }
      if (moves) {
        softmax.move<0, kKeys / 2>(scores, scale_log2);
      }
      softmax.subtract<0, kKeys / 2>(scores);
      weigh_in_place<kEarly>(scores, softmax, scale_log2);
      shared.values.wait(v);  // Again, and never long: the compiler moves the next wait no further up than here.
      wgmma_wait<0>();
      release(shared.values, v);
      if (moves) {
        scale_rows(out, softmax.rescale);
      }
      weigh_rest<kEarly, kKeys>(weights, scores, softmax, scale_log2);
      if (kUnseen && !softmax.careful && softmax.surpassed()) {
        softmax.move<kEarly, kKeys / 2>(scores, scale_log2);
        softmax.subtract<kEarly, kKeys / 2>(scores);
        scale_rows(out, softmax.rescale);
        rescale_in_place<kEarly>(scores, softmax);
        weigh_rest<kEarly, kKeys>(weights, scores, softmax, scale_log2);
      }
      softmax.accept();
    };
    int block = 1;
#pragma unroll 1
    for (; block < work.blocks.full_end; ++block) {
      step(block, Flag<false>{}, Flag<false>{});
    }
#pragma unroll 1
    for (; block < work.blocks.end - work.blocks.half; ++block) {
      step(block, Flag<true>{}, Flag<false>{});
    }
    if constexpr (kHalves) {
      if (work.blocks.half) {
        step(block, Flag<true>{}, Flag<true>{});
      }
    }
    shared.values.wait(v);
    wgmma_fence();
    if (kHalves && work.blocks.half) {
      multiply_values<kHalfBlock>(out, weights, shared.v(v.stage));
    } else {
      multiply_values<kBlockN>(out, weights, shared.v(v.stage));
    }
    Work next;
    if constexpr (kOverlapTiles) {
      more = next_work(next);
      start_scores(next);
      wgmma_wait<1>();
      release(shared.values, v);
    } else {
      wgmma_wait<0>();
      release(shared.values, v);
#pragma unroll 1
      for (block = work.blocks.end; block < work.blocks.tile_end; ++block) {  // that other warpgroups' rows see
        shared.keys.wait(k);
        take_turn();
        pass_turn();
        __syncwarp();  // all lanes have seen the phase that one of them now ends
        release(shared.keys, k);
        shared.values.wait(v);
        __syncwarp();
        release(shared.values, v);
      }
    }

    softmax.reduce();
    if (params.lse != nullptr) {
      store_log_sum_exp(params, softmax, scale, work);
    }
    const float normalisers[2] = {softmax.normaliser(0), softmax.normaliser(1)};
    scale_rows(out, normalisers);
    named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);  // all four warps are done with Q
    stage_output(shared.smem + work.q_offset, out);
    fence_proxy_async();
    named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
    if (stores) {
      store_panels(maps.out, shared.smem + work.q_offset, work);
      bulk_commit();
    }
    storing = true;
    if constexpr (kOverlapTiles) {
      wgmma_wait<0>();
      work = next;
    } else {
      if constexpr (kQBuffers == 1) {
        drain();
      }
      more = next_work(work);
    }
  }
  if (storing) {
    drain();
  }
  if constexpr (!kOverlapTiles) {
    shared.keys.wait(k);  // comes for nothing
  }
  if (stores) {
    bulk_wait<0>();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    sm90_fwd(const __grid_constant__ Params params, const __grid_constant__ TensorMap q_map,
             const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
             const __grid_constant__ TensorMap out_map) {
  extern __shared__ __align__(1024) char smem[];
  const Shared shared(smem);
  const TensorMaps maps{&q_map, &k_map, &v_map, &out_map};
  if (threadIdx.x == 0) {
    shared.init();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // the same for the compiler too
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x < 32 && elect_one()) {
      load(shared, params, maps);
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    compute(shared, params, maps, warpgroup - 1);
  }
}
