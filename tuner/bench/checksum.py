"""Sums over device memory that tell whether any of it has changed: whole tensors need not come to the host for that."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from flashtune.codegen.compiler.kernel_cache import compiled
from flashtune.codegen.compiler.render import Source
from flashtune.codegen.gpu.cuda import Module, driver, runtime
from flashtune.codegen.gpu.gpu import Gpu

from .memory import Arena, download

MOST = 32
"""Sums that can be asked for at once."""

# Each 16-byte word is mixed with its place, so that words which change places count as a change. Whole numbers are
# added, so that the order of threads does not matter. What is left of the last word is read byte by byte.
_TEXT = """\
typedef unsigned long long u64;

struct Memory {
  const unsigned char* data;  // aligned to 16 bytes
  u64 size;                   // bytes
  u64* sum;
};

struct __align__(16) Word {
  u64 low;
  u64 high;
};

// The last steps of splitmix64: each bit of the result depends on each bit of the value.
__device__ __forceinline__ u64 mixed(u64 value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

extern "C" __global__ void __launch_bounds__(256) checksum(const Memory memory) {
  const u64 thread = u64(blockIdx.x) * blockDim.x + threadIdx.x;
  const u64 threads = u64(gridDim.x) * blockDim.x;
  const u64 words = memory.size / sizeof(Word);
  const Word* data = reinterpret_cast<const Word*>(memory.data);

  u64 sum = 0;
  for (u64 index = thread; index < words; index += threads) {
    const Word word = data[index];
    sum += mixed(word.low + mixed(word.high + (index + 1) * 0x9e3779b97f4a7c15ull));
  }
  if (thread == 0) {
    for (u64 at = words * sizeof(Word); at < memory.size; ++at) {
      sum += mixed(memory.data[at] + mixed(at));
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(memory.sum, sum);
  }
}
"""
_ARGUMENTS = struct.Struct("<3Q")
_THREADS, _BLOCKS_SM = 256, 8
_ITEM = 8


def checksum_source() -> Source:
    """The kernel. It has no parameters, so it is no template."""
    return Source("checksum.cu", _TEXT)


class Checksum:
    """The kernel, loaded on the current device, and the sums that it was asked for on ``stream``."""

    def __init__(self, gpu: Gpu, arena: Arena, stream: int) -> None:
        self._module = Module()
        self._module.load(compiled(checksum_source(), gpu.arch).cubin)
        self._function: Any = self._module.get_function("checksum")
        self._blocks = gpu.num_sms * _BLOCKS_SM
        self._sums = arena.address("sums", MOST * _ITEM)
        self._stream = stream
        self._asked = 0

    def begin(self) -> None:
        """Before the first question: what was asked and not answered, because of an error, is dropped."""
        runtime.memsetAsync(self._sums, 0, MOST * _ITEM, self._stream)
        self._asked = 0

    def ask(self, address: int, size: int) -> None:
        """For the sum of the ``size`` bytes at ``address``, a multiple of 16, as they are then on the stream."""
        assert self._asked < MOST
        assert address % 16 == 0
        packed = _ARGUMENTS.pack(address, size, self._sums + self._asked * _ITEM)
        arguments = ctypes.create_string_buffer(packed)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        driver.launchKernel(
            self._function.ptr, self._blocks, 1, 1, _THREADS, 1, 1, 0, self._stream, ctypes.addressof(pointers), 0
        )
        self._asked += 1

    def answers(self) -> list[int]:
        """Waits for the stream; the sums in the order in which they were asked for."""
        runtime.streamSynchronize(self._stream)
        found = np.zeros(MOST, np.uint64)
        download(self._sums, found)
        return [int(each) for each in found[: self._asked]]
