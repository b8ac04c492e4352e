// dtype=float16,head_dim=64,causal=true,head_dim_v=40
// sm80_fwd(block_m=128,block_n=64,num_warps=4,num_stages=2,q_in_registers=false,blocks_per_sm=1)
// digest e534ef0a696f7128461c0cb844187334e81e058f7ed6dc018b0ee58b9a108e24


// One thread block owns kBlockM query rows of one head and walks the keys in blocks of kBlockN:
//
//   S = Q K^T
//   m' = max(m, rowmax(S)),  P = exp(S - m')
//   l = l exp(m - m') + rowsum(P),  O = O exp(m - m') + P V
//
// and divides O by l once at the end. Each warp owns whole rows, so that S and P stay in its registers. K and V arrive
// by asynchronous copies, kNumStages blocks ahead. Where there are few tiles, several thread blocks share the keys of
// one; where queries are few, the heads that share keys share a tile.
#include "lib/types.cuh"
#include "lib/ptx.cuh"
#include "lib/params.cuh"
#include "lib/tile.cuh"
#include "lib/online_softmax.cuh"

using Element = Half;
constexpr bool kIsHalf = true;
constexpr int kHeadDim = 64;
constexpr int kValueDim = 40;                              // columns of V and O
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

constexpr bool kCausal = true;
#include "blocks/mask.cuh"
#include "blocks/scheduler_tile.cuh"
#include "blocks/mma_attention.cuh"

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
