// mbarriers: phases, arrivals, bytes that copies bring. The copies themselves are in tma.h.
//
// A phase completes when all arrivals and all bytes are in. Its bytes come at the latest moment: when nothing else can
// run; in every other block also at random earlier ones.
#pragma once

#include "operations.h"

constexpr i64 kMaxTransaction = (1 << 20) - 1;

// A tile on its way from a tensor to shared memory.
struct Load {
  u32 target;  // offset in shared memory
  u32 bytes;
  const TensorMap* map;
  int coordinates[5];
};

struct Barrier {
  bool alive;
  bool fenced;   // its thread has fenced the initialisation
  u32 offset;    // in shared memory
  u32 count;     // arrivals of a phase
  u32 pending;   // that have yet to come
  i64 expected;  // bytes announced less those that have come
  u32 phase;     // that has not completed
  u32 loaded;    // phases up to which there were TMA loads,
  u32 observed;  // and up to which somebody has waited
  u32 thread;    // that initialised it
  u32 clock;     // of that
  std::vector<Load> loads;
  std::vector<Thread*> waiters;
};
inline Barrier barriers[kMaxBarriers];
inline Knowledge arriving_at[kMaxBarriers];    // what comes before the completion of the phase of each
inline Knowledge completion_of[kMaxBarriers];  // and of the last one
inline u16 barrier_here[kSharedLimit / 8];     // index + 1 of the mbarrier at these 8 bytes
inline u32 loads_in_flight = 0;

inline void deliver(Barrier& barrier, const Load& load);  // tma.h

inline u32 barrier_offset(u32 barrier) {
  return barriers[barrier].offset;
}

inline u32 index_of(const Barrier& barrier) {
  return static_cast<u32>(&barrier - barriers);
}

// The mbarrier at a 32-bit address, as the current thread may use it.
inline Barrier& barrier_at(u32 address, const char* instruction) {
  const u32 offset = shared_offset(address, 8, instruction);
  const u32 index = barrier_here[offset / 8];
  if (index == 0) {
    fault("%s at byte %u of shared memory, where no mbarrier has been initialised", instruction, offset);
  }
  Barrier& barrier = barriers[index - 1];
  if (current->index != barrier.thread && !knows(*current, barrier.thread, barrier.clock)) {
    fault("%s at byte %u of shared memory: no barrier orders it behind mbarrier.init by thread %u at @%x@", instruction,
          offset, barrier.thread, writes.counter[offset / kCellBytes]);
  }
  return barrier;
}

extern "C" void emulator_mbarrier_init(u32 address, u32 count) {
  const u32 offset = shared_offset(address, 8, "mbarrier.init");
  if (count == 0 || count > kMaxTransaction) {
    fault("mbarrier.init at byte %u of shared memory for %u arrivals: 1 to %lld can be", offset, count,
          static_cast<long long>(kMaxTransaction));
  }
  if (barrier_here[offset / 8] != 0) {
    fault("mbarrier.init at byte %u of shared memory, where an mbarrier is already: initialised at @%x@", offset,
          writes.counter[offset / kCellBytes]);
  }
  if (num_barriers == kMaxBarriers) {
    fault("the emulator has at most %u mbarriers in a block", kMaxBarriers);
  }
  const u32 counter = CALLER;
  stamp_write(offset, 8, counter);
  memset(shared_memory + offset, 0xff, 8);
  for (u32 cell = offset / kCellBytes; cell < (offset + 8) / kCellBytes; ++cell) {
    writes.stamp[cell] = kInFlight | kBarrierItself << kClockBits;
  }
  Barrier& barrier = barriers[num_barriers++];
  barrier_here[offset / 8] = static_cast<u16>(num_barriers);
  barrier.alive = true;
  barrier.fenced = false;
  barrier.offset = offset;
  barrier.count = barrier.pending = count;
  barrier.expected = 0;
  barrier.phase = barrier.loaded = barrier.observed = 0;
  barrier.thread = current->index;
  barrier.clock = clock_of(*current);
  barrier.loads.clear();
  barrier.waiters.clear();
  arriving_at[num_barriers - 1].used = completion_of[num_barriers - 1].used = false;
  run_ahead(*current);
}

extern "C" void emulator_mbarrier_invalidate(u32 address) {
  Barrier& barrier = barrier_at(address, "mbarrier.inval");
  if (!barrier.loads.empty() || !barrier.waiters.empty()) {
    fault("mbarrier.inval at byte %u of shared memory, while %zu copies and %zu threads still use it", barrier.offset,
          barrier.loads.size(), barrier.waiters.size());
  }
  barrier.alive = false;
  barrier_here[barrier.offset / 8] = 0;
  for (u32 cell = barrier.offset / kCellBytes; cell < (barrier.offset + 8) / kCellBytes; ++cell) {
    writes.stamp[cell] = current->index << kClockBits | clock_of(*current);
  }
}

extern "C" void emulator_fence_mbarrier_init() {
  for (u32 index = 0; index < num_barriers; ++index) {
    barriers[index].fenced |= barriers[index].thread == current->index;
  }
}

extern "C" void emulator_fence_proxy_async() {
  fence_async(*current);
}

inline void wake(Thread& thread) {
  thread.waiting = nullptr;
  thread.warp->ready |= 1u << thread.warp->position_of(thread.lane);
}

