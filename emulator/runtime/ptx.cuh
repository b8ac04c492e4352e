// The functions of templates/lib/ptx.cuh for the host, which takes this file in its place: the same names and
// parameters. What moves data between threads or waits is in the runtime; conversions are computed here, bit by bit.

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void cp_async_16(u32 target_smem, const void* source_gmem, bool valid) {
  emulator_copy_async(target_smem, source_gmem, 16, valid ? 16 : 0);
}

__device__ __forceinline__ void cp_async_commit() {
  emulator_copy_commit();
}

template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  emulator_copy_wait(kPending);
}

__device__ __forceinline__ void ldmatrix_x4(u32 (&fragment)[4], u32 row_smem, EMULATOR_SITE) {
  const EmulatorWords loaded = emulator_ldmatrix(row_smem, false, file, line);
  for (int word = 0; word < 4; ++word) {
    fragment[word] = loaded.word[word];
  }
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&fragment)[4], u32 row_smem, EMULATOR_SITE) {
  const EmulatorWords loaded = emulator_ldmatrix(row_smem, true, file, line);
  for (int word = 0; word < 4; ++word) {
    fragment[word] = loaded.word[word];
  }
}

__device__ __forceinline__ void emulator_multiply(bool bfloat16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                  const char* file, int line) {
  const EmulatorFloats sum =
      emulator_mma(bfloat16, {d[0], d[1], d[2], d[3]}, a[0], a[1], a[2], a[3], b0, b1, file, line);
  for (int entry = 0; entry < 4; ++entry) {
    d[entry] = sum.value[entry];
  }
}

template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATOR_SITE);

template <>
__device__ __forceinline__ void mma_m16n8k16<Half>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const char* file,
                                                   int line) {
  emulator_multiply(false, d, a, b0, b1, file, line);
}

template <>
__device__ __forceinline__ void mma_m16n8k16<BFloat16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                       const char* file, int line) {
  emulator_multiply(true, d, a, b0, b1, file, line);
}

// Denormal numbers count as 0, on both sides.
__device__ __forceinline__ float exp2_approx(float x) {
  const float power = __builtin_exp2f(x);
  return power < 1.17549435e-38f ? 0.0f : power;
}

__device__ __forceinline__ float to_float(Half x) {
  const u32 sign = static_cast<u32>(x.bits & 0x8000u) << 16;
  const u32 magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity or NaN
    return __builtin_bit_cast(float, sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  }
  const float scaled = __builtin_bit_cast(float, magnitude << 13) * 0x1p112f;  // exact, denormal numbers too
  return __builtin_bit_cast(float, sign | __builtin_bit_cast(u32, scaled));
}

__device__ __forceinline__ float to_float(BFloat16 x) {
  return __builtin_bit_cast(float, static_cast<u32>(x.bits) << 16);
}

__device__ __forceinline__ float to_float(float x) {
  return x;
}

// Rounds to nearest even.
template <typename T>
__device__ __forceinline__ T from_float(float x);

template <>
__device__ __forceinline__ Half from_float<Half>(float x) {
  const u32 bits = __builtin_bit_cast(u32, x);
  const u32 sign = bits >> 16 & 0x8000u;
  const u32 magnitude = bits & 0x7fffffffu;
  u32 rounded;
  if (magnitude > 0x7f800000u) {
    return Half{0x7fff};  // NaN
  } else if (magnitude >= 0x477ff000u) {
    rounded = 0x7c00;  // from 65520 on
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 leaves units of 2^-24 in the last place, rounded to even.
    rounded = __builtin_bit_cast(u32, __builtin_bit_cast(float, magnitude) + 0.5f) - 0x3f000000u;
  } else {
    rounded = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return Half{static_cast<u16>(sign | rounded)};
}

template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float x) {
  const u32 bits = __builtin_bit_cast(u32, x);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return BFloat16{static_cast<u16>(is_nan ? 0x7fffu : rounded)};
}

template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}

template <typename Element>
__device__ __forceinline__ u32 pack(float low, float high);

template <>
__device__ __forceinline__ u32 pack<Half>(float low, float high) {
  return from_float<Half>(low).bits | static_cast<u32>(from_float<Half>(high).bits) << 16;
}

template <>
__device__ __forceinline__ u32 pack<BFloat16>(float low, float high) {
  return from_float<BFloat16>(low).bits | static_cast<u32>(from_float<BFloat16>(high).bits) << 16;
}
