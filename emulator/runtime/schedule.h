// Which thread runs when. A thread runs until it comes to an operation of its warp or block, or returns. All lanes of a
// warp must come to the same one; the last to come carries it out. The order of lanes, and for how many operations
// a warp stays ahead of the others, are random.
#pragma once

#include "memory.h"

struct Dim3 {
  u32 x, y, z;
};
// The kernel's built-in variables; constant as seen by one thread.
Dim3 threadIdx, blockIdx, blockDim, gridDim;

inline u32 blocked_warps = 0;
inline u32 returned_warps = 0;
inline const Operation* block_operation = nullptr;
inline Site block_site;
inline int block_votes = 0;   // true predicates of the barrier that fills
inline int block_result = 0;  // of the last one that was full
inline u64 burst = 0;         // operations until another warp may run
inline u64 longest_burst = 1;

// What the asynchronous parts of the block have to say (mbarrier.h, wgmma.h, tma.h).
inline bool deliver_latest();  // something that threads wait for; false if there is nothing
inline void deliver_early();   // perhaps something
inline void describe_waiting(char* text, size_t size);
inline void check_thread_end();  // of `current`
inline void check_warpgroup_end(u32 warp);
inline void start_asynchronous();  // before a block
inline void end_asynchronous();    // behind it

inline void resume(Warp& warp, Fiber& from) {
  const u32 position = static_cast<u32>(__builtin_ctz(warp.ready));
  warp.ready &= warp.ready - 1;
  Thread& next = warp.lanes[warp.lane_at(position)];
  if (&next.fiber == &from) {
    return;
  }
  current = &next;
  threadIdx.x = next.index;
  switch_fiber(from, next.fiber);
}

inline void leave(Warp& warp, Fiber& from) {
  if (warp.ready != 0) {
    resume(warp, from);
  } else {
    switch_fiber(from, scheduler);
  }
}

// Comes to `operation` and returns when it is done.
inline void arrive(const Operation& operation, void* payload, Site site) {
  Thread& me = *current;
  Warp& warp = *me.warp;
  me.payload = payload;
  if (warp.returned != 0) {
    fault("comes to %s at %s:%d, but %u threads of its warp have left the kernel", operation.name, site.file, site.line,
          warp.returned);
  }
  if (warp.arrived == 0) {
    warp.operation = &operation;
    warp.site = site;
  } else if (warp.operation != &operation || !(warp.site == site)) {
    fault("comes to %s at %s:%d, but %u threads of its warp wait for it at %s at %s:%d: the warp diverges",
          operation.name, site.file, site.line, warp.arrived, warp.operation->name, warp.site.file, warp.site.line);
  }
  if (++warp.arrived < kWarpLanes) {
    leave(warp, me.fiber);
    return;
  }
  warp.arrived = 0;
  warp.ready = kAllLanes;
  even(warp);
  operation.run(warp);
  if (warp.blocked || --burst == 0) {
    switch_fiber(me.fiber, scheduler);
  } else {
    warp.ready &= ~(1u << warp.position_of(me.lane));
  }
}

struct Predicate {
  int value;
};

// The barrier of the block: the last warp to come releases all.
inline void arrive_block(Warp& warp) {
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    block_votes += static_cast<Predicate*>(warp.lanes[lane].payload)->value != 0;
  }
  if (returned_warps != 0) {
    fault("comes to %s at %s:%d, but %u warps of its block have left the kernel", warp.operation->name, warp.site.file,
          warp.site.line, returned_warps);
  }
  if (blocked_warps == 0) {
    block_operation = warp.operation;
    block_site = warp.site;
  } else if (!(block_site == warp.site)) {
    fault("comes to %s at %s:%d, but %u warps wait for it at %s at %s:%d: the barrier diverges", warp.operation->name,
          warp.site.file, warp.site.line, blocked_warps, block_operation->name, block_site.file, block_site.line);
  }
  warp.blocked = true;
  if (++blocked_warps == num_warps) {
    blocked_warps = 0;
    for (u32 index = 0; index < num_warps; ++index) {
      warps[index].blocked = false;
    }
    block_result = block_votes;
    block_votes = 0;
    order_block();
  }
}