inline void complete_if_done(Barrier& barrier) {
  if (barrier.pending != 0) {
    return;
  }
  if (barrier.expected < 0) {
    fault("phase %u of the mbarrier at byte %u of shared memory gets %lld bytes more than it was told to expect",
          barrier.phase, barrier.offset, static_cast<long long>(-barrier.expected));
  }
  if (barrier.expected != 0) {
    return;
  }
  if (!barrier.loads.empty()) {
    i64 bytes = 0;
    for (const Load& load : barrier.loads) {
      bytes += load.bytes;
    }
    fault(
        "phase %u of the mbarrier at byte %u of shared memory completes while %lld bytes of TMA loads are still on "
        "their way to it: it was told to expect too few",
        barrier.phase, barrier.offset, static_cast<long long>(bytes));
  }
  ++barrier.phase;
  barrier.pending = barrier.count;
  const u32 index = index_of(barrier);
  arriving_at[index].begin();
  arriving_at[index].done.writer[kMaxThreads + index] = barrier.phase;
  completion_of[index].used = false;
  completion_of[index].join(arriving_at[index]);
  for (Thread* waiter : barrier.waiters) {
    wake(*waiter);
  }
  barrier.waiters.clear();
}

inline void expect(Barrier& barrier, u32 bytes) {
  barrier.expected += bytes;
  if (barrier.expected > kMaxTransaction) {
    fault("the mbarrier at byte %u of shared memory expects %lld bytes: at most %lld can be", barrier.offset,
          static_cast<long long>(barrier.expected), static_cast<long long>(kMaxTransaction));
  }
}

inline void arrive_at(Barrier& barrier) {
  if (barrier.pending == 0) {
    fault("arrives once more at the mbarrier at byte %u of shared memory, whose phase %u has had its %u arrivals",
          barrier.offset, barrier.phase, barrier.count);
  }
  release(*current, arriving_at[index_of(barrier)]);
  --barrier.pending;
  complete_if_done(barrier);
}

extern "C" void emulator_mbarrier_arrive(u32 address, u32 bytes) {
  Barrier& barrier = barrier_at(address, bytes == 0 ? "mbarrier.arrive" : "mbarrier.arrive.expect_tx");
  expect(barrier, bytes);
  arrive_at(barrier);
}

extern "C" void emulator_mbarrier_expect(u32 address, u32 bytes) {
  expect(barrier_at(address, "mbarrier.expect_tx"), bytes);
}

inline bool has_completed(const Barrier& barrier, u32 parity) {
  return barrier.phase % 2 != parity;
}

inline void observe(Barrier& barrier) {
  acquire(*current, completion_of[index_of(barrier)]);
  barrier.observed = barrier.phase;
}

inline Barrier& waited_for(u32 address, u32 parity, const char* instruction) {
  if (parity > 1) {
    fault("%s for parity %u: it is 0 or 1", instruction, parity);
  }
  return barrier_at(address, instruction);
}

extern "C" void emulator_mbarrier_wait(u32 address, u32 parity, const char* file, int line) {
  Barrier& barrier = waited_for(address, parity, "mbarrier.try_wait");
  Thread& me = *current;
  // A phase may complete and the next one too before a thread that waits for the first runs again: then it waits on.
  while (!has_completed(barrier, parity)) {
    barrier.waiters.push_back(&me);
    me.waiting = &barrier;
    me.parity = parity;
    me.waiting_at = {file, line};
    leave(*me.warp, me.fiber);
  }
  observe(barrier);
}

inline void deliver_one(Barrier& barrier) {
  const size_t index = random_bits() % barrier.loads.size();
  const Load load = barrier.loads[index];
  barrier.loads[index] = barrier.loads.back();
  barrier.loads.pop_back();
  --loads_in_flight;
  deliver(barrier, load);
  barrier.expected -= load.bytes;
  complete_if_done(barrier);
}

extern "C" bool emulator_mbarrier_test(u32 address, u32 parity) {
  Barrier& barrier = waited_for(address, parity, "mbarrier.test_wait");
  if (has_completed(barrier, parity)) {
    observe(barrier);
    return true;
  }
  // A loop of tests must not keep out what it waits for.
  if (!barrier.loads.empty() && barrier.pending == 0 && random_bits() % 4 == 0) {
    deliver_one(barrier);
  }
  Thread& me = *current;
  me.warp->ready |= 1u << me.warp->position_of(me.lane);
  switch_fiber(me.fiber, scheduler);
  return false;
}

// Brings all of one phase that threads wait for and that lacks nothing else.
inline bool deliver_latest() {
  u32 ready[kMaxBarriers], count = 0;
  for (u32 index = 0; index < num_barriers; ++index) {
    const Barrier& barrier = barriers[index];
    if (!barrier.loads.empty() && !barrier.waiters.empty() && barrier.pending == 0) {
      ready[count++] = index;
    }
  }
  if (count == 0) {
    return false;
  }
  Barrier& barrier = barriers[ready[random_bits() % count]];
  const u32 phase = barrier.phase;
  while (!barrier.loads.empty() && barrier.phase == phase) {
    deliver_one(barrier);
  }
  return true;
}

inline void deliver_early() {
  if (loads_in_flight == 0 || random_bits() % 4 != 0) {
    return;
  }
  const u32 start = static_cast<u32>(random_bits() % num_barriers);
  for (u32 step = 0; step < num_barriers; ++step) {
    Barrier& barrier = barriers[(start + step) % num_barriers];
    if (!barrier.loads.empty()) {
      current = &threads[barrier.thread];
      deliver_one(barrier);
      return;
    }
  }
}
