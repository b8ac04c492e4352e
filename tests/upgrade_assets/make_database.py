"""Makes ``vNNNN.db`` for the current schema version, with the fake kernel families of ``tests/tuned_db/fakes.py``, and
``tuned_db/migrations/vNNNN.sql``, with which files of that version are compared.

Refuses to replace a file: saved databases are what older code wrote.
"""

from __future__ import annotations

import importlib.util
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from flashtune.tuned_db.backends.sqlite.expected_tables import script_of
from flashtune.tuned_db.backends.sqlite.upgrade import upgrade
from flashtune.tuned_db.schema.version import MIGRATIONS, SCHEMA_VERSION
from flashtune.tuned_db.store.arrivals import Arrival
from flashtune.tuned_db.store.removed import bury
from flashtune.tuned_db.store.store import Store

HERE = Path(__file__).parent


def main() -> None:
    path = HERE / f"v{SCHEMA_VERSION:04d}.db"
    if path.exists():
        raise SystemExit(f"{path} is there already")
    where = importlib.util.spec_from_file_location("fakes", HERE.parent / "tuned_db" / "fakes.py")
    assert where is not None
    assert where.loader is not None
    fakes = importlib.util.module_from_spec(where)
    sys.modules["fakes"] = fakes
    where.loader.exec_module(fakes)
    fakes.install(pytest.MonkeyPatch())
    write_script()
    store = Store.open(path)
    later = "2026-11-29T13:00:00.000Z"
    store.add(
        [
            fakes.make_measurement(),
            fakes.make_measurement(config=fakes.SoloConfig(block=32), created=later, author="Ada", **fakes.SECOND),
            fakes.make_measurement(
                config=fakes.PairConfig(block=16, stages=3, order="reversed"),
                status="wrong",
                median_us=None,
                created="2026-11-29T14:00:00.000Z",
            ),
            fakes.make_measurement(median_us=float("nan"), stage="screen", created="2026-11-29T15:00:00.000Z"),
        ],
        Arrival(kind="merge", source="01935f6e-0000-7000-8000-00000000cafe"),
    )
    with store.backend.writing() as connection:
        bury(connection, ["01935f6e-0000-7000-8000-00000000dead"])
    store.record_prediction(fakes.make_prediction())
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("UPDATE origin SET uuid = '01935f6e-0000-7000-8000-00000000f00d'")
    print(f"made {path}")


def write_script() -> None:
    """What the migrations make, which a database must have to be opened."""
    script = MIGRATIONS / f"v{SCHEMA_VERSION:04d}.sql"
    with tempfile.NamedTemporaryFile() as empty:
        upgrade(Path(empty.name), 1.0)
        with closing(sqlite3.connect(empty.name)) as plain:
            script.write_text(script_of(plain), encoding="utf-8")
    print(f"made {script}")


if __name__ == "__main__":
    main()
