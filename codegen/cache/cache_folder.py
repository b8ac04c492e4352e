"""The one way into the cache on disk: cubins, templates, emulator programs, sources that failed to compile.

What is in it runs, so it must be the user's alone: see private_folder.py. Where a cache can't be had or written, a
private temporary folder serves for this process and those it starts, and one warning says how to mend it.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from flashtune import settings
from flashtune.errors import InvalidInput
from flashtune.files import PRIVATE, shown_path

from .private_folder import Root

logger = logging.getLogger("flashtune")

CUBINS, TEMPLATES, EMULATOR, FAILED, CUPY = "cubins", "templates", "emulator", "failed", "cupy"
"""The folders of a cache."""
VARIABLE = "FLASHTUNE_CACHE_DIR"
REMEDY = f"name a folder of your own in {VARIABLE}"
TRIES = 5
"""To write an entry whose folder somebody removes meanwhile."""

_warned = False
_stand_in: Path | None = None
_making = threading.Lock()


def open_entry(kind: str, name: str) -> BinaryIO | None:
    """The entry, open for reading; None if there is none. One that somebody else may have written is none and goes."""
    for root in _roots():
        try:
            with root.open(kind) as folder:
                found = folder.open_file(name)
        except FileNotFoundError:
            continue
        except (OSError, InvalidInput) as error:
            _warn(error)
            continue
        if found is not None:
            return found
    return None


def read_entry(kind: str, name: str) -> bytes | None:
    """The content of the entry; None if there is none that can be read."""
    file = open_entry(kind, name)
    if file is None:
        return None
    try:
        with file:
            return file.read()
    except OSError as error:
        error.filename = f"{kind}/{name}"
        _warn(error)
        return None


def write_entry(kind: str, name: str, content: bytes, *, mode: int = PRIVATE) -> None:
    """Keeps the entry in the cache, else in what stands in for it; without either it is not kept. Never raises."""
    try:
        save_entry(kind, name, content, mode=mode)
    except (OSError, InvalidInput) as error:
        _warn(error)
        with suppress(OSError, InvalidInput):
            _save(_temporary(), kind, name, content, mode)


def save_entry(kind: str, name: str, content: bytes, *, mode: int = PRIVATE) -> Path:
    """Keeps the entry in the cache itself, so that it outlives the process; returns its path.

    Raises ``OSError`` and :class:`InvalidInput`.
    """
    return _save(_cache(), kind, name, content, mode)


def folder_for(kind: str) -> Path:
    """A folder of the cache, else of what stands in for it, for a library that wants a path.

    Raises ``OSError`` and :class:`InvalidInput`.
    """
    with suppress(OSError, InvalidInput), _cache().open(kind, make=True) as folder:
        return folder.path
    with _temporary().open(kind, make=True) as folder:
        return folder.path


def stand_in() -> Path | None:
    """The folder that processes which are started here share in place of a cache that can't be used, else None."""
    try:
        with _cache().open(CUBINS, make=True) as folder:
            if folder.descriptor is None or os.access(".", os.W_OK, dir_fd=folder.descriptor):
                return None
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder.path))
    except (OSError, InvalidInput) as error:
        _warn(error)
    with suppress(OSError):
        return _temporary().path
    return None


def take_over(folder: Path | None) -> None:
    """In a process that another one started: ``folder`` is what its :func:`stand_in` gave. It has said why."""
    global _stand_in, _warned
    if folder is not None:
        _stand_in, _warned = folder, True


def _cache() -> Root:
    return Root(settings.cache_dir(), not settings.is_set(VARIABLE), REMEDY)


def _roots() -> Iterator[Root]:
    try:
        yield _cache()
    except InvalidInput as error:
        _warn(error)
    if _stand_in is not None:
        yield Root(_stand_in, True, REMEDY)


def _temporary() -> Root:
    """What stands in for the cache: gone with this process."""
    global _stand_in
    with _making:
        if _stand_in is None:
            _stand_in = Path(tempfile.mkdtemp(prefix="flashtune-"))
            atexit.register(_remove, _stand_in, os.getpid())
        return Root(_stand_in, True, REMEDY)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a process that was forked off
        shutil.rmtree(folder, ignore_errors=True)


def _save(root: Root, kind: str, name: str, content: bytes, mode: int) -> Path:
    turn = 0
    while True:
        try:
            with root.open(kind, make=True) as folder:
                return folder.write_file(name, content, mode)
        except FileNotFoundError:  # somebody removes the cache at this moment
            turn += 1
            if turn == TRIES:
                raise


def _warn(error: Exception) -> None:
    """One warning per process: each kernel would say the same."""
    global _warned
    if _warned:
        return
    _warned = True
    reason = str(error)
    if isinstance(error, OSError):
        where = shown_path(error.filename) if error.filename else "the folder for temporary files"
        reason = f"{where}: {error.strerror}. Mend that, or name another folder in {VARIABLE}"
    logger.warning("The kernel cache can't be used (%s). What is compiled now is kept for this process alone", reason)
