// A masked key has weight 0, and 0 times an infinity or NaN in its value is NaN. Where the mask cuts through a block, the
// product P V therefore lets such values into rows that don't see them. That is rare, and found out at the end: rows whose
// output is not finite are then computed once more, from the keys that they see. Needs: wgmma_attention.cuh.

// In elements, from the tile's batch entry and heads on; query 0, key 0.
struct HeadPointers {
  const u16* q;
  const u16* k;
  const u16* v;
};

__device__ __forceinline__ bool any_nonfinite(const Output& out) {
  float zeros = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) {
    zeros = fmaf(out[i], 0.0f, zeros);
  }
  return __any_sync(0xffffffffu, zeros != 0.0f);
}

// Whether the values of the keys [key_begin, key_end) hold an infinity or NaN. By a warp.
__device__ __forceinline__ bool any_nonfinite(const u16* v_gmem, i64 row_stride, int key_begin, int key_end) {
  float zeros = 0.0f;
#pragma unroll 1
  for (int key = key_begin; key < key_end; ++key) {
#pragma unroll 1
    for (int column = lane(); column < kHeadDim; column += 32) {
      zeros = fmaf(to_float(Element{v_gmem[key * row_stride + column]}), 0.0f, zeros);
    }
  }
  return __any_sync(0xffffffffu, zeros != 0.0f);
}

// One row's sum of weighted values, this thread's columns of it. The weight of a key is 2^((sign q k - reference) c).
__device__ __forceinline__ void weighted_values(float (&row)[kHeadDim / 4], const HeadPointers& head,
                                                const Params& params, int query, int key_end, float sign,
                                                float reference, float scale_log2) {
  const u16* q_gmem = head.q + query * params.q_stride_row;
#pragma unroll 1
  for (int key = 0; key < key_end; ++key) {
    const u16* k_gmem = head.k + key * params.k_stride_row;
    const u16* v_gmem = head.v + key * params.v_stride_row + lane() % 4 * 2;
    float score = 0.0f;
#pragma unroll 1
    for (int column = 0; column < kHeadDim; ++column) {
      score = fmaf(to_float(Element{q_gmem[column]}), to_float(Element{k_gmem[column]}), score);
    }
    const float weight = to_float(from_float<Element>(exp2_approx((sign * score - reference) * scale_log2)));
#pragma unroll
    for (int i = 0; i < kHeadDim / 4; ++i) {
      row[i] = fmaf(weight, to_float(Element{v_gmem[i / 2 * 8 + i % 2]}), row[i]);
    }
  }
}

// Looks at the output of a warp before it is normalised. query_begin: of the warpgroup.
__device__ __forceinline__ void repair_rows(Output& out, const RowSoftmax& softmax, const HeadPointers& head,
                                            const Params& params, const Mask& mask, int query_begin, float sign,
                                            float scale_log2) {
  if (!any_nonfinite(out)) {
    return;
  }
  const int first = query_begin + threadIdx.x % 128 / 32 * 16;
  if (!any_nonfinite(head.v, params.v_stride_row, mask.full_end(first), params.seqlen_k)) {
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = min(query_begin + fragment_row(half), params.seqlen_q - 1);
    float row[kHeadDim / 4] = {};
    weighted_values(row, head, params, query, mask.key_end(query + 1), sign, finite_reference(softmax.reference[half]),
                    scale_log2);
#pragma unroll
    for (int i = 0; i < kHeadDim / 4; ++i) {
      out[i / 2 * 4 + 2 * half + i % 2] = row[i];
    }
  }
}
