"""D71: another process holds the write lock, or commits between our read and our write. Nothing is lost."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
Start = Callable[[str, Path], "subprocess.Popen[str]"]

HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE measurement SET message = 'of the other process'")
print("locked", flush=True)
sys.stdin.readline()
connection.execute("COMMIT")
"""


def test_a_writer_waits_for_another_process_that_holds_the_lock_for_three_seconds(
    store: Store, path: Path, measurement: Make
) -> None:
    first, second = store.record(measurement()), measurement()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        assert [each.id for each in store.measurements()] == [first.id], "readers wait for nobody"
        release = threading.Timer(3, holder.communicate, ["\n"])
        before = time.monotonic()
        release.start()
        store.record(second)
        assert time.monotonic() - before >= 3
        release.join()
    assert holder.returncode == 0
    found = {each.id: each for each in store.measurements()}
    assert set(found) == {first.id, second.id}
    assert found[first.id].message == "of the other process"


def test_what_others_commit_between_our_read_and_our_write_is_no_conflict(
    store: Store, path: Path, measurement: Make, start: Start
) -> None:
    """A run reads from one moment, see `Store.snapshot`, and stores rows meanwhile."""
    code = "print(Store.open(path).record(fakes.make_measurement()).id)"
    with store.snapshot() as then:
        assert then.measurements() == []
        output, _ = start(code, path).communicate(timeout=120)
        mine = store.record(measurement())
        assert then.measurements() == []
    assert {each.id for each in store.measurements()} == {mine.id, output.strip()}


def test_nobody_commits_between_the_read_and_the_write_of_one_transaction(store: Store, path: Path) -> None:
    """It begins as a write: one that begins as a read fails where another was first, and can't be repeated in part."""
    with store.backend.writing() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM measurement").scalar_one() == 0
        with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")
            assert other.execute("SELECT count(*) FROM measurement").fetchone() == (0,)
