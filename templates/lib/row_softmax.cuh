// Online softmax of the two rows that a thread has part of in an accumulator of wgmma. Needs online_softmax.cuh,
// ptx_sm90.cuh.
//
// scores[4 i + 2 half + e] is row `half`. As in online_softmax.cuh, the weight of a score s against its row's reference
// m is 2^((s - m) c), and any m gives the same result. Here a reference moves only when a score outgrows it by a factor
// that float32 and 16-bit weights bear, so that most blocks need no exchange between threads and no rescaling.
//
// A block of scores goes: outgrown(), and move() if so; subtract(); weigh() for all of them in parts; accept(). Where some
// scores are weighed unseen, surpassed() tells behind them whether they were too large; they must then be there to be
// weighed again.

#pragma once

struct RowSoftmax {
  static constexpr float kLargestGrowth = 8.0f;  // powers of 2
  static constexpr float kLargestWeight = 256.0f;
  // As in OnlineSoftmax: from here on m is subtracted from the scores before they are scaled. Those are always looked at
  // before, as the difference takes their place.
  static constexpr float kCarefulFrom = 1024.0f;

  float reference[2] = {negative_infinity(), negative_infinity()};  // m
  float shift[2] = {0.0f, 0.0f};                                    // m c; 0 where m is subtracted before
  float sum[2] = {0.0f, 0.0f};    // of this thread's own columns; reduced over the quad at the end
  float block[2] = {0.0f, 0.0f};  // as sum, of the block at hand
  float rescale[2];               // what came before is to be multiplied with, after move()
  bool careful = false;
  bool unset = true;  // a row of the warp has no reference

  // Whether one of the first kCount scores outgrows its row's reference, in any row of the warp. Threads look at their
  // own columns. Compares floats as integers, three at a time: among negative ones the order is reversed, so where all
  // are negative the answer may be a needless yes.
  template <int kCount, int kScores>
  __device__ __forceinline__ bool outgrown(const float (&scores)[kScores], float scale_log2) const {
    bool found = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int most = __float_as_int(negative_infinity());
#pragma unroll
      for (int i = half; i < kCount / 2; i += 2) {
        most = max_signed(most, __float_as_int(scores[2 * i]), __float_as_int(scores[2 * i + 1]));
      }
      const float largest = most >= 0 ? __int_as_float(most) : 0.0f;
      found = found || (largest - reference[half]) * scale_log2 > kLargestGrowth;
    }
    return __any_sync(0xffffffffu, found);
  }

  // Whether the weights of the block are too large, or the row has no reference that they could be measured by.
  __device__ __forceinline__ bool surpassed() const {
    return __any_sync(0xffffffffu, unset || !(block[0] <= kLargestWeight && block[1] <= kLargestWeight));
  }

  // Moves the references up to the maxima of scores [kFirst, kLast), and scales the sums.
  template <int kFirst, int kLast, int kScores>
  __device__ __forceinline__ void move(const float (&scores)[kScores], float scale_log2) {
    bool large = false, none = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = negative_infinity();
#pragma unroll
      for (int i = kFirst / 2 + half; i < kLast / 2; i += 2) {
        most = fmaxf(most, fmaxf(scores[2 * i], scores[2 * i + 1]));
      }
      const float moved = fmaxf(reference[half], quad_max(most));
      const float finite = finite_reference(moved);
      rescale[half] = exp2_approx((reference[half] - finite) * scale_log2);
      reference[half] = moved;
      sum[half] *= rescale[half];
      shift[half] = finite * scale_log2;
      large = large || fabsf(shift[half]) > kCarefulFrom;
      none = none || moved == negative_infinity();
    }
    careful = __any_sync(0xffffffffu, large);
    unset = __any_sync(0xffffffffu, none);
    if (careful) {
      shift[0] = 0.0f;
      shift[1] = 0.0f;
    }
  }

  // Scores [kFirst, kLast) become differences from their references where that is needed.
  template <int kFirst, int kLast, int kScores>
  __device__ __forceinline__ void subtract(float (&scores)[kScores]) const {
    if (careful) {
      const float from[2] = {finite_reference(reference[0]), finite_reference(reference[1])};
#pragma unroll
      for (int i = kFirst / 2; i < kLast / 2; ++i) {
        scores[2 * i] -= from[i % 2];
        scores[2 * i + 1] -= from[i % 2];
      }
    }
  }

  // The weights of scores [kFirst, kLast), given to take(i, weight of scores[2 i], weight of scores[2 i + 1]).
  template <int kFirst, int kLast, int kScores, typename Take>
  __device__ __forceinline__ void weigh(const float (&scores)[kScores], float scale_log2, Take take) {
#pragma unroll
    for (int i = kFirst / 2; i < kLast / 2; ++i) {
      const float first = exp2_approx(fmaf(scores[2 * i], scale_log2, -shift[i % 2]));
      const float second = exp2_approx(fmaf(scores[2 * i + 1], scale_log2, -shift[i % 2]));
      block[i % 2] += first;
      block[i % 2] += second;
      take(i, first, second);
    }
  }

  // The block's weights count.
  __device__ __forceinline__ void accept() {
    sum[0] += block[0];
    sum[1] += block[1];
    block[0] = 0.0f;
    block[1] = 0.0f;
  }

  __device__ __forceinline__ void reduce() {
    sum[0] = quad_sum(sum[0]);
    sum[1] = quad_sum(sum[1]);
  }

  // After reduce(): natural logarithm of the row's sum of exp; -inf for a row without weight.
  __device__ __forceinline__ float log_sum_exp(int half, float scale) const {
    return sum[half] == 0.0f ? negative_infinity() : finite_reference(reference[half]) * scale + logf(sum[half]);
  }

  // After reduce(): what the output is multiplied with; 0 for a row without weight.
  __device__ __forceinline__ float normaliser(int half) const {
    return sum[half] == 0.0f ? 0.0f : 1.0f / sum[half];
  }
};
