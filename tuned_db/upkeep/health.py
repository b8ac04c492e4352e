"""Keeping a database: a backup of it, its upgrade, and what is to be said of its health."""

from __future__ import annotations

import functools
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from flashtune.codegen.families.registry import family
from flashtune.codegen.gpu.gpu import CAPABILITIES, Gpu, nearest_known
from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Spec
from flashtune.errors import DatabaseNotWritable, InvalidInput, UnsupportedProblem
from flashtune.files import shown_path
from flashtune.tuned_db.backends.sqlite.connections import connect
from flashtune.tuned_db.backends.sqlite.copying import copied, leftovers, name_copy
from flashtune.tuned_db.backends.sqlite.disks import check_writable, on_network
from flashtune.tuned_db.backends.sqlite.failures import code_of, sqlite_failures
from flashtune.tuned_db.backends.sqlite.files import read_header
from flashtune.tuned_db.backends.sqlite.opening import Upgraded, recover, upgrade_database
from flashtune.tuned_db.backends.sqlite.private_copy import PrivateCopy
from flashtune.tuned_db.lookup.lookup import find_in, source_digest
from flashtune.tuned_db.lookup.sources import bundled
from flashtune.tuned_db.records.dates import latest
from flashtune.tuned_db.records.measurement import Measurement, capability
from flashtune.tuned_db.records.parse import Unreadable
from flashtune.tuned_db.schema.version import SCHEMA_VERSION
from flashtune.tuned_db.store.queries import count_unreadable
from flashtune.tuned_db.store.store import LOCK_TIMEOUT, Store
from flashtune.values import shown

from .doubts import Doubt, doubts

FAULTS = 20
"""Faults of a damaged file that are named."""


def back_up(path: Path, target: Path, timeout: float = LOCK_TIMEOUT) -> None:
    """Copies the database at ``path``, as it is at one moment, to the new file ``target``.

    Others may write meanwhile. ``target`` is there when it is whole, checked and on the disk, and not before. Raises
    `InvalidInput` where something is at ``target`` already, `DatabaseNotWritable` where it can't be written, and what
    `Store.open` raises for ``path``.
    """
    path, target = Path(os.path.abspath(path)), Path(os.path.abspath(target))
    if os.path.lexists(target):
        raise _taken(target)
    if not target.parent.is_dir():
        raise DatabaseNotWritable(
            f"the backup {shown_path(target)} can't be written: there is no folder {shown_path(target.parent)}"
        )
    with copied(path, target, timeout) as (copy, _):
        if not name_copy(copy, target):
            raise _taken(target)


def upgrade_file(path: Path, timeout: float = LOCK_TIMEOUT) -> Upgraded | None:
    """Brings the database at ``path`` to the current schema, see `opening.upgrade_database`; None if it has that. What
    a process began that was killed while it wrote is rolled back first.

    Raises what `Store.open` raises.
    """
    path = Path(os.path.abspath(path))
    read_header(path)
    check_writable(path)
    recover(path, timeout)
    if read_header(path).schema < SCHEMA_VERSION:
        return upgrade_database(path, timeout)
    with Store.open(path, readonly=True, timeout=timeout):  # the header of a file that is cut off still looks well
        return None


def _taken(target: Path) -> InvalidInput:
    return InvalidInput(f"{shown_path(target)} exists and is left as it is: a backup needs a new name")


@dataclass(frozen=True, slots=True)
class FileHealth:
    """What SQLite says of a file."""

    schema: int
    journal: str
    """Which one it is written with: ``wal`` or ``rollback``."""
    network: bool
    """Whether it is on a mount that several machines may share."""
    faults: tuple[str, ...] = ()
    """What is damaged; empty for a sound file."""
    leftovers: tuple[Path, ...] = ()
    """Unfinished copies beside it, of runs that were killed; they may be deleted."""


def inspect_file(path: Path, timeout: float = LOCK_TIMEOUT) -> FileHealth:
    """Reads every page and every reference between rows, of a private copy; takes seconds for a file of gigabytes.

    Raises what `files.read_header` and `schema.check_tables` do for what is no tuning database at all.
    """
    path = Path(os.path.abspath(path))
    header = read_header(path)
    copy = PrivateCopy(path, timeout, check=False)
    schema = header.schema
    faults: list[str] = []
    try:
        with (
            sqlite_failures(path, writing=False, timeout=timeout),
            closing(connect(copy.path, "immutable", timeout, path)) as connection,
        ):
            try:
                schema = connection.check()
                faults += _faults(connection)
            except sqlite3.DatabaseError as error:
                if code_of(error) & 0xFF not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                    raise
                faults.append(str(error))
    finally:
        copy.close()
    return FileHealth(
        schema, "wal" if header.wal else "rollback", on_network(path), tuple(faults), tuple(leftovers(path))
    )


def _faults(connection: sqlite3.Connection) -> Iterator[str]:
    found = [str(row[0]) for row in connection.execute(f"PRAGMA integrity_check({FAULTS})")]
    if found != ["ok"]:
        yield from found
        return
    lost = Counter((row[0], row[2]) for row in connection.execute("PRAGMA foreign_key_check"))
    for (child, parent), count in lost.items():
        yield f"{count} rows of {child} point to a {parent} that is gone"


