// TMA: tiles between tensors and shared memory, as a tensor map describes them. What a map holds here is written by
// encode_for_emulator() in tensors.py; TensorMap has checked it against the rules of the driver.
#pragma once

#include "mbarrier.h"

constexpr u64 kMapMagic = 0x70616d726f736e74;
constexpr u32 kMapAlignment = 64;
constexpr u32 kTileAlignment = 128;
constexpr i64 kRowAlignment = 16;  // of where a row of the box starts in memory; stores write so many bytes at a time

struct TensorMap {
  u64 magic;
  char* address;
  u64 dims[5];
  u64 strides[4];  // bytes, of dimensions 1 to 4
  u16 box[5];
  unsigned char rank;
  unsigned char item_bytes;
  unsigned char swizzle_bytes;  // 0: none
  unsigned char fill;           // byte of what lies outside

  u32 row_bytes() const {
    return box[0] * static_cast<u32>(item_bytes);
  }
  u32 rows() const {
    u32 count = 1;
    for (u32 dim = 1; dim < rank; ++dim) {
      count *= box[dim];
    }
    return count;
  }
};
static_assert(sizeof(TensorMap) <= 128, "as large as CUDA's");

// Hardware permutes units of 16 bytes by absolute address.
inline u32 swizzled(u32 address, u32 swizzle_bytes) {
  return swizzle_bytes == 0 ? address : address ^ ((address >> 7 & (swizzle_bytes / 16 - 1)) << 4);
}

inline const TensorMap* map_at(const void* pointer, u32 rank, const char* instruction) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  if (address - reinterpret_cast<uintptr_t>(current->fiber.stack) < kStackBytes) {
    fault("%s takes a copy of a tensor map: it must be the kernel's parameter itself", instruction);
  }
  if (address % kMapAlignment != 0) {
    fault("%s takes a tensor map at %p: not a multiple of %u", instruction, pointer, kMapAlignment);
  }
  if (address < parameters.begin || address >= parameters.end) {
    check_global(pointer, sizeof(TensorMap), false);
  }
  const TensorMap* map = static_cast<const TensorMap*>(pointer);
  if (map->magic != kMapMagic) {
    fault("%s takes what is no tensor map", instruction);
  }
  if (rank != 0 && map->rank != rank) {
    fault("%s takes a tensor map of %u dimensions", instruction, map->rank);
  }
  return map;
}

// Calls part(offset in the box, address in the tensor or null, bytes) for all of a box: pieces that are whole inside
// or whole outside of the tensor.
template <class Part>
void for_parts(const TensorMap& map, const int* coordinates, Part part) {
  const u32 row_bytes = map.row_bytes();
  const i64 first = coordinates[0], length = static_cast<i64>(map.dims[0]), box = map.box[0];
  const i64 begin = first < 0 ? (-first < box ? -first : box) : 0;
  const i64 end = length - first < box ? (length - first > begin ? length - first : begin) : box;
  for (u32 row = 0; row < map.rows(); ++row) {
    bool inside = true;
    u32 rest = row;
    char* address = map.address;
    for (u32 dim = 1; dim < map.rank; ++dim) {
      const i64 index = coordinates[dim] + static_cast<i64>(rest % map.box[dim]);
      rest /= map.box[dim];
      inside &= index >= 0 && index < static_cast<i64>(map.dims[dim]);
      address += index * static_cast<i64>(map.strides[dim - 1]);
    }
    const u32 at = row * row_bytes, item = map.item_bytes;
    if (!inside || begin == end) {
      part(at, static_cast<char*>(nullptr), row_bytes);
      continue;
    }
    if (begin > 0) {
      part(at, static_cast<char*>(nullptr), static_cast<u32>(begin) * item);
    }
    part(at + static_cast<u32>(begin) * item, address + (first + begin) * item, static_cast<u32>(end - begin) * item);
    if (end < box) {
      part(at + static_cast<u32>(end) * item, static_cast<char*>(nullptr), static_cast<u32>(box - end) * item);
    }
  }
}

