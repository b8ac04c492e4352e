// What comes before what: clocks of warps, and what each thread knows of the others.
//
// Barriers of whole warps and blocks use `known` alone. Whoever arrives at or waits for an mbarrier, or fences the
// asynchronous proxy, does so as one thread: what it knows beyond its warp is in `thread_knowledge`.
#pragma once

#include "state.h"

constexpr u32 kMaxBarriers = 128;                     // mbarriers of a block
constexpr u32 kWriters = kMaxThreads + kMaxBarriers;  // threads; and TMA, once for each mbarrier
constexpr u32 kBarrierItself = kWriters;              // "wrote" the 8 bytes of an mbarrier
constexpr u32 kWriterBits = 11;
constexpr u32 kClockBits = 20;
constexpr u32 kClockLimit = (1u << kClockBits) - 1;
static_assert(kBarrierItself < 1u << kWriterBits && kWriterBits + kClockBits == 31, "a stamp is 32 bits");

inline u32 clocks[kMaxWarps];
inline u32 known[kMaxWarps][kMaxWarps];  // known[w][a]: warp w comes after what warp a did before this clock
inline u32 num_barriers = 0;             // mbarriers that the block has initialised

// Everything that a warp, or a writer, did before a clock. Of TMA the clock is a phase of its mbarrier.
struct Clocks {
  u32 warp[kMaxWarps];
  u32 writer[kWriters];

  bool cover(u32 by, u32 clock) const {
    return clock < writer[by] || (by < kMaxThreads && clock < warp[by / kWarpLanes]);
  }
  [[gnu::noinline]] void clear() {
    memset(warp, 0, sizeof warp);
    memset(writer, 0, num_threads * sizeof(u32));
    memset(writer + kMaxThreads, 0, sizeof(u32) * kMaxBarriers);
  }
  [[gnu::noinline]] void join(const Clocks& other) {
    raise(warp, other.warp, num_warps);
    raise(writer, other.writer, num_threads);
    raise(writer + kMaxThreads, other.writer + kMaxThreads, num_barriers);
  }
  [[gnu::noinline]] static void raise(u32* target, const u32* source, u32 count) {
    for (u32 index = 0; index < count; ++index) {
      target[index] = target[index] > source[index] ? target[index] : source[index];
    }
  }
};

struct Knowledge {
  bool used = false;
  Clocks done;    // comes before
  Clocks fenced;  // and is seen by TMA and wgmma

  void begin() {
    if (!used) {
      done.clear();
      fenced.clear();
      used = true;
    }
  }
  [[gnu::noinline]] void join(const Knowledge& other) {
    if (other.used) {
      begin();
      done.join(other.done);
      fenced.join(other.fenced);
    }
  }
};
inline Knowledge warp_knowledge[kMaxWarps];
inline Knowledge thread_knowledge[kMaxThreads];
inline bool anyone_knows_more = false;  // whether any of these is used

inline void tick(u32 warp, u32 steps) {
  if ((clocks[warp] += steps) > kClockLimit) {
    fault("the emulator counts at most %u barriers", kClockLimit);
  }
}

// The clock of a thread runs ahead of its warp's when the thread lets others go on; together again, they agree.
inline u32 clock_of(const Thread& thread) {
  return clocks[thread.warp->index] + thread.ahead;
}
inline void run_ahead(Thread& thread) {
  ++thread.ahead;
  thread.warp->uneven = true;
}
[[gnu::noinline]] inline void make_even(Warp& warp) {
  u32 most = 0;
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    most = warp.lanes[lane].ahead > most ? warp.lanes[lane].ahead : most;
    warp.lanes[lane].ahead = 0;
  }
  warp.uneven = false;
  tick(warp.index, most);
}

inline void even(Warp& warp) {
  if (warp.uneven) {
    make_even(warp);
  }
}

[[gnu::noinline]] inline bool knows(const Thread& thread, u32 writer, u32 clock) {
  const u32 warp = thread.warp->index;
  return (writer < kMaxThreads && clock < known[warp][writer / kWarpLanes]) ||
         (warp_knowledge[warp].used && warp_knowledge[warp].done.cover(writer, clock)) ||
         (thread_knowledge[thread.index].used && thread_knowledge[thread.index].done.cover(writer, clock));
}

[[gnu::noinline]] inline bool knows_fenced(const Thread& thread, u32 writer, u32 clock) {
  const u32 warp = thread.warp->index;
  return (warp_knowledge[warp].used && warp_knowledge[warp].fenced.cover(writer, clock)) ||
         (thread_knowledge[thread.index].used && thread_knowledge[thread.index].fenced.cover(writer, clock));
}

// What `thread` has done and knows becomes part of `message`.
inline void release(Thread& thread, Knowledge& message) {
  const u32 warp = thread.warp->index;
  message.begin();
  Clocks::raise(message.done.warp, known[warp], num_warps);
  message.join(warp_knowledge[warp]);
  message.join(thread_knowledge[thread.index]);
  message.done.writer[thread.index] = clock_of(thread) + 1;
  run_ahead(thread);
}

inline void acquire(Thread& thread, const Knowledge& message) {
  if (message.used) {
    thread_knowledge[thread.index].join(message);
    anyone_knows_more = true;
  }
}

// What `thread` has written is seen by the asynchronous proxy from here on. What others have written is not, even where
// a barrier orders it: the fence belongs in the thread that writes.
inline void fence_async(Thread& thread) {
  Knowledge& mine = thread_knowledge[thread.index];
  mine.begin();
  anyone_knows_more = true;
  mine.fenced.writer[thread.index] = clock_of(thread) + 1;
  run_ahead(thread);
}

// What the lanes of a warp know, all of them know from here on.
[[gnu::noinline]] inline void pool(Warp& warp) {
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    Knowledge& mine = thread_knowledge[warp.lanes[lane].index];
    warp_knowledge[warp.index].join(mine);
    mine.used = false;
  }
}

inline void order_warp(Warp& warp) {
  even(warp);
  tick(warp.index, 1);
  known[warp.index][warp.index] = clocks[warp.index];
  if (anyone_knows_more) {
    pool(warp);
  }
}

// A barrier of the block: everything so far comes before everything that follows.
inline void order_block() {
  for (u32 warp = 0; warp < num_warps; ++warp) {
    even(warps[warp]);
    tick(warp, 1);
  }
  for (u32 warp = 0; warp < num_warps; ++warp) {
    memcpy(known[warp], clocks, sizeof clocks);
  }
  if (!anyone_knows_more) {
    return;
  }
  for (u32 warp = 0; warp < num_warps; ++warp) {
    pool(warps[warp]);
    warp_knowledge[0].join(warp_knowledge[warp]);
  }
  for (u32 warp = 1; warp < num_warps; ++warp) {
    warp_knowledge[warp].join(warp_knowledge[0]);
  }
}

// Nothing happened yet.
inline void forget_order() {
  memset(clocks, 0, sizeof clocks);
  for (u32 warp = 0; warp < num_warps; ++warp) {
    warp_knowledge[warp].used = false;
  }
  for (u32 thread = 0; thread < num_threads; ++thread) {
    thread_knowledge[thread].used = false;
  }
  anyone_knows_more = false;
}
