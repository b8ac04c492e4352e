"""Making, upgrading and preparing the file of a database, so that it can be opened."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from .files import Header, check_writable, not_writable, on_network, publish, sqlite_failures
from .records import new_id
from .sqlite import Mode, connect

_log = logging.getLogger("flashtune")


def make_database(path: Path, timeout: float) -> None:
    """Makes a whole database beside ``path`` and moves it there, so that nobody ever opens half of one."""
    from .upgrade import upgrade

    made = path.parent / f".{path.name}-{new_id()}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
        with sqlite_failures(path, writing=True, timeout=timeout):
            made.touch(exist_ok=False)
            upgrade(made, timeout)
            _set_journal(made, "DELETE" if on_network(path) else "WAL", timeout)
        publish(made, path)
    except OSError as error:
        raise not_writable(path, error.strerror or str(error)) from error
    finally:
        with suppress(OSError):
            for suffix in ("", "-journal", "-wal", "-shm"):
                Path(f"{made}{suffix}").unlink(missing_ok=True)


def upgrade_database(path: Path, timeout: float) -> None:
    """Brings an existing file to the current schema."""
    from .upgrade import upgrade

    with sqlite_failures(path, writing=True, timeout=timeout):
        upgrade(path, timeout)


def fit_journal(path: Path, header: Header, timeout: float) -> None:
    """WAL on local disks, a rollback journal and a warning where several machines may write."""
    network = on_network(path)
    if network:
        _log.warning(
            "tuning database %s is on a network mount, where SQLite's locks are unreliable: "
            "tune into a local file and merge it later",
            path,
        )
    if header.wal == network:
        with sqlite_failures(path, writing=True, timeout=timeout):
            _set_journal(path, "DELETE" if network else "WAL", timeout)


def _set_journal(path: Path, mode: str, timeout: float) -> None:
    connection = connect(path, "write", timeout)
    try:
        connection.execute(f"PRAGMA journal_mode = {mode}")
    finally:
        connection.close()


def reading_mode(path: Path, header: Header) -> Mode:
    """How to open ``path`` for reading only, given what may be written there."""
    if os.access(path.parent, os.W_OK):
        return "read" if os.access(path, os.W_OK) else "readonly"
    log = Path(f"{path}-wal")
    busy = log.exists() and log.stat().st_size > 0
    # In WAL mode SQLite would need side files, which can't be made there; without a log the file is all there is.
    return "immutable" if header.wal and not busy else "readonly"
