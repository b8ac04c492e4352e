"""Stored measurements as Optuna studies in a file of their own, for optuna-dashboard and Optuna's plots.

One study per problem, device model and family; one trial per measurement, its value the median in milliseconds. What
failed is a failed trial. Nothing reads these files back: the search keeps its studies in memory.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from flashtune.codegen.plan.config import Config, Parameter
from flashtune.errors import InvalidInput
from flashtune.files import SHARED, shown_path, write_whole
from flashtune.tuned_db.records.measurement import Measurement
from flashtune.tuned_db.store.queries import count_unreadable
from flashtune.tuned_db.store.store import Store
from flashtune.values import printable


@dataclass(frozen=True, slots=True)
class Exported:
    """A study that was written."""

    name: str
    trials: int


def export_studies(
    database: Path,
    path: Path,
    *,
    gpu_key: str | None = None,
    progress: Callable[[str, int, int], None] = lambda name, number, total: None,
) -> list[Exported]:
    """Writes the measurements of ``database`` (on one device model) to a new Optuna storage at ``path``.

    ``progress`` is told each study before it is written, its number and how many there are: a trial takes Optuna some
    milliseconds. The file appears when it is complete; one that exists is never touched (`InvalidInput`).
    """
    if os.path.lexists(path):
        raise InvalidInput(f"{shown_path(path)} exists already, and is never overwritten: name a new file")
    if not path.parent.is_dir():
        raise InvalidInput(f"{shown_path(path)}: the folder {shown_path(path.parent)} does not exist")
    with Store.open(database, create=False, readonly=True) as store, count_unreadable() as unreadable:
        groups: dict[tuple[str, str, str], list[Measurement]] = defaultdict(list)
        for row in store.measurements(gpu_key=gpu_key):
            groups[row.problem.key, row.gpu_key, row.family].append(row)
    if not groups:
        where = f" on {gpu_key}" if gpu_key is not None else ""
        if unreadable.rows:
            raise InvalidInput(f"nothing can be exported{where} from {shown_path(database)}: {unreadable}")
        raise InvalidInput(
            f"nothing was measured yet{where} in {shown_path(database)}: flashtune tune measures, on a GPU"
        )
    written: list[Exported] = []
    with (
        _quietly(),
        closing(sqlite3.connect(":memory:", check_same_thread=False)) as made,
        _storage(made, database) as storage,
    ):
        for number, rows in enumerate(groups.values(), start=1):
            name = _name(rows[0], [each.name for each in written])
            progress(name, number, len(groups))
            _write(storage, name, rows)
            written.append(Exported(name, len(rows)))
        content = made.serialize()
    try:
        write_whole(path, content, mode=SHARED, replace=False)
    except FileExistsError as error:
        raise InvalidInput(f"{shown_path(path)} was made by another process meanwhile, and is left as it is") from error
    return written


def _name(row: Measurement, taken: Sequence[str]) -> str:
    """What people read, and where that is taken, since it doesn't say all of a problem or model, what is never."""
    names = (
        f"{problem} on {gpu} by {row.family}"
        for problem, gpu in ((row.problem, row.gpu_name), (row.problem, row.gpu_key), (row.problem.key, row.gpu_key))
    )
    return next(name for name in names if name not in taken)


def _write(storage: RDBStorage, name: str, rows: Sequence[Measurement]) -> None:
    first = rows[0]
    configs = [each.config for each in rows]
    varied = [each for each in first.config.parameters() if len({getattr(config, each.name) for config in configs}) > 1]
    study = optuna.create_study(storage=storage, study_name=name, direction="minimize")
    facts = {"problem": first.problem.key, "gpu": first.gpu_key, "family": first.family, "value": "median, ms"}
    facts |= {
        f"always {each.name}": getattr(first.config, each.name)
        for each in first.config.parameters()
        if each not in varied
    }
    for fact, value in facts.items():
        study.set_user_attr(fact, value)
    ranges = {each.name: _distribution(each, configs) for each in varied}
    study.add_trials([_trial(each, ranges) for each in rows])


def _distribution(parameter: Parameter, configs: Sequence[Config]) -> BaseDistribution:
    """Numbers keep their distances in plots; other values are categories."""
    values = parameter.choices
    if all(type(each) is int for each in values):
        return IntDistribution(min(values), max(values))
    return CategoricalDistribution(values)


def _trial(row: Measurement, ranges: dict[str, BaseDistribution]) -> FrozenTrial:
    ok = row.status == "ok" and row.median_us is not None
    facts: dict[str, Any] = {"stage": row.stage, "config": row.config.key}
    if not ok:
        facts |= {"status": row.status, "message": row.message}
    trial = create_trial(
        state=TrialState.COMPLETE if ok else TrialState.FAIL,
        value=row.median_us / 1e3 if ok and row.median_us is not None else None,
        params={name: getattr(row.config, name) for name in ranges},
        distributions=ranges,
        user_attrs=facts,
    )
    # Optuna's times are local and have no zone.
    trial.datetime_start = trial.datetime_complete = (
        datetime.fromisoformat(row.created).astimezone().replace(tzinfo=None)
    )
    return trial


@contextlib.contextmanager
def _storage(made: sqlite3.Connection, database: Path) -> Iterator[RDBStorage]:
    """Optuna's storage in ``made``; what it can't store of ``database`` is `InvalidInput`, without its SQL."""
    storage = RDBStorage("sqlite://", engine_kwargs={"creator": lambda: made})  # one connection for this thread
    try:
        yield storage
    except optuna.exceptions.OptunaError as error:
        cause = error.__cause__ or error
        why = printable(str(getattr(cause, "orig", None) or cause))
        raise InvalidInput(f"{shown_path(database)} can't be exported: {why}") from error
    finally:
        storage.remove_session()
        storage.engine.dispose()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without a line in the log for each study."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
