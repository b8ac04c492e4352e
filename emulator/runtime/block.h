// Where a block begins and ends, and what a report of a deadlock says of it.
#pragma once

#include "wgmma.h"

inline void check_thread_end() {
  for (const Store& store : current->stores) {
    if (!store.read) {
      fault("leaves the kernel while its TMA store, started at @%x@, has yet to read shared memory", store.counter);
    }
  }
}

inline void check_warpgroup_end(u32 warp) {
  if (!products_of[warp].pending.empty()) {
    fault("leaves the kernel with a wgmma that has not been waited for, issued at @%x@",
          products_of[warp].pending.front().counter);
  }
  const u32 start = warp / kWarpgroupWarps * kWarpgroupWarps;
  bool all = true;
  for (u32 each = start; each < start + kWarpgroupWarps && each < num_warps; ++each) {
    all &= warps[each].returned == kWarpLanes;
  }
  const Warpgroup& group = warpgroups[warp / kWarpgroupWarps];
  if (all && !group.steps.empty()) {
    const Step& missed = group.steps.back();
    fault("leaves the kernel, but a warp of its warpgroup came to %s at %s:%d and not all others did",
          missed.operation->name, missed.site.file, missed.site.line);
  }
}

inline void start_asynchronous() {
  loads_in_flight = 0;
  for (NamedBarrier& barrier : named_barriers) {
    barrier.arrived = 0;
    barrier.blocked.clear();
    barrier.message.used = false;
  }
  for (Warpgroup& group : warpgroups) {
    group.steps.clear();
    group.arrived = group.registers = 0;
  }
  memset(steps_of, 0, sizeof steps_of);
  for (Products& products : products_of) {
    products.pending.clear();
    products.committed = 0;
    products.fenced = false;
  }
}

inline void end_asynchronous() {
  for (u32 index = 0; index < num_barriers; ++index) {
    const Barrier& barrier = barriers[index];
    if (!barrier.alive) {
      continue;
    }
    if (!barrier.loads.empty()) {
      current = &threads[barrier.thread];
      fault("the block ends while a TMA load to byte %u of shared memory, started at @%x@, is still on its way to it",
            barrier.loads[0].target, writes.counter[barrier.loads[0].target / kCellBytes]);
    }
    if (barrier.loaded > barrier.observed) {
      current = &threads[barrier.thread];
      fault(
          "the block ends, and nobody has waited for the TMA loads of phase %u of the mbarrier at byte %u of shared "
          "memory, initialised at @%x@",
          barrier.loaded - 1, barrier.offset, writes.counter[barrier.offset / kCellBytes]);
    }
  }
  for (u32 index = 0; index < num_barriers; ++index) {
    barrier_here[barriers[index].offset / 8] = 0;
  }
  for (u32 index = 0; index < num_threads; ++index) {
    for (const Store& store : threads[index].stores) {
      write_target(store);
    }
  }
}

inline void describe_waiting(char* text, size_t size) {
  int length = 0;
  const auto add = [&](const char* format, auto... values) {
    if (length >= 0 && static_cast<size_t>(length) < size) {
      length += snprintf(text + length, size - static_cast<size_t>(length), format, values...);
    }
  };
  for (u32 index = 0; index < num_barriers; ++index) {
    const Barrier& barrier = barriers[index];
    for (u32 parity = 0; parity < 2; ++parity) {
      u32 count = 0, first = 0;
      for (u32 thread = 0; thread < num_threads; ++thread) {
        if (threads[thread].waiting == &barrier && threads[thread].parity == parity && count++ == 0) {
          first = thread;
        }
      }
      if (count != 0) {
        const Site& at = threads[first].waiting_at;
        add("; %u threads from %u on wait at %s:%d for parity %u of the mbarrier at byte %u, whose phase %u lacks %u "
            "of %u arrivals and %lld bytes (%zu TMA loads are on their way)",
            count, first, at.file, at.line, parity, barrier.offset, barrier.phase, barrier.pending, barrier.count,
            static_cast<long long>(barrier.expected), barrier.loads.size());
      }
    }
  }
  for (u32 id = 0; id < kNamedBarriers; ++id) {
    const NamedBarrier& barrier = named_barriers[id];
    if (!barrier.blocked.empty()) {
      add("; %zu warps from warp %u on wait at named barrier %u, %s:%d, which has %u of %u threads",
          barrier.blocked.size(), barrier.blocked[0]->index, id, barrier.blocked[0]->site.file,
          barrier.blocked[0]->site.line, barrier.arrived, barrier.threads);
    }
  }
  for (u32 index = 0; index < kMaxWarpgroups; ++index) {
    if (warpgroups[index].arrived != 0) {
      add("; %u warps of warpgroup %u wait for the others at a wgmma", warpgroups[index].arrived, index);
    }
  }
  for (u32 index = 0; index < num_warps; ++index) {
    if (warps[index].arrived != 0) {
      add("; %u threads of warp %u wait for the others at %s, %s:%d", warps[index].arrived, index,
          warps[index].operation->name, warps[index].site.file, warps[index].site.line);
    }
  }
  if (blocked_warps != 0) {
    add("; %u warps wait at %s, %s:%d", blocked_warps, block_operation->name, block_site.file, block_site.line);
  }
}
