// wgmma: products of a warpgroup. Each warp has its 16 rows of D and of A, and all of B. Operands in shared memory are
// read, and accumulators written, at the wait: until then nobody may write the ones or touch the others.
#pragma once

#include "warpgroup.h"

// A matrix descriptor, as the hardware decodes it (templates/lib/descriptor.cuh has the table).
struct Descriptor {
  u32 start;
  u32 leading;
  u32 stride;
  u32 row_bytes;  // swizzled rows; 0: none

  explicit Descriptor(u64 bits, const char* operand) {
    start = static_cast<u32>(bits & 0x3fff) << 4;
    leading = static_cast<u32>(bits >> 16 & 0x3fff) << 4;
    stride = static_cast<u32>(bits >> 32 & 0x3fff) << 4;
    const u32 widths[] = {0, 128, 64, 32};
    row_bytes = widths[bits >> 62];
    if (bits & ~0xc0003fff3fff3fffu) {
      fault("the descriptor %llx of %s has bits set that are not modelled (base offset, or none of its fields)",
            static_cast<unsigned long long>(bits), operand);
    }
    if (row_bytes != 0 && start % (8 * row_bytes) >= row_bytes) {
      fault(
          "the descriptor %llx of %s starts at byte %d of shared memory, in row %u of a swizzle pattern: it must be "
          "row 0, whose address is a multiple of %u",
          static_cast<unsigned long long>(bits), operand, static_cast<int>(start - kSharedBase),
          start % (8 * row_bytes) / row_bytes, 8 * row_bytes);
    }
  }

  // 16 bytes: 8 of the contiguous dimension from 8 * `major` on, at `minor` of the other one.
  u32 unit(bool transposed, u32 minor, u32 major, const char* operand) const {
    u32 address = start;
    if (row_bytes != 0 && !transposed) {
      address += minor % 8 * row_bytes + minor / 8 * stride + major * 16;
    } else if (row_bytes != 0) {
      const u32 units = row_bytes / 16;
      address += minor % 8 * row_bytes + minor / 8 * stride + major % units * 16 + major / units * leading;
    } else if (!transposed) {
      address += minor % 8 * 16 + minor / 8 * stride + major * leading;
    } else {
      address += minor % 8 * 16 + minor / 8 * leading + major * stride;
    }
    address = swizzled(address, row_bytes);
    const u32 offset = address - kSharedBase;
    if (offset >= shared_bytes || 16 > shared_bytes - offset) {
      fault("wgmma reads %s at byte %d of shared memory, beyond the %u bytes of the launch", operand,
            static_cast<int>(offset), shared_bytes);
    }
    return offset;
  }
};

// One wgmma as one warp does its part.
struct Product {
  u32 n;
  u32 group;
  u32 counter;
  bool bfloat16;
  bool transposed_a;
  bool transposed_b;
  bool accumulate;
  bool a_in_registers;
  std::vector<u32> a;              // offsets of units in shared memory
  std::vector<u32> b;              // likewise
  u32 a_registers[kWarpLanes][4];  // as they were when it was issued
  const u32* a_variables[kWarpLanes];
  float* d[kWarpLanes];
  std::vector<float> sums;  // [lane][n / 2]: what it adds to, if it adds
  bool holds_sums;
};
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

[[gnu::noinline]] inline void gather(const Product& product, const std::vector<u32>& units, bool transposed, u32 count,
                                     u32 stride, double* target) {
  // target[k * stride + i] for i of M or N: units are 8 of K of one i, or 8 of i of one K.
  for (u32 index = 0; index < units.size(); ++index) {
    u16 values[8];
    memcpy(values, shared_memory + units[index], sizeof values);
    for (u32 each = 0; each < 8; ++each) {
      const u32 k = transposed ? index / (count / 8) : index % 2 * 8 + each;
      const u32 i = transposed ? index % (count / 8) * 8 + each : index / 2;
      target[k * stride + i] = element_value(values[each], product.bfloat16);
    }
  }
}

// D of one warp: exact sums of 16 products and what they are added to, then cut off, as for mma.
inline void multiply(Product& product) {
  const u32 n = product.n;
  double a[16 * 16], d[16 * 256], b[16 * 256];  // [k][row], [row][column], [k][column]
  if (product.a_in_registers) {
    for (u32 lane = 0; lane < kWarpLanes; ++lane) {
      const u32 row = lane / 4, pair = 2 * (lane % 4);
      for (u32 word = 0; word < 4; ++word) {
        for (u32 half = 0; half < 2; ++half) {
          const u16 bits = static_cast<u16>(product.a_registers[lane][word] >> 16 * half);
          a[(pair + half + word / 2 * 8) * 16 + row + word % 2 * 8] = element_value(bits, product.bfloat16);
        }
      }
    }
  } else {
    gather(product, product.a, product.transposed_a, 16, 16, a);
  }
  gather(product, product.b, product.transposed_b, n, n, b);
  const auto place = [](u32 lane, u32 index) {  // row and column of a register
    return std::pair<u32, u32>(lane / 4 + index / 2 % 2 * 8, index / 4 * 8 + 2 * (lane % 4) + index % 2);
  };
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    for (u32 index = 0; index < n / 2; ++index) {
      const auto [row, column] = place(lane, index);
      d[row * n + column] = product.accumulate ? product.sums[lane * n / 2 + index] : 0.0;
    }
  }
  for (u32 row = 0; row < 16; ++row) {
    for (u32 k = 0; k < 16; ++k) {
      for (u32 column = 0; column < n; ++column) {
        d[row * n + column] += a[k * 16 + row] * b[k * n + column];
      }
    }
  }
  for (u32 lane = 0; lane < kWarpLanes; ++lane) {
    for (u32 index = 0; index < n / 2; ++index) {
      const auto [row, column] = place(lane, index);
      product.sums[lane * n / 2 + index] = cut_off(d[row * n + column]);
    }
  }
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
