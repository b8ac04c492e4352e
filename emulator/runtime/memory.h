// Which memory a kernel may touch. Every access of generated code comes here; those to shared memory go on to races.h.
#pragma once

#include "races.h"

struct Region {
  char name[16];
  char* begin;
  char* end;
  bool writable;
};
inline std::vector<Region> regions;
inline Span parameters;  // of the kernel, where tensor maps may lie

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

// Local variables that are registers of a wgmma.
[[gnu::noinline]] inline void touch_registers(uintptr_t address, size_t bytes, bool write) {
  std::vector<Registers>& all = current->registers;
  for (size_t index = 0; index < all.size(); ++index) {
    Registers& each = all[index];
    if (address >= each.end || address + bytes <= each.begin) {
      continue;
    }
    if (each.in_flight != 0 && (each.result || write)) {
      fault("%s %s of a wgmma that has not been waited for: it was issued at @%x@", write ? "writes" : "reads",
            each.result ? "an accumulator" : "registers that are A", each.counter);
    }
    each.touched |= each.result || write;
    if (index != 0) {  // the next access is likely to be to the same
      std::swap(each, all[index / 2]);
    }
    return;
  }
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
    if (!current->registers.empty()) {
      touch_registers(address, bytes, write);
    }
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
