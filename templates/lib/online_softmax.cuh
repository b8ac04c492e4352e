// Online softmax over rows that are spread over the 4 lanes of a quad, as mma.sync and wgmma lay them out. Needs
// types.cuh, ptx.cuh.
//
// Scores are used as they come from Q K^T. With c = scale * log2(e), the weight of a score s against the row's
// reference m is 2^((s - m) c). Any m gives the same result; the running maximum keeps weights at or below 1.

#pragma once

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// A reference that can be subtracted: a row that has seen nothing but -inf keeps weights of exactly 0.
__device__ __forceinline__ float finite_reference(float reference) {
  return reference == negative_infinity() ? 0.0f : reference;
}

// The scale of a problem in the two forms that the loop needs. `prescale` is set where scores must be scaled before the
// maximum is taken: a scale of 0 or below, or one so small that c would be flushed to 0.
struct ScoreScale {
  bool prescale;
  float natural;  // multiplies scores in the LSE
  float log2;     // c

  __device__ __forceinline__ explicit ScoreScale(float scale)
      : prescale(!(scale > 1e-30f)), natural(prescale ? 1.0f : scale), log2(natural * kLog2E) {}
};

// kRowTiles tiles of 16 rows; a thread holds 2 rows of each. For each block of scores: observe(), then weigh().
template <int kRowTiles>
struct OnlineSoftmax {
  // From here on, (s c - m c) with a rounded m c would move all weights of a row by more than 2^-14, and overflow at
  // 2^31. The slower (s - m) c is exact for the largest score, whatever its size.
  static constexpr float kCarefulFrom = 1024.0f;

  float reference[kRowTiles][2];  // m
  float shift[kRowTiles][2];      // m c; 0 where m was subtracted from the scores before
  float sum[kRowTiles][2];        // of this thread's own columns; reduced over the quad at the end
  bool careful = false;

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[tile][half] = negative_infinity();
        shift[tile][half] = 0.0f;
        sum[tile][half] = 0.0f;
      }
    }
  }

  // Looks at a block of scores. Where one outgrows its row's reference by more than kThreshold (in powers of 2), the
  // references of the warp move up to the maxima and what was accumulated is scaled down. Each thread looks at its own
  // columns, so that blocks which move nothing need no exchange but a vote.
  template <int kThreshold, int kScoreTiles, int kOutTiles>
  __device__ __forceinline__ void observe(float (&scores)[kRowTiles][kScoreTiles][4],
                                          float (&out)[kRowTiles][kOutTiles][4], float scale_log2) {
    float maximum[kRowTiles][2];
    bool moves = false;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float found = negative_infinity();
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
          found = fmaxf(found, fmaxf(scores[tile][n][2 * half], scores[tile][n][2 * half + 1]));
        }
        maximum[tile][half] = found;
        moves = moves || (found - reference[tile][half]) * scale_log2 > kThreshold;
      }
    }
    if (__any_sync(0xffffffffu, moves)) {
      move_references(maximum, out, scale_log2);
    }
    if (careful) {
      subtract_references(scores);
    }
  }

  // Turns the scores that were observed last into weights.
  template <int kScoreTiles>
  __device__ __forceinline__ void weigh(float (&scores)[kRowTiles][kScoreTiles][4], float scale_log2) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
          for (int column = 0; column < 2; ++column) {
            float& score = scores[tile][n][2 * half + column];
            score = exp2_approx(fmaf(score, scale_log2, -shift[tile][half]));
            sum[tile][half] += score;
          }
        }
      }
    }
  }

  // Natural logarithm of the row's sum of exp; -inf for a row without weight. Call after reduce().
  __device__ __forceinline__ float log_sum_exp(int tile, int half, const ScoreScale& scale) const {
    const float total = sum[tile][half];
    return total == 0.0f ? negative_infinity() : finite_reference(reference[tile][half]) * scale.natural + logf(total);
  }

  // What the accumulated output is multiplied with; 0 for a row without weight. Call after reduce().
  __device__ __forceinline__ float normaliser(int tile, int half) const {
    const float total = sum[tile][half];
    return total == 0.0f ? 0.0f : 1.0f / total;
  }

  __device__ __forceinline__ void reduce() {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      sum[tile][0] = quad_sum(sum[tile][0]);
      sum[tile][1] = quad_sum(sum[tile][1]);
    }
  }

 private:
  template <int kOutTiles>
  __device__ __forceinline__ void move_references(const float (&maximum)[kRowTiles][2],
                                                  float (&out)[kRowTiles][kOutTiles][4], float scale_log2) {
    bool large = false;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old = reference[tile][half];
        const float moved = fmaxf(old, quad_max(maximum[tile][half]));
        const float rescale = exp2_approx((old - finite_reference(moved)) * scale_log2);
        reference[tile][half] = moved;
        large = large || fabsf(finite_reference(moved) * scale_log2) > kCarefulFrom;
        sum[tile][half] *= rescale;
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
          out[tile][n][2 * half] *= rescale;
          out[tile][n][2 * half + 1] *= rescale;
        }
      }
    }
    careful = __any_sync(0xffffffffu, large);
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shift[tile][half] = careful ? 0.0f : finite_reference(reference[tile][half]) * scale_log2;
      }
    }
  }

  template <int kScoreTiles>
  __device__ __forceinline__ void subtract_references(float (&scores)[kRowTiles][kScoreTiles][4]) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float from = finite_reference(reference[tile][half]);
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
          scores[tile][n][2 * half] -= from;
          scores[tile][n][2 * half + 1] -= from;
        }
      }
    }
  }
};
