"""Compile workers end with their session, whatever ends it, never see a Ctrl-C, and are replaced when they die.

What is tried again in another process is a job of its own: a death costs no other source anything.
"""

from __future__ import annotations

import _multiprocessing
import errno
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import pytest
import slow_compiler
from processes import alive
from tuner_fakes import FakeBuilder, means, problem, request, run

import flashtune
from flashtune.codegen.compiler.render import Source
from flashtune.errors import MissingDependency
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.processes import compile_pool
from flashtune.tuner.processes.compile_pool import MAX_DEATHS, Built, NoCompilerError, ProcessBuilder
from flashtune.tuner.processes.process import Child
from flashtune.tuner.tune.predicted_run import predict_problems

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")

SESSION = """
import multiprocessing, sys, time
import slow_compiler
from flashtune.codegen.compiler.render import Source
from flashtune.tuner.processes import compile_pool as build

build.build = slow_compiler.build
builder = build.ProcessBuilder("sm_90a", 1)
builder.submit(Source("600", "int slow;"))
while not (workers := multiprocessing.active_children()):
    time.sleep(0.01)
masks = [open(f"/proc/{each.pid}/status").read().split("SigBlk:")[1].split()[0] for each in workers]
print(*(int(mask, 16) >> 1 & 1 for mask in masks), flush=True)
print(*(each.pid for each in workers), flush=True)
sys.stdin.readline()
builder.close()
"""


@pytest.fixture
def session(tmp_path: Path) -> subprocess.Popen[str]:
    """A process with a worker that is busy for ten minutes."""
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


