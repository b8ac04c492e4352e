"""Launches variants of all kernel families on small, awkward problems, to be run under compute-sanitizer:

    compute-sanitizer --tool memcheck  --error-exitcode 9 python tests/gpu/sanitize.py
    compute-sanitizer --tool initcheck --error-exitcode 9 python tests/gpu/sanitize.py
    compute-sanitizer --tool synccheck --error-exitcode 9 python tests/gpu/sanitize.py --family sm90_fwd

Every tensor is an allocation of its own, so that an access beyond it is seen. Outputs are compared with NumPy too.
Prints one line per variant; exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace

import numpy as np

import flashtune
from flashtune.codegen.families.registry import families
from flashtune.codegen.gpu.cuda import cupy
from flashtune.codegen.gpu.devices import require_device
from flashtune.codegen.problem.problem import Spec
from flashtune.codegen.problem.reference import plain_attention

SHAPES = ((1, 1, 1, 1, 1), (2, 67, 129, 6, 2), (1, 130, 33, 2, 2), (1, 17, 257, 3, 1))  # batch, rows, keys, heads, kv
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-4}


def own_allocation(array: np.ndarray, dtype: str) -> cupy.ndarray:
    """On the device, in memory from cudaMalloc that ends where the array ends; copied, not computed, there."""
    bits = rounded(array, dtype)
    memory = cupy.cuda.memory.Memory(bits.nbytes)
    target = cupy.ndarray(bits.shape, bits.dtype, cupy.cuda.MemoryPointer(memory, 0))
    target.set(bits)
    return target


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "bfloat16":
        return array.astype(dtype)
    import ml_dtypes

    return array.astype(ml_dtypes.bfloat16)


def variants(count: int, seed: int, names: list[str]) -> list[tuple[Spec, object]]:
    """``count`` legal (spec, config) pairs, families and features in turn, all else random."""
    draw = random.Random(seed)
    gpu = require_device()
    found = []
    while len(found) < count:
        rules = families()[names[len(found) % len(names)]]
        dtypes = [each for each in TOLERANCE if rules.unsupported(Spec(dtype=each, head_dim=64), gpu) is None]
        dtype = draw.choice(dtypes)
        alignment = draw.choice((16, 4 if dtype == "float32" else 2))
        spec = Spec(dtype=dtype, head_dim=draw.randrange(8, 257, 8), causal=draw.random() < 0.5, alignment=alignment)
        if rules.unsupported(spec, gpu):
            spec = replace(spec, alignment=16)
        legal, _ = rules.enumerate(spec, gpu)
        found.append((spec, draw.choice(legal)))
    return found


def wrong(spec: Spec, config: object, shape: tuple[int, ...]) -> float | None:
    """The largest error if it is beyond the tolerance."""
    batch, rows, keys, heads, heads_kv = shape
    draw = np.random.default_rng(rows)
    # An alignment of one element: rows are one element longer than head_dim.
    width = spec.head_dim + (spec.alignment != 16)
    sizes = ((batch, rows, heads, width), (batch, keys, heads_kv, width), (batch, keys, heads_kv, width))
    host = [rounded(draw.standard_normal(size).astype(np.float32), spec.dtype) for size in sizes]
    arrays = [own_allocation(each, spec.dtype)[..., : spec.head_dim] for each in host]
    out = own_allocation(np.full((batch, rows, heads, spec.head_dim), np.nan), spec.dtype)
    flashtune.attention(*arrays, causal=spec.causal, out=out, config=config)
    _, lse = flashtune.attention(*arrays, causal=spec.causal, out=out, config=config, return_lse=True)
    exact = [each[..., : spec.head_dim].astype(np.float64) for each in host]
    want, want_lse = plain_attention(*exact, causal=spec.causal, compute_dtype=np.float64)
    error = np.abs(out.get().astype(np.float64) - want).max()
    seen = np.isfinite(want_lse)
    got_lse = lse.get()
    same = bool((np.isfinite(got_lse) == seen).all()) and np.allclose(got_lse[seen], want_lse[seen], atol=1e-4)
    return None if error < TOLERANCE[spec.dtype] and same else float(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="variants (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", help="of this family only")
    options = parser.parse_args()
    names = [options.family] if options.family else list(families())
    failed = 0
    for spec, config in variants(options.count, options.seed, names):
        errors = {shape: error for shape in SHAPES if (error := wrong(spec, config, shape)) is not None}
        failed += bool(errors)
        print(f"{'WRONG ' + str(errors) if errors else 'ok'}  {spec}  {config}", flush=True)
    cupy.cuda.runtime.deviceSynchronize()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
