"""Compiles ahead in processes: NVRTC serialises threads. Workers make no CUDA context and fill the disk cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from flashtune.codegen.compiler.kernel_cache import compiled
from flashtune.codegen.compiler.render import Source
from flashtune.errors import CompileError

from .capacity import cores, free_memory
from .process import Child, RunEndedError, interrupts_held

MAX_WORKERS = 16
MIN_WORKERS = 2
"""However few cores there are: a slow compile must not hold up the rest."""
WORKER_BYTES = 768 * 2**20
"""Memory that a worker is taken to need: NVRTC takes a few hundred MB for a large source."""
MAX_DEATHS = 3
"""Workers that may end over one source, and new ones in a row that may end before they can be asked anything."""
BURIAL_SECONDS = 5.0
"""For a process whose pipe is closed to be gone: only to say how it ended."""

USUAL_CAUSE = "most often the machine is short of memory"


class NoCompilerError(RunEndedError):
    """No process can be had that compiles."""


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
        """Compiles ``source``; equal sources share one job. Its result may raise :class:`NoCompilerError`."""

    def close(self) -> None:
        """Drops all jobs that are not done, at once."""


class ProcessBuilder:
    """Compiles for ``arch`` in up to ``workers`` processes, fewer if memory is short.

    Each job has a process to itself, from those that are idle or a new one. One that dies costs nobody else anything,
    and its source is tried again in another.
    """

    def __init__(self, arch: str, workers: int) -> None:
        self.arch = arch
        self.workers = pool_size(workers, free_memory())
        self._jobs: dict[str, Future[Built]] = {}
        self._threads = ThreadPoolExecutor(self.workers, "flashtune compile")
        """Each waits for one process, so there are never more of these."""
        self._hired: set[Child] = set()
        self._idle: list[Child] = []
        self._closed = self._fruitful = False
        self._given_up = 0
        self._change = threading.Condition()
        """Of workers. Whoever can't start another waits for one that is idle."""

    def submit(self, source: Source) -> Future[Built]:
        digest = source.digest
        if digest not in self._jobs:
            self._jobs[digest] = self._threads.submit(self._build, source)
        return self._jobs[digest]

    def close(self) -> None:
        with interrupts_held(), self._change:  # a thread that waits for a worker is waited for by Python's end
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._closed = True
            for each in self._hired:
                each.kill()  # the thread that waits for it closes its pipe
            for each in self._idle:
                each.end()
            self._change.notify_all()

    def _build(self, source: Source) -> Built:
        fate = ""
        for _ in range(MAX_DEATHS):
            worker = self._worker()
            try:
                worker.send(source)
                answer: Built | Exception = worker.receive()
            except (EOFError, OSError):
                fate = self._bury(worker)
                continue
            with self._change:
                self._idle.append(worker)
                self._fruitful = True
                self._change.notify()
            if isinstance(answer, Exception):
                raise answer
            return answer
        return self._give_up(source, fate)

    def _give_up(self, source: Source, fate: str) -> Built:
        """What is said of a source that cost too many workers; of several where nothing else compiled, that is all."""
        with self._change:
            self._given_up += 1
            if self._given_up >= MAX_DEATHS and not self._fruitful:
                raise NoCompilerError(
                    f"compile workers died over each of {self._given_up} sources, the last one {fate}: {USUAL_CAUSE}"
                )
        error = f"a compile worker died {MAX_DEATHS} times over it; the last one {fate}"
        return Built(digest=source.digest, error=error, crashed=True)

    def _worker(self) -> Child:
        """One that waits for a source: an idle one, or a new one."""
        fate, deaths = "", 0
        while deaths < MAX_DEATHS:
            with self._change:
                if self._closed:
                    raise NoCompilerError("the session is over")
                while self._idle:
                    worker = self._idle.pop()
                    if not worker.fate():
                        return worker
                    self._bury(worker)  # killed while it had nothing to do
                try:
                    worker = Child("flashtune compiler", _serve, build, self.arch)
                except OSError as error:
                    if not self._hired:
                        raise NoCompilerError(f"no compile worker can be started: {error.strerror or error}") from error
                    self._change.wait()
                    continue
                self._hired.add(worker)
            try:
                worker.receive()  # it has imported what it needs
            except (EOFError, OSError):
                fate = self._bury(worker)
                deaths += 1
            else:
                return worker
        raise NoCompilerError(
            f"{MAX_DEATHS} compile workers in a row ended as they started; each {fate}: {USUAL_CAUSE}"
        )

    def _bury(self, worker: Child) -> str:
        """How ``worker`` ended, which is forgotten."""
        fate = worker.fate(BURIAL_SECONDS) or "closed its pipe"
        worker.end()
        with self._change:
            self._hired.discard(worker)
            self._change.notify()
        return fate


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


def wait_for_any(jobs: Iterable[Future[Built]], seconds: float | None = None) -> None:
    """Returns when one of ``jobs`` is done, or after ``seconds``."""
    wait(set(jobs), timeout=seconds, return_when=FIRST_COMPLETED)


def _serve(work: Callable[[Source, str], Built], arch: str, connection: Connection) -> None:
    """A worker's life: says that it is there, then compiles until the session is gone."""
    connection.send(None)
    while True:
        source = connection.recv()
        try:
            answer: Built | Exception = work(source, arch)
        except Exception as error:  # such as a compiler that is not installed: for the session to raise
            answer = error
        connection.send(answer)
