// The two matrix products of attention with wgmma, and what happens to their registers in between. Needs: the parameters
// and mask of the family, pipeline.cuh, descriptor.cuh, wgmma.cuh.jinja, row_softmax.cuh.
//
// A warpgroup owns 64 rows of Q. Its accumulators (g = lane / 4, t = lane % 4, warp w of the four): scores[4 i + 2 half + e]
// is row 16 w + g + 8 half and column 8 i + 2 t + e. Packed to 16 bits, 16 neighbouring columns are an A operand.
//
// In shared memory a tile is a row of panels, as wide as a swizzled line is long: a row of a panel is one line.

#pragma once
template <int kColumns>
struct Panels {
  static constexpr int kPadded = (kColumns + 31) / 32 * 32;
  static constexpr int kWidth = kPadded % 64 == 0 ? 64 : 32;  // columns
  static constexpr int kCount = kPadded / kWidth;
  static constexpr int kLine = kWidth * 2;       // bytes
  static constexpr int kRowBytes = kPadded * 2;  // in all panels together
};
using KeyPanels = Panels<kHeadDim>;     // of Q and K
using ValuePanels = Panels<kValueDim>;  // of V and O

constexpr int kWarpgroupRows = 64;
constexpr int kHeadSteps = (kHeadDim + 15) / 16;  // of the first product, which sums over columns
constexpr int kKeySteps = kBlockN / 16;           // of the second, which sums over keys
constexpr bool kHalves = kBlockN % 32 == 0;       // half a block can be a block of its own
constexpr int kHalfBlock = kHalves ? kBlockN / 2 : kBlockN;
constexpr int kQueriesBytes = kWarpgroupRows * KeyPanels::kRowBytes;  // of a warpgroup
constexpr int kOutBytes = kWarpgroupRows * ValuePanels::kRowBytes;
constexpr int kKeysBytes = kBlockN * KeyPanels::kRowBytes;
constexpr int kValuesBytes = kBlockN * ValuePanels::kRowBytes;
static_assert(kHeadDim % 8 == 0 && kValueDim % 8 == 0 && kBlockN % 16 == 0, "what one wgmma takes");

constexpr int kScores = kBlockN / 2;  // of a thread
using Scores = float[kScores];
using Weights = u32[kKeySteps][4];
using Output = float[kValueDim / 2];

__device__ __forceinline__ int lane() {
  return threadIdx.x % 32;
}

// Row of the warpgroup's 64 that `half` of this thread's entries belong to.
__device__ __forceinline__ int fragment_row(int half) {
  return threadIdx.x % 128 / 32 * 16 + 8 * half + lane() / 4;
}

// Blocks of kBlockN keys that rows of a tile see. One at least: without keys, all of it is masked.
__device__ __forceinline__ int tile_key_blocks(const Mask& mask, int row_begin) {
  return max(1, (mask.key_end(row_begin + kBlockM) + kBlockN - 1) / kBlockN);
}

// Those that a warpgroup works on: from full_end on with a mask. Where the tiles of a thread block overlap, all its
// warpgroups work on the same blocks.
struct KeyBlocks {
  int full_end;
  int end;
  int tile_end;
  bool half;  // no row sees more than half of the last one

  __device__ __forceinline__ KeyBlocks() {}

  __device__ __forceinline__ KeyBlocks(const Mask& mask, int row_begin, int query_begin)
      : tile_end(tile_key_blocks(mask, row_begin)) {
    const bool empty = query_begin >= mask.seqlen_q;
    const int keys = empty ? 0 : mask.key_end(query_begin + kWarpgroupRows);
    end = kOverlapTiles ? tile_end : max(1, (keys + kBlockN - 1) / kBlockN);
    full_end = empty ? 0 : mask.full_end(query_begin) / kBlockN;
    half = kHalves && end > 1 && keys <= (end - 1) * kBlockN + kBlockN / 2;
  }
};

// Steps of the first product: a swizzled line holds a few, then comes the next panel.
struct HeadSteps {
  static constexpr int kCount = kHeadSteps;

  static constexpr int offset(int step, int rows) {
    constexpr int kPanelSteps = KeyPanels::kWidth / 16;
    return step / kPanelSteps * rows * KeyPanels::kLine + step % kPanelSteps * 32;
  }
  static constexpr int a(int step) {
    return offset(step, kWarpgroupRows);
  }
  static constexpr int b(int step) {
    return offset(step, kBlockN);
  }
};

// S = Q K^T for the first kKeys keys of a block, started.
template <int kKeys>
__device__ __forceinline__ void multiply_keys(Scores& scores, u32 q_smem, u32 k_smem) {
  float (&part)[kKeys / 2] = reinterpret_cast<float (&)[kKeys / 2]>(scores);
  constexpr int kLine = KeyPanels::kLine;
  const u64 q = matrix_descriptor(q_smem, 16, 8 * kLine, kSwizzleOfRow<kLine>);
  const u64 k = matrix_descriptor(k_smem, 16, 8 * kLine, kSwizzleOfRow<kLine>);
  wgmma_shared<Element, false, false, HeadSteps>(part, q, k, false);
  wgmma_commit();
}

// Steps of the second product: 16 keys each, which are lines of a panel.
template <int kKeys>
struct KeySteps {
  static constexpr int kCount = kKeys / 16;

