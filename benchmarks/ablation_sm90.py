"""What single parameters of `sm90_fwd` are worth: a base config and its neighbours, interleaved in one run.

    python benchmarks/ablation_sm90.py --out benchmarks/results/ablation_sm90_h200.json

As ablation.py does it for `sm80_fwd`. Each ratio is the neighbour's median time over the base's, so above 1 the base is
faster. Without a mask neighbours differ in how a step is scheduled, with one in how tiles are.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ablation import SECONDS, problem
from environment import environment

from flashtune.codegen.families.sm90_fwd import Sm90Fwd, Sm90FwdConfig
from flashtune.codegen.gpu.devices import require_device
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.bench.device_bench import DeviceBench
from flashtune.tuner.trial.intervals import ratios_to
from flashtune.tuner.trial.timing import summarise

COMMON: dict[str, object] = {
    "warpgroups": 2,
    "block_n": 128,
    "num_stages": 2,
    "q_buffers": 2,
    "softmax": "late",
    "early_columns": 32,
    "ping_pong": False,
    "scheduler": "static",
    "blocks_per_sm": 1,
}
BASES: dict[int, dict[str, object]] = {
    64: {"warpgroups": 3, "early_columns": 0, "ping_pong": True},
    128: {},
    256: {"block_n": 80, "q_buffers": 1},
}
STEPS: tuple[dict[str, object], ...] = (
    {"softmax": "exact", "early_columns": 0},
    {"softmax": "lazy", "early_columns": 0},
    {"softmax": "lazy", "early_columns": 64},
    {"early_columns": 0},
    {"early_columns": 32},
    {"early_columns": 48},
    {"early_columns": 64},
    {"ping_pong": True},
    {"ping_pong": False},
    {"block_n": 48, "q_buffers": 2, "early_columns": 0},
    {"block_n": 64},
    {"block_n": 96, "num_stages": 3},
    {"block_n": 112},
    {"block_n": 144, "early_columns": 64},
    {"block_n": 160, "early_columns": 64},
    {"block_n": 176, "early_columns": 64, "q_buffers": 1},
    {"scheduler": "tile", "q_buffers": 1},
    {"warpgroups": 2, "ping_pong": False},
    {"warpgroups": 1, "blocks_per_sm": 2, "block_n": 96, "q_buffers": 1, "scheduler": "tile", "ping_pong": False},
)
TILES: tuple[dict[str, object], ...] = tuple(
    {"scheduler": scheduler, "heads_per_section": section} | overlap
    for scheduler in ("static", "dynamic")
    for section in (1, 4, 16)
    for overlap in ({}, {"overlap_tiles": True})
)


def run(bench: DeviceBench, case: Problem) -> dict[str, Any]:
    gpu = require_device()
    values = COMMON | BASES[case.head_dim]
    base = Sm90FwdConfig.from_json(values)
    configs = {"base": base}
    for change in TILES if case.causal else STEPS:
        config = Sm90FwdConfig.from_json(values | change)
        if config not in configs.values() and Sm90Fwd().refuses_config(config, case.spec, gpu) is None:
            configs[", ".join(f"{name}={value}" for name, value in change.items())] = config
    if reason := bench.prepare(case):
        raise SystemExit(f"{case}: {reason}")
    rounds = bench.finals(case, list(configs.values()), SECONDS)
    ratios = ratios_to(rounds, base)
    return {
        "problem": case.key,
        "base": str(base),
        "base_us": round(1e6 * summarise(rounds[base]).median, 1),
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
