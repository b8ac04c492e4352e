// dtype=float16,head_dim=64,out_dtype=float64
// fma_fwd(block_m=16,block_n=16,num_threads=64,threads_n=8,share_kv=false,blocks_per_sm=1,accumulate=float64)
// digest 556660cd54971c76aabf6e0318c2e53b0e3eefbdeca85c26083fc25781698653



#include "lib/types.cuh"
#include "lib/params.cuh"
#include "lib/ptx.cuh"
constexpr bool kCausal = false;
#include "blocks/mask.cuh"

// ---- Parameters ----
using Input = Half;
using Output = double;
using Lse = double;
using Accum = double;  // of scores, weights, sums and the output before it is rounded
constexpr int kHeadDim = 64;
constexpr int kValueDim = 64;           // columns of V and O; those of Q and K are kHeadDim
constexpr int kBlockM = 16;             // query rows of a thread block
constexpr int kBlockN = 16;             // keys of one step
constexpr int kNumThreads = 64;     // of a thread block
constexpr int kThreadsN = 8;         // threads that share a query row: neighbours in one warp
constexpr int kBlocksPerSm = 1;  // of an SM, which must find enough registers
constexpr bool kShareKv = false;                 // V takes the place of K in shared memory
constexpr bool kAligned = true;                  // rows start on 16 bytes
constexpr int kSharedBytes = 9088;
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
#include "blocks/scheduler_tile.cuh"
#include "blocks/fma_attention.cuh"

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
