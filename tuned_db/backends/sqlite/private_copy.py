"""A copy of a database for one process, which only reads it.

So SQLite never opens a file of somebody else that it might change, one beside it, or what has taken its name meanwhile.
"""

from __future__ import annotations

import functools
import math
import os
import re
import shutil
import stat
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

from flashtune.errors import StoreError
from flashtune.files import shown_path

from .copying import ABANDONED, copy_database
from .files import shown_database


class PrivateCopy:
    """A copy for this process alone, in one file without a log, removed when it is closed or forgotten."""

    def __init__(self, path: Path, timeout: float, *, check: bool = True, within: float = math.inf) -> None:
        """Of the database at ``path``, as it is now; waits ``timeout`` seconds for whoever writes it. With ``check``
        raises `DatabaseDamaged` where any page is not sound. Takes at most ``within`` seconds, else `StoreError`."""
        try:
            folder = tempfile.mkdtemp(prefix=f"flashtune-{os.getpid()}-")
        except OSError as error:
            raise _no_private_place(path, error) from error
        _remove_abandoned(Path(folder).parent)
        self.path = Path(os.path.realpath(folder)) / "copy.db"
        self.close = weakref.finalize(self, _remove, folder, os.getpid())
        try:
            copy_database(path, self.path, timeout, fold=False, check=check, within=within)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _no_private_place(path, error) from error
            raise


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a child that was forked
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _remove_abandoned(folder: Path) -> None:
    """Removes private copies of this user's processes that were killed. Once a process."""
    for each in folder.glob("flashtune-*-*"):
        name = re.fullmatch(r"flashtune-(\d+)-\w+", each.name)
        with suppress(OSError):
            found = each.lstat()
            mine = stat.S_ISDIR(found.st_mode) and (not hasattr(os, "geteuid") or found.st_uid == os.geteuid())
            if name and mine and time.time() - found.st_mtime > ABANDONED and not _alive(int(name[1])):
                shutil.rmtree(each, ignore_errors=True)


def _alive(pid: int) -> bool:
    """Whether there is such a process; where that can't be asked, it is taken to be there."""
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # of another user
        return True
    return True


def _no_private_place(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{shown_database(path)} is read from a private copy, which can't be made in "
        f"{shown_path(tempfile.gettempdir())}: {error.strerror or error}. "
        "Make room there, or name another folder with TMPDIR"
    )
