// The two matrix products of attention with mma.sync m16n8k16, and what happens to their registers in between. Needs:
// the parameters and mask of the family, tile.cuh, online_softmax.cuh.
//
// Fragments (g = lane / 4, t = lane % 4): scores[m][n][2 * half + e] is row 16 m + g + 8 half, column 8 n + 2 t + e of
// the warp's rows. Two neighbouring score tiles, packed to 16 bits, are the A operand of the second product.

#pragma once

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
