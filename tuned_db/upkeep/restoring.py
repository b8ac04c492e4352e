"""`flashtune db restore`: a backup takes the place of a database that is damaged or lost.

To copy it there by hand is not enough: SQLite replays the log of the old file, which may lie beside it, into the new
one. So what is there moves aside, with all that belongs to it, and nothing is deleted.
"""

from __future__ import annotations

import itertools
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from flashtune.errors import InvalidInput, StoreError
from flashtune.files import shown_path, sync_folder
from flashtune.tuned_db.backends.sqlite.copying import copied, name_copy
from flashtune.tuned_db.backends.sqlite.disks import not_writable
from flashtune.tuned_db.backends.sqlite.files import SIDE_FILES
from flashtune.tuned_db.backends.sqlite.locks import in_use
from flashtune.tuned_db.store.store import LOCK_TIMEOUT, Store


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did."""

    path: Path
    """Where the database is now: where a link leads, if it was one."""
    measurements: int
    aside: tuple[Path, ...]
    """What was there, under its new names."""


def restore(backup: Path, path: Path, timeout: float = LOCK_TIMEOUT) -> Restored:
    """Puts a copy of the database ``backup``, which is checked and stays, at ``path``.

    What is there, whatever its state, is not opened: it gets the first name ``NAME.replaced-N`` that is free, and so do
    the files beside it, so that they can be opened together still. A run that is killed leaves all of it under the one
    name or the other, and the next completes it. Raises `StoreError` while another process has ``path`` open,
    `InvalidInput` for what is no file, and what `Store.open` raises for ``backup``.
    """
    backup, path = Path(os.path.abspath(backup)), Path(os.path.realpath(path))
    if os.path.realpath(backup) == str(path):
        raise InvalidInput(f"{shown_path(backup)} is the database that it would replace")
    with Store.open(backup, create=False, readonly=True, timeout=timeout) as store:
        measurements = store.count()
    there = [each for each in (*(Path(f"{path}{suffix}") for suffix in SIDE_FILES), path) if os.path.lexists(each)]
    for each in there:
        if not stat.S_ISREG(each.lstat().st_mode):
            raise InvalidInput(f"{shown_path(each)} is not a file: move it away first")
    if path in there and in_use(path):
        raise StoreError(f"{shown_path(path)} is in use by another process. Nothing was changed; end that first")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with copied(backup, path, timeout) as (copy, _):
            aside = _move_aside(path, there)
            if not name_copy(copy, path):
                raise StoreError(f"another process made a database at {shown_path(path)} meanwhile. Run it again")
    except OSError as error:
        raise not_writable(path, error.strerror or str(error)) from error
    return Restored(path, measurements, aside)


def _move_aside(path: Path, there: list[Path]) -> tuple[Path, ...]:
    """The log and the journal first: without them a database is an older one, and they would harm any other."""
    names = (f"{path}.replaced-{number}" for number in itertools.count(1))
    base = next(name for name in names if not any(os.path.lexists(f"{name}{each}") for each in ("", *SIDE_FILES)))
    moved = []
    for each in there:
        moved.append(Path(base + str(each).removeprefix(str(path))))
        each.rename(moved[-1])
    sync_folder(path.parent)
    return tuple(reversed(moved))
