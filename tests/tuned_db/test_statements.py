"""Each statement ends: by its result, by the steps that a file of that size can need, by the clock, or by Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from terminal import SOURCES

from flashtune.errors import DatabaseDamaged, StoreError
from flashtune.tuned_db.backends.sqlite import connections as sqlite_module
from flashtune.tuned_db.backends.sqlite.connections import LONGEST, Connection, connect
from flashtune.tuned_db.backends.sqlite.failures import sqlite_failures
from flashtune.tuned_db.lookup.kept_connection import look_up
from flashtune.tuned_db.store.queries import MOST
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
Start = Callable[[str, Path], "subprocess.Popen[str]"]
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture
def connection(store: Store, path: Path) -> Iterator[Connection]:
    with closing(connect(path, "read", 1.0)) as made:
        yield made


class TestLimits:
    def test_a_statement_ends_after_its_steps(self, connection: Connection, path: Path) -> None:
        """M1: the second wall, should what a schema says get through."""
        given_up = pytest.raises(
            DatabaseDamaged, match=r"tuned\.db can't be used: a query took more steps than a file of"
        )
        with given_up, sqlite_failures(path, writing=False, timeout=1.0):
            connection.execute(ENDLESS).fetchone()
        assert connection.execute("SELECT count(*) FROM origin").fetchone() == (1,), "the next one has its own"

    def test_a_log_may_go_while_it_is_looked_at(
        self, store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The last of other processes to close a database removes its log."""
        log = Path(f"{path}-wal")
        log.touch()
        look = Path.stat

        def look_once(each: Path, *arguments: Any, **options: Any) -> os.stat_result:
            try:
                return look(each, *arguments, **options)
            finally:
                if each == log:
                    log.unlink(missing_ok=True)

        monkeypatch.setattr(Path, "stat", look_once)
        with closing(connect(path, "read", 1.0)) as made:
            assert made.execute("SELECT count(*) FROM origin").fetchone() == (1,)

    def test_a_larger_file_may_take_more(self, store: Store, path: Path, measurement: Make) -> None:
        with closing(connect(path, "read", 1.0)) as made:
            few = made.watch.most
        store.record_all([measurement(message="x" * 2000) for _ in range(100)])
        with closing(connect(path, "read", 1.0)) as made:
            assert made.watch.most - few >= 100 * 2000 * sqlite_module.STEPS_PER_BYTE

    def test_a_statement_ends_at_a_time(
        self, connection: Connection, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        connection.watch.most = sys.maxsize
        connection.watch.deadline = time.monotonic() + 0.2
        given_up = pytest.raises(StoreError, match="took too long to look into it")
        with given_up, sqlite_failures(path, writing=False, timeout=1.0):
            connection.execute(ENDLESS).fetchone()

    def test_all_statements_of_a_look_up_end_at_a_time(self, store: Store, path: Path) -> None:
        """Each may be a short one: there may be a hundred thousand devices, each of which is asked for."""

        def ask(view: Store) -> None:
            while True:
                view.gpu_keys()

        with pytest.raises(StoreError, match="took too long to look into it"):
            look_up(path, 0.2, ask)

    def test_no_value_is_longer_than_any_of_ours(self, connection: Connection, path: Path) -> None:
        """M2: rows bring their texts along, each time."""
        longer = pytest.raises(DatabaseDamaged, match="holds a value longer than any of flashtune")
        with longer, sqlite_failures(path, writing=False, timeout=1.0):
            connection.execute(f"SELECT zeroblob({LONGEST + 1})").fetchone()
        assert LONGEST > 4 * MOST

    def test_a_schema_of_very_many_tables_is_given_up(self, store: Store, path: Path) -> None:
        """M2: SQLite keeps each in memory."""
        with closing(sqlite3.connect(path)) as plain, plain:
            plain.execute("PRAGMA writable_schema = ON")
            (page,) = plain.execute("SELECT max(rootpage) FROM sqlite_master").fetchone()
            rows = [(f"t{number}", page, f"CREATE TABLE t{number} (x)") for number in range(20_000)]
            plain.executemany("INSERT INTO sqlite_master VALUES ('table', ?1, ?1, ?2, ?3)", rows)
        with pytest.raises(StoreError, match="more steps than a file of this size can need"):
            Store.open(path, readonly=True)

    def test_readers_attach_nothing_and_no_one_trusts_a_schema(self, connection: Connection) -> None:
        with pytest.raises(sqlite3.OperationalError, match="too many attached"):
            connection.execute("ATTACH ':memory:' AS other")
        assert connection.execute("PRAGMA trusted_schema").fetchone() == (0,)
        assert connection.execute("PRAGMA cell_size_check").fetchone() == (1,)


INTERRUPTED = """
import signal, sqlite3, sys
from pathlib import Path
from flashtune.tuned_db.backends.sqlite.failures import sqlite_failures
from flashtune.tuned_db.backends.sqlite.connections import connect
connection = connect(Path(path), "read", 1.0)
connection.watch.most = sys.maxsize
"""


def wait_for(process: subprocess.Popen[str], path: Path) -> None:
    """Until the process has the file open."""
    deadline = time.monotonic() + 100
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError):
            if any(os.readlink(each) == str(path) for each in Path(f"/proc/{process.pid}/fd").iterdir()):
                return
    raise AssertionError("it never opened the file")


