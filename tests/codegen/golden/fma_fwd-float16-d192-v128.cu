// dtype=float16,head_dim=192,head_dim_v=128
// fma_fwd(block_m=16,block_n=16,num_threads=64,threads_n=8,share_kv=true,blocks_per_sm=1)



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

// ---- Parameters ----
using Input = Half;
using Output = Half;
using Lse = float;
using Accum = float;  // of scores, weights, sums and the output before it is rounded
constexpr int kHeadDim = 192;
constexpr int kValueDim = 128;           // columns of V and O; those of Q and K are kHeadDim
constexpr int kBlockM = 16;             // query rows of a thread block
constexpr int kBlockN = 16;             // keys of one step
constexpr int kNumThreads = 64;     // of a thread block
constexpr int kThreadsN = 8;         // threads that share a query row: neighbours in one warp
constexpr int kBlocksPerSm = 1;  // of an SM, which must find enough registers
constexpr bool kShareKv = true;                 // V takes the place of K in shared memory
constexpr bool kAligned = true;                  // rows start on 16 bytes
constexpr int kSharedBytes = 13824;
constexpr int kOutPack = 4;  // neighbouring output columns of a thread

// A thread owns kRows rows: kRows x kKeys of the scores and kRows x kDims of the output. Its rows and keys
// are interleaved with those of its neighbours, so that neighbours read neighbouring rows of shared memory.
constexpr int kThreadsM = kNumThreads / kThreadsN;
constexpr int kRows = kBlockM / kThreadsM;
constexpr int kKeys = kBlockN / kThreadsN;
constexpr int kDims = kValueDim / kThreadsN;
constexpr int kPack = 4;                       // elements of one access to shared memory
constexpr int kChunk = kDims < 8 ? kDims : 8;  // output columns of a thread that are worked on at once
static_assert(kBlockM % kThreadsM == 0 && kBlockN % kThreadsN == 0 && kValueDim % kThreadsN == 0, "whole tiles");
static_assert(kDims % kOutPack == 0 && kChunk % kOutPack == 0, "whole packs");
static_assert(32 % kThreadsN == 0, "the threads of a row are in one warp");

// Shared memory. Padding makes a row an odd number of packs: reads down a column of packs then touch all banks.
constexpr int kTileStride = kHeadDim + kPack;    // of Q and K: [rows, kHeadDim]
constexpr int kValueStride = kValueDim + kPack;  // of V: [kBlockN, kValueDim]
constexpr int kWeightStride = kBlockN + kPack;   // of P: [kBlockM, kBlockN]
constexpr int kKBytes = kBlockN * kTileStride * int(sizeof(Input));
constexpr int kVBytes = kBlockN * kValueStride * int(sizeof(Input));
constexpr int kWeightOffset = 0;
constexpr int kQOffset = kWeightOffset + kBlockM * kWeightStride * int(sizeof(Accum));
constexpr int kKOffset = kQOffset + kBlockM * kTileStride * int(sizeof(Input));
constexpr int kVOffset = kShareKv ? kKOffset : kKOffset + kKBytes;
constexpr int kEnd = kVOffset + (kShareKv && kKBytes > kVBytes ? kKBytes : kVBytes);  // a shared tile holds either
static_assert(kSharedBytes == kEnd, "shared memory as FmaFwd.resources() has it");
static_assert(kQOffset % 16 == 0 && kKOffset % 16 == 0 && kVOffset % 16 == 0, "every array is aligned");

constexpr bool kPackHeads = false;
constexpr bool kSplitKeys = false;

// ---- Parts ----


// The query rows that go through tiles together. With kPackHeads the query heads that share keys stand side by side: row
// r is query r / group of the group's head r % group.
struct Rows {
  int group;  // query heads per key head

  __device__ __forceinline__ explicit Rows(const Params& params) : group(params.num_heads / params.num_heads_kv) {}

