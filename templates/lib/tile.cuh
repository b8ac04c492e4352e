// Tiles of 16-bit elements in shared memory, moved in chunks of 16 bytes (8 elements). Needs types.cuh, ptx.cuh.

// A row-major tile of kRows x kCols elements; kCols is a multiple of 16.
//
// The chunks of a row are permuted by XOR with bits of the row number, so that 8 consecutive rows of one logical chunk
// fall into 8 different groups of 4 banks, whatever the row length: ldmatrix and the copies are free of conflicts.
template <int kRows, int kCols>
struct Tile {
  static_assert(kCols % 16 == 0, "rows are read in steps of 16 elements");
  static constexpr int kChunks = kCols / 8;
  static constexpr int kRowBytes = kCols * 2;
  static constexpr int kBytes = kRows * kRowBytes;
  // A row of 2 (mod 4) chunks needs 1 bit of XOR, of 4 (mod 8) 2 bits, of 0 (mod 8) 3 bits. Period: 8 rows.
  static constexpr int kPermuted = kChunks % 8 == 0 ? 8 : (kChunks % 4 == 0 ? 4 : 2);

  __device__ __forceinline__ static int permutation(int row) {
    return row / (8 / kPermuted) % kPermuted;
  }

  __device__ __forceinline__ static int offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ permutation(row)) * 16);
  }
};

// One thread's view of a tile for ldmatrix: it points at one row and one of two neighbouring chunks.
template <typename Tile>
struct FragmentReader {
  u32 row_smem;
  int permutation;

  __device__ __forceinline__ FragmentReader(u32 tile_smem, int row, int half)
      : row_smem(tile_smem + row * Tile::kRowBytes), permutation(half ^ Tile::permutation(row)) {}

  // Address `rows` (a multiple of 8) below and `chunk` (even) to the right, `bytes` into another tile.
  __device__ __forceinline__ u32 at(int rows, int chunk, int bytes = 0) const {
    constexpr int kLow = Tile::kPermuted - 1;
    const int column = (chunk & ~kLow) * 16 + (((chunk & kLow) ^ permutation) * 16);
    return row_smem + bytes + (rows * Tile::kRowBytes + column);
  }
};

// Eight elements one by one, for rows that don't start on 16-byte boundaries.
__device__ __forceinline__ uint4 load_elements(const u16* source_gmem) {
  uint4 chunk;
  chunk.x = source_gmem[0] | static_cast<u32>(source_gmem[1]) << 16;
  chunk.y = source_gmem[2] | static_cast<u32>(source_gmem[3]) << 16;
  chunk.z = source_gmem[4] | static_cast<u32>(source_gmem[5]) << 16;
  chunk.w = source_gmem[6] | static_cast<u32>(source_gmem[7]) << 16;
  return chunk;
}

__device__ __forceinline__ void store_elements(u16* target_gmem, uint4 chunk) {
  const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    target_gmem[2 * word] = static_cast<u16>(words[word]);
    target_gmem[2 * word + 1] = static_cast<u16>(words[word] >> 16);
  }
}

template <bool kVector>
__device__ __forceinline__ void copy_chunk(char* target_smem, const u16* source_gmem, bool valid) {
  if constexpr (kVector) {
    cp_async_16(shared_address(target_smem), source_gmem, valid);
  } else {
    const uint4 zeros = {0, 0, 0, 0};
    *reinterpret_cast<uint4*>(target_smem) = valid ? load_elements(source_gmem) : zeros;
  }
}

// Starts the copy of a (kRows, kCols) slice of global memory into a tile by all threads of the block. Rows from
// `rows_valid` on and columns from kCols on become zeros and are not read. Complete after cp.async wait + barrier.
template <typename Tile, int kRows, int kCols, int kThreads, bool kVector>
__device__ __forceinline__ void load_tile(char* tile, const u16* source_gmem, i64 row_stride, int rows_valid) {
  if constexpr (kThreads % Tile::kChunks == 0) {  // A thread keeps its column: one pointer that moves down.
    constexpr int kRowsPerPass = kThreads / Tile::kChunks;
    constexpr int kPasses = (kRows + kRowsPerPass - 1) / kRowsPerPass;
    const int chunk = threadIdx.x % Tile::kChunks;
    const int first_row = threadIdx.x / Tile::kChunks;
    const bool column_valid = Tile::kChunks * 8 == kCols || chunk * 8 < kCols;
    const u16* chunk_gmem = source_gmem + first_row * row_stride + chunk * 8;
#pragma unroll(kPasses <= 16 ? kPasses : 8)
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = first_row + pass * kRowsPerPass;
      if (kRows % kRowsPerPass == 0 || row < kRows) {
        copy_chunk<kVector>(tile + Tile::offset(row, chunk), chunk_gmem, column_valid && row < rows_valid);
      }
      chunk_gmem += kRowsPerPass * row_stride;
    }
  } else {
#pragma unroll 1
    for (int index = threadIdx.x; index < kRows * Tile::kChunks; index += kThreads) {
      const int row = index / Tile::kChunks;
      const int chunk = index % Tile::kChunks;
      const bool column_valid = Tile::kChunks * 8 == kCols || chunk * 8 < kCols;
      copy_chunk<kVector>(tile + Tile::offset(row, chunk), source_gmem + row * row_stride + chunk * 8,
                          column_valid && row < rows_valid);
    }
  }
}

// Writes the first `rows_valid` of kRows rows, from row `row_begin` of a tile on, to global memory by one warp.
template <typename Tile, int kRows, int kCols, bool kVector>
__device__ __forceinline__ void store_rows(const char* tile, int row_begin, u16* target_gmem, i64 row_stride,
                                           int rows_valid) {
  constexpr int kStored = kCols / 8;
#pragma unroll 4
  for (int index = threadIdx.x % 32; index < kRows * kStored; index += 32) {
    const int row = index / kStored;
    const int chunk = index % kStored;
    if (row >= rows_valid) {
      break;
    }
    const uint4 values = *reinterpret_cast<const uint4*>(tile + Tile::offset(row_begin + row, chunk));
    u16* chunk_gmem = target_gmem + row * row_stride + chunk * 8;
    if constexpr (kVector) {
      *reinterpret_cast<uint4*>(chunk_gmem) = values;
    } else {
      store_elements(chunk_gmem, values);
    }
  }
}
