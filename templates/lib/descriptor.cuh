// Where a wgmma finds a matrix in shared memory: the 64-bit matrix descriptor.
// (PTX ISA, "Asynchronous warpgroup-level matrix shared memory layout": matrix descriptor format, strides.)
//
//   bits  0-13  start address >> 4       bits 32-45  stride byte offset (SBO) >> 4
//   bits 16-29  leading byte offset (LBO) >> 4       bits 49-51  base offset, 0 here
//   bits 62-63  swizzle
//
// A swizzled tile is made of rows of W = 128, 64 or 32 bytes; eight of them are a pattern, which must start on a
// multiple of 8 W bytes. Byte b of it lies at b ^ (b >> 7 & (W / 16 - 1)) << 4 in absolute addresses. For 16-bit
// elements (A: 64 x 16, B: N x 16 of one instruction):
//
//   layout             a row holds                       SBO                  LBO
//   K-major, W         W / 2 of K, of one M or N         next 8 of M or N     not used
//   MN-major, W        W / 2 of M or N, of one K         next 8 of K          next W / 2 of M or N
//   K-major, none      8 of K; 8 rows are contiguous     next 8 of M or N     next 8 of K
//   MN-major, none     8 of M or N; 8 rows contiguous    next 8 of M or N     next 8 of K
//
// In a K-major row the next 16 of K are 32 bytes further: hardware permutes absolute addresses, so the start may lie
// inside of the first row.

#pragma once

// Codes of the descriptor: not those of tensor maps.
enum class MatrixSwizzle : u32 { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

template <int kRowBytes>
constexpr MatrixSwizzle kSwizzleOfRow = kRowBytes == 128  ? MatrixSwizzle::k128
                                        : kRowBytes == 64 ? MatrixSwizzle::k64
                                        : kRowBytes == 32 ? MatrixSwizzle::k32
                                                          : MatrixSwizzle::kNone;

constexpr __device__ __forceinline__ u64 matrix_descriptor(u32 start_smem, u32 leading_bytes, u32 stride_bytes,
                                                           MatrixSwizzle swizzle) {
  return static_cast<u64>((start_smem & 0x3ffffu) >> 4) | static_cast<u64>((leading_bytes & 0x3ffffu) >> 4) << 16 |
         static_cast<u64>((stride_bytes & 0x3ffffu) >> 4) << 32 | static_cast<u64>(swizzle) << 62;
}

// The descriptor of what lies `bytes` further. Only the lower word changes: the start stays below 2^18 bytes.
constexpr __device__ __forceinline__ u64 descriptor_plus(u64 descriptor, u32 bytes) {
  return descriptor + (bytes >> 4);
}
