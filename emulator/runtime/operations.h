// The operations that generated code calls (declared in device.h): barriers, votes, shuffles, copies, atomics. Those on
// matrices are in matrices.h.
#pragma once

#include "schedule.h"

template <class Payload>
Payload& payload_of(Warp& warp, u32 lane) {
  return *static_cast<Payload*>(warp.lanes[lane].payload);
}

inline void whole_warp(u32 mask, const char* what, const char* file, int line) {
  if (mask != kAllLanes) {
    fault("%s at %s:%d has the mask %08x: only operations of the whole warp are modelled", what, file, line, mask);
  }
}

inline u32 caller(const void* counter) {
  return static_cast<u32>(code_address(counter)) - 1;
}
#define CALLER caller(__builtin_return_address(0))

// ---- Barriers ----
inline const Operation kSyncThreads = {"__syncthreads", arrive_block};
inline const Operation kSyncWarp = {"__syncwarp", order_warp};

extern "C" int emulator_sync_threads(int predicate, const char* file, int line) {
  Predicate mine = {predicate};
  arrive(kSyncThreads, &mine, {file, line});
  return block_result;
}

extern "C" void emulator_sync_warp(u32 mask, const char* file, int line) {
  whole_warp(mask, "__syncwarp", file, line);
  arrive(kSyncWarp, nullptr, {file, line});
}

// ---- Votes and shuffles: they order no memory ----
inline void run_ballot(Warp& warp) {
  u32 votes = 0;
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    votes |= static_cast<u32>(payload_of<Predicate>(warp, lane).value != 0) << lane;
  }
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    payload_of<Predicate>(warp, lane).value = static_cast<int>(votes);
  }
}
inline const Operation kBallot = {"a vote", run_ballot};

extern "C" u32 emulator_ballot(u32 mask, int predicate, const char* file, int line) {
  whole_warp(mask, "a vote", file, line);
  Predicate mine = {predicate};
  arrive(kBallot, &mine, {file, line});
  return static_cast<u32>(mine.value);
}

struct Shuffle {
  u64 bits;
  int lane;  // that this one reads from
};
inline void run_shuffle(Warp& warp) {
  u64 given[kWarpLanes];
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    given[lane] = payload_of<Shuffle>(warp, lane).bits;
  }
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    Shuffle& shuffle = payload_of<Shuffle>(warp, lane);
    shuffle.bits = given[shuffle.lane];
  }
}
inline const Operation kShuffle = {"a shuffle", run_shuffle};

extern "C" u64 emulator_shuffle(u32 mask, u64 bits, int lane, const char* file, int line) {
  whole_warp(mask, "a shuffle", file, line);
  if (lane < 0 || lane >= static_cast<int>(kWarpLanes)) {
    fault("a shuffle at %s:%d reads lane %d", file, line, lane);
  }
  Shuffle mine = {bits, lane};
  arrive(kShuffle, &mine, {file, line});
  return mine.bits;
}

// ---- Asynchronous copies ----
extern "C" u32 emulator_shared_address(const void* pointer) {
  const uintptr_t offset = reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(shared_memory);
  if (offset > kSharedLimit) {
    fault("takes the shared-memory address of %p, which is not in shared memory", pointer);
  }
  return kSharedBase + static_cast<u32>(offset);
}

// From here until its thread has waited, the target holds NaN and nobody may touch it. Source and target change hands
// at the wait: the latest moment that is allowed.
extern "C" void emulator_copy_async(u32 target, const void* source, u32 bytes, u32 read_bytes) {
  const u32 offset = shared_offset(target, bytes, "an asynchronous copy");
  if (read_bytes != 0) {
    if (reinterpret_cast<uintptr_t>(source) % bytes != 0) {
      fault("an asynchronous copy of %u bytes reads from %p: not a multiple of %u", bytes, source, bytes);
    }
    check_global(source, read_bytes, false);
  }
  stamp_write(offset, bytes, CALLER, kInFlight);
  memset(shared_memory + offset, 0xff, bytes);
  current->copies.push_back({offset, bytes, read_bytes, current->committed, static_cast<const char*>(source)});
}

extern "C" void emulator_copy_commit() {
  ++current->committed;
}

extern "C" void emulator_copy_wait(u32 pending) {
  Thread& me = *current;
  size_t kept = 0;
  for (const Copy& copy : me.copies) {
    if (copy.group + pending >= me.committed) {
      me.copies[kept++] = copy;
      continue;
    }
    memcpy(shared_memory + copy.target, copy.source, copy.read_bytes);
    memset(shared_memory + copy.target + copy.read_bytes, 0, copy.bytes - copy.read_bytes);
    const u32 stamp = me.index << kClockBits | clock_of(me);
    for (u32 cell = copy.target / kCellBytes; cell < (copy.target + copy.bytes) / kCellBytes; ++cell) {
      writes.stamp[cell] = stamp;
    }
  }
  me.copies.resize(kept);
}

// ---- Atomics ----
template <class T>
inline void check_atomic(T* target) {
  u32 offset;
  if (reinterpret_cast<uintptr_t>(target) % sizeof(T) != 0) {
    fault("an atomic operation on %zu bytes at %p: not a multiple of %zu", sizeof(T), static_cast<void*>(target),
          sizeof(T));
  }
  if (!in_shared(target, sizeof(T), offset)) {
    check_global(target, sizeof(T), true);
  }
}

extern "C" u32 emulator_atomic_add_32(u32* target, u32 value) {
  check_atomic(target);
  return __atomic_fetch_add(target, value, __ATOMIC_RELAXED);
}

extern "C" u64 emulator_atomic_add_64(u64* target, u64 value) {
  check_atomic(target);
  return __atomic_fetch_add(target, value, __ATOMIC_RELAXED);
}

extern "C" float emulator_atomic_add_float(float* target, float value) {
  check_atomic(target);
  float found = *target;
  for (float sum = found + value;
       !__atomic_compare_exchange(target, &found, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
       sum = found + value) {
  }
  return found;
}

extern "C" u64 emulator_atomic_max_64(u64* target, u64 value) {
  check_atomic(target);
  u64 found = *target;
  while (value > found &&
         !__atomic_compare_exchange_n(target, &found, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return found;
}
