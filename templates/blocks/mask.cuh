// Where masks and scores compose: which keys a tile sees (classifier) and which pairs count (score program).
// Every family calls these and nothing else. Needs: kCausal.

#pragma once

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
