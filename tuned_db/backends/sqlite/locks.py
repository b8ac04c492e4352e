"""SQLite's own locks on the file of a database, had and asked for by its descriptor.

So a copy can be made while others write, by the rules that they keep to, and SQLite itself need not open the file.
"""

from __future__ import annotations

import errno
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Self

from .files import opened

try:
    import fcntl
except ImportError:  # not on POSIX
    fcntl = None  # type: ignore[assignment]

_PENDING, _RESERVED, _SHARED = (0x40000000, 1), (0x40000001, 1), (0x40000002, 510)
"""Bytes of a database, and how many, that SQLite locks: who waits to write, who has begun to, and who reads."""
_SET, _GET = getattr(fcntl, "F_OFD_SETLK", None), getattr(fcntl, "F_OFD_GETLK", None)
_READ, _WRITE, _NONE = (getattr(fcntl, name, 0) for name in ("F_RDLCK", "F_WRLCK", "F_UNLCK"))
KNOWN = _SET is not None
"""Whether the system has locks that belong to a descriptor."""


class ReaderLock:
    """SQLite's lock for readers, for the time of a block.

    It belongs to the descriptor and not to the process, so it is none of those that SQLite has here. Where a system or
    a disk has no such locks (``F_OFD_SETLK``), that nothing was changed shows afterwards alone.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.free = True
        """Whether it could be had: no writer is about to change the file."""

    def __enter__(self) -> Self:
        try:
            for kind, place in ((_READ, _PENDING), (_READ, _SHARED), (_NONE, _PENDING)):
                self._ask(_SET, kind, place)
        except OSError as error:
            self.free = error.errno not in (errno.EAGAIN, errno.EACCES)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for place in (_PENDING, _SHARED):
            with suppress(OSError):
                self._ask(_SET, _NONE, place)

    def writer(self) -> bool:
        """Whether a writer has begun, who changes the file only once nobody has this lock."""
        try:
            return self.asked(_READ, _RESERVED) not in (_NONE, None)
        except OSError:
            return False

    def asked(self, kind: int, place: tuple[int, int]) -> int | None:
        """What keeps a lock of that kind from being had; None where there are no such locks."""
        return self._ask(_GET, kind, place)

    def _ask(self, what: int | None, kind: int, place: tuple[int, int]) -> int | None:
        if fcntl is None or what is None:
            return None
        answer = fcntl.fcntl(self._descriptor, what, struct.pack("@hhqqi4x", kind, os.SEEK_SET, *place, 0))
        return int(struct.unpack_from("@h", answer)[0])


def in_use(path: Path) -> bool:
    """Whether a process has the database at ``path`` open for more than a moment, as far as the system can tell: with a
    log each connection has a lock all the time, without one while it reads or writes."""
    with opened(path) as file:
        try:
            return ReaderLock(file.fileno()).asked(_WRITE, _SHARED) not in (_NONE, None)
        except OSError:
            return False
