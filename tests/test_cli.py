"""The command line: what it prints, what it refuses, and that it stays light."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from command_line import run as call

import flashtune
from flashtune.cli.main import main
from flashtune.codegen.gpu.table import gpu_by_alias
from flashtune.tuner.commands import noise, verify

PROBLEM = ["--seqlen", "256", "--heads", "4", "--head-dim", "64", "--dtype", "float16"]
COMMANDS = ["db", "emulate", "explain", "export-optuna", "info", "list", "noise", "source", "tune"]


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "tuned.db"))
    monkeypatch.setenv("FLASHTUNE_CACHE_DIR", str(tmp_path / "cache"))


def test_help_lists_the_commands_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from flashtune.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'cupy', 'optuna', 'sqlalchemy', 'torch', 'numpy', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(flashtune.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {command} " in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches_by_example(command: str) -> None:
    output = call(command, "--help").output
    assert "Example" in output
    assert f"flashtune {command}" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "--gpu", "h1000"], "h1000"),
        (["tune", "--gpu", "h100", "--budget", "soon"], "soon"),
        (["tune", "--gpu", "h100", "--preset", "huge"], "quick, grid, wide, llm, models"),
        (["tune", "--gpu", "h100", "--family", "nope"], "nope"),
        (["tune", "--gpu", "h100", "--sampler", "best"], "Allowed: residual, tpe, random, exhaustive, optuna:"),
        (["tune", "--gpu", "h100", "--sampler", "optuna:GridSampler"], "'optuna:GridSampler' is not known"),
        (["tune", "--gpu", "h100", *PROBLEM, "--heads-kv", "3"], "num_heads_kv=3"),
        (["explain", "--gpu", "h100", *PROBLEM, "--head-dim-v", "-8"], "head_dim_v=-8 must be at least 0"),
        (["explain", "--gpu", "h1000", *PROBLEM], "h1000"),
        (["source", "--gpu", "h100", *PROBLEM, "--config", "block_q=3"], "block_q"),
        (["source", "--gpu", "h100", *PROBLEM, "--config", "block_n=3"], "block_n='3' is not allowed"),
        (["list"], "there is no tuning database"),
        (["list", "--db", "/nowhere/at/all.db"], "/nowhere/at/all.db"),
        (["explain", "--gpu", "h100", *PROBLEM, "--db", "/nowhere/at/all.db"], "/nowhere/at/all.db"),
        (["list", "--db", "x" * 300], "too long"),
        (["list", "--gpu", ""], "GPU ''"),
        (["source", "--gpu", "h100", *PROBLEM, "--family", ""], "family ''"),
        (["source", "--gpu", "h100", *PROBLEM, "--config", "block_n=64,block_n=128"], "block_n is given twice"),
        (["tune", "--gpu", "h100", "--preset", ""], "preset ''"),
    ],
    ids=lambda value: "-".join(value)[:40] if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_code_1(arguments: list[str], message: str, tmp_path: Path) -> None:
    output = call(*arguments, code=1).output
    assert output.startswith("Error: ")
    assert message in output
    assert output.count("\n") == 1
    assert not (tmp_path / "tuned.db").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "--preset", "quick", "--seqlen", "64"], "not both"),
        (["explain", "--gpu", "h100", *PROBLEM, "--seqlen-q", "1", "--seqlen-k", "2"], "--seqlen is given beside both"),
        (["explain", "--gpu", "h100", *PROBLEM, "--head-dim-v", "0"], "--head-dim-v 0 must be at least 8"),
        (["tune", "--gpu", "h100", "--seqlen", "64"], "--head-dim, --heads"),
        (["explain", "--gpu", "h100", "--heads", "4", "--head-dim", "64"], "--seqlen"),
        (["explain", "--gpu", "h100", "--heads", "4", "--head-dim", "64", "--seqlen-q", "9"], "--seqlen-k"),
        (["explain", "--gpu", "h100", "--heads", "4", "--head-dim", "64", "--seqlen-q", "0"], "needs --seqlen-k"),
        (["list", "--db", ""], "must be a path"),
        (["tune", "--gpu", "h100", "--db", "postgresql://me:secret@host/db"], "must be a path"),
    ],
    ids=[
        "preset-and-flags",
        "three-seqlens",
        "no-width-of-v",
        "heads-missing",
        "seqlen-missing",
        "half",
        "half-that-is-0",
        "no-database",
        "address",
    ],
)
def test_misuse_says_what_is_missing_and_exits_with_2(arguments: list[str], message: str) -> None:
    assert message in call(*arguments, code=2).output


def test_a_text_file_as_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    """D73; what else is no database is in test_cli_unusable.py."""
    path = tmp_path / "notes.txt"
    path.write_text("not a database\n" * 100)
    before = path.read_bytes()
    for arguments in (["list"], ["tune", "--gpu", "h100", *PROBLEM, "--budget", "1"]):
        assert "notes.txt" in call(*arguments, "--db", str(path), code=1).output
    assert path.read_bytes() == before


def test_explain_names_level_and_evidence_without_a_gpu() -> None:
    output = call("explain", "--gpu", "a100", *PROBLEM).output
    assert "level" in output
    assert "evidence" in output
    assert "FLOP/byte" in output


@pytest.mark.parametrize(("width", "shown", "value_dim"), [("40", "d64/40", 40), ("64", "d64", 64)])
def test_values_of_another_width(width: str, shown: str, value_dim: int) -> None:
    wanted = ["--gpu", "h100", *PROBLEM[:-1], "float32", "--head-dim-v", width]
    assert f"float32 {shown} b1 s256 h4 " in call("explain", *wanted).output
    assert f"kValueDim = {value_dim};" in call("source", *wanted).output


def test_source_prints_the_kernel_of_the_given_config() -> None:
    arguments = ["source", "--gpu", "h100", *PROBLEM, "--family", "sm80_fwd", "--config", "block_n=32,num_warps=4"]
    plain = call(*arguments).output
    assert "kBlockN = 32" in plain
    assert "#line" not in plain
    assert "#line" in call(*arguments, "--lines").output


@pytest.mark.parametrize(
    ("parameters", "kernel"), [("block_m=64,block_n=32", "sm80_fwd"), ("block_n=64,q_buffers=1", "sm90_fwd")]
)
def test_without_a_family_parameters_say_which_has_them(parameters: str, kernel: str) -> None:
    long = ["--head-dim", "64", "--batch", "8", "--seqlen", "4096", "--heads", "16"]
    assert f"{kernel}(const" in call("source", "--gpu", "h200", *long, "--config", parameters).output


def test_info_shows_versions_paths_and_settings(tmp_path: Path) -> None:
    output = call("info").output
    assert str(tmp_path / "tuned.db") in output
    assert "FLASHTUNE_CACHE_DIR" in output
    assert "optuna" in output
    assert "GPUs" in output


def test_each_column_of_a_table_of_info_holds_what_its_heading_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hole in the tests: columns could be swapped, as long as all of the words were somewhere."""
    monkeypatch.setenv("COLUMNS", "1000")
    (tmp_path / "cache").mkdir()
    lines = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in call("info").output.splitlines()]

    def below(*headings: str) -> list[list[str]]:
        """The rows of the table with these headings; what does not fit a cell goes on in the next line."""
        rows: list[list[str]] = []
        for line in itertools.takewhile(bool, lines[lines.index([*headings]) + 2 :]):
            if line[0]:
                rows.append(line)
            else:
                rows[-1] = [above + more for above, more in zip(rows[-1], line, strict=True)]
        return rows

    paths = {name: (Path(value), exists) for name, value, exists in below("path", "value", "exists")}
    assert paths["database"] == (tmp_path / "tuned.db", "not yet")
    assert paths["cache"] == (tmp_path / "cache", "yes")
    assert set(paths) == {"database", "cache", "captured problems"}
    values = {name: value for name, value, _ in below("variable", "value", "meaning")}
    assert values["FLASHTUNE_DB"] == str(tmp_path / "tuned.db")
    assert values["FLASHTUNE_CACHE_DIR"] == str(tmp_path / "cache")


