// One wgmma as one warp does its part: where its operands lie, as descriptors say, and what it computes. When they are
// read, and who may touch them until then, is in wgmma.h.
#pragma once

#include "matrices.h"
#include "tma.h"

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
