"""Files that are no tuning database, or can't be written: one clear error each, and nothing is touched."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flashtune.errors import (
    DatabaseDamaged,
    DatabaseForeign,
    DatabaseNotWritable,
    DatabaseTooNew,
    StoreError,
)
from flashtune.tuned_db import files, opening
from flashtune.tuned_db import sqlite as sqlite_module
from flashtune.tuned_db import upgrade as upgrade_module
from flashtune.tuned_db.files import sqlite_failures
from flashtune.tuned_db.store import Store

Make = Callable[..., Any]
Start = Callable[[str, Path], "subprocess.Popen[str]"]

MODES = [pytest.param(True, id="read"), pytest.param(False, id="write")]


def set_header(path: Path, offset: int, number: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(">i", data, offset, number)
    path.write_bytes(data)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() if each.is_file() else b"" for each in sorted(folder.rglob("*"))}


def random_bytes(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(20_000))


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_in_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("block_m,block_n\n64,64\n")


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")


def a_pipe(path: Path) -> None:
    """Opening it would wait for a writer for ever."""
    path.unlink()
    os.mkfifo(path)


def scrambled_schema(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100:4096] = random.Random(2).randbytes(3996)
    path.write_bytes(data)


def without_tables(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as plain:
        plain.execute("PRAGMA foreign_keys = OFF")
        for table in ("prediction", "measurement", "origin"):
            plain.execute(f"DROP TABLE {table}")


def without_its_id(path: Path) -> None:
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("DELETE FROM origin")


def another_programs(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("CREATE TABLE songs (title TEXT)")
        plain.execute("INSERT INTO songs VALUES ('Ode')")


def from_the_future(path: Path) -> None:
    set_header(path, 60, 7)


BROKEN = [
    (random_bytes, DatabaseDamaged, "not an SQLite database"),
    (cut_in_half, DatabaseDamaged, "damaged"),
    (cut_in_the_header, DatabaseDamaged, "not an SQLite database"),
    (emptied, DatabaseDamaged, r"empty \(0 bytes\)"),
    (text, DatabaseDamaged, "not an SQLite database"),
    (a_directory, DatabaseDamaged, "is a directory"),
    pytest.param(a_pipe, DatabaseDamaged, "or a device", marks=needs_pipes),
    (scrambled_schema, DatabaseDamaged, "damaged"),
    (without_tables, DatabaseDamaged, "damaged: no such table"),
    (without_its_id, DatabaseDamaged, "its id is gone"),
    (another_programs, DatabaseForeign, "another program"),
    (from_the_future, DatabaseTooNew, f"schema version 7, this flashtune knows up to {files.SCHEMA_VERSION}"),
]


@pytest.mark.parametrize("readonly", MODES)
@pytest.mark.parametrize(("breaks", "error", "reason"), BROKEN, ids=lambda each: getattr(each, "__name__", ""))
def test_what_is_no_tuning_database_is_refused_and_left_alone(
    store: Store,
    path: Path,
    measurement: Make,
    readonly: bool,
    breaks: Callable[[Path], None],
    error: type[StoreError],
    reason: str,
) -> None:
    """D73, and D75 for a newer schema."""
    store.record_all([measurement() for _ in range(20)])
    breaks(path)
    before = snapshot(path.parent)
    with pytest.raises(error, match=reason) as caught:
        Store.open(path, readonly=readonly)
    assert str(path) in str(caught.value)
    assert snapshot(path.parent) == before


def test_a_schema_that_is_still_in_the_log_is_too_new(store: Store, path: Path) -> None:
    """D75, where the file alone does not show it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as plain:
        plain.execute("PRAGMA wal_autocheckpoint = 0")
        plain.execute("PRAGMA user_version = 9")
        assert files.read_header(path).schema == files.SCHEMA_VERSION
        for readonly in (True, False):
            with pytest.raises(DatabaseTooNew, match="schema version 9"):
                Store.open(path, readonly=readonly)


def test_damage_that_shows_later_has_the_path_too(store: Store, path: Path, measurement: Make) -> None:
    """D72, what a network mount may do to a file."""
    store.record_all([measurement(message="x" * 500) for _ in range(100)])
    data = bytearray(path.read_bytes())
    data[-20_000:] = random.Random(3).randbytes(20_000)
    path.write_bytes(data)
    with pytest.raises(DatabaseDamaged, match=r"tuned\.db is damaged"):
        store.measurements()


