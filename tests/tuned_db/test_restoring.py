"""A backup takes the place of a database, whatever is there; nothing is deleted, and no log of before is replayed."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from folders import names

from flashtune.cli.main import main
from flashtune.errors import DatabaseDamaged, DatabaseForeign, DatabaseNotWritable, InvalidInput, StoreError
from flashtune.tuned_db.schema.version import SCHEMA_VERSION
from flashtune.tuned_db.store.store import Store
from flashtune.tuned_db.upkeep import restoring
from flashtune.tuned_db.upkeep.health import back_up
from flashtune.tuned_db.upkeep.restoring import restore

Make = Callable[..., Any]
Start = Callable[[str, Path], "subprocess.Popen[str]"]
OLD = Path(__file__).parents[1] / "upgrade_assets" / "v0001.db"

KILLED = """
    import os
    with Store.open(path) as store:
        store.record(fakes.make_measurement(session="later"))
        reading = store.backend.reading()
        reading.__enter__()  # the last to close a database would fold its log into it
        store.record(fakes.make_measurement(session="last"))
        os.kill(os.getpid(), 9)
"""


@pytest.fixture
def saved(store: Store, path: Path, measurement: Make) -> Path:
    """A backup of `store` with one row."""
    store.record(measurement(session="first"))
    target = path.with_name("safe.db")
    back_up(path, target)
    return target


@pytest.fixture
def killed(saved: Path, path: Path, start: Start) -> Path:
    """The log of a run that was killed, beside the database."""
    with start(KILLED, path) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == -9, output
    log = Path(f"{path}-wal")
    assert log.stat().st_size > 0
    return log


def sessions(path: Path) -> list[str]:
    with Store.open(path, readonly=True) as store:
        return sorted(each.session for each in store.measurements())


def test_the_log_of_a_killed_run_moves_aside_with_its_database(killed: Path, saved: Path, path: Path) -> None:
    """F17: whoever copied the backup over the file had a damaged one at once, as SQLite replayed the log."""
    done = restore(saved, path)
    assert (done.path, done.measurements) == (path, 1)
    assert sessions(path) == ["first"]
    assert path.with_name("tuned.db.replaced-1") in done.aside
    assert path.with_name("tuned.db.replaced-1-wal") in done.aside
    assert sessions(path.with_name("tuned.db.replaced-1")) == ["first", "last", "later"], "nothing is lost"
    with Store.open(path) as store:
        assert store.count() == 1
    assert sessions(saved) == ["first"]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:9000]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("no database", encoding="utf-8"),
    "zeros": lambda path: path.write_bytes(path.read_bytes()[:5000] + bytes(90_000)),
    "lost": lambda path: path.unlink(),
    "lost, but for its log": lambda path: (path.unlink(), Path(f"{path}-wal").write_bytes(b"x" * 5000)),
    "a forged journal": lambda path: Path(f"{path}-journal").write_bytes(b"\xd9\xd5\x05\xf9 \xa1c\xd7" * 100),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_whatever_is_there_moves_aside(saved: Path, path: Path, damage: str) -> None:
    DAMAGE[damage](path)
    before = {each.name: each.read_bytes() for each in path.parent.iterdir() if each != saved}
    done = restore(saved, path)
    assert sessions(path) == ["first"]
    aside = {each.name.replace(".replaced-1", ""): each.read_bytes() for each in done.aside}
    assert aside == before
    Store.open(path)
    assert sessions(path) == ["first"]


def test_each_restore_has_a_name_of_its_own(saved: Path, path: Path) -> None:
    for number in (1, 2, 3):
        (aside,) = restore(saved, path).aside
        assert aside.name == f"tuned.db.replaced-{number}"
    assert names(path.parent) == ["safe.db", "tuned.db", *(f"tuned.db.replaced-{number}" for number in (1, 2, 3))]


def test_a_database_that_was_never_there_is_made_of_it(saved: Path, tmp_path: Path) -> None:
    done = restore(saved, tmp_path / "new" / "folder" / "tuned.db")
    assert done.aside == ()
    assert sessions(done.path) == ["first"]


def test_a_link_stays_a_link(saved: Path, path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(path)
    assert restore(saved, link).path == path
    assert link.is_symlink()
    assert sessions(link) == ["first"]


def test_a_backup_of_an_older_schema_is_restored_as_it_is(path: Path, store: Store) -> None:
    assert restore(OLD, path).measurements == 4
    assert version(path) == 1
    with Store.open(path) as upgraded:
        assert upgraded.count() == 4
    assert version(path) == SCHEMA_VERSION


def version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as plain:
        return int(plain.execute("PRAGMA user_version").fetchone()[0])


def test_what_is_no_sound_backup_changes_nothing(saved: Path, path: Path, tmp_path: Path) -> None:
    broken, foreign, view = tmp_path / "broken.db", tmp_path / "foreign.db", tmp_path / "view.db"
    broken.write_bytes(saved.read_bytes()[:9000])
    with closing(sqlite3.connect(foreign)) as plain, plain:
        plain.execute("CREATE TABLE t (x)")
    shutil.copy(saved, view)
    with closing(sqlite3.connect(view)) as plain, plain:
        plain.execute("CREATE VIEW v AS SELECT 1")
    before, files = path.read_bytes(), names(path.parent)
    for bad, error in (
        (broken, DatabaseDamaged),
        (foreign, DatabaseForeign),
        (view, DatabaseForeign),
        (tmp_path / "none.db", StoreError),
        (tmp_path, DatabaseDamaged),
        (path, InvalidInput),
    ):
        with pytest.raises(error):
            restore(bad, path)
        assert (path.read_bytes(), names(path.parent)) == (before, files)


def test_one_that_another_process_uses_is_left_alone(saved: Path, path: Path, start: Start) -> None:
    """A process that has it open would remove the log of the new one when it closes the old."""
    code = "reading = Store.open(path).backend.reading(); reading.__enter__(); print('on', flush=True); input()"
    with start(code, path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        with pytest.raises(StoreError, match=r"in use by another process\. Nothing was changed"):
            restore(saved, path)
        assert not path.with_name("tuned.db.replaced-1").exists()
        process.communicate("\n", timeout=60)
    assert restore(saved, path).measurements == 1


@pytest.mark.parametrize("kind", ["a folder", "a pipe"])
def test_what_is_no_file_is_not_moved(saved: Path, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "odd"
    place.mkdir() if kind == "a folder" else os.mkfifo(place)
    with pytest.raises(InvalidInput, match="is not a file: move it away first"):
        restore(saved, place)
    assert place.exists()


@pytest.mark.parametrize("moment", [0, 1, 2, 3])
def test_a_run_that_is_killed_loses_nothing_and_the_next_completes_it(
    killed: Path, saved: Path, path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Between any two of its moves."""
    before = sorted(each.read_bytes() for each in path.parent.iterdir() if each != saved)
    with monkeypatch.context() as patch:
        moves = iter(range(moment))
        rename = Path.rename

        def renamed(self: Path, target: Path) -> Path:
            if next(moves, None) is None:
                raise KeyboardInterrupt
            return rename(self, target)

        patch.setattr(Path, "rename", renamed)
        patch.setattr(restoring, "name_copy", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            restore(saved, path)
    assert sorted(each.read_bytes() for each in path.parent.iterdir() if each != saved) == before
    restore(saved, path)
    assert sessions(path) == ["first"]


@pytest.mark.parametrize("moment", [0, 1, 2])
def test_a_move_that_the_disk_refuses_is_one_error_and_loses_nothing(
    killed: Path, saved: Path, path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """A hole in the tests: the refusal could be passed over, as if the backup were in its place."""
    before = sorted(each.read_bytes() for each in path.parent.iterdir() if each != saved)
    with monkeypatch.context() as patch:
        moves = iter(range(moment))
        rename = Path.rename

        def renamed(self: Path, target: Path) -> Path:
            if next(moves, None) is None:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
            return rename(self, target)

        patch.setattr(Path, "rename", renamed)
        with pytest.raises(DatabaseNotWritable) as caught:
            restore(saved, path)
    assert str(path) in str(caught.value)
    assert os.strerror(errno.EROFS) in str(caught.value)
    assert sorted(each.read_bytes() for each in path.parent.iterdir() if each != saved) == before
    restore(saved, path)
    assert sessions(path) == ["first"]


def test_a_place_that_can_not_be_made_is_one_error(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DatabaseNotWritable, match=r"tuned\.db"):
        restore(saved, tmp_path / "file" / "tuned.db")
    assert (tmp_path / "file").read_bytes() == b""


def test_the_command_says_where_what_was_there_is(killed: Path, saved: Path, path: Path) -> None:
    said = CliRunner().invoke(main, ["db", "restore", str(saved), "--db", str(path)])
    assert said.exit_code == 0, said.output
    lines = said.stdout.splitlines()
    assert lines[0] == f"Restored {path}: 1 measurements"
    assert lines[1] == f"What was there is {path}.replaced-1"
    assert f"What was there is {path}.replaced-1-wal" in lines
