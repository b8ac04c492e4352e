// dtype=bfloat16,head_dim=128
// sm80_fwd(block_m=128,block_n=64,num_warps=4,num_stages=2,q_in_registers=false,blocks_per_sm=1)


// One thread block owns kBlockM query rows of one head and walks the keys in blocks of kBlockN:
//
//   S = Q K^T
//   m' = max(m, rowmax(S)),  P = exp(S - m')
//   l = l exp(m - m') + rowsum(P),  O = O exp(m - m') + P V
//
// and divides O by l once at the end. Each warp owns whole rows, so that S and P stay in its registers. K and V arrive
// by asynchronous copies, kNumStages blocks ahead. Where there are few tiles, several thread blocks share the keys of
// one; where queries are few, the heads that share keys share a tile.
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
// Tiles of 16-bit elements in shared memory, moved in chunks of 16 bytes (8 elements). Needs types.cuh, ptx.cuh.

// A row-major tile of kRows x kCols elements; kCols is a multiple of 16.
//
// The chunks of a row are permuted by XOR with bits of the row number, so that 8 consecutive rows of one logical chunk
// fall into 8 different groups of 4 banks, whatever the row length: ldmatrix and the copies are free of conflicts.
template <int kRows, int kCols>
struct Tile {
  static_assert(kCols % 16 == 0, "rows are read in steps of 16 elements");
  static constexpr int kChunks = kCols / 8;
  static constexpr int kRowBytes = kCols * 2;
  static constexpr int kBytes = kRows * kRowBytes;
  // A row of 2 (mod 4) chunks needs 1 bit of XOR, of 4 (mod 8) 2 bits, of 0 (mod 8) 3 bits. Period: 8 rows.
  static constexpr int kPermuted = kChunks % 8 == 0 ? 8 : (kChunks % 4 == 0 ? 4 : 2);

  __device__ __forceinline__ static int permutation(int row) {
    return row / (8 / kPermuted) % kPermuted;
  }

  __device__ __forceinline__ static int offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ permutation(row)) * 16);
  }
};

// One thread's view of a tile for ldmatrix: it points at one row and one of two neighbouring chunks.
template <typename Tile>
struct FragmentReader {
  u32 row_smem;
  int permutation;

  __device__ __forceinline__ FragmentReader(u32 tile_smem, int row, int half)
      : row_smem(tile_smem + row * Tile::kRowBytes), permutation(half ^ Tile::permutation(row)) {}

  // Address `rows` (a multiple of 8) below and `chunk` (even) to the right, `bytes` into another tile.
  __device__ __forceinline__ u32 at(int rows, int chunk, int bytes = 0) const {
    constexpr int kLow = Tile::kPermuted - 1;
    const int column = (chunk & ~kLow) * 16 + (((chunk & kLow) ^ permutation) * 16);
    return row_smem + bytes + (rows * Tile::kRowBytes + column);
  }
};

// Eight elements one by one, for rows that don't start on 16-byte boundaries.
__device__ __forceinline__ uint4 load_elements(const u16* source_gmem) {
  uint4 chunk;
  chunk.x = source_gmem[0] | static_cast<u32>(source_gmem[1]) << 16;
  chunk.y = source_gmem[2] | static_cast<u32>(source_gmem[3]) << 16;
  chunk.z = source_gmem[4] | static_cast<u32>(source_gmem[5]) << 16;
  chunk.w = source_gmem[6] | static_cast<u32>(source_gmem[7]) << 16;
  return chunk;
}

__device__ __forceinline__ void store_elements(u16* target_gmem, uint4 chunk) {
  const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    target_gmem[2 * word] = static_cast<u16>(words[word]);
    target_gmem[2 * word + 1] = static_cast<u16>(words[word] >> 16);
  }
}

// Copies 8 elements into a tile, zeros where `valid` is false: asynchronous, or element by element.
template <bool kVector>
__device__ __forceinline__ void copy_chunk(char* target_smem, const u16* source_gmem, bool valid) {
  if constexpr (kVector) {
    cp_async_16(shared_address(target_smem), source_gmem, valid);
  } else {
    const uint4 zeros = {0, 0, 0, 0};
    *reinterpret_cast<uint4*>(target_smem) = valid ? load_elements(source_gmem) : zeros;
  }
}

