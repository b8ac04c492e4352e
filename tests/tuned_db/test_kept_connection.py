"""A file at rest is looked into on a connection that is kept, which nobody can tell but by the time it takes."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.errors import DatabaseDamaged, DatabaseForeign, StoreError
from flashtune.tuned_db.backends.sqlite.files import replaceable
from flashtune.tuned_db.lookup import kept_connection
from flashtune.tuned_db.lookup.kept_connection import look_up
from flashtune.tuned_db.lookup.lookup import find
from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kept on Linux only")


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files rest after 50 ms, so that tests need not wait for 2 s."""
    monkeypatch.setattr(kept_connection, "RESTED", 50_000_000)
    kept_connection.forget()
    yield
    kept_connection.forget()


def rest(path: Path) -> None:
    """Waits until the file is at rest."""
    deadline = time.monotonic() + 60
    while kept_connection.resting(path) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ids(view: Store) -> set[str]:
    return {each.id for each in view.measurements()}


def seen(path: Path) -> set[str]:
    return look_up(path, 2.0, ids)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each file that is opened, whether it is to be kept."""
    found: list[bool] = []
    make = kept_connection._open

    def counted(asked: Any, state: Any) -> Any:
        found.append(state is not None)
        return make(asked, state)

    monkeypatch.setattr(kept_connection, "_open", counted)
    return found


@pytest.fixture
def rested(path: Path, store: Store, measurement: Make) -> set[str]:
    """Ids of what is in a file that is at rest."""
    made = {store.record(measurement()).id}
    rest(path)
    return made


def test_a_file_at_rest_is_opened_once(path: Path, rested: set[str], opened: list[bool]) -> None:
    assert [seen(path) for _ in range(3)] == [rested] * 3
    assert opened == [True]
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name]


def test_one_that_was_just_written_is_not_kept(
    path: Path, store: Store, measurement: Make, opened: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_connection, "RESTED", 60_000_000_000)
    assert seen(path) == set()
    row = store.record(measurement())
    assert seen(path) == {row.id}
    assert opened == [False, False]


def test_rows_that_are_added_are_seen_at_once(path: Path, store: Store, rested: set[str], measurement: Make) -> None:
    assert seen(path) == rested
    for _ in range(5):
        rested.add(store.record(measurement()).id)
        assert seen(path) == rested
        rest(path)
        assert seen(path) == rested


def test_rows_in_the_log_of_another_connection_are_seen(
    path: Path, store: Store, rested: set[str], measurement: Make, opened: list[bool]
) -> None:
    assert seen(path) == rested
    with closing(sqlite3.connect(path)) as other:  # who is connected keeps the log from being merged
        other.execute("SELECT * FROM origin").fetchall()
        rested.add(store.record(measurement()).id)
        assert path.with_name(path.name + "-wal").stat().st_size > 0
        assert seen(path) == rested
        assert opened == [True, False]
    rest(path)
    assert seen(path) == rested


def test_a_log_at_rest_is_copied_once(
    path: Path,
    store: Store,
    rested: set[str],
    measurement: Make,
    opened: list[bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a process that was killed leaves it, or one that is connected and idle."""
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    with closing(sqlite3.connect(path)) as other:
        other.execute("SELECT * FROM origin").fetchall()
        rested.add(store.record(measurement()).id)
        rest(path)
        assert [seen(path) for _ in range(3)] == [rested] * 3
        assert opened == [True]
        assert len(list(private.iterdir())) == 1
        rested.add(store.record(measurement()).id)
        assert seen(path) == rested
    kept_connection.forget()
    assert list(private.iterdir()) == []


