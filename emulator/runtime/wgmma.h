// wgmma: products of a warpgroup. Each warp has its 16 rows of D and of A, and all of B. Operands in shared memory are
// read, and accumulators written, at the wait: until then nobody may write the ones or touch the others.
#pragma once

#include "product.h"
#include "warpgroup.h"

struct Products {
  std::vector<Product> pending;
  u32 committed;
  bool fenced;  // since the last wait
};
inline Products products_of[kMaxWarps];

struct WgmmaRequest {
  float* d;
  u32 n;
  bool bfloat16;
  u64 a;
  const u32* a_registers;  // null: A is in shared memory
  u64 b;
  bool transposed_a;
  bool transposed_b;
  bool accumulate;
};

[[gnu::noinline]] inline void mark_units(const Warp& warp, const std::vector<u32>& units, u32 flag, u32 counter) {
  const Stamps& mine = reads[warp.index];
  const u32 stamp = flag | clocks[warp.index] << kLaneBits | kAnyLane;
  for (const u32 offset : units) {
    for (u32 cell = offset / kCellBytes; cell < (offset + 16) / kCellBytes; ++cell) {
      mine.stamp[cell] = stamp;
      mine.counter[cell] = counter;
    }
  }
}

inline void mark_products(const Warp& warp) {
  for (const Product& product : products_of[warp.index].pending) {
    mark_units(warp, product.a, kInFlight, product.counter);
    mark_units(warp, product.b, kInFlight, product.counter);
  }
}

// All lanes must know what is read.
[[gnu::noinline]] inline void check_units(const Warp& warp, const std::vector<u32>& units, const char* doing) {
  u32 last = 0;
  for (const u32 offset : units) {
    for (u32 cell = offset / kCellBytes; cell < (offset + 16) / kCellBytes; ++cell) {
      const u32 stamp = writes.stamp[cell];
      if (stamp == last || stamp == 0) {
        continue;
      }
      for (u32 lane = 0; lane < kWarpLanes; ++lane) {
        current = &warp.lanes[lane];
        const bool plain = !(stamp & kInFlight) && writer_of(stamp) < kMaxThreads;
        if (!plain || (stamp & kClockLimit) >= known[warp.index][writer_of(stamp) / kWarpLanes]) {
          check_stamp(*current, stamp, cell, doing);
        }
        check_fenced(*current, cell, doing);
      }
      last = stamp;
    }
  }
}

// Notes local variables as registers of a product. `fenced`: there was a wgmma.fence since the last wait.
[[gnu::noinline]] inline void use_registers(Thread& thread, const void* begin, u32 bytes, bool result, bool fenced,
                                            u32 counter) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin);
  Registers* found = nullptr;
  for (Registers& each : thread.registers) {
    if (each.begin == first && each.end == first + bytes && each.result == result) {
      found = &each;
    } else if (each.begin < first + bytes && first < each.end && each.in_flight != 0) {
      fault(
          "wgmma takes registers of which a part belongs to another wgmma that has not been waited for, issued at "
          "@%x@",
          each.counter);
    }
  }
  if (!found) {
    // Other variables that lay there are gone.
    for (size_t index = thread.registers.size(); index-- > 0;) {
      const Registers& each = thread.registers[index];
      if (each.begin < first + bytes && first < each.end) {
        thread.registers.erase(thread.registers.begin() + static_cast<i64>(index));
      }
    }
    thread.registers.push_back({first, first + bytes, 0, result, !fenced, 0});
    found = &thread.registers.back();
  }
  if (found->touched && found->in_flight == 0) {
    fault("wgmma takes registers that the thread has used, with no wgmma.fence since");
  }
  ++found->in_flight;
  found->counter = counter;
}

inline void free_registers(Thread& thread, const void* begin, bool result) {
  for (Registers& each : thread.registers) {
    if (each.begin == reinterpret_cast<uintptr_t>(begin) && each.result == result) {
      --each.in_flight;
    }
  }
}

inline u32 wgmma_counter = 0;  // of the last lane to come

