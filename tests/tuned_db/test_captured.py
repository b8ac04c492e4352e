"""Captured problems: what a line holds, that processes share a file, and that nothing of it breaks a call."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import flashtune
from flashtune.codegen.problem.problem import Problem
from flashtune.errors import InvalidInput
from flashtune.tuned_db.lookup import captured
from flashtune.tuned_db.lookup.captured import Captured, capture, read_captured

KEY = "9.0a/h200/132sm/smem232448/l2-52428800/141gb"
ONE = Problem(dtype="float16", head_dim=64, batch=1, seqlen_q=8, seqlen_k=8, num_heads=1, num_heads_kv=1)
TWO = Problem(dtype="float16", head_dim=64, batch=1, seqlen_q=9, seqlen_k=9, num_heads=1, num_heads_kv=1, causal=True)


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is written to."""
    monkeypatch.setattr(captured, "_written", set())
    monkeypatch.setattr(captured, "_warned", threading.Lock())
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "new folder" / "tuned.db"))
    monkeypatch.setenv("FLASHTUNE_CAPTURE", "1")
    return tmp_path / "new folder" / "tuned.captured.jsonl"


def test_a_line_holds_gpu_and_problem_and_nothing_else(path: Path) -> None:
    capture(TWO, KEY)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {
            "gpu": KEY,
            "problem": {
                "batch": 1, "causal": True, "dtype": "float16", "head_dim": 64,
                "num_heads": 1, "num_heads_kv": 1, "seqlen_k": 9, "seqlen_q": 9,
            },
        }
    ]  # fmt: skip


def test_a_process_writes_a_problem_once(path: Path) -> None:
    for each in (ONE, TWO, ONE, ONE):
        capture(each, KEY)
    capture(ONE, "another")
    assert path.read_text().count("\n") == 3


@pytest.mark.parametrize("off", ["", "0", "off", " "])
def test_nothing_is_written_unless_it_is_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    monkeypatch.setenv("FLASHTUNE_CAPTURE", off)
    capture(ONE, KEY)
    assert not path.parent.exists()


def test_a_path_may_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_CAPTURE", str(tmp_path / "own.jsonl"))
    capture(ONE, KEY)
    assert read_captured(tmp_path / "own.jsonl") == ([Captured(KEY, ONE, 1)], 0)


def test_processes_that_share_a_file_lose_and_mix_nothing(path: Path) -> None:
    code = (
        "import dataclasses\n"
        "from flashtune.codegen.problem.problem import Problem\n"
        "from flashtune.tuned_db.lookup.captured import capture\n"
        f"base = {ONE!r}\n"
        "for length in range(1, 301):\n"
        f"    capture(dataclasses.replace(base, seqlen_k=length), {KEY!r})\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(flashtune.__file__).parents[1])}
    running = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [each.wait(60) for each in running] == [0, 0, 0]
    found, strange = read_captured(path)
    assert strange == 0
    assert [each.count for each in found] == [3] * 300


def test_the_most_wanted_comes_first_and_strange_lines_are_passed_over(path: Path) -> None:
    path.parent.mkdir()
    capture(TWO, KEY)
    capture(ONE, KEY)
    good = path.read_text().splitlines()[1]
    bad = [
        "{", "[]", "\x00" * 50, good[:-10], '{"gpu": "x"}', good.replace("float16", "float8"),
        good.replace(KEY, "\\u001b[31m"), good.replace('"seqlen_q":8', '"seqlen_q":8,"q":[1]'), "9" * 70000,
        good.replace('"dtype"', '"out_dtype":"float32","dtype"'),
    ]  # fmt: skip
    path.write_text(path.read_text() + "\n".join([good, "", *bad]) + "\n")
    assert read_captured(path) == ([Captured(KEY, ONE, 2), Captured(KEY, TWO, 1)], len(bad))


def test_nothing_captured_yet_says_what_to_set(path: Path) -> None:
    with pytest.raises(InvalidInput, match="set FLASHTUNE_CAPTURE=1"):
        read_captured(path)


def test_a_full_file_grows_no_further(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(captured, "FILE_LIMIT", 300)
    with caplog.at_level(logging.WARNING, "flashtune"):
        for length in range(1, 10):
            capture(dataclasses.replace(ONE, seqlen_k=length), KEY)
    assert 0 < path.stat().st_size <= 300
    (warning,) = caplog.records
    assert "is full" in warning.getMessage()


@pytest.mark.parametrize("kind", ["address", "directory", "pipe", "link"])
def test_a_place_that_can_not_be_written_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    place = str(tmp_path)
    if kind == "address":
        place = "postgresql://me:secret@host/db"
    elif kind == "pipe":
        place = str(tmp_path / "pipe")
        os.mkfifo(place)
    elif kind == "link":  # of somebody else, in a folder for all
        place = str(tmp_path / "link")
        (tmp_path / "mine").write_text("mine\n")
        Path(place).symlink_to("mine")
    monkeypatch.setenv("FLASHTUNE_CAPTURE", place)
    with caplog.at_level(logging.WARNING, "flashtune"):
        capture(ONE, KEY)
        capture(TWO, KEY)
    assert len(caplog.records) == 1
    assert "not captured" in caplog.text
    assert "secret" not in caplog.text
    assert kind != "link" or (tmp_path / "mine").read_text() == "mine\n"


TORN = '{"gpu":"9.0a/h2'


def test_a_torn_line_spoils_no_other(path: Path) -> None:
    """F16: the next problem was a part of that line, and its process never wrote it again."""
    capture(ONE, KEY)
    with path.open("a") as file:
        file.write(TORN)
    capture(TWO, KEY)
    capture(ONE, "another")
    assert path.read_text().count("\n") == 4
    assert read_captured(path) == ([Captured(KEY, ONE, 1), Captured(KEY, TWO, 1), Captured("another", ONE, 1)], 1)


def test_a_line_that_was_written_in_part_is_noticed_and_written_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F16: by a limit on the size of files, which cuts a write short as a full disk does."""
    resource = pytest.importorskip("resource", reason="needs limits of the system")
    capture(ONE, KEY)
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
    try:
        capture(TWO, KEY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == size + 20
    assert "only a part of a line could be written" in caplog.text
    assert str(path) in caplog.text
    capture(TWO, KEY)
    assert read_captured(path) == ([Captured(KEY, ONE, 1), Captured(KEY, TWO, 1)], 1)


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022])
def test_the_file_is_for_its_user_alone(path: Path, mask: int) -> None:
    """F16; one that the user has made for others stays so."""
    before = os.umask(mask)
    try:
        capture(ONE, KEY)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o664)
    capture(TWO, KEY)
    assert stat.S_IMODE(path.stat().st_mode) == 0o664


def test_whatever_goes_wrong_the_caller_does_not_notice(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F16."""

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(captured, "_append", fails)
    capture(ONE, KEY)
    assert "not captured" in caplog.text


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_captured_problems_are_read_from_a_file_alone(tmp_path: Path, kind: str) -> None:
    """m3."""
    path = tmp_path / "it"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(InvalidInput, match=f"^file of captured problems {path} is a {kind}, not a file$"):
        read_captured(path)


def test_more_than_is_ever_captured_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "FILE_LIMIT", 100)
    path.parent.mkdir()
    path.write_bytes(b"\n" * 201)
    with pytest.raises(InvalidInput, match="has more than 200 bytes"):
        read_captured(path)
