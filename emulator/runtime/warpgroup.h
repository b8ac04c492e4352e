// What warpgroups and other parts of a block do together: named barriers, setmaxnreg, and the order of operations that
// all four warps of a warpgroup must come to (wgmma.h has the products).
#pragma once

#include "tma.h"

constexpr u32 kWarpgroupWarps = 4;
constexpr u32 kMaxWarpgroups = kMaxWarps / kWarpgroupWarps;
constexpr u32 kNamedBarriers = 16;
constexpr u32 kRegisterFile = 65536;

// ---- Named barriers ----
struct NamedBarrier {
  u32 threads;  // that it takes; 0: nobody has come
  u32 arrived;
  Site site;  // of the first
  std::vector<Warp*> blocked;
  Knowledge message;
};
inline NamedBarrier named_barriers[kNamedBarriers];

struct Part {
  u32 id;
  u32 threads;
};

inline void come_to_part(Warp& warp, bool waits) {
  const Part part = payload_of<Part>(warp, 0);
  const char* what = warp.operation->name;
  for (u32 lane = 1; lane < kWarpLanes; ++lane) {
    const Part& other = payload_of<Part>(warp, lane);
    if (other.id != part.id || other.threads != part.threads) {
      fault("%s %u for %u threads and %u for %u threads in one warp", what, part.id, part.threads, other.id,
            other.threads);
    }
  }
  if (part.id == 0 || part.id >= kNamedBarriers) {
    fault("%s %u: 1 to 15 can be (0 is __syncthreads)", what, part.id);
  }
  if (part.threads == 0 || part.threads % kWarpLanes != 0 || part.threads > num_threads) {
    fault("%s %u for %u threads: whole warps of the block's %u can be", what, part.id, part.threads, num_threads);
  }
  NamedBarrier& barrier = named_barriers[part.id];
  if (barrier.arrived == 0) {
    barrier.threads = part.threads;
    barrier.site = warp.site;
  } else if (barrier.threads != part.threads) {
    fault("%s %u for %u threads at %s:%d, but %u threads wait there for %u, the first at %s:%d", what, part.id,
          part.threads, warp.site.file, warp.site.line, barrier.arrived, barrier.threads, barrier.site.file,
          barrier.site.line);
  }
  for (const Warp* other : barrier.blocked) {
    if (other == &warp) {
      fault("%s %u twice by one warp", what, part.id);
    }
  }
  order_warp(warp);
  barrier.message.begin();
  Clocks::raise(barrier.message.done.warp, known[warp.index], num_warps);
  barrier.message.join(warp_knowledge[warp.index]);
  if (waits) {
    barrier.blocked.push_back(&warp);
    warp.blocked = true;
  }
  if ((barrier.arrived += kWarpLanes) < barrier.threads) {
    return;
  }
  for (Warp* each : barrier.blocked) {
    Clocks::raise(known[each->index], barrier.message.done.warp, num_warps);
    warp_knowledge[each->index].join(barrier.message);
    anyone_knows_more = true;
    each->blocked = false;
  }
  barrier.blocked.clear();
  barrier.arrived = 0;
  barrier.message.used = false;
}
inline const Operation kPartSync = {"named barrier (bar.sync)", [](Warp& warp) { come_to_part(warp, true); }};
inline const Operation kPartArrive = {"named barrier (bar.arrive)", [](Warp& warp) { come_to_part(warp, false); }};

extern "C" void emulator_named_barrier(u32 id, u32 threads, bool waits, const char* file, int line) {
  Part mine = {id, threads};
  arrive(waits ? kPartSync : kPartArrive, &mine, {file, line});
}

// ---- One lane ----
inline void run_elect(Warp& warp) {
  // The same lane at every call, which need not be the first.
  const u32 elected = static_cast<u32>(random_seed * 0x9e3779b97f4a7c15u >> 59);
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    payload_of<Predicate>(warp, lane).value = lane == elected;
  }
}
inline const Operation kElect = {"elect.sync", run_elect};

extern "C" bool emulator_elect(const char* file, int line) {
  Predicate mine = {0};
  arrive(kElect, &mine, {file, line});
  return mine.value != 0;
}

