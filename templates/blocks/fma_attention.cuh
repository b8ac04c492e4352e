// The two matrix products of attention on CUDA cores, with the loads and the row reductions around them. Needs: the
// parameters and mask of the family, types.cuh.

#pragma once

template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Pack {
  T at[kCount];
};

__device__ __forceinline__ Accum to_accum(Input value) {
  return to_float(value);
}

template <class T>
__device__ __forceinline__ T to_output(Accum value) {
  if constexpr (sizeof(T) == sizeof(double)) {
    return value;
  } else {
    return from_float<T>(static_cast<float>(value));
  }
}

// Products that must not fuse with the subtraction behind them: the largest score has to give exactly exp(0).
__device__ __forceinline__ float rounded_product(float left, float right) {
  return __fmul_rn(left, right);
}
__device__ __forceinline__ double rounded_product(double left, double right) {
  return __dmul_rn(left, right);
}

// Over the kThreadsN threads that share a row.
__device__ __forceinline__ Accum row_max_of(Accum value) {
#pragma unroll
  for (int lanes = kThreadsN / 2; lanes > 0; lanes /= 2) {
    value = max(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  }
  return value;
}
__device__ __forceinline__ Accum row_sum_of(Accum value) {
#pragma unroll
  for (int lanes = kThreadsN / 2; lanes > 0; lanes /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, lanes);
  }
  return value;
}

// Copies kCount rows of kColumns elements of one head to shared memory, kPack more apart. Only the first `num_rows`
// exist: the others become zeros and are not read.
template <int kCount, int kColumns>
__device__ __forceinline__ void load_tile(Input* tile_smem, const Input* rows_gmem, i64 stride_row, int num_rows) {
  constexpr int kStride = kColumns + kPack;
  if constexpr (kAligned) {
    constexpr int kElements = 16 / int(sizeof(Input));
    constexpr int kPerRow = kColumns / kElements;
    constexpr int kWords = kPack * int(sizeof(Input)) / 4;
    using Wide = Pack<u32, 4>;
    using Stored = Pack<u32, kWords>;
#pragma unroll 4
    for (int index = threadIdx.x; index < kCount * kPerRow; index += kNumThreads) {
      const int row = index / kPerRow;
      const int col = index % kPerRow * kElements;
      Wide wide = {};
      if (row < num_rows) {
        wide = *reinterpret_cast<const Wide*>(rows_gmem + row * stride_row + col);
      }
#pragma unroll
      for (int part = 0; part < kElements / kPack; ++part) {
        Stored stored;
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          stored.at[word] = wide.at[part * kWords + word];
        }
        *reinterpret_cast<Stored*>(tile_smem + row * kStride + col + part * kPack) = stored;
      }
    }
  } else {
#pragma unroll 8
    for (int index = threadIdx.x; index < kCount * kColumns; index += kNumThreads) {
      const int row = index / kColumns;
      const int col = index % kColumns;
      Input element = {};
      if (row < num_rows) {
        element = rows_gmem[row * stride_row + col];
      }
      tile_smem[row * kStride + col] = element;
    }
  }
}

// S += Q K^T for this thread's rows and keys.                          [kRows, kKeys]
__device__ __forceinline__ void multiply_queries_keys(Accum (&scores_rmem)[kRows][kKeys], const Input* q_smem,
                                                      const Input* k_smem) {
  using Elements = Pack<Input, kPack>;
#pragma unroll 1
  for (int dim = 0; dim < kHeadDim; dim += kPack) {
    Accum k_rmem[kKeys][kPack];
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      const Elements loaded = *reinterpret_cast<const Elements*>(k_smem + key * kThreadsN * kTileStride + dim);
#pragma unroll
      for (int step = 0; step < kPack; ++step) {
        k_rmem[key][step] = to_accum(loaded.at[step]);
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const Elements loaded = *reinterpret_cast<const Elements*>(q_smem + row * kThreadsM * kTileStride + dim);
#pragma unroll
      for (int step = 0; step < kPack; ++step) {
        const Accum q_rmem = to_accum(loaded.at[step]);
#pragma unroll
        for (int key = 0; key < kKeys; ++key) {
          scores_rmem[row][key] = fma(q_rmem, k_rmem[key][step], scores_rmem[row][key]);
        }
      }
    }
  }
}

// O = O rescale + P V for this thread's rows and output columns.       [kRows, kDims]
// The terms of one step are summed on their own before they are added: with long sequences that keeps rounding errors
// as small as a blocked matrix product has them. It is done kChunk columns at a time, in the registers of the scores.
// Where kMasked, hidden keys are left out one by one: a weight of zero would still let their NaN through.
template <bool kMasked>
__device__ __forceinline__ void multiply_weights_values(Accum (&out_rmem)[kRows][kDims], const Accum (&rescale)[kRows],
                                                        const Accum* weights_smem, const Input* v_smem,
                                                        const Mask& mask, int query_begin, int key_begin) {
  using Weights = Pack<Accum, kPack>;
  using Elements = Pack<Input, kOutPack>;
#pragma unroll
  for (int begin = 0; begin < kDims; begin += kChunk) {
    const int count = min(kChunk, kDims - begin);
    Accum partial_rmem[kRows][kChunk] = {};
#pragma unroll 1
    for (int key = 0; key < kBlockN; key += kPack) {
      Weights weights_rmem[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        weights_rmem[row] = *reinterpret_cast<const Weights*>(weights_smem + row * kThreadsM * kWeightStride + key);
      }
#pragma unroll
      for (int step = 0; step < kPack; ++step) {
        Accum v_rmem[kChunk];
#pragma unroll
        for (int dim = 0; dim < count; dim += kOutPack) {
          const Elements loaded =
              *reinterpret_cast<const Elements*>(v_smem + (key + step) * kValueStride + (begin + dim) * kThreadsN);
#pragma unroll
          for (int part = 0; part < kOutPack; ++part) {
            v_rmem[dim + part] = to_accum(loaded.at[part]);
          }
        }
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          if (!kMasked || mask.visible(query_begin + row * kThreadsM, key_begin + key + step)) {
#pragma unroll
            for (int dim = 0; dim < count; ++dim) {
              partial_rmem[row][dim] = fma(weights_rmem[row].at[step], v_rmem[dim], partial_rmem[row][dim]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int dim = 0; dim < count; ++dim) {
        out_rmem[row][begin + dim] = fma(out_rmem[row][begin + dim], rescale[row], partial_rmem[row][dim]);
      }
    }
  }
}
