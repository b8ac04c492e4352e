"""Processes that all write one database for some seconds: half of them tune on a fake device, the others merge.

Run as a script with a folder and a number of seconds. Writes one line for each process: its exit status, then how many
rows it has seen stored. The ids of those rows are in the files ``seen-N``.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
import time
from pathlib import Path

from tuner_fakes import FAMILY, GPU, FakeBench, problem, run

from flashtune.tuned_db.records.measurement import Measurement, new_id, now
from flashtune.tuned_db.sharing.merge import add_database, add_file, export_database
from flashtune.tuned_db.store.store import Store

WRITERS = 8
ROWS = 40
"""Of a database that is merged."""


def tuned(path: Path, number: int, turn: int) -> list[str]:
    """Ids of what is stored after another short run."""
    others, again = divmod(turn, 4)  # another length after every fourth: the configs of one would be used up
    asked = problem(64 * (WRITERS * others + number + 1))
    assert run(path, [asked], 8 * (again + 1), bench=FakeBench(unit=f"GPU-{number}"), seed=turn).tried > 0
    with Store.open(path) as store:
        return [each.id for each in store.measurements(problem=asked)]


def merged(path: Path, number: int, turn: int) -> list[str]:
    """Ids of the rows of a new database, every other one of which is exported first."""
    source, text = (path.parent / f"from-{number}-{turn}{suffix}" for suffix in (".db", ".jsonl"))
    asked = problem(64, head_dim=128)
    row = Measurement(
        id=new_id(), created=now(), session=f"{number} {turn}", problem=asked, gpu_key=GPU.key, gpu_name=GPU.name,
        config=FAMILY.default(asked.spec, GPU), source_digest="a" * 64, status="ok", stage="measure", median_us=1.0,
    )  # fmt: skip
    rows = [dataclasses.replace(row, id=new_id()) for _ in range(ROWS)]
    with Store.open(source) as store:
        store.add(rows)
        if turn % 2:
            export_database(store, text)
    with Store.open(path) as store:
        added = add_file(store, text) if turn % 2 else add_database(store, source)
    assert added.new == ROWS
    source.unlink()
    return [each.id for each in rows]


def write(path: Path, number: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    turn = 0
    with (path.parent / f"seen-{number}").open("w", encoding="ascii") as file:
        while time.monotonic() < deadline:
            seen = (tuned if number % 2 else merged)(path, number, turn)
            file.writelines(f"{each}\n" for each in seen)
            file.flush()
            turn += 1


def main(folder: Path, seconds: float) -> None:
    import alembic.command  # noqa: F401

    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write, args=(folder / "tuned.db", number, seconds)) for number in range(WRITERS)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    print([each.exitcode for each in writers])


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
