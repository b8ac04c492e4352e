"""Processes that share a cache: each sees whole entries, even while somebody removes them all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from flashtune.codegen.compiler import kernel_cache

WORKER = """
import sys
from flashtune.codegen.compiler import kernel_cache as cache
from flashtune.codegen.compiler.nvrtc import Compiled
from flashtune.codegen.compiler.render import Source

def build(source, arch):
    cubin = source.text.encode() * 20000
    return Compiled(cubin, arch, "13.5", 168, 0, 0, 0, 0.1, "log")

cache.compile_source = build
cache.nvrtc_version = lambda: "13.5"
for turn in range(60):
    for name in "abc":
        source = Source("kernel.cu", name)
        found = cache.compiled(source, "sm_90a", refresh=turn % 3 == int(sys.argv[1]) % 3)
        assert found == build(source, "sm_90a"), (turn, name)
"""


def test_processes_that_share_a_cache_never_see_half_an_entry(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "FLASHTUNE_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(kernel_cache.__file__).parents[2]),
    }
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(each)], env=environment, stderr=subprocess.PIPE, text=True)
        for each in range(4)
    ]
    for worker in workers:
        _, said = worker.communicate(timeout=120)
        assert worker.returncode == 0, said
        assert said == ""
    names = os.listdir(tmp_path / "cache" / "cubins")
    assert len(names) == 3
    assert all(name.endswith(".cubin") for name in names)


def test_processes_are_right_while_somebody_removes_the_cache(tmp_path: Path) -> None:
    """Safe to delete, at any moment."""
    folder = tmp_path / "cache"
    environment = {
        **os.environ,
        "FLASHTUNE_CACHE_DIR": str(folder),
        "PYTHONPATH": str(Path(kernel_cache.__file__).parents[2]),
    }
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(each)], env=environment, stderr=subprocess.PIPE, text=True)
        for each in range(4)
    ]
    removed = 0
    while any(worker.poll() is None for worker in workers):
        removed += folder.exists()
        shutil.rmtree(folder, ignore_errors=True)
    for worker in workers:
        _, said = worker.communicate()
        assert worker.returncode == 0, said
    assert removed
