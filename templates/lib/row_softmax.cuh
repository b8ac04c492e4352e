// Online softmax of the two rows that a thread has part of in an accumulator of wgmma. Needs online_softmax.cuh,
// ptx_sm90.cuh.
//
// scores[4 i + 2 half + e] is row `half`. As in online_softmax.cuh, the weight of a score s against its row's reference
// m is 2^((s - m) c), and any m gives the same result. Here a reference moves only when a score outgrows it by a factor
// that float32 and 16-bit weights bear, so that most blocks need no exchange between threads and no rescaling.

struct RowSoftmax {
  // As in OnlineSoftmax: from here on m is subtracted from the scores before they are scaled.
  static constexpr float kCarefulFrom = 1024.0f;

  float reference[2] = {negative_infinity(), negative_infinity()};  // m
  float shift[2] = {0.0f, 0.0f};                                    // m c; 0 where m was subtracted before
  float sum[2] = {0.0f, 0.0f};  // of this thread's own columns; reduced over the quad at the end
  float rescale[2];             // what the output so far is to be multiplied with, after move()
  bool careful = false;

  // Whether a score of the warp outgrows its row's reference by more than kThreshold powers of 2. Threads look at their
  // own columns. Compares floats as integers, three at a time: among negative ones the order is reversed, so where all
  // are negative the answer may be a needless yes.
  template <int kThreshold, int kScores>
  __device__ __forceinline__ bool outgrown(const float (&scores)[kScores], float scale_log2) const {
    bool found = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int most = __float_as_int(negative_infinity());
#pragma unroll
      for (int i = half; i < kScores / 2; i += 2) {
        most = max_signed(most, __float_as_int(scores[2 * i]), __float_as_int(scores[2 * i + 1]));
      }
      const float largest = most >= 0 ? __int_as_float(most) : 0.0f;
      found = found || (largest - reference[half]) * scale_log2 > kThreshold;
    }
    return __any_sync(0xffffffffu, found);
  }

  // Moves the references up to the maxima of these scores, and scales the sums.
  template <int kScores>
  __device__ __forceinline__ void move(const float (&scores)[kScores], float scale_log2) {
    bool large = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = negative_infinity();
#pragma unroll
      for (int i = half; i < kScores / 2; i += 2) {
        most = fmaxf(most, fmaxf(scores[2 * i], scores[2 * i + 1]));
      }
      const float moved = finite_reference(fmaxf(reference[half], quad_max(most)));
      rescale[half] = exp2_approx((reference[half] - moved) * scale_log2);
      reference[half] = fmaxf(reference[half], quad_max(most));
      sum[half] *= rescale[half];
      shift[half] = moved * scale_log2;
      large = large || fabsf(shift[half]) > kCarefulFrom;
    }
    careful = __any_sync(0xffffffffu, large);
    if (careful) {
      shift[0] = 0.0f;
      shift[1] = 0.0f;
    }
  }

  // Turns scores into weights.
  template <int kScores>
  __device__ __forceinline__ void weigh(float (&scores)[kScores], float scale_log2) {
    if (careful) {
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        const float from = finite_reference(reference[i % 2]);
        scores[2 * i] -= from;
        scores[2 * i + 1] -= from;
      }
    }
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float& score = scores[2 * i + column];
        score = exp2_approx(fmaf(score, scale_log2, -shift[i % 2]));
        sum[i % 2] += score;
      }
    }
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