// Copies (kRows, kCols) slices of global memory into tiles, one below the other, by all threads of the block.
//
// A thread copies one chunk of every kRowsPerPass-th row, and the same in each panel of columns. A panel is a whole row
// where the threads come out even, else as many chunks as a permutation stays inside of. What does not change from slice
// to slice is kept: all targets are at constant distances from the first, but for a single warp's.
template <typename Tile, int kRows, int kCols, int kThreads, bool kVector>
class TileLoader {
  static constexpr int kPanel = kThreads % (8 * Tile::kChunks) == 0 ? Tile::kChunks : Tile::kPermuted;  // chunks
  static constexpr int kPanels = Tile::kChunks / kPanel;
  static constexpr int kRowsPerPass = kThreads / kPanel;
  static constexpr int kPasses = (kRows + kRowsPerPass - 1) / kRowsPerPass;
  static constexpr bool kWhole = Tile::kChunks * 8 == kCols && kRows % kRowsPerPass == 0;
  static constexpr bool kConstantSteps = kRowsPerPass % 8 == 0;
  static constexpr int kUnrolled = kVector && kConstantSteps ? kPasses : 1;  // elsewhere it takes too many registers

  const u16* chunk_gmem;
  i64 row_stride;
  int first_row;
  int first_target;

 public:
  __device__ __forceinline__ TileLoader(const u16* source_gmem, i64 row_stride)
      : chunk_gmem(source_gmem + threadIdx.x / kPanel * row_stride + threadIdx.x % kPanel * 8),
        row_stride(row_stride),
        first_row(threadIdx.x / kPanel),
        first_target(Tile::offset(threadIdx.x / kPanel, threadIdx.x % kPanel)) {}

  // Starts the copy of the next slice. Rows from `rows_valid` on and columns from kCols on become zeros and are not
  // read. Complete after cp.async wait + barrier.
  __device__ __forceinline__ void next(char* tile, int rows_valid) {
    if (kWhole && rows_valid >= kRows) {
      copy<false>(tile, rows_valid);
    } else {
      copy<true>(tile, rows_valid);
    }
    chunk_gmem += kRows * row_stride;
  }

 private:
  template <bool kChecked>
  __device__ __forceinline__ void copy(char* tile, int rows_valid) const {
    const u32 first_smem = shared_address(tile) + first_target;
    const u16* row_gmem = chunk_gmem;
#pragma unroll(kUnrolled)
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = first_row + pass * kRowsPerPass;
      if (kRows % kRowsPerPass == 0 || row < kRows) {
#pragma unroll(kUnrolled == 1 ? 1 : kPanels)
        for (int panel = 0; panel < kPanels; ++panel) {
          const int chunk = panel * kPanel + threadIdx.x % kPanel;
          const bool valid = !kChecked || (row < rows_valid && chunk * 8 < kCols);
          if constexpr (kVector && kConstantSteps) {
            cp_async_16(first_smem + (pass * kRowsPerPass * Tile::kRowBytes + panel * kPanel * 16),
                        row_gmem + panel * kPanel * 8, valid);
          } else {
            copy_chunk<kVector>(tile + Tile::offset(row, chunk), row_gmem + panel * kPanel * 8, valid);
          }
        }
      }
      row_gmem += kRowsPerPass * row_stride;
    }
  }
};

// Writes the first `rows_valid` of kRows rows, from row `row_begin` of a tile on, to global memory by one warp.
// address_of gives the address of each row, counted from 0.
template <typename Tile, int kRows, int kCols, bool kVector, typename AddressOf>
__device__ __forceinline__ void store_rows(const char* tile, int row_begin, int rows_valid, AddressOf address_of) {
  constexpr int kStored = kCols / 8;
#pragma unroll 4
  for (int index = threadIdx.x % 32; index < kRows * kStored; index += 32) {
    const int row = index / kStored;
    const int chunk = index % kStored;
    if (row >= rows_valid) {
      break;
    }
    const uint4 values = *reinterpret_cast<const uint4*>(tile + Tile::offset(row_begin + row, chunk));
    u16* chunk_gmem = address_of(row) + chunk * 8;
    if constexpr (kVector) {
      *reinterpret_cast<uint4*>(chunk_gmem) = values;
    } else {
      store_elements(chunk_gmem, values);
    }
  }
}
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