@pytest.mark.parametrize("readonly", MODES)
def test_a_missing_database_is_not_made_unasked(tmp_path: Path, readonly: bool) -> None:
    with pytest.raises(StoreError, match=r"tuned\.db does not exist"):
        Store.open(tmp_path / "tuned.db", create=False, readonly=readonly)
    with pytest.raises(StoreError, match="does not exist"):
        Store.open(tmp_path / "tuned.db", readonly=True)
    assert snapshot(tmp_path) == {}


def test_a_link_to_nowhere_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "tuned.db").symlink_to(tmp_path / "gone.db")
    with pytest.raises(StoreError, match="does not exist"):
        Store.open(tmp_path / "tuned.db")


# Root may write anywhere, so it becomes somebody else, once all is imported that this one may not read.
# Nobody may not be allowed to read the checkout: all that is imported later is imported before.
AS_NOBODY = """
import importlib, multiprocessing.popen_fork, multiprocessing.queues, multiprocessing.synchronize, os, pkgutil
import flashtune.codegen.families, flashtune.tuned_db
if os.getuid() == 0:
    for each in pkgutil.iter_modules(flashtune.tuned_db.__path__, "flashtune.tuned_db."):
        if not each.ispkg:
            importlib.import_module(each.name)
    Store.open(path, readonly=True).measurements()
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
"""


@pytest.fixture
def read_only_folder(measurement: Make) -> Iterator[Path]:
    """Holds a database with one row; neither can be written by who has no special rights.

    Not under ``tmp_path``: its parents belong to this user alone, and other test processes share them.
    """
    place = Path(tempfile.gettempdir()).resolve()
    if os.getuid() == 0 and any(not each.stat().st_mode & 0o001 for each in (place, *place.parents)):
        pytest.skip(f"{place} is closed to other users")
    folder = Path(tempfile.mkdtemp(prefix="flashtune-test-"))
    with Store.open(folder / "tuned.db") as store:
        store.record(measurement())
    (folder / "tuned.db").chmod(0o444)
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


needs_posix = pytest.mark.skipif(not hasattr(os, "setuid"), reason="needs POSIX permissions")


@needs_posix
def test_four_readers_share_a_folder_that_none_can_write(start: Start, read_only_folder: Path) -> None:
    """D74. Rows are read and looked up, and nothing appears beside the file."""
    path = read_only_folder / "tuned.db"
    before = snapshot(read_only_folder)
    code = (
        "from types import SimpleNamespace\n"
        "from flashtune.codegen import model\n"
        "from flashtune.tuned_db import lookup\n"
        "model.predict = lookup.predict = lambda *_: SimpleNamespace(seconds=1e-3)\n"
        "level = lambda: lookup.find(fakes.make_problem(), fakes.H200, store_path=path).level\n"
        "level()"
        + AS_NOBODY
        + """
def work(path, answers):
    for _ in range(3):
        answers.put((os.access(path, os.W_OK), len(Store.open(path, readonly=True).measurements()), level()))
context = multiprocessing.get_context("fork")
answers = context.SimpleQueue()
workers = [context.Process(target=work, args=(path, answers)) for _ in range(4)]
[each.start() for each in workers]
[each.join() for each in workers]
print([each.exitcode for each in workers], {answers.get() for _ in range(12)})
"""
    )
    output, _ = start(code, path).communicate(timeout=120)
    assert output == "[0, 0, 0, 0] {(False, 1, 'exact')}\n"
    assert snapshot(read_only_folder) == before


