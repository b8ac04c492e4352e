"""What single parameters of `sm80_fwd` are worth: a base config and its neighbours, interleaved in one run.

    python benchmarks/ablation.py --out benchmarks/results/ablation_sm80_h200.json

Launches are timed as the tuner times finalists: L2 flushed, host time kept out, rounds in another order each time. Each
ratio is the median over rounds of the neighbour's time over the base's, so above 1 the base is faster.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from environment import environment

from flashtune.codegen.families.sm80_fwd import Sm80Fwd, Sm80FwdConfig
from flashtune.codegen.gpu.devices import require_device
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.bench.device_bench import DeviceBench
from flashtune.tuner.trial.intervals import ratios_to
from flashtune.tuner.trial.timing import summarise

SECONDS = 2.0
"""Of measuring per problem."""
BASES: dict[int, dict[str, object]] = {
    64: {"block_m": 128, "block_n": 128, "num_warps": 4, "num_stages": 2},
    128: {"block_m": 128, "block_n": 64, "num_warps": 4, "num_stages": 2},
    256: {"block_m": 128, "block_n": 128, "num_warps": 8, "num_stages": 1},
}
CHANGES: tuple[dict[str, object], ...] = (
    {"rescale_threshold": 0},
    {"num_stages": 1},
    {"num_stages": 2},
    {"num_stages": 3},
    {"q_in_registers": True},
    {"block_n": 32},
    {"block_n": 64},
    {"block_n": 128},
    {"block_m": 64},
    {"num_warps": 8},
    {"block_m": 64, "num_warps": 2},
)


def problem(head_dim: int, causal: bool) -> Problem:
    return Problem(
        dtype="bfloat16",
        head_dim=head_dim,
        batch=4,
        seqlen_q=4096,
        seqlen_k=4096,
        num_heads=2048 // head_dim,
        num_heads_kv=2048 // head_dim,
        causal=causal,
    )


def run(bench: DeviceBench, case: Problem) -> dict[str, Any]:
    gpu = require_device()
    values = BASES[case.head_dim] | {"q_in_registers": False, "blocks_per_sm": 1}
    base = Sm80FwdConfig.from_json(values)
    configs = {"base": base}
    for change in CHANGES:
        config = Sm80FwdConfig.from_json(values | change)
        if config != base and Sm80Fwd().refuses_config(config, case.spec, gpu) is None:
            configs[", ".join(f"{name}={value}" for name, value in change.items())] = config
    if reason := bench.prepare(case):
        raise SystemExit(f"{case}: {reason}")
    rounds = bench.finals(case, list(configs.values()), SECONDS)
    ratios = ratios_to(rounds, base)
    return {
        "problem": case.key,
        "base": str(base),
        "base_us": round(1e6 * summarise(rounds[base]).median, 1),
        "rounds": len(rounds[base]),
        "ratio": {name: round(ratios[config], 3) for name, config in configs.items() if config != base},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    options = parser.parse_args()
    bench = DeviceBench(0, require_device())
    rows = []
    for head_dim in BASES:
        for causal in (False, True):
            rows.append(row := run(bench, problem(head_dim, causal)))
            print(f"{row['problem']}\n  base {row['base_us']} us, {row['ratio']}", flush=True)
    if options.out:
        result = {"what": __doc__, "environment": environment(), "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