def test_without_a_log_a_file_is_read_in_its_place(
    path: Path, store: Store, measurement: Make, opened: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network mount, where it would be sent as a whole for each look-up."""
    monkeypatch.setattr(kept_connection, "PrivateCopy", None)
    monkeypatch.setattr(kept_connection, "on_network", lambda path: True)
    with closing(sqlite3.connect(path)) as plain:
        plain.execute("PRAGMA journal_mode = DELETE")
    made = {store.record(measurement()).id}
    assert seen(path) == made
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("UPDATE measurement SET message = 'not yet'")
        assert seen(path) == made, "who has begun to write is not waited for"
    assert opened == [False, False]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("mode", [0o757, 0o777, 0o1777], ids=oct)
def test_where_strangers_can_replace_a_file_it_is_opened_by_no_name(
    path: Path, store: Store, rested: set[str], monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """SQLite opens a name, and waits for ever, whatever is typed, where a pipe has it by then."""
    folder = path.parent / "shared"
    folder.mkdir()
    shared = Path(shutil.copy(path, folder))
    folder.chmod(mode)
    rest(shared)
    look = kept_connection.read_header

    def exchanged(given: Path) -> object:
        found = look(given)
        if not mode & 0o1000:  # in a sticky folder nobody else can
            given.unlink()
            os.mkfifo(given)
        return found

    monkeypatch.setattr(kept_connection, "read_header", exchanged)
    if mode & 0o1000:
        assert seen(shared) == rested
    else:
        with pytest.raises(DatabaseDamaged, match="is a pipe"):
            seen(shared)


def test_who_can_replace_a_file(path: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not replaceable(path)
    assert replaceable(path.with_name("none.db"))
    path.chmod(0o666)
    assert not replaceable(path), "what is written to a file is another thing"
    tmp_path.chmod(0o770)
    assert not replaceable(path), "of a group that the user lets write, as with umask 002"
    tmp_path.chmod(0o707)
    assert replaceable(path)
    tmp_path.chmod(0o1777)
    assert not replaceable(path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert replaceable(path) == (os.getuid() != 0), "root may replace anything, and is trusted"


@pytest.mark.parametrize("how", ["moved", "copied", "linked"])
def test_a_file_that_is_replaced_is_seen_at_once(
    path: Path, rested: set[str], measurement: Make, tmp_path: Path, how: str
) -> None:
    other = tmp_path / "other.db"
    with Store.open(other) as another:
        row = another.record(measurement())
    asked = path
    if how == "linked":
        asked = tmp_path / "link.db"
        asked.symlink_to(path)
    assert seen(asked) == rested
    if how == "moved":
        other.replace(path)
    elif how == "copied":
        shutil.copyfile(other, path)
    else:
        asked.unlink()
        asked.symlink_to(other)
    assert seen(asked) == {row.id}
    rest(Path(os.path.realpath(asked)))
    assert seen(asked) == {row.id}


def test_the_log_of_a_file_behind_a_link_counts(path: Path, store: Store, rested: set[str], measurement: Make) -> None:
    link = path.with_name("link.db")
    link.symlink_to(path)
    assert seen(link) == rested
    with closing(sqlite3.connect(path)) as other:
        other.execute("SELECT * FROM origin").fetchall()
        rested.add(store.record(measurement()).id)
        assert seen(link) == rested


def test_a_file_with_two_names_is_not_kept(path: Path, rested: set[str], opened: list[bool]) -> None:
    os.link(path, path.with_name("again.db"))
    time.sleep(0.1)
    assert seen(path) == rested
    assert opened == [False]


def test_an_answer_that_a_change_overtook_is_asked_again(
    path: Path, store: Store, rested: set[str], measurement: Make
) -> None:
    calls = 0

    def ask(view: Store) -> set[str]:
        nonlocal calls
        calls += 1
        found = ids(view)
        if calls == 1:
            rested.add(store.record(measurement()).id)
        return found

    assert look_up(path, 2.0, ask) == rested
    assert calls == 2


@pytest.mark.parametrize("change", ["text", "damage", "gone", "foreign"])
def test_what_went_wrong_is_said_as_without_it(path: Path, rested: set[str], change: str) -> None:
    assert seen(path) == rested
    if change == "text":
        with closing(sqlite3.connect(path)) as plain, plain:
            plain.execute("UPDATE measurement SET message = CAST(x'ff' AS TEXT)")
        rest(path)
        assert seen(path) == set()  # the row is passed over
        return
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(b"junk" * 4000 if change == "damage" else foreign(path.parent))
        rest(path)
    wanted = {"damage": DatabaseDamaged, "gone": StoreError, "foreign": DatabaseForeign}[change]
    for _ in range(2):
        with pytest.raises(wanted, match=path.name):
            seen(path)


def foreign(folder: Path) -> bytes:
    with closing(sqlite3.connect(folder / "foreign.db")) as plain, plain:
        plain.execute("CREATE TABLE measurement (id)")
    return (folder / "foreign.db").read_bytes()


def test_it_keeps_nobody_from_anything(path: Path, store: Store, rested: set[str], measurement: Make) -> None:
    assert seen(path) == rested
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as plain:
        assert plain.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
        plain.execute("BEGIN EXCLUSIVE")
        plain.execute("COMMIT")
        assert plain.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
    rested.add(store.record(measurement()).id)
    assert seen(path) == rested
    assert not path.with_name(path.name + "-wal").exists()


def test_threads_do_not_share_one(path: Path, rested: set[str]) -> None:
    found: list[set[str]] = []
    both = threading.Barrier(4)

    def ask(view: Store) -> set[str]:
        both.wait()
        return ids(view)

    threads = [threading.Thread(target=lambda: found.append(look_up(path, 2.0, ask))) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [rested] * 4
    assert len(kept_connection._kept) == 1


def test_a_child_leaves_it_alone(path: Path, store: Store, rested: set[str], measurement: Make) -> None:
    assert seen(path) == rested
    pid = os.fork()
    if not pid:
        try:
            right = seen(path) == rested and len(kept_connection._inherited) == 1
            os._exit(0 if right else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert seen(path) == rested
    rested.add(store.record(measurement()).id)
    assert seen(path) == rested


def test_look_ups_of_a_process_open_the_file_once(
    path: Path, rested: set[str], opened: list[bool], problem: Make
) -> None:
    gpu = gpu_by_alias("h200")
    levels = [find(problem(seqlen_q=length), gpu, store_path=path).level for length in (1024, 1024, 2048)]
    assert levels[0] == levels[1] == "exact"
    assert opened == [True]
