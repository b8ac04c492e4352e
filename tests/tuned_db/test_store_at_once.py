"""Connections, threads and processes that use one store at once: who waits for whom, and that nothing is lost."""

from __future__ import annotations

import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from postgres_server import on_both

from flashtune.errors import StoreError
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
Start = Callable[[str, Path], "subprocess.Popen[str]"]


def test_writers_wait_for_a_lock(store: Store, path: Path, measurement: Make) -> None:
    """D71. Another process is in test_locks.py."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.5, lambda: other.execute("COMMIT"))
        before = time.monotonic()
        release.start()
        store.record(measurement())
        assert time.monotonic() - before >= 0.5
        release.join()
    assert len(store.measurements()) == 1


def test_readers_do_not_wait_for_a_writer(store: Store, path: Path, measurement: Make) -> None:
    store.record(measurement())
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert len(Store.open(path, readonly=True, timeout=0.0).measurements()) == 1


def test_a_lock_that_is_never_released_is_named(path: Path, store: Store, measurement: Make) -> None:
    impatient = Store.open(path, timeout=0.1)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"tuned\.db has been locked by another process for 0\.1 s"):
            impatient.record(measurement())
    record = measurement()
    impatient.record(record)
    assert impatient.measurements() == [record]


@on_both
def test_threads_may_share_a_store(store: Store, measurement: Make) -> None:
    records = [measurement(session=f"session {number}") for number in range(24)]
    threads = [threading.Thread(target=store.record_all, args=(records[start::4],)) for start in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert {each.id for each in store.measurements()} == {each.id for each in records}


def test_eight_processes_make_one_database_together(start: Start, tmp_path: Path) -> None:
    """D70, the file. Whole runs are in tuner/test_many_at_once.py."""
    code = """
        import multiprocessing, os, pathlib
        def work(path, number, barrier):
            barrier.wait()
            store = Store.open(path)
            for _ in range(3):
                store.record(fakes.make_measurement(session=f"worker {number}"))
        context = multiprocessing.get_context("fork")
        import flashtune.tuned_db.backends.sqlite.upgrade, alembic.command
        for turn in range(2):
            barrier = context.Barrier(8)
            here = os.path.join(path, "deep", str(turn), "tuned.db")
            workers = [context.Process(target=work, args=(here, number, barrier)) for number in range(8)]
            [each.start() for each in workers]
            [each.join() for each in workers]
            found = Store.open(here).measurements()
            print([each.exitcode for each in workers], len(found), len({each.session for each in found}))
            print(os.listdir(os.path.dirname(here)))
    """
    output, _ = start(code, tmp_path).communicate(timeout=120)
    assert output.splitlines() == [f"{[0] * 8} 24 8", "['tuned.db']"] * 2


def test_what_was_recorded_survives_a_kill(start: Start, path: Path, measurement: Make) -> None:
    code = """
        store = Store.open(path)
        while True:
            print(store.record(fakes.make_measurement()).id, flush=True)
    """
    process = start(code, path)
    assert process.stdout is not None
    finished = [process.stdout.readline().strip() for _ in range(15)]
    process.kill()
    finished += process.stdout.read().split("\n")[:-1]
    process.communicate()
    store = Store.open(path)
    assert set(finished) <= {each.id for each in store.measurements()}
    store.record(measurement())
