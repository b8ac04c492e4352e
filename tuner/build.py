"""Compiles ahead in processes: NVRTC serialises threads. Workers make no CUDA context and fill the disk cache."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
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

from .capacity import cores, free_memory

MAX_WORKERS = 16
MIN_WORKERS = 2
"""However few cores there are: a slow compile must not hold up the rest."""
WORKER_BYTES = 768 * 2**20
"""Memory that a worker is taken to need: NVRTC takes a few hundred MB for a large source."""
MAX_DEATHS = 3
"""Pools in a row that may break before they have compiled anything, and pools that may break with a source in them."""

USUAL_CAUSES = (
    "most often the machine is short of memory, or a script that calls tune() lacks `if __name__ == '__main__':` "
    "around it, which processes started by spawn need"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Facts of one compiled source; the cubin is in the disk cache. ``error`` is empty where it compiled.

    ``crashed`` tells an error that may be another source's fault, or the machine's, from one of the compiler.
    """

    digest: str
    registers: int = 0
    spill_bytes: int = 0
    static_shared_bytes: int = 0
    nvrtc: str = ""
    complaint: str = ""
    error: str = ""
    crashed: bool = False


class Builder(Protocol):
    """What a session needs to compile."""

    workers: int

    def submit(self, source: Source) -> Future[Built]:
        """Compiles ``source``; equal sources share one job. One that is :func:`broken` is replaced."""

    def close(self) -> None:
        """Drops all jobs that are not done, at once."""


class ProcessBuilder:
    """Compiles for ``arch`` in up to ``workers`` processes, fewer if memory is short. If one dies, all are replaced."""

    def __init__(self, arch: str, workers: int) -> None:
        self.arch = arch
        self.workers = pool_size(workers, free_memory())
        self._jobs: dict[str, Future[Built]] = {}
        self._tries: Counter[str] = Counter()
        self._barren = 0
        self._open_pool()

    def submit(self, source: Source) -> Future[Built]:
        digest = source.digest
        job = self._jobs.get(digest)
        if job is None or broken(job):
            job = self._jobs[digest] = self._start(source, digest)
        return job

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._leash.close()

    def _start(self, source: Source, digest: str) -> Future[Built]:
        if self._tries[digest] == MAX_DEATHS:
            job: Future[Built] = Future()
            error = f"a compile worker died {MAX_DEATHS} times over it, or over another source beside it"
            job.set_result(Built(digest=digest, error=error, crashed=True))
            return job
        self._tries[digest] += 1
        while True:
            try:
                with interrupts_held():
                    job = self._pool.submit(build, source, self.arch)
            except BrokenProcessPool as error:
                self._replace_pool(error)
            else:
                self._present.append(job)
                return job

    def _open_pool(self) -> None:
        context = get_context("spawn")
        leash, self._leash = context.Pipe(duplex=False)
        self._present: list[Future[Built]] = []
        self._pool = ProcessPoolExecutor(self.workers, context, initializer=begin, initargs=(leash,))

    def _replace_pool(self, error: BrokenProcessPool) -> None:
        fruitful = any(each.done() and not broken(each) for each in self._present)
        self._barren = 0 if fruitful else self._barren + 1
        if self._barren == MAX_DEATHS:
            raise _broken() from error
        self.close()
        self._open_pool()


def pool_size(wanted: int, memory: int | None) -> int:
    """How many of ``wanted`` processes compile where ``memory`` bytes (None: unknown) are free."""
    most = MAX_WORKERS if memory is None else min(MAX_WORKERS, memory // WORKER_BYTES)
    return max(1, min(wanted, most))


def spare_workers(devices: int) -> int:
    """How many processes may compile beside workers for ``devices`` devices: a core for each."""
    return max(MIN_WORKERS, cores() - devices)


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
        complaint=found.complaint,
    )


def result(job: Future[Built]) -> Built:
    """The result of a job, waiting for it."""
    try:
        return job.result()
    except BrokenProcessPool as error:
        raise _broken() from error


def broken(job: Future[Built]) -> bool:
    """Whether the processes died before ``job`` was done."""
    return job.done() and not job.cancelled() and isinstance(job.exception(), BrokenProcessPool)


def wait_for_any(jobs: Iterable[Future[Built]], seconds: float | None = None) -> None:
    """Returns when one of ``jobs`` is done, or after ``seconds``."""
    wait(set(jobs), timeout=seconds, return_when=FIRST_COMPLETED)


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
    return FlashtuneError(f"a compile worker died: {USUAL_CAUSES}")
