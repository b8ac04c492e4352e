"""Eight processes that tune into one file and merge into it: all rows are there, and nobody fails for a lock."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from many_writers import ROWS, WRITERS

import flashtune
from flashtune.tuned_db.store.store import Store

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


@pytest.mark.parametrize("seconds", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_eight_processes_write_one_database(tmp_path: Path, seconds: int) -> None:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(Path(flashtune.__file__).parents[1]), str(here)])
    ended = subprocess.run(
        [sys.executable, str(here / "many_writers.py"), str(tmp_path), str(seconds)],
        text=True, capture_output=True, timeout=seconds + 120, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert (ended.stdout, ended.stderr) == (f"{[0] * WRITERS}\n", "")
    seen = [set((tmp_path / f"seen-{number}").read_text("ascii").split()) for number in range(WRITERS)]
    assert all(len(each) >= (8 if number % 2 else ROWS) for number, each in enumerate(seen)), "each of them has written"
    with Store.open(tmp_path / "tuned.db") as store:
        stored = {each.id for each in store.measurements()}
    assert set().union(*seen) == stored
    with closing(sqlite3.connect(tmp_path / "tuned.db")) as plain:
        assert plain.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
