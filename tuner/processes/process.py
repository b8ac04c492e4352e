"""A process of a session: it is started by spawn, sees no Ctrl-C, and ends with the session, whatever ends that.

It needs nothing of the program that called tune(): no main module that can be imported, so no `if __name__ ==
"__main__"` in it, and no shared memory for semaphores, which is not there in every container.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker, spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flashtune.codegen.cache.cache_folder import stand_in, take_over
from flashtune.codegen.gpu.cuda import own_process
from flashtune.errors import FlashtuneError

_starting = threading.Lock()


class RunEndedError(FlashtuneError):
    """A run can't go on, as it can have no process any more of a kind that it needs. What it has found is kept."""


class Child:
    """Starts a process that runs ``serve(*given, connection)`` and then ends; :class:`OSError` if there can be none.

    ``serve`` and ``given`` are pickled. The other end of ``connection`` is ours. What stands in for a cache that
    can't be used is shared: what one process compiles another one loads.
    """

    def __init__(self, name: str, serve: Callable[..., None], *given: object) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        """Readable when there is an answer, and when there will be none any more."""
        leash, self._leash = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_live, args=(serve, given, stand_in(), theirs, leash), daemon=True, name=name
        )
        if os.name == "posix":
            resource_tracker.ensure_running()  # spawn would start it first, which lets interrupts through again
        try:
            with interrupts_held(), _starting, _main_left_out():
                self._process.start()
        except BaseException:
            self.end()
            raise
        finally:
            theirs.close()  # or the death of the process would not close the pipe
            leash.close()

    def send(self, request: Any) -> None:
        """Raises :class:`OSError` if the process is dying."""
        self.connection.send(request)

    def receive(self) -> Any:
        """The next answer. Raises :class:`EOFError` or :class:`OSError` if the process is dying."""
        return self.connection.recv()

    def kill(self) -> None:
        """Ends the process at once; :meth:`fate` tells when it is dead."""
        if self._process.pid is not None:
            self._process.kill()  # a kernel that hangs lets no gentler end through, and there is nothing to lose

    def end(self) -> None:
        """Ends the process at once and forgets it."""
        self.kill()
        self.connection.close()
        self._leash.close()

    def fate(self, seconds: float = 0.0) -> str:
        """How the process ended, for people; empty if it has not within ``seconds``."""
        self._process.join(seconds)
        code = self._process.exitcode  # None until the last thread is gone, and with it all that it held of a device
        if code is None:
            return ""
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"


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


@contextmanager
def _main_left_out() -> Iterator[None]:
    """A process that this thread starts does not import the main module of this one, as spawn would have it do.

    What is asked of such a process is all in flashtune. To import the main module anew would run a script a second
    time that does not expect that, and fails where there is no file of it, as for a script on standard input.
    """
    everything, thread = spawn.get_preparation_data, threading.get_ident()

    def prepared(name: str) -> dict[str, Any]:
        data = everything(name)
        if threading.get_ident() == thread:
            data.pop("init_main_from_name", None)
            data.pop("init_main_from_path", None)
        return data

    spawn.get_preparation_data = prepared  # spawn has no option for it
    try:
        yield
    finally:
        spawn.get_preparation_data = everything


def _live(
    serve: Callable[..., None],
    given: tuple[object, ...],
    cache: Path | None,
    connection: Connection,
    leash: Connection,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the session
    threading.Thread(target=_end_with, args=(leash,), daemon=True).start()
    take_over(cache)
    own_process()
    try:
        serve(*given, connection)
    except (EOFError, OSError):
        pass  # the session is gone
    finally:
        os._exit(1)  # a broken CUDA context can't be tidied up, and a sound one ends with its process


def _end_with(leash: Connection) -> None:
    try:
        leash.poll(None)  # nothing is ever sent: it returns when the other end is closed, by hand or by the system
    finally:
        os._exit(1)