using Element = BFloat16;
constexpr bool kIsHalf = false;
constexpr int kHeadDim = 128;
constexpr int kValueDim = 128;                              // columns of V and O
constexpr bool kVector = true;  // rows start on 16-byte boundaries
constexpr int kBlockM = 128;
constexpr int kBlockN = 64;
constexpr int kNumWarps = 4;
constexpr int kNumStages = 2;
constexpr bool kQInRegisters = false;
constexpr int kRescaleThreshold = 8;  // powers of 2
constexpr int kBlocksPerSm = 1;
constexpr bool kPackHeads = false;
constexpr bool kSplitKeys = false;




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
// The two matrix products of attention with mma.sync m16n8k16, and what happens to their registers in between. Needs:
// the parameters and mask of the family, tile.cuh, online_softmax.cuh.
//
// Fragments (g = lane / 4, t = lane % 4): scores[m][n][2 * half + e] is row 16 m + g + 8 half, column 8 n + 2 t + e of
// the warp's rows. Two neighbouring score tiles, packed to 16 bits, are the A operand of the second product.

constexpr int kThreads = kNumWarps * 32;
constexpr int kRowsPerWarp = kBlockM / kNumWarps;
constexpr int kRowTiles = kRowsPerWarp / 16;
constexpr int kScoreTiles = kBlockN / 8;
constexpr int kOutTiles = kValueDim / 8;
constexpr int kHeadDimPadded = (kHeadDim + 15) / 16 * 16;  // the first product sums over steps of 16
constexpr int kHeadSteps = kHeadDimPadded / 16;
static_assert(kBlockM % (16 * kNumWarps) == 0, "a warp owns whole tiles of 16 rows");
static_assert(kBlockN % 16 == 0, "the second product sums over steps of 16 keys");
static_assert(kHeadDim % 8 == 0 && kValueDim % 8 == 0, "columns come in chunks of 8");

using QTile = Tile<kBlockM, kHeadDimPadded>;
using KeyTile = Tile<kBlockN, kHeadDimPadded>;
using ValueTile = Tile<kBlockN, (kValueDim + 15) / 16 * 16>;
using OutTile = Tile<kBlockM, (kValueDim + 15) / 16 * 16>;

__device__ __forceinline__ int warp_row() {
  return threadIdx.x / 32 * kRowsPerWarp;
}

__device__ __forceinline__ int lane() {
  return threadIdx.x % 32;
}

// Which blocks of kBlockN keys a thread block takes: [begin, end), those from full_end on with a mask.
struct KeyBlocks {
  int begin;
  int full_end;
  int end;
};

// The part `split` of `num_splits` of the keys that the queries [query_begin, query_end) see.
__device__ __forceinline__ KeyBlocks key_blocks(const Mask& mask, int query_begin, int query_end, int split,
                                                int num_splits) {
  KeyBlocks blocks{0, mask.full_end(query_begin) / kBlockN, (mask.key_end(query_end) + kBlockN - 1) / kBlockN};
  if constexpr (kSplitKeys) {
    const int share = (blocks.end + num_splits - 1) / num_splits;
    blocks.begin = split * share;
    blocks.end = min(blocks.end, blocks.begin + share);
    blocks.full_end = min(blocks.full_end, blocks.end);
  }
  return blocks;
}

// Starts the copy of the tile's rows of Q, which begin at `row_begin`. q_gmem: query 0 of the tile's first head.
__device__ __forceinline__ void load_queries(char* q_smem, const u16* q_gmem, const Rows& rows, int row_begin,
                                             int rows_valid, const Params& params) {
  if constexpr (kPackHeads) {
#pragma unroll 1
    for (int index = threadIdx.x; index < kBlockM * QTile::kChunks; index += kThreads) {
      const int row = index / QTile::kChunks;
      const int chunk = index % QTile::kChunks;
      const bool valid = row < rows_valid && chunk * 8 < kHeadDim;
      const i64 offset = rows.offset(valid ? row_begin + row : 0, params.q_stride_row, params.q_stride_head);
      copy_chunk<kVector>(q_smem + QTile::offset(row, chunk), q_gmem + offset + chunk * 8, valid);
    }
  } else {
    TileLoader<QTile, kBlockM, kHeadDim, kThreads, kVector> loader(q_gmem + row_begin * params.q_stride_row,
                                                                   params.q_stride_row);
    loader.next(q_smem, rows_valid);
  }
}

// Row of the tile that scores[m][..][2 * half + ..] belongs to.
__device__ __forceinline__ int fragment_row(int m, int half) {
  return warp_row() + 16 * m + 8 * half + lane() / 4;
}

