"""Folders and files that the user may not write or read: what can be read is, and one error names another place."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from folders import snapshot

from flashtune.tuned_db.store.store import Store

Make = Callable[..., Any]
Start = Callable[[str, Path], "subprocess.Popen[str]"]

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
        "from flashtune.codegen.families import registry\n"
        "from flashtune.tuned_db.lookup import lookup\n"
        "registry.predict = lookup.predict = lambda *_: SimpleNamespace(seconds=1e-3)\n"
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
@pytest.mark.parametrize("beside", [{}, {"-wal": 0}, {"-wal": 0, "-shm": 32768}, {"-journal": 0}], ids=str)
@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_what_lies_empty_beside_a_database_changes_nothing(
    start: Start, read_only_folder: Path, tmp_path: Path, journal: str, beside: dict[str, int]
) -> None:
    """A hole in the tests: an empty log, as a writer that was killed leaves it, could make the file unreadable."""
    path = read_only_folder / "tuned.db"
    read_only_folder.chmod(0o755)
    path.chmod(0o644)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute(f"PRAGMA journal_mode = {journal}").fetchone() == (journal.lower(),)
    for end, size in beside.items():
        path.with_name(path.name + end).write_bytes(bytes(size))
    path.chmod(0o444)
    read_only_folder.chmod(0o555)
    before = snapshot(read_only_folder)
    other = shutil.copy(path, tmp_path / "other.db")
    code = (
        f"there, path = path, {str(other)!r}\n"  # who may write would tidy up
        "from types import SimpleNamespace\n"
        "from click.testing import CliRunner\n"
        "from flashtune.cli.main import main\n"
        "from flashtune.codegen.families import registry\n"
        "from flashtune.tuned_db.lookup import lookup\n"
        "registry.predict = lookup.predict = lambda *_: SimpleNamespace(seconds=1e-3)\n"
        "level = lambda: lookup.find(fakes.make_problem(), fakes.H200, store_path=path).level\n"
        "listed = lambda: CliRunner().invoke(main, ['list', '--db', path])\n"
        "level(), listed()\n" + AS_NOBODY + "path = there\n"
        "print(os.access(path, os.W_OK), len(Store.open(path, readonly=True).measurements()), level())\n"
        "print(listed().exit_code, 'block=128' in listed().output)\n"
    )
    output, _ = start(code, path).communicate(timeout=120)
    assert output == "False 1 exact\n0 True\n"
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
        "from flashtune.cli.main import main\n"
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
        "from flashtune.tuned_db.backends.sqlite.files import read_header\n"
        "try:\n"
        "    read_header(Path(path))\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    path.chmod(0)
    output, _ = start(code, path).communicate(timeout=120)
    assert output == f"StoreError tuning database {path} can't be read: Permission denied\n"