  static constexpr int b(int step) {
    return step * 16 * ValuePanels::kLine;
  }
};

// O += P V for the first kKeys keys of a block, started. V is MN-major: a line holds columns of one key.
template <int kKeys>
__device__ __forceinline__ void multiply_values(Output& out, const Weights& weights, u32 v_smem) {
  constexpr int kLine = ValuePanels::kLine;
  const u64 v = matrix_descriptor(v_smem, kBlockN * kLine, 8 * kLine, kSwizzleOfRow<kLine>);
  wgmma_registers<Element, true, KeySteps<kKeys>>(out, weights, v, true);
  wgmma_commit();
}

// Scores that the mask hides become -inf. query_begin: of the warpgroup. A thread's columns of a row are numbered from 0 to
// kKeys / 4; which of them count is a bit each, because one instruction makes 7 predicates from bits.
template <int kKeys>
__device__ __forceinline__ void apply_mask(Scores& scores, const Mask& mask, int query_begin, int key_begin) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int end = mask.key_end(query_begin + fragment_row(half) + 1);
    const int keys = max(0, end - key_begin - lane() % 4 * 2);
    const int columns = keys / 8 * 2 + min(keys % 8, 2);
#pragma unroll
    for (int first = 0; first < kKeys / 4; first += 32) {
      const int seen = max(0, columns - first);
      const u32 bits = seen < 32 ? (1u << seen) - 1 : 0xffffffffu;
#pragma unroll
      for (int column = first; column < min(first + 32, kKeys / 4); ++column) {
        float& score = scores[column / 2 * 4 + 2 * half + column % 2];
        score = bits >> (column - first) & 1 ? score : negative_infinity();
      }
    }
  }
}

// The first kEarly scores become weights where they are.
template <int kEarly>
__device__ __forceinline__ void weigh_in_place(Scores& scores, RowSoftmax& softmax, float scale_log2) {
  softmax.weigh<0, kEarly>(scores, scale_log2, [&](int pair, float first, float second) {
    scores[2 * pair] = first;
    scores[2 * pair + 1] = second;
  });
}

// References have moved since: the weights follow.
template <int kEarly>
__device__ __forceinline__ void rescale_in_place(Scores& scores, RowSoftmax& softmax) {
  softmax.block[0] = 0.0f;
  softmax.block[1] = 0.0f;
#pragma unroll
  for (int pair = 0; pair < kEarly / 2; ++pair) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      float& weight = scores[2 * pair + column];
      weight *= softmax.rescale[pair % 2];
      softmax.block[pair % 2] += weight;
    }
  }
}

// P: the other scores weighed, and all rounded to 16 bits. The scores stay as they are.
template <int kEarly, int kKeys>
__device__ __forceinline__ void weigh_rest(Weights& weights, const Scores& scores, RowSoftmax& softmax,
                                           float scale_log2) {
#pragma unroll
  for (int pair = 0; pair < kEarly / 2; ++pair) {
    weights[pair / 4][pair % 4] = pack<Element>(scores[2 * pair], scores[2 * pair + 1]);
  }
  softmax.weigh<kEarly, kKeys / 2>(scores, scale_log2, [&](int pair, float first, float second) {
    weights[pair / 4][pair % 4] = pack<Element>(first, second);
  });
}

__device__ __forceinline__ void scale_rows(Output& out, const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kValueDim / 2; ++i) {
    out[i] *= factor[i / 2 % 2];
  }
}

// The tile's rows of Q times -1 or 0, in place, by the warpgroup that owns them: a scale that is not positive then leaves
// a positive one. Both are exact.
__device__ __forceinline__ void fold_scale(char* q_smem, float factor) {
#pragma unroll 1
  for (int index = threadIdx.x % 128; index < kQueriesBytes / 2; index += 128) {
    Element& entry = reinterpret_cast<Element*>(q_smem)[index];
    entry = from_float<Element>(to_float(entry) * factor);
  }
  fence_proxy_async();
}

// Where a chunk of 16 bytes of one of a warpgroup's 64 rows of O lies: chunks of a line are permuted as the swizzle of its
// width does it.
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  constexpr int kLine = ValuePanels::kLine;
  constexpr int kChunks = kLine / 16;
  const int permuted = chunk % kChunks ^ (row * kLine / 128 % kChunks);
  return (chunk / kChunks * kWarpgroupRows + row) * kLine + permuted * 16;
}

__device__ __forceinline__ int element_offset(int row, int column) {
  return chunk_offset(row, column / 8) + column % 8 * 2;
}

// Rounds the output into the tile that held the warpgroup's rows of Q. A warp writes its own rows.
__device__ __forceinline__ void stage_output(u32 out_smem, const Output& out) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
#pragma unroll
  for (int step = 0; step < (kValueDim + 15) / 16; ++step) {
    u32 fragment[4] = {0, 0, 0, 0};
#pragma unroll
    for (int word = 0; word < (16 * step + 16 <= kValueDim ? 4 : 2); ++word) {
      fragment[word] = pack<Element>(out[8 * step + 2 * word], out[8 * step + 2 * word + 1]);
    }
    stmatrix_x4(out_smem + chunk_offset(row, 2 * step + lane() / 16), fragment);
  }
}
