// Scheduler: thread blocks that each take several tiles. One thread asks for tiles, the others are told their numbers.
// Needs: kBlockM, kCausal, kDynamic, Params.
//
// Tiles are numbered by sections of heads, whose keys and values then stay in the L2 cache; in a section, the longest come
// first. With kDynamic a block takes the next number when it is done with one, from a counter in the workspace that is 0
// at the launch. Else blocks take them to and fro (0 1 2, 2 1 0, 0 1 2, ...), or just one each where the grid has as many
// blocks as there are tiles.

#pragma once
struct alignas(16) Tile {
  int row_begin;
  int head;
  int head_kv;
  int batch;
};

struct TileNumbers {
  int row_tiles;
  int num_heads;
  int heads;    // of all batch entries
  int group;    // query heads per key head
  int section;  // heads

  __device__ __forceinline__ explicit TileNumbers(const Params& params)
      : row_tiles((params.seqlen_q + kBlockM - 1) / kBlockM),
        num_heads(params.num_heads),
        heads(params.batch * params.num_heads),
        group(params.num_heads / params.num_heads_kv),
        section(min(params.heads_per_section, heads)) {}

  __device__ __forceinline__ int count() const {
    return row_tiles * heads;
  }

  __device__ __forceinline__ Tile tile(int number) const {
    const int section_tiles = section * row_tiles;
    const int first_head = number / section_tiles * section;
    const int rest = number % section_tiles;
    const int section_heads = min(section, heads - first_head);
    const int row_tile = rest / section_heads;
    const int head = first_head + rest % section_heads;
    return {(kCausal ? row_tiles - 1 - row_tile : row_tile) * kBlockM, head % num_heads, head % num_heads / group,
            head / num_heads};
  }
};

// By one thread of a block. A number that is not below the count means that nothing is left.
class NextTile {
  i64 number = blockIdx.x;
  int round = 0;

 public:
  __device__ __forceinline__ i64 current() const {
    return number;
  }

  __device__ __forceinline__ void advance(const Params& params) {
    if constexpr (kDynamic) {
      number = i64(gridDim.x) + atomicAdd(static_cast<u32*>(params.workspace), 1u);
    } else {
      ++round;
      number = i64(round) * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    }
  }
};
