"""Compile workers end with their session, whatever ends it, never see a Ctrl-C, and are replaced when they die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from processes import alive
from tuner_fakes import FAMILY, GPU, problem

import flashtune
from flashtune.codegen.render import Source
from flashtune.errors import FlashtuneError
from flashtune.tuner import build
from flashtune.tuner.build import Built, ProcessBuilder, broken, result
from flashtune.tuner.coordinator import render
from flashtune.tuner.space import make_space

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")

SESSION = """
import multiprocessing, sys, time
from tuner_fakes import FAMILY, GPU, problem
from flashtune.tuner.build import ProcessBuilder, build
from flashtune.tuner.coordinator import render

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


@pytest.mark.parametrize("how", ["close", "kill"])
def test_workers_end_at_once_with_the_session(session: subprocess.Popen[str], how: str) -> None:
    assert session.stdout is not None
    with session:
        assert session.stdout.readline() == "1\n", "SIGINT must be blocked from the first moment"
        workers = [int(pid) for pid in session.stdout.readline().split()]
        assert all(alive(pid) for pid in workers)
        if how == "kill":
            session.send_signal(signal.SIGKILL)
        session.communicate("\n" if how == "close" else None, timeout=120)
        deadline = time.monotonic() + 60
        while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(alive(pid) for pid in workers)


@pytest.mark.nvrtc
def test_a_compile_worker_that_is_killed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path))
    before = {each.pid for each in active_children()}
    sources = [render(problem(), config) for config in make_space(problem(), GPU, FAMILY).configs[:3]]
    builder = ProcessBuilder(GPU.arch, 1)
    try:
        jobs = [builder.submit(each) for each in sources]
        (worker,) = (each for each in active_children() if each.pid not in before)
        worker.kill()
        jobs[-1].exception(300)
        again = [result(builder.submit(each)) for each in sources]
    finally:
        builder.close()
    assert [each.digest for each in again] == [each.digest for each in sources]
    assert not any(each.error for each in again)


class Pools:
    """In place of process pools: each breaks over the sources in ``deadly``, and over all that come behind."""

    def __init__(self, deadly: set[str]) -> None:
        self.deadly = deadly
        self.count = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.count += 1
        return Pool(self)


class Pool:
    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self.broken = False

    def submit(self, function: Any, source: Source, arch: str) -> Future[Built]:
        if self.broken:
            raise BrokenProcessPool
        self.broken = source.digest in self.pools.deadly
        job: Future[Built] = Future()
        if self.broken:
            job.set_exception(BrokenProcessPool())
        else:
            job.set_result(Built(digest=source.digest))
        return job

    def shutdown(self, **options: Any) -> None:
        pass


SOURCES = [Source(f"{name}.cu", f"int {name};") for name in ("good", "deadly", "better", "best")]


def test_a_source_that_breaks_three_pools_is_given_up_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    good, deadly, *others = SOURCES
    pools = Pools({deadly.digest})
    monkeypatch.setattr(build, "ProcessPoolExecutor", pools)
    builder = ProcessBuilder("sm_90a", 1)
    for other in (good, *others):
        assert not result(builder.submit(other)).error
        assert broken(builder.submit(deadly))
    given_up = result(builder.submit(deadly))
    assert given_up.crashed
    assert "died 3 times" in given_up.error
    assert pools.count == 3
    builder.close()


def test_pools_that_never_compile_anything_end_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools({each.digest for each in SOURCES})
    monkeypatch.setattr(build, "ProcessPoolExecutor", pools)
    builder = ProcessBuilder("sm_90a", 1)
    for each in SOURCES[:-1]:
        builder.submit(each)
    with pytest.raises(FlashtuneError, match="if __name__ == '__main__'"):
        builder.submit(SOURCES[-1])
    assert pools.count == build.MAX_DEATHS
    builder.close()
