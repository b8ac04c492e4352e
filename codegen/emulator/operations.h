// The operations that generated code calls (declared in device.h): barriers, votes, shuffles, copies, matrices, atomics.
#pragma once

#include <cmath>

#include "schedule.h"

struct EmulatorWords {
  u32 word[4];
};
struct EmulatorFloats {
  float value[4];
};

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

// ---- Matrices ----
struct LoadMatrix {
  u32 offset;  // of this lane's row
  bool transposed;
  EmulatorWords words;
};
inline void run_ldmatrix(Warp& warp) {
  for (u32 matrix = 0; matrix < 4; ++matrix) {
    u16 rows[8][8];
    for (u32 row = 0; row < 8; ++row) {
      memcpy(rows[row], shared_memory + payload_of<LoadMatrix>(warp, 8 * matrix + row).offset, 16);
    }
    for (u32 lane = 0; lane < kWarpLanes; ++lane) {
      LoadMatrix& load = payload_of<LoadMatrix>(warp, lane);
      const u32 major = lane / 4, minor = 2 * (lane % 4);
      load.words.word[matrix] = load.transposed ? rows[minor][major] | static_cast<u32>(rows[minor + 1][major]) << 16
                                                : rows[major][minor] | static_cast<u32>(rows[major][minor + 1]) << 16;
    }
  }
}
inline const Operation kLoadMatrix = {"ldmatrix", run_ldmatrix};

extern "C" EmulatorWords emulator_ldmatrix(u32 row, bool transposed, const char* file, int line) {
  LoadMatrix mine = {shared_offset(row, 16, "ldmatrix"), transposed, {}};
  stamp_read(mine.offset, 16, kWarpLanes, CALLER);  // every lane gets a part of it
  arrive(kLoadMatrix, &mine, {file, line});
  return mine.words;
}

struct StoreMatrix {
  u32 offset;  // of this lane's row
  bool transposed;
  EmulatorWords words;
};
inline void run_stmatrix(Warp& warp) {
  for (u32 matrix = 0; matrix < 4; ++matrix) {
    u16 rows[8][8];
    for (u32 lane = 0; lane < kWarpLanes; ++lane) {
      const StoreMatrix& store = payload_of<StoreMatrix>(warp, lane);
      const u32 major = lane / 4, minor = 2 * (lane % 4), word = store.words.word[matrix];
      for (u32 half = 0; half < 2; ++half) {
        const u16 value = static_cast<u16>(word >> 16 * half);
        (store.transposed ? rows[minor + half][major] : rows[major][minor + half]) = value;
      }
    }
    for (u32 row = 0; row < 8; ++row) {
      memcpy(shared_memory + payload_of<StoreMatrix>(warp, 8 * matrix + row).offset, rows[row], 16);
    }
  }
}
inline const Operation kStoreMatrix = {"stmatrix", run_stmatrix};

// A row counts as written by the lane that gives its address.
extern "C" void emulator_stmatrix(u32 row, bool transposed, EmulatorWords words, const char* file, int line) {
  StoreMatrix mine = {shared_offset(row, 16, "stmatrix"), transposed, words};
  stamp_write(mine.offset, 16, CALLER);
  arrive(kStoreMatrix, &mine, {file, line});
}

inline float half_value(u32 bits) {
  const u32 sign = (bits & 0x8000u) << 16;
  const u32 magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    return __builtin_bit_cast(float, sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  }
  const float scaled = __builtin_bit_cast(float, magnitude << 13) * 0x1p112f;
  return __builtin_bit_cast(float, sign | __builtin_bit_cast(u32, scaled));
}
struct HalfTable {
  float value[65536];

  HalfTable() {
    for (u32 bits = 0; bits < 65536; ++bits) {
      value[bits] = half_value(bits);
    }
  }
};
inline const HalfTable kHalfTable;

inline double element_value(u32 bits, bool bfloat16) {
  return static_cast<double>(bfloat16 ? __builtin_bit_cast(float, bits << 16) : kHalfTable.value[bits]);
}

// To float32, toward zero.
inline float cut_off(double sum) {
  const float nearest = static_cast<float>(sum);
  const u32 bits = __builtin_bit_cast(u32, nearest);
  const bool above = std::fabs(static_cast<double>(nearest)) > std::fabs(sum);
  return __builtin_bit_cast(float, bits - (above ? 1u : 0u));
}

struct Multiply {
  EmulatorFloats d;
  u32 a[4];
  u32 b[2];
};

// Sums of 16 products and the accumulator, exact, then cut off to float32: tensor cores don't round. (Fasi, Higham,
// Mikaitis, Pranesh: Numerical behavior of NVIDIA tensor cores, PeerJ Computer Science 2021.)
template <bool kBFloat16>
void run_mma(Warp& warp) {
  const auto value = [](u32 bits) { return element_value(bits, kBFloat16); };
  double a[16][16], b[16][8], d[16][8];
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    const Multiply& mine = payload_of<Multiply>(warp, lane);
    const u32 group = lane / 4, pair = 2 * (lane % 4);
    for (u32 half = 0; half < 2; ++half) {
      for (u32 step = 0; step < 2; ++step) {
        a[group + 8 * half][pair + 8 * step] = value(mine.a[2 * step + half] & 0xffffu);
        a[group + 8 * half][pair + 8 * step + 1] = value(mine.a[2 * step + half] >> 16);
      }
      b[pair + 8 * half][group] = value(mine.b[half] & 0xffffu);
      b[pair + 8 * half + 1][group] = value(mine.b[half] >> 16);
      d[group + 8 * half][pair] = mine.d.value[2 * half];
      d[group + 8 * half][pair + 1] = mine.d.value[2 * half + 1];
    }
  }
  float cut[16][8];
  for (u32 row = 0; row < 16; ++row) {
    double sum[8];
    memcpy(sum, d[row], sizeof sum);
    for (u32 term = 0; term < 16; ++term) {
      for (u32 col = 0; col < 8; ++col) {
        sum[col] += a[row][term] * b[term][col];
      }
    }
    for (u32 col = 0; col < 8; ++col) {
      cut[row][col] = cut_off(sum[col]);
    }
  }
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    Multiply& mine = payload_of<Multiply>(warp, lane);
    const u32 group = lane / 4, pair = 2 * (lane % 4);
    mine.d = {{cut[group][pair], cut[group][pair + 1], cut[group + 8][pair], cut[group + 8][pair + 1]}};
  }
}
inline const Operation kMultiplyHalf = {"mma m16n8k16 (float16)", run_mma<false>};
inline const Operation kMultiplyBFloat16 = {"mma m16n8k16 (bfloat16)", run_mma<true>};

extern "C" EmulatorFloats emulator_mma(bool bfloat16, EmulatorFloats d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1,
                                       const char* file, int line) {
  Multiply mine = {d, {a0, a1, a2, a3}, {b0, b1}};
  arrive(bfloat16 ? kMultiplyBFloat16 : kMultiplyHalf, &mine, {file, line});
  return mine.d;
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