class TestCtrlC:
    """M1: only SIGKILL and SIGTERM ended a query. What a signal handler raises inside SQLite, Python's module drops."""

    def test_it_ends_a_query(self, store: Store, path: Path, start: Start) -> None:
        code = INTERRUPTED + (
            "try:\n"
            "    with sqlite_failures(Path(path), writing=False, timeout=1.0):\n"
            "        print('ready', flush=True)\n"
            f"        connection.execute({ENDLESS!r}).fetchone()\n"
            "except KeyboardInterrupt:\n"
            "    print('interrupted')\n"
        )
        process = start(code, path)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)  # it may also come before the query begins, which is as well
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
        assert output == "interrupted\n"

    def test_none_is_lost_whenever_it_comes(self, store: Store, path: Path, start: Start) -> None:
        """Between any two instructions of Python, 300 times, and what another handler raises comes out as it is."""
        code = INTERRUPTED + (
            "class Alarm(Exception): pass\n"
            "kinds = [KeyboardInterrupt, Alarm, SystemExit]\n"
            "def ring(*_): raise kinds[0]\n"
            "signal.signal(signal.SIGALRM, ring)\n"
            "for turn in range(300):\n"
            "    kinds.append(kinds.pop(0))\n"
            "    try:\n"
            "        with sqlite_failures(Path(path), writing=False, timeout=1.0):\n"
            "            signal.setitimer(signal.ITIMER_REAL, 0.002)\n"
            f"            connection.execute({ENDLESS!r}).fetchone()\n"
            "    except kinds[0]:\n"
            "        continue\n"
            "    raise AssertionError\n"
            "print('all')\n"
        )
        process = start(code, path)
        output, _ = process.communicate(timeout=300)
        assert output == "all\n"

    @pytest.mark.parametrize("what", ["read", "write"])
    def test_it_ends_the_wait_for_a_lock(
        self, store: Store, path: Path, start: Start, locked: Callable[[Path], AbstractContextManager[None]], what: str
    ) -> None:
        """SQLite itself sleeps without hearing of it, as long as is allowed."""
        code = (
            "import flashtune.tuned_db.lookup.kept_connection\n"
            "try:\n"
            "    print('ready', flush=True)\n"
            f"    Store.open(path, readonly={what == 'read'})\n"
            "except KeyboardInterrupt:\n"
            "    print('interrupted')\n"
        )
        with locked(path):
            process = start(code, path)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            wait_for(process, path)
            before = time.monotonic()
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=120)
            assert time.monotonic() - before < 25, "a wait is 30 s"
        assert output == "interrupted\n"

    def test_a_command_ends_with_130(
        self, store: Store, path: Path, locked: Callable[[Path], AbstractContextManager[None]]
    ) -> None:
        with locked(path):
            process = subprocess.Popen(
                [sys.executable, "-m", "flashtune", "list", "--db", str(path)],
                env=os.environ | {"PYTHONPATH": str(SOURCES)}, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            wait_for(process, path)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=120)
        assert process.returncode == 130
        assert said == "Interrupted.\n"


def test_no_error_of_sqlite_moves_a_cursor(path: Path) -> None:
    """M4: on a terminal and in a log."""
    for code in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FULL, sqlite3.SQLITE_MISUSE, None):
        error = sqlite3.OperationalError("no such table: \x1b]0;owned\x07\x1b[2J\x1b[31mRun: \u202e" + "x" * 5000)
        if code is not None:
            error.sqlite_errorcode = code
        with pytest.raises(StoreError) as caught, sqlite_failures(path, writing=True, timeout=1.0):
            raise error
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 700


def test_a_lack_of_memory_is_one_line(path: Path) -> None:
    wanted = pytest.raises(StoreError, match="not enough memory for what is in it")
    with wanted, sqlite_failures(path, writing=False, timeout=1.0):
        raise MemoryError


ODD = [RuntimeError("odd"), RecursionError("deep"), MemoryError(), OSError(5, "I/O"), ValueError("\x1b[2J")]


@pytest.mark.parametrize("error", ODD, ids=lambda each: type(each).__name__)
def test_a_look_up_passes_over_a_database_whatever_happens(
    look: Make,
    store: Store,
    measurement: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """M3: attention() never fails for want of tuning data."""
    store.record(measurement())

    def fails(*_: object) -> None:
        raise error

    assert look().level == "exact"
    monkeypatch.setattr("flashtune.tuned_db.lookup.kept_connection.look_up", fails)
    assert [look().level for _ in range(3)] == ["default"] * 3
    (warning,) = (each for each in caplog.records if each.levelno == logging.WARNING)
    assert warning.getMessage().startswith(f"tuned configs of your own are not used: {type(error).__name__}:")
    assert warning.getMessage().isprintable()
