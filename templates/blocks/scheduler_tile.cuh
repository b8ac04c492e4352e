// Scheduler: one thread block computes one tile of query rows. Needs: kBlockM, kCausal, kPackHeads, kSplitKeys, Params.

#pragma once

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
