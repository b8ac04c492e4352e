"""The one way into a file that somebody else may have written, and the one way to write a file whole.

A leaf: imports nothing of the project but errors. Errors of the system keep their class and name the path that the
caller gave, never a temporary one.

A descriptor that this process was started with (``/dev/stdin``, ``/dev/stdout``, ``/dev/fd/5``, which shells make of
``<(...)``) is one that the user has opened: :func:`write_whole` writes to it and :func:`read_given` reads it, whatever
is behind it.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, Literal

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
_STANDARD = ("stdin", "stdout", "stderr")
_PIECE = 2**16
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def shown_path(path: str | bytes | os.PathLike[str]) -> str:
    """``path`` for a message: as it is where all of it can be printed, else with an escape for each character that
    can't, such as ``\\n``, ``\\x1b``, and ``\\xe9`` for a byte that is no UTF-8."""
    text = os.fsdecode(path)
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(char: str) -> str:
    if char.isprintable():
        return char
    if "\udc80" <= char <= "\udcff":  # how Python has a byte that is no UTF-8
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")


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
    with errors_name(path), open_regular(path, what) as file:
        return _all_of(file, path, limit, what)


def read_given(path: str | Path, limit: int, what: str = "") -> bytes:
    """:func:`read_regular` for a path that a user typed, see :func:`open_given`."""
    with open_given(path, what) as file:
        return _all_of(file, path, limit, what)


@contextmanager
def open_given(path: str | Path, what: str = "") -> Iterator[IO[bytes]]:
    """:func:`open_regular` for a path that a user typed, which may be a descriptor of this process. Errors of the
    system in the block name ``path``."""
    descriptor = _descriptor(Path(path))
    with errors_name(path), open_regular(path, what) if descriptor is None else _duplicate(descriptor, "rb") as file:
        yield file


def _all_of(file: IO[bytes], path: str | Path, limit: int, what: str) -> bytes:
    content = io.BytesIO()
    while piece := file.read(min(_PIECE, limit + 1 - content.tell())):  # all at once would take the limit's memory
        content.write(piece)
    if content.tell() > limit:
        raise InvalidInput(f"{_named(path, what)} has more than {limit} bytes")
    return content.getvalue()


@contextmanager
def errors_name(path: str | Path) -> Iterator[None]:
    """Errors of the system in the block name ``path``. Those of reading and writing have no name of their own."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def write_whole(
    path: str | Path,
    content: bytes,
    *,
    mode: int = PRIVATE,
    durable: bool = True,
    replace: bool = True,
    dir_fd: int | None = None,
) -> None:
    """Writes ``content`` beside ``path`` under a random name, syncs it and renames it. Raises ``OSError``.

    Readers see the old file, the new one or none, never a part; what fails leaves nothing behind. An existing regular
    file keeps its permissions, a new one gets ``mode``. A symbolic link at ``path`` is replaced, never followed, so a
    link that came with somebody's folder overwrites nothing. What can't be replaced is written to plainly: see
    :func:`is_stream`; a pipe that nobody reads is an error. Without ``durable`` a crash of the machine may lose the
    file: for what has a checksum and can be made again. Without ``replace`` whatever is at ``path`` is left as it is:
    ``FileExistsError``. ``dir_fd`` is the descriptor of the folder that a relative ``path`` counts from.
    """
    path = Path(path)
    with errors_name(path):
        if replace and dir_fd is None and (descriptor := _descriptor(path)) is not None:
            with _duplicate(descriptor, "wb") as file:
                file.write(content)
        elif replace and _special(path, dir_fd, links=False):
            _append(path, content, dir_fd)
        else:
            _write_beside(path, content, mode, durable, replace, dir_fd)


def is_stream(path: str | Path) -> bool:
    """Whether :func:`write_whole` writes to ``path`` plainly: a descriptor of this process, a pipe or a device."""
    path = Path(path)
    return _descriptor(path) is not None or _special(path, links=False) not in (None, _KINDS[stat.S_IFDIR])


def _write_beside(path: Path, content: bytes, mode: int, durable: bool, replace: bool, dir_fd: int | None) -> None:
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
        if replace:
            os.replace(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            claim(temporary, path, dir_fd)
    except BaseException:
        os.unlink(temporary, dir_fd=dir_fd)
        raise
    if durable:
        sync_folder(path.parent, dir_fd)


def claim(finished: Path, path: Path, dir_fd: int | None = None) -> None:
    """Gives ``finished`` the name ``path``, unless something has it (``FileExistsError``): of several processes the
    first wins, and no reader ever sees a part of a file."""
    try:
        os.link(finished, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # Whoever makes the file owns the name, and replaces it at once.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOT_WAITING, PRIVATE, dir_fd=dir_fd))
        os.replace(finished, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    else:
        os.unlink(finished, dir_fd=dir_fd)


def sync_folder(folder: Path, dir_fd: int | None = None) -> None:
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


def _append(path: Path, content: bytes, dir_fd: int | None) -> None:
    flags = os.O_WRONLY | os.O_APPEND | _NOT_WAITING | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ENXIO and _special(path, dir_fd) == "a pipe":
            error.strerror = "nobody reads this pipe"
        raise
    with open(descriptor, "wb") as file:
        if hasattr(os, "set_blocking"):
            os.set_blocking(descriptor, True)
        file.write(content)


def _descriptor(path: Path) -> int | None:
    """The number of the descriptor of this process that ``path`` names."""
    folder = os.path.realpath(path.parent)
    if folder == os.path.realpath("/dev") and path.name in _STANDARD:
        return _STANDARD.index(path.name)
    if path.name.isascii() and path.name.isdecimal() and folder in ("/dev/fd", os.path.realpath("/proc/self/fd")):
        return int(path.name)
    return None


def _duplicate(descriptor: int, mode: Literal["rb", "wb"]) -> IO[bytes]:
    """The descriptor as a file that may be closed. To open it anew may be forbidden, and would begin again.

    One that a child would not inherit was opened by this process, and is not meant.
    """
    if not os.get_inheritable(descriptor):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return open(os.dup(descriptor), mode)


def _special(path: str | Path, dir_fd: int | None = None, *, links: bool = True) -> str | None:
    """What ``path`` is, if something other than a regular file, or without ``links`` a symbolic link, is there."""
    try:
        mode = os.stat(path, dir_fd=dir_fd, follow_symlinks=links).st_mode
    except OSError:
        return None
    return None if stat.S_ISREG(mode) or stat.S_ISLNK(mode) else _kind(mode)


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something")


def _refused(path: str | Path, what: str, kind: str) -> InvalidInput:
    return InvalidInput(f"{_named(path, what)} is {kind}, not a file")


def _named(path: str | Path, what: str) -> str:
    return f"{what} {shown_path(path)}" if what else shown_path(path)
