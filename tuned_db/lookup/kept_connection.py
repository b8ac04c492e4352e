"""Look-ups: in a file at rest on a connection that is kept, as most of a look-up was to open one, and in any other.

A database is at rest where its last change, and that of its log, is so long ago that the next one can't have the same
time. Then it is read without locks (SQLite's ``immutable``): what is kept is in nobody's way. If it is not as it was
when the connection was made, before an answer or after it, both are dropped, and it is opened as any other is. So is
one on a network mount, whose times may be old; which those are is known on Linux only.

No look-up writes anything. SQLite reads no log without making and writing files beside it, so a database that has one,
or may get one, is read from a private copy. So is one that strangers may replace while it is opened.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection

from flashtune.errors import StoreError
from flashtune.files import shown_path
from flashtune.tuned_db.backends.sqlite.connections import connection_to, raw
from flashtune.tuned_db.backends.sqlite.disks import on_network
from flashtune.tuned_db.backends.sqlite.failures import sqlite_failures
from flashtune.tuned_db.backends.sqlite.files import look_beside, read_header, replaceable
from flashtune.tuned_db.backends.sqlite.opening import File, path_of_file
from flashtune.tuned_db.backends.sqlite.private_copy import PrivateCopy
from flashtune.tuned_db.store.store import Store

_log = logging.getLogger("flashtune")

RESTED = 2_000_000_000
"""Nanoseconds since the last change, from which on a file counts as at rest: some tell times 2 s apart."""

T = TypeVar("T")
State = tuple[int, ...]


def look_up(path: str | Path, timeout: float, ask: Callable[[Store], T]) -> T:
    """What ``ask`` makes of the database at ``path``, which is as it is at one moment. It may be asked twice.

    ``timeout`` is how many seconds a lock is waited for, and how many all queries may take. Raises what `Store.open`
    does for a file that is only read.
    """
    asked = _LookUp(path_of_file(path), timeout)
    kept = _taken(asked) or _opened(asked)
    if kept is not None:
        try:
            with asked.failures():
                raw(kept.connection).watch.deadline = asked.deadline
                answer = ask(kept.store)
            if resting(asked.real) == kept.state:
                _keep(kept)
                kept = None
                return answer
        except StoreError as error:  # the file may have changed meanwhile; if it has not, it is raised again below
            _log.debug("%s is opened anew: %s", shown_path(path), error)
        finally:
            if kept is not None:
                kept.close()
    view = _open(asked, None)
    try:
        with asked.failures():
            return ask(view.store)
    finally:
        view.close()


def resting(path: Path) -> State | None:
    """Which file is at ``path``, which is no link, and when it and its log were last changed, if it is at rest, else
    None."""
    try:
        found = [os.stat(path)]
    except OSError:  # who opens it says why
        return None
    with suppress(OSError):
        found.append(os.lstat(f"{path}-wal"))
    if found[0].st_nlink != 1 or os.path.lexists(f"{path}-journal"):  # its log may have another of its names
        return None
    if time.time_ns() - max(max(each.st_mtime_ns, each.st_ctime_ns) for each in found) < RESTED:
        return None
    return tuple(fact for each in found for fact in _facts(each))


def _facts(found: os.stat_result) -> State:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class _LookUp:
    """A file to look into, and until when."""

    def __init__(self, given: Path, timeout: float) -> None:
        self.given = given
        self.real = Path(os.path.realpath(given))
        """Where SQLite looks for what lies beside it."""
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout

    def failures(self) -> AbstractContextManager[None]:
        return sqlite_failures(self.given, writing=False, timeout=self.timeout)


@dataclass(frozen=True, slots=True)
class _View:
    """A file that is open."""

    path: Path
    state: State | None
    connection: Connection
    store: Store
    copy: PrivateCopy | None

    def close(self) -> None:
        self.connection.close()
        if self.copy is not None:
            self.copy.close()


_kept: list[_View] = []
"""One at most. Who uses it takes it out, so that a thread never waits for another."""
_inherited: list[_View] = []
_exchange = threading.Lock()


def _taken(asked: _LookUp) -> _View | None:
    """What is kept for a file, if that is still as it was."""
    with _exchange:
        kept = _kept.pop() if _kept and _kept[0].path == asked.real else None
    if kept is not None and resting(asked.real) != kept.state:
        kept.close()
        return None
    return kept


def _opened(asked: _LookUp) -> _View | None:
    """A new one, if the file is at rest. The file is looked at before it is opened, and again after each answer."""
    state = resting(asked.real)
    if state is None or not sys.platform.startswith("linux") or on_network(asked.real):
        return None
    return _open(asked, state)


def _open(asked: _LookUp, state: State | None) -> _View:
    """With the state of a file at rest to be kept, else to be asked once."""
    beside, header = look_beside(asked.real), read_header(asked.given)
    copy = None
    if beside.log or (header.wal and state is None) or replaceable(asked.real):
        left = max(0.0, asked.deadline - time.monotonic())
        copy = PrivateCopy(asked.given, asked.timeout, check=False, within=left)
    path, still = (asked.real, state is not None) if copy is None else (copy.path, True)
    connection = None
    try:
        with asked.failures():
            connection = connection_to(path, "immutable" if still else "readonly", asked.timeout, asked.given)
            raw(connection).watch.deadline = asked.deadline
            connection.begin()
            store = Store(File(asked.given, readonly=True, timeout=asked.timeout), connection)
            if state is not None:  # faster than ours; text that is no UTF-8 fails, and the file is opened anew
                raw(connection).text_factory = str
            return _View(asked.real, state, connection, store, copy)
    except BaseException:
        if connection is not None:
            connection.close()
        if copy is not None:
            copy.close()
        raise


def _keep(kept: _View) -> None:
    with _exchange:
        others = [*_kept]
        _kept[:] = [kept]
    for each in others:
        each.close()


@atexit.register
def forget() -> None:
    """Closes what is kept."""
    with _exchange:
        others = [*_kept]
        _kept.clear()
    for each in others:
        each.close()


def _after_fork() -> None:
    """A child leaves the connection of its parent alone, open: another thread may have been in the middle of it."""
    global _exchange
    _exchange = threading.Lock()
    _inherited.extend(_kept)
    _kept.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
