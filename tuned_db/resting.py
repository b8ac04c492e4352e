"""Look-ups in a file that nobody writes, on a connection that is kept: most of a look-up was to open one.

A database is at rest where no log or journal lies beside it, and where its last change is so long ago that the next one
can't have the same time. Then the file is all there is, and it is read without locks (SQLite's ``immutable``): what is
kept is in nobody's way. If the file is not as it was when the connection was made, before an answer or after it, both
are dropped, and it is opened as any other is. So is one on a network mount, whose times may be old; which those are is
known on Linux only.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection

from flashtune.errors import StoreError

from .copying import SIDE_FILES
from .files import on_network, read_header, sqlite_failures
from .opening import File, path_of_file
from .sqlite import engine
from .store import Store

_log = logging.getLogger("flashtune")

RESTED = 2_000_000_000
"""Nanoseconds since the last change, from which on a file counts as at rest: some tell times 2 s apart."""

T = TypeVar("T")
State = tuple[int, ...]


def look_up(path: str | Path, timeout: float, ask: Callable[[Store], T]) -> T:
    """What ``ask`` makes of the database at ``path``, which is as it is at one moment. It may be asked twice.

    ``timeout`` is how many seconds a lock is waited for. Raises what `Store.open` does for a file that is only read.
    """
    given = path_of_file(path)
    path = Path(os.path.realpath(given))  # where SQLite looks for a log
    kept = _taken(path) or _opened(path, timeout)
    if kept is not None:
        try:
            with sqlite_failures(path, writing=False, timeout=timeout):
                answer = ask(kept.view)
            if resting(path) == kept.state:
                _keep(kept)
                return answer
        except StoreError as error:  # the file may have changed meanwhile; if it has not, it is raised again below
            _log.debug("%s is opened anew: %s", path, error)
        kept.connection.close()
    with Store.look_into(given, timeout=timeout) as view:
        return ask(view)


def resting(path: Path) -> State | None:
    """Which file is at ``path``, which is no link, and when it was last changed, if it is at rest, else None."""
    try:
        found = os.stat(path)
    except OSError:  # who opens it says why
        return None
    last = max(found.st_mtime_ns, found.st_ctime_ns)
    if found.st_nlink != 1:  # its log may have another of its names
        return None
    if time.time_ns() - last < RESTED or any(os.path.lexists(f"{path}{suffix}") for suffix in SIDE_FILES):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@dataclass(frozen=True, slots=True)
class _Kept:
    path: Path
    state: State
    connection: Connection
    view: Store


_kept: list[_Kept] = []
"""One at most. Who uses it takes it out, so that a thread never waits for another."""
_inherited: list[_Kept] = []
_exchange = threading.Lock()


def _taken(path: Path) -> _Kept | None:
    """What is kept for ``path``, if the file is still as it was."""
    with _exchange:
        kept = _kept.pop() if _kept and _kept[0].path == path else None
    if kept is not None and resting(path) != kept.state:
        kept.connection.close()
        return None
    return kept


def _opened(path: Path, timeout: float) -> _Kept | None:
    """A new one, if the file is at rest. The file is looked at before it is opened, and again after each answer."""
    state = resting(path)
    if state is None or not sys.platform.startswith("linux") or on_network(path):
        return None
    read_header(path)
    connection = engine(path, "immutable", timeout).connect()
    try:
        with sqlite_failures(path, writing=False, timeout=timeout):
            own = connection.connection.dbapi_connection
            assert own is not None
            own.text_factory = str  # faster than ours; text that is no UTF-8 fails, and the file is opened anew
            connection.begin()
            view = Store(File(path, "immutable", readonly=True, timeout=timeout), connection)
            return _Kept(path, state, connection, view)
    except BaseException:
        connection.close()
        raise


def _keep(kept: _Kept) -> None:
    with _exchange:
        others = [*_kept]
        _kept[:] = [kept]
    for each in others:
        each.connection.close()


@atexit.register
def forget() -> None:
    """Closes what is kept."""
    with _exchange:
        others = [*_kept]
        _kept.clear()
    for each in others:
        each.connection.close()


def _after_fork() -> None:
    """A child leaves the connection of its parent alone, open: another thread may have been in the middle of it."""
    global _exchange
    _exchange = threading.Lock()
    _inherited.extend(_kept)
    _kept.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
