// Which memory a kernel may touch, and which accesses to shared memory nothing orders.
//
// Every access of generated code comes here. Accesses to shared memory are ordered by time stamps: each warp counts the
// barriers it has passed (its clock), and knows up to which clock of each other warp everything lies before its own
// next access. Two accesses of which one writes, from different threads, must be ordered: a bug of that kind then
// shows in every run, whatever order the threads run in. The bytes that an asynchronous copy will write are out of
// bounds for all until its thread has waited for it.
#pragma once

#include "state.h"

struct Region {
  char name[16];
  char* begin;
  char* end;
  bool writable;
};
inline std::vector<Region> regions;

constexpr u32 kSharedLimit = 256 * 1024;
constexpr u32 kSharedBase = 1024;  // address of the first byte: hardware keeps the first kilobyte for itself
alignas(1024) inline char shared_memory[kSharedLimit] asm("smem");
inline u32 shared_bytes = 0;

constexpr u32 kCellBytes = 2;  // of shared memory, that one stamp covers
constexpr u32 kClockBits = 21;
constexpr u32 kClockLimit = (1u << kClockBits) - 1;
constexpr u32 kInFlight = 1u << 31;
constexpr u32 kManyLanes = kWarpLanes + 1;
constexpr u32 kLaneBits = 6;

// A stamp of a write is kInFlight | thread | clock, of a read clock | lane + 1 or kManyLanes; 0 is none.
struct Stamps {
  u32* stamp;
  u32* counter;  // where: code_address(), of which 32 bits are enough
};
inline Stamps writes;
inline Stamps reads[kMaxWarps];
inline u32 clocks[kMaxWarps];
inline u32 known[kMaxWarps][kMaxWarps];  // known[w][a]: warp w comes after what warp a did before this clock

inline u32 num_cells() {
  return (shared_bytes + kCellBytes - 1) / kCellBytes;
}

inline u32* reserve(size_t count) {
  void* memory = mmap(nullptr, count * sizeof(u32) + 1, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    perror("memory of the emulator");
    exit(2);
  }
  return static_cast<u32*>(memory);
}

inline void reserve_stamps() {
  writes = {reserve(num_cells()), reserve(num_cells())};
  for (u32 warp = 0; warp < num_warps; ++warp) {
    reads[warp] = {reserve(num_cells()), reserve(num_cells())};
  }
}

// A barrier of the block: everything so far comes before everything that follows.
inline void order_block() {
  for (u32 warp = 0; warp < num_warps; ++warp) {
    if (++clocks[warp] > kClockLimit) {
      fault("the emulator counts at most %u barriers", kClockLimit);
    }
  }
  for (u32 warp = 0; warp < num_warps; ++warp) {
    memcpy(known[warp], clocks, sizeof clocks);
  }
}

inline void order_warp(u32 warp) {
  if (++clocks[warp] > kClockLimit) {
    fault("the emulator counts at most %u barriers", kClockLimit);
  }
  known[warp][warp] = clocks[warp];
}

// Between blocks: nothing that was stamped matters any more.
inline void order_start() {
  if (clocks[0] > kClockLimit / 2) {
    memset(clocks, 0, sizeof clocks);
    memset(writes.stamp, 0, num_cells() * sizeof(u32));
    for (u32 warp = 0; warp < num_warps; ++warp) {
      memset(reads[warp].stamp, 0, num_cells() * sizeof(u32));
    }
  }
  u32 latest = 0;
  for (u32 warp = 0; warp < num_warps; ++warp) {
    latest = clocks[warp] > latest ? clocks[warp] : latest;
  }
  for (u32 warp = 0; warp < num_warps; ++warp) {
    clocks[warp] = latest;
  }
  order_block();
}

[[noreturn]] inline void unordered(const char* doing, u32 cell, u32 thread, const char* did, u32 counter) {
  fault("%s shared memory at byte %u, which thread %u (warp %u, lane %u) %s at @%x@: no barrier orders the two", doing,
        cell * kCellBytes, thread, thread / kWarpLanes, thread % kWarpLanes, did, counter);
}

// `lane` is that of the current thread, or kWarpLanes where the whole warp gets what is read.
inline void check_written(u32 cell, u32 lane, const char* doing) {
  const u32 stamp = writes.stamp[cell];
  if (stamp == 0) {
    return;
  }
  const u32 thread = stamp >> kClockBits & (kMaxThreads - 1);
  if (stamp & kInFlight) {
    fault(
        "%s shared memory at byte %u while a copy to it is in flight: thread %u (warp %u, lane %u) started it at "
        "@%x@ and has not waited for it",
        doing, cell * kCellBytes, thread, thread / kWarpLanes, thread % kWarpLanes, writes.counter[cell]);
  }
  const u32 me = current->warp->index;
  if ((stamp & kClockLimit) >= known[me][thread / kWarpLanes] && thread != me * kWarpLanes + lane) {
    unordered(doing, cell, thread, "wrote", writes.counter[cell]);
  }
}

