"""Folders of files that run with the rights of their user, so that this user alone may have written them.

The folder is opened first and then the file, and the open descriptors are asked who owns them and who may write to
them: what was checked is what is used, whatever is renamed meanwhile. The superuser, who may write anywhere, is
trusted: a container may bring kernels along. What is made here is for the user alone, whatever the umask.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from flashtune.errors import InvalidInput
from flashtune.files import errors_name, open_regular, shown_path, write_whole

_BY_DESCRIPTOR = hasattr(os, "O_DIRECTORY") and os.open in os.supports_dir_fd
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OWN = 0o700


@dataclass(frozen=True, slots=True)
class Root:
    """A folder whose folders hold such files. One that flashtune ``made`` up itself may get other permissions.

    ``remedy`` says what to do where it can't be used.
    """

    path: Path
    made: bool
    remedy: str

    def open(self, kind: str, *, make: bool = False) -> Folder:
        """The folder ``kind``. ``make`` makes it with all that is missing above it.

        Raises `InvalidInput` if others can write to it or to the root, and ``OSError``.
        """
        if not _BY_DESCRIPTOR:
            if make:
                (self.path / kind).mkdir(parents=True, exist_ok=True)
            return Folder(self.path, kind, None)
        above = self._descriptor("", None, make)
        try:
            return Folder(self.path, kind, self._descriptor(kind, above, make))
        finally:
            os.close(above)

    def _descriptor(self, kind: str, above: int | None, make: bool) -> int:
        """That of ``kind`` in the open folder ``above``; without that, of the root.

        Only the root may be a link, which its user made.
        """
        name, flags = (self.path, _FOLDER) if above is None else (kind, _FOLDER | _NO_LINK)
        new = False
        try:
            try:
                descriptor = os.open(name, flags, dir_fd=above)
            except FileNotFoundError:
                if not make:
                    raise
                new = _make(self.path if above is None else Path(kind), above)
                descriptor = os.open(name, flags, dir_fd=above)
            try:
                self._check(descriptor, kind, new)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            error.filename = str(self.path / kind)
            raise
        return descriptor

    def _check(self, descriptor: int, kind: str, new: bool) -> None:
        """Raises `InvalidInput` unless this user alone can write to the folder. What flashtune made it mends.

        Earlier versions left it open to the group where the umask does; a ``new`` one may lack what a umask took.
        """
        found = os.fstat(descriptor)
        own = found.st_uid == os.geteuid()
        loose = found.st_mode & _OTHERS_WRITE
        if own and ((loose and self.made) or (new and found.st_mode & _OWN != _OWN)):
            os.fchmod(descriptor, _OWN)
        elif not own and found.st_uid != 0:
            raise InvalidInput(f"{shown_path(self.path / kind)} belongs to user {found.st_uid}: {self.remedy}")
        elif loose:
            path, mend = self.path / kind, ""
            if own and not found.st_mode & stat.S_ISVTX:  # a sticky folder is meant for all, as /tmp is
                mend = f"run `chmod go-w {shown_path(shlex.quote(str(path)))}`, or "
            raise InvalidInput(f"others can write to {shown_path(path)}: {mend}{self.remedy}")


@dataclass(frozen=True, slots=True)
class Folder:
    """An open folder. Without ``descriptor``, on systems that know none of folders, its files are found by path."""

    root: Path
    kind: str
    descriptor: int | None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)

    @property
    def path(self) -> Path:
        return self.root / self.kind

    def open_file(self, name: str) -> BinaryIO | None:
        """The file, open; None if what was there is not a file that this user alone can have written: it is removed.

        Raises ``OSError``.
        """
        file: BinaryIO | None = None
        try:
            try:
                file = open_regular(self._place(name), dir_fd=self.descriptor, links=False)
            except InvalidInput:
                pass
            except OSError as error:
                if error.errno != errno.ELOOP:  # a link
                    raise
            if file is not None:
                found = os.fstat(file.fileno())
                if self.descriptor is None or (found.st_uid in (os.geteuid(), 0) and not found.st_mode & _OTHERS_WRITE):
                    return file
                file.close()
            os.unlink(self._place(name), dir_fd=self.descriptor)
        except OSError as error:
            error.filename = str(self.path / name)
            raise
        return None

    def write_file(self, name: str, content: bytes, mode: int) -> Path:
        """Makes or replaces the file; returns its path. Raises ``OSError``."""
        path = self.path / name
        with errors_name(path):
            write_whole(self._place(name), content, mode=mode, durable=False, dir_fd=self.descriptor)
        return path

    def _place(self, name: str) -> str | Path:
        return self.path / name if self.descriptor is None else name


def _make(path: Path, above: int | None) -> bool:
    """Makes the folder, with the parents that are missing, for this user alone. False if another process did."""
    for parent in reversed(path.parents) if above is None else ():
        if not os.path.exists(parent):
            with suppress(FileExistsError):
                os.mkdir(parent, _OWN)
    try:
        os.mkdir(path, _OWN, dir_fd=above)
    except FileExistsError:
        return False
    return True