@pytest.mark.parametrize(
    ("command", "function", "shared"),
    [
        (["tune"], flashtune.tune, {"mode", "sampler", "seed"}),
        (["db", "verify"], verify.verify, {"sample", "seed"}),
        (["noise"], noise.noise, {"device", "finals"}),
    ],
    ids=["tune", "verify", "noise"],
)
def test_a_command_and_its_function_have_the_same_defaults(
    command: list[str], function: Callable[..., Any], shared: set[str]
) -> None:
    """A hole in the tests: the seed that is documented for one could be another in the other."""
    found: click.Command = main
    for word in command:
        assert isinstance(found, click.Group)
        found = found.get_command(click.Context(found), word) or pytest.fail(word)
    ours = {name: each.default for name, each in inspect.signature(function).parameters.items()}
    theirs = {each.name: each.default for each in found.params if each.name}
    # what stands for nothing on the command line, such as "all", is of another type
    alike = {name for name in ours if ours[name] is not None and type(ours[name]) is type(theirs.get(name))}
    assert alike == shared
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


@pytest.mark.nvrtc
def test_tune_then_list_then_explain_without_the_gpu(tmp_path: Path) -> None:
    tuned = call("tune", "--gpu", "h100", "--mode", "predict", *PROBLEM, "--budget", "2", "--family", "sm80_fwd").output
    assert "predicted, nothing was measured" in tuned
    assert "Nothing was measured" in tuned
    assert "2 configs compiled" in tuned
    assert str(tmp_path / "tuned.db") in tuned
    listed = call("list").output
    assert "Predicted, not measured" in listed
    assert "float16 d64 b1 s256 h4" in listed
    explained = call("explain", "--gpu", "h100", *PROBLEM).output
    assert "not measured" in explained


