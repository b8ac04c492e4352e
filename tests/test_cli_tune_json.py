"""`flashtune tune --json`: the report, its keys, and exit codes, however a run ends. The tuner itself is replaced."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import click
import pytest
from fake_tuner import H100, ONE, Tuner, call

from flashtune.codegen.families.registry import default_config
from flashtune.codegen.problem.problem import Problem
from flashtune.tuner.tune import session

pytestmark = pytest.mark.usefixtures("tuner")

REAL_TUNE = session.tune


def test_json_is_all_that_is_on_stdout_and_has_the_documented_keys(tmp_path: Path) -> None:
    from flashtune.cli.tune import json_report

    result = call("--json", "--seqlen", "256", "--heads", "4", "--head-dim", "64")
    document = json.loads(result.stdout)
    assert "half of it" in result.stderr
    documented = json_report.report_json.__doc__ or ""
    for key in [*document, *document["problems"][0]]:
        assert f"``{key}``" in documented, f"{key} is not documented"
    assert set(document) == {
        "schema", "gpu", "measured", "session", "database", "seconds", "tried", "interrupted", "stopped", "note",
        "rejected", "failed", "blocklisted", "flagged", "problems", "captured",
        "shared_config",
    }  # fmt: skip
    assert document["schema"] == "flashtune-report/1"
    assert document["gpu"] == {"name": H100.name, "key": H100.key}
    assert document["database"] == str(tmp_path / "tuned.db")
    assert (document["tried"], document["rejected"], document["captured"]) == (3, {"big": 7}, None)
    (row,) = document["problems"]
    assert Problem(**row["problem"]) == ONE
    config = default_config(ONE, H100)
    assert row["config"]["family"] == config.family
    assert type(config)(**row["config"]["parameters"]) == config
    assert (row["seconds"], row["ratio"], row["next_best"]) == (1e-3, 0.9, None)


@pytest.mark.parametrize(("changes", "code"), [({"interrupted": True}, 130), ({"stopped": "no device"}, 1)], ids=str)
@pytest.mark.parametrize("arguments", [["--json"], []], ids=["json", "tables"])
def test_exit_codes_are_the_same_with_json(
    arguments: list[str], changes: dict[str, Any], code: int, tuner: Tuner
) -> None:
    tuner.changes = changes
    result = call(*arguments, code=code)
    if arguments:
        assert json.loads(result.stdout).items() >= changes.items()


@pytest.mark.parametrize(
    "place",
    [
        "tune.problem_file.read_problem_file",
        "results.budget.parse_budget",
        "tune.session.locate",
        "tune.session.strategy",
        "tune.session.Store.open",
        "tune.session.ProcessBuilder",
        "tune.session.predict_problems",
    ],
)
def test_ctrl_c_before_there_is_a_report_is_a_document_with_all_keys(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.json"
    path.write_text('[{"seqlen": 256, "heads": 4, "head_dim": 64}]')
    arguments = ["--problems", str(path), "--mode", "predict", "--json"]
    complete = json.loads(call(*arguments).stdout)

    def interrupt(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(session, "tune", REAL_TUNE)
    monkeypatch.setattr(f"flashtune.tuner.{place}", interrupt)
    result = call(*arguments, code=130)
    document = json.loads(result.stdout)
    assert document["interrupted"] is True
    assert list(document) == list(complete)
    assert list(document["gpu"]) == list(complete["gpu"])
    assert (document["schema"], document["database"]) == (complete["schema"], complete["database"])
    if place == "tune.problem_file.read_problem_file":
        assert document["problems"] == []
    else:
        (row,), (normal,) = document["problems"], complete["problems"]
        assert list(row) == list(normal)
        assert (row["problem"], row["config"]) == (normal["problem"], None)
    assert result.stderr.endswith("Interrupted.\n")


def test_ctrl_c_while_the_document_is_written_adds_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = click.echo

    def interrupted(message: Any = None, *rest: Any, **options: Any) -> None:
        echo(message, *rest, **options)
        if str(message).startswith("{"):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(click, "echo", interrupted)
    json.loads(call("--json", code=130).stdout)


def test_an_error_leaves_stdout_empty(tuner: Tuner) -> None:
    result = call("--json", "--budget", "soon", code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("Error: budget='soon'")
