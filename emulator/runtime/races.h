// Shared memory, and which accesses to it nothing orders.
//
// Accesses are ordered by time stamps: each warp counts the barriers it has passed (its clock), and knows up to which
// clock of each other warp everything lies before its own next access. Two accesses of which one writes, from different
// threads, must be ordered: a bug of that kind then shows in every run, whatever order the threads run in. The bytes
// that an asynchronous copy will write are out of bounds for all until its thread has waited for it; so are those that
// TMA or wgmma will read, to writers.
#pragma once

#include <unordered_map>

#include "order.h"

constexpr u32 kSharedLimit = 256 * 1024;
constexpr u32 kSharedBase = 1024;  // address of the first byte: hardware keeps the first kilobyte for itself
alignas(1024) inline char shared_memory[kSharedLimit] asm("smem");
inline u32 shared_bytes = 0;

constexpr u32 kCellBytes = 2;  // of shared memory, that one stamp covers
constexpr u32 kInFlight = 1u << 31;
constexpr u32 kManyLanes = kWarpLanes + 1;
constexpr u32 kAnyLane = kWarpLanes + 2;   // the warp as a whole: any of its lanes speaks for it
constexpr u32 kEachLane = kWarpLanes + 3;  // those that `readers` names; the clock is that of the latest
constexpr u32 kLaneBits = 6;

// A stamp of a write is kInFlight | writer | clock, of a read kInFlight | clock | lane + 1 or one of the three above;
// 0 is none. In flight means that something asynchronous has yet to write, or to read.
struct Stamps {
  u32* stamp;
  u32* counter;  // where: code_address(), of which 32 bits are enough
};
inline Stamps writes;
inline Stamps reads[kMaxWarps];

// Lanes of a warp that have read the same cell, in no order that is known.
struct Readers {
  u32 end[kWarpLanes];  // the clock behind that of the last read; 0: none
  u32 counter[kWarpLanes];

  // `lane` is as in a stamp: one, or all of them.
  void add(u32 lane, u32 clock, u32 where) {
    for (u32 each = 0; each < kWarpLanes; ++each) {
      if ((lane == kManyLanes || each == lane - 1) && end[each] <= clock) {
        end[each] = clock + 1;
        counter[each] = where;
      }
    }
  }
};
inline std::unordered_map<u32, Readers> readers[kMaxWarps];  // by cell, where its stamp is of kEachLane

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

