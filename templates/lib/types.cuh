// Names for the types that kernels use. No CUDA header is included anywhere: NVRTC finds none without a toolkit.

#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

// 16-bit floats are carried as bits; conversions are in ptx.cuh.
struct Half {
  u16 bits;
};
struct BFloat16 {
  u16 bits;
};

// A constant as an argument: one loop body, compiled with and without masks.
template <bool kValue>
struct Flag {
  static constexpr bool value = kValue;
};

constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float negative_infinity() {
  return __int_as_float(0xff800000);
}
