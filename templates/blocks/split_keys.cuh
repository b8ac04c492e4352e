// Several thread blocks share the keys of one tile of queries, each taking a part of them. Every block leaves its O,
// references and sums in the workspace; the last to come adds them up, in the order of the parts: the result has the same
// bits whoever is last. Needs: mma_attention.cuh.
//
// The workspace: one counter per tile, 0 at the launch; then, for each tile and part, what each thread holds, as float4:
// O by fragment, then (m, m, l, l) of its two rows, by row tile.

#pragma once

constexpr int kPartFragments = kRowTiles * (kOutTiles + 1);

// Of the counters, rounded up, so that the parts start on 256 bytes. As in codegen/families/sm80_fwd.py.
__device__ __forceinline__ i64 counter_bytes(int tiles) {
  return (i64(tiles) * 4 + 255) / 256 * 256;
}

// Adds the parts of this tile's other blocks to `out` and `softmax`, whose sums are reduced. False for a block that is
// not the last: it has nothing left to do.
__device__ __forceinline__ bool combine_parts(float (&out)[kRowTiles][kOutTiles][4], OnlineSoftmax<kRowTiles>& softmax,
                                              const Params& params, float scale_log2) {
  const int num_splits = params.num_splits;
  const int tile = blockIdx.x / num_splits;
  u32* counter = static_cast<u32*>(params.workspace) + tile;
  float4* parts =
      reinterpret_cast<float4*>(static_cast<char*>(params.workspace) + counter_bytes(gridDim.x / num_splits)) +
      i64(tile) * num_splits * kPartFragments * kThreads + threadIdx.x;

  float4* own = parts + i64(blockIdx.x % num_splits) * kPartFragments * kThreads;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int column = 0; column < kOutTiles; ++column) {
      const float (&from)[4] = out[m][column];
      own[(m * kOutTiles + column) * kThreads] = {from[0], from[1], from[2], from[3]};
    }
    own[(kRowTiles * kOutTiles + m) * kThreads] = {softmax.reference[m][0], softmax.reference[m][1], softmax.sum[m][0],
                                                   softmax.sum[m][1]};
  }
  __threadfence();
  __syncthreads();
  const bool last = threadIdx.x == 0 && atomicAdd(counter, 1u) == static_cast<u32>(num_splits) - 1;
  if (!__syncthreads_or(last)) {
    return false;
  }
  __threadfence();

#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const float4* rows = parts + (kRowTiles * kOutTiles + m) * kThreads;
    float reference[2] = {negative_infinity(), negative_infinity()};
    for (int part = 0; part < num_splits; ++part) {
      const float4 found = rows[i64(part) * kPartFragments * kThreads];
      reference[0] = fmaxf(reference[0], found.x);
      reference[1] = fmaxf(reference[1], found.y);
    }
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int column = 0; column < kOutTiles; ++column) {
#pragma unroll
      for (int entry = 0; entry < 4; ++entry) {
        out[m][column][entry] = 0.0f;
      }
    }
#pragma unroll 1
    for (int part = 0; part < num_splits; ++part) {
      const i64 place = i64(part) * kPartFragments * kThreads;
      const float4 found = rows[place];
      const float rescale[2] = {exp2_approx((found.x - finite_reference(reference[0])) * scale_log2),
                                exp2_approx((found.y - finite_reference(reference[1])) * scale_log2)};
      sum[0] += rescale[0] * found.z;
      sum[1] += rescale[1] * found.w;
#pragma unroll
      for (int column = 0; column < kOutTiles; ++column) {
        const float4 share = parts[place + (m * kOutTiles + column) * kThreads];
        out[m][column][0] += rescale[0] * share.x;
        out[m][column][1] += rescale[0] * share.y;
        out[m][column][2] += rescale[1] * share.z;
        out[m][column][3] += rescale[1] * share.w;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.reference[m][half] = reference[half];
      softmax.sum[m][half] = sum[half];
    }
  }
  return true;
}