// ---- Warpgroups ----
// One operation as the first warp to come to it did it.
struct Step {
  const Operation* operation;
  Site site;
  u64 details[3];
};
struct Warpgroup {
  std::vector<Step> steps;
  u32 arrived;    // warps at the product that all four must come to
  u32 registers;  // as setmaxnreg last set them; 0: as the kernel started
};
inline Warpgroup warpgroups[kMaxWarpgroups];
inline size_t steps_of[kMaxWarps];  // how many operations of its warpgroup each warp has come to

inline Warpgroup& group_of(const Warp& warp) {
  return warpgroups[warp.index / kWarpgroupWarps];
}

// Checks that the other warps of the warpgroup do the same.
inline void step(Warp& warp, u64 first = 0, u64 second = 0, u64 third = 0) {
  const u32 start = warp.index / kWarpgroupWarps * kWarpgroupWarps;
  if (start + kWarpgroupWarps > num_warps) {
    fault("comes to %s, but its warpgroup has only %u warps", warp.operation->name, num_warps - start);
  }
  Warpgroup& group = group_of(warp);
  const size_t number = steps_of[warp.index]++;
  if (number == group.steps.size()) {
    group.steps.push_back({warp.operation, warp.site, {first, second, third}});
    return;
  }
  const Step& before = group.steps[number];
  if (before.operation != warp.operation || !(before.site == warp.site)) {
    fault("comes to %s at %s:%d, where another warp of its warpgroup came to %s at %s:%d: the warpgroup diverges",
          warp.operation->name, warp.site.file, warp.site.line, before.operation->name, before.site.file,
          before.site.line);
  }
  if (before.details[0] != first || before.details[1] != second || before.details[2] != third) {
    fault(
        "comes to %s at %s:%d with other operands (%llx, %llx, %llx) than another warp of its warpgroup (%llx, %llx, "
        "%llx)",
        warp.operation->name, warp.site.file, warp.site.line, static_cast<unsigned long long>(first),
        static_cast<unsigned long long>(second), static_cast<unsigned long long>(third),
        static_cast<unsigned long long>(before.details[0]), static_cast<unsigned long long>(before.details[1]),
        static_cast<unsigned long long>(before.details[2]));
  }
  bool all = true;
  for (u32 each = 0; each < kWarpgroupWarps; ++each) {
    all &= steps_of[start + each] == group.steps.size();
  }
  if (all) {
    group.steps.clear();
    memset(steps_of + start, 0, kWarpgroupWarps * sizeof *steps_of);
  }
}

// ---- setmaxnreg: checked, and without effect ----
inline void run_setmaxnreg(Warp& warp) {
  const u32 registers = payload_of<Part>(warp, 0).threads;
  step(warp, registers);
  if (registers < 24 || registers > 256 || registers % 8 != 0) {
    fault("setmaxnreg to %u registers: a multiple of 8 from 24 to 256 can be", registers);
  }
  group_of(warp).registers = registers;
  const u32 groups = (num_warps + kWarpgroupWarps - 1) / kWarpgroupWarps;
  const u32 lanes = kWarpgroupWarps * kWarpLanes;
  u32 taken = 0, set = 0;
  for (u32 each = 0; each < groups; ++each) {
    taken += warpgroups[each].registers * lanes;
    set += warpgroups[each].registers != 0;
  }
  if (taken > kRegisterFile || (set == groups && taken > kRegisterFile / num_threads / 8 * 8 * groups * lanes)) {
    fault(
        "setmaxnreg to %u registers: the warpgroups of the block now ask for %u, more than the %u that it started "
        "with",
        registers, taken, kRegisterFile / num_threads / 8 * 8 * groups * lanes);
  }
}
inline const Operation kSetRegistersLess = {"setmaxnreg.dec", run_setmaxnreg};
inline const Operation kSetRegistersMore = {"setmaxnreg.inc", run_setmaxnreg};

extern "C" void emulator_setmaxnreg(u32 registers, bool more, const char* file, int line) {
  Part mine = {0, registers};
  arrive(more ? kSetRegistersMore : kSetRegistersLess, &mine, {file, line});
}
