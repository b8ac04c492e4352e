"""`flashtune db history|digest|diff` as a user meets them."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from command_line import run

import flashtune
from flashtune.codegen.gpu.devices import missing_device
from flashtune.errors import InvalidInput, InvalidType, StoreError, UnknownGpu
from flashtune.tuned_db.exchange.export_file import read_export

SHIPPED = Path(__file__).parents[1] / "tuned_db" / "bundled" / "h200.jsonl"
MEASURED = read_export(SHIPPED).measurements
ROWS, PROBLEMS = len(MEASURED), len({each.problem for each in MEASURED})
PROBLEM = ["--batch", "4", "--seqlen", "4096", "--heads", "16", "--head-dim", "128", "--causal"]
H200 = ["--gpu", "h200"]

call = functools.partial(run, "db")


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "own.db"))
    return tmp_path / "own.db"


@pytest.fixture
def filled(sound: Path, own: Path) -> Path:
    shutil.copy(sound, own)
    return own


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute(statement)


class TestHistory:
    def test_sessions_and_what_wins(self, filled: Path) -> None:
        change(filled, "UPDATE measurement SET session = 'later', created = '2027-01-01T00:00:00.000Z' WHERE rowid % 2")
        first, *lines = call("history", *H200, *PROBLEM).stdout.splitlines()
        assert first == f"bfloat16 d128 b4 s4096 h16 causal on h200, {filled}: 2 sessions"
        heads = [line for line in lines if "  session " in line]
        assert ["later" in line for line in heads] == [False, True]
        assert sum(line.startswith("* ") for line in heads) == 1
        assert any(line.startswith("    best      sm90_fwd warpgroups=2") and "[" in line for line in lines)
        assert any("    card      h200, GPU-" in line for line in lines)
        assert any(line.startswith("    software  NVRTC 13.0") for line in lines)
        assert lines[-1].startswith("today (user): sm90_fwd(")
        assert "exact: final on h200" in lines[-1]

    def test_a_problem_that_was_never_measured(self, filled: Path) -> None:
        shown = call("history", *H200, "--seqlen", "64", "--heads", "3", "--head-dim", "8").stdout.splitlines()
        assert shown[0].endswith(": 0 sessions")
        assert len(shown) == 2
        assert shown[1].startswith("today: ")

    def test_misuse(self, own: Path, filled: Path) -> None:
        assert "the problem needs --head-dim" in call("history", *H200, "--heads", "3", code=2).output
        assert "'h1000' is not known" in call("history", "--gpu", "h1000", *PROBLEM, code=1).output
        assert "num_heads=16 must be a multiple" in call("history", *H200, *PROBLEM, "--heads-kv", "3", code=1).output
        own.unlink()
        assert "flashtune tune makes one" in call("history", *H200, *PROBLEM, code=1).output


class TestDigest:
    def test_it_is_one_line_and_the_same_in_python(self, filled: Path) -> None:
        result = call("digest", *H200)
        (shown,) = result.stdout.splitlines()
        assert len(shown) == 64
        assert flashtune.choices_digest(gpu="h200") == shown
        assert flashtune.choices_digest(gpu="h200", database=filled) == shown
        assert f"{PROBLEMS} problems on 9.0a/h200/" in result.stderr
        assert call("digest", "--gpu", "h100").stdout.strip() != shown

    def test_what_ships_is_enough(self, filled: Path) -> None:
        """The same rows as in the database here: the choices are the same with it and without."""
        shown = call("digest", *H200).stdout
        filled.unlink()
        result = call("digest", *H200)
        assert result.stdout == shown
        assert "no database of your own" in result.stderr
        assert not filled.exists()

    def test_problems_by_flags_and_by_file(self, filled: Path, tmp_path: Path) -> None:
        file = tmp_path / "model.json"
        file.write_text(json.dumps([{"batch": 4, "seqlen": 4096, "heads": 16, "head_dim": 128, "causal": True}]))
        by_flags, by_file = call("digest", *H200, *PROBLEM), call("digest", *H200, "--problems", str(file))
        assert by_flags.stdout == by_file.stdout
        assert "1 problem on " in by_flags.stderr
        problem = flashtune.Problem(
            dtype="bfloat16", head_dim=128, batch=4, seqlen_q=4096, seqlen_k=4096, num_heads=16, num_heads_kv=16,
            causal=True,
        )  # fmt: skip
        assert flashtune.choices_digest(problem, "h200") == by_flags.stdout.strip()
        assert flashtune.choices_digest([problem], "h200") == by_flags.stdout.strip()

    def test_misuse(self, filled: Path, tmp_path: Path) -> None:
        file = tmp_path / "model.json"
        file.write_text("[]")
        assert "not both" in call("digest", *H200, *PROBLEM, "--problems", str(file), code=2).output
        assert "model.json" in call("digest", *H200, "--problems", str(file), code=1).output
        assert "no tuning database at" in call("digest", *H200, "--db", str(tmp_path / "none.db"), code=1).output
        filled.write_bytes(b"text " * 100)
        assert "not an SQLite database" in call("digest", *H200, code=1).output
        with pytest.raises(StoreError, match="not an SQLite database"):
            flashtune.choices_digest(gpu="h200")

    def test_misuse_in_python(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidType, match=r"must be a flashtune\.Problem"):
            flashtune.choices_digest(["b4"], "h200")  # type: ignore[list-item]
        with pytest.raises(InvalidType, match="must be a Gpu, an alias"):
            flashtune.choices_digest(gpu=3)  # type: ignore[arg-type]
        with pytest.raises(InvalidType, match="database=7 must be a path"):
            flashtune.choices_digest(gpu="h200", database=7)  # type: ignore[arg-type]
        with pytest.raises(UnknownGpu, match="h1000"):
            flashtune.choices_digest(gpu="h1000")
        with pytest.raises(InvalidInput, match=r"no tuning database at .*none\.db"):
            flashtune.choices_digest(gpu="h200", database=tmp_path / "none.db")

    @pytest.mark.skipif(missing_device() is None, reason="there is a CUDA device")
    def test_without_a_gpu_one_must_be_named(self, filled: Path) -> None:
        assert "Error: " in call("digest", code=1).output


class TestDiff:
    def test_the_same_ends_with_zero(self, filled: Path) -> None:
        shown = call("diff", str(filled), str(SHIPPED)).stdout.splitlines()
        assert [line.rpartition(": ")[2] for line in shown] == [f"0 of {ROWS} measurements"] * 2 + ["0"]

    def test_what_differs_ends_with_one(self, filled: Path, tmp_path: Path) -> None:
        less = tmp_path / "less.db"
        shutil.copy(filled, less)
        change(less, "DELETE FROM measurement WHERE rowid % 7 = 0")
        shown = call("diff", str(less), str(filled), code=1).stdout
        gone = ROWS // 7
        assert f"only in {less}: 0 of {ROWS - gone} measurements" in shown
        assert f"only in {filled}: {gone} of {ROWS} measurements" in shown
        assert len([line for line in shown.splitlines() if line.startswith("> ")]) == 20
        assert f"and {gone - 20} more, which --all shows" in shown
        found = re.search(r"^other winners: (\d+)$", shown, re.MULTILINE)
        assert found is not None
        assert shown.count("\n  < ") == shown.count("\n  > ") == int(found[1]) > 0
        assert "of the default's time" in shown
        everything = call("diff", str(less), str(filled), "--all", code=1).stdout
        assert len([line for line in everything.splitlines() if line.startswith("> ")]) == gone
        back = call("diff", str(filled), str(less), code=1).stdout
        assert len([line for line in back.splitlines() if line.startswith("< ")]) == 20

    def test_a_row_that_was_altered(self, filled: Path, tmp_path: Path) -> None:
        other = tmp_path / "other.db"
        shutil.copy(filled, other)
        change(other, "UPDATE measurement SET samples = samples + 1 WHERE rowid = 1")
        assert "one of them was altered: 1\n! " in call("diff", str(filled), str(other), code=1).stdout

    def test_one_source_against_another_names_it(self, filled: Path, tmp_path: Path) -> None:
        other = tmp_path / "other.db"
        shutil.copy(filled, other)
        change(other, "UPDATE variant SET source_digest = replace(source_digest, 'a', 'b')")
        assert ", source " in call("diff", str(filled), str(other), code=1).stdout

    def test_trouble_ends_with_two(self, filled: Path, tmp_path: Path) -> None:
        none, text = tmp_path / "none.db", tmp_path / "text"
        text.write_text("hello")
        assert (
            f"there is no tuning database or export of one at {none}"
            in call("diff", str(filled), str(none), code=2).output
        )
        assert "not JSON" in call("diff", str(text), str(filled), code=2).output
        assert "Missing argument" in call("diff", str(filled), code=2).output
        data = bytearray(filled.read_bytes())
        data[100:3000] = bytes(2900)
        filled.write_bytes(data)
        assert "damaged" in call("diff", str(filled), str(SHIPPED), code=2).output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_difference_that_can_not_be_written_is_trouble_and_not_a_difference(filled: Path) -> None:
    """m4, the kind: 1 would mean that they differ."""
    environment = {**os.environ, "PYTHONPATH": str(Path(flashtune.__file__).parents[1])}
    with Path("/dev/full").open("w") as device:
        done = subprocess.run(
            [sys.executable, "-m", "flashtune", "db", "diff", filled, filled], stdout=device, stderr=subprocess.PIPE,
            text=True, check=False, env=environment,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.endswith("\nError: No space left on device: standard output\n")
