"""Merge, import, upgrade, gc, forget or push: killed with -9 at a random moment, it did all of its work or none of it.

For `tune` see tests/tuner/test_kills.py.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from postgres_server import Cluster

import flashtune
from flashtune.tuned_db.exchange.export_file import read_export
from flashtune.tuned_db.records.measurement import new_id
from flashtune.tuned_db.schema.version import APPLICATION_ID, MIGRATIONS, SCHEMA_VERSION
from flashtune.tuned_db.sharing.merge import export_database
from flashtune.tuned_db.store.store import Store
from flashtune.tuned_db.upkeep.gc import collect

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")

SHIPPED = Path(__file__).parents[1] / "tuned_db" / "bundled" / "h200.jsonl"
STORED = 100
"""Rows that are in the database from the start."""
SEARCHED = 4
"""Times that gc may remove, for each final."""


class Steps:
    """Databases before a step, and what runs steps on copies of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rows = read_export(SHIPPED).measurements
        self.total = len(rows)
        with Store.open(folder / "start.db") as store:
            store.add(rows[:STORED])
        with Store.open(folder / "other.db") as store:
            store.add(rows)
            export_database(store, folder / "other.jsonl")
        times = [dataclasses.replace(each, id=new_id(), stage="measure") for each in rows for _ in range(SEARCHED)]
        shutil.copy(folder / "other.db", folder / "searched.db")
        with Store.open(folder / "searched.db") as store:
            store.add(times)
            going = collect(store, days=0, dry_run=True)
            self.searched, self.kept = going.removed + going.left, going.left
        session = rows[0].session
        self.forgotten = sum(each.session == session for each in (*rows, *times))
        (folder / "session").write_text(session, encoding="utf-8")
        make_old(folder / "old.db", folder / "other.db")
        source = {"PYTHONPATH": str(Path(flashtune.__file__).parents[1])}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("killed_steps.py")), str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | source,
        )  # fmt: skip

    def reset(self, step: str) -> None:
        for left in self.folder.glob("own.db*"):
            left.unlink()
        before = {"upgrade": "old.db", "gc": "searched.db", "forget": "searched.db"}.get(step, "start.db")
        shutil.copy(self.folder / before, self.folder / "own.db")

    def _line(self, line: str) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def run(self, step: str, kill_after: float | None = None) -> tuple[int, float]:
        """Exit status of the step, and its seconds."""
        start = time.monotonic()
        pid = self._line(step)
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(pid, signal.SIGKILL)
        return self._line(""), time.monotonic() - start

    def done(self, step: str) -> bool:
        """Whether the step did its work; fails where it did a part of it, or harm."""
        with closing(sqlite3.connect(self.folder / "own.db")) as plain:  # which rolls back what was begun
            assert plain.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert plain.execute("PRAGMA foreign_key_check").fetchall() == []
            schema = plain.execute("PRAGMA user_version").fetchone()[0]
            tables = ("measurement", "environment", "tombstone")
            columns = [len(plain.execute(f"PRAGMA table_info({each})").fetchall()) for each in tables]
            gone = plain.execute("SELECT count(*) FROM tombstone").fetchone()[0] if columns[-1] else 0
            indexes = plain.execute("SELECT count(*) FROM sqlite_master WHERE name LIKE 'gc%'").fetchone()[0]
        with Store.open(self.folder / "own.db", readonly=True) as store:
            count = len(store.measurements())
        if step == "upgrade":
            assert count == self.total
            assert (schema, columns) in ((1, [22, 6, 0]), (SCHEMA_VERSION, [31, 7, 2]))
            return schema == SCHEMA_VERSION
        if step == "gc":
            assert (count, gone, indexes) in ((self.searched, 0, 0), (self.kept, self.searched - self.kept, 0))
            return count == self.kept
        if step == "forget":
            left = self.searched - self.forgotten
            assert (count, gone, indexes) in ((self.searched, 0, 0), (left, self.forgotten, 0))
            copies = [len(read_export(each).measurements) for each in self.folder.glob("own.db.forgotten-*")]
            assert set(copies) <= {self.forgotten}
            assert copies or count != left
            return count == left
        assert count in (STORED, self.total)
        return count == self.total


def make_old(path: Path, source: Path) -> None:
    """A database of the first schema with what ``source`` holds of it."""
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.executescript((MIGRATIONS / "v0001.sql").read_text("utf-8"))
        plain.execute("ATTACH ? AS source", [str(source)])
        tables = [row[0] for row in plain.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")]
        for table in tables:
            columns = ", ".join(f'"{row[1]}"' for row in plain.execute(f"PRAGMA main.table_info({table})"))
            plain.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM source.{table}")
        plain.execute("UPDATE main.alembic_version SET version_num = '0001'")
        plain.execute(f"PRAGMA main.application_id = {APPLICATION_ID}")
        plain.execute("PRAGMA main.user_version = 1")


class Pushed(Steps):
    """A push to a server of its own."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        super().__init__(folder)
        self.cluster = cluster

    def reset(self, step: str) -> None:
        (self.folder / "team.url").write_text(self.cluster.create(template="made"), encoding="utf-8")

    def done(self, step: str) -> bool:
        with Store.on_server((self.folder / "team.url").read_text("utf-8"), readonly=True) as team:
            count, logged = len(team.measurements()), [each.new for each in team.arrivals()]
        assert (count, logged) in ((0, []), (self.total, [self.total]))
        return count == self.total


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    made = Steps(tmp_path)
    yield made
    with made.process:
        made.process.kill()


@pytest.mark.parametrize("kills", [30, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", ["merge", "import", "upgrade", "gc", "forget"])
def test_a_step_that_is_killed_did_all_or_nothing(steps: Steps, step: str, kills: int) -> None:
    kill_often(steps, step, kills)


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_a_push_that_is_killed_sent_all_or_nothing(tmp_path: Path, cluster: Cluster, kills: int) -> None:
    steps = Pushed(tmp_path, cluster)
    with steps.process:
        kill_often(steps, "push", kills)
        steps.process.kill()


def kill_often(steps: Steps, step: str, kills: int) -> None:
    for _ in range(2):  # the first waits for imports
        steps.reset(step)
        status, seconds = steps.run(step)
        assert status == 0
        assert steps.done(step)
    steps.reset(step)
    draw = random.Random(kills)
    killed = halfway = 0
    while killed < kills:
        status, _ = steps.run(step, draw.uniform(0, seconds))
        assert status in (0, -signal.SIGKILL)
        killed += status != 0
        if status == 0:
            seconds *= 0.9  # it took longer when its time was taken
        if steps.done(step):
            steps.reset(step)
        else:
            halfway += 1
            assert status != 0, "what ended by itself has done its work"
    assert halfway > kills / 4, "the others were killed after their work was done"
    status, _ = steps.run(step)
    assert status == 0
    assert steps.done(step), "a run after so many kills completes"