// Between a box, row after row, and shared memory.
template <class Move>
void for_units(const TensorMap& map, u32 offset, u32 bytes, Move move) {
  for (u32 at = 0; at < bytes; at += 16) {
    move(at, swizzled(kSharedBase + offset + at, map.swizzle_bytes) - kSharedBase);
  }
}

inline u32 tile_offset(const TensorMap& map, u32 address, const char* instruction) {
  const u32 bytes = map.row_bytes() * map.rows(), offset = address - kSharedBase;
  if (address % kTileAlignment != 0) {
    fault("%s with a tile at byte %d of shared memory: not a multiple of %u", instruction, static_cast<int>(offset),
          kTileAlignment);
  }
  if (offset >= shared_bytes || bytes > shared_bytes - offset) {
    fault("%s with a tile of %u bytes at byte %d of shared memory, beyond the %u bytes of the launch", instruction,
          bytes, static_cast<int>(offset), shared_bytes);
  }
  return offset;
}

// Elsewhere hardware stops with an illegal instruction.
inline void check_start(const TensorMap& map, const int* coordinates, const char* instruction) {
  const i64 bytes = static_cast<i64>(coordinates[0]) * map.item_bytes;
  if (bytes % kRowAlignment != 0) {
    fault("%s whose innermost coordinate is %d: %lld bytes, not a multiple of %d", instruction, coordinates[0],
          static_cast<long long>(bytes), static_cast<int>(kRowAlignment));
  }
}

// What CUDA's programming guide forbids, and rows whose last bytes hardware would store with what lies behind them.
inline void check_stored(const TensorMap& map, const int* coordinates, const char* instruction) {
  for (u32 dim = 0; dim < map.rank; ++dim) {
    if (coordinates[dim] < 0) {
      fault("%s to coordinate %d of dimension %u: negative ones are for loads alone", instruction, coordinates[dim],
            dim);
    }
  }
  for_parts(map, coordinates, [&](u32, const char* target, u32 length) {
    if (target && length % kRowAlignment != 0) {
      const i64 row = static_cast<i64>(map.dims[0]) * map.item_bytes;
      fault("%s over the end of rows of %lld bytes: hardware stores 16 bytes at a time, so %lld beyond the row",
            instruction, static_cast<long long>(row), static_cast<long long>(kRowAlignment - row % kRowAlignment));
    }
  });
}

extern "C" void emulator_tensor_map_prefetch(const void* pointer, const char* instruction) {
  map_at(pointer, 0, instruction);
}

extern "C" void emulator_tma_load(u32 target, const void* pointer, u32 barrier_address, u32 rank,
                                  const int* coordinates) {
  const char* instruction = "a TMA load";
  const TensorMap& map = *map_at(pointer, rank, instruction);
  const u32 offset = tile_offset(map, target, instruction), bytes = map.row_bytes() * map.rows();
  check_start(map, coordinates, instruction);
  Barrier& barrier = barrier_at(barrier_address, instruction);
  if (!barrier.fenced) {
    fault(
        "a TMA load takes the mbarrier at byte %u of shared memory, behind whose mbarrier.init there is no "
        "fence.mbarrier_init",
        barrier.offset);
  }
  const u32 counter = CALLER;
  const u32 stamp = kInFlight | (kMaxThreads + index_of(barrier)) << kClockBits | barrier.phase;
  const char* doing = "starts a TMA load to";
  const u32 me = current->warp->index;
  u32 written = 0, read[kMaxWarps] = {};
  for (u32 cell = offset / kCellBytes; cell < (offset + bytes) / kCellBytes; ++cell) {
    if (writes.stamp[cell] != written) {
      check_written(cell, me, current->index, doing);
      check_fenced(*current, cell, doing);
      written = writes.stamp[cell];
    }
    check_readers(cell, me, doing, read);
    writes.stamp[cell] = stamp;
    writes.counter[cell] = counter;
  }
  memset(shared_memory + offset, 0xff, bytes);
  for_parts(map, coordinates, [](u32, const char* source, u32 length) {
    if (source) {
      check_global(source, length, false);
    }
  });
  Load load = {offset, bytes, &map, {}};
  memcpy(load.coordinates, coordinates, rank * sizeof(int));
  barrier.loads.push_back(load);
  barrier.loaded = barrier.phase + 1;
  ++loads_in_flight;
}