// The warp's rows of Q as A operands: read from shared memory when used, or kept in registers.
struct Queries {
  FragmentReader<QTile> reader;
  u32 kept[kQInRegisters ? kRowTiles : 1][kQInRegisters ? kHeadSteps : 1][4];

  __device__ __forceinline__ explicit Queries(const char* q_smem)
      : reader(shared_address(q_smem), warp_row() + lane() % 16, lane() / 16) {}

  __device__ __forceinline__ void load() {
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int step = 0; step < kHeadSteps; ++step) {
          ldmatrix_x4(kept[m][step], reader.at(16 * m, 2 * step));
        }
      }
    }
  }

  __device__ __forceinline__ void fragment(u32 (&operand)[4], int m, int step) const {
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        operand[word] = kept[m][step][word];
      }
    } else {
      ldmatrix_x4(operand, reader.at(16 * m, 2 * step));
    }
  }
};

// S += Q K^T
__device__ __forceinline__ void multiply_keys(float (&scores)[kRowTiles][kScoreTiles][4], const Queries& queries,
                                              const char* k_smem, int stage_bytes) {
  const FragmentReader<KeyTile> keys(shared_address(k_smem), lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
#pragma unroll
  for (int step = 0; step < kHeadSteps; ++step) {
    u32 q[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      queries.fragment(q[m], m, step);
    }
#pragma unroll
    for (int n = 0; n < kScoreTiles; n += 2) {
      u32 k[4];
      ldmatrix_x4(k, keys.at(8 * n, 2 * step, stage_bytes));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        mma_m16n8k16<Element>(scores[m][n], q[m], k[0], k[1]);
        mma_m16n8k16<Element>(scores[m][n + 1], q[m], k[2], k[3]);
      }
    }
  }
}

// O += P V
__device__ __forceinline__ void multiply_values(float (&out)[kRowTiles][kOutTiles][4],
                                                const float (&weights)[kRowTiles][kScoreTiles][4], const char* v_smem,
                                                int stage_bytes) {
  const FragmentReader<ValueTile> values(shared_address(v_smem), lane() % 16, lane() / 16);
#pragma unroll
  for (int n = 0; n < kScoreTiles; n += 2) {
    u32 p[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      p[m][0] = pack<Element>(weights[m][n][0], weights[m][n][1]);
      p[m][1] = pack<Element>(weights[m][n][2], weights[m][n][3]);
      p[m][2] = pack<Element>(weights[m][n + 1][0], weights[m][n + 1][1]);
      p[m][3] = pack<Element>(weights[m][n + 1][2], weights[m][n + 1][3]);
    }
#pragma unroll
    for (int column = 0; column < kOutTiles; column += 2) {
      u32 v[4];
      ldmatrix_x4_trans(v, values.at(8 * n, column, stage_bytes));
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        mma_m16n8k16<Element>(out[m][column], p[m], v[0], v[1]);
        if (column + 1 < kOutTiles) {
          mma_m16n8k16<Element>(out[m][column + 1], p[m], v[2], v[3]);
        }
      }
    }
  }
}

__device__ __forceinline__ void scale_scores(float (&scores)[kRowTiles][kScoreTiles][4], float scale) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
      for (int entry = 0; entry < 4; ++entry) {
        scores[m][n][entry] *= scale;
      }
    }
  }
}

__device__ __forceinline__ void apply_mask(float (&scores)[kRowTiles][kScoreTiles][4], const Mask& mask,
                                           const Rows& rows, int row_begin, int key_begin) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = rows.query(row_begin + fragment_row(m, half));
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          if (!mask.visible(query, key_begin + 8 * n + 2 * (lane() % 4) + column)) {
            scores[m][n][2 * half + column] = negative_infinity();
          }
        }
      }
    }
  }
}

// Not 0 if the exponent of one of two 16-bit floats is all ones: infinity or NaN.
__device__ __forceinline__ u32 nonfinite_bits(u32 pair) {
  constexpr u32 kOne = kIsHalf ? 0x0400u : 0x0080u;  // lowest bit of the exponent
  return ((pair & 0x7fff7fffu) + (kOne | kOne << 16)) & 0x80008000u;
}

__device__ __forceinline__ bool is_nonfinite(u16 bits) {
  return nonfinite_bits(bits) != 0;
}