inline void stamp_read(u32 offset, u32 bytes, u32 lane, u32 counter) {
  const u32 me = current->warp->index;
  const Stamps& mine = reads[me];
  const u32 clock = clocks[me];
  const u32 end = (offset + bytes - 1) / kCellBytes;
  for (u32 cell = offset / kCellBytes; cell <= end; ++cell) {
    check_written(cell, lane, "reads");
    const u32 before = mine.stamp[cell];
    const bool other = before >> kLaneBits == clock && before % (1u << kLaneBits) != lane + 1;
    mine.stamp[cell] = clock << kLaneBits | (other ? kManyLanes : lane + 1);
    mine.counter[cell] = counter;
  }
}

inline void stamp_write(u32 offset, u32 bytes, u32 counter, u32 flag = 0) {
  const u32 me = current->warp->index;
  const u32 stamp = flag | current->index << kClockBits | clocks[me];
  const u32 end = (offset + bytes - 1) / kCellBytes;
  const char* doing = flag ? "starts a copy to" : "writes";
  for (u32 cell = offset / kCellBytes; cell <= end; ++cell) {
    check_written(cell, current->lane, doing);
    for (u32 warp = 0; warp < num_warps; ++warp) {
      const u32 read = reads[warp].stamp[cell];
      const u32 lane = read % (1u << kLaneBits);
      if (read >> kLaneBits >= known[me][warp] && read != 0 && (warp != me || lane != current->lane + 1)) {
        const u32 thread = warp * kWarpLanes + (lane == kManyLanes ? 0 : lane - 1);
        unordered(doing, cell, thread, lane == kManyLanes ? "(and others of its warp) read" : "read",
                  reads[warp].counter[cell]);
      }
    }
    writes.stamp[cell] = stamp;
    writes.counter[cell] = counter;
  }
}

inline bool in_shared(const void* pointer, size_t bytes, u32& offset) {
  const uintptr_t distance = reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(shared_memory);
  offset = static_cast<u32>(distance);
  return distance < shared_bytes && bytes <= shared_bytes - distance;
}

// Global memory: the access must lie in one tensor, whole.
inline void check_global(const void* pointer, size_t bytes, bool write) {
  const char* begin = static_cast<const char*>(pointer);
  const char* verb = write ? "writes" : "reads";
  const Region* nearest = nullptr;
  long long distance = 1ll << 40;
  for (const Region& region : regions) {
    if (begin >= region.begin && begin < region.end && bytes <= static_cast<size_t>(region.end - begin)) {
      if (write && !region.writable) {
        fault("writes %zu bytes at byte %td of %s, which is an input", bytes, begin - region.begin, region.name);
      }
      return;
    }
    const long long off = begin < region.begin ? region.begin - begin : begin - region.end;
    if (off < distance) {
      distance = off;
      nearest = &region;
    }
  }
  const uintptr_t shared = reinterpret_cast<uintptr_t>(begin) - reinterpret_cast<uintptr_t>(shared_memory);
  if (shared < kSharedLimit) {
    fault("%s %zu bytes at byte %u of shared memory, beyond the %u bytes of the launch", verb, bytes,
          static_cast<u32>(shared), shared_bytes);
  }
  if (nearest && distance < 1ll << 32) {
    fault("%s %zu bytes at byte %td of %s, which has %td", verb, bytes, begin - nearest->begin, nearest->name,
          nearest->end - nearest->begin);
  }
  fault("%s %zu bytes at address %p, where there is no tensor", verb, bytes, pointer);
}

// Any access of generated code through a pointer. `counter` is its place in the code.
inline void check_access(const void* pointer, size_t bytes, bool write, const void* counter) {
  u32 offset;
  if (in_shared(pointer, bytes, offset)) {
    const u32 at = static_cast<u32>(code_address(counter)) - 1;
    if (write) {
      stamp_write(offset, static_cast<u32>(bytes), at);
    } else {
      stamp_read(offset, static_cast<u32>(bytes), current->lane, at);
    }
    return;
  }
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  if (address - reinterpret_cast<uintptr_t>(current->fiber.stack) < kStackBytes) {
    return;
  }
  if (!write) {
    for (const Span& span : constants) {
      if (address >= span.begin && address < span.end) {
        return;
      }
    }
  }
  check_global(pointer, bytes, write);
}

// The offset behind a 32-bit shared-memory address as instructions take it.
inline u32 shared_offset(u32 address, u32 bytes, const char* instruction) {
  const u32 offset = address - kSharedBase;
  if (address % bytes != 0) {
    fault("%s of %u bytes at byte %d of shared memory: not a multiple of %u", instruction, bytes,
          static_cast<int>(offset), bytes);
  }
  if (offset >= shared_bytes || bytes > shared_bytes - offset) {
    fault("%s at byte %d of shared memory, beyond the %u bytes of the launch", instruction, static_cast<int>(offset),
          shared_bytes);
  }
  return offset;
}