inline void deliver(Barrier& barrier, const Load& load) {
  std::vector<char> box(load.bytes, static_cast<char>(load.map->fill));
  for_parts(*load.map, load.coordinates, [&](u32 at, const char* source, u32 length) {
    if (source) {
      memcpy(box.data() + at, source, length);
    }
  });
  for_units(*load.map, load.target, load.bytes,
            [&](u32 at, u32 target) { memcpy(shared_memory + target, box.data() + at, 16); });
  const u32 stamp = (kMaxThreads + index_of(barrier)) << kClockBits | barrier.phase;
  for (u32 cell = load.target / kCellBytes; cell < (load.target + load.bytes) / kCellBytes; ++cell) {
    writes.stamp[cell] = stamp;
  }
}

// ---- Stores: shared memory is read at bulk_wait_read, the tensor written at bulk_wait or when the block ends ----
[[gnu::noinline]] inline void mark_read(const Thread& thread, u32 offset, u32 bytes, u32 flag, u32 lane, u32 counter) {
  const Stamps& mine = reads[thread.warp->index];
  for (u32 cell = offset / kCellBytes; cell < (offset + bytes) / kCellBytes; ++cell) {
    mine.stamp[cell] = flag | clock_of(thread) << kLaneBits | lane;
    mine.counter[cell] = counter;
  }
}

extern "C" void emulator_tma_store(const void* pointer, u32 source, u32 rank, const int* coordinates) {
  const char* instruction = "a TMA store";
  const TensorMap& map = *map_at(pointer, rank, instruction);
  const u32 offset = tile_offset(map, source, instruction), bytes = map.row_bytes() * map.rows();
  check_start(map, coordinates, instruction);
  check_stored(map, coordinates, instruction);
  for (u32 cell = offset / kCellBytes; cell < (offset + bytes) / kCellBytes; ++cell) {
    check_written(cell, current->warp->index, current->index, "starts a TMA store of");
    check_fenced(*current, cell, "starts a TMA store of");
  }
  for_parts(map, coordinates, [](u32, const char* target, u32 length) {
    if (target) {
      check_global(target, length, true);
    }
  });
  Store store = {offset, bytes, current->bulk_committed, CALLER, &map, {}, false, {}};
  memcpy(store.coordinates, coordinates, rank * sizeof(int));
  mark_read(*current, offset, bytes, kInFlight, current->lane + 1, store.counter);
  current->stores.push_back(store);
}

extern "C" void emulator_bulk_commit() {
  ++current->bulk_committed;
}

inline void read_source(Thread& thread, Store& store) {
  store.contents.resize(store.bytes);
  for_units(*store.map, store.source, store.bytes,
            [&](u32 at, u32 source) { memcpy(store.contents.data() + at, shared_memory + source, 16); });
  store.read = true;
  mark_read(thread, store.source, store.bytes, 0, thread.lane + 1, store.counter);
}

inline void write_target(const Store& store) {
  for_parts(*store.map, store.coordinates, [&](u32 at, char* target, u32 length) {
    if (target) {
      memcpy(target, store.contents.data() + at, length);
    }
  });
}

// What of the warp is still to be read, once something else has been.
inline void mark_stores(const Warp& warp) {
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    for (const Store& store : warp.lanes[lane].stores) {
      if (!store.read) {
        mark_read(warp.lanes[lane], store.source, store.bytes, kInFlight, lane + 1, store.counter);
      }
    }
  }
}

inline void mark_products(const Warp& warp);  // wgmma.h

extern "C" void emulator_bulk_wait(u32 pending, bool only_read) {
  Thread& me = *current;
  size_t kept = 0;
  for (size_t index = 0; index < me.stores.size(); ++index) {
    Store& store = me.stores[index];
    const bool due = store.group + pending < me.bulk_committed;
    if (due && !store.read) {
      read_source(me, store);
    }
    if (due && !only_read) {
      write_target(store);
    } else if (index != kept++) {
      std::swap(me.stores[kept - 1], store);
    }
  }
  me.stores.resize(kept);
  mark_stores(*me.warp);
  mark_products(*me.warp);
}