  __device__ __forceinline__ int count(const Params& params) const {
    return kPackHeads ? params.seqlen_q * group : params.seqlen_q;
  }

  __device__ __forceinline__ int query(int row) const {
    return kPackHeads ? row / group : row;
  }

  // In elements, from query 0 of the first head.
  __device__ __forceinline__ i64 offset(int row, i64 row_stride, i64 head_stride) const {
    return kPackHeads ? row / group * row_stride + row % group * head_stride : row * row_stride;
  }
};

// Which rows of which head (or group of heads) of which batch entry a thread block works on, and which part of the keys.
// The grid is one-dimensional, because batch times heads may exceed what the other dimensions take. Neighbouring blocks
// share keys; causal tiles start with the longest.
struct TileCoordinates {
  int row_begin;
  int head;  // the first of a group
  int head_kv;
  int batch;
  int split;

  __device__ __forceinline__ TileCoordinates(const Params& params, const Rows& rows) {
    int rest = blockIdx.x;
    split = 0;
    if constexpr (kSplitKeys) {
      split = rest % params.num_splits;
      rest /= params.num_splits;
    }
    const int row_tiles = (rows.count(params) + kBlockM - 1) / kBlockM;
    const int row_tile = rest % row_tiles;
    row_begin = (kCausal ? row_tiles - 1 - row_tile : row_tile) * kBlockM;
    rest /= row_tiles;
    if constexpr (kPackHeads) {
      head_kv = rest % params.num_heads_kv;
      head = head_kv * rows.group;
      batch = rest / params.num_heads_kv;
    } else {
      head = rest % params.num_heads;
      head_kv = head / rows.group;
      batch = rest / params.num_heads;
    }
  }
};
// The two matrix products of attention on CUDA cores, with the loads and the row reductions around them. Needs: the
// parameters and mask of the family, types.cuh.

template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Pack {
  T at[kCount];
};

__device__ __forceinline__ Accum to_accum(Input value) {
  return to_float(value);
}

template <class T>
__device__ __forceinline__ T to_output(Accum value) {
  if constexpr (sizeof(T) == sizeof(double)) {
    return value;
  } else {
    return from_float<T>(static_cast<float>(value));
  }
}

// Products that must not fuse with the subtraction behind them: the largest score has to give exactly exp(0).
__device__ __forceinline__ float rounded_product(float left, float right) {
  return __fmul_rn(left, right);
}
__device__ __forceinline__ double rounded_product(double left, double right) {
  return __dmul_rn(left, right);
}

// Over the kThreadsN threads that share a row.
__device__ __forceinline__ Accum row_max_of(Accum value) {
#pragma unroll
  for (int lanes = kThreadsN / 2; lanes > 0; lanes /= 2) {
    value = max(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  }
  return value;
}
__device__ __forceinline__ Accum row_sum_of(Accum value) {
#pragma unroll
  for (int lanes = kThreadsN / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, lanes);
  }
  return value;
}

// Copies kCount rows of kColumns elements of one head to shared memory, kPack more apart. Only the first `num_rows`
// exist: the others become zeros and are not read.
template <int kCount, int kColumns>
__device__ __forceinline__ void load_tile(Input* tile_smem, const Input* rows_gmem, i64 stride_row, int num_rows) {
  constexpr int kStride = kColumns + kPack;
  if constexpr (kAligned) {
    constexpr int kElements = 16 / int(sizeof(Input));
    constexpr int kPerRow = kColumns / kElements;
    constexpr int kWords = kPack * int(sizeof(Input)) / 4;
    using Wide = Pack<u32, 4>;
    using Stored = Pack<u32, kWords>;
#pragma unroll 4
    for (int index = threadIdx.x; index < kCount * kPerRow; index += kNumThreads) {
      const int row = index / kPerRow;
      const int col = index % kPerRow * kElements;
      Wide wide = {};
      if (row < num_rows) {
        wide = *reinterpret_cast<const Wide*>(rows_gmem + row * stride_row + col);
      }
#pragma unroll
      for (int part = 0; part < kElements / kPack; ++part) {
        Stored stored;
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          stored.at[word] = wide.at[part * kWords + word];
        }
        *reinterpret_cast<Stored*>(tile_smem + row * kStride + col + part * kPack) = stored;
      }
    }
  } else {
#pragma unroll 8
    for (int index = threadIdx.x; index < kCount * kColumns; index += kNumThreads) {
      const int row = index / kColumns;
      const int col = index % kColumns;
      Input element = {};
      if (row < num_rows) {
        element = rows_gmem[row * stride_row + col];
      }
      tile_smem[row * kStride + col] = element;
    }
  }
}

