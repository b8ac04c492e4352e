// Matrices of a warp: ldmatrix, stmatrix and mma (declared in device.h), and how tensor cores multiply, also for wgmma.
#pragma once

#include <cmath>

#include "operations.h"

struct EmulatorWords {
  u32 word[4];
};
struct EmulatorFloats {
  float value[4];
};

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
