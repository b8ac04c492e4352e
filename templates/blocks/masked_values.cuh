// A masked key has weight 0, and 0 times an infinity or NaN in its value is NaN. Where the mask cuts through a block, the
// product P V therefore lets such values into rows that don't see them. That is rare, and found out at the end: rows of a
// warp whose output is not finite are then computed once more, from the keys that they see. Needs: load_tiles.cuh.

#pragma once

// Element 0 of query 0 and key 0 of the tile's heads.
struct HeadPointers {
  const u16* q;
  const u16* k;
  const u16* v;

  __device__ __forceinline__ HeadPointers(const Params& params, const Tile& tile)
      : q(static_cast<const u16*>(params.q) + tile.batch * params.q_stride_batch + tile.head * params.q_stride_head),
        k(static_cast<const u16*>(params.k) + tile.batch * params.k_stride_batch + tile.head_kv * params.k_stride_head),
        v(static_cast<const u16*>(params.v) + tile.batch * params.v_stride_batch +
          tile.head_kv * params.v_stride_head) {}
};

__device__ __forceinline__ bool any_nonfinite(const Output& out) {
  float zeros[4] = {};
#pragma unroll
  for (int i = 0; i < kValueDim / 2; ++i) {
    zeros[i % 4] = fmaf(out[i], 0.0f, zeros[i % 4]);
  }
  return __any_sync(0xffffffffu, (zeros[0] + zeros[1]) + (zeros[2] + zeros[3]) != 0.0f);
}

// Whether the values of keys [key_begin, key_end) hold an infinity or NaN. By a warp.
__device__ __forceinline__ bool any_nonfinite(const u16* v_gmem, i64 row_stride, int key_begin, int key_end) {
  float zeros = 0.0f;
#pragma unroll 1
  for (int key = key_begin; key < key_end; ++key) {
#pragma unroll 1
    for (int column = lane(); column < kValueDim; column += 32) {
      zeros = fmaf(to_float(Element{v_gmem[key * row_stride + column]}), 0.0f, zeros);
    }
  }
  return __any_sync(0xffffffffu, zeros != 0.0f);
}

// Whether there is an infinity or NaN in the output of a warp, and one in values that not all its rows see.
__device__ __forceinline__ bool hidden_values_leaked(const Output& out, const Params& params, const Mask& mask,
                                                     const Work& work) {
  return any_nonfinite(out) &&
         any_nonfinite(HeadPointers(params, work.tile).v, params.v_stride_row, mask.full_end(work.query_begin),
                       min(params.seqlen_k, work.blocks.end * kBlockN));
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// Rows of a warp, one after the other, into the staged output: once over their keys for the maximum, once for the sums.
// These scores differ from wgmma's in the last places, and large ones by more than a weight can bear, so that nothing of
// the row's softmax is taken over.
__device__ __forceinline__ void compute_rows_again(char* out_tile, const Params& params, const Mask& mask,
                                                   const Work& work, float sign, float scale_log2) {
  const HeadPointers head(params, work.tile);
  __syncwarp();                                    // the warp has staged its rows
  constexpr int kColumns = (kValueDim + 31) / 32;  // of a lane
#pragma unroll 1
  for (int index = 0; index < 16; ++index) {
    const int row = threadIdx.x % 128 / 32 * 16 + index;
    const int query = min(work.query_begin + row, params.seqlen_q - 1);
    const int keys = mask.key_end(query + 1);
    const auto score_of = [&](int key) {
      float score = 0.0f;
#pragma unroll 1
      for (int column = lane(); column < kHeadDim; column += 32) {
        score = fmaf(to_float(Element{head.q[query * params.q_stride_row + column]}),
                     to_float(Element{head.k[key * params.k_stride_row + column]}), score);
      }
      return sign * warp_sum(score);
    };
    float most = negative_infinity();
#pragma unroll 1
    for (int key = 0; key < keys; ++key) {
      most = fmaxf(most, score_of(key));
    }
    const float reference = finite_reference(most);
    float sums[kColumns] = {};
    float total = 0.0f;
    bool decided = false;
#pragma unroll 1
    for (int key = 0; key < keys && !decided; ++key) {
      const float weight = exp2_approx((score_of(key) - reference) * scale_log2);
      total += weight;
      bool open = false;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int column = min(lane() + 32 * i, kValueDim - 1);
        sums[i] = fmaf(weight, to_float(Element{head.v[key * params.v_stride_row + column]}), sums[i]);
        open = open || sums[i] == sums[i];
      }
      decided = !__any_sync(0xffffffffu, open);  // NaN in all columns, whatever comes
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = lane() + 32 * i;
      if (column < kValueDim) {
        *reinterpret_cast<Element*>(out_tile + element_offset(row, column)) =
            from_float<Element>(total == 0.0f ? 0.0f : sums[i] / total);
      }
    }
  }
}
