// Scheduler: thread blocks that each take several tiles, or one where the grid has as many blocks as there are tiles.
// Needs: kBlockM, kCausal, Params.
//
// Tiles are listed by sections of heads, whose keys and values then stay in the L2 cache; in a section, the longest come
// first. Blocks take them from the list to and fro (0 1 2, 2 1 0, 0 1 2, ...): each gets about as much to do, and all
// threads of a block know what comes next without asking.
struct Tile {
  int row_begin;
  int head;
  int head_kv;
  int batch;
};

class TileList {
  int row_tiles;
  int heads;  // of all batch entries
  int count;
  int group;  // query heads per key head
  int num_heads;
  int section;  // heads
  int round = 0;

 public:
  __device__ __forceinline__ explicit TileList(const Params& params)
      : row_tiles((params.seqlen_q + kBlockM - 1) / kBlockM),
        heads(params.batch * params.num_heads),
        count(row_tiles * heads),
        group(params.num_heads / params.num_heads_kv),
        num_heads(params.num_heads),
        section(min(params.heads_per_section, heads)) {}

  // False where nothing is left.
  __device__ __forceinline__ bool next(Tile& tile) {
    const u32 place = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    const i64 index = i64(round) * gridDim.x + place;
    ++round;
    if (index >= count) {
      return false;
    }
    const int section_tiles = section * row_tiles;
    const int first_head = static_cast<int>(index) / section_tiles * section;
    const int rest = static_cast<int>(index) % section_tiles;
    const int section_heads = min(section, heads - first_head);
    const int row_tile = rest / section_heads;
    const int head_of_all = first_head + rest % section_heads;
    tile.row_begin = (kCausal ? row_tiles - 1 - row_tile : row_tile) * kBlockM;
    tile.head = head_of_all % num_heads;
    tile.head_kv = tile.head / group;
    tile.batch = head_of_all / num_heads;
    return true;
  }
};
