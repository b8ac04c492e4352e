// What a thread block has in shared memory, and the thread that fills it by TMA. Needs: the parameters of the family,
// scheduler_persistent.cuh, wgmma_attention.cuh, pipeline.cuh.

#pragma once

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
