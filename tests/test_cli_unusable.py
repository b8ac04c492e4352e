"""What commands and `attention()` make of a tuning database that is damaged, too new, or for another GPU."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from broken_files import a_directory, cut_in_half, emptied, random_bytes
from click.testing import CliRunner

from flashtune import Problem, explain
from flashtune.cli.main import main
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.tuned_db.lookup import lookup
from flashtune.tuned_db.lookup.sources import Shipped
from flashtune.tuned_db.schema.version import SCHEMA_VERSION

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "tuned_db" / "bundled" / "h200.jsonl"
PROBLEM = ["--seqlen", "256", "--heads", "4", "--head-dim", "64", "--dtype", "float16"]
TOO_NEW = SCHEMA_VERSION + 5


@pytest.fixture
def path(tmp_path: Path, sound: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, which is also what is used where no --db is given."""
    path = tmp_path / "mine.db"
    shutil.copy(sound, path)
    monkeypatch.setenv("FLASHTUNE_DB", str(path))
    return path


def newer(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[60:64] = TOO_NEW.to_bytes(4, "big")
    path.write_bytes(data)


def content(path: Path) -> list[bytes]:
    """Of whatever is at ``path``, and what lies beside it."""
    files = [*path.parent.rglob("*")]
    return [str(each).encode() + (each.read_bytes() if each.is_file() else b"") for each in sorted(files)]


def refusal(path: Path, *arguments: str) -> str:
    """What a command that must fail says; it changes nothing."""
    before = content(path)
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code not in (0, 130), done.output
    assert "Traceback" not in done.output
    assert content(path) == before
    return done.output


TUNE = ["tune", "--gpu", "h100", "--mode", "predict", *PROBLEM, "--budget", "1"]
COMMANDS = {
    "list": ["list"],
    "tune": TUNE,
    "info": ["db", "info"],
    "check": ["db", "check", "--gpu", "h100"],
    "digest": ["db", "digest", "--gpu", "h100"],
    "export": ["db", "export", "out.jsonl"],
    "import": ["db", "import", str(SHIPPED)],
    "upgrade": ["db", "upgrade"],
}


@pytest.mark.parametrize("breaks", [random_bytes, cut_in_half, emptied, a_directory])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("named", [True, False], ids=["by-option", "by-setting"])
def test_a_database_that_is_none_is_named_and_left_as_it_was(
    path: Path, breaks: Callable[[Path], None], command: str, named: bool
) -> None:
    """D73, the commands."""
    breaks(path)
    assert "mine.db" in refusal(path, *COMMANDS[command], *(["--db", str(path)] if named else []))


@pytest.mark.parametrize("breaks", [random_bytes, cut_in_half, emptied, a_directory])
def test_what_is_no_database_is_not_merged(path: Path, sound: Path, breaks: Callable[[Path], None]) -> None:
    """D73: a merge of nothing is an error, not a success without rows."""
    other = path.with_name("other.db")
    shutil.copy(sound, other)
    breaks(other)
    assert "other.db" in refusal(path, "db", "merge", str(other))


@pytest.mark.parametrize(
    "arguments",
    [TUNE, ["db", "merge", "OTHER"], ["db", "import", str(SHIPPED)], ["list"]],
    ids=["tune", "merge-into", "import-into", "list"],
)
def test_a_newer_schema_is_refused_with_both_versions(path: Path, sound: Path, arguments: list[str]) -> None:
    """D75, the commands."""
    newer(path)
    said = refusal(path, *[str(sound) if each == "OTHER" else each for each in arguments])
    assert f"schema version {TOO_NEW}, this flashtune knows up to {SCHEMA_VERSION}" in said
    assert "pip install -U flashtune" in said


def test_a_newer_schema_is_not_merged(path: Path, sound: Path) -> None:
    """D75, as what is to be merged."""
    other = path.with_name("other.db")
    shutil.copy(sound, other)
    newer(other)
    said = refusal(path, "db", "merge", str(other))
    assert f"schema version {TOO_NEW}, this flashtune knows up to {SCHEMA_VERSION}" in said


LONG = Problem(dtype="bfloat16", head_dim=128, batch=4, seqlen_q=4096, seqlen_k=4096, num_heads=16, num_heads_kv=16)
"""Tuned for the H200 by what ships."""


@pytest.mark.parametrize("breaks", [random_bytes, cut_in_half, emptied, a_directory, newer])
def test_without_the_database_the_default_serves_with_one_warning(
    path: Path, breaks: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """D73 and D75, the look-up of `attention()`; what that computes then is in attention/test_database.py."""
    monkeypatch.setattr(lookup, "_warned", threading.Lock())
    monkeypatch.setattr(lookup, "bundled", lambda capability: Shipped([], capability))
    assert explain(LONG, "h200").level == "exact"
    breaks(path)
    before = content(path)
    for _ in range(3):
        assert explain(LONG, "h200").level == "default"
    (warning,) = caplog.records
    assert (warning.levelno, warning.name) == (logging.WARNING, "flashtune")
    assert str(path) in warning.getMessage()
    assert content(path) == before


def test_which_h100_is_meant_is_said(path: Path) -> None:
    """D79: the name of a family of cards stands for one of them, and every command says for which."""
    sxm, pcie = gpu_by_alias("h100"), gpu_by_alias("h100-pcie")
    assert (sxm.num_sms, pcie.num_sms) == (132, 114)
    for asked, gpu in (("h100", sxm), ("h100-pcie", pcie)):
        for arguments in (["list"], ["explain", *PROBLEM], ["db", "digest"]):
            done = CliRunner().invoke(main, [*arguments, "--gpu", asked])
            assert done.exit_code == 0, done.output
            assert gpu.key in done.output
        for arguments in (["source", *PROBLEM], ["db", "check"], ["db", "history", *PROBLEM]):
            done = CliRunner().invoke(main, [*arguments, "--gpu", asked])
            assert done.exit_code == 0, done.output
            assert str(gpu) in done.output
    done = CliRunner().invoke(main, ["db", "export", str(path.with_name("out.jsonl")), "--gpu", "NVIDIA H200"])
    assert done.output.endswith("out.jsonl, all of h200\n")
