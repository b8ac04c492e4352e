"""Push and pull: what one database has measured and another lacks, carried over a network.

A union, as in `merge.py`: in any order, any number of times, it comes to the same rows. First both sides compare ids
and fingerprints, with no lock, and what is missing is collected in a temporary file; then it is added in one
transaction. So a pull never keeps others from a file for longer than a local merge does, memory stays small however
many rows there are, and what is cut off anywhere has added nothing: do it again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from flashtune import settings
from flashtune.errors import InvalidInput
from flashtune.tuned_db.backends.sqlite.opening import File
from flashtune.tuned_db.exchange.export_file import parse_line
from flashtune.tuned_db.records.dates import latest
from flashtune.tuned_db.records.limits import check, settled
from flashtune.tuned_db.records.measurement import Measurement, canonical, to_json
from flashtune.tuned_db.records.parse import Unreadable, measurement_from_json
from flashtune.tuned_db.store.arrivals import Arrival, Kind
from flashtune.tuned_db.store.queries import CHUNK
from flashtune.tuned_db.store.store import Store, Stored
from flashtune.values import shown

from .merge import Added

Progress = Callable[[str], None]


def carry(source: Store, target: Store, progress: Progress = lambda text: None, *, take_back: bool = False) -> Added:
    """Adds the measurements of ``source`` that ``target`` lacks, all or none; ``progress`` hears how far it is.

    Raises `InvalidInput` where both have a row under one id with different values; nothing is added then. Rows that
    this version can't read, or of a date that is yet to come, are passed over. With ``take_back`` rows that were
    removed from ``target`` come in again. Predictions stay where they were made.
    """
    settings.author()  # a name that can't be stored would fail at the very end
    with _scratch_file() as missing:
        found = _Comparison(source, target, missing, progress, take_back)
        stored = Stored(0, 0)
        if found.missing:
            progress(f"adding {found.missing} to {target.backend}, when it is our turn")
            kind: Kind = "pull" if isinstance(target.backend, File) else "push"
            arrival = Arrival(kind=kind, source=source.origin)
            stored = target.add_parts(_parts(missing, found.missing, progress), arrival, take_back=take_back)
    late = found.missing - stored.new - stored.removed  # another process added them meanwhile
    return Added(stored.new, found.known + late, found.removed + stored.removed, found.unreadable)


@contextmanager
def _scratch_file() -> Iterator[IO[bytes]]:
    """A file without a name; a full disk is told of by the folder that it is in."""
    try:
        with tempfile.TemporaryFile(prefix="flashtune-") as file:
            yield file
    except OSError as error:
        error.filename = error.filename or tempfile.gettempdir()
        raise


class _Comparison:
    """What ``target`` lacks, written to a file, and how many rows it is and has."""

    def __init__(self, source: Store, target: Store, missing: IO[bytes], progress: Progress, take_back: bool) -> None:
        self.known = self.missing = self.removed = 0
        self.unreadable = Unreadable()
        self._last, self._take_back = latest(), take_back
        with source.snapshot() as ours, target.snapshot() as theirs:
            total, done = ours.count(), 0
            for chunk in ours.fingerprints():
                plain = {
                    each: digest
                    for each, digest in chunk.items()
                    if digest is not None and isinstance(each, str) and each.isprintable()
                }
                self.unreadable.rows += len(chunk) - len(plain)
                self._compare(ours, theirs, plain, missing)
                done += len(chunk)
                progress(f"{done} of {total} compared, {self.missing} are missing in {target.backend}")

    def _compare(self, ours: Store, theirs: Store, chunk: dict[str, str], missing: IO[bytes]) -> None:
        there = {each: digest for part in theirs.fingerprints(list(chunk)) for each, digest in part.items()}
        suspects = [each for each in chunk if each in there and chunk[each] != there[each]]
        gone = set() if self._take_back else theirs.removed(chunk) - there.keys()  # put back by hand, it is there
        self.known += len(there) - len(suspects)
        self.removed += len(gone)
        wanted = ours.by_id([*suspects, *(each for each in chunk if each not in there and each not in gone)])
        counterparts = theirs.by_id([each for each in suspects if there[each] is not None])
        for name, record in wanted.items():
            if record is None or (name not in counterparts and record.created > self._last):
                self.unreadable.rows += 1
            elif name not in there:
                missing.write(canonical(to_json(check(settled(record)))).encode() + b"\n")
                self.missing += 1
            elif counterparts.get(name) == settled(record):
                self.known += 1
            else:
                raise InvalidInput(
                    f"measurement {shown(name)} is in {theirs.backend} with other values than in {ours.backend}: "
                    "nothing was added. Measurements never change, so one of the two was altered"
                )


def _parts(file: IO[bytes], total: int, progress: Progress) -> Iterator[list[Measurement]]:
    file.seek(0)
    done = 0
    part: list[Measurement] = []
    for line in file:
        part.append(measurement_from_json(parse_line(line)))
        if len(part) == CHUNK:
            yield part
            done += len(part)
            progress(f"{done} of {total} sent")
            part = []
    yield part
