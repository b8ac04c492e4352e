"""Whether tuning twice finds the same, and whether what it claims holds: ten problems, each run from an empty database.

    python benchmarks/tune_twice.py --out benchmarks/results/tune_twice_h200.json

Two runs differ in their seed alone; each has the default budget for its ten problems. Half of the problems ship with a
tuned config, which a run starts from as it does for any user; the others have lengths and heads that none ships for.
Behind them both winners and the default are timed once more, interleaved, in finals of their own. The bar: winners
within 1 % of each other in all ten and identical in at least seven; the first run's ratio to the default within 1.5 %
of the last one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from environment import environment

import flashtune
from flashtune.codegen.families.registry import default_config
from flashtune.codegen.gpu.devices import visible_gpus
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.bench.device_bench import DeviceBench
from flashtune.tuner.results.report import Report
from flashtune.tuner.trial.intervals import paired
from flashtune.tuner.tune.presets import preset

SHIPPED = (3, 9, 15, 21, 33)
"""Rows of the grid."""
OWN = (
    # dtype, head_dim, batch, seqlen, num_heads, num_heads_kv, causal
    ("float16", 64, 6, 3000, 16, 16, True),
    ("float16", 128, 3, 5000, 24, 8, True),
    ("bfloat16", 128, 12, 1500, 20, 20, False),
    ("bfloat16", 96, 2, 7000, 12, 12, False),
    ("float16", 256, 2, 6000, 8, 4, True),
)
BUDGET = "120s"
IDENTICAL = 7
WINNERS_WITHIN = 0.01
CLAIMS_WITHIN = 0.015
RETIME_SECONDS = 1.5


def problems() -> list[Problem]:
    own = [
        Problem(
            dtype=dtype, head_dim=head_dim, batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=heads,
            num_heads_kv=heads_kv, causal=causal,
        )
        for dtype, head_dim, batch, seqlen, heads, heads_kv, causal in OWN
    ]  # fmt: skip
    return [preset("grid")[row] for row in SHIPPED] + own


def tuned(seed: int, folder: Path) -> Report:
    path = folder / f"tuned-{seed}.db"
    return flashtune.tune(problems(), mode="measure", devices=[0], database=path, budget=BUDGET, seed=seed)


def compared(bench: DeviceBench, number: int, first: Report, second: Report) -> dict[str, Any]:
    rows = first.rows[number], second.rows[number]
    problem = rows[0].problem
    default = default_config(problem, bench.gpu)
    winners: list[Config] = [row.config for row in rows if row.config is not None]
    if len(winners) != 2 or rows[0].ratio is None:
        raise SystemExit(f"{problem}: no winner, or none compared with the default: {[row.why for row in rows]}")
    if missing := bench.prepare(problem):
        raise SystemExit(f"{problem}: {missing}")
    rounds = bench.finals(problem, list(dict.fromkeys([*winners, default])), RETIME_SECONDS)
    between = paired(rounds[winners[0]], rounds[winners[1]])
    again = paired(rounds[winners[0]], rounds[default])
    return {
        "problem": problem.key,
        "winners": [str(each) for each in winners],
        "identical": winners[0] == winners[1],
        "first_to_second": round(between.median, 4),
        "claimed": [row.ratio for row in rows],
        "claimed_interval": [[row.ratio_low, row.ratio_high] for row in rows],
        "tied": [row.tied for row in rows],
        "again": round(again.median, 4),
        "tried": [row.tried for row in rows],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--keep", type=Path, help="empty folder in which the two databases stay")
    options = parser.parse_args()
    before = environment()
    reports, seconds = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        for seed in (0, 1):
            if (folder / f"tuned-{seed}.db").exists():
                parser.error(f"{folder} has databases of another run: each is to start from an empty one")
            started = time.perf_counter()
            reports.append(tuned(seed, folder))
            seconds.append(round(time.perf_counter() - started, 1))
    bench = DeviceBench(0, visible_gpus()[0])
    rows = []
    for number in range(len(problems())):
        rows.append(row := compared(bench, number, *reports))
        print(json.dumps(row), flush=True)
    off = [abs(row["claimed"][0] / row["again"] - 1) for row in rows]
    identical = sum(row["identical"] for row in rows)
    passed = {
        "within": all(abs(row["first_to_second"] - 1) <= WINNERS_WITHIN for row in rows),
        "identical": identical >= IDENTICAL,
        "claims": max(off) <= CLAIMS_WITHIN,
    }
    print(f"{passed}, {identical} identical, claims off by {max(off):.2%} at most, {seconds} s")
    if options.out:
        result = {"what": __doc__, "environment": before, "seconds": seconds, "passed": passed, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
