"""Speed and size of a tuning database with 100,000 measurements: file, look-up, merge, export and import.

    python benchmarks/store.py --out benchmarks/results/store.json

The rows are those of four kept sweeps on an H200, again and again under other ids, sessions, sizes and times, with the
sources of today, so that problems, configs, stages, failures and messages are distributed as tuning leaves them. Two
databases of as many rows, none in common, are made; then processes of their own look problems up, each for the first
time, and add the second database and its export to copies of the first. CPU time and peak memory are those of such a
process, start included.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import itertools
import json
import os
import platform
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from environment import environment

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem, Spec
from flashtune.tuned_db.exchange.export_file import parse_line
from flashtune.tuned_db.lookup.lookup import find, source_digest
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.records.parse import measurement_from_json
from flashtune.tuned_db.sharing.merge import add_database, add_file, export_database
from flashtune.tuned_db.store.store import Store

ROWS = 100_000
TRIED = 67
"""Rows of a problem besides those of its final, of which there are 25."""
LOOKUPS = 300
RESULTS = Path(__file__).parent / "results"
SWEEPS = ("tune_h200", "tune_h200_grid", "tune_h200_sm90", "tune_h200_wide")
LIMITS = {"megabytes": 60.0, "lookup_ms": 2.0, "merge_seconds": 30.0, "merge_peak_mb": 500.0}
"""What the database is held to."""


def swept() -> list[Measurement]:
    """All rows of the kept sweeps, checked."""
    rows = []
    for name in SWEEPS:
        lines = gzip.decompress((RESULTS / f"{name}.jsonl.gz").read_bytes()).splitlines()[1:]
        rows += [measurement_from_json(parse_line(line)) for line in lines]
    return rows


def realistic(count: int, seed: int) -> Iterator[Measurement]:
    """``count`` measurements that no other seed gives: one session after another tunes 59 problems of another size."""
    draw = random.Random(seed)
    finals: dict[Problem, list[Measurement]] = defaultdict(list)
    others: dict[Spec, list[Measurement]] = defaultdict(list)
    for row in swept():
        if row.stage == "final" and row.rounds:
            finals[row.problem].append(row)
        if row.stage != "final":
            others[row.problem.spec].append(row)
    return itertools.islice(_sessions(draw, seed, finals, others), count)


def _sessions(
    draw: random.Random, seed: int, finals: dict[Problem, list[Measurement]], others: dict[Spec, list[Measurement]]
) -> Iterator[Measurement]:
    for turn in itertools.count(1):
        session = f"{seed:08x}-0000-7000-8000-{turn:012x}"
        for problem, best in finals.items():
            asked = dataclasses.replace(problem, batch=problem.batch * turn, seqlen_k=problem.seqlen_k + 128 * seed)
            tried = draw.choices(others[problem.spec] or best, k=TRIED)
            rows = [(row, "final") for row in best] + [(row, draw.choice(("screen", "measure"))) for row in tried]
            for row, stage in rows:
                speed = draw.uniform(0.95, 1.05) * turn
                times = {name: getattr(row, name) for name in ("median_us", "q20_us", "q80_us", "baseline_us")}
                yield dataclasses.replace(
                    row,
                    id=f"{draw.getrandbits(32):08x}-{seed:04x}-7000-8000-{turn:04x}{draw.getrandbits(32):08x}",
                    session=session,
                    problem=asked,
                    stage=stage,
                    source_digest=row.source_digest and source_digest(asked.spec, row.config),
                    **{name: got and got * speed for name, got in times.items()},
                )


def make(path: Path, count: int, seed: int) -> None:
    with Store.open(path) as store:
        store.add(realistic(count, seed))


def lookups(path: Path, count: int, seed: int = 0) -> list[tuple[float, float]]:
    """Milliseconds, and those of CPU, of the first look-up of each of ``count`` problems that are stored.

    Half of the first twenty render a source that no earlier one did, and most configs are new to them.
    """
    gpu = gpu_by_alias("h200")
    with Store.open(path, readonly=True) as store:
        problems = store.problems()
    random.Random(seed).shuffle(problems)
    warm, *asked = problems[: count + 1]
    find(warm, gpu, store_path=path)  # imports, bundled rows and the templates are read once
    found = []
    for problem in asked:
        start, busy = time.perf_counter(), time.process_time()
        choice = find(problem, gpu, store_path=path)
        found.append((1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - busy)))
        assert choice.level in ("exact", "older_source"), choice
    return found


def added(path: Path, source: Path) -> dict[str, float]:
    """Adds ``source`` to the database at ``path``: seconds of this process since its start, and its peak of memory."""
    before = time.perf_counter()
    with Store.open(path) as store:
        result = (add_file if source.suffix == ".jsonl" else add_database)(store, source)
    used = resource.getrusage(resource.RUSAGE_SELF)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"))  # ru_maxrss has the parent's
    assert peak is not None
    return {
        "new": result.new,
        "known": result.known,
        "seconds": round(time.perf_counter() - before, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_mb": round(int(peak[1]) / 1024, 1),
    }


def apart(what: str, *arguments: str | Path) -> Any:
    """``what`` in a process of its own, whose memory and time are its own."""
    command = [sys.executable, __file__, "--step", what, *map(str, arguments)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def figures(folder: Path, count: int) -> dict[str, Any]:
    one, two, export = folder / "one.db", folder / "two.db", folder / "two.jsonl"
    start = time.perf_counter()
    for path, seed in ((one, 1), (two, 2)):
        make(path, count, seed)
    print(f"two databases of {count} rows made in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    size = one.stat().st_size / 1e6
    times, busy = zip(*apart("lookup", one), strict=True)
    start = time.perf_counter()
    with Store.open(two, readonly=True) as store:
        export_database(store, export)
    exported = time.perf_counter() - start
    copy = folder / "copy.db"
    shutil.copy(one, copy)
    merged = apart("add", one, two)
    return {
        "rows": count,
        "megabytes": round(size, 1),
        "lookup_ms": {
            "median": round(statistics.median(times), 2),
            "p95": round(statistics.quantiles(times, n=20)[-1], 2),
            "most": round(max(times), 2),
            "median_cpu": round(statistics.median(busy), 2),
            "least_cpu": round(min(busy), 2),
            "median_cpu_of_first_20": round(statistics.median(busy[:20]), 2),
            "problems": len(times),
        },
        "merge": merged,
        "merge_again": apart("add", one, two),
        "export_seconds": round(exported, 2),
        "export_megabytes": round(export.stat().st_size / 1e6, 1),
        "import": apart("add", copy, export),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"measurements of each database (default: {ROWS})")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        what, *paths = options.step
        print(json.dumps(lookups(Path(*paths), LOOKUPS) if what == "lookup" else added(*map(Path, paths))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = figures(Path(folder), options.rows)
    print(json.dumps(found, indent=1))
    if options.out:
        machine = {
            "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
            "load of all processes, last 1 and 5 minutes": os.getloadavg()[:2],
        }  # fmt: skip
        result = {
            "what": __doc__, "environment": environment() | machine, "limits": LIMITS, "figures": found
        }  # fmt: skip
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
