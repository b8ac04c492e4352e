"""The disk that a database is on: whether it can be written, is shared with other machines, and how a file that is
finished gets its name there."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import platformdirs

from flashtune.errors import DatabaseNotWritable
from flashtune.files import claim, shown_path
from flashtune.settings import APPLICATION, DATABASE_NAME

from .files import shown_database

_NETWORK = ("nfs", "cifs", "smb", "afs", "9p", "ceph", "gluster", "lustre", "gpfs", "beegfs", "fuse.")
_OCTAL = re.compile(r"\\([0-7]{3})")
_LOCAL_FUSE = ("fuse.overlayfs", "fuse.fuse-overlayfs", "fuseblk")


def check_writable(path: Path) -> None:
    """Raises :class:`DatabaseNotWritable` unless ``path`` and its folder can be written (SQLite needs both)."""
    for place in (path, path.parent):
        if os.path.exists(place) and not os.access(place, os.W_OK):
            raise not_writable(path, f"{shown_path(place)} is read-only")


def not_writable(path: Path, why: str, *, full: bool = False) -> DatabaseNotWritable:
    """The error for ``path``, which names a place that would do. ``full``: its disk is, so that room would do, too."""
    advice = "Make room there, or pass" if full else "Pass"
    for folder in (_user_folder(), Path(tempfile.gettempdir())):
        existing = next(each for each in (folder, *folder.parents) if os.path.exists(each))
        if os.path.isdir(existing) and os.access(existing, os.W_OK) and folder != path.parent:
            place = folder / DATABASE_NAME
            return DatabaseNotWritable(
                f"{shown_database(path)} can't be written: {why}. {advice} another path, e.g. --db {shown_path(place)}"
            )
    return DatabaseNotWritable(f"{shown_database(path)} can't be written: {why}. {advice} a writable path with --db")


def _user_folder() -> Path:
    return platformdirs.user_data_path(APPLICATION, appauthor=False)


def on_network(path: Path) -> bool:
    """Whether ``path`` is on a network mount, where SQLite's WAL mode must not be used. Known on Linux only."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mounts = Path("/proc/self/mounts").read_text("utf-8", errors="replace")
    except OSError:
        return False
    return is_network(filesystem_type(path, mounts))


def filesystem_type(path: Path, mounts: str) -> str:
    """Type of the file system that holds ``path``, from the text of ``/proc/self/mounts``."""
    best, kind = Path("/"), ""
    for line in mounts.splitlines():
        _, place, found, *_ = [*line.split(" "), "", "", ""]
        folder = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), place))  # a space is \040
        if path.is_relative_to(folder) and folder.is_relative_to(best):
            best, kind = folder, found
    return kind


def is_network(kind: str) -> bool:
    """Whether a file system of this type is shared between machines (unknown FUSE types count as shared)."""
    return kind.startswith(_NETWORK) and kind not in _LOCAL_FUSE


def publish(finished: Path, path: Path) -> bool:
    """Moves ``finished`` to ``path`` unless something is there, and returns whether it did; ``finished`` is gone
    afterwards."""
    try:
        claim(finished, path)
    except FileExistsError:
        finished.unlink(missing_ok=True)
        return False
    return True