@needs_posix
def test_writing_there_is_refused_and_names_another_place(start: Start, read_only_folder: Path) -> None:
    """D74."""
    path = read_only_folder / "tuned.db"
    before = snapshot(read_only_folder)
    code = AS_NOBODY + (
        "for place in (path, os.path.join(os.path.dirname(path), 'new', 'new.db')):\n"
        "    try:\n"
        "        Store.open(place)\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    output, _ = start(code, path).communicate(timeout=120)
    first, second = output.splitlines()
    assert first.startswith(f"DatabaseNotWritable tuning database {path} can't be written: {path} is read-only.")
    assert "DatabaseNotWritable" in second
    assert all("e.g. --db /" in line and line.endswith("tuned.db") for line in (first, second))
    assert snapshot(read_only_folder) == before


@needs_posix
def test_tune_does_not_begin_there_and_names_another_place(start: Start, read_only_folder: Path) -> None:
    """D74, the command."""
    path = read_only_folder / "tuned.db"
    before = snapshot(read_only_folder)
    code = (
        "from click.testing import CliRunner\n"
        "from flashtune.cli import main\n"
        "flags = '--gpu h200 --mode predict --dtype float16 --seqlen 64 --heads 4 --head-dim 64 --budget 1'.split()\n"
        "tune = lambda db: CliRunner().invoke(main, ['tune', *flags, '--db', db])\n"
        "tune(sys.executable)  # no database, so it is refused as late: all is imported\n"
        + AS_NOBODY
        + "done = tune(path)\n"
        "print(done.exit_code, done.output, end='')\n"
    )
    output, _ = start(code, path).communicate(timeout=120)
    assert output.startswith(f"1 Error: tuning database {path} can't be written: {path} is read-only.")
    assert "e.g. --db /" in output
    assert output.count("\n") == 1
    assert snapshot(read_only_folder) == before


@needs_posix
def test_a_file_that_cannot_be_read_says_so(start: Start, store: Store, path: Path, tmp_path: Path) -> None:
    code = AS_NOBODY + (
        "from pathlib import Path\n"
        "from flashtune.tuned_db.files import read_header\n"
        "try:\n"
        "    read_header(Path(path))\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    path.chmod(0)
    output, _ = start(code, path).communicate(timeout=120)
    assert output == f"StoreError tuning database {path} can't be read: Permission denied\n"


def test_a_full_disk_is_named_and_nothing_is_lost(
    store: Store, path: Path, measurement: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = store.record(measurement())
    pages = path.stat().st_size // 4096

    connect = sqlite_module.connect

    def limited(*arguments: Any) -> sqlite3.Connection:
        connection = connect(*arguments)
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(sqlite_module, "connect", limited)
        with pytest.raises(DatabaseNotWritable, match=r"disk is full.* e\.g\. --db .*tuned\.db"):
            store.record_all([measurement(message="x" * 2000) for _ in range(50)])
        assert store.measurements() == [stored]
    store.record_all([measurement(message="x" * 2000) for _ in range(50)])
    assert len(store.measurements()) == 51


def test_a_full_disk_leaves_no_half_made_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, timeout: float) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(upgrade_module, "upgrade", full)
    with pytest.raises(DatabaseNotWritable, match="No space left on device"):
        Store.open(tmp_path / "tuned.db")
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
def test_a_disk_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    first = Store.open(tmp_path / "tuned.db")
    assert [each.name for each in tmp_path.iterdir()] == ["tuned.db"]
    late = tmp_path / "late"
    late.write_bytes(b"made by a slower process")
    files.publish(late, first.path)
    assert Store.open(first.path).origin == first.origin
    assert not late.exists()


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb1 /home/local ext4 rw 0 0
//box/share /mnt/my\\040share cifs rw 0 0
overlay /containers fuse.overlayfs rw 0 0
me@host: /mnt/数据 fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/var/tuned.db", "ext4", False),
        ("/home/me/tuned.db", "nfs4", True),
        ("/home/local/tuned.db", "ext4", False),
        ("/homeless/tuned.db", "ext4", False),
        ("/mnt/my share/tuned.db", "cifs", True),
        ("/containers/tuned.db", "fuse.overlayfs", False),
        ("/mnt/数据/tuned.db", "fuse.sshfs", True),
    ],
)
def test_network_mounts_are_known(path: str, kind: str, network: bool) -> None:
    assert files.filesystem_type(Path(path), MOUNTS) == kind
    assert files.is_network(kind) == network


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_this_machine_has_mounts(tmp_path: Path) -> None:
    assert files.filesystem_type(tmp_path.resolve(), Path("/proc/self/mounts").read_text()) != ""


def test_no_wal_on_a_network_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, measurement: Make
) -> None:
    """D72."""
    monkeypatch.setattr(opening, "on_network", lambda path: True)
    path = tmp_path / "tuned.db"
    Store.open(path).record(measurement())
    assert files.read_header(path).wal is False
    assert "tune into a local file and merge it later" in caplog.text
    monkeypatch.setattr(opening, "on_network", lambda path: False)
    assert len(Store.open(path).measurements()) == 1
    assert files.read_header(path).wal is True
    monkeypatch.setattr(opening, "on_network", lambda path: True)
    assert len(Store.open(path).measurements()) == 1
    assert files.read_header(path).wal is False


def test_a_disk_too_full_to_read_beside_writers_is_named(path: Path) -> None:
    """In WAL mode SQLite makes a side file even for readers."""
    failure = sqlite3.OperationalError("disk I/O error")
    failure.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    with pytest.raises(DatabaseNotWritable, match="Pass another path"), sqlite_failures(path, writing=False, timeout=1):
        raise failure
