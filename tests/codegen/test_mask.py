"""The geometry of masks: in Python by its definition, and on the device as in Python."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashtune.codegen.problem.mask import Mask
from flashtune.emulator.build import find_compiler

MASK = Path(__file__).parents[2] / "templates" / "blocks" / "mask.cuh"


def masks() -> Iterator[Mask]:
    """Lengths near each other, near powers of 2, and one far above the other."""
    drawn = random.Random(5)
    lengths = [1, 2, 3, 7, 16, 17, 63, 64, 65, 130]
    for _ in range(120):
        yield Mask(drawn.choice(lengths), drawn.choice([0, *lengths]), drawn.random() < 0.7)


MASKS = list(dict.fromkeys(masks()))


def visible(mask: Mask, row: int, key: int) -> bool:
    """The definition, word for word."""
    return not mask.causal or key <= row + mask.seqlen_k - mask.seqlen_q


def keys(found: tuple[Any, Any], number: int = 0) -> set[int]:
    return set(range(found[0][number], found[1][number]))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_intervals_are_those_of_the_definition(mask: Mask) -> None:
    seen = [{key for key in range(mask.seqlen_k) if visible(mask, row, key)} for row in range(mask.seqlen_q)]
    found = mask.seen(np.arange(mask.seqlen_q))
    assert [keys(found, row) for row in range(mask.seqlen_q)] == seen
    assert mask.pairs == sum(map(len, seen))
    drawn = np.random.default_rng(mask.seqlen_q)
    begins = drawn.integers(0, mask.seqlen_q, 20)
    ends = begins + drawn.integers(1, 70, 20)  # a tile may go on past the last query
    seen_by_any, seen_by_all = mask.seen_by_any(begins, ends), mask.seen_by_all(begins, ends)
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        assert keys(seen_by_any, number) == set.union(*seen[begin:end])
        assert keys(seen_by_all, number) == set.intersection(*seen[begin:end])


PROGRAM = """
#include <algorithm>
#include <cstdio>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
template <bool kCausal> struct Causal {
@mask@
};
template <bool causal> void answer(int seqlen_q, int seqlen_k, int row_begin, int row_end, int col_begin, int col_end) {
  using Geometry = typename Causal<causal>::Mask;
  Geometry mask{seqlen_q, seqlen_k};
  int seen = 0;
  for (int row = row_begin; row < std::min(row_end, seqlen_q); ++row) {
    for (int col = col_begin; col < col_end; ++col) {
      seen += mask.visible(row, col);
    }
  }
  std::printf("%d %d %d %d\\n", mask.key_end(row_end), mask.full_end(row_begin), seen,
              static_cast<int>(mask.classify(row_begin, row_end, col_begin, col_end)));
}
int main() {
  int causal, q, k, r0, r1, c0, c1;
  while (std::scanf("%d %d %d %d %d %d %d", &causal, &q, &k, &r0, &r1, &c0, &c1) == 7) {
    causal ? answer<true>(q, k, r0, r1, c0, c1) : answer<false>(q, k, r0, r1, c0, c1);
  }
}
"""
SKIP, FULL, PARTIAL = range(3)


@pytest.mark.emulate
def test_the_device_has_the_same_geometry(tmp_path: Path) -> None:
    """`mask.cuh` for the host: it was said in five places, and each of them could say something else."""
    text = MASK.read_text("utf-8").replace("#pragma once", "")
    source, program = tmp_path / "mask.cpp", tmp_path / "mask"
    source.write_text(PROGRAM.replace("@mask@", text))
    subprocess.run([*find_compiler().command, "-std=c++17", str(source), "-o", str(program)], check=True)
    drawn = random.Random(7)
    asked = []
    for mask in MASKS * 5:
        row, key = drawn.randrange(mask.seqlen_q), drawn.randrange(mask.seqlen_k + 1)
        asked.append((mask, row, row + drawn.choice((1, 16, 64, 100)), key, key + drawn.choice((1, 16, 64))))
    lines = "".join(
        f"{mask.causal:d} {mask.seqlen_q} {mask.seqlen_k} {' '.join(map(str, rest))}\n" for mask, *rest in asked
    )
    told = subprocess.run([str(program)], input=lines, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(told) == len(asked)
    for (mask, row_begin, row_end, key_begin, key_end), line in zip(asked, told, strict=True):
        any_end, all_end, count, kind = map(int, line.split())
        begin, end = np.array([row_begin]), np.array([row_end])
        seen, sure = mask.seen_by_any(begin, end), mask.seen_by_all(begin, begin + 1)
        assert (any_end, all_end) == (seen[1][0], sure[1][0]), mask
        first, last = mask.seen(np.arange(row_begin, min(row_end, mask.seqlen_q)))
        assert count == np.maximum(0, np.minimum(key_end, last) - np.maximum(key_begin, first)).sum(), mask
        assert (kind == SKIP) == (key_begin >= seen[1][0]), mask
        assert (kind == FULL) == (kind != SKIP and set(range(key_begin, key_end)) <= keys(sure)), mask
