"""What a result file says about where its figures come from."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import subprocess
from typing import Any

PACKAGES = ("flashtune", "torch", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cudnn-cu13", "optuna", "sqlalchemy", "numpy")
QUERY = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"


def environment() -> dict[str, Any]:
    """GPU, clocks, driver, versions, date and commit; 'unknown' where something can't be found out."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "gpu": dict(zip(QUERY.split(","), gpu_state(), strict=False)),
        "nvrtc": _nvrtc(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def gpu_state() -> list[str]:
    """The values of `QUERY` now."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [value.strip() for value in shown.splitlines()[0].split(",")]


def _commit() -> str:
    if given := os.environ.get("FLASHTUNE_COMMIT"):
        return given
    command = ["git", "-C", os.path.dirname(__file__), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _nvrtc() -> str:
    from flashtune.codegen.compiler.nvrtc import nvrtc_version

    return nvrtc_version()
