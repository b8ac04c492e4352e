"""A user without a home directory, or with one that can't be used, as many have in containers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashtune

PROBLEM = ["--gpu", "h100", "--seqlen", "64", "--heads", "2", "--head-dim", "64"]
COMMANDS = {
    "info": ["info"],
    "explain": ["explain", *PROBLEM],
    "source": ["source", *PROBLEM],
    "list": ["list"],
    "db info": ["db", "info"],
    "db check": ["db", "check"],
}
COMPILE = """
import numpy, flashtune
sizes = dict(head_dim=64, batch=1, seqlen_q=64, seqlen_k=64, num_heads=2, num_heads_kv=2)
problem = flashtune.Problem(dtype="float16", **sizes)
for _ in range(2):
    built, = flashtune.compile(problem, "h100")
    assert built.registers > 0
q = numpy.ones((1, 4, 1, 8), numpy.float32)
assert flashtune.attention(q, q, q).shape == q.shape
"""


def run(tmp_path: Path, *words: str, home: str, **places: str) -> subprocess.CompletedProcess[str]:
    for name in ("cwd", "tmp"):
        (tmp_path / name).mkdir()
    dropped = ("XDG_CACHE_HOME", "XDG_DATA_HOME", "FLASHTUNE_DB", "FLASHTUNE_CACHE_DIR", "CUPY_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in dropped} | {
        "HOME": home,
        "TMPDIR": str(tmp_path / "tmp"),
        "PYTHONPATH": str(Path(flashtune.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path / "cwd", env=environment | places, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    for name in ("cwd", "tmp"):
        assert list((tmp_path / name).iterdir()) == [], done.stderr
    return done


def named(tmp_path: Path) -> dict[str, str]:
    """All of flashtune's own places."""
    return {"FLASHTUNE_DB": str(tmp_path / "tuned.db"), "FLASHTUNE_CACHE_DIR": str(tmp_path / "cache")}


@pytest.mark.nvrtc
@pytest.mark.parametrize("home", ["/dev/null", "home"])
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_need_no_home_directory_and_leave_one_as_it_is(
    tmp_path: Path, sound: Path, command: str, home: str
) -> None:
    """F1: `Error: Not a directory: /dev/null/.cupy`."""
    (tmp_path / "home").mkdir()
    (tmp_path / "tuned.db").write_bytes(sound.read_bytes())
    home = str(tmp_path / home)  # an absolute one stays as it is
    done = run(tmp_path, "-m", "flashtune", *COMMANDS[command], home=home, **named(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or command == "db check"  # which says there what it is at
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.nvrtc
@pytest.mark.parametrize("cache", [True, False], ids=["named", "nowhere"])
def test_tuning_needs_no_home_directory(tmp_path: Path, cache: bool) -> None:
    """F1, C2: without a cache the processes share a private folder, and one of them says so."""
    places = named(tmp_path)
    if not cache:
        del places["FLASHTUNE_CACHE_DIR"]
    words = ("-m", "flashtune", "tune", *PROBLEM, "--mode", "predict", "--budget", "2", "--family", "fma_fwd")
    done = run(tmp_path, *words, "--dtype", "float32", "--json", home="/dev/null", **places)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["tried"], report["failed"]) == (2, {})
    assert done.stderr.count("kernel cache can't be used (/dev/null/.cache/flashtune: Not a directory") == (not cache)


@pytest.mark.nvrtc
def test_the_library_needs_no_home_directory(tmp_path: Path) -> None:
    """F1."""
    done = run(tmp_path, "-c", COMPILE, home="/dev/null")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line] == done.stderr.splitlines()[:1]
    assert "name another folder in FLASHTUNE_CACHE_DIR" in done.stderr
