"""The command line killed with -9 while it measures on a real card: nothing stored is lost, and it goes on."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from flashtune.tuned_db.store.store import Store

pytestmark = pytest.mark.gpu

KILLS = 10
TRIALS = 400
COMMAND = (
    "tune", "--mode", "measure", "--devices", "0", "--budget", str(TRIALS), "--dtype", "float16", "--head-dim", "64",
    "--seqlen", "1024", "--heads", "8", "--batch", "2", "--sampler", "random",
)  # fmt: skip


def start(database: Path) -> subprocess.Popen[bytes]:
    """In a process group of its own, with its output thrown away."""
    return subprocess.Popen(
        [sys.executable, "-m", "flashtune", *COMMAND],
        env={**os.environ, "FLASHTUNE_DB": str(database)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def stored(database: Path) -> Counter[str]:
    """Trials with a row. Opening the database must succeed at any moment."""
    if not database.exists():
        return Counter()
    with Store.open(database, readonly=True) as store:
        return Counter(str(each.config) for each in store.measurements() if each.stage != "final")


def wait_for_a_row(database: Path, before: Counter[str], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while stored(database) == before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


def kill(process: subprocess.Popen[bytes], draw: random.Random) -> None:
    """The coordinator, or all its processes, or a child of it: a worker, or a compiler."""
    whom = draw.choice(("coordinator", "all", "child"))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
    if whom == "child" and children:
        os.kill(int(draw.choice(children)), signal.SIGKILL)
        time.sleep(draw.uniform(0, 2))
    if whom == "all":
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def test_ten_kills_lose_nothing(tmp_path: Path) -> None:
    database, draw = tmp_path / "tuned.db", random.Random(10)
    found = 0
    for attempt in range(KILLS):
        before = stored(database)
        process = start(database)
        if attempt % 2:
            wait_for_a_row(database, before, process)
        time.sleep(draw.uniform(0, 4))
        assert process.poll() is None, "ended before it was killed"
        kill(process, draw)
        after = stored(database)
        assert not before - after, "stored once, stored for ever"
        assert set(after.values()) <= {1}, "measured twice"
        found += bool(after - before)
    assert found >= KILLS // 2, "sessions were killed while they measured"
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    before = stored(database)
    done = subprocess.run(
        [sys.executable, "-m", "flashtune", *COMMAND, "--budget", "10"],
        env={**os.environ, "FLASHTUNE_DB": str(database)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    after = stored(database)
    assert not before - after
    assert after.total() > before.total(), "the same command goes on"
