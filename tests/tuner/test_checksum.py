"""The checksum kernel: compiled for real, and its sums on the CPU, thread by thread."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from flashtune.codegen.compiler.nvrtc import compile_source
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.emulator.build import find_compiler

checksum = pytest.importorskip("flashtune.tuner.bench.checksum", reason="needs CuPy", exc_type=ImportError)

# Blocks of one thread: each is its warp's first lane, and the others have nothing to add.
BEFORE = """
struct Index { unsigned x; };
static Index blockIdx, threadIdx, blockDim{1}, gridDim;
#define __align__(bytes) alignas(bytes)
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(threads)
template <class T> static T __shfl_xor_sync(unsigned, T, int) { return 0; }
template <class T> static void atomicAdd(T* at, T value) { *at += value; }
"""
BEHIND = """
#include <cstdio>
#include <cstdlib>
int main(int, char** arguments) {
  const u64 size = std::strtoull(arguments[1], nullptr, 10);
  gridDim.x = std::atoi(arguments[2]);
  alignas(16) static unsigned char data[4096];
  u64 sum = 0;
  std::fread(data, 1, size, stdin);
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) checksum(Memory{data, size, &sum});
  std::printf("%llu", sum);
}
"""


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["t4", "h200"])
def test_it_compiles_without_spills(name: str) -> None:
    built = compile_source(checksum.checksum_source(), gpu_by_alias(name).arch)
    assert built.spill_bytes == 0


@pytest.mark.emulate
def test_each_byte_counts_at_its_place_and_the_number_of_threads_does_not(tmp_path: Path) -> None:
    program = tmp_path / "checksum"
    text = BEFORE + checksum.checksum_source().text + BEHIND
    done = find_compiler().run(["-std=c++17", "-O1", "-w", "-x", "c++", "-", "-o", str(program)], text)
    assert done.returncode == 0, done.stderr

    def summed(content: bytes, blocks: int = 3) -> int:
        return int(subprocess.run([program, str(len(content)), str(blocks)], input=content, stdout=-1).stdout)

    content = np.random.default_rng(0).bytes(205)  # 12 words and 13 bytes
    whole = summed(content)
    assert [summed(content, blocks) for blocks in (1, 2, 5, 64)] == [whole] * 4
    changed = []
    for at in range(len(content)):
        spoiled = bytearray(content)
        spoiled[at] ^= 1 << at % 8
        changed.append(summed(bytes(spoiled)))
    others = [
        content[16:32] + content[:16] + content[32:],  # words that change places
        content[8:16] + content[:8] + content[16:],  # halves of a word
        content[:-2] + content[-1:] + content[-2:-1],  # bytes at the end
        content[:-1],
        content[:192],
    ]
    assert len({whole, *changed, *map(summed, others)}) == 1 + len(content) + len(others)
    assert summed(b"\xff" * 205) != summed(b"\xff" * 221)
