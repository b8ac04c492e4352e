"""The folder that stands in for a cache that can't be used: private, shared by the processes of a run, gone with it."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import flashtune
from flashtune.codegen.cache import cache_folder, private_folder
from flashtune.codegen.cache.cache_folder import (
    CUBINS,
    CUPY,
    FAILED,
    folder_for,
    read_entry,
    save_entry,
    stand_in,
    take_over,
    write_entry,
)

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions of POSIX"),
    pytest.mark.usefixtures("root"),
]


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python process of its own."""
    source = {"PYTHONPATH": str(Path(flashtune.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | source | environment, capture_output=True, text=True, timeout=120
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


STAND_IN = """
import os, sys
from flashtune.codegen.cache import cache_folder as it
it.write_entry("cubins", "a", b"1")
if os.fork() == 0:
    sys.exit()
os.wait()
assert it.read_entry("cubins", "a") == b"1"
print(it.stand_in())
"""


def test_what_stands_in_is_private_and_ends_with_its_process(tmp_path: Path) -> None:
    done = run(STAND_IN, FLASHTUNE_CACHE_DIR="/dev/null/cache", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
    assert str(tmp_path) in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_processes_share_what_stands_in_and_say_nothing_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", "/dev/null/cache")
    folder = stand_in()
    assert folder is not None
    assert mode(folder) == 0o700
    assert len(warnings(caplog)) == 1
    code = "import pathlib; from flashtune.codegen.cache import cache_folder as it; it.take_over(pathlib.Path({!r})); "
    done = run(f"{code.format(str(folder))}it.write_entry('cubins', 'a', b'1')", FLASHTUNE_CACHE_DIR="/dev/null/cache")
    assert (done.returncode, done.stderr) == (0, "")
    assert read_entry(CUBINS, "a") == b"1"


def test_nothing_stands_in_for_a_cache_that_works(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert stand_in() is None
    take_over(None)
    write_entry(CUBINS, "a", b"1")
    assert (root / CUBINS / "a").exists()
    assert not warnings(caplog)


@pytest.mark.parametrize("usable", [True, False])
def test_a_library_gets_a_folder_that_is_there(root: Path, monkeypatch: pytest.MonkeyPatch, usable: bool) -> None:
    if not usable:
        root.mkdir()
        root.chmod(0o777)
    folder = folder_for(CUPY)
    assert folder.is_dir()
    assert mode(folder) == 0o700
    assert (folder == root / CUPY) == usable


def test_systems_without_descriptors_of_folders_have_a_cache_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Windows, which keeps the folders of its users apart by itself."""
    monkeypatch.setattr(private_folder, "_BY_DESCRIPTOR", False)
    monkeypatch.delattr(os, "geteuid")
    assert read_entry(CUBINS, "a") is None
    write_entry(CUBINS, "a", b"1")
    assert read_entry(CUBINS, "a") == b"1"
    assert save_entry(FAILED, "b", b"2") == root / FAILED / "b"
    assert stand_in() is None
    (root / CUBINS / "a").unlink()
    os.mkfifo(root / CUBINS / "a")
    assert read_entry(CUBINS, "a") is None
    write_entry(CUBINS, "a", b"1")
    assert read_entry(CUBINS, "a") == b"1"


def test_without_any_folder_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", "/dev/null/cache")
    monkeypatch.setattr(cache_folder.tempfile, "tempdir", str(tmp_path / "none"))
    write_entry(CUBINS, "a", b"1")
    assert read_entry(CUBINS, "a") is None
    assert stand_in() is None
    assert len(warnings(caplog)) == 1
