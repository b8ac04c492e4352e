"""What `flashtune tune` finds for one problem of `sm90_fwd` in 64 trials, and how long the GPU works for it.

    python benchmarks/tune_one.py --out benchmarks/results/tune_one_h200.json

Each problem is tuned twice from an empty database. The first run fills the kernel cache, so that the wall time of the
second has next to no compiling in it; what else is in it: listing configs, starting a worker, checks, finals. Then the
second run's winner and the best config of the kept sweep (`tune_h200_sm90.jsonl.gz`) are timed again, interleaved and
behind a flush of the L2 cache. The bar: 60 configs in 30 s, and a winner within 3 % of the sweep's best.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from environment import environment
from fit_sm90 import read_sweep

import flashtune
from flashtune.codegen.gpu.devices import visible_gpus
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.bench.device_bench import DeviceBench
from flashtune.tuner.results.report import Report
from flashtune.tuner.trial.intervals import paired_ratio
from flashtune.tuner.tune.presets import preset

CHOSEN = (3, 20, 27)
"""Rows of the grid."""
TRIALS = 64
LEAST_MEASURED = 60
MOST_SECONDS = 30.0
WITHIN = 1.03
RETIME_SECONDS = 1.0


def tuned(problem: Problem, folder: str, name: str) -> tuple[Report, float]:
    """A run from an empty database, and its wall time in seconds."""
    started = time.perf_counter()
    report = flashtune.tune(
        [problem], mode="measure", devices=[0], database=Path(folder) / f"{name}.db", budget=str(TRIALS),
        families=["sm90_fwd"],
    )  # fmt: skip
    return report, time.perf_counter() - started


def run_row(bench: DeviceBench, problem: Problem) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        _, filling = tuned(problem, folder, "first")
        report, seconds = tuned(problem, folder, "second")
    winner = report.rows[0].config
    if winner is None:
        raise SystemExit(f"{problem}: no winner: {report.rows[0].why}")
    swept = min((row for row in read_sweep() if row.problem == problem), key=lambda row: row.seconds).config
    if missing := bench.prepare(problem):
        raise SystemExit(f"{problem}: {missing}")
    rounds = bench.finals(problem, list(dict.fromkeys([winner, swept])), RETIME_SECONDS)
    return {
        "problem": problem.key,
        "tried": report.tried,
        "measured": report.tried - report.failed.total(),
        "failed": dict(report.failed),
        "seconds": round(seconds, 2),
        "seconds_with_compiling": round(filling, 2),
        "winner": str(winner),
        "sweep": str(swept),
        "us": [round(statistics.median(rounds[each]) * 1e6, 2) for each in (winner, swept)],
        "winner_to_sweep": round(paired_ratio(rounds[winner], rounds[swept]), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    options = parser.parse_args()
    before = environment()
    bench = DeviceBench(0, visible_gpus()[0])
    rows = []
    for number in CHOSEN:
        rows.append(row := run_row(bench, preset("grid")[number]))
        print(json.dumps(row), flush=True)
    passed = {
        "measured": all(row["measured"] >= LEAST_MEASURED for row in rows),
        "seconds": all(row["seconds"] <= MOST_SECONDS for row in rows),
        "winners": all(row["winner_to_sweep"] <= WITHIN for row in rows),
    }
    print(passed)
    if options.out:
        result = {"what": __doc__, "environment": before, "trials": TRIALS, "passed": passed, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
