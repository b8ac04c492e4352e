"""The CPU emulator against a GPU: the same generated kernels, the same inputs, results compared element by element.

    python benchmarks/emulator.py record pairs.npz                     # on an H200
    python benchmarks/emulator.py compare pairs.npz --out benchmarks/results/emulator_h200.json    # anywhere

Pairs of (config, problem) are drawn at random from a fixed seed: families, dtypes, head dims, masks, alignments, odd
lengths. Bar: with 16-bit outputs 99.9 % of the elements within 2 units in the last place, and every result of the
emulator within the project's tolerance. float32 outputs are listed apart: the exponential of a GPU and of a C library
differ in their last bit, and where a sum nearly cancels that is many units in the last place of the result.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from environment import environment

from flashtune.codegen.compiler.kernel_cache import compiled
from flashtune.codegen.families.registry import families, family
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.bits import from_memory
from flashtune.codegen.problem.problem import ITEM_BYTES, Problem
from flashtune.codegen.problem.tolerance import attention_tolerances, ulp
from flashtune.tuner.bench.inputs import random_values

PAIRS = 200
MIXED = 160
"""So many pairs from the start have any dtype, the others 16 bits."""
GPU = gpu_by_alias("h200")
LENGTHS = ((1, 1), (17, 129), (67, 131), (130, 257), (129, 40), (33, 300))
HEADS = ((1, 1), (2, 1), (3, 3), (4, 2))


def pairs() -> list[tuple[Problem, Config]]:
    """The same list everywhere."""
    draw = random.Random(2026)
    names = list(families())
    found: list[tuple[Problem, Config]] = []
    while len(found) < PAIRS:
        rules = families()[names[len(found) % len(names)]]
        dtypes = ("float16", "bfloat16", "float32")
        dtype = draw.choice(dtypes if len(found) < MIXED else dtypes[:2])
        seqlen_q, seqlen_k = draw.choice(LENGTHS)
        num_heads, num_heads_kv = draw.choice(HEADS)
        problem = Problem(
            dtype=dtype,
            head_dim=draw.choice((8, 24, 40, 64, 72, 96, 128, 136, 192, 256)),
            batch=draw.choice((1, 2)),
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_heads=num_heads,
            num_heads_kv=num_heads_kv,
            causal=draw.random() < 0.5,
            alignment=draw.choice((16, 16, ITEM_BYTES[dtype])),
        )
        if rules.refuses(problem.spec, GPU) is None:
            legal, _ = rules.enumerate(problem.spec, GPU)
            found.append((problem, draw.choice(legal)))
    return found


def inputs(problem: Problem, number: int) -> list[Any]:
    """q, k and v as they lie in memory (16-bit floats as bits)."""
    return [
        random_values(problem.dtype, int(np.prod(shape)), 10 * number + index).reshape(shape)
        for index, shape in enumerate(problem.shapes[:3])
    ]


def record(path: Path) -> None:
    """Runs all pairs on the GPU at hand and keeps outputs and LSE."""
    from flashtune.codegen.gpu.devices import require_device
    from flashtune.codegen.launch import load
    from flashtune.tuner.bench.memory import POISON, Arena, contiguous, download, elements, skew, upload

    gpu = require_device()
    arena = Arena()
    sources = [family(config.family).plan(problem, config, gpu).kernels[0].source for problem, config in pairs()]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:  # fills the cache that load() reads
        list(pool.map(compiled, sources, [gpu.arch] * len(sources)))
    kept: dict[str, Any] = {"environment": np.array(json.dumps(environment()))}
    for number, (problem, config) in enumerate(pairs()):
        bound = load(family(config.family).plan(problem, config, gpu), 0).bind(
            contiguous(problem), problem.default_scale
        )
        host = inputs(problem, number)
        offset = skew(problem)
        addresses = [arena.address(name, each.nbytes + offset) + offset for name, each in zip("qkv", host, strict=True)]
        for address, each in zip(addresses, host, strict=True):
            upload(address, each)
        out = np.full(problem.shapes[3], POISON, host[0].dtype)
        lse = np.full((problem.batch, problem.num_heads, problem.seqlen_q), np.nan, np.float32)
        out_address = arena.address("out", out.nbytes + offset) + offset
        lse_address = arena.address("lse", 4 * elements(problem).lse)
        upload(out_address, out)
        upload(lse_address, lse)
        bound.launch(*addresses, out_address, lse_address, 0)
        download(out_address, out)
        download(lse_address, lse)
        kept[f"out{number}"], kept[f"lse{number}"] = out, lse
    np.savez_compressed(path, **kept)
    print(f"{PAIRS} pairs recorded on {gpu} in {path}")


def compare(path: Path, result: Path | None) -> int:
    """Emulates all pairs that the file has and compares with what was recorded."""
    from flashtune.emulator import emulate

    recorded = np.load(path, allow_pickle=False)
    rows = []
    for number, (problem, config) in enumerate(pairs()):
        if f"out{number}" not in recorded:
            continue
        raw = inputs(problem, number)
        started = time.perf_counter()
        emulated = emulate(problem, config, *raw, seed=number)
        seconds = time.perf_counter() - started
        gpu_out = from_memory(recorded[f"out{number}"], problem.dtype).reshape(emulated.out.shape)
        apart = ulps_apart(emulated.out, gpu_out, problem.dtype)
        lse_apart = ulps_apart(emulated.lse, recorded[f"lse{number}"], "float32")
        numbers = [from_memory(each, problem.dtype) for each in raw]
        allowed = attention_tolerances(*numbers, causal=problem.causal, dtype=problem.dtype)
        verdicts = [allowed[0].judge(emulated.out), allowed[1].judge(emulated.lse)]
        rows.append(
            {
                "problem": problem.key,
                "config": str(config),
                "elements": apart.size,
                "within_2_ulp": int((apart <= 2).sum()),
                "largest_ulp": round(float(apart.max()), 1),
                "largest_lse_ulp": round(float(lse_apart.max()), 1),
                "ok": all(each.ok for each in verdicts),
                "seconds": round(seconds, 2),
            }
        )
        if not rows[-1]["ok"]:
            print(f"{problem} {config}: {verdicts[0]}; LSE {verdicts[1]}", flush=True)
    summary = {}
    for name, chosen in (
        ("16-bit", [row for row in rows if "dtype=float32" not in row["problem"]]),
        ("float32", [row for row in rows if "dtype=float32" in row["problem"]]),
    ):
        elements = sum(row["elements"] for row in chosen)
        share = sum(row["within_2_ulp"] for row in chosen) / max(1, elements)
        wrong = sum(not row["ok"] for row in chosen)
        summary[name] = {
            "pairs": len(chosen),
            "elements": elements,
            "share_within_2_ulp": round(share, 6),
            "beyond_tolerance": wrong,
            "largest_lse_ulp": max((row["largest_lse_ulp"] for row in chosen), default=0.0),
        }
        print(f"{name}: {summary[name]}")
    if result:
        gpu_side = json.loads(str(recorded["environment"]))
        content = {"what": __doc__, "gpu_environment": gpu_side, "summary": summary, "rows": rows}
        result.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    good = summary["16-bit"]["share_within_2_ulp"] >= 0.999 and all(row["ok"] for row in rows)
    return 0 if good else 1


def ulps_apart(ours: Any, theirs: Any, dtype: str) -> Any:
    """Distance of each pair of values in units in the last place of ``theirs``; 0 for equal values and two NaN."""
    left, right = ours.astype(np.float64), theirs.astype(np.float64)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(same, 0.0, np.abs(left - right) / ulp(right, dtype))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("record", "compare"))
    parser.add_argument("file", type=Path, help="recorded results (.npz)")
    parser.add_argument("--out", type=Path, help="result file of the comparison (JSON)")
    options = parser.parse_args()
    if options.step == "record":
        record(options.file)
        return 0
    return compare(options.file, options.out)


if __name__ == "__main__":
    sys.exit(main())