def test_the_package_runs_as_a_module() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(flashtune.__file__).parents[1])}
    version = [sys.executable, "-m", "flashtune", "--version"]
    done = subprocess.run(version, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.startswith("flashtune "), done.stderr


def test_ctrl_c_before_the_search_is_one_line_and_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flashtune.tuner.results.budget.parse_budget", interrupt)
    assert call("tune", "--gpu", "h100", code=130).output == "Interrupted.\n"


def test_the_exit_code_is_130_also_where_python_would_end_by_the_signal(tmp_path: Path) -> None:
    """An interrupt in an exec() of text, as imports do for dataclasses, outlives being caught under ``python -m``."""
    (tmp_path / "interrupted.py").write_text(
        "from flashtune.cli.main import main\n"
        "from flashtune.tuner.results import budget\n"
        "budget.parse_budget = lambda _: exec('raise KeyboardInterrupt')\n"
        "main(['tune', '--gpu', 'h100'])\n"
    )
    paths = [str(Path(flashtune.__file__).parents[1]), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted.\n")


def test_no_family_to_search_is_refused() -> None:
    problem = flashtune.Problem(
        dtype="float16", head_dim=64, batch=1, seqlen_q=64, seqlen_k=64, num_heads=4, num_heads_kv=4
    )
    with pytest.raises(flashtune.errors.InvalidInput, match="families is empty"):
        flashtune.tune(problem, "h100", families=[])


def test_rows_of_another_version_are_told_from_none(tmp_path: Path) -> None:
    old = str(Path(__file__).parent / "upgrade_assets" / "v0001.db")
    assert "5 rows can't be read by this version" in call("list", "--db", old).output
    output = call("export-optuna", str(tmp_path / "x.db"), "--db", old, "--gpu", "a100", code=1).output
    assert gpu_by_alias("a100").key in output
    output = call("export-optuna", str(tmp_path / "x.db"), "--db", old, code=1).output
    assert "can't be read by this version" in output


def test_a_problem_of_a_file_that_no_kernel_serves_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    good = {"seqlen": 64, "heads": 4, "head_dim": 64}
    path.write_text(json.dumps([good, good, {**good, "alignment": 2}, good]))
    output = call("tune", "--gpu", "h100", "--family", "sm90_fwd", "--problems", str(path), code=1).output
    assert output.startswith(f"Error: {path}, problem 3 of 4: ")
    assert output.count("\n") == 1
