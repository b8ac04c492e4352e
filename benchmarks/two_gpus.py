"""One tuning run over two equal GPUs of a host, against the same run on one of them.

    python benchmarks/two_gpus.py --out benchmarks/results/two_gpus_h200.json

Eight problems of the grid (head_dim 64, 128 and 256, both masks, 512 to 16384 tokens) are tuned with a budget of trials
from empty databases: on one GPU, on both, and on both with one worker killed in the middle. All configs that can be
asked for are compiled first, so that compile time, which depends on the cores and not on the GPUs, is in none of the
times. Listing configs, starting workers, checks, and finals are in all of them. Then both winners of each problem are
timed again, interleaved and behind a flush of the L2 cache, on one GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from environment import environment

import flashtune
from flashtune.codegen.compiler.render import Source
from flashtune.codegen.families.registry import source_for
from flashtune.codegen.gpu.devices import unit_uuid, visible_gpus
from flashtune.codegen.gpu.gpu import Gpu
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.bench.device_bench import DeviceBench
from flashtune.tuner.processes.capacity import cores
from flashtune.tuner.processes.compile_pool import build
from flashtune.tuner.results.report import Progress, Report
from flashtune.tuner.trial.intervals import paired_ratio
from flashtune.tuner.tune.measured_run import search_spaces
from flashtune.tuner.tune.presets import preset
from flashtune.tuner.tune.session import eligible
from flashtune.tuner.workers.cuda_device import CudaUnit

CHOSEN = (0, 9, 13, 20, 16, 23, 26, 33)
"""Rows of the grid."""
WALL_PART = 0.6
"""Most of the single run's wall time that the run on both may take."""
SAME = 0.01
"""Most by which two winners may differ."""
RETIME_SECONDS = 1.0


def compile_all(problems: Sequence[Problem], gpu: Gpu, families: Sequence[str] | None) -> int:
    """Fills the kernel cache with all that the runs may ask for; how many kernels that are."""
    unit = CudaUnit(0, gpu, "")
    sources: dict[str, Source] = {}
    for problem in problems:
        spaces = search_spaces(problem, gpu, eligible(problem, gpu, families), {})
        found = [source_for(problem, config) for space in spaces for config in space.configs]
        sources |= {each.digest: each for each in [*found, *unit.sources(problem)]}
    with ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(build, sources.values(), [gpu.arch] * len(sources), chunksize=4))
    return len(sources)


def tuned(
    problems: Sequence[Problem],
    devices: Sequence[int],
    path: Path,
    trials: int,
    families: Sequence[str] | None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Report, float]:
    """A run, and its wall time in seconds."""
    started = time.perf_counter()
    report = flashtune.tune(
        problems, mode="measure", devices=devices, database=path, budget=str(trials), families=families,
        progress=progress,
    )  # fmt: skip
    return report, time.perf_counter() - started


class KillOne:
    """As ``progress``: kills a worker when half of the budget is used."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.killed = 0

    def __call__(self, progress: Progress) -> None:
        if self.killed or progress.done < 0.5:
            return
        workers = {each.name: each.pid for each in multiprocessing.active_children()}
        pid = workers[f"flashtune {self.name}"]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.killed = pid


def account(report: Report, path: Path, units: Sequence[str], trials: int) -> dict[str, Any]:
    """What a run did, and what is wrong with it."""
    with Store.open(path, readonly=True) as store:
        rows = store.measurements()
    tried = Counter((each.problem, each.config) for each in rows if each.stage != "final")
    homes = {problem: {each.unit for each in rows if each.problem == problem} for problem in {r.problem for r in rows}}
    used = {unit for home in homes.values() for unit in home}
    checks = {
        "ended early": report.interrupted or report.stopped or report.note,
        "not tried": trials - report.tried,
        "lost": report.tried - len(tried),
        "measured twice": sum(count > 1 for count in tried.values()),
        "on other units": sorted(used - set(units)),
        "units without a row": sorted(set(units) - used),
        "problems on two units": sum(len(home) > 1 for home in homes.values()),
        "problems without a final": sum(row.ratio is None for row in report.rows),
    }
    return {
        "trials": report.tried,
        "failed": dict(report.failed),
        "problems_by_unit": {unit: sum(home == {unit} for home in homes.values()) for unit in units},
        "wrong": {name: found for name, found in checks.items() if found},
    }


def retimed(bench: DeviceBench, problem: Problem, winners: Sequence[Config]) -> dict[str, Any]:
    """Both winners of ``problem``, interleaved on one GPU; ``ratio`` is the second to the first."""
    if missing := bench.prepare(problem):
        raise SystemExit(f"{problem}: {missing}")
    rounds = bench.finals(problem, list(dict.fromkeys(winners)), RETIME_SECONDS)
    first, second = (rounds[each] for each in winners)
    return {
        "identical": winners[0] == winners[1],
        "us": [round(statistics.median(each) * 1e6, 2) for each in (first, second)],
        "ratio": round(paired_ratio(second, first), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000, help="of each run, over all problems (default: 1000)")
    parser.add_argument("--family", dest="families", action="append", help="search only this one; may be repeated")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    options = parser.parse_args()
    found = visible_gpus()
    if len(found) < 2 or found[0].key != found[1].key:
        print(f"needs two GPUs of one model as devices 0 and 1, found {', '.join(map(str, found)) or 'none'}")
        return 2
    gpu, units = found[0], [unit_uuid(index) for index in (0, 1)]
    problems = [preset("grid")[row] for row in CHOSEN]
    before = environment()
    started = time.perf_counter()
    kernels = compile_all(problems, gpu, options.families)
    print(f"{kernels} kernels compiled in {time.perf_counter() - started:.0f} s", flush=True)

    runs: dict[str, Any] = {}
    reports: dict[str, Report] = {}
    killer = KillOne("cuda:1")
    plans: dict[str, tuple[list[int], Callable[[Progress], None]]] = {
        "one": ([0], lambda progress: None),
        "both": ([0, 1], lambda progress: None),
        "both, one killed": ([0, 1], killer),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, (devices, progress) in plans.items():
            path = Path(folder) / f"{len(runs)}.db"
            report, seconds = tuned(problems, devices, path, options.trials, options.families, progress)
            reports[name] = report
            used = [units[index] for index in devices]
            runs[name] = {"seconds": round(seconds, 2)} | account(report, path, used, options.trials)
            print(f"{name}: {runs[name]}", flush=True)
    part = runs["both"]["seconds"] / runs["one"]["seconds"]

    bench = DeviceBench(0, gpu)
    rows = []
    for problem, one, both in zip(problems, reports["one"].rows, reports["both"].rows, strict=True):
        if one.config is None or both.config is None:
            raise SystemExit(f"{problem}: no winner: {one.why}; {both.why}")
        row = {"problem": problem.key, "one": str(one.config), "both": str(both.config)}
        rows.append(row | retimed(bench, problem, (one.config, both.config)))
        print(f"{problem!s:44} both / one {rows[-1]['ratio']:.4f}  {'same config' * rows[-1]['identical']}", flush=True)

    apart = max(abs(row["ratio"] - 1) for row in rows)
    passed = {
        "wall time": part <= WALL_PART,
        "winners": apart <= SAME,
        "accounts": not any(run["wrong"] for run in runs.values()),
        "a worker was killed": killer.killed != 0,
    }
    summary = {"wall_time_part": round(part, 3), "winners_apart": round(apart, 4), "passed": passed}
    print(summary)
    if options.out:
        result = {"what": __doc__, "environment": before, "units": units, "trials": options.trials}
        result |= {"kernels": kernels, "summary": summary, "runs": runs, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