inline void thread_returned() {
  Warp& warp = *current->warp;
  if (warp.arrived != 0) {
    fault("leaves the kernel, but %u threads of its warp wait for it at %s at %s:%d", warp.arrived,
          warp.operation->name, warp.site.file, warp.site.line);
  }
  check_thread_end();
  if (++warp.returned == kWarpLanes) {
    ++returned_warps;
    check_warpgroup_end(warp.index);
    if (blocked_warps != 0) {
      fault("leaves the kernel, but %u warps wait for it at %s at %s:%d", blocked_warps, block_operation->name,
            block_site.file, block_site.line);
    }
  }
  leave(warp, current->fiber);
}

// The thread that a report of a deadlock is about: the first that has not returned.
inline Thread* first_waiting() {
  for (u32 index = 0; index < num_threads; ++index) {
    if (threads[index].waiting) {
      return &threads[index];
    }
  }
  return current;
}

inline void scramble_lanes(Warp& warp) {
  const u64 bits = random_bits();
  warp.scramble = static_cast<u32>(bits) | 1;
  warp.unscramble = 1;
  for (int step = 0; step < 5; ++step) {  // Newton: each step doubles the bits that are right
    warp.unscramble *= 2 - warp.scramble * warp.unscramble;
  }
  warp.shift = static_cast<u32>(bits >> 32);
}

// Runs one block from its first to its last thread.
inline void run_block(u64 number, FiberEntry entry) {
  block_number = number;
  blockIdx = {static_cast<u32>(number % gridDim.x), static_cast<u32>(number / gridDim.x % gridDim.y),
              static_cast<u32>(number / gridDim.x / gridDim.y)};
  memset(shared_memory, 0xff, shared_bytes);
  blocked_warps = returned_warps = 0;
  block_votes = 0;
  for (u32 index = 0; index < num_threads; ++index) {
    Thread& thread = threads[index];
    thread.copies.clear();
    thread.committed = thread.bulk_committed = 0;
    thread.stores.clear();
    thread.registers.clear();
    thread.ahead = 0;
    thread.waiting = nullptr;
    start_fiber(thread.fiber, entry);
  }
  for (u32 index = 0; index < num_warps; ++index) {
    Warp& warp = warps[index];
    warp.ready = kAllLanes;
    warp.arrived = warp.returned = 0;
    warp.blocked = warp.uneven = false;
  }
  order_start();
  start_asynchronous();
  const u64 choices[] = {1, 8, 1u << 30};
  longest_burst = choices[random_bits() % 3];
  const bool early = random_state >> 40 & 1;
  while (returned_warps < num_warps) {
    u32 runnable[kMaxWarps];
    u32 count = 0;
    for (u32 index = 0; index < num_warps; ++index) {
      if (!warps[index].blocked && warps[index].ready != 0) {
        runnable[count++] = index;
      }
    }
    if (count == 0) {
      if (deliver_latest()) {
        continue;
      }
      char text[3000] = "";
      describe_waiting(text, sizeof text);
      current = first_waiting();
      fault("nothing can run any more: deadlock%s", text);
    }
    if (early) {
      deliver_early();
    }
    Warp& warp = warps[runnable[random_bits() % count]];
    if (warp.ready == kAllLanes) {
      scramble_lanes(warp);
    }
    burst = longest_burst == 1 ? 1 : 1 + random_bits() % longest_burst;
    resume(warp, scheduler);
  }
  end_asynchronous();
  for (u32 index = 0; index < num_threads; ++index) {
    for (const Copy& copy : threads[index].copies) {  // never waited for: they go down with the block
      memset(writes.stamp + copy.target / kCellBytes, 0, copy.bytes / kCellBytes * sizeof(u32));
    }
  }
}
