"""What a program does with a tuning database besides commands, for `warm.py`."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.exchange.export_file import read_export
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.records.measurement import Measurement, Prediction, new_id
from flashtune.tuned_db.store.store import Store

SHIPPED = Path(__file__).parents[1] / "tuned_db" / "bundled" / "h200.jsonl"
GPU = gpu_by_alias("h200")
PROBLEMS = 2


def rows() -> list[Measurement]:
    """All that ships of the first problems."""
    found = read_export(SHIPPED).measurements
    first = sorted({each.problem for each in found}, key=lambda each: each.key)[:PROBLEMS]
    return [each for each in found if each.problem in first]


def asked() -> list[Problem]:
    """Problems that are tuned, near to one that is, and not known."""
    known = sorted({each.problem for each in rows()}, key=lambda each: each.key)
    near = dataclasses.replace(known[-1], batch=known[-1].batch * 3)
    return [*known, near, dataclasses.replace(known[0], head_dim=40)]


def make(path: str) -> None:
    """A sound database of these rows, with predictions, and a log of one merge."""
    from flashtune.tuned_db.store.arrivals import Arrival

    with Store.open(path) as store:
        store.add(rows(), Arrival(kind="merge", source=new_id()))
        _predict(store)


def look_up(path: str) -> None:
    """As attention() does. Prints the levels."""
    logging.basicConfig()
    print(" ".join(find(each, GPU, store_path=path).level for each in asked()))


def record(path: str) -> None:
    """As tuning does."""
    with Store.open(path) as store:
        store.record_all(dataclasses.replace(each, id=new_id()) for each in rows()[:5])
        _predict(store)
        print(store.count())


def _predict(store: Store) -> None:
    row = rows()[0]
    problem = dataclasses.replace(row.problem, batch=77)
    names = ("created", "gpu_key", "gpu_name", "config", "source_digest", "nvrtc", "flashtune")
    taken = {name: getattr(row, name) for name in names}
    store.replace_predictions([Prediction(problem=problem, predicted_us=75.0, rank=1, **taken)])
