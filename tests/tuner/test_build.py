"""Compile workers end with their session, whatever ends it, and never see a Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import flashtune

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")

SESSION = """
import multiprocessing, sys, time
from tuner_fakes import FAMILY, GPU, problem
from flashtune.tuner.build import ProcessBuilder, build
from flashtune.tuner.measured import render

if __name__ == "__main__":
    builder = ProcessBuilder(GPU.arch, 1)
    builder.submit(render(problem(), FAMILY.default(problem().spec, GPU)))
    workers = multiprocessing.active_children()
    masks = [open(f"/proc/{each.pid}/status").read().split("SigBlk:")[1].split()[0] for each in workers]
    print(*(int(mask, 16) >> 1 & 1 for mask in masks), flush=True)
    print(*(each.pid for each in workers), flush=True)
    builder._pool.submit(time.sleep, 60)
    time.sleep(1)
    sys.stdin.readline()
    builder.close()
"""


@pytest.fixture
def session(tmp_path: Path) -> subprocess.Popen[str]:
    """A process with a worker that is busy for a minute."""
    script = tmp_path / "session.py"
    script.write_text(SESSION)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(flashtune.__file__).parents[1]), str(Path(__file__).parent)]),
        "FLASHTUNE_CACHE_DIR": str(tmp_path / "cache"),
    }
    return subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", ["close", "kill"])
def test_workers_end_at_once_with_the_session(session: subprocess.Popen[str], how: str) -> None:
    assert session.stdout is not None
    with session:
        assert session.stdout.readline() == "1\n", "SIGINT must be blocked from the first moment"
        workers = [int(pid) for pid in session.stdout.readline().split()]
        assert all(alive(pid) for pid in workers)
        if how == "kill":
            session.send_signal(signal.SIGKILL)
        session.communicate("\n" if how == "close" else None, timeout=30)
        deadline = time.monotonic() + 20
        while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(alive(pid) for pid in workers)
