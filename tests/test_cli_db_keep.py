"""`flashtune db check|backup|upgrade`, and packed exports, as a user meets them."""

from __future__ import annotations

import functools
import gzip
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from command_line import run

from flashtune.cli.db import keep
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.tuned_db.backends.sqlite.files import read_header
from flashtune.tuned_db.exchange.export_file import read_export
from flashtune.tuned_db.schema.version import SCHEMA_VERSION

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "tuned_db" / "bundled" / "h200.jsonl"
PROBLEMS = len({each.problem for each in read_export(SHIPPED).measurements})
OLD = ROOT / "tests" / "upgrade_assets" / "v0001.db"

call = functools.partial(run, "db")


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "own.db"))
    monkeypatch.setattr(keep, "_first_gpu", lambda: None)
    return tmp_path / "own.db"


@pytest.fixture
def filled(sound: Path, own: Path) -> Path:
    shutil.copy(sound, own)
    return own


@pytest.mark.parametrize("command", ["check", "backup", "upgrade", "history", "digest", "diff"])
def test_every_command_teaches_by_example(command: str) -> None:
    assert f"flashtune db {command}" in call(command, "--help").output
    assert command in call("--help").output


def test_check_of_a_sound_database(filled: Path) -> None:
    before = filled.read_bytes()
    shown = call("check", "--gpu", "h200").stdout
    rows = len(read_export(SHIPPED).measurements)
    for line in (
        f"schema        {SCHEMA_VERSION}",
        "journal       wal",
        "network mount no",
        "file          sound",
        "not readable  none",
    ):
        assert line in shown
    assert f"h200: {rows}: {rows} with today's source" in shown
    assert f"serves        h200: {PROBLEMS} problems ({PROBLEMS} exact)" in shown
    assert filled.read_bytes() == before


def test_check_says_what_serves_the_gpu_here(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D80, and D79: which GPU an alias stands for."""
    assert "no GPU is here; name one with --gpu" in call("check").stdout
    monkeypatch.setattr(keep, "_first_gpu", lambda: gpu_by_alias("h100"))
    assert f"serves        h100-sxm: {PROBLEMS} problems ({PROBLEMS} borrowed)" in call("check").stdout
    shown = call("check", "--gpu", "a100").stdout
    assert "serves        nothing for a100-sxm-80gb: it holds entries for h200 only" in shown
    assert "flashtune tune --gpu a100-sxm-80gb" in shown


def test_check_of_rows_that_cannot_be_read_is_no_damage(filled: Path) -> None:
    with closing(sqlite3.connect(filled)) as plain, plain:
        plain.execute("UPDATE measurement SET status = 'ok' || char(27) || char(10) WHERE rowid <= 25")
    shown = call("check").stdout
    assert "not readable  25 rows can't be read by this version" in shown
    assert shown.count("status='ok\\x1b\\n' is not known. Known: ok, wrong, ") == 20
    assert "and 5 more" in shown
    assert "\x1b" not in shown


def test_check_of_older_sources(filled: Path) -> None:
    """D81."""
    with closing(sqlite3.connect(filled)) as plain, plain:
        plain.execute("UPDATE variant SET source_digest = replace(source_digest, 'a', 'b') WHERE rowid <= 10")
    shown = call("check").stdout
    assert "with an older source, kept as history" in shown


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pages": (
        lambda path: path.write_bytes(path.read_bytes()[:50_000] + bytes(path.stat().st_size - 50_000)),
        "flashtune db restore BACKUP --db ",
    ),
    "references": (lambda path: run(path, "DELETE FROM variant WHERE rowid < 4"), "point to a variant that is gone"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:100_000]), "damaged"),
    "no database": (lambda path: path.write_bytes(b"text " * 100), "not an SQLite database"),
    "nothing": (lambda path: path.write_bytes(b""), "is empty"),
}


def run(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute(statement)


@pytest.mark.parametrize("kind", DAMAGE)
def test_check_of_damage_ends_with_one(filled: Path, kind: str) -> None:
    """D72 and D73: damage is found and reported."""
    damage, reason = DAMAGE[kind]
    damage(filled)
    before = filled.read_bytes()
    shown = call("check", code=1).output
    assert reason in shown
    assert "damaged" in shown.lower() or kind in ("no database", "nothing")
    assert filled.read_bytes() == before


def test_a_backup_is_a_database(filled: Path, tmp_path: Path) -> None:
    target = tmp_path / "safe.db"
    assert f"Copied to {target}" in call("backup", str(target)).output
    assert call("diff", str(filled), str(target)).exit_code == 0
    assert f"{PROBLEMS} problems" in call("check", "--db", str(target), "--gpu", "h200").output
    before = target.read_bytes()
    assert "exists and is left as it is" in call("backup", str(target), code=1).output
    assert target.read_bytes() == before


def test_misuse_of_backup_is_one_line(tmp_path: Path, own: Path) -> None:
    assert "flashtune tune makes one" in call("backup", str(tmp_path / "x.db"), code=1).output
    call("import", str(SHIPPED))
    assert "there is no folder" in call("backup", str(tmp_path / "no" / "x.db"), code=1).output
    assert "exists" in call("backup", str(own), code=1).output
    assert "Missing argument 'FILE'" in call("backup", code=2).output
    assert "is a directory" in call("backup", str(tmp_path), code=2).output


def test_upgrade_says_what_it_did(tmp_path: Path) -> None:
    old = tmp_path / "old.db"
    shutil.copy(OLD, old)
    assert (
        f"schema        1, older than {SCHEMA_VERSION}: flashtune db upgrade" in call("check", "--db", str(old)).output
    )
    shown = call("upgrade", "--db", str(old)).output
    assert f"Upgraded {old} from schema version 1 to {SCHEMA_VERSION}" in shown
    assert f"As it was: {old}.schema-1.backup" in shown
    assert read_header(old).schema == SCHEMA_VERSION
    assert read_header(Path(f"{old}.schema-1.backup")).schema == 1
    assert "Nothing to do" in call("upgrade", "--db", str(old)).output


def test_misuse_of_upgrade_is_one_line(tmp_path: Path, own: Path) -> None:
    assert "flashtune tune makes one" in call("upgrade", code=1).output
    own.write_bytes(b"text " * 100)
    assert "not an SQLite database" in call("upgrade", code=1).output
    call("import", str(SHIPPED), "--db", str(tmp_path / "new.db"))
    run(tmp_path / "new.db", "PRAGMA user_version = 9")
    assert "pip install -U flashtune" in call("upgrade", "--db", str(tmp_path / "new.db"), code=1).output


def test_exports_may_be_packed(filled: Path, tmp_path: Path) -> None:
    packed, plain = tmp_path / "out.jsonl.gz", tmp_path / "out.jsonl"
    rows = len(read_export(SHIPPED).measurements)
    assert f"{rows} measurements written" in call("export", str(packed)).output
    call("export", str(plain))
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert f"{rows} new measurements" in call("import", str(packed), "--db", str(tmp_path / "other.db")).output
    assert "flashtune db import" in call("merge", str(packed), code=1).output
    packed.write_bytes(gzip.compress(bytes(2**21)))
    assert "the line has more than 65536 bytes" in call("import", str(packed), code=1).output
    assert "no flashtune export" in call("export", str(packed), code=1).output