// Between blocks: nothing that was stamped matters any more.
inline void order_start() {
  if (clocks[0] > kClockLimit / 2 || num_barriers != 0 || anyone_knows_more) {
    forget_order();
    num_barriers = 0;
    memset(writes.stamp, 0, num_cells() * sizeof(u32));
    for (u32 warp = 0; warp < num_warps; ++warp) {
      memset(reads[warp].stamp, 0, num_cells() * sizeof(u32));
      readers[warp].clear();
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

inline u32 barrier_offset(u32 barrier);  // where that mbarrier lies (mbarrier.h)

inline u32 writer_of(u32 stamp) {
  return stamp >> kClockBits & ((1u << kWriterBits) - 1);
}

// A stamp that `thread` can't know from the barriers of its warp.
[[gnu::noinline]] inline void check_stamp(const Thread& thread, u32 stamp, u32 cell, const char* doing) {
  const u32 writer = writer_of(stamp), byte = cell * kCellBytes, counter = writes.counter[cell];
  if (writer == kBarrierItself) {
    fault("%s shared memory at byte %u, where an mbarrier lies: initialised at @%x@", doing, byte, counter);
  }
  if (writer >= kMaxThreads) {
    if (stamp & kInFlight || !knows(thread, writer, stamp & kClockLimit)) {
      fault(
          "%s shared memory at byte %u, which a TMA load %s: started at @%x@. This thread has not waited for its "
          "mbarrier at byte %u",
          doing, byte, stamp & kInFlight ? "has yet to write" : "wrote", counter, barrier_offset(writer - kMaxThreads));
    }
    return;
  }
  if (stamp & kInFlight) {
    fault(
        "%s shared memory at byte %u while a copy to it is in flight: thread %u (warp %u, lane %u) started it at "
        "@%x@ and has not waited for it",
        doing, byte, writer, writer / kWarpLanes, writer % kWarpLanes, counter);
  }
  if (!knows(thread, writer, stamp & kClockLimit)) {
    unordered(doing, cell, writer, "wrote", counter);
  }
}

// `me` is the warp of the current thread, `own` its number; or none, where the whole warp gets what is read.
inline void check_written(u32 cell, u32 me, u32 own, const char* doing) {
  const u32 stamp = writes.stamp[cell];
  if (stamp == 0) {
    return;
  }
  const u32 writer = writer_of(stamp);
  const bool plain = !(stamp & kInFlight) && writer < kMaxThreads;
  if (plain && ((stamp & kClockLimit) < known[me][writer / kWarpLanes] || writer == own)) {
    return;
  }
  check_stamp(*current, stamp, cell, doing);
}

// The stamp of a cell that this lane reads, and others of its warp have read since the warp's last barrier. Through
// mbarriers a writer may know some of them alone, and each up to a clock of its own.
[[gnu::noinline, gnu::cold]] inline u32 add_reader(u32 cell, u32 before, u32 fresh, u32 counter) {
  const u32 me = current->warp->index;
  const u32 lane = before % (1u << kLaneBits), clock = before >> kLaneBits;
  const u32 my_lane = fresh % (1u << kLaneBits), my_clock = fresh >> kLaneBits;
  if (lane == kAnyLane) {
    return fresh;  // This lane has waited for that wgmma: who comes behind it comes behind both.
  }
  Readers& all = readers[me][cell];
  if (lane != kEachLane) {
    all = {};
    all.add(lane, clock, reads[me].counter[cell]);
  }
  all.add(my_lane, my_clock, counter);
  return (clock > my_clock ? clock : my_clock) << kLaneBits | kEachLane;
}

inline void stamp_read(u32 offset, u32 bytes, u32 lane, u32 counter) {
  const u32 me = current->warp->index, own = lane == kWarpLanes ? kBarrierItself : current->index;
  u32* const stamps = reads[me].stamp;
  u32* const counters = reads[me].counter;
  const u32 clock = clock_of(*current), fresh = clock << kLaneBits | (lane + 1), ordered = known[me][me];
  const u32 many = clock << kLaneBits | kManyLanes;
  const bool one_by_one = num_barriers != 0;
  const u32 end = (offset + bytes - 1) / kCellBytes;
  for (u32 cell = offset / kCellBytes; cell <= end; ++cell) {
    check_written(cell, me, own, "reads");
    const u32 before = stamps[cell];
    if (before & kInFlight) {
      continue;  // what reads it later says more
    }
    // Another lane, that no barrier of the warp orders: both must be known to who writes next. Without mbarriers it
    // knows all lanes or none.
    u32 after = fresh;
    if (before >> kLaneBits >= ordered && (before ^ fresh) % (1u << kLaneBits) != 0 && before != 0) {
      after = one_by_one ? add_reader(cell, before, fresh, counter) : many;
    }
    stamps[cell] = after;
    counters[cell] = counter;
  }
}

// A read that the barriers of the writer's warp don't order before a write.
[[gnu::noinline]] inline void check_reader(u32 warp, u32 read, u32 cell, const char* doing) {
  const u32 lane = read % (1u << kLaneBits), clock = (read & ~kInFlight) >> kLaneBits;
  const u32 first = warp * kWarpLanes;
  if (read & kInFlight) {
    fault("%s shared memory at byte %u while it is still to be read: warp %u started that at @%x@ and has not waited",
          doing, cell * kCellBytes, warp, reads[warp].counter[cell]);
  }
  if (lane == kAnyLane && warp == current->warp->index) {
    return;  // all of its lanes have waited
  }
  if (lane == kEachLane) {
    const Readers& all = readers[warp].at(cell);
    for (u32 each = 0; each < kWarpLanes; ++each) {
      if (all.end[each] != 0 && first + each != current->index && !knows(*current, first + each, all.end[each] - 1)) {
        unordered(doing, cell, first + each, "read", all.counter[each]);
      }
    }
    return;
  }
  u32 unknown = 0;
  for (u32 each = 0; each < kWarpLanes; ++each) {
    const bool mine = first + each == current->index && lane != kAnyLane;
    if ((lane >= kManyLanes || each == lane - 1) && !mine && !knows(*current, first + each, clock)) {
      ++unknown;
    }
  }
  if (unknown == 0 || (lane == kAnyLane && unknown < kWarpLanes)) {
    return;
  }
  const u32 thread = first + (lane >= kManyLanes ? 0 : lane - 1);
  unordered(doing, cell, thread, lane >= kManyLanes ? "(and others of its warp) read" : "read",
            reads[warp].counter[cell]);
}

// `accepted` has a stamp of each warp that has been checked already, or 0; none that differs from cell to cell.
inline void check_readers(u32 cell, u32 me, const char* doing, u32* accepted = nullptr) {
  const u32 lane = current->lane + 1;
  for (u32 warp = 0; warp < num_warps; ++warp) {
    const u32 read = reads[warp].stamp[cell];
    // What is in flight has the top bit, so it is never below.
    if (read >> kLaneBits < known[me][warp] || read == 0 || (accepted && accepted[warp] == read)) {
      continue;
    }
    if (warp != me || read % (1u << kLaneBits) != lane || read & kInFlight) {
      check_reader(warp, read, cell, doing);
    }
    if (accepted && read % (1u << kLaneBits) != kEachLane) {
      accepted[warp] = read;
    }
  }
}

inline void stamp_write(u32 offset, u32 bytes, u32 counter, u32 flag = 0) {
  const u32 me = current->warp->index, stamp = flag | current->index << kClockBits | clock_of(*current);
  const u32 end = (offset + bytes - 1) / kCellBytes;
  const char* doing = flag ? "starts a copy to" : "writes";
  for (u32 cell = offset / kCellBytes; cell <= end; ++cell) {
    check_written(cell, me, current->index, doing);
    check_readers(cell, me, doing);
    writes.stamp[cell] = stamp;
    writes.counter[cell] = counter;
  }
}

// What the asynchronous proxy (TMA, wgmma) reads, or writes over, must have been written by it, or be fenced.
[[gnu::noinline]] inline void check_fenced(const Thread& thread, u32 cell, const char* doing) {
  const u32 stamp = writes.stamp[cell], writer = writer_of(stamp);
  if (stamp != 0 && writer < kMaxThreads && !knows_fenced(thread, writer, stamp & kClockLimit)) {
    fault(
        "%s shared memory at byte %u, which thread %u (warp %u, lane %u) wrote at @%x@: no fence.proxy.async stands "
        "between the two",
        doing, cell * kCellBytes, writer, writer / kWarpLanes, writer % kWarpLanes, writes.counter[cell]);
  }
}