inline void run_wgmma(Warp& warp) {
  const WgmmaRequest& request = payload_of<WgmmaRequest>(warp, 0);
  const u64 form = request.n | static_cast<u64>(request.accumulate) << 16 |
                   static_cast<u64>(request.a_registers != nullptr) << 17 |
                   static_cast<u64>(request.transposed_a) << 18 | static_cast<u64>(request.transposed_b) << 19;
  for (u32 lane = 1; lane < kWarpLanes; ++lane) {
    const WgmmaRequest& other = payload_of<WgmmaRequest>(warp, lane);
    if (other.a != request.a || other.b != request.b || other.accumulate != request.accumulate) {
      fault("wgmma at %s:%d has other operands in lane %u than in lane 0", warp.site.file, warp.site.line, lane);
    }
  }
  step(warp, request.a, request.b, form);
  Products& mine = products_of[warp.index];
  mine.pending.emplace_back();
  Product& product = mine.pending.back();
  product.n = request.n;
  product.group = mine.committed;
  product.counter = wgmma_counter;
  product.bfloat16 = request.bfloat16;
  product.transposed_a = request.transposed_a;
  product.transposed_b = request.transposed_b;
  product.accumulate = request.accumulate;
  product.a_in_registers = request.a_registers != nullptr;
  product.holds_sums = false;
  if (!product.a_in_registers) {
    const Descriptor a(request.a, "A");
    const u32 first = warp.index % kWarpgroupWarps * 16;
    for (u32 index = 0; index < 32; ++index) {  // rows and halves of K, or K and halves of rows
      product.a.push_back(product.transposed_a ? a.unit(true, index / 2, first / 8 + index % 2, "A")
                                               : a.unit(false, first + index / 2, index % 2, "A"));
    }
  }
  const Descriptor b(request.b, "B");
  for (u32 index = 0; index < 2 * request.n; ++index) {
    product.b.push_back(product.transposed_b ? b.unit(true, index / (request.n / 8), index % (request.n / 8), "B")
                                             : b.unit(false, index / 2, index % 2, "B"));
  }
  Thread* const last = current;
  check_units(warp, product.a, "wgmma reads A from");
  check_units(warp, product.b, "wgmma reads B from");
  const Product* before = nullptr;
  for (size_t index = 0; index + 1 < mine.pending.size(); ++index) {
    if (mine.pending[index].d[0] == request.d) {
      before = &mine.pending[index];
    }
  }
  if (before && before->n != product.n) {
    fault("wgmma of width %u adds to an accumulator of one of width %u that has not been waited for", product.n,
          before->n);
  }
  const u32 registers = product.n / 2;
  product.sums.resize(kWarpLanes * registers);
  product.holds_sums = product.accumulate && !before;
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    const WgmmaRequest& each = payload_of<WgmmaRequest>(warp, lane);
    current = &warp.lanes[lane];
    product.d[lane] = each.d;
    product.a_variables[lane] = each.a_registers;
    use_registers(*current, each.d, registers * sizeof(float), true, mine.fenced, product.counter);
    if (each.a_registers) {
      use_registers(*current, each.a_registers, 4 * sizeof(u32), false, mine.fenced, product.counter);
      memcpy(product.a_registers[lane], each.a_registers, 4 * sizeof(u32));
    }
    if (product.holds_sums) {
      memcpy(product.sums.data() + lane * registers, each.d, registers * sizeof(float));
    }
    memset(each.d, 0xff, registers * sizeof(float));
  }
  current = last;
  mark_units(warp, product.a, kInFlight, product.counter);
  mark_units(warp, product.b, kInFlight, product.counter);

  // The four warps go on together.
  Warpgroup& group = group_of(warp);
  warp.blocked = true;
  if (++group.arrived == kWarpgroupWarps) {
    group.arrived = 0;
    for (u32 each = 0; each < kWarpgroupWarps; ++each) {
      warps[warp.index / kWarpgroupWarps * kWarpgroupWarps + each].blocked = false;
    }
  }
}
inline const Operation kWgmma = {"wgmma", run_wgmma};

extern "C" void emulator_wgmma(float* d, u32 n, bool bfloat16, u64 a, const u32* a_registers, u64 b, bool transposed_a,
                               bool transposed_b, bool accumulate, const char* file, int line) {
  WgmmaRequest mine = {d, n, bfloat16, a, a_registers, b, transposed_a, transposed_b, accumulate};
  wgmma_counter = CALLER;
  arrive(kWgmma, &mine, {file, line});
}

struct Pending {
  u32 count;
};

inline void run_wgmma_wait(Warp& warp) {
  step(warp);
  Products& mine = products_of[warp.index];
  const u32 pending = payload_of<Pending>(warp, 0).count;
  mine.fenced = false;
  size_t done = 0;
  while (done < mine.pending.size() && mine.pending[done].group + pending < mine.committed) {
    Product& product = mine.pending[done++];
    multiply(product);
    Product* next = nullptr;
    for (size_t later = done; later < mine.pending.size() && !next; ++later) {
      next = mine.pending[later].d[0] == product.d[0] ? &mine.pending[later] : nullptr;
    }
    if (next) {
      next->sums = product.sums;
    }
    for (u32 lane = 0; lane < kWarpLanes; ++lane) {
      if (!next) {
        memcpy(product.d[lane], product.sums.data() + lane * product.n / 2, product.n / 2 * sizeof(float));
      }
      free_registers(warp.lanes[lane], product.d[lane], true);
      if (product.a_in_registers) {
        free_registers(warp.lanes[lane], product.a_variables[lane], false);
      }
    }
    mark_units(warp, product.a, 0, product.counter);
    mark_units(warp, product.b, 0, product.counter);
  }
  if (done != 0) {
    mine.pending.erase(mine.pending.begin(), mine.pending.begin() + static_cast<i64>(done));
    mark_products(warp);
    mark_stores(warp);
  }
}
inline const Operation kWgmmaWait = {"wgmma.wait_group", run_wgmma_wait};

inline void run_wgmma_commit(Warp& warp) {
  step(warp);
  ++products_of[warp.index].committed;
}
inline const Operation kWgmmaCommit = {"wgmma.commit_group", run_wgmma_commit};

inline void run_wgmma_fence(Warp& warp) {
  step(warp);
  products_of[warp.index].fenced = true;
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    for (Registers& each : warp.lanes[lane].registers) {
      each.touched = false;
    }
  }
}
inline const Operation kWgmmaFence = {"wgmma.fence", run_wgmma_fence};

extern "C" void emulator_wgmma_fence(const char* file, int line) {
  arrive(kWgmmaFence, nullptr, {file, line});
}
extern "C" void emulator_wgmma_commit(const char* file, int line) {
  arrive(kWgmmaCommit, nullptr, {file, line});
}
extern "C" void emulator_wgmma_wait(u32 pending, const char* file, int line) {
  Pending mine = {pending};
  arrive(kWgmmaWait, &mine, {file, line});
}
