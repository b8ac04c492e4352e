"""A part of benchmarks/store.py: a merge takes little time and memory, and a file is small.

The bounds are for a slow machine that does other work, too; the figures of a whole run are in benchmarks/results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import flashtune

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS = 3_000


def test_a_merge_is_fast_and_small() -> None:
    command = [sys.executable, str(BENCHMARKS / "store.py"), "--rows", str(ROWS)]
    source = {"PYTHONPATH": str(Path(flashtune.__file__).parents[1])}
    ended = subprocess.run(command, env=os.environ | source, check=True, stdout=subprocess.PIPE, timeout=120)
    found = json.loads(ended.stdout)
    for name in ("merge", "import"):
        assert (found[name]["new"], found[name]["known"]) == (ROWS, 0)
        assert found[name]["cpu_seconds"] < 2 + ROWS * 0.5e-3, "0.2 ms a row and 0.7 s to start, on a slow machine"
        assert found[name]["peak_mb"] < 150
    assert found["merge_again"]["new"] == 0
    assert found["merge_again"]["cpu_seconds"] < 2 + ROWS * 0.2e-3
    assert found["megabytes"] * 1e6 / ROWS < 700, "most variants are new in so few rows"
    assert found["lookup_ms"]["median_cpu"] < 25