@dataclass(slots=True)
class Sources:
    """Measurements of one GPU model, by whether their code is still what would run."""

    gpu_name: str
    current: int = 0
    """Rendered today, their config gives the source that was measured."""
    older: int = 0
    """It gives another source now."""
    refused: int = 0
    """This version refuses the config for that problem."""
    none: int = 0
    """Nothing was rendered when they were stored: skipped or failed before."""

    @property
    def rows(self) -> int:
        return self.current + self.older + self.refused + self.none


@dataclass(frozen=True, slots=True)
class Content:
    """What the rows of a database are."""

    measurements: int
    sources: dict[str, Sources]
    """By device-model key."""
    unreadable: Unreadable
    doubts: tuple[Doubt, ...]
    arrivals: dict[str, int]
    """Numbers of the arrivals that brought the rows in doubt, by their ids; none for what was measured here."""


def inspect_rows(store: Store) -> Content:
    """Reads every row and renders every config that was measured: a few milliseconds each."""
    with store.snapshot() as view, count_unreadable() as unreadable:
        rows = view.measurements()
        view.predictions()
        shipped = [
            each for wanted in {capability(row.gpu_key) for row in rows} for each in bundled(wanted).all_measurements()
        ]
        found = doubts(rows, shipped, latest())
        arrivals = view.arrivals_of([each.row.id for each in found])
    return Content(len(rows), _sources(rows), unreadable, tuple(found), arrivals)


def _sources(rows: Iterable[Measurement]) -> dict[str, Sources]:
    found: dict[str, Sources] = {}
    judge = functools.cache(_verdict)
    for row in sorted(rows, key=lambda each: each.gpu_key):
        own = found.setdefault(row.gpu_key, Sources(row.gpu_name))
        verdict = judge(row.gpu_key, row.problem.spec, row.config, row.source_digest)
        setattr(own, verdict, getattr(own, verdict) + 1)
    return found


def _verdict(gpu_key: str, spec: Spec, config: Config, digest: str) -> str:
    """The field of `Sources` that a measurement counts for."""
    gpu = typical(gpu_key)
    if not digest:
        return "none"
    if family(config.family).refuses_config(config, spec, gpu):
        return "refused"
    return "current" if source_digest(spec, config) == digest else "older"


_KEY = re.compile(r"(\d{1,2})\.(\d)[a-z]?/.*?(?:/smem(\d{1,9})(?:/.*)?)?")


class _Model(Gpu):
    """A GPU of which the key is known, under that key."""

    __slots__ = ()

    @property
    def key(self) -> str:
        return self.name


def typical(key: str) -> Gpu:
    """A GPU of that capability and shared memory, which is what decides whether a config is legal. Raises
    `InvalidInput` for what is no key, which the gate lets in nowhere."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise InvalidInput(f"{shown(key)} is no key of a device model")
    number = int(match[1]), int(match[2])
    shared = int(match[3] or CAPABILITIES[nearest_known(number)].shared_memory_block)
    return _Model(
        name=key,
        capability=number,
        num_sms=1,
        shared_memory_block=shared,
        l2_bytes=2**20,
        memory_gb=1,
        bandwidth_gb_s=1.0,
        clock_mhz=1,
        tensor_tflops=1.0,
    )


@dataclass(frozen=True, slots=True)
class Service:
    """What a database does for one GPU model."""

    gpu: Gpu
    levels: Counter[str] = field(default_factory=Counter)
    """How many of its problems ``attention()`` would serve from it on this GPU, by level of the look-up."""
    others: tuple[str, ...] = ()
    """Names of the GPU models with ``ok`` measurements, where nothing is served."""
    why: str = ""
    """Why nothing is served; empty where something is."""


def serves(store: Store, gpu: Gpu) -> Service:
    """Looks up each problem of ``store`` on ``gpu`` as ``attention()`` would: a few milliseconds each."""
    wanted = capability(gpu.key)
    with store.snapshot() as view:
        near = view.gpu_keys(capability=wanted)
        problems = {each.key: each for key in near for each in view.problems(gpu_key=key)}
        problems |= {each.problem.key: each.problem for each in view.predictions(gpu_key=gpu.key)}
        levels: Counter[str] = Counter()
        for each in problems.values():
            try:
                choice = find_in(each, gpu, [view, bundled(wanted)])
            except UnsupportedProblem:
                continue
            if choice.origin == view.label:
                levels[choice.level] += 1
        if levels:
            return Service(gpu, levels)
        names = sorted({each.gpu_name for each in view.measurements(status="ok")})
    if not names:
        why = "it holds no measurement that succeeded"
    elif near:
        why = "what it holds for chips of that capability can't be used, or what ships with flashtune is better"
    else:
        why = (
            f"it holds entries for {', '.join(names)} only, and kernels of another compute capability don't carry over"
        )
    return Service(gpu, levels, tuple(names), why)