@pytest.fixture
def tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which each try of `slow_compiler.deadly`, which compiles here, leaves a file."""
    monkeypatch.setattr(compile_pool, "build", slow_compiler.deadly)
    monkeypatch.setenv("TRIES", str(tmp_path))
    return tmp_path


@pytest.fixture
def builder() -> Iterator[ProcessBuilder]:
    made = ProcessBuilder("sm_90a", 2)
    yield made
    made.close()


def made(deaths: int, what: str = "") -> Source:
    return Source(f"{deaths} deaths", f"int {what};")


@pytest.mark.parametrize("deaths", range(MAX_DEATHS))
def test_a_source_is_tried_again_where_its_worker_died(tries: Path, builder: ProcessBuilder, deaths: int) -> None:
    job = builder.submit(made(deaths))
    assert builder.submit(made(deaths)) is job
    assert job.result(300) == Built(digest=made(deaths).digest, registers=96)
    assert len(list(tries.iterdir())) == deaths + 1


def test_a_source_that_kills_three_workers_is_given_up_and_others_are_not(tries: Path, builder: ProcessBuilder) -> None:
    deadly = builder.submit(made(MAX_DEATHS))
    others = [builder.submit(made(0, f"other{number}")) for number in range(6)]
    assert not any(each.result(300).error for each in others)
    given_up = deadly.result(300)
    assert given_up.crashed
    assert "died 3 times over it; the last one was killed by SIGKILL" in given_up.error
    counted = Counter(path.name.partition(".")[0] for path in tries.iterdir())
    assert counted == {made(MAX_DEATHS).digest: 3, **{made(0, f"other{number}").digest: 1 for number in range(6)}}


def test_workers_that_never_compile_anything_end_the_session(tries: Path, builder: ProcessBuilder) -> None:
    jobs = [builder.submit(made(MAX_DEATHS, f"bad{number}")) for number in range(5)]
    with pytest.raises(NoCompilerError, match=r"died over each of [3-5] sources, the last one was killed by SIGKILL"):
        [each.result(300) for each in jobs]


def test_what_a_worker_died_of_is_told(monkeypatch: pytest.MonkeyPatch, builder: ProcessBuilder) -> None:
    monkeypatch.setattr(compile_pool, "build", slow_compiler.closing)
    assert "the last one exited with code 7" in builder.submit(made(0)).result(300).error


def test_workers_that_can_not_start_end_the_session(monkeypatch: pytest.MonkeyPatch, builder: ProcessBuilder) -> None:
    monkeypatch.setattr(compile_pool, "_serve", slow_compiler.missing)  # it takes other arguments
    with pytest.raises(NoCompilerError, match="3 compile workers in a row ended as they started; each exited with"):
        builder.submit(made(0)).result(300)


def test_no_process_at_all_ends_the_session(monkeypatch: pytest.MonkeyPatch, builder: ProcessBuilder) -> None:
    def refuse(*_: object) -> Child:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(compile_pool, "Child", refuse)
    with pytest.raises(NoCompilerError, match="no compile worker can be started: Resource temporarily unavailable"):
        builder.submit(made(0)).result(300)


def test_where_one_process_is_all_there_can_be_it_compiles_everything(
    monkeypatch: pytest.MonkeyPatch, tries: Path, builder: ProcessBuilder
) -> None:
    """Also what costs it its life a few times, after which another one can be had."""
    living: list[Child] = []

    def start(*given: Any) -> Child:
        if any(not each.fate() for each in living):
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        living.append(Child(*given))
        return living[-1]

    monkeypatch.setattr(compile_pool, "Child", start)
    sources = [made(number % MAX_DEATHS, f"s{number}") for number in range(9)]
    jobs = [builder.submit(each) for each in sources]
    assert [each.result(300) for each in jobs] == [Built(digest=each.digest, registers=96) for each in sources]


def test_a_compiler_that_is_not_installed_is_that_error(
    monkeypatch: pytest.MonkeyPatch, builder: ProcessBuilder
) -> None:
    monkeypatch.setattr(compile_pool, "build", slow_compiler.missing)
    with pytest.raises(MissingDependency, match="no compiler is installed"):
        builder.submit(made(0)).result(300)


def test_workers_that_were_killed_while_idle_are_nobodys_fault(tries: Path, builder: ProcessBuilder) -> None:
    for job in [builder.submit(made(0, f"first{number}")) for number in range(2)]:
        job.result(300)
    for child in active_children():
        child.kill()
        child.join()
    assert not builder.submit(made(MAX_DEATHS - 1)).result(300).error


def test_one_killed_worker_loses_nothing_of_a_predicted_run(
    tries: Path, builder: ProcessBuilder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """F8: every third source kills its worker once. All are ranked, as without a death."""
    path = tmp_path_factory.mktemp("store") / "tuned.db"
    with Store.open(path) as store:
        report = predict_problems(request([problem()], 12), means(store, builder=builder), "")
        assert len(store.predictions()) == 12
    assert (report.tried, report.failed, report.stopped) == (12, {}, "")
    assert len(list(tries.iterdir())) > 12


class Limited(FakeBuilder):
    """Compiles so many sources, then none any more."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count

    def submit(self, source: Source) -> Future[Built]:
        job = super().submit(source)
        if len(self.submitted) > self.left:
            job = Future()
            job.set_exception(NoCompilerError("the machine is on fire"))
        return job


@pytest.mark.parametrize("count", [0, 5])
def test_where_nothing_compiles_any_more_what_did_is_ranked_and_stored(tmp_path: Path, count: int) -> None:
    """F8, the kind: whatever ends the compiling, what was compiled is kept, and the reason is told."""
    with Store.open(tmp_path / "tuned.db") as store:
        report = predict_problems(request([problem()], 12), means(store, builder=Limited(count)), "")
        assert len(store.predictions()) == count
    assert report.stopped == "the machine is on fire"
    assert report.tried == count


def test_a_measured_run_without_a_compiler_ends_with_what_it_has(tmp_path: Path) -> None:
    report = run(tmp_path / "tuned.db", [problem()], 12, builder=Limited(5))
    assert "the machine is on fire. Everything up to here is stored" in report.stopped
    assert report.rows[0].config is not None


def test_semaphores_are_not_needed(monkeypatch: pytest.MonkeyPatch, tries: Path, builder: ProcessBuilder) -> None:
    """F13: without a usable /dev/shm there are none, and workers compile even so."""

    class Refused(_multiprocessing.SemLock):
        def __new__(cls, *_: object) -> Refused:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("_multiprocessing.SemLock", Refused)
    with pytest.raises(OSError, match="Read-only"):
        get_context("spawn").Lock()
    assert not builder.submit(made(1)).result(300).error