// A masked key has weight 0, and 0 times an infinity or NaN in its value is NaN. So where the mask cuts through a block
// whose V holds such values, they are added to the rows that see them and replaced by 0 before the product. Costs one
// look at V per partial block. Called by all threads.
__device__ __forceinline__ void isolate_nonfinite(float (&out)[kRowTiles][kOutTiles][4], char* v_smem, const Mask& mask,
                                                  const Rows& rows, int row_begin, int key_begin) {
  constexpr int kTileChunks = ValueTile::kBytes / 16;
  u32 found = 0;
#pragma unroll 2
  for (int index = threadIdx.x; index < kTileChunks; index += kThreads) {
    const uint4 chunk = reinterpret_cast<const uint4*>(v_smem)[index];
    found |= nonfinite_bits(chunk.x) | nonfinite_bits(chunk.y) | nonfinite_bits(chunk.z) | nonfinite_bits(chunk.w);
  }
  if (!__syncthreads_or(found != 0)) {
    return;
  }
#pragma unroll 1
  for (int key = 0; key < kBlockN; ++key) {
#pragma unroll
    for (int column = 0; column < kOutTiles; ++column) {
      const char* chunk = v_smem + ValueTile::offset(key, column);
      const u16* pair = reinterpret_cast<const u16*>(chunk) + lane() % 4 * 2;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int entry = 0; entry < 4; ++entry) {
          const u16 bits = pair[entry % 2];
          const int query = rows.query(row_begin + fragment_row(m, entry / 2));
          if (is_nonfinite(bits) && mask.visible(query, key_begin + key)) {
            out[m][column][entry] += to_float(Element{bits});
          }
        }
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int index = threadIdx.x; index < kTileChunks * 8; index += kThreads) {
    u16* bits = reinterpret_cast<u16*>(v_smem) + index;
    if (is_nonfinite(*bits)) {
      *bits = 0;
    }
  }
  __syncthreads();
}

// lse_gmem: query 0 of the tile's first head; heads are seqlen_q apart.
__device__ __forceinline__ void store_log_sum_exp(float* lse_gmem, const OnlineSoftmax<kRowTiles>& softmax,
                                                  const ScoreScale& scale, const Rows& rows, int row_begin,
                                                  int rows_valid, int seqlen_q) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = fragment_row(m, half);
      if (lane() % 4 == 0 && row < rows_valid) {
        lse_gmem[rows.offset(row_begin + row, 1, seqlen_q)] = softmax.log_sum_exp(m, half, scale);
      }
    }
  }
}

// O / l, rounded and staged in shared memory, so that whole chunks are written. A warp touches its own rows only.
// out_gmem: query 0 of the tile's first head.
__device__ __forceinline__ void store_output(u16* out_gmem, const float (&out)[kRowTiles][kOutTiles][4],
                                             const OnlineSoftmax<kRowTiles>& softmax, char* out_smem, const Rows& rows,
                                             int row_begin, int rows_valid, const Params& params) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float normaliser = softmax.normaliser(m, half);