// S += Q K^T for this thread's rows and keys.                          [kRows, kKeys]
__device__ __forceinline__ void multiply_queries_keys(Accum (&scores_rmem)[kRows][kKeys], const Input* q_smem,
                                                      const Input* k_smem) {
  using Elements = Pack<Input, kPack>;
#pragma unroll 1
  for (int dim = 0; dim < kHeadDim; dim += kPack) {
    Accum k_rmem[kKeys][kPack];
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      const Elements loaded = *reinterpret_cast<const Elements*>(k_smem + key * kThreadsN * kTileStride + dim);
#pragma unroll
      for (int step = 0; step < kPack; ++step) {
        k_rmem[key][step] = to_accum(loaded.at[step]);
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const Elements loaded = *reinterpret_cast<const Elements*>(q_smem + row * kThreadsM * kTileStride + dim);
#pragma unroll
      for (int step = 0; step < kPack; ++step) {
        const Accum q_rmem = to_accum(loaded.at[step]);
#pragma unroll
        for (int key = 0; key < kKeys; ++key) {
          scores_rmem[row][key] = fma(q_rmem, k_rmem[key][step], scores_rmem[row][key]);
        }
      }
    }
  }
}

// O = O rescale + P V for this thread's rows and output columns.       [kRows, kDims]
// The terms of one step are summed on their own before they are added: with long sequences that keeps rounding errors
// as small as a blocked matrix product has them. It is done kChunk columns at a time, in the registers of the scores.
// Where kMasked, hidden keys are left out one by one: a weight of zero would still let their NaN through.
template <bool kMasked>
__device__ __forceinline__ void multiply_weights_values(Accum (&out_rmem)[kRows][kDims], const Accum (&rescale)[kRows],
                                                        const Accum* weights_smem, const Input* v_smem,
                                                        const Mask& mask, int query_begin, int key_begin) {
  using Weights = Pack<Accum, kPack>;
  using Elements = Pack<Input, kOutPack>;
#pragma unroll
  for (int begin = 0; begin < kDims; begin += kChunk) {
    const int count = min(kChunk, kDims - begin);
    Accum partial_rmem[kRows][kChunk] = {};
#pragma unroll 1
    for (int key = 0; key < kBlockN; key += kPack) {
      Weights weights_rmem[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        weights_rmem[row] = *reinterpret_cast<const Weights*>(weights_smem + row * kThreadsM * kWeightStride + key);
      }
#pragma unroll
      for (int step = 0; step < kPack; ++step) {
        Accum v_rmem[kChunk];
#pragma unroll
        for (int dim = 0; dim < count; dim += kOutPack) {
          const Elements loaded =
              *reinterpret_cast<const Elements*>(v_smem + (key + step) * kValueStride + (begin + dim) * kThreadsN);
#pragma unroll
          for (int part = 0; part < kOutPack; ++part) {
            v_rmem[dim + part] = to_accum(loaded.at[part]);
          }
        }
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          if (!kMasked || mask.visible(query_begin + row * kThreadsM, key_begin + key + step)) {
#pragma unroll
            for (int dim = 0; dim < count; ++dim) {
              partial_rmem[row][dim] = fma(weights_rmem[row].at[step], v_rmem[dim], partial_rmem[row][dim]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int dim = 0; dim < count; ++dim) {
        out_rmem[row][begin + dim] = fma(out_rmem[row][begin + dim], rescale[row], partial_rmem[row][dim]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kBlocksPerSm) fma_fwd(const Params params) {
  extern __shared__ __align__(16) unsigned char smem[];
  Accum* weights_smem = reinterpret_cast<Accum*>(smem + kWeightOffset);
  Input* q_smem = reinterpret_cast<Input*>(smem + kQOffset);
  Input* k_smem = reinterpret_cast<Input*>(smem + kKOffset);
  Input* v_smem = reinterpret_cast<Input*>(smem + kVOffset);

  // ---- Which rows ----
  const TileCoordinates tile(params, Rows(params));
  const int tile_begin = tile.row_begin;
  const i64 batch = tile.batch;
  const i64 head = tile.head;
  const i64 head_kv = tile.head_kv;
  const int num_rows = min(kBlockM, params.seqlen_q - tile_begin);
  const Mask mask = {params.seqlen_q, params.seqlen_k};
  const int key_end = mask.key_end(tile_begin + num_rows);

  const Input* q_gmem = static_cast<const Input*>(params.q) + batch * params.q_stride_batch +
                        head * params.q_stride_head + tile_begin * params.q_stride_row;
  const Input* k_gmem =
      static_cast<const Input*>(params.k) + batch * params.k_stride_batch + head_kv * params.k_stride_head;
  const Input* v_gmem =
      static_cast<const Input*>(params.v) + batch * params.v_stride_batch + head_kv * params.v_stride_head;

  const int thread_n = static_cast<int>(threadIdx.x) % kThreadsN;
  const int thread_m = static_cast<int>(threadIdx.x) / kThreadsN;
  const int query_begin = tile_begin + thread_m;  // this thread's first row; the others follow kThreadsM apart

  // ---- Walk the keys ----
  const Accum scale = params.scale;
  Accum out_rmem[kRows][kDims] = {};
  Accum row_max[kRows];  // of all scores so far
  Accum row_sum[kRows];  // of exp(score - row_max) over this thread's keys so far
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    row_max[row] = negative_infinity();
    row_sum[row] = 0;
  }
  load_tile<kBlockM, kHeadDim>(q_smem, q_gmem, params.q_stride_row, num_rows);

  const int num_tiles_n = key_end > 0 ? (key_end - 1) / kBlockN + 1 : 0;
#pragma unroll 1
  for (int tile_n = 0; tile_n < num_tiles_n; ++tile_n) {
    const int key_begin = tile_n * kBlockN;
    const int num_keys = key_end - key_begin;
    const TileKind kind = mask.classify(tile_begin, tile_begin + kBlockM, key_begin, key_begin + kBlockN);
    if (kind == TileKind::kSkip) {
      continue;
    }
    // Wait: the slowest warp may still be reading the tiles of the last step.
    __syncthreads();
    load_tile<kBlockN, kHeadDim>(k_smem, k_gmem + key_begin * params.k_stride_row, params.k_stride_row, num_keys);
    if constexpr (!kShareKv) {
      load_tile<kBlockN, kValueDim>(v_smem, v_gmem + key_begin * params.v_stride_row, params.v_stride_row, num_keys);
    }
    __syncthreads();

    // S = scale Q K^T, hidden keys at -inf                             [kBlockM, kBlockN]
    Accum scores_rmem[kRows][kKeys] = {};
    multiply_queries_keys(scores_rmem, q_smem + thread_m * kTileStride, k_smem + thread_n * kTileStride);
    if constexpr (kShareKv) {
      // Wait: every warp has read K before V takes its place.
      __syncthreads();
      load_tile<kBlockN, kValueDim>(v_smem, v_gmem + key_begin * params.v_stride_row, params.v_stride_row, num_keys);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int key = 0; key < kKeys; ++key) {
        scores_rmem[row][key] = rounded_product(scores_rmem[row][key], scale);
        if (kind == TileKind::kPartial &&
            !mask.visible(query_begin + row * kThreadsM, key_begin + thread_n + key * kThreadsN)) {
          scores_rmem[row][key] = negative_infinity();
        }
      }
    }

    // m' = max(m, rowmax S);  P = exp(S - m');  l = l exp(m - m') + rowsum P
    Accum rescale[kRows];  // exp(m - m')
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      Accum new_max = row_max[row];
#pragma unroll
      for (int key = 0; key < kKeys; ++key) {
        new_max = max(new_max, scores_rmem[row][key]);
      }
      new_max = row_max_of(new_max);
      // As long as a row has seen nothing but -inf, 0 stands in for its maximum: -inf - -inf would be NaN.
      const Accum subtracted = new_max == negative_infinity() ? Accum(0) : new_max;
      rescale[row] = exp(row_max[row] - subtracted);
      row_max[row] = new_max;
      Accum sum = 0;
#pragma unroll
      for (int key = 0; key < kKeys; ++key) {
        const Accum weight = exp(scores_rmem[row][key] - subtracted);
        sum += weight;
        weights_smem[(thread_m + row * kThreadsM) * kWeightStride + thread_n + key * kThreadsN] = weight;
      }
      row_sum[row] = fma(row_sum[row], rescale[row], sum);
    }
    if constexpr (kShareKv) {
      // Wait: all threads have written their part of V.
      __syncthreads();
    } else {
      // The weights of a row are written and read by one warp.
      __syncwarp();
    }

    // O = O exp(m - m') + P V                                          [kBlockM, kValueDim]
    const Accum* weights_row_smem = weights_smem + thread_m * kWeightStride;
    const Input* v_column_smem = v_smem + thread_n * kOutPack;
    if (kind == TileKind::kPartial) {
      multiply_weights_values<true>(out_rmem, rescale, weights_row_smem, v_column_smem, mask, query_begin, key_begin);
    } else {
      multiply_weights_values<false>(out_rmem, rescale, weights_row_smem, v_column_smem, mask, query_begin, key_begin);
    }
  }

  // ---- Finish: O / l and LSE = m + ln l ----
  Output* out_gmem = static_cast<Output*>(params.out) + batch * params.out_stride_batch + head * params.out_stride_head;
  const i64 lse_begin = (batch * params.num_heads + head) * params.seqlen_q;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    row_sum[row] = row_sum_of(row_sum[row]);
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const Accum sum = row_sum[row];
    const int query = query_begin + row * kThreadsM;
    if (query >= params.seqlen_q) {
      continue;
    }
    // A row that saw nothing, or nothing but -inf, gives 0 and an LSE of -inf.
    const bool empty = sum == Accum(0);
    Output* out_row_gmem = out_gmem + query * params.out_stride_row + thread_n * kOutPack;
#pragma unroll
    for (int dim = 0; dim < kDims; dim += kOutPack) {
      Pack<Output, kOutPack> rounded;
#pragma unroll
      for (int part = 0; part < kOutPack; ++part) {
        rounded.at[part] = to_output<Output>(empty ? Accum(0) : out_rmem[row][dim + part] / sum);
      }
      if constexpr (kAligned) {
        *reinterpret_cast<Pack<Output, kOutPack>*>(out_row_gmem + dim * kThreadsN) = rounded;
      } else {
#pragma unroll
        for (int part = 0; part < kOutPack; ++part) {
          out_row_gmem[dim * kThreadsN + part] = rounded.at[part];
        }
      }
    }
    if (params.lse != nullptr && thread_n == 0) {
      static_cast<Lse*>(params.lse)[lse_begin + query] =
          static_cast<Lse>(empty ? negative_infinity() : row_max[row] + log(sum));
    }
  }
}
