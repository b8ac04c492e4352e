"""Compiles ahead in processes: NVRTC serialises threads. Workers make no CUDA context and fill the disk cache."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Protocol

from flashtune.codegen.cache import compiled
from flashtune.codegen.render import Source
from flashtune.errors import CompileError, FlashtuneError

MAX_WORKERS = 16
"""Each takes a few hundred MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Facts of one compiled source; the cubin is in the disk cache. ``error`` is empty where it compiled."""

    digest: str
    registers: int = 0
    spill_bytes: int = 0
    static_shared_bytes: int = 0
    nvrtc: str = ""
    error: str = ""


class Builder(Protocol):
    """What a session needs to compile."""

    workers: int

    def submit(self, source: Source) -> Future[Built]:
        """Compiles ``source``; equal sources share one job."""

    def close(self) -> None:
        """Drops all jobs that are not done, at once."""


class ProcessBuilder:
    """Compiles for ``arch`` in up to ``workers`` processes."""

    def __init__(self, arch: str, workers: int) -> None:
        self.arch = arch
        self.workers = min(workers, MAX_WORKERS)
        self._jobs: dict[str, Future[Built]] = {}
        context = get_context("spawn")
        leash, self._leash = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(self.workers, context, initializer=begin, initargs=(leash,))

    def submit(self, source: Source) -> Future[Built]:
        if source.digest not in self._jobs:
            try:
                with interrupts_held():
                    self._jobs[source.digest] = self._pool.submit(build, source, self.arch)
            except BrokenProcessPool as error:
                raise _broken() from error
        return self._jobs[source.digest]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._leash.close()


def build(source: Source, arch: str) -> Built:
    """Compiles, or finds in the disk cache. A source that NVRTC refuses is a result, not an exception."""
    try:
        found = compiled(source, arch)
    except CompileError as error:
        return Built(digest=source.digest, error=str(error))
    return Built(
        digest=source.digest,
        registers=found.registers,
        spill_bytes=found.spill_bytes,
        static_shared_bytes=found.static_shared_bytes,
        nvrtc=found.nvrtc,
    )


def result(job: Future[Built]) -> Built:
    """The result of a job, waiting for it."""
    try:
        return job.result()
    except BrokenProcessPool as error:
        raise _broken() from error


def wait_for_any(jobs: Iterable[Future[Built]], seconds: float | None = None) -> None:
    """Returns when one of ``jobs`` is done, or after ``seconds``."""
    wait(set(jobs), timeout=seconds, return_when=FIRST_COMPLETED)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A Ctrl-C arrives afterwards; processes that are started meanwhile never see one, not even while they import.

    The mask is what such a process inherits. It is not enough here: any other thread may be given the signal, and
    Python then interrupts the main one.
    """
    handler = signal.getsignal(signal.SIGINT)
    main = handler is not None and threading.current_thread() is threading.main_thread()
    mask = getattr(signal, "pthread_sigmask", None)
    seen: list[int] = []
    if main:
        signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    before = mask(signal.SIG_BLOCK, {signal.SIGINT}) if mask else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, handler)
        if mask:
            mask(signal.SIG_SETMASK, before)
        if seen:
            signal.raise_signal(signal.SIGINT)


def begin(leash: Connection) -> None:
    """In a worker: Ctrl-C is for the session, and whatever ends the session ends the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(leash,), daemon=True).start()


def _end_with(leash: Connection) -> None:
    try:
        leash.poll(None)  # nothing is ever sent: it returns when the other end is closed, by hand or by the system
    finally:
        os._exit(1)


def _broken() -> FlashtuneError:
    return FlashtuneError(
        "a compile worker died: most often the machine is short of memory, or a script that calls tune() lacks "
        "`if __name__ == '__main__':` around it, which processes started by spawn need"
    )