#pragma unroll
      for (int column = 0; column < kOutTiles; ++column) {
        char* chunk = out_smem + OutTile::offset(fragment_row(m, half), column);
        reinterpret_cast<u32*>(chunk)[lane() % 4] =
            pack<Element>(out[m][column][2 * half] * normaliser, out[m][column][2 * half + 1] * normaliser);
      }
    }
  }
  __syncwarp();
  store_rows<OutTile, kRowsPerWarp, kValueDim, kVector>(out_smem, warp_row(), rows_valid - warp_row(), [&](int row) {
    return out_gmem + rows.offset(row_begin + warp_row() + row, params.out_stride_row, params.out_stride_head);
  });
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm) sm80_fwd(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) char smem[];
  char* q_smem = smem;
  char* k_smem = smem + (kQInRegisters ? 0 : QTile::kBytes);
  char* v_smem = k_smem + kNumStages * KeyTile::kBytes;

  const Rows rows(params);
  const TileCoordinates tile(params, rows);
  const Mask mask{params.seqlen_q, params.seqlen_k};
  const int rows_valid = min(kBlockM, rows.count(params) - tile.row_begin);
  const int query_begin = rows.query(tile.row_begin);
  const int query_end = rows.query(tile.row_begin + rows_valid - 1) + 1;
  const KeyBlocks blocks = key_blocks(mask, query_begin, query_end, tile.split, params.num_splits);

  const u16* q_gmem =
      static_cast<const u16*>(params.q) + tile.batch * params.q_stride_batch + tile.head * params.q_stride_head;
  const u16* k_gmem = static_cast<const u16*>(params.k) + tile.batch * params.k_stride_batch +
                      tile.head_kv * params.k_stride_head + i64(blocks.begin) * kBlockN * params.k_stride_row;
  const u16* v_gmem = static_cast<const u16*>(params.v) + tile.batch * params.v_stride_batch +
                      tile.head_kv * params.v_stride_head + i64(blocks.begin) * kBlockN * params.v_stride_row;

  TileLoader<KeyTile, kBlockN, kHeadDim, kThreads, kVector> key_loader(k_gmem, params.k_stride_row);
  TileLoader<ValueTile, kBlockN, kValueDim, kThreads, kVector> value_loader(v_gmem, params.v_stride_row);
  // Blocks are loaded in order. Each call closes one group of copies, also when there is nothing left to load: waits
  // count groups.
  const auto load_keys = [&](int block) {
    if (block < blocks.end) {
      key_loader.next(k_smem + block % kNumStages * KeyTile::kBytes, params.seqlen_k - block * kBlockN);
    }
    cp_async_commit();
  };
  const auto load_values = [&](int block) {
    if (block < blocks.end) {
      value_loader.next(v_smem + block % kNumStages * ValueTile::kBytes, params.seqlen_k - block * kBlockN);
    }
    cp_async_commit();
  };

  load_queries(q_smem, q_gmem, rows, tile.row_begin, rows_valid, params);
  Queries queries(q_smem);
  if constexpr (kQInRegisters) {
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    queries.load();
    __syncthreads();  // K and V take Q's place.
  }

  // Groups in order: K0 V0 K1 V1 ... Waiting for all but the last kInFlight completes the one that is needed next.
  constexpr int kInFlight = 2 * kNumStages - 2;
#pragma unroll
  for (int stage = 0; stage < kNumStages - 1; ++stage) {
    load_keys(blocks.begin + stage);
    load_values(blocks.begin + stage);
  }
  load_keys(blocks.begin + kNumStages - 1);

  const ScoreScale scale(params.scale);
  OnlineSoftmax<kRowTiles> softmax;
  float out[kRowTiles][kOutTiles][4] = {};  // O, [kRowsPerWarp, kValueDim]

  const auto step = [&](int block, auto masked) {
    const int key_begin = block * kBlockN;
    const int stage = block % kNumStages;

    // K of this block has landed, and no warp reads V of the previous block any more: its place is refilled.
    cp_async_wait<kInFlight>();
    __syncthreads();
    load_values(block + kNumStages - 1);

    float scores[kRowTiles][kScoreTiles][4] = {};  // S, then P, [kRowsPerWarp, kBlockN]
    multiply_keys(scores, queries, k_smem, stage * KeyTile::kBytes);

    // V of this block has landed, and no warp reads K of this block any more.
    cp_async_wait<kInFlight>();
    __syncthreads();
    load_keys(block + kNumStages);

    if (scale.prescale) {
      scale_scores(scores, params.scale);
    }
    if constexpr (masked.value) {
      apply_mask(scores, mask, rows, tile.row_begin, key_begin);
    }
    softmax.observe<kRescaleThreshold>(scores, out, scale.log2);
    softmax.weigh(scores, scale.log2);
    if constexpr (masked.value) {
      isolate_nonfinite(out, v_smem + stage * ValueTile::kBytes, mask, rows, tile.row_begin, key_begin);
    }
    multiply_values(out, scores, v_smem, stage * ValueTile::kBytes);
  };

  // The blocks that need a mask are the last: the end of the sequence, the diagonal.
  int block = blocks.begin;
  for (; block < blocks.full_end; ++block) {
    step(block, Flag<false>{});
  }
  for (; block < blocks.end; ++block) {
    step(block, Flag<true>{});
  }

  softmax.reduce();
  cp_async_wait<0>();
  if (params.lse != nullptr) {
    float* lse_gmem =
        static_cast<float*>(params.lse) + (i64(tile.batch) * params.num_heads + tile.head) * params.seqlen_q;
    store_log_sum_exp(lse_gmem, softmax, scale, rows, tile.row_begin, rows_valid, params.seqlen_q);
  }
  __syncthreads();  // O leaves through the memory of Q, and where it is wider, of what is behind.
  u16* out_gmem =
      static_cast<u16*>(params.out) + tile.batch * params.out_stride_batch + tile.head * params.out_stride_head;
  store_output(out_gmem, out, softmax, q_smem, rows, tile.row_begin, rows_valid, params);
}
