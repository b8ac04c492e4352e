"""SQLite as it should be run: engines whose connections have the right pragmas and begin writes as writes."""

from __future__ import annotations

import functools
import sqlite3
from pathlib import Path
from typing import Literal

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.pool import NullPool

Mode = Literal["write", "read", "readonly", "immutable"]
"""``write``: transactions begin with BEGIN IMMEDIATE, so that two writers wait for each other instead of failing.
``read``: a file that we may write but don't; SQLite may recover it after a crash and tidies up its side files.
``readonly``: a file that we can't write. ``immutable``: one whose folder we can't write either: no side files, no
locks."""

_URI = {"write": "rw", "read": "rw", "readonly": "ro", "immutable": "ro&immutable=1"}


def connect(path: Path, mode: Mode, timeout: float) -> sqlite3.Connection:
    """An autocommit connection to an existing file; ``timeout`` in seconds is how long it waits for a lock."""
    uri = f"{path.as_uri()}?mode={_URI[mode]}"
    connection = sqlite3.connect(uri, uri=True, timeout=timeout, isolation_level=None, check_same_thread=False)
    connection.text_factory = _text
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        if mode != "write":
            connection.execute("PRAGMA query_only = ON")
        else:
            # Without a log, pages that leave the cache early wait for readers, each as long as is allowed; so a large
            # transaction beside one reader would take hours to fail. They all leave together, and wait once.
            connection.execute("PRAGMA cache_spill = OFF")
    except BaseException:
        connection.close()
        raise
    return connection


def _text(stored: bytes) -> str | bytes:
    """What is not UTF-8 stays bytes, which no check takes: one such row must not make all others unreadable."""
    try:
        return stored.decode()
    except UnicodeDecodeError:
        return stored


@functools.lru_cache(maxsize=64)
def engine(path: Path, mode: Mode, timeout: float) -> Engine:
    """The engine for ``path``. Kept, since it keeps compiled statements; it holds no connection between uses, so it
    survives fork and a replaced file."""
    made = create_engine("sqlite://", creator=lambda: connect(path, mode, timeout), poolclass=NullPool)

    @event.listens_for(made, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if mode == "write" else "BEGIN")

    return made
