// Tiles of 16-bit elements in shared memory, moved in chunks of 16 bytes (8 elements). Needs types.cuh, ptx.cuh.

#pragma once

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

// Copies 8 elements into a tile, zeros where `valid` is false: asynchronous, or element by element.
template <bool kVector>
__device__ __forceinline__ void copy_chunk(char* target_smem, const u16* source_gmem, bool valid) {
  if constexpr (kVector) {
    cp_async_16(shared_address(target_smem), source_gmem, valid);
  } else {
    const uint4 zeros = {0, 0, 0, 0};
    *reinterpret_cast<uint4*>(target_smem) = valid ? load_elements(source_gmem) : zeros;
  }
}

// Copies (kRows, kCols) slices of global memory into tiles, one below the other, by all threads of the block.
//
// A thread copies one chunk of every kRowsPerPass-th row, and the same in each panel of columns. A panel is a whole row
// where the threads come out even, else as many chunks as a permutation stays inside of. What does not change from slice
// to slice is kept: all targets are at constant distances from the first, but for a single warp's.
template <typename Tile, int kRows, int kCols, int kThreads, bool kVector>
class TileLoader {
  static constexpr int kPanel = kThreads % (8 * Tile::kChunks) == 0 ? Tile::kChunks : Tile::kPermuted;  // chunks
  static constexpr int kPanels = Tile::kChunks / kPanel;
  static constexpr int kRowsPerPass = kThreads / kPanel;
  static constexpr int kPasses = (kRows + kRowsPerPass - 1) / kRowsPerPass;
  static constexpr bool kWhole = Tile::kChunks * 8 == kCols && kRows % kRowsPerPass == 0;
  static constexpr bool kConstantSteps = kRowsPerPass % 8 == 0;
  static constexpr int kUnrolled = kVector && kConstantSteps ? kPasses : 1;  // elsewhere it takes too many registers

  const u16* chunk_gmem;
  i64 row_stride;
  int first_row;
  int first_target;

 public:
  __device__ __forceinline__ TileLoader(const u16* source_gmem, i64 row_stride)
      : chunk_gmem(source_gmem + threadIdx.x / kPanel * row_stride + threadIdx.x % kPanel * 8),
        row_stride(row_stride),
        first_row(threadIdx.x / kPanel),
        first_target(Tile::offset(threadIdx.x / kPanel, threadIdx.x % kPanel)) {}

  // Starts the copy of the next slice. Rows from `rows_valid` on and columns from kCols on become zeros and are not
  // read. Complete after cp.async wait + barrier.
  __device__ __forceinline__ void next(char* tile, int rows_valid) {
    if (kWhole && rows_valid >= kRows) {
      copy<false>(tile, rows_valid);
    } else {
      copy<true>(tile, rows_valid);
    }
    chunk_gmem += kRows * row_stride;
  }

 private:
  template <bool kChecked>
  __device__ __forceinline__ void copy(char* tile, int rows_valid) const {
    const u32 first_smem = shared_address(tile) + first_target;
    const u16* row_gmem = chunk_gmem;
#pragma unroll(kUnrolled)
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = first_row + pass * kRowsPerPass;
      if (kRows % kRowsPerPass == 0 || row < kRows) {
#pragma unroll(kUnrolled == 1 ? 1 : kPanels)
        for (int panel = 0; panel < kPanels; ++panel) {
          const int chunk = panel * kPanel + threadIdx.x % kPanel;
          const bool valid = !kChecked || (row < rows_valid && chunk * 8 < kCols);
          if constexpr (kVector && kConstantSteps) {
            cp_async_16(first_smem + (pass * kRowsPerPass * Tile::kRowBytes + panel * kPanel * 16),
                        row_gmem + panel * kPanel * 8, valid);
          } else {
            copy_chunk<kVector>(tile + Tile::offset(row, chunk), row_gmem + panel * kPanel * 8, valid);
          }
        }
      }
      row_gmem += kRowsPerPass * row_stride;
    }
  }
};

// Writes the first `rows_valid` of kRows rows, from row `row_begin` of a tile on, to global memory by one warp.
// address_of gives the address of each row, counted from 0.
template <typename Tile, int kRows, int kCols, bool kVector, typename AddressOf>
__device__ __forceinline__ void store_rows(const char* tile, int row_begin, int rows_valid, AddressOf address_of) {
  constexpr int kStored = kCols / 8;
#pragma unroll 4
  for (int index = threadIdx.x % 32; index < kRows * kStored; index += 32) {
    const int row = index / kStored;
    const int chunk = index % kStored;
    if (row >= rows_valid) {
      break;
    }
    const uint4 values = *reinterpret_cast<const uint4*>(tile + Tile::offset(row_begin + row, chunk));
    u16* chunk_gmem = address_of(row) + chunk * 8;
    if constexpr (kVector) {
      *reinterpret_cast<uint4*>(chunk_gmem) = values;
    } else {
      store_elements(chunk_gmem, values);
    }
  }
}
