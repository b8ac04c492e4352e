"""A session that is killed with -9 at random moments and run again by the same command loses and repeats nothing."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fake_worker import FakeUnit
from killed_session import PROBLEMS, TRIALS

import flashtune
from flashtune.tuned_db.store.store import Store

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")

IN_FLIGHT = 3
"""Trials that a kill may cost: one that is being stored and two that are in the worker."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts what starts sessions; ``how`` are its arguments behind the folder."""
    started: list[subprocess.Popen[str]] = []

    def start(*how: object) -> subprocess.Popen[str]:
        here = Path(__file__).parent
        paths = os.pathsep.join([str(Path(flashtune.__file__).parents[1]), str(here)])
        process = subprocess.Popen(
            [sys.executable, str(here / "killed_session.py"), str(tmp_path), *map(str, how)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            process.kill()


class Folder:
    """What sessions have left behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unit = FakeUnit("one", path / "log")

    def stored(self) -> Counter[tuple[str, str]]:
        """Trials with a row, by problem and config. Opening the database must succeed at any moment."""
        if not (self.path / "tuned.db").exists():
            return Counter()
        with Store.open(self.path / "tuned.db", readonly=True) as store:
            rows = store.measurements()
        return Counter((each.problem.key, str(each.config)) for each in rows if each.stage != "final")

    def told(self) -> set[tuple[str, str]]:
        keys = {str(each): each.key for each in PROBLEMS}
        path = self.path / "told"
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        return {(keys[line.partition(": ")[0]], line.partition(": ")[2]) for line in lines}

    def asked(self, what: str) -> list[tuple[str, str]]:
        return [(each.problem, each.config) for each in self.unit.lines(what)]


def wait_to_kill(folder: Folder, draw: random.Random, seconds: float) -> None:
    """Until some moment of the whole session, or, every other time, until soon after some trial was told of."""
    deadline = time.monotonic() + draw.uniform(0, seconds)
    if draw.random() < 0.5:
        enough = len(folder.told()) + draw.randrange(1, 6)
        deadline = time.monotonic() + 20
        while len(folder.told()) < enough and time.monotonic() < deadline:
            time.sleep(0.002)
        deadline = time.monotonic() + draw.uniform(0, 0.03)
    while time.monotonic() < deadline:
        time.sleep(0.0005)


@pytest.mark.parametrize(
    ("where", "kills", "seconds"),
    [("process", 6, 2.0), ("inline", 10, 0.8), pytest.param("inline", 100, 0.5, marks=pytest.mark.slow)],
)
def test_killed_sessions_lose_and_repeat_nothing(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], where: str, kills: int, seconds: float
) -> None:
    folder, draw = Folder(tmp_path), random.Random(kills)
    sessions = start(where)
    assert sessions.stdin is not None
    assert sessions.stdout is not None
    killed = ended = 0
    while killed < kills or not ended:
        before, tries = folder.stored(), len(folder.asked("attempt"))
        print(file=sessions.stdin, flush=True)
        pid = int(sessions.stdout.readline())
        if killed < kills:
            wait_to_kill(folder, draw, seconds)
            os.kill(pid, signal.SIGKILL)
        print(file=sessions.stdin, flush=True)
        code, tried = map(int, sessions.stdout.readline().split())
        assert code in (0, -signal.SIGKILL)
        killed += code != 0
        ended = code == 0
        after = folder.stored()
        assert not before - after, "stored once, stored for ever"
        assert set(after.values()) <= {1}
        assert not set(before) & set(folder.asked("attempt")[tries:]), "tried again"
        if ended:
            assert after.total() - before.total() == tried == TRIALS
    assert folder.told() <= set(folder.stored())
    lost = len(folder.asked("done")) - folder.stored().total()
    assert lost <= IN_FLIGHT * killed
    assert len(folder.told()) > TRIALS, "sessions were killed while they measured, too"
    with closing(sqlite3.connect(tmp_path / "tuned.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_run_that_is_killed_in_its_seventh_trial_is_run_again_without_a_manual_step(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """D68. A budget is what a run may try, so the run again finishes 20 trials and repeats none of the first."""
    folder = Folder(tmp_path)
    with start("inline", 20, 7) as sessions:
        said, _ = sessions.communicate("\n" * 4)
    _, killed, _, ended = said.splitlines()
    assert killed == f"{-signal.SIGKILL} 0"
    assert ended == "0 20"

    tried, done = folder.asked("attempt"), folder.asked("done")
    assert len(tried) == 7 + 20
    assert done == tried[:6] + tried[7:]
    stored = folder.stored()
    assert set(stored.values()) == {1}
    assert set(tried[7:]) <= set(stored) <= set(done)
    assert len(set(tried[:6]) - set(stored)) <= 1, "the sixth may have been on its way"
    kept = set(stored) - set(tried[7:])
    assert len(kept) >= 5
    with Store.open(tmp_path / "tuned.db", readonly=True) as store:
        assert {each.status for each in store.measurements()} == {"ok"}, "a row is a finished trial, there is no other"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["log", "told", "tuned.db"]
