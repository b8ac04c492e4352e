"""F9: where a problem got nothing, the reason is told: in the report, as tables and as JSON, and by the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tuner_fakes import FakeBench, FakeBuilder, means, problem, request, run

import flashtune
from flashtune.cli.main import main
from flashtune.codegen.compiler.render import Source
from flashtune.codegen.problem.problem import Problem
from flashtune.tuned_db.store.store import Store
from flashtune.tuner.processes.compile_pool import Built
from flashtune.tuner.results.report import Report
from flashtune.tuner.trial.failures import CommonFailure, commonest
from flashtune.tuner.trial.outcome import Outcome
from flashtune.tuner.tune import session
from flashtune.tuner.tune.predicted_run import predict_problems

ERROR = "tile.cuh(12): error: expected a ';' [with T = float]"
REFUSED = f"NVRTC 13.5 refused sm80_fwd.cu for sm_80:\n  {ERROR}\n  tile.cuh(14): error: another\nGenerated source: "


def test_the_commonest_failure_is_told_by_its_first_line(tmp_path: Path) -> None:
    kept = tmp_path / "kept.cu"
    kept.touch()
    refused = [("compile_error", f"{REFUSED}{kept}")] * 3
    assert commonest([("wrong", "off by 1"), *refused, ("wrong", "off by 2"), ("wrong", "off by 1")]) == CommonFailure(
        status="compile_error", count=3, message=ERROR, source=str(kept)
    )
    assert commonest([]) is None


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("", ""),
        ("one line", "one line"),
        ("one line:", "one line:"),
        ("heading:\n\n  \x1b[31mred\x07\n", "?[31mred?"),
        ("heading:\n" + "x" * 1000, "x" * 297 + "..."),
    ],
    ids=repr,
)
def test_any_message_is_one_line_that_can_be_shown(message: str, shown: str) -> None:
    assert commonest([("failed", message)]) == CommonFailure(status="failed", count=1, message=shown)


def test_a_source_that_is_not_there_any_more_is_not_named(tmp_path: Path) -> None:
    found = commonest([("compile_error", f"{REFUSED}{tmp_path / 'gone.cu'}")])
    assert found is not None
    assert found.source == ""


def refusing(source: Source) -> Built:
    return Built(digest=source.digest, error=f"{REFUSED}{__file__}")


def some_refused(source: Source) -> Built:
    return refusing(source) if "kCausal = true" in source.text else Built(digest=source.digest, registers=96)


def predicted(path: Path, builder: FakeBuilder, problems: list[Problem], trials: int = 6) -> Report:
    with Store.open(path) as store:
        return predict_problems(request(problems, trials), means(store, builder=builder), "")


def test_a_predicted_run_says_of_each_problem_what_failed(tmp_path: Path) -> None:
    good, bad = problem(), problem(causal=True)
    report = predicted(tmp_path / "tuned.db", FakeBuilder(some_refused), [good, bad])
    assert (report.rows[0].failure, report.rows[1].config) == (None, None)
    assert report.rows[1].failure == CommonFailure(status="compile_error", count=3, message=ERROR, source=__file__)


def test_a_measured_run_says_it_of_stored_rows_too(tmp_path: Path) -> None:
    """The second run tries none of them again."""
    path = tmp_path / "tuned.db"
    bench = FakeBench(outcome=lambda config, number: Outcome(status="compile_error", message=f"{REFUSED}{__file__}"))
    for _ in range(2):
        (row,) = run(path, [problem()], 3, bench=bench).rows
        assert (row.config, row.why) == (None, "no config was correct")
        assert row.failure is not None
        assert (row.failure.message, row.failure.source) == (ERROR, __file__)


def test_nothing_tried_is_not_called_wrong(tmp_path: Path) -> None:
    rows = run(tmp_path / "tuned.db", [problem(512), problem(1024)], 1).rows
    assert [row.why for row in rows if row.config is None] == ["no config was tried in time"]


def tune(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["tune", "--gpu", "h100", "--mode", "predict", "--budget", "6", *words])


FLAGS = ["--dtype", "float16", "--seqlen", "256", "--heads", "4", "--head-dim", "64", "--family", "sm80_fwd"]


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ProcessBuilder", lambda *_: FakeBuilder(some_refused))  # each run closes its own
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "tuned.db"))


def test_a_problem_that_got_nothing_is_exit_code_1_and_told(builder: None, tmp_path: Path) -> None:
    done = tune(tmp_path, *FLAGS, "--causal")
    assert done.exit_code == 1
    assert f"Nothing was found for 1 of 1 problems:\n  6 x compile_error: {ERROR} (source: {__file__})" in done.stdout
    assert "compiled 0 of 32, 6 failed: " in done.stderr
    done = tune(tmp_path, *FLAGS, "--causal", "--json")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert document["problems"][0]["config"] is None
    assert document["problems"][0]["failure"] == {
        "status": "compile_error", "count": 6, "message": ERROR, "source": __file__
    }  # fmt: skip


def test_one_problem_of_two_that_got_nothing_is_exit_code_1(builder: None, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    fields = {"seqlen": 256, "heads": 4, "head_dim": 64}
    mine.write_text(json.dumps([fields, {**fields, "causal": True}]))
    done = tune(tmp_path, "--family", "sm80_fwd", "--problems", str(mine), "--json")
    assert done.exit_code == 1
    first, second = json.loads(done.stdout)["problems"]
    assert (first["failure"], first["config"] is None, second["config"]) == (None, False, None)
    with Store.open(tmp_path / "tuned.db", readonly=True) as store:
        assert store.predictions(), "the other problem keeps what it got"


def test_all_problems_with_a_config_are_exit_code_0(builder: None, tmp_path: Path) -> None:
    done = tune(tmp_path, *FLAGS)
    assert done.exit_code == 0
    assert "Nothing was found" not in done.stdout


@pytest.mark.nvrtc
def test_what_the_real_compiler_refuses_is_told_with_the_source_that_is_kept(tmp_path: Path) -> None:
    """F9, as it was found: an option that NVRTC doesn't know."""
    (tmp_path / "sitecustomize.py").write_text(
        "import flashtune.codegen.compiler.nvrtc as compile\ncompile.OPTIONS = ('--no-such-option',)\n"
    )
    paths = [str(tmp_path), str(Path(flashtune.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-m", "flashtune", "tune", "--gpu", "h100", "--mode", "predict", *FLAGS, "--budget", "2"],
        capture_output=True, text=True, check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "FLASHTUNE_DB": str(tmp_path / "tuned.db"),
            "FLASHTUNE_CACHE_DIR": str(tmp_path / "cache"),
        },
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    told = done.stdout.partition("2 x compile_error: ")[2].splitlines()[0]
    assert "no-such-option" in told
    kept = Path(told.rpartition(" (source: ")[2].removesuffix(")"))
    assert "__global__" in kept.read_text("utf-8")
