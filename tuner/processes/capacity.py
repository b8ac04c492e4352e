"""What this machine has for compilers: CPU cores and memory, as its containers see them."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/")
"""Of the files of the system; tests have their own."""

_LIMITS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""What a container may take and has taken, in versions 2 and 1 of Linux' control groups."""


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    found = [_available(), *(_left(*names) for names in _LIMITS)]
    return min((each for each in found if each is not None), default=None)


def _available() -> int | None:
    for line in (_read("proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _left(limit_name: str, used_name: str) -> int | None:
    """What a limit leaves. Pages of files count as used there; so this may be too little, never too much."""
    limit, used = _read(limit_name), _read(used_name)
    if limit is None or used is None or not limit.strip().isdigit() or not used.strip().isdigit():
        return None  # "max" is no limit
    return max(0, int(limit) - int(used))


def _read(name: str) -> str | None:
    try:
        return (ROOT / name).read_text("ascii")
    except (OSError, ValueError):
        return None
