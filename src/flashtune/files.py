"""The one way into a file that somebody else may have written, and the one way to write a file whole.

A leaf: imports nothing of the project but errors. Errors of the system keep their class and name the path that the
caller gave, never a temporary one.
"""

from __future__ import annotations

import os
import stat
import uuid
from pathlib import Path
from typing import BinaryIO

from .errors import InvalidInput

PRIVATE = 0o600
"""Mode of a new file that is for this user alone."""
SHARED = 0o666
"""Mode of a new file that is made to be given to others; as everywhere, the umask takes from it."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_NOT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: str | Path, what: str = "", *, dir_fd: int | None = None, links: bool = True) -> BinaryIO:
    """The regular file at ``path``, open for reading in binary mode; opening a pipe or a device would wait or act.

    It is opened once and then looked at, so what was checked is what is read. ``what`` names it in the message:
    ``export``. ``dir_fd`` is the descriptor of the folder that a relative ``path`` counts from. Without ``links`` a
    symbolic link is refused (``OSError``). Raises `InvalidInput` for what is no regular file, else ``OSError``.
    """
    flags = os.O_RDONLY | _NOT_WAITING | (0 if links else getattr(os, "O_NOFOLLOW", 0))
    try:
        descriptor = os.open(path, flags, dir_fd=dir_fd)
    except OSError as error:  # a socket can't be opened at all, and some systems open no folder
        if (kind := _special(path, dir_fd)) is not None:
            raise _refused(path, what, kind) from error
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise _refused(path, what, _kind(mode))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, limit: int, what: str = "") -> bytes:
    """The content of the regular file at ``path``; `InvalidInput` for another kind of file, or for more than ``limit``
    bytes."""
    with open_regular(path, what) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise InvalidInput(f"{_named(path, what)} has more than {limit} bytes")
    return content


def write_whole(
    path: str | Path, content: bytes, *, mode: int = PRIVATE, durable: bool = True, dir_fd: int | None = None
) -> None:
    """Writes ``content`` beside ``path`` under a random name, syncs it and renames it. Raises ``OSError``.

    Readers see the old file, the new one or none, never a part; what fails leaves nothing behind. An existing regular
    file keeps its permissions, a new one gets ``mode``. A symbolic link at ``path`` is replaced, never followed, so a
    link that came with somebody's folder overwrites nothing. Two kinds of place can't be replaced and are written to
    plainly: what is no regular file, such as a pipe, and a descriptor of this process, such as ``/dev/stdout``; a pipe
    that nobody reads is an error. Without ``durable`` a crash of the machine may lose the file: for what has a
    checksum and can be made again. ``dir_fd`` is the descriptor of the folder that a relative ``path`` counts from.
    """
    path = Path(path)
    try:
        if _plain(path, dir_fd):
            _append(path, content, dir_fd)
        else:
            _replace(path, content, mode, durable, dir_fd)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def _replace(path: Path, content: bytes, mode: int, durable: bool, dir_fd: int | None) -> None:
    temporary = path.with_name(f".{path.name[:40]}.{uuid.uuid4().hex}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOT_WAITING, mode, dir_fd=dir_fd)
    try:
        with open(descriptor, "wb") as file:
            if (kept := _permissions(path, dir_fd)) is not None and hasattr(os, "fchmod"):
                os.fchmod(descriptor, kept)
            file.write(content)
            file.flush()
            if durable:
                os.fsync(descriptor)
        os.replace(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        os.unlink(temporary, dir_fd=dir_fd)
        raise
    if durable:
        _sync_folder(path.parent, dir_fd)


def _sync_folder(folder: Path, dir_fd: int | None) -> None:
    """Puts the new name on the disk, too."""
    if not hasattr(os, "O_DIRECTORY"):  # elsewhere a folder can't be opened, and names are safe without
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=dir_fd)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _permissions(path: Path, dir_fd: int | None) -> int | None:
    """Those of the regular file that is there; None for anything else."""
    try:
        found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None
    return stat.S_IMODE(found) & 0o777 if stat.S_ISREG(found) else None


def _plain(path: Path, dir_fd: int | None) -> bool:
    """Whether ``path`` is a place that is written to and not replaced."""
    if _special(path, dir_fd) is not None:
        return True
    try:
        target = os.readlink(path, dir_fd=dir_fd)
    except OSError:  # no link
        target = ""
    own = f"{os.sep}proc{os.sep}"
    return target.startswith(own) or (dir_fd is None and os.path.realpath(path.parent).startswith(own))


def _append(path: Path, content: bytes, dir_fd: int | None) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | _NOT_WAITING, dir_fd=dir_fd)
    with open(descriptor, "wb") as file:
        if hasattr(os, "set_blocking"):
            os.set_blocking(descriptor, True)
        file.write(content)


def _special(path: str | Path, dir_fd: int | None) -> str | None:
    """What ``path`` is, if something other than a regular file is there."""
    try:
        mode = os.stat(path, dir_fd=dir_fd).st_mode
    except OSError:
        return None
    return None if stat.S_ISREG(mode) else _kind(mode)


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something")


def _refused(path: str | Path, what: str, kind: str) -> InvalidInput:
    return InvalidInput(f"{_named(path, what)} is {kind}, not a file")


def _named(path: str | Path, what: str) -> str:
    return f"{what} {path}" if what else str(path)
