"""What calls cost the host: at most 12 us when warm, 2 s the first time, 50 ms with a filled kernel cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIMIT_US = 12.0
COLD_MS = 2000.0
CACHED_MS = 50.0


def run(script: str, result: Path, *arguments: str) -> Any:
    command = [sys.executable, str(BENCHMARKS / script), "--out", str(result), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(result.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_a_warm_call_is_cheap(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        if not torch.cuda.is_available():
            pytest.skip("the torch installed has no CUDA")
    times = run("host_time.py", tmp_path / "times.json", name)["us_per_call"][name]
    with capsys.disabled():
        print(f"\n{name}: {times}")
    assert times["attention"] <= LIMIT_US, times


def test_a_first_call_is_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run("first_call.py", tmp_path / "times.json")["rows"]
    with capsys.disabled():
        print(f"\n{rows}")
    assert all(row["cold_ms"] < COLD_MS and row["cached_ms"] < CACHED_MS for row in rows), rows
